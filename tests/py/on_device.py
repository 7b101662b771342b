"""Test bodies for any device: `tests/py/device` runs them on a simulated one, `tests/py/gpu` on a card.

A body gets the context and torch's name of the device, and runs in a default group that serves the device. The kernels
of a simulated device are slow by themselves; on a card `late` delays the stream. The bodies of host staging are in
`tests/py/device`, because they need the controls of the simulated device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Context, expect_raises

#: A list for `fused_all_reduce`: sizes and types. One tensor has no elements.
LIST = [(5, torch.float32), (3000, torch.int64), (0, torch.float32), (70, torch.float32)]
#: The types that some collective combines.
REDUCED = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
#: Cycles of a card's clock for which `late` keeps a stream busy: some tens of milliseconds.
LATE = 60_000_000
#: With these variables several ranks can use one card (NCCL 2.30.3 and newer), and matrix products give the same bits
#: each time.
SHARED_CARD = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_RAS_ENABLE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def late(device: str) -> None:
    """Keeps the current stream busy for a while, so that an operation that does not wait for it gives wrong results."""
    if device == "cuda":
        torch.cuda._sleep(LATE)


def total(n: int) -> float:
    """Returns the sum over all ranks if each contributes its number plus one."""
    return n * (n + 1) / 2


def backend_of(kind: str = "cpu") -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device(kind))


def number() -> int:
    return int(backend_of()._get_sequence_number_for_group())


def holds(tensor: torch.Tensor, value: float) -> None:
    found = tensor.cpu()
    assert (found == value).all(), (value, found.unique())


def counted(op: str, calls: int) -> None:
    """Waits until the statistics have counted `calls` ended operations of the kind `op`."""
    import torch_sagellm

    deadline = time.monotonic() + 20
    while torch_sagellm.get_stats()[f"{op}_count"] < calls:
        assert time.monotonic() < deadline, torch_sagellm.get_stats()
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------ the calls


def made(rank: int, count: int, device: str, seed: int = 0) -> torch.Tensor:
    """Returns the numbers of one rank. On the device slow kernels compute them."""
    base = torch.arange(count, dtype=torch.float32).remainder(97).div(7).add(rank + 10 * seed)
    if device == "cpu":
        return base.mul(3)
    return base.to(device).mul_(3)


def empty(count: int, device: str) -> torch.Tensor:
    """Returns memory to which a slow kernel still writes."""
    return torch.empty(count, device=device).fill_(-1)


def calls(n: int, rank: int, device: str) -> dict[str, Callable[[bool], tuple[Any, list[torch.Tensor]]]]:
    """Returns every collective, as a function of `async_op` that returns the Work and the results."""

    def each(function: Callable[[bool], Any]) -> Callable[[bool], tuple[Any, list[torch.Tensor]]]:
        return function

    def all_reduce(a: bool, op: Any = dist.ReduceOp.SUM, count: int = 1000) -> Any:
        t = made(rank, count, device)
        return dist.all_reduce(t, op, async_op=a), [t]

    def broadcast(a: bool, root: int) -> Any:
        t = made(rank, 700, device)
        return dist.broadcast(t, root, async_op=a), [t]

    def reduce(a: bool) -> Any:
        t = made(rank, 700, device)
        return dist.reduce(t, n - 1, async_op=a), [t] if rank == n - 1 else []

    def all_gather(a: bool, counts: list[int]) -> Any:
        outs = [empty(count, device) for count in counts]
        return dist.all_gather(outs, made(rank, counts[rank], device), async_op=a), outs

    def all_gather_into_tensor(a: bool) -> Any:
        out = empty(300 * n, device)
        return dist.all_gather_into_tensor(out, made(rank, 300, device), async_op=a), [out]

    def in_place(a: bool) -> Any:
        out = empty(300 * n, device)
        part = out[300 * rank : 300 * (rank + 1)]
        part.copy_(made(rank, 300, device))
        return dist.all_gather_into_tensor(out, part, async_op=a), [out]

    def gather(a: bool) -> Any:
        outs = [empty(200, device) for _ in range(n)] if rank == 0 else None
        return dist.gather(made(rank, 200, device), outs, 0, async_op=a), outs or []

    def scatter(a: bool) -> Any:
        out = empty(150, device)
        parts = [made(rank, 150, device, seed) for seed in range(n)] if rank == 0 else None
        return dist.scatter(out, parts, 0, async_op=a), [out]

    def reduce_scatter(a: bool) -> Any:
        out = empty(120, device)
        return dist.reduce_scatter(out, [made(rank, 120, device, s) for s in range(n)], async_op=a), [out]

    def reduce_scatter_tensor(a: bool) -> Any:
        out = empty(130, device)
        return dist.reduce_scatter_tensor(out, made(rank, 130 * n, device), dist.ReduceOp.AVG, async_op=a), [out]

    def all_to_all(a: bool) -> Any:
        outs = [empty(10 + other, device) for other in range(n)]
        ins = [made(rank, 10 + rank, device, other) for other in range(n)]
        return dist.all_to_all(outs, ins, async_op=a), outs

    def all_to_all_single(a: bool) -> Any:
        out_splits, in_splits = [3 + other for other in range(n)], [3 + rank] * n
        out = empty(sum(out_splits), device)
        return dist.all_to_all_single(out, made(rank, sum(in_splits), device), out_splits, in_splits, async_op=a), [out]

    def coalesced(a: bool) -> Any:
        ts = [made(rank, 50, device), made(rank, 20, device), made(rank, 3, device)]
        return dist.all_reduce_coalesced(ts, async_op=a), ts

    def several_types(a: bool) -> Any:
        # torch's function rejects a list of several types; its backends need not.
        ts = [made(rank, 50, device), made(rank, 20, device).double(), made(rank, 3, device).double()]
        work = backend_of().allreduce_coalesced(ts, dist.AllreduceCoalescedOptions())
        return work, ts

    def manager(a: bool) -> Any:
        ts = [made(rank, 60, device), made(rank, 5, device)]
        with dist._coalescing_manager(async_ops=a) as region:
            for t in ts:
                dist.all_reduce(t)
        return (region if a else None), ts

    def gathered_lists(a: bool) -> Any:
        outs = [empty(40 * n, device), empty(8 * n, device)]
        with dist._coalescing_manager(async_ops=a) as region:
            for out, count in zip(outs, (40, 8), strict=True):
                dist.all_gather_into_tensor(out, made(rank, count, device))
        return (region if a else None), outs

    def scattered_lists(a: bool) -> Any:
        outs = [empty(40, device), empty(8, device)]
        with dist._coalescing_manager(async_ops=a) as region:
            for out, count in zip(outs, (40, 8), strict=True):
                dist.reduce_scatter_tensor(out, made(rank, count * n, device))
        return (region if a else None), outs

    def strided(a: bool) -> Any:
        t = made(rank, 600, device).view(20, 30).t()
        return dist.all_reduce(t, async_op=a), [t]

    def barrier(a: bool) -> Any:
        return dist.barrier(async_op=a, device_ids=None if device == "cpu" else [0]), []

    return {
        "all_reduce": each(all_reduce),
        "all_reduce max": lambda a: all_reduce(a, dist.ReduceOp.MAX),
        "all_reduce none": lambda a: all_reduce(a, count=0),
        "all_reduce large": lambda a: all_reduce(a, dist.ReduceOp.AVG, 300_001),
        "broadcast from 0": lambda a: broadcast(a, 0),
        "broadcast from last": lambda a: broadcast(a, n - 1),
        "reduce": each(reduce),
        "all_gather": lambda a: all_gather(a, [100] * n),
        "all_gather uneven": lambda a: all_gather(a, [5 + 3 * other for other in range(n)]),
        "all_gather_into_tensor": each(all_gather_into_tensor),
        "all_gather in place": each(in_place),
        "gather": each(gather),
        "scatter": each(scatter),
        "reduce_scatter": each(reduce_scatter),
        "reduce_scatter_tensor": each(reduce_scatter_tensor),
        "all_to_all": each(all_to_all),
        "all_to_all_single": each(all_to_all_single),
        "all_reduce_coalesced": each(coalesced),
        "all_reduce of several types": each(several_types),
        "all_reduce in a region": each(manager),
        "all_gather in a region": each(gathered_lists),
        "reduce_scatter in a region": each(scattered_lists),
        "all_reduce of a transposed tensor": each(strided),
        "barrier": each(barrier),
    }


# ------------------------------------------------------------------------------------------------ bodies


def every_call(ctx: Context, device: str, without: tuple[str, ...] = (), exact: bool = True) -> None:
    """Each collective, synchronous and asynchronous, gives the same results as on CPU tensors of the same group.

    Args:
        ctx: this rank's context. device: torch's name of the device. without: calls that the library rejects. exact:
        requires equal bits; False for a library that may add the ranks' numbers in a different order.
    """
    on_cpu, on_device = (calls(ctx.world_size, ctx.rank, where) for where in ("cpu", device))
    for what in on_cpu:
        if what in without:
            continue
        for a in (False, True):
            work, expected = on_cpu[what](a)
            if work is not None:
                work.wait()
            work, results = on_device[what](a)
            if work is not None:
                work.wait()
            for one, other in zip(results, expected, strict=True):
                # A kernel on the caller's stream reads the result, without a synchronization of the device.
                found = (one * 1).cpu()
                assert one.device.type == device and found.dtype == other.dtype, what
                same = torch.equal(found, other) if exact else torch.allclose(found, other)
                assert same, (what, a, found, other)


def every_type(ctx: Context, device: str, vendor: str, without: tuple[torch.dtype, ...] = ()) -> None:
    """Tests every ReduceOp on every type that the CPU's engine combines. The device must reject what the CPU rejects.

    `without`: types that the library rejects.
    """
    wrong: list[str] = []
    combined = 0
    for dtype in (each for each in REDUCED if each not in without):
        given = (torch.arange(60) % 3 + 1 + ctx.rank).to(dtype)
        for name in OPS:
            op, what = getattr(dist.ReduceOp, name), f"{name} of {str(dtype).removeprefix('torch.')}"
            expected, found = given.clone(), given.to(device)
            try:
                dist.all_reduce(expected, op)
            except (ValueError, RuntimeError):
                expect_raises((ValueError, RuntimeError), lambda found=found, op=op: dist.all_reduce(found, op))
                continue
            combined += 1
            try:
                dist.all_reduce(found, op)
            except (ValueError, RuntimeError) as error:  # every rank gets the same error
                wrong.append(f"{what}: {error}")
                continue
            if not torch.equal(found.cpu(), expected):
                wrong.append(f"{what}: {found.cpu()[:4]}, expected {expected[:4]}")
    assert not wrong, "\n".join(wrong)
    assert combined > 60, combined


def path_taken(ctx: Context, device: str, vendor: str) -> None:
    """`explain` names the library and the composed parts, the statistics count, and CPU tensors use the same group."""
    import torch_sagellm

    work = dist.all_reduce(torch.ones(10, device=device), async_op=True)
    work.wait()
    told = torch_sagellm.explain(work)
    assert told.reason == "vendor" and vendor in told.path.lower() and told.sequence == 1, told
    assert not told.staged, told
    assert "table" not in str(told), told  # a library has no decision table
    tensor = torch.full((10,), ctx.rank + 1, device=device, dtype=torch.int16)
    work = dist.all_reduce(tensor, dist.ReduceOp.BOR, async_op=True)
    work.wait()
    if ctx.world_size > 1:
        assert "combines it itself" in torch_sagellm.explain(work).decided, torch_sagellm.explain(work)
    expected = 0
    for rank in range(ctx.world_size):
        expected |= rank + 1
    holds(tensor, expected)
    torch.accelerator.synchronize()
    counted("all_reduce", 2)
    assert torch_sagellm.get_stats()["host_staged_count"] == 0
    before = number()
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3, device=device))
    assert number() - before == 2


def host_and_device(ctx: Context, device: str) -> None:
    """One backend object serves CPU and device, even at the same time. Objects use the CPU side. New groups work,
    too."""
    n, rank = ctx.world_size, ctx.rank
    host, there = torch.full((4,), rank + 1.0), torch.full((4,), rank + 1.0, device=device)
    dist.all_reduce(there.clone())  # makes the communicator, for which the ranks exchange an id
    before = number()
    works = [dist.all_reduce(each, async_op=True) for each in (host, there, host)]
    assert number() - before == 3
    for work in works:
        work.wait()
    holds(host, n * total(n))
    holds(there, total(n))
    assert backend_of(device) is backend_of("cpu")
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": each} for each in range(n)]
    alone = [dist.new_group([each]) for each in range(n)][rank]
    dist.all_reduce(there, group=alone)
    holds(there, total(n))
    everyone = dist.new_group(list(range(n)))
    dist.broadcast(there.fill_(rank), n - 1, group=everyone)
    holds(there, n - 1)
    dist.barrier(group=everyone)


def messages(ctx: Context, device: str) -> None:
    """Messages to the next rank and from the previous one, one by one and as a batch; then only from rank 0 to rank
    1."""
    n = ctx.world_size
    to, source = (ctx.rank + 1) % n, (ctx.rank - 1) % n
    mine = torch.empty(30_000, device=device).fill_(ctx.rank + 1)
    theirs = torch.empty(30_000, device=device).fill_(-1)
    late(device)
    # All ranks first send to the next rank. The first message between two ranks makes their communicator, in which both
    # must take part.
    for work in [dist.isend(mine, to), dist.irecv(theirs, source)]:
        work.wait()
    holds(theirs, source + 1)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine * 2, to), dist.P2POp(dist.irecv, theirs, source)]):
        work.wait()
    holds(theirs, 2 * (source + 1))
    if ctx.rank == 0:
        dist.send(mine, 1)
    elif ctx.rank == 1:
        dist.recv(theirs, 0)
        holds(theirs, 1)
    assert "name the source" in expect_raises(ValueError, lambda: dist.recv(theirs))


def order(ctx: Context, device: str) -> None:
    """Operations wait for late kernels, on the caller's stream and on another. Memory is not reused too early."""
    n, rank = ctx.world_size, ctx.rank
    # The receiver's own kernel still writes to the tensor when the operation is issued.
    late(device)
    target = torch.empty(500, device=device).fill_(7 if rank else 3)
    work = dist.broadcast(target, 0, async_op=True)
    work.wait()
    holds(target * 1, 3)
    # An asynchronous operation waits for earlier work on the caller's stream, even if nobody has called wait().
    late(device)
    value = torch.empty(500, device=device).fill_(rank + 1)
    work = dist.all_reduce(value, async_op=True)
    # The tensor is dropped immediately. The device must not reuse its memory while the operation uses it.
    kept = value.data_ptr()
    del value
    again = torch.empty(500, device=device)
    assert again.data_ptr() != kept, "memory of an operation under way was given out"
    again.fill_(-5)
    work.wait()
    holds(work.result()[0] * 1, total(n))
    # The stream that is current at wait() waits for the result. The operation waits for the stream that is current when
    # it is called.
    side = torch.Stream(device=device)
    late(device)
    value = torch.empty(500, device=device).fill_(rank + 1)
    work = dist.all_reduce(value, async_op=True)
    with side:
        work.wait()
        holds(value * 2, 2 * total(n))
        late(device)
        second = torch.empty(500, device=device).fill_(2 * rank + 2)
        dist.all_reduce(second)
        holds(second, 2 * total(n))
    # The wait of a future makes the stream wait, and not the host.
    late(device)
    value = torch.empty(500, device=device).fill_(rank + 1)
    (found,) = dist.all_reduce(value, async_op=True).get_future().wait()
    holds(found * 1, total(n))


