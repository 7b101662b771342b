"""Compressed sums compared with plain ones: error bounds, bytes, residuals, and DistributedDataParallel with many
buckets."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_fresh, run_ranks
from torch import nn

pytestmark = beyond_gloo("compressed sums")


def addends(ranks: int, size: int) -> list[torch.Tensor]:
    every = []
    for rank in range(ranks):
        torch.manual_seed(rank)
        every.append(torch.randn(size) * torch.logspace(-3, 3, max(size, 1))[:size])
    return every


def bounds(ctx: Context, size: int) -> None:
    import torch_sagellm

    every = addends(ctx.world_size, size)
    exact = torch.stack(every).double().sum(0)
    magnitude = torch.stack(every).double().abs().sum(0)
    for how, relative in {"fp16": 2.0**-11, "bf16": 2.0**-8}.items():
        stats = torch_sagellm.CompressionStats()
        found = torch_sagellm.compressed_all_reduce(every[ctx.rank].clone(), how, stats=stats)
        assert ((found - exact).abs() <= relative * (magnitude + exact.abs()) * 1.01 + 1e-7).all(), how
        assert (stats.plain_bytes, stats.sent_bytes, stats.calls) == (size * 4, size * 2, 1)
        assert stats.saved_bytes == size * 2
    found = torch_sagellm.compressed_all_reduce(every[ctx.rank].clone(), torch_sagellm.Int8(64), op="avg")
    for begin in range(0, size, 64):
        part = slice(begin, min(begin + 64, size))
        largest = [float(each[part].abs().max()) for each in every]
        allowed = sum(largest) / 254
        allowed += (float(exact[part].abs().max()) + allowed) / 254
        off = float((found[part] * ctx.world_size - exact[part]).abs().max())
        assert off <= allowed * 1.01 + 1e-7, (begin, off, allowed)
    same = found.clone()
    dist.broadcast(same, 0)
    assert torch.equal(same, found), "every rank has the same sum"
    column = torch.stack(every, 1)[:, ctx.rank]
    assert torch_sagellm.compressed_all_reduce(column, "fp16") is column, "strided, in place"
    assert ((column - exact).abs() <= 2.0**-11 * (magnitude + exact.abs()) * 1.01 + 1e-7).all()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("size", [0, 1, 64, 1000, 5000])
def test_errors_stay_within_their_bounds_and_ranks_agree(world_size: int, size: int) -> None:
    run_ranks(bounds, world_size, size)


def kept(ctx: Context) -> None:
    import torch_sagellm

    method = torch_sagellm.TopK(0.1)
    total, plain = torch.zeros(100), torch.zeros(100)
    for step in range(20):
        torch.manual_seed(10 * step + ctx.rank)
        addend = torch.randn(100)
        exact = addend.clone()
        dist.all_reduce(exact)
        plain += exact
        total += torch_sagellm.compressed_all_reduce(addend, method, key="one")
    left = method.residual("one")
    assert left is not None and method.residual("other") is None
    rest = left.clone()
    dist.all_reduce(rest)
    torch.testing.assert_close(total + rest, plain, rtol=1e-4, atol=1e-4)
    whole = torch_sagellm.compressed_all_reduce(torch.arange(5.0), torch_sagellm.TopK(1.0), key="whole")
    assert whole.tolist() == (torch.arange(5.0) * ctx.world_size).tolist()
    stats = torch_sagellm.CompressionStats()
    torch_sagellm.compressed_all_reduce(torch.ones(1000), torch_sagellm.TopK(0.01), key="many", stats=stats)
    assert stats.sent_bytes == 10 * (4 + 4) * ctx.world_size // 2
    for text, call in {
        "expected one of fp16": lambda: torch_sagellm.compressed_all_reduce(torch.ones(1), "zip"),
        "op='max'": lambda: torch_sagellm.compressed_all_reduce(torch.ones(1), "fp16", op="max"),
        "expected floats": lambda: torch_sagellm.compressed_all_reduce(torch.ones(1, dtype=torch.int32), "fp16"),
        "ratio is 0": lambda: torch_sagellm.TopK(0),
        "block is 0": lambda: torch_sagellm.Int8(0),
        "dtype is torch.float32": lambda: torch_sagellm.Half(torch.float32),
    }.items():
        assert text in expect_raises(ValueError, call)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_top_k_leaves_out_comes_later(world_size: int) -> None:
    run_ranks(kept, world_size)


def named(ctx: Context) -> None:
    """Two tensors of one shape, keys of all kinds, a missing key, and a key that another tensor uses."""
    import torch_sagellm

    comm = torch_sagellm.create_comm_backend("cpu")
    top = torch_sagellm.TopK(0.01)
    later: dict[str, Any] = {"async_op": True, "compress": top}
    for text, call in {
        "topk keeps what it leaves out": lambda: torch_sagellm.compressed_all_reduce(torch.ones(100), top),
        "expected key=parameter": lambda: comm.all_reduce(torch.ones(100), compress="topk"),
        "needs a key": lambda: comm.all_reduce(torch.ones(100), **later),
        "'topk' keeps nothing": lambda: torch_sagellm.compressed_all_reduce(torch.ones(100), "topk", key="a"),
    }.items():
        assert text in expect_raises(ValueError, call)
    for _ in range(2):
        alone = torch_sagellm.compressed_all_reduce(torch.arange(100.0), "topk")
        assert alone.count_nonzero() == 1 and alone[99] == 99 * ctx.world_size, "one call alone"
    parameters = [nn.Parameter(torch.zeros(100)) for _ in range(2)]
    for keys in (parameters, ("full", "single"), (0, 1)):
        total = {key: torch.zeros(100) for key in (0, 1)}
        for _ in range(20):
            for place, each in enumerate((torch.arange(1.0, 101.0), torch.arange(100) == 0)):
                total[place] += comm.all_reduce(each * 1000.0, compress="topk", key=keys[place])
        assert not total[1][1:].any(), "no remainder of another tensor of this shape"
        assert total[1][0] == 20 * 1000 * ctx.world_size and total[0].count_nonzero() > 1
    text = expect_raises(ValueError, lambda: comm.all_reduce(torch.ones(7), compress="topk", key="full"))
    assert "key 'full' has 7 elements, expected the 100 of an earlier call" in text
    both = {"compress": "topk", "key": tuple(parameters)}
    text = expect_raises(ValueError, lambda more=both: comm.all_reduce(torch.ones(7), **more))
    assert "the parameters of key have 200 elements, and the tensor 7" in text
    comm.all_reduce(torch.ones(100), compress=top, key=parameters[0])
    left = top.residual(parameters[0])
    assert left is not None and left.count_nonzero() == 99
    ended = weakref.ref(left)
    del left, parameters, keys, both
    gc.collect()
    assert ended() is None, "the remainder goes with its parameter"
    comm.barrier()


def test_top_k_knows_a_tensor_by_its_key() -> None:
    """A residual is never added to a tensor with another key, whatever its shape."""
    run_ranks(named, 2)


def retried(ctx: Context) -> None:
    """A call whose exchange fails changes neither the tensor nor the residual, so that the call can be repeated."""
    import torch_sagellm

    top, gradient = torch_sagellm.TopK(0.1), torch.arange(1.0, 101.0)
    found = torch_sagellm.compressed_all_reduce(gradient.clone(), top, key="a")
    first = top.residual("a")
    assert first is not None
    before = first.clone()
    gather, calls = dist.all_gather_into_tensor, []

    def fails(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no more")
        return gather(*arguments, **named)

    given = gradient.clone()
    dist.all_gather_into_tensor = fails
    try:
        text = expect_raises(RuntimeError, lambda: torch_sagellm.compressed_all_reduce(given, top, op="avg", key="a"))
    finally:
        dist.all_gather_into_tensor = gather
    assert text == "no more" and torch.equal(given, gradient)
    after = top.residual("a")
    assert after is not None and torch.equal(after, before)
    found += torch_sagellm.compressed_all_reduce(given, top, key="a")
    rest = top.residual("a")
    assert rest is not None
    torch.testing.assert_close(found + ctx.world_size * rest, 2.0 * ctx.world_size * gradient)


def test_a_call_that_fails_keeps_no_remainder() -> None:
    run_ranks(retried, 2)


def largest(ctx: Context) -> None:
    """The average of numbers whose sum exceeds the wire format stays finite, within the format's error."""
    import torch_sagellm

    for dtype, how, error in (
        (torch.float32, "fp16", 0.0),
        (torch.float16, "fp16", 0.0),
        (torch.float32, "bf16", 2.0**-7),
        (torch.bfloat16, "bf16", 2.0**-7),
        (torch.float32, torch_sagellm.Int8(64), 2.0**-6),
        (torch.float16, torch_sagellm.Int8(64), 2.0**-6),
        (torch.bfloat16, torch_sagellm.Int8(64), 2.0**-6),
        (torch.float64, torch_sagellm.TopK(1.0), 2.0**-20),
        (torch.float32, torch_sagellm.TopK(1.0), 2.0**-20),
        (torch.float16, torch_sagellm.TopK(1.0), 2.0**-9),
        (torch.bfloat16, torch_sagellm.TopK(1.0), 2.0**-6),
    ):
        carried = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(str(how), dtype)
        most = min(torch.finfo(dtype).max, torch.finfo(carried).max) * (1 - error)
        tensor = torch.full((100,), most, dtype=dtype)
        tensor[50:] = -tensor[50:]
        given = tensor.clone()
        found = torch_sagellm.compressed_all_reduce(tensor, how, op="avg", key=dtype)
        assert found.isfinite().all(), (dtype, how, found)
        torch.testing.assert_close(found, given, rtol=2 * error, atol=0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_average_is_finite_where_its_addends_are(world_size: int) -> None:
    run_ranks(largest, world_size)


def largest_alone(ctx: Context) -> None:
    ctx.init()
    largest(ctx)


def test_an_average_is_finite_on_eight_ranks() -> None:
    run_fresh(largest_alone, 8)


#: Formats that send sums in fewer bytes. In `mixed` one rank uses another format or another op than its peers.
FORMATS: dict[str, Callable[[], Any]] = {
    "fp16": lambda: "fp16",
    "bf16": lambda: "bf16",
    "int8": lambda: "int8",
    "other blocks": lambda: torch_sagellm_().Int8(64),
    "topk": lambda: torch_sagellm_().TopK(0.01),
    "other ratio": lambda: torch_sagellm_().TopK(0.5),
    "auto": lambda: "auto",
}


def torch_sagellm_() -> Any:
    import torch_sagellm

    return torch_sagellm


def mixed(ctx: Context, names: list[str]) -> dict[str, str]:
    """Each rank in turn calls a different op or format from the others. Returns how each pair ended."""
    from net import enter

    from torch_sagellm.api.formats import hosts_of

    calls = [(name, op) for name in FORMATS for op in ("sum", "avg")]
    pairs = list(itertools.combinations(calls, 2))
    if names:
        enter(names[ctx.rank // 2])
        ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size))
        pairs = [(one, other) for one, other in pairs for _ in range(4) if one[0] == other[0]]  # each rank in turn
    else:
        ctx.init()
    found = {}
    for number, (one, other) in enumerate(pairs):
        group: Any = dist.new_group()
        hosts_of(group)
        name, op = other if ctx.rank == number % ctx.world_size else one
        tensor, kept = torch.full((1000,), ctx.rank + 1.0), FORMATS[name]()
        try:
            torch_sagellm_().compressed_all_reduce(
                tensor, kept, op=op, group=group, key=None if isinstance(kept, str) else 1
            )
            text = "no error"
        except RuntimeError as error:
            text = str(error)
        assert torch.equal(tensor, torch.full((1000,), ctx.rank + 1.0)) or text == "no error", (one, other, tensor)
        found[f"{one} and {other} on rank {number % ctx.world_size}"] = text
        dist.barrier()
    return found


def every_rank_is_told(found: list[dict[str, str]]) -> None:
    assert len(found[0]) in (91, 28)
    for case in found[0]:
        texts = [each[case] for each in found]
        assert "no error" not in texts, (case, texts)


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_call_another_op_or_format_are_refused() -> None:
    """Refused as a plain all_reduce would be; the tensor is unchanged. A sum and an average send the same bytes."""
    every_rank_is_told(run_fresh(mixed, 3, [], timeout=120))


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_call_another_op_or_format_over_hosts_are_refused(hosts: list[str]) -> None:
    every_rank_is_told(run_fresh(mixed, 4, hosts, env={"GLOO_SOCKET_IFNAME": "eth0"}, timeout=200))


def served_by_gloo(ctx: Context) -> None:
    import torch_sagellm

    for group in (dist.new_group(backend="gloo"), dist.new_group(pg_options=torch_sagellm.Options(engine="delegate"))):
        for how, top in (("fp16", 60000.0), ("bf16", 1e38), ("int8", 1e38)):
            found = torch_sagellm.compressed_all_reduce(torch.full((64,), top), how, op="avg", group=group)
            torch.testing.assert_close(found, torch.full((64,), top), rtol=2.0**-6, atol=0)
        dist.destroy_process_group(group)


@pytest.mark.filterwarnings("ignore")
def test_averages_over_a_group_that_gloo_serves() -> None:
    """gloo has no ReduceOp.AVG, so the sum must be divided."""
    run_ranks(served_by_gloo, 2)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Returns the mean of all ranks' losses, exchanged without compression."""
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    return float(shown) / dist.get_world_size()


def weights_are_equal(net: nn.Module) -> None:
    """Compares this rank's weights with those of rank 0, bit for bit."""
    for parameter in net.parameters():
        same = parameter.detach().clone()
        dist.broadcast(same, 0)
        assert torch.equal(same, parameter), "the ranks' weights stay equal"


def train(ctx: Context, how: str) -> list[float]:
    import torch_sagellm

    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.01)
    hook: torch_sagellm.CompressionHook | None = None
    if how == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        hook = torch_sagellm.PowerSGDHook(PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=3))
    elif how:
        hook = torch_sagellm.CompressionHook(torch_sagellm.TopK(0.2) if how == "topk" else how)
    if hook is not None:
        net.register_comm_hook(None, hook)
    torch.manual_seed(5)
    inputs = torch.randn(64, 32)
    targets = inputs.sum(1, keepdim=True).tanh()
    mine = slice(ctx.rank, None, ctx.world_size)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (net(inputs[mine]) - targets[mine]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    weights_are_equal(net)
    if hook is not None:
        assert hook.stats.calls > 60 * 2, hook.stats
        assert hook.stats.saved_bytes > 0
        weights = sum(parameter.nbytes for parameter in net.parameters())
        assert hook.stats.plain_bytes == 60 * weights, "every gradient of every step"
        if how in ("fp16", "bf16", "powersgd"):  # the other formats use other operations too
            travelled = torch_sagellm.get_stats(group=hook.group)["ops"]["all_reduce"]["bytes"]
            assert hook.stats.sent_bytes == travelled, (hook.stats, travelled)
        hook.close()
    return losses


def converges(ctx: Context, how: str) -> tuple[list[float], list[float]]:
    return train(ctx, ""), train(ctx, how)


@pytest.mark.parametrize("how", ["fp16", "bf16", "int8", "topk", "powersgd"])
def test_training_converges_with_several_buckets(how: str) -> None:
    for plain, compressed in run_ranks(converges, 2, how):
        assert plain[-1] < 0.2 * plain[0], "the model learns"
        assert math.isclose(compressed[0], plain[0], rel_tol=1e-3), "the first step begins with the same weights"
        assert compressed[-1] < 1.5 * plain[-1] + 0.02, (how, plain[-1], compressed[-1])


class Watched:
    """Records which parameters each bucket of a hook had, and in how many orders."""

    def __init__(self, hook: Any) -> None:
        self.hook, self.average = hook, hook._average
        self.buckets: dict[int, list[nn.Parameter]] = {}
        self.orders: set[tuple[int, ...]] = set()
        hook._average = self.note

    def note(self, bucket: dist.GradBucket) -> torch.Tensor:
        order = bucket.parameters()
        self.buckets[bucket.index()] = order
        self.orders.add((bucket.index(), *(id(each) for each in order)))
        return self.average(bucket)

    def left(self) -> dict[nn.Parameter, torch.Tensor]:
        """Returns for each parameter the part of its gradient that this rank has not sent yet."""
        if not hasattr(self.hook, "state"):
            known = [each for parameters in self.buckets.values() for each in parameters]
            return {each: self.hook.compression.residual(each) for each in known}
        found = {}  # PowerSGD keeps its errors by bucket number
        for index, parameters in self.buckets.items():
            sizes = [each.numel() for each in parameters]
            found.update(zip(parameters, self.hook.state.error_dict[index].split(sizes), strict=True))
        return found


def keep_books(ctx: Context, how: str, bucket_mb: float) -> int:
    import torch_sagellm

    torch.manual_seed(3)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16, bias=False), nn.Tanh())))
    wrapped = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
    if how == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        hook: Any = torch_sagellm.PowerSGDHook(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2))
    else:
        hook = torch_sagellm.CompressionHook(torch_sagellm.TopK(0.1) if how == "topk object" else "topk")
    watched = Watched(hook)
    wrapped.register_comm_hook(None, hook)
    sent, plain = ({name: torch.zeros_like(each) for name, each in net.named_parameters()} for _ in range(2))
    for step in range(12):
        torch.manual_seed(100 * step + ctx.rank)
        inputs = torch.randn(8, 16)
        wrapped.zero_grad()
        wrapped(inputs).square().sum().backward()
        exact = torch.autograd.grad(net(inputs).square().sum(), list(net.parameters()))
        for (name, each), gradient in zip(net.named_parameters(), exact, strict=True):
            assert each.grad is not None
            sent[name] += each.grad
            plain[name] += gradient
    left = watched.left()
    for name, each in net.named_parameters():
        rest = left[each].detach().clone().view_as(each)
        dist.all_reduce(rest, op=dist.ReduceOp.AVG)
        dist.all_reduce(plain[name], op=dist.ReduceOp.AVG)
        assert rest.any(), f"{name}: something is left, or the test shows nothing"
        torch.testing.assert_close(sent[name] + rest, plain[name], rtol=1e-3, atol=1e-3)
    orders = len(watched.orders) - len(watched.buckets)
    hook.close()
    return orders


