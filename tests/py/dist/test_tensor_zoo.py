"""Every kind of tensor through every public call, of torch.distributed and of this package: the tables are in `zoo.py`.

A call does what it promises, looked for in the memory of its tensors; or it is refused on every rank that passes the
tensor, by an error that names the call and the reason, and nothing was sent. An ordinary collective and messages with
the same tag follow each call: they show that no number was used and that no message is left. `LISTED` has what ends in
another way, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, launch, run_ranks
from net import enter
from zoo import CALLS, KINDS, RING, Call, Kind, Visit

pytestmark = beyond_gloo("the package's calls, and many of these tensors")

#: How a case ends: with the results; with an error; without one, and all memory is as it was; with either of the last
#: two; or it is not tried.
WORKS, REFUSED, LOST, IGNORED, SKIPPED = "works", "refused", "lost", "ignored", "skipped"
DEFAULT_ERRORS = (ValueError, TypeError, RuntimeError)


@dataclass(frozen=True)
class Ends:
    """How a case ends; the error's type, and words of which its text has one."""

    how: str
    words: tuple[str, ...] = ()
    errors: tuple[type[Exception], ...] = DEFAULT_ERRORS


@dataclass(frozen=True)
class Listed:
    """Cases, as patterns of "kind/call/role", that do not end as a call should, and why."""

    cases: tuple[str, ...]
    ends: Ends
    why: str


#: The first row that fits a case holds.
LISTED = [
    Listed(
        (
            "neg/dist.all_gather/into",
            "neg/dist.gather/into",
            "neg/dist.all_gather_coalesced/into",
            "conj/dist.gather/*",
        ),
        Ends(WORKS),
        "torch passes lists of lists as they are, and the core writes through the view",
    ),
    Listed(
        (
            *(f"neg/{where}.*/{role}" for where in ("dist", "region") for role in ("in place", "into")),
            "conj/dist.reduce/*",
            "conj/dist.reduce_scatter*/into",
            "conj/region.reduce_scatter*/into",
        ),
        Ends(LOST),
        "torch hands a backend a copy of the view and drops what comes back; docs/troubleshooting.md says so",
    ),
    Listed(
        ("conj/dist.reduce_scatter*/from", "conj/region.reduce_scatter*/from"),
        Ends(WORKS),
        "only read: torch resolves it",
    ),
    Listed(
        ("conj/dist.*", "conj/region.*"),
        Ends(REFUSED, ("resolve_conj",)),
        "torch takes complex tensors as real ones, which it cannot with a lazily conjugated one; its error says so",
    ),
    Listed(
        (
            "meta/dist.scatter/from",
            "meta/dist.reduce_scatter/from",
            "meta/dist.all_gather/into",
            "meta/dist.gather/into",
        ),
        Ends(REFUSED, ("meta",)),
        "torch passes lists of lists to the backend",
    ),
    Listed(
        ("meta/dist.*", "meta/region.*"),
        Ends(IGNORED),
        "torch has kernels of its own for tensors without data, which do nothing, or none",
    ),
    Listed(
        (
            *(f"sparse/{where}.all_reduce{form}/*" for where in ("dist", "comm") for form in ("", "_async")),
            *(
                f"sparse/{call}/*"
                for call in ("backend.allreduce", "package.safe_all_reduce", "layers.OverlapScheduler")
            ),
        ),
        Ends(WORKS),
        "sparse all_reduces are offered",
    ),
    Listed(
        ("float8*/objects.*",),
        Ends(REFUSED, ("has no attribute 'dtype'",), (AttributeError,)),
        "torch cannot unpickle 8-bit floats; the exchange is over on all ranks",
    ),
    Listed(("*/objects.*",), Ends(WORKS), "objects are pickled, whatever is in them"),
    Listed(("quantized/backend.broadcast/*",), Ends(WORKS), "the bytes are moved"),
    Listed(
        (
            *(
                f"quantized/dist.{call}/*"
                for call in ("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all*")
            ),
            "quantized/dist.all_gather_coalesced/into",
        ),
        Ends(REFUSED, ("dtype", "QuantizedCPU")),
        "torch compares the dtypes of both tensors first",
    ),
    Listed(
        (
            "sparse/layers.autograd/*",
            "meta/layers.autograd/*",
            "quantized/layers.autograd/*",
            "0-dim/layers.autograd/*",
        ),
        Ends(SKIPPED),
        "parts of layers, whose tensors are dense and have a last dimension",
    ),
    Listed(
        ("0-dim/layers.MoEDispatcher/*", "channels-last/layers.MoEDispatcher/*"),
        Ends(REFUSED, ("expected (T, D)",)),
        "tokens are the rows of a matrix",
    ),
    Listed(
        ("float8*/layers.MoEDispatcher/*",),
        Ends(REFUSED, ("not implemented for 'Float8",)),
        "torch adds up no 8-bit floats; the exchange is over on all ranks",
    ),
]


