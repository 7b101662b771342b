"""Layers and helpers over several ranks, compared with the same computation on one rank: outputs, gradients,
refusals."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch, run_ranks
from on_device import number
from torch import nn

pytestmark = beyond_gloo("layers over several ranks")


def whole_layer(bias: bool) -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(12, 24, bias=bias, dtype=torch.float64)


def data() -> torch.Tensor:
    torch.manual_seed(8)
    return torch.randn(2, 5, 12, dtype=torch.float64)


def part(tensor: torch.Tensor, ctx: Context, dim: int) -> torch.Tensor:
    return tensor.chunk(ctx.world_size, dim)[ctx.rank]


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def linear(ctx: Context, mode: str, bias: bool) -> None:
    import torch_sagellm

    whole = whole_layer(bias)
    layer = torch_sagellm.TensorParallelLinear.from_linear(whole, mode)
    dim = 0 if mode == "column" else 1
    close(layer.weight, part(whole.weight, ctx, dim))
    expected_input, found_input = data().requires_grad_(), data().requires_grad_()
    expected, found = whole(expected_input), layer(found_input)
    close(found, expected)
    weights = torch.arange(float(expected.numel()), dtype=torch.float64).reshape(expected.shape)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    close(found_input.grad, expected_input.grad)
    close(layer.weight.grad, part(whole.weight.grad, ctx, dim))
    if bias:
        close(layer.bias.grad, part(whole.bias.grad, ctx, 0) if mode == "column" else whole.bias.grad)
    fresh = torch_sagellm.TensorParallelLinear(12, 24, ctx.world_size, mode, bias, dtype=torch.float64)
    every = [torch.empty_like(fresh.weight) for _ in range(ctx.world_size)]
    dist.all_gather(every, fresh.weight.detach())
    assert torch.cat(every, dim).shape == (24, 12) and not torch.equal(every[0], every[1])
    outputs = fresh(data())
    same = outputs.detach().clone()
    dist.broadcast(same, 0)
    assert torch.equal(same, outputs), "every rank has the same outputs"
    assert mode in repr(fresh)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_parallel_layer_equals_the_whole_layer_forward_and_backward(world_size: int, mode: str, bias: bool) -> None:
    if world_size > 1:
        run_ranks(linear, world_size, mode, bias)
        return
    import torch_sagellm

    whole = whole_layer(bias)
    assert torch.equal(torch_sagellm.TensorParallelLinear.from_linear(whole, mode)(data()), whole(data()))


def pair_of_layers(ctx: Context) -> None:
    import torch_sagellm

    torch.manual_seed(3)
    first, second = nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 6, dtype=torch.float64)
    split_first = torch_sagellm.TensorParallelLinear.from_linear(first, "column", gather_output=False)
    split_second = torch_sagellm.TensorParallelLinear.from_linear(second, "row", input_is_split=True)
    torch.manual_seed(4)
    given = torch.randn(3, 6, dtype=torch.float64).requires_grad_()
    other = given.detach().clone().requires_grad_()
    before = number()
    found = split_second(torch.relu(split_first(given)))
    assert number() == before + 1, "one all_reduce for both layers"
    expected = second(torch.relu(first(other)))
    close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    close(given.grad, other.grad)
    close(split_first.weight.grad, part(first.weight.grad, ctx, 0))
    close(split_second.weight.grad, part(second.weight.grad, ctx, 1))
    for wrong, text in {
        "mode='diagonal'": lambda: torch_sagellm.TensorParallelLinear(4, 4, 2, "diagonal"),
        "world_size is 3": lambda: torch_sagellm.TensorParallelLinear(6, 6, 3),
        "out_features is 5": lambda: torch_sagellm.TensorParallelLinear(4, 5, 2),
        "in_features is 5": lambda: torch_sagellm.TensorParallelLinear(5, 4, 2, "row"),
    }.items():
        assert wrong in expect_raises(ValueError, text)


def test_a_column_and_a_row_layer_together_need_one_all_reduce() -> None:
    run_ranks(pair_of_layers, 2)


def ring(ctx: Context) -> None:
    import torch_sagellm

    key, value = torch.full((3, 2), float(ctx.rank)), torch.arange(4, dtype=torch.int64) + 10 * ctx.rank
    seen = []
    for source, blocks in torch_sagellm.ring_exchange([key, value]):
        assert torch.equal(blocks[0], torch.full((3, 2), float(source)))
        assert torch.equal(blocks[1], torch.arange(4) + 10 * source)
        seen.append(source)
    assert seen == [(ctx.rank - step) % ctx.world_size for step in range(ctx.world_size)]
    tokens, heads = 4 * ctx.world_size, 2 * ctx.world_size
    whole = torch.arange(float(tokens * heads * 3), dtype=torch.float64).reshape(tokens, heads, 3)
    mine = part(whole, ctx, 0).clone().requires_grad_()
    by_heads = torch_sagellm.exchange_tokens(mine, 1, 0)
    assert torch.equal(by_heads, part(whole, ctx, 1))
    back = torch_sagellm.exchange_tokens(by_heads, 0, 1)
    assert torch.equal(back, mine)
    (by_heads * by_heads).sum().backward()
    assert torch.equal(mine.grad, 2 * mine.detach()), "gradients travel back"
    assert "dimension 0 is" in expect_raises(ValueError, lambda: torch_sagellm.exchange_tokens(torch.ones(1, 8), 0, 1))
    text = expect_raises(ValueError, lambda: torch_sagellm.exchange_tokens(torch.ones(ctx.world_size, 8), 0, 2))
    assert f"join_dim is 2, expected a dimension of a tensor of shape ({ctx.world_size}, 8)" in text
    assert "got a tensor, expected a list" in expect_raises(TypeError, lambda: torch_sagellm.ring_exchange(key))
    assert "got a int, expected a tensor" in expect_raises(TypeError, lambda: torch_sagellm.ring_exchange([key, 1]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_blocks_go_around_the_ring_and_tokens_are_traded_for_heads(world_size: int) -> None:
    run_ranks(ring, world_size)


def cache() -> list[torch.Tensor]:
    torch.manual_seed(5)
    layers: list[torch.Tensor] = []
    for layer in range(300):
        layers.append(torch.randn(layer % 5, 3, dtype=torch.float64))
        layers.append(torch.arange(layer, dtype=torch.int32).reshape(1, layer))
    layers.append(torch.randn(300_000))
    layers.append(torch.randn(8, 8).t())
    layers.append(torch.tensor(3.5, dtype=torch.bfloat16))
    return layers


def transfer(ctx: Context) -> None:
    import torch_sagellm

    for window in (1, 1 << 16, 1 << 30):
        if ctx.rank == 0:
            torch_sagellm.send_tensors(cache(), 1, window=window)
            torch_sagellm.send_tensors([], 1)
            continue
        found = torch_sagellm.recv_tensors(0, window=window)
        expected = cache()
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
        assert torch_sagellm.recv_tensors(0) == []
    given = [torch.ones(3), torch.ones(2, dtype=torch.int64)]
    if ctx.rank == 0:
        for _ in range(3):
            torch_sagellm.send_tensors(given, 1, tag=4)
        assert "element 0 is a int" in expect_raises(TypeError, lambda: torch_sagellm.send_tensors([3], 1))
        assert "expected a list" in expect_raises(TypeError, lambda: torch_sagellm.send_tensors(torch.ones(3), 1))
        assert "window is 0" in expect_raises(ValueError, lambda: torch_sagellm.send_tensors(given, 1, window=0))
        return
    place = [torch.zeros(3), torch.zeros(2, dtype=torch.int64)]
    assert torch_sagellm.recv_tensors(0, tag=4, out=place)[0] is place[0] and place[0].tolist() == [1, 1, 1]
    wrong = [torch.zeros(3), torch.zeros(4, dtype=torch.int64)]
    text = expect_raises(ValueError, lambda: torch_sagellm.recv_tensors(0, tag=4, out=wrong))
    assert "tensor 1 is int64 of shape [2], and out has int64 of shape [4]" in text
    assert torch_sagellm.recv_tensors(0, tag=4, out=place)[1].tolist() == [1, 1], "and the next list arrives"


def test_lists_of_tensors_arrive_whatever_their_sizes_and_the_window() -> None:
    run_ranks(transfer, 2)


def packed(ctx: Context) -> None:
    """Many small tensors travel in few messages. Lists of several calls in flight arrive in order."""
    import torch_sagellm

    kinds = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
    small = [torch.arange(number % 7 * 3).reshape(-1, 3).to(kinds[number // 200]) for number in range(800)]
    mixed = [torch.full((size,), float(number)) for number, size in enumerate([3, 20_000, 5, 0, 7, 8192, 8191, 2])]
    turned = torch.arange(6.0).reshape(2, 3).t()
    equal = [torch.full((16,), float(number)) for number in range(2000)]
    lists = [small, [*mixed, turned], equal]
    torch_sagellm.reset_stats()
    if ctx.rank == 0:
        for each in lists:
            torch_sagellm.send_tensors(each, 1)
        sent = torch_sagellm.get_stats()["send_count"]
        assert sent < 30, sent
        pending = [torch_sagellm.isend_tensors(each, 1, tag=3, window=4096) for each in lists]
        torch_sagellm.send_tensors(equal[:5], 1, tag=3)
        assert [each.wait() for each in pending] == [[]] * 3 and all(each.done() for each in pending)
        quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        for begin in (torch_sagellm.send_tensors, torch_sagellm.isend_tensors):
            assert "element 0" in expect_raises(ValueError, lambda begin=begin: begin([quantised], 1))
        assert "window is 0" in expect_raises(ValueError, lambda: torch_sagellm.isend_tensors(equal, 1, window=0))
        return
    found = [torch_sagellm.recv_tensors(0) for _ in lists]
    places = [torch.empty_like(each) for each in equal[:-1]] + [torch.empty(16, 2)[:, 0]]
    pending = [
        torch_sagellm.irecv_tensors(0, tag=3),
        torch_sagellm.irecv_tensors(0, tag=3, window=1),
        torch_sagellm.irecv_tensors(0, tag=3, out=places),
    ]
    after = torch_sagellm.recv_tensors(0, tag=3)
    assert all(each.done() for each in pending), "a list waits for those before it"
    for came in (found, [each.wait() for each in pending]):
        for one, other in zip(came, lists, strict=True):
            assert len(one) == len(other)
            for a, b in zip(one, other, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(after, equal[:5], strict=True)) and pending[2].wait()[0] is places[0]
    grown = found[2][3].requires_grad_()
    (grown * 2).sum().backward()  # parts of one buffer are separate tensors
    assert grown.grad is not None
    with torch.no_grad():
        grown.fill_(9)
    assert found[2][2][-1] == 2 and found[2][4][0] == 4


def test_small_tensors_travel_together_and_lists_follow_each_other() -> None:
    run_ranks(packed, 2)


def from_where_they_are(ctx: Context, serves: str) -> None:
    """Sends lists whose tensors are sent from their own memory, packed, or partly packed, and receives into a list that
    is refused."""
    import torch_sagellm

    other = {"ours": {}, "delegate": {"pg_options": torch_sagellm.Options(engine="delegate")}}.get(serves)
    group = dist.new_group(backend="gloo") if other is None else dist.new_group(**other)
    twice = torch.arange(3000.0)
    weight = torch.nn.Parameter(torch.arange(3500.0).reshape(7, 500))
    sizes = {"tiny": [16] * 300, "small": [1024] * 300, "of both": [3, 9000, 100, 0, 12_000, 1, 70_000, 2, 1 << 20, 5]}
    lists: dict[str, list[torch.Tensor]] = {
        name: [torch.arange(float(size)) + number for number, size in enumerate(each)] for name, each in sizes.items()
    }
    lists["several dtypes"] = [torch.arange(3000).to(kind) for kind in (torch.int64, torch.bool, torch.float16)] * 4
    cut = torch.arange(40_000.0).reshape(100, 400)
    lists["slices of one"] = list(cut.split(10)) + [cut[:, column] for column in range(0, 400, 7)]
    lists["any tensors"] = [torch.zeros(2, 2), torch.arange(6000.0).reshape(60, 100).t(), torch.ones(9000, 2)[:, 1]]
    if ctx.rank == 0:
        for each in (*lists.values(), [twice, weight, twice]):
            torch_sagellm.send_tensors(each, 1, group)
            torch_sagellm.send_tensors(each, 1, group)
    else:
        for name, each in lists.items():
            found = torch_sagellm.recv_tensors(0, group)
            place = [torch.empty(2 * len(one), *one.shape[1:], dtype=one.dtype)[::2] for one in each[:-1]]
            place.append(torch.empty_like(each[-1]))
            versions = [one._version for one in place]
            shared = [torch.zeros(5), twice[:2000], twice[1999:]]
            text = expect_raises(ValueError, lambda shared=shared: torch_sagellm.recv_tensors(0, group, out=shared))
            assert "elements 1 and 2 of out share memory" in text, "and nothing was received"
            assert torch_sagellm.recv_tensors(0, group, out=place)[0] is place[0]
            for got in (found, place):
                for one, expected in zip(got, each, strict=True):
                    assert one.dtype == expected.dtype and torch.equal(one, expected), name
            if serves == "ours":
                changed = [one._version > version for one, version in zip(place, versions, strict=True)]
                assert all(changed), "autograd learns that a tensor was changed"
        for _ in range(2):
            one, middle, last = torch_sagellm.recv_tensors(0, group)
            assert all(map(torch.equal, (one, middle, last), (twice, weight.detach(), twice)))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("serves", ["ours", "delegate", "gloo"])
def test_lists_of_every_form_arrive_whichever_backend_carries_them(serves: str) -> None:
    run_ranks(from_where_they_are, 2, serves)


def shared_memory_is_refused(ctx: Context) -> None:
    """`out` is refused if strided elements share a byte, and accepted if they interleave without sharing one."""
    import torch_sagellm

    m, cube = torch.zeros(40, 6), torch.zeros(5, 6, 7)
    shares = [
        [m[:-1, 0], m[1:, 0]],
        [m[1:, 0], m[:-1, 0]],
        [m[:, 0:2], m[:, 1:3]],
        [m[:30, 2:4], m[10:, 3:5]],
        [cube[:, 1:3, 2], cube[:, 2:4, 2]],
        [cube[:3, :, 4], cube[2:, :, 4]],
        [m[:, 0], cube[0, 0], m[::2, 0]],
    ]
    apart = [[m[:, 0:2], m[:, 2:4]], [m[::2, 1:3], m[1::2, 1:3]], [cube[:, :3, 2], cube[:, 3:, 2], cube[:, :3, 3]]]
    for out in apart:
        if ctx.rank == 0:
            torch_sagellm.send_tensors([torch.ones_like(each) for each in out], 1)
            continue
        for wrong in shares:
            text = expect_raises(ValueError, lambda wrong=wrong: torch_sagellm.recv_tensors(0, out=wrong))
            assert "of out share memory" in text
        assert all((each == 1).all() for each in torch_sagellm.recv_tensors(0, out=out))


def test_results_that_share_memory_are_refused_before_anything_is_received() -> None:
    run_ranks(shared_memory_is_refused, 2)


def several_callers(ctx: Context) -> None:
    """Transfers of one rank and tag do not mix, whichever threads and signal handlers begin them."""
    import torch_sagellm

    count, size = 40, 3000
    lists = [[torch.full((size,), float(number))] * 3 for number in range(2 * count)]
    if ctx.rank == 1:
        found = [torch_sagellm.recv_tensors(0, tag=2) for _ in range(2 * count + 1)]
        values = []
        for tensors in found:
            assert len({tensor[0].item() for tensor in tensors}) == 1 and all(len(each) == size for each in tensors)
            values.append(tensors[0][0].item())
        assert sorted(values) == [-1.0, *map(float, range(2 * count))]
        return

    def send(part: list[list[torch.Tensor]]) -> None:
        for at, each in enumerate(part):
            if at % 3:
                torch_sagellm.isend_tensors(each, 1, tag=2, window=4096 if at % 2 else 1 << 26).wait()
            else:
                torch_sagellm.send_tensors(each, 1, dist.group.WORLD if at % 2 else None, tag=2)

    other = threading.Thread(target=send, args=(lists[:count],))
    other.start()
    send(lists[count:])
    other.join()
    from torch_sagellm.parallel import moving

    messages, refused = moving.messages, []

    def in_the_middle(*given: Any) -> Any:
        moving.messages = messages  # the header has been sent; a signal handler could run here
        one = [torch.full((size,), -1.0)] * 3
        refused.append(expect_raises(RuntimeError, lambda: torch_sagellm.send_tensors(one, 1, tag=2)))
        return messages(*given)

    moving.messages = in_the_middle
    torch_sagellm.send_tensors([torch.full((size,), -1.0)] * 3, 1, tag=2)
    assert "in the middle of a transfer with the same rank and tag" in refused[0]


def test_transfers_of_several_threads_and_of_signal_handlers_do_not_mix() -> None:
    run_ranks(several_callers, 2)


def begun_at_once(ctx: Context) -> None:
    """Lists that fit the window need no thread. Checks their order, with lists on threads between them, and their
    end."""
    import torch_sagellm

    def lists() -> list[list[torch.Tensor]]:
        sizes = [[2000, 3], [70_000] * 3, [5] * 100, [1 << 19, 7], [4000] * 9]
        return [[torch.full((size,), float(at)) for size in each] for at, each in enumerate(sizes)]

    windows = [1 << 26, 4096, 1 << 26, 4096, 1 << 26]
    if ctx.rank == 1:
        ctx.store().wait(["begun"])
        coming = [torch_sagellm.irecv_tensors(0, tag=1) for _ in range(3)]
        found = [each.wait() for each in coming] + [torch_sagellm.recv_tensors(0, tag=1) for _ in range(2)]
        for one, expected in zip(found, lists(), strict=True):
            assert all(map(torch.equal, one, expected))
        assert torch.equal(torch_sagellm.recv_tensors(0)[0], torch.ones(2000))
        return
    threads = threading.active_count()
    pending = [torch_sagellm.isend_tensors(lists()[0], 1, tag=1, window=windows[0])]
    assert threading.active_count() == threads and not pending[0].done()
    for each, window in list(zip(lists(), windows, strict=True))[1:]:
        pending.append(torch_sagellm.isend_tensors(each, 1, tag=1, window=window))
        del each  # the transfer keeps the tensors
    ctx.store().set("begun", "1")
    assert [each.wait() for each in pending] == [[]] * 5 and [each.wait() for each in pending] == [[]] * 5
    assert all(each.done() for each in pending)
    wrapped = torch.distributed._functional_collectives.AsyncCollectiveTensor(torch.ones(2000))
    torch_sagellm.isend_tensors([wrapped], 1)  # dropped immediately, but arrives nevertheless
    out = [torch.distributed._functional_collectives.AsyncCollectiveTensor(torch.ones(2000))]
    text = expect_raises(ValueError, lambda: torch_sagellm.recv_tensors(1, out=out))
    assert "element 0 of out is a AsyncCollectiveTensor" in text


def test_lists_that_fit_the_window_are_begun_in_the_call_and_keep_their_order() -> None:
    run_ranks(begun_at_once, 2)


def damaged(ctx: Context) -> None:
    """The sizes in a header are checked before memory is allocated for them."""
    import torch_sagellm
    from torch_sagellm.parallel import transfer

    whole = 1 << 20
    claims = [
        [whole, [["float32", [1 << 45], 1]]],
        [whole, [["float32", [2], 1 << 40]]],
        [whole, [["float32", [-1], 1]]],
        [whole, [["nonsense", [1], 1]]],
        [0, [["float32", [1], 1]]],
        ["x", 3],
    ]
    for claim in claims:
        if ctx.rank == 0:
            text = json.dumps(claim).encode()
            head = transfer.MAGIC + len(text).to_bytes(transfer.LENGTH_BYTES, "little") + text
            dist.send(torch.frombuffer(bytearray(head.ljust(transfer.HEADER_BYTES, b"\0")), dtype=torch.uint8), 1)
        else:
            assert "describes no tensors" in expect_raises(RuntimeError, lambda: torch_sagellm.recv_tensors(0)), claim
    if ctx.rank == 0:
        head = transfer.MAGIC + (transfer.MOST_BYTES + 1).to_bytes(transfer.LENGTH_BYTES, "little")
        dist.send(torch.frombuffer(bytearray(head.ljust(transfer.HEADER_BYTES, b"\0")), dtype=torch.uint8), 1)
    else:
        assert "did not call send_tensors" in expect_raises(RuntimeError, lambda: torch_sagellm.irecv_tensors(0).wait())


def test_lengths_in_a_header_are_bounded() -> None:
    run_ranks(damaged, 2)


def refused(ctx: Context) -> None:
    """A refused list sends and receives nothing: the valid list after it arrives."""
    import torch_sagellm

    base = torch.full((4,), complex(1, 2))
    if ctx.rank == 0:
        for wrong, words in (
            (torch.eye(3).to_sparse(), "element 1: got a torch.sparse_coo tensor on cpu"),
            (torch.empty(3, device="meta"), "element 1: got a torch.strided tensor on meta"),
        ):
            text = expect_raises(ValueError, lambda wrong=wrong: torch_sagellm.send_tensors([torch.ones(2), wrong], 1))
            assert words in text and "that has data" in text, text
        torch_sagellm.send_tensors([base.conj(), base.conj().imag, torch.ones(1).expand(3)], 1)
        dist.send(torch.zeros(4096, dtype=torch.uint8), 1)
        torch_sagellm.send_tensors([torch.ones(2)], 1)
        return
    for wrong, words in (
        (base.conj(), "torch.is_conj of the tensor is true"),
        (base.conj().imag, "torch.is_neg of the tensor is true"),
        (torch.eye(3).to_sparse(), "element 1 of out: got a torch.sparse_coo tensor"),
        (torch.ones(1).expand(3), "shares memory between its elements"),
    ):
        out = [torch.ones(2), wrong]
        assert words in expect_raises(ValueError, lambda out=out: torch_sagellm.recv_tensors(0, out=out))
    assert "expected a list" in expect_raises(TypeError, lambda: torch_sagellm.recv_tensors(0, out=torch.ones(2)))
    turned, part, wide = torch_sagellm.recv_tensors(0)
    assert turned.tolist() == [1 - 2j] * 4 and part.tolist() == [-2.0] * 4 and wide.tolist() == [1.0] * 3
    text = expect_raises(RuntimeError, lambda: torch_sagellm.recv_tensors(0))
    assert "rank 0 did not call send_tensors: what came from it with tag 0 is another message" in text
    place = torch.nn.Parameter(torch.zeros(2))
    assert torch_sagellm.recv_tensors(0, out=[place])[0] is place and place.tolist() == [1.0, 1.0]


def test_a_list_that_cannot_travel_is_refused_before_its_header_is_sent() -> None:
    run_ranks(refused, 2)


def held_back(ctx: Context) -> Any:
    """Rank 1 calls only when rank 0 waits for it. Eight tensors of 4 MiB; a window holds two."""
    import torch_sagellm

    ctx.init()
    blocks = [torch.full((1 << 20,), float(number)) for number in range(8)]
    if ctx.rank == 1:
        ctx.listen()
        ctx.store().set("called", "1")
        found = [block[0].item() for block in torch_sagellm.recv_tensors(0)]
        dist.destroy_process_group()
        return found
    from torch_sagellm.parallel import moving

    sends, begun, waited = moving.sends, [], []

    def watched(*given: Any) -> Any:
        begin = sends(*given)

        def begin_watched(message: Any) -> Any:
            begun.append(message.nbytes)
            work: Any = begin(message)

            def end() -> None:
                if not waited:
                    assert not work.is_completed() and not ctx.store().check(["called"])
                    ctx.tell(sum(begun))
                work.wait()
                assert ctx.store().check(["called"]), "it ended only when the receiver had called"
                waited.append(1)
                assert len(begun) <= len(waited) + 1, "two are under way at most"

            return SimpleNamespace(wait=end)

        return begin_watched

    moving.sends = watched
    torch_sagellm.send_tensors(blocks, 1, window=8 << 20)
    moving.sends = sends
    assert len(begun) == len(waited) == 8
    dist.destroy_process_group()
    return None


def test_a_receiver_that_has_not_called_holds_the_sender_back() -> None:
    """The sender waits after one window of bytes that are not received. Then everything arrives."""
    with launch(held_back, 2) as job:
        assert job.hear(0) == 8 << 20, "the bytes that were under way when the sender began to wait"
        job.say(1, "go")
        assert job.values(60)[1] == [float(number) for number in range(8)]