@pytest.mark.parametrize("how", ["topk", "topk object", "powersgd"])
@pytest.mark.parametrize("bucket_mb", [25, 0.003], ids=["one bucket", "several buckets"])
def test_what_is_left_out_of_a_parameter_comes_later_to_that_parameter(how: str, bucket_mb: float) -> None:
    """From the second step on DistributedDataParallel fills its buckets in a different order. A residual must stay with
    its parameter."""
    for orders in run_ranks(keep_books, 2, how, bucket_mb):
        assert orders > 0, "the buckets have been filled anew"


class BucketOnADevice:
    def buffer(self) -> torch.Tensor:
        return torch.empty(4, device="meta")


def on_a_device(ctx: Context) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    import torch_sagellm

    for hook in (torch_sagellm.CompressionHook("fp16"), torch_sagellm.PowerSGDHook(PowerSGDState(None))):
        text = expect_raises(ValueError, lambda hook=hook: hook(None, BucketOnADevice()))
        assert hook.__name__ in text and "the gradients are on meta, expected cpu" in text
        assert hook.stats.calls == 0
        hook.close()


def test_gradients_on_a_device_are_refused() -> None:
    run_ranks(on_a_device, 2)


def demo() -> tuple[Any, torch.Tensor, nn.Module]:
    """Returns the demo's program, the text that it learns, and a small one of its models."""
    from torch_sagellm.demos import train_gpt as program

    torch.manual_seed(3)
    net = program.Gpt(program.Config(layers=2, dim=48, heads=4, context=32))
    return program, program.read_standard_library(200_000), net


