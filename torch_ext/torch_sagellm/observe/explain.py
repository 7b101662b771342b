"""Explains the algorithm choice of an operation: ``torch_sagellm.explain``.

The core chooses and explains; this file converts its answer to readable text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch_sagellm._private import groups, nearest
from torch_sagellm._private.units import parse_size, show_time, size_text
from torch_sagellm.observe import stats as statistics

if TYPE_CHECKING:
    import torch

    from torch_sagellm import _C

#: Other names of the same operations.
ALIASES = {
    "allreduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}
#: Operations with one choice for all sizes: a barrier has no bytes, and no rank alone knows the bytes of an all_to_all.
WITHOUT_SIZE = ("barrier", "all_to_all")
#: The basis of the model's times, as text: for a group over several hosts, and for a group on one host.
BY_LINK = "by the link as it was measured"
ELSEWHERE = "by constants of another machine"
#: Prefix of the path of device tensors that go through host memory.
STAGED = "staged: from the device to host memory and back"


@dataclass(frozen=True)
class Alternative:
    """An algorithm that was not chosen.

    Example::

        for other in torch_sagellm.explain("all_reduce", 1 << 20).rejected:
            print(other.way, other.predicted, other.why_not)
    """

    #: The algorithm as rules name it: "slots", "rounds(128KiB)".
    way: str
    #: Seconds by the cost model alone (compare ``Explanation.by_model``), or None if the algorithm cannot run the
    #: operation.
    predicted: float | None
    why_not: str


@dataclass(frozen=True)
class Batch:
    """The operations that were fused.

    Example::

        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()
        together = torch_sagellm.explain(work).batch
        print(together)  # "alone", or with which others
    """

    #: Number of operations, including this one; 1 if it was not fused.
    operations: int
    #: Numbers of the first and the last operation in the group. On one host some numbers between them may be missing,
    #: and messages, which are numbered separately, may be among the operations.
    first: int
    last: int
    #: Bytes of one rank in all operations together, if one algorithm was chosen for all (between hosts); otherwise
    #: None.
    nbytes: int | None

    def __str__(self) -> str:
        if self.operations == 1:
            return "alone"
        if self.last - self.first + 1 == self.operations:
            others = f"operations {self.first} to {self.last}"
        elif self.first == self.last:
            others = f"{self.operations - 1} others"
        else:
            others = f"{self.operations - 1} others, numbers {self.first} to {self.last}"
        if self.nbytes is None:
            return f"{others}, which ended in the same pass"
        return f"{others}, one batch of {size_text(self.nbytes)}"


@dataclass(frozen=True)
class Explanation:
    """The algorithm choice of one operation, and its reason. ``str()`` of it is readable text.

    Example::

        found = torch_sagellm.explain("all_reduce", 1 << 20)
        print(found.choice, found.reason, found.predicted)
    """

    #: "all_reduce", "broadcast", ...
    op: str
    #: Bytes of one rank: its block of an all_gather or gather, the whole input of a scatter or reduce_scatter; 0 for a
    #: barrier, and for an all_to_all, because no rank alone knows its sizes.
    nbytes: int
    ranks: int
    hosts: int
    #: The algorithm: "slots", "rounds(512KiB)", "local copy", "message", or the delegate's name.
    choice: str
    #: One word for the reason, the same as in the record of an operation: "fits_slot", "measured", "override", ...
    reason: str
    #: The rule, measurement or default that decided.
    decided: str
    #: What carries the operation, as text: shared memory of one host, a link between hosts, a local copy, a delegate.
    path: str
    #: Predicted seconds: the cost model's time, scaled to calls of this group or, before it has made such calls, of
    #: earlier groups on this machine (``scaled_by`` says which). If there were no such calls, it equals ``by_model``.
    predicted: float | None
    #: Median in seconds from the decision table, or None.
    measured: float | None
    #: What the rules, tables or models of lower priority would have chosen, highest priority first.
    overruled: list[str]
    rejected: list[Alternative]
    #: The decision table's file, or the reason why there is none.
    table: str
    #: Choice and reason as one number. ``code`` is computed now. ``recorded`` was stored when a past operation started;
    #: it is None for a hypothetical operation, and before the start. If both exist, they are equal.
    code: int
    recorded: int | None = None
    #: Number of the operation in its group, for a past operation.
    sequence: int | None = None
    #: The operations with which a past operation was fused. None if they are not known yet, or if the operation failed
    #: in a group on one host.
    batch: Batch | None = None
    #: For a past operation: seconds from its issue to its end, including waits for other ranks. None while it runs, and
    #: if a device's library carries it.
    took: float | None = None
    #: Whether the tensors are on a device and copies of them in host memory are sent; see docs/devices.md.
    staged: bool = False
    #: For a coalesced call of several dtypes: the other operations that it consists of.
    parts: list[Explanation] = field(default_factory=list)
    #: Seconds by the cost model alone, as in ``rejected``; None if the model does not cover the choice.
    by_model: float | None = None
    #: Whose calls ``predicted`` was scaled to: "this group", "earlier groups on this machine", or "" for none.
    scaled_by: str = ""
    #: The group's operations of this kind and size class so far: their number, and their median time in seconds from
    #: issue to end, including waits for other ranks. None if there was none, or if no group was given.
    seen: tuple[int, float] | None = None

    def __str__(self) -> str:
        where = "one rank" if self.ranks == 1 else f"{self.ranks} ranks"
        where += f" on {self.hosts} hosts" if self.hosts > 1 else ""
        size = "" if self.op in WITHOUT_SIZE else f" of {size_text(self.nbytes)}"
        number = "" if self.sequence is None else f" number {self.sequence}"
        lines = [f"{self.op}{number}{size} on {where}: {self.choice}", f"  decided by  {self.decided}"]
        lines.append(f"  path        {self.path}")
        if self.batch is not None:
            lines.append(f"  together    {'with ' if self.batch.operations > 1 else ''}{self.batch}")
        if self.took is not None:
            lines.append(f"  took        {show_time(self.took, 2)}, with waits for other ranks")
        if self.measured is not None:
            lines.append(f"  measured    {show_time(self.measured)}")
        if self.seen is not None:
            count, median = self.seen
            lines.append(f"  in group    {show_time(median, 2)}, median of {count} calls of this size")
        lines += self._prediction()
        lines += [f"  overruled   {what}" for what in self.overruled]
        lines += [f"  not taken   {other.way}: {other.why_not}" for other in self.rejected]
        if self.table:
            lines.append(f"  table       {self.table}")
        lines += [str(part) for part in self.parts]
        return "\n".join(lines)

    def _prediction(self) -> list[str]:
        model = "" if self.by_model is None else f"about {show_time(self.by_model, 1)}"
        basis = BY_LINK if self.hosts > 1 else ELSEWHERE
        if self.predicted is None or not self.scaled_by:
            return [f"  predicted   {model}, {basis}"] if model else []
        alone = f" ({model} {basis})" if model else ""
        return [f"  predicted   {show_time(self.predicted, 2)}, by the calls of {self.scaled_by}{alone}"]


def operation_name(op: str, known: Iterable[str]) -> str | None:
    """Finds the operation that a word means, in any spelling (``all_reduce``, ``AllReduce``); None if it means none of
    ``known``."""
    plain = op.lower().replace("-", "_")
    plain = ALIASES.get(plain, plain).replace("_", "")
    return next((name for name in known if name.replace("_", "") == plain), None)


def kind_name(op: str) -> str:
    """The core's name of an operation; the ValueError for an unknown one lists the known names."""
    from torch_sagellm._private import load

    known = load.extension().KINDS
    name = operation_name(op, known)
    if name is None:
        near = nearest.meant(op, known)
        raise ValueError(f"sagellm explain: {op!r} is no operation; expected one of {', '.join(known)}{near}")
    return name


