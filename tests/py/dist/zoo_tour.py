"""The expected outcome of each case of the zoo, and a tour of all cases on two ranks, for tests on the CPU, over hosts
and on devices. A case is a kind of tensor in a role of a call (`zoo.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from harness import Context
from zoo import CALLS, KINDS, Call, Kind, Visit

#: Outcomes of a case, in this order: it returns the results; it raises an error; it returns without an error and all
#: memory is unchanged; it is `REFUSED` or `LOST`; it is not tried.
WORKS, REFUSED, LOST, IGNORED, SKIPPED = "works", "refused", "lost", "ignored", "skipped"
DEFAULT_ERRORS = (ValueError, TypeError, RuntimeError)


@dataclass(frozen=True)
class Ends:
    """The outcome of a case, the error types, and words of which the error must contain one."""

    how: str
    words: tuple[str, ...] = ()
    errors: tuple[type[Exception], ...] = DEFAULT_ERRORS


@dataclass(frozen=True)
class Listed:
    """Cases, as patterns of "kind/call/role", whose outcome is not the usual one, and why."""

    cases: tuple[str, ...]
    ends: Ends
    why: str


#: The first row that matches a case applies.
LISTED = [
    Listed(
        (
            "neg/dist.all_gather/into",
            "neg/dist.gather/into",
            "neg/dist.all_gather_coalesced/into",
            "conj/dist.gather/*",
            "conj/dist.gather_single/from",
        ),
        Ends(WORKS),
        "torch passes lists of lists as they are, and the core writes through the view",
    ),
    Listed(
        (
            *(f"neg/{where}.*/{role}" for where in ("dist", "region") for role in ("in place", "into")),
            "conj/dist.reduce/*",
            "conj/dist.gather_single/into",
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
                for call in ("all_gather", "gather", "gather_single", "reduce_scatter", "scatter", "all_to_all*")
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
    Listed(("0-dim/package.send_pages/*",), Ends(SKIPPED), "pages are the rows of a tensor"),
    Listed(("conj/package.send_pages/*", "neg/package.send_pages/*"), Ends(WORKS), "pages are copied into the view"),
    Listed(
        ("sparse/package.send_pages/from", "meta/package.send_pages/from", "quantized/package.send_pages/from"),
        Ends(REFUSED, ("expected a dense one", "rank 0 has given up")),
        "the sender finds it when it comes to the layer, and tells the receiver",
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


@dataclass(frozen=True)
class Place:
    """The device of the tensors, and the outcomes that differ there."""

    device: str = "cpu"
    #: Whether a receive may leave the source open.
    anyone: bool = True
    #: Whether the device adds floats of 8 bits.
    adds_float8: bool = False
    listed: tuple[Listed, ...] = ()


def expected(name: str, kind: Kind, call: Call, role: str, place: Place) -> tuple[Ends, bool]:
    """Returns the outcome of a case, and whether a list has it. The lists of the place come first."""
    case = f"{name}/{next(each for each, other in CALLS.items() if other is call)}/{role}"
    for row in [*place.listed, *LISTED]:
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
    if name.startswith("float8") and call.reduces and not place.adds_float8:
        return Ends(REFUSED, ("cannot be combined, only moved", "does not combine")), False
    return Ends(WORKS), False


def ordinary(me: int, group: Any, number: int, device: str = "cpu") -> None:
    """A collective and a message in each direction. They must not receive anything that a refused call has sent."""
    total = torch.full((3,), float(me + number), device=device)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [2.0 * number + 1] * 3, f"the next all_reduce gave {total.tolist()}"
    for sender in range(2):
        message = torch.full((2,), float(number if me == sender else -1), device=device)
        if me == sender:
            dist.send(message, group_dst=1 - sender, group=group)
        else:
            dist.recv(message, group_src=sender, group=group)
        assert message.tolist() == [float(number)] * 2, f"the next message was {message.tolist()}"


def visit(v: Visit, call: Call, ends: Ends, listed: bool) -> None:
    """Makes the call on this rank and checks its outcome."""
    alone = call.only.get(v.role)
    if ends.how in (REFUSED, IGNORED) and alone not in (None, v.me):
        return  # the other rank sends nothing
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


def tour(ctx: Context, name: str, group: Any, only: tuple[str, ...] = ("*",), place: Place = Place()) -> int:
    """Makes all calls with one kind of tensor, in all roles. Returns their number."""
    import torch_sagellm

    on_cpu = place.device == "cpu"
    comm = torch_sagellm.CPUBackend(group=group) if on_cpu else torch_sagellm.create_comm_backend(group=group)
    kind, number = KINDS[name], 0
    for called, call in CALLS.items():
        for role in call.roles if any(fnmatchcase(called, pattern) for pattern in only) else ():
            ends, listed = expected(name, kind, call, role, place)
            if ends.how == SKIPPED:
                continue
            number += 1
            try:
                visit(Visit(kind, role, ctx.rank, group, comm, place.device, place.anyone), call, ends, listed)
                ordinary(ctx.rank, group, number, place.device)
            except Exception as error:
                raise AssertionError(f"{name}/{called}/{role}, which {ends.how}: {error}") from error
    if comm._thread is not None:
        comm._thread.close()
    return number