STEPS = 40


def learn(ctx: Context, how: str) -> list[float]:
    """Losses of the demo's model, averaged over the ranks. `how` is "", a format for DDP's hook, or "call " and a
    format."""
    import torch_sagellm

    program, text, net = demo()
    by_call = how.startswith("call ")
    hook: torch_sagellm.CompressionHook | None = None
    comm = torch_sagellm.create_comm_backend("cpu") if by_call else None
    forward: Any = net
    if not by_call:
        forward = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.05)
        if how == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

            hook = torch_sagellm.PowerSGDHook(PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=3))
        elif how:
            hook = torch_sagellm.CompressionHook(torch_sagellm.TopK(0.2) if how == "topk" else how)
        if hook is not None:
            forward.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        data, targets = program.draw_batch(text, 8, 32, seed=1000 * step + ctx.rank)
        optimizer.zero_grad()
        loss = forward(data, targets)
        loss.backward()
        if comm is not None:
            method = how.removeprefix("call ")
            gradients = [each.grad for each in net.parameters() if each.grad is not None]
            futures = [
                comm.all_reduce(each, "avg", async_op=True, compress=method, key=number)
                for number, each in enumerate(gradients)
            ]
            for future in futures:
                future.wait()
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    weights_are_equal(net)
    if hook is not None:
        assert hook.stats.calls >= 3 * STEPS, f"several buckets: {hook.stats}"
        hook.close()
    return losses