def expected(name: str, kind: Kind, call: Call, role: str) -> tuple[Ends, bool]:
    """How a case ends, and whether that is listed."""
    case = f"{name}/{next(each for each, other in CALLS.items() if other is call)}/{role}"
    for row in LISTED:
        if any(fnmatchcase(case, pattern) for pattern in row.cases):
            return row.ends, True
    written = role != "from"
    if "compressed" in case and (kind.foreign or not kind.dtype.is_floating_point):
        return Ends(REFUSED, ("expected floats", "expected a dense one")), False
    if kind.foreign:
        return Ends(REFUSED, (*kind.foreign, "expected a dense one", "only moved")), False
    if name == "expanded" and written:
        return Ends(REFUSED, ("shares memory between its elements",)), False
    if name in ("conj", "neg") and written and "backend." not in case and "compressed" not in case:
        return Ends(REFUSED, (f"torch.is_{name} of",)), False
    if name.startswith("float8") and call.reduces:
        return Ends(REFUSED, ("cannot be combined, only moved",)), False
    return Ends(WORKS), False


def ordinary(me: int, group: Any, number: int) -> None:
    """A collective and a message each way, which find nothing of what was refused before."""
    total = torch.full((3,), float(me + number))
    dist.all_reduce(total, group=group)
    assert total.tolist() == [2.0 * number + 1] * 3, f"the next all_reduce gave {total.tolist()}"
    for sender in range(2):
        message = torch.full((2,), float(number if me == sender else -1))
        if me == sender:
            dist.send(message, group_dst=1 - sender, group=group)
        else:
            dist.recv(message, group_src=sender, group=group)
        assert message.tolist() == [float(number)] * 2, f"the next message was {message.tolist()}"


def visit(v: Visit, call: Call, ends: Ends, listed: bool) -> None:
    """Makes the call on this rank and judges how it ended."""
    alone = call.only.get(v.role)
    if ends.how in (REFUSED, IGNORED) and alone not in (None, v.me):
        return  # nothing comes from the other rank
    try:
        call.run(v)
    except (*DEFAULT_ERRORS, *ends.errors) as error:
        text = str(error)
        assert ends.how in (REFUSED, IGNORED) and isinstance(error, ends.errors), f"{type(error).__name__}: {text}"
        assert not ends.words or any(word in text for word in ends.words), text
        plain = text.replace("_", "")
        named = listed or any(name.replace("_", "") in plain for name in call.named.split("/"))
        assert named, f"the call's name is missing: {text}"
    else:
        assert ends.how != REFUSED, "it was not refused"
    if ends.how != WORKS:
        v.forget_results()
    wrong = v.wrong(call.tolerance)
    assert not wrong, wrong


def tour(ctx: Context, name: str, group: Any, only: tuple[str, ...] = ("*",)) -> int:
    """All calls with one kind of tensor, in all roles; returns how many."""
    import torch_sagellm

    comm = torch_sagellm.CPUBackend(group=group)
    kind, number = KINDS[name], 0
    for called, call in CALLS.items():
        for role in call.roles if any(fnmatchcase(called, pattern) for pattern in only) else ():
            ends, listed = expected(name, kind, call, role)
            if ends.how == SKIPPED:
                continue
            number += 1
            try:
                visit(Visit(kind, role, ctx.rank, group, comm), call, ends, listed)
                ordinary(ctx.rank, group, number)
            except Exception as error:
                raise AssertionError(f"{name}/{called}/{role}, which {ends.how}: {error}") from error
    if comm._thread is not None:
        comm._thread.close()
    return number


def on_one_host(ctx: Context, name: str) -> int:
    return tour(ctx, name, dist.group.WORLD)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_every_call_with(name: str) -> None:
    assert min(run_ranks(on_one_host, 2, name)) > 60


@pytest.mark.quick
@pytest.mark.parametrize("name", KINDS)
def test_ranks_of_one_process_with(name: str) -> None:
    """Each call, then an ordinary one of the same ranks."""
    import torch_sagellm

    kind = KINDS[name]
    comms = [each._member for each in torch_sagellm.create_ring_topology(2)]
    for called, call in RING.items():
        for order in ([0, 1], [1, 0]):
            visits = [Visit(kind, call.role, rank, None) for rank in order]
            refused = bool(kind.foreign) or (name == "expanded" and call.role != "from")
            refused = refused or (name.startswith("float8") and call.reduces)
            chosen = [comms[rank] for rank in order]
            if refused:
                with pytest.raises((ValueError, TypeError), match=f"sagellm {called}") as raised:
                    call.run(chosen, visits)
                words = (*kind.foreign, "on the CPU", "shares memory between its elements", "only moved")
                assert any(word in str(raised.value) for word in words), raised.value
            else:
                call.run(chosen, visits)
            for each in visits:
                if refused:
                    each.forget_results()
                assert not each.wrong(), f"{called} of rank {each.me}: {each.wrong()}"
            totals = [torch.ones(2), torch.full((2,), 2.0)]
            for comm, total in zip(comms, totals, strict=True):
                comm.all_reduce(total)
            assert [each.tolist() for each in totals] == [[3.0, 3.0]] * 2, f"after {called}"


def on_two_hosts(ctx: Context, names: list[str]) -> list[int]:
    enter(names[ctx.rank])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", 2), timeout=timedelta(seconds=30))
    calls = tuple(
        called
        for called in CALLS
        if not any(fnmatchcase(called, pattern) for pattern in ("layers.ring*", "objects.*", "backend.*"))
    )
    counts = [tour(ctx, name, dist.group.WORLD, calls) for name in KINDS]
    dist.destroy_process_group()
    return counts


@pytest.mark.filterwarnings("ignore")
def test_kinds_of_tensors_over_two_hosts(hosts: list[str]) -> None:
    with launch(on_two_hosts, 2, hosts, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        assert all(min(counts) > 40 for counts in job.values(90))
