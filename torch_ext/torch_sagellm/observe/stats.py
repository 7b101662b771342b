"""Statistics of the groups of this process, as plain dicts.

The core counts (``src/stats``); this file reads the counts.

Times are in milliseconds unless a name says otherwise, bandwidths in GB/s (10^9 bytes), sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from torch_sagellm._private import groups

if TYPE_CHECKING:
    from torch_sagellm import _C

#: For each kind, a function of the number of ranks: the bytes on a rank's bus for each byte of the tensor, as
#: nccl-tests defines them. Other kinds have 1. The benchmarks use these factors, too.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
}
MS = 1e6  # nanoseconds


class Latency(TypedDict):
    """Times from issue to end. Quantiles are accurate to an eighth."""

    avg_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


class OpStats(TypedDict):
    """Operations of one kind, or of one kind, path and size class."""

    count: int
    failed: int
    tensors: int
    bytes: int
    latency: Latency
    waiting_ms: float
    copying_ms: float
    reducing_ms: float
    algbw_gbs: float
    busbw_gbs: float


class SizeStats(OpStats):
    """One row of ``sizes``; ``up_to`` is the largest payload of the size class, or -1 if classes are mixed."""

    op: str
    path: str
    up_to: int


class Wait(TypedDict):
    """The waits of this rank for one peer."""

    count: int
    total_ms: float
    longest_ms: float


class Batches(TypedDict):
    """Operations that were fused; each tensor of a list counts as one."""

    batches: int
    ops: int
    ops_per_batch: float
    largest: int


class StepStats(TypedDict):
    """This process's steps of ``torch_sagellm.step()``, whatever the group; ``share`` is exposed divided by total
    time."""

    count: int
    total_ms: float
    exposed_ms: float
    share: float


class Gathered(TypedDict):
    """The statistics of all ranks.

    Example::

        everyone = torch_sagellm.gather_stats()  # every rank calls it
        if everyone["straggler"] is not None:
            print(everyone["waited_for_ms"][everyone["straggler"]])
    """

    #: The result of ``get_stats`` of each rank.
    ranks: list[dict[str, Any]]
    #: For each rank: the milliseconds that all other ranks together waited for it.
    waited_for_ms: list[float]
    #: The rank that was waited for longest; None if no rank waited.
    straggler: int | None
    summary: str


class Member(NamedTuple):
    """A group of this process that this backend serves."""

    name: str
    group: Any
    backend: Any


def members(group: Any = None) -> list[Member]:
    """The groups that ``group`` selects.

    A process group selects itself, None selects the default group, and "all" selects all groups of this process that
    this backend serves. It raises a ValueError if the group is not served by this backend, or was destroyed.
    """
    from torch.distributed import distributed_c10d as c10d

    if isinstance(group, str) and group == "all":
        # A copy, because another thread may create or destroy a group meanwhile.
        names = c10d._world.pg_names
        every = [Member(names.get(each, ""), each, groups.backend_of(each)) for each in list(c10d._world.pg_map)]
        return [each for each in every if each.backend is not None]
    if group is None:
        if not c10d.is_initialized():
            raise ValueError(
                "sagellm: there is no default process group; call init_process_group first, or pass group="
            )
        group = c10d._get_default_group()
    backend = groups.backend_of(group)
    if backend is None:
        raise ValueError(
            f"sagellm: the CPU tensors of group {group!r} are served by another backend, which keeps no statistics"
        )
    return [Member(c10d._world.pg_names.get(group, getattr(group, "group_name", "")), group, backend)]


def quantile(times: Sequence[tuple[int, int]], share: float, longest: int) -> int:
    """The upper bound of the bucket that contains the ``share`` quantile (0.5: the median), but at most ``longest``."""
    wanted, seen = share * sum(count for _, count in times), 0
    for bound, count in times:
        seen += count
        if seen >= wanted:
            return min(bound - 1, longest)
    return longest


def merged_times(cells: Iterable[_C.Cell]) -> list[tuple[int, int]]:
    """The merged buckets of all cells: for each bucket the first value beyond it, in nanoseconds, and its count."""
    sums: dict[int, int] = {}
    for cell in cells:
        for bound, count in cell["times"]:
            sums[bound] = sums.get(bound, 0) + count
    return sorted(sums.items())


#: The fields of a cell that are summed.
Sum = Literal["count", "failed", "tensors", "bytes", "whole", "took", "waiting", "copying", "reducing"]


def _sum(cells: Sequence[_C.Cell], ranks: int) -> OpStats:
    """One row from the cells of one kind."""

    def total(name: Sum) -> int:
        return sum(cell[name] for cell in cells)

    times, took = merged_times(cells), total("took")
    longest = max((cell["longest"] for cell in cells), default=0)
    ended = sum(count for _, count in times)
    algbw = total("whole") / took if took else 0.0
    bus = BUS_FACTORS.get(cells[0]["kind"]) if cells else None
    return {
        "count": total("count"),
        "failed": total("failed"),
        "tensors": total("tensors"),
        "bytes": total("bytes"),
        "latency": {
            "avg_ms": took / ended / MS if ended else 0.0,
            "p50_ms": quantile(times, 0.50, longest) / MS,
            "p90_ms": quantile(times, 0.90, longest) / MS,
            "p99_ms": quantile(times, 0.99, longest) / MS,
            "max_ms": longest / MS,
        },
        "waiting_ms": total("waiting") / MS,
        "copying_ms": total("copying") / MS,
        "reducing_ms": total("reducing") / MS,
        "algbw_gbs": algbw,
        "busbw_gbs": algbw * (bus(ranks) if bus else 1.0),
    }


def up_to(size_class: int) -> int:
    """The largest payload of a size class of the core."""
    return size_class if size_class <= 0 else 1 << (size_class - 1)


def _snapshot(member: Member) -> dict[str, Any]:
    from torch_sagellm._private import load

    kinds = load.extension().KINDS
    raw: _C.Stats = member.backend._stats()
    cells, ranks = raw["cells"], raw["size"]
    ops = {kind: _sum([cell for cell in cells if cell["kind"] == kind], ranks) for kind in kinds}
    sizes: list[SizeStats] = [
        {"op": cell["kind"], "path": cell["path"], "up_to": up_to(cell["size_class"]), **_sum([cell], ranks)}
        for cell in sorted(cells, key=lambda cell: (kinds.index(cell["kind"]), cell["path"], cell["size_class"]))
    ]
    batches: Batches = {
        "batches": raw["batches"],
        "ops": raw["batched_ops"],
        "ops_per_batch": raw["batched_ops"] / raw["batches"] if raw["batches"] else 0.0,
        "largest": raw["largest_batch"],
    }
    waits: dict[int, Wait] = {
        rank: {"count": count, "total_ms": total / MS, "longest_ms": longest / MS}
        for rank, (count, total, longest) in enumerate(raw["waits"])
        if rank != raw["rank"]
    }
    took = sum(cell["took"] for cell in cells)
    ended = sum(count for cell in cells for _, count in cell["times"])
    return {
        "group": member.name,
        "rank": raw["rank"],
        "size": ranks,
        "seconds": (raw["now"] - raw["since"]) / 1e9,
        **{f"{kind}_count": ops[kind]["count"] for kind in kinds},
        "total_count": sum(op["count"] for op in ops.values()),
        "failed_count": sum(op["failed"] for op in ops.values()),
        "total_bytes": sum(op["bytes"] for op in ops.values()),
        "avg_latency_ms": took / ended / MS if ended else 0.0,
        "fused_batches": raw["batches"],
        "fused_ops": raw["batched_ops"],
        "host_staged_count": raw["host_staged_count"],
        "host_staged_bytes": raw["host_staged_bytes"],
        "ops": ops,
        "sizes": sizes,
        "batches": batches,
        "waits": waits,
        "step": _steps(),
        "shared_memory": load.extension()._shared_usage(),
    }


def _steps() -> StepStats:
    from torch_sagellm._private import load

    sums = load.extension()._step_sums()
    waited = sums["in_calls"] + sums["in_futures"]
    return {
        "count": sums["count"],
        "total_ms": sums["took"] / MS,
        "exposed_ms": waited / MS,
        "share": waited / sums["took"] if sums["took"] else 0.0,
    }


def get_stats(group: Any = None) -> dict[str, Any]:
    """The statistics of ``group`` on this rank since it was created or since ``reset_stats``.

    ``group`` is a process group, None for the default one, or "all": then the result is a dict of such dicts by name.

    Keys: ``group``, ``rank``, ``size``; ``seconds`` of counting; for each kind of operation the calls without an error,
    as ``all_reduce_count`` and so on; ``total_count``, ``failed_count``; ``total_bytes``, the caller's payload;
    ``avg_latency_ms`` of all operations; ``fused_batches`` and ``fused_ops``; ``host_staged_count`` and
    ``host_staged_bytes``, of operations whose tensors were on a device and went through host memory; ``ops``, an
    ``OpStats`` by kind; ``sizes``, a list of ``SizeStats``, by kind, path and power of two; ``batches``, a ``Batches``;
    ``waits``, a ``Wait`` by peer; ``step``, a ``StepStats`` of this process; ``shared_memory``, about this process's
    tensors that peers can reach: ``limit``, ``used``, ``cached`` and ``taken_out`` in bytes, the counts ``extents`` and
    ``refused``, ``why_not``.

    It raises a ValueError if this backend does not serve the group.

    Example::

        dist.all_reduce(torch.ones(1000))
        assert torch_sagellm.get_stats()["total_bytes"] >= 4000
    """
    found = [_snapshot(member) for member in members(group)]
    if isinstance(group, str):
        return {each["group"]: each for each in found}
    return found[0]


def reset_stats(group: Any = None) -> None:
    """Resets all counts; ``group`` as for ``get_stats``. The records of the last operations are kept.

    Example::

        torch_sagellm.reset_stats()
        assert torch_sagellm.get_stats()["total_count"] == 0
    """
    for member in members(group):
        member.backend._reset_stats()


def gather_stats(group: Any = None) -> Gathered:
    """The statistics of all ranks of one group, on every rank. Collective: every rank must call it.

    Each rank's statistics are read before the ranks exchange them. See ``Gathered``.

    Example::

        everyone = torch_sagellm.gather_stats()  # every rank calls it
        print(everyone["straggler"])
    """
    import torch.distributed as dist

    member = members(group)[0]
    own = _snapshot(member)
    ranks: list[Any] = [None] * own["size"]
    dist.all_gather_object(ranks, own, group=member.group)
    return summarise(ranks)


def summarise(ranks: list[dict[str, Any]]) -> Gathered:
    """Finds the straggler from the statistics of all ranks, in rank order."""
    waited_for = [0.0] * len(ranks)
    for each in ranks:
        for peer, wait in each["waits"].items():
            waited_for[peer] += wait["total_ms"]
    total = sum(waited_for)
    lines = [
        f"group {ranks[0]['group']}: {len(ranks)} ranks, {ranks[0]['total_count']} operations on rank 0, "
        f"average {ranks[0]['avg_latency_ms']:.3f} ms"
    ]
    straggler = max(range(len(ranks)), key=waited_for.__getitem__) if total > 0 else None
    if straggler is None:
        lines.append("no rank waited")
    else:
        lines.append(
            f"rank {straggler} was waited for longest: the others waited {waited_for[straggler]:.1f} ms for it, "
            f"{100 * waited_for[straggler] / total:.0f} % of all waiting"
        )
    for each in ranks:
        most = max(each["waits"].items(), key=lambda item: item[1]["total_ms"], default=None)
        if most is not None and most[1]["total_ms"] > 0:
            lines.append(f"rank {each['rank']} waited most for rank {most[0]}: {most[1]['total_ms']:.1f} ms")
    return {"ranks": ranks, "waited_for_ms": waited_for, "straggler": straggler, "summary": "\n".join(lines)}