def learns(ctx: Context, hows: list[str]) -> dict[str, list[float]]:
    return {how: learn(ctx, how) for how in hows}


def test_the_demo_learns_with_every_wire_format_and_several_buckets() -> None:
    """After 40 steps every format reaches about the loss of a run without compression. The text is the standard
    library, byte by byte, so the first loss is about ln(256)."""
    hows = ["", "fp16", "bf16", "int8", "topk", "powersgd", "call bf16", "call int8", "call topk"]
    for found in run_ranks(learns, 2, hows, timeout=180):
        ends = {how: sum(losses[-5:]) / 5 for how, losses in found.items()}
        assert ends[""] < 0.65 * found[""][0], f"the model learns: {ends}"
        for how, end in ends.items():
            assert math.isclose(found[how][0], found[""][0], rel_tol=1e-4), (
                "the first step begins with the same weights"
            )
            # "topk" by name sends one percent of the elements, so it learns more slowly.
            assert end < ends[""] + (0.9 if how == "call topk" else 0.15), ends


def crossing(ctx: Context, names: list[str], first: int) -> dict[str, tuple[float, float]]:
    """Returns for each format the bytes that left this host as a share of the tensor's bytes, and the share that the
    statistics report. ``first``: the number of ranks of the first host."""
    from net import INTERFACE, enter

    import torch_sagellm

    enter(names[int(ctx.rank >= first)])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size))
    size = 1 << 19
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(ctx.world_size)]
    exact = torch.stack(tensors).sum(0)
    host_sums = [torch.stack(tensors[:first]).sum(0), torch.stack(tensors[first:]).sum(0)]

    def left_host() -> int:
        with open("/proc/net/dev") as lines:
            (line,) = (line for line in lines if line.strip().startswith(f"{INTERFACE}:"))
        return int(line.split(":")[1].split()[8])

    found = {}
    for name, how in {"int8": "int8", "topk": torch_sagellm.TopK(0.01), "auto": "auto"}.items():
        for _ in range(2):  # the first call creates groups
            stats = torch_sagellm.CompressionStats()
            mine = tensors[ctx.rank].clone()
            dist.barrier()
            before = left_host()
            torch_sagellm.compressed_all_reduce(mine, how, key=name if name == "topk" else None, stats=stats)
            dist.barrier()
            found[name] = ((left_host() - before) / mine.nbytes, stats.sent_bytes / stats.plain_bytes)
        every = [torch.empty_like(mine) for _ in range(ctx.world_size)]
        dist.all_gather(every, mine)
        assert all(torch.equal(each, mine) for each in every), "equal on all ranks"
        if name != "topk":  # an addend is the sum of one host
            m = max(float(each.abs().max()) for each in (*host_sums, exact))
            assert float((mine - exact).abs().max()) <= 3 * m / 254 * 1.02
        else:
            # The results of both calls plus all ranks' residuals are twice the exact sum.
            left = how.residual("topk").clone()
            dist.all_reduce(left)
            first = torch.zeros_like(mine)
            again = torch_sagellm.TopK(0.01)
            torch_sagellm.compressed_all_reduce(first.copy_(tensors[ctx.rank]), again, key=0)
            torch.testing.assert_close(first + mine + left, 2 * exact, rtol=1e-4, atol=1e-3)
    dist.barrier()
    dist.destroy_process_group()
    return found


