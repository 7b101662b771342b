"""Wrong input raises on the calling rank. The error names what was expected and what was passed, no sequence number is
used, and the group stays usable (rule 2)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_ranks
from reference import same_bits

import torch_sagellm

T = torch.Tensor


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> T:
    return torch.ones(shape, dtype=dtype)


def table(n: int) -> dict[str, tuple[Callable[[], object], tuple[str, ...]]]:
    """Returns wrong calls for a group of n ranks, each with words that the error must contain (numbers expected and
    found)."""
    group = dist.distributed_c10d._get_default_group()
    half, double = _ones(3, dtype=torch.float16), _ones(3, dtype=torch.float64)
    split_in, split_out = [1] * n, [1] * n
    return {
        "all_gather, list too short": (lambda: dist.all_gather([_ones(3)] * (n - 1), _ones(3)), (str(n), str(n - 1))),
        "all_gather, list too long": (lambda: dist.all_gather([_ones(3)] * (n + 1), _ones(3)), (str(n), str(n + 1))),
        "all_gather, own block of another size": (
            lambda: dist.all_gather([_ones(4) for _ in range(n)], _ones(3)),
            ("4", "3"),
        ),
        "all_gather, mixed dtypes": (lambda: dist.all_gather([double] * n, _ones(3)), ()),
        "all_gather_into_tensor, wrong size": (
            lambda: dist.all_gather_into_tensor(_ones(3 * n + 1), _ones(3)),
            (str(3 * n + 1),),
        ),
        "all_gather_into_tensor, mixed dtypes": (
            lambda: dist.all_gather_into_tensor(_ones(3 * n), half),
            ("float16", "float32"),
        ),
        "reduce_scatter, list too short": (lambda: dist.reduce_scatter(_ones(3), [_ones(3)] * (n - 1)), (str(n),)),
        "reduce_scatter, block of another size": (
            lambda: dist.reduce_scatter(_ones(4), [_ones(3) for _ in range(n)]),
            ("4", "3"),
        ),
        "reduce_scatter_tensor, wrong size": (
            lambda: dist.reduce_scatter_tensor(_ones(3), _ones(3 * n + 1)),
            (str(3 * n + 1),),
        ),
        "reduce_scatter_tensor, mixed dtypes": (lambda: dist.reduce_scatter_tensor(half, _ones(3 * n)), ()),
        "all_to_all, list too short": (lambda: dist.all_to_all([_ones(3)] * (n - 1), [_ones(3)] * n), (str(n),)),
        "all_to_all, mixed dtypes": (lambda: dist.all_to_all([half] * n, [_ones(3)] * n), ()),
        "all_to_all_single, not divisible": (
            lambda: dist.all_to_all_single(_ones(n + 1), _ones(n + 1)) if n > 1 else _raise(),
            (str(n + 1),),
        ),
        "all_to_all_single, splits too short": (
            lambda: dist.all_to_all_single(_ones(n), _ones(n), split_out, split_in[:-1] or [1, 1]),
            (str(n),),
        ),
        "all_to_all_single, splits of another sum": (
            lambda: dist.all_to_all_single(_ones(n), _ones(n), split_out, [2] * n),
            (str(2 * n), str(n)),
        ),
        "all_to_all_single, negative split": (
            lambda: dist.all_to_all_single(_ones(n), _ones(n), split_out, [n + 1] + [1] * (n - 2) + [-n]),
            (),
        ),
        "all_to_all_single, mixed dtypes": (
            lambda: dist.all_to_all_single(_ones(n), _ones(n, dtype=torch.float64)),
            (),
        ),
        "broadcast, root out of range": (lambda: group.broadcast([_ones(3)], _broadcast_options(n)), (str(n),)),
        "broadcast, negative root": (lambda: group.broadcast([_ones(3)], _broadcast_options(-1)), ("-1",)),
        "reduce, root out of range": (lambda: group.reduce([_ones(3)], _reduce_options(n + 5)), (str(n + 5),)),
        "gather, list missing at the root": (
            lambda: dist.gather(_ones(3), None, dst=dist.get_rank()),
            (),
        ),
        "gather, list too short": (lambda: dist.gather(_ones(3), [_ones(3)] * (n - 1), dst=dist.get_rank()), (str(n),)),
        "gather, block of another size": (
            lambda: dist.gather(_ones(3), [_ones(4) for _ in range(n)], dst=dist.get_rank()),
            ("4", "3"),
        ),
        "scatter, list too long": (
            lambda: dist.scatter(_ones(3), [_ones(3)] * (n + 1), src=dist.get_rank()),
            (str(n), str(n + 1)),
        ),
        "scatter, block of another size": (
            lambda: dist.scatter(_ones(3), [_ones(5)] * n, src=dist.get_rank()),
            ("3", "5"),
        ),
        "all_reduce, BAND of floats": (lambda: dist.all_reduce(_ones(3), dist.ReduceOp.BAND), ("BAND", "float32")),
        "all_reduce, SUM of float8": (lambda: dist.all_reduce(_ones(3).to(torch.float8_e4m3fn)), ("float8",)),
        "all_reduce, MAX of complex": (
            lambda: dist.all_reduce(_ones(3, dtype=torch.complex64), dist.ReduceOp.MAX),
            (),
        ),
        "all_reduce_coalesced, mixed dtypes": (lambda: dist.all_reduce_coalesced([half, _ones(2)]), ()),
        "fused_all_reduce, sparse": (
            lambda: torch_sagellm.fused_all_reduce([_ones(3), _ones(3).to_sparse()]),
            ("fused_all_reduce: tensor 1 has the layout sparse_coo", "to_dense()"),
        ),
        "fused_all_reduce, sparse rows": (
            lambda: torch_sagellm.fused_all_reduce([_ones(3, 3).to_sparse_csr()]),
            ("tensor 0 has the layout sparse_csr",),
        ),
        "send to oneself": (lambda: dist.send(_ones(3), dist.get_rank()), ()),
        "send to a rank out of range": (lambda: group.send([_ones(3)], n + 2, 0), (str(n + 2),)),
        "recv from a rank out of range": (lambda: group.recv([_ones(3)], n + 2, 0), (str(n + 2),)),
        "send of a negative tag": (lambda: group.send([_ones(3)], (dist.get_rank() + 1) % n, -3), ("-3",)),
        "expanded output": (lambda: dist.all_reduce(_ones(1).expand(5)), ()),
        "two tensors in one all_reduce": (lambda: group.allreduce([_ones(3), _ones(3)]), ()),
    }


def _raise() -> None:
    raise ValueError("2")


def _broadcast_options(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


def _reduce_options(root: int) -> dist.ReduceOptions:
    options = dist.ReduceOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


NAMES = [
    "all_gather, list too short", "all_gather, list too long", "all_gather, own block of another size",
    "all_gather, mixed dtypes", "all_gather_into_tensor, wrong size", "all_gather_into_tensor, mixed dtypes",
    "reduce_scatter, list too short", "reduce_scatter, block of another size", "reduce_scatter_tensor, wrong size",
    "reduce_scatter_tensor, mixed dtypes", "all_to_all, list too short", "all_to_all, mixed dtypes",
    "all_to_all_single, not divisible", "all_to_all_single, splits too short",
    "all_to_all_single, splits of another sum", "all_to_all_single, negative split",
    "all_to_all_single, mixed dtypes", "broadcast, root out of range", "broadcast, negative root",
    "reduce, root out of range", "gather, list missing at the root", "gather, list too short",
    "gather, block of another size", "scatter, list too long", "scatter, block of another size",
    "all_reduce, BAND of floats", "all_reduce, SUM of float8", "all_reduce, MAX of complex",
    "all_reduce_coalesced, mixed dtypes", "fused_all_reduce, sparse", "fused_all_reduce, sparse rows",
    "send to oneself", "send to a rank out of range",
    "recv from a rank out of range", "send of a negative tag", "expanded output", "two tensors in one all_reduce",
]  # fmt: skip


def wrong_call(ctx: Context, name: str) -> str:
    """Both ranks make the wrong call. Afterwards the group counts and works as if no rank had made it."""
    call, words = table(ctx.world_size)[name]
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    text = expect_raises((ValueError, RuntimeError), call)
    assert backend._get_sequence_number_for_group() == before, "the refused call used a sequence number"
    for word in words:
        assert word.lower() in text.lower(), f"{word!r} is not in: {text}"
    total = torch.full((3,), float(ctx.rank + 1))
    dist.all_reduce(total)
    same_bits(total, torch.full((3,), float(sum(range(1, ctx.world_size + 1)))), "after the wrong call")
    return text


@beyond_gloo("checks less, and in other words")
@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_rule_02_wrong_input_is_refused_locally(name: str) -> None:
    """Rule 2: no sequence number is used, nothing is sent, and the error says what was expected and passed."""
    assert run_ranks(wrong_call, 2, name)


def table_is_whole(ctx: Context) -> list[str]:
    return list(table(ctx.world_size))


def test_every_wrong_call_is_in_the_list() -> None:
    """`NAMES` lists exactly the calls of `table`."""
    assert run_ranks(table_is_whole, 2)[0] == NAMES


def one_sided(ctx: Context) -> None:
    if ctx.rank == 0:
        expect_raises((ValueError, RuntimeError), lambda: dist.all_gather([torch.ones(2)], torch.ones(2)))
    outputs = [torch.zeros(2) for _ in range(ctx.world_size)]
    dist.all_gather(outputs, torch.full((2,), float(ctx.rank)))
    assert [each[0].item() for each in outputs] == [float(rank) for rank in range(ctx.world_size)]


@beyond_gloo("not all of its checks come before its number")
@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_02_only_one_rank_makes_the_wrong_call(world_size: int) -> None:
    """Rule 2: the rank catches its error and makes the right call. Its peers see no difference."""
    run_ranks(one_sided, world_size)


def peers_that_are_none(ctx: Context, engine: str) -> None:
    """Messages to ranks that do not exist, also in a delegate's group. c10d's functions refuse some of them before the
    backend sees them; direct calls of the backend do not."""
    import torch_sagellm

    group = dist.new_group(pg_options=torch_sagellm.Options(engine=engine))
    backend = group._get_backend(torch.device("cpu"))
    tensor = torch.full((3,), float(ctx.rank))
    for call in (backend.send, backend.recv):
        for peer, words in [(-1, "-1, expected 0 to 1"), (2, "2, expected 0 to 1"), (ctx.rank, "this rank itself")]:
            text = expect_raises(ValueError, lambda call=call, peer=peer: call([tensor], peer, 0))
            assert f"peer rank is {peer}" in text and words in text, text
    work = backend.send([tensor], 1, 0) if ctx.rank == 0 else backend.recv([tensor], 0, 0)
    work.wait()
    assert tensor.tolist() == [0.0] * 3
    assert [record["number"] for record in backend._records()] == [1], "a refused message takes no number"


@beyond_gloo("its process crashes")
@pytest.mark.parametrize("engine", ["auto", "delegate"])
def test_rule_02_messages_to_no_rank_are_refused(engine: str) -> None:
    """Rule 2: refused by the engine or, if a delegate carries messages, before the delegate is called."""
    run_ranks(peers_that_are_none, 2, engine)


def refused_features(ctx: Context) -> None:
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    for name in ("supports_window", "supports_reconfigure"):
        if hasattr(backend, name):
            assert getattr(backend, name) is False, name
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [2.0, 2.0]


@beyond_gloo("reconfigures")
def test_reconfigure_and_windows_are_refused_clearly() -> None:
    """The backend refuses calls that it does not offer, and the group stays usable."""
    run_ranks(refused_features, 2)