def lists(ctx: Context, device: str) -> None:
    """One call with a list of several types; then a thousand small tensors as a list, in a region, and one by one."""
    import torch_sagellm

    n, rank = ctx.world_size, ctx.rank
    late(device)
    listed = [torch.empty(size, device=device, dtype=dtype).fill_(rank) for size, dtype in LIST]
    for each in torch_sagellm.fused_all_reduce(listed):
        holds(each * 2, n * (n - 1))
    flat = torch.empty(8000, device=device)
    pieces = list(flat.split(8))
    for turn in range(3):
        flat.fill_(rank + 1 + turn)
        if turn == 0:
            torch_sagellm.fused_all_reduce(pieces)
        elif turn == 1:
            with dist._coalescing_manager():
                for piece in pieces:
                    dist.all_reduce(piece)
        else:
            works = [dist.all_reduce(piece, async_op=True) for piece in pieces]
            for work in works:
                work.wait()
        holds(flat, total(n) + turn * n)


# ------------------------------------------------------------------------------------------------ training

#: Result of a training: the loss of every step, and the final parameters in host memory.
Trained = tuple[list[float], list[torch.Tensor]]


def network(device: str) -> torch.nn.Sequential:
    """Returns a model, equal on every rank."""
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(device)


def steps(model: torch.nn.Module, device: str, rank: int, count: int) -> list[float]:
    """Trains on this rank's own data. Returns the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(count):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step)).to(device)
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach().cpu()))
    return losses


def ddp(device: str, rank: int, hook: bool = False, count: int = 3) -> Trained:
    """DistributedDataParallel with several buckets. With `hook`, gradients are sent in 16 bits."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = network(device)
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    if hook:
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    losses = steps(parallel, device, rank, count)
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