def sum_and_average(ctx: Context, names: list[str], caller: int) -> str:
    """One rank asks for an average and the others for a sum."""
    from net import enter

    import torch_sagellm

    enter(names[int(ctx.rank >= 3)])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size))
    tensor = torch.ones(5)
    op = "avg" if ctx.rank == caller else "sum"
    said = expect_raises(RuntimeError, lambda: torch_sagellm.compressed_all_reduce(tensor, "int8", op=op))
    assert tensor.tolist() == [1.0] * 5
    for count in (0, 1, 5):  # fewer elements than parts, too
        for how in ("int8", torch_sagellm.TopK(1.0)):
            found = torch_sagellm.compressed_all_reduce(torch.ones(count), how, key=count, op="avg")
            torch.testing.assert_close(found, torch.ones(count))
    stats = torch_sagellm.CompressionStats()
    torch_sagellm.compressed_all_reduce(torch.ones(1000), "auto", stats=stats)
    assert stats.sent_bytes == stats.plain_bytes, "small tensors are not compressed"
    dist.barrier(group=dist.new_group())  # torch names it by the number of groups that the process has made
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("caller", [0, 2, 4])
def test_a_sum_and_an_average_are_told_apart_on_hosts_of_different_sizes(hosts: list[str], caller: int) -> None:
    for said in run_fresh(sum_and_average, 5, hosts, caller, env={"GLOO_SOCKET_IFNAME": "eth0"}, timeout=120):
        assert "some ranks called it with op='sum' and others with op='avg'" in said