def dtype_name(dtype: torch.dtype | str | None) -> str:
    """The core's name of an element type."""
    from torch_sagellm._private import load

    name, known = "float32" if dtype is None else str(dtype).removeprefix("torch."), load.extension().DTYPES
    if name not in known:
        near = "" if name.startswith("float8") else nearest.meant(name, known)
        import torch

        why = "cannot be combined" if isinstance(getattr(torch, name, None), torch.dtype) else "is no type of elements"
        raise ValueError(f"sagellm explain: dtype={dtype} {why}; expected one of {', '.join(known)}{near}")
    return name


def backend_of(group: Any = None) -> Any:
    """The sagellm backend that serves CPU tensors of a group; None means the default group."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("sagellm: there is no process group; make one first, or say ranks= for one that might be")
    if (given := groups.own(group)) is not None:
        return given
    found = group._get_backend(torch.device("cpu"))
    backend = groups.own(found)
    if backend is None:
        raise ValueError(f"sagellm: the group is served by {type(found).__name__}, which sagellm did not make")
    return backend


def explain(
    what: Any = None,
    nbytes: int | str | torch.Tensor | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    group: Any = None,
    ranks: int | None = None,
    sequence: int | None = None,
    device: torch.device | str = "cpu",
) -> Explanation:
    """Explains the algorithm choice of an operation.

    ``explain("all_reduce", nbytes, dtype=torch.float32, group=None)`` explains a hypothetical operation in the default
    group or another one. With ``ranks=`` it explains the operation for a group of that many ranks of this host; no such
    group need exist. ``nbytes`` is the number of bytes of one rank: a number, a text such as "1MiB", or the tensor
    itself. ``device=`` is the device of the tensors. ``explain(work)`` explains an operation that was called, by its
    Work. ``explain(sequence=17, group=None)`` explains a collective by its number in the group, as long as it is among
    the last that the group remembers (1024 operations, or ``SAGELLM_RING``).

    It raises a ValueError if the operation, the dtype or the group is unknown, or if no operation has that number.

    Example::

        print(torch_sagellm.explain("all_reduce", 1 << 20))  # what a call of this size would do, and why
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()
        assert torch_sagellm.explain(work).op == "all_reduce"  # what it did
    """
    from torch_sagellm._private import load

    if sequence is not None:
        if not (what is None and nbytes is None and dtype is None and ranks is None):
            raise ValueError("sagellm explain: sequence= names a past operation; only group= goes with it")
        if sequence < 1:
            raise ValueError(f"sagellm explain: sequence is {sequence}; the collectives of a group are counted from 1")
        backend = backend_of(group)
        return read(backend._explain_number(sequence), delegate=_delegate_of(backend))
    if isinstance(what, str):
        kind = kind_name(what)
        if nbytes is None and kind not in WITHOUT_SIZE:
            raise ValueError(f"sagellm explain: nbytes is missing; how large is the {what}?")
        size, name = _bytes_of(nbytes), dtype_name(dtype)
        if ranks is not None:
            if ranks < 1:
                raise ValueError(f"sagellm explain: ranks is {ranks}, expected 1 or more")
            if str(device).partition(":")[0] != "cpu":
                raise ValueError(
                    f"sagellm explain: device is {device}; only a group that exists knows how it serves one"
                )
            return read(load.extension().explain_without_group(kind, size, name, ranks))
        backend = backend_of(group)
        found = read(backend._explain(kind, size, name), delegate=_delegate_of(backend))
        found = replace(found, seen=_seen(backend, kind, size, found.ranks))
        where = str(device).partition(":")[0]
        if where == "cpu":
            return found
        library = backend._device_library(where)
        if library:
            return _by_library(kind, size, found.ranks, library)
        return _staged(found, where, backend._device_reason(where))
    if what is None:
        raise ValueError("sagellm explain: name an operation and its bytes, or pass a Work or sequence=")
    return _explain_work(what)


def _bytes_of(given: int | str | torch.Tensor | None) -> int:
    """The bytes of a number, of a text such as "1MiB", or of a tensor."""
    import torch

    if isinstance(given, torch.Tensor):
        return int(given.nbytes)
    found = parse_size(given) if isinstance(given, str) else given or 0
    if not isinstance(found, int):
        raise TypeError(f"sagellm explain: nbytes is a {type(given).__name__}, expected bytes, a text or a tensor")
    if not 0 <= found < 1 << 63:
        raise ValueError(f"sagellm explain: nbytes is {found}, expected 0 to {(1 << 63) - 1}")
    return found


def _seen(backend: Any, kind: str, nbytes: int, ranks: int) -> tuple[int, float] | None:
    """The number and the median time of a group's operations of one kind, in the size class of ``nbytes`` bytes."""
    if kind not in ("all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "barrier"):
        return None  # for these kinds the counted size depends on the rank
    payload = nbytes * ranks if kind == "all_gather" else nbytes
    size_class = (payload - 1).bit_length() + 1 if payload else 0
    cells = [cell for cell in backend._stats()["cells"] if (cell["kind"], cell["size_class"]) == (kind, size_class)]
    times = statistics.merged_times(cells)
    count = sum(number for _, number in times)
    if not count:
        return None
    return count, statistics.quantile(times, 0.5, max(cell["longest"] for cell in cells)) / 1e9


def carrier(backend: Any, device: str) -> str:
    """What carries tensors on devices of that type in a group: "by" a library, or "through host memory" and why."""
    library: str = backend._device_library(device)
    return f"by {library}" if library else f"through host memory: {backend._device_reason(device)}"


def _by_library(
    op: str, nbytes: int, ranks: int, library: str, decided: str = "", sequence: int | None = None, ran: str = ""
) -> Explanation:
    """The explanation of a call on device tensors that the device vendor's library executes."""
    return Explanation(
        op=op,
        nbytes=nbytes,
        ranks=ranks,
        hosts=1,
        choice=f"{library}: {ran}" if ran else library,
        reason="vendor",
        decided=decided or "tensors on a device go to the library of its vendor, which chooses the algorithm",
        path=f"the library of the device's vendor, {library}",
        predicted=None,
        measured=None,
        overruled=[],
        rejected=[],
        table="",
        code=0,
        recorded=None,
        sequence=sequence,
        batch=None,
        staged=False,
    )


def _read_carried(found: _C.Carried) -> Explanation:
    return _by_library(
        found["kind"],
        found["bytes"],
        found["ranks"],
        found["library"],
        found["decided"],
        sequence=found["number"],
        ran=found["ran"],
    )


def _staged(found: Explanation, device: str, why: str) -> Explanation:
    """The same explanation for tensors on a device, which go through host memory."""
    return replace(found, staged=True, path=f"{STAGED} ({device}: {why}), then {found.path}")


def _explain_work(work: Any) -> Explanation:
    from torch_sagellm._private import load

    answers: list[_C.Explanation | _C.Carried] = load.extension().explain_work(work)
    parts = [_read_carried(found) if "library" in found else read(found) for found in answers]
    if not parts:
        raise ValueError(
            f"sagellm explain: {type(work).__name__} is no operation of the engine: gloo serves it, or it is one "
            "that is made of others; explain(op, nbytes, group=...) says how the group is served"
        )
    fields = {**parts[0].__dict__, "parts": parts[1:]}
    return Explanation(**fields)


def _delegate_of(backend: Any) -> str:
    return str(backend.options.delegate or "gloo")


def read(found: _C.Explanation, delegate: str = "gloo") -> Explanation:
    """Converts the core's answer to the units and words of this module.

    ``delegate`` names the backend of torch that serves the group if the answer says that it is delegated.
    """
    past = found["past"]
    served = found["reason"] == "delegated"
    hosts = found["hosts"]
    paths = {"local copy": "local copy, the group has one rank", "delegate": delegate}
    shared = "shared memory of one host"
    if hosts > 1:
        shared = f"shared memory inside each of {hosts} hosts, a link between them"
    path = paths.get(found["choice"], shared)
    staged = past is not None and past["host_staged"]
    return Explanation(
        op=found["kind"],
        nbytes=found["bytes"],
        ranks=found["ranks"],
        hosts=hosts,
        choice=delegate if served else found["choice"],
        reason=found["reason"],
        decided=found["decided"],
        path=f"{STAGED}, then {path}" if staged else path,
        predicted=seconds(found["scaled_ns"] or found["predicted_ns"]),
        by_model=seconds(found["predicted_ns"]),
        scaled_by=found["scaled_by"],
        measured=seconds(found["measured_ns"]),
        overruled=found["overruled"],
        rejected=[
            Alternative(each["way"], seconds(each["predicted_ns"]), each["why_not"]) for each in found["rejected"]
        ],
        table=found["table"],
        code=found["code"],
        recorded=(past["recorded"] or None) if past else None,
        sequence=past["number"] if past else None,
        batch=_batch(past["batch"]) if past and past["batch"] else None,
        took=seconds(past["took_ns"]) if past else None,
        staged=staged,
    )


def _batch(found: _C.Batch) -> Batch:
    nbytes = None if found["bytes"] < 0 else found["bytes"]
    return Batch(found["operations"], found["first"], found["last"], nbytes)


def seconds(nanoseconds: int) -> float | None:
    """Converts nanoseconds to seconds; 0 means unknown and becomes None."""
    return nanoseconds / 1e9 or None