def fsdp(device: str, rank: int, mixed: bool = False, count: int = 3) -> Trained:
    """FSDP2 with each layer sharded over all ranks. With `mixed`, parameters are sent as bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy} if mixed else {"mesh": mesh}
    model: Any = network(device)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    losses = steps(model, device, rank, count)
    return losses, [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]


def same_training(one: Trained, other: Trained) -> None:
    """Requires that losses and parameters are equal to the last bit."""
    assert one[0] == other[0], (one[0], other[0])
    for first, second in zip(one[1], other[1], strict=True):
        assert torch.equal(first, second), (first - second).abs().max()


def trained_as_on_the_cpu(ctx: Context, device: str, program: Callable[..., Trained], *args: Any) -> list[float]:
    """Runs the training on the CPU and on the device, in the same group, and requires equal results."""
    expected, found = program("cpu", ctx.rank, *args), program(device, ctx.rank, *args)
    same_training(found, expected)
    return found[0]


def lists_of_two(ctx: Context, name: str) -> None:
    """The first and the last rank exchange lists before any call in which the other ranks take part."""
    import torch_sagellm

    last = ctx.world_size - 1
    if ctx.rank == 0:
        torch_sagellm.send_tensors([torch.ones(3, device=name), torch.full((2, 2), 4, device=name)[:, :1]], last)
    elif ctx.rank == last:
        out = [torch.zeros(6, device=name)[::2], torch.zeros(2, 1, dtype=torch.int64, device=name)]
        torch_sagellm.recv_tensors(0, device=name, out=out)
        holds(out[0], 1)
        holds(out[1], 4)


def lists_travel(ctx: Context, name: str) -> None:
    """Sends tensors on the device by `send_tensors` and `recv_tensors`, in several batches, to rank 1 and back."""
    import torch_sagellm

    def given() -> list[torch.Tensor]:
        return [
            torch.ones(3, dtype=torch.int8),  # so the next tensor does not begin at a multiple of its element size
            torch.arange(3000.0).reshape(30, 100),
            torch.tensor(7),
            torch.ones(0, 4),
            *(torch.full((50,), float(i)) for i in range(20)),
            torch.arange(60_000, dtype=torch.int32),
        ]

    there = [each.to(name) for each in given()]
    for window in (1000, 64 << 20):
        if ctx.rank == 0:
            torch_sagellm.send_tensors(there, 1, window=window)
            back = torch_sagellm.recv_tensors(1, device=name, window=window)
        else:
            back = torch_sagellm.recv_tensors(0, device=name, window=window)
            torch_sagellm.send_tensors(back, 0, window=window)
        assert [each.device.type for each in back] == [torch.device(name).type] * len(there)
        for found, expected in zip(back, given(), strict=True):
            assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected)