@pytest.mark.parametrize("ranks", [(3, 3), (4, 2), (3, 1)], ids=str)
def test_a_host_sends_as_few_bytes_however_many_ranks_it_has(hosts: list[str], ranks: tuple[int, int]) -> None:
    """Compares with the counters of the link. TCP and the barriers add a few percent."""
    for found in run_fresh(crossing, sum(ranks), hosts, ranks[0], env={"GLOO_SOCKET_IFNAME": "eth0"}, timeout=120):
        for name, most in (("int8", 0.26), ("topk", 0.0205), ("auto", 0.26)):
            wire, told = found[name]
            assert told <= most and told * 0.99 <= wire <= told * 1.06 + 0.006, (name, wire, told)


def alone(ctx: Context) -> None:
    import torch_sagellm

    stats = torch_sagellm.CompressionStats()
    exact = torch.full((1000,), 0.1) * (ctx.rank + 1)
    total = sum(0.1 * (rank + 1) for rank in range(ctx.world_size))
    found = torch_sagellm.compressed_all_reduce(exact, "auto", stats=stats)
    torch.testing.assert_close(found, torch.full((1000,), total))
    average = torch_sagellm.compressed_all_reduce(torch.full((8,), 3.0), "auto", op="avg")
    assert average.tolist() == [3.0] * 8 and stats.saved_bytes == 0


def test_auto_does_not_compress_on_one_host() -> None:
    run_ranks(alone, 2)


def as_option(ctx: Context) -> None:
    import torch_sagellm

    comm = torch_sagellm.create_comm_backend("cpu")
    before = comm.get_stats()["compression"]
    every = addends(ctx.world_size, 5000)
    mine = every[ctx.rank]
    for how in ("bf16", "fp16", "int8", torch_sagellm.Int8(64)):
        one, later = mine.clone(), mine.clone()
        assert comm.all_reduce(one, compress=how) is one
        future = comm.all_reduce(later, "mean", async_op=True, compress=how)
        # Between the call and its wait, ranks may call other operations, each rank in its own order.
        comm.all_reduce(torch.ones(3))
        assert future.wait() is later and future.done()
        assert torch.equal(one, torch_sagellm.compressed_all_reduce(mine.clone(), how)), how
        assert torch.equal(later, torch_sagellm.compressed_all_reduce(mine.clone(), how, op="mean")), how
    chained = comm.all_reduce(torch.ones(8), async_op=True, compress="fp16").then(lambda ended: ended.value() + 1)
    assert chained.wait().tolist() == [ctx.world_size + 1.0] * 8
    counted = comm.get_stats()["compression"]
    assert counted["calls"] - before["calls"] == 9
    assert counted["saved_bytes"] == counted["plain_bytes"] - counted["sent_bytes"] > before["saved_bytes"]
    left = torch_sagellm.TopK(0.25)
    total = torch.zeros(40)
    for _ in range(8):
        total += comm.all_reduce(torch.arange(40.0), compress=left, key="grad")
    rest = left.residual("grad")
    assert rest is not None
    torch.testing.assert_close(total + ctx.world_size * rest, 8.0 * ctx.world_size * torch.arange(40.0))
    named = torch.zeros(400)
    for _ in range(300):  # the key keeps the residual between calls, and each call sends one hundredth
        named += comm.all_reduce(torch.ones(400), compress="topk", key="named")
    assert (named > 0).all(), "what was left out comes later, also where only the name is given"
    for words, call in {
        "expected one of fp16": lambda: comm.all_reduce(torch.ones(2), compress="zip"),
        "op='max'": lambda: comm.all_reduce(torch.ones(2), "max", compress="fp16"),
        "expected floats": lambda: comm.all_reduce(torch.ones(2).int(), compress="fp16"),
        "timeout does not go": lambda: comm.all_reduce(torch.ones(2), timeout=1, compress="fp16"),
    }.items():
        assert words in expect_raises(ValueError, call)
    comm.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_compression_is_an_option_of_all_reduce(world_size: int) -> None:
    run_ranks(as_option, world_size)
