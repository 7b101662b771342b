"""The last operations of one or many ranks as one Chrome trace, which Perfetto and chrome://tracing open.

``export.write_trace`` writes the trace of the running rank; ``merge_traces`` reads the files of many ranks. Importing
this module and merging needs neither torch nor the extension.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

#: The fields of a record that a trace contains.
DETAILS = (
    "number",
    "read",
    "written",
    "dtype",
    "op",
    "path",
    "reason",
    "state",
    "tensors",
    "root",
    "tag",
    "late",
    "together",
    "first",
    "last",
)
#: The rows of each group begin at a multiple of this, so that two groups never share a row.
ROWS = 1000
MESSAGES = ("send", "recv")
#: No rank ends one of these collectives before every rank has begun it. So the times of their ends show how the clocks
#: of hosts differ.
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

#: The largest difference, in nanoseconds, between the starts of one operation in two files. They differ because a trace
#: has microseconds as a double, and because each file reads the two clocks separately. The start is compared because a
#: later group of the same name numbers its operations from 1 again, and because messages have no number in the group.
#: Messages may follow each other closely, so their limit is smaller.
NEAR, NEAR_MESSAGES = 1_000_000, 250


@dataclass(frozen=True)
class Slice:
    """One operation on one rank. Times are nanoseconds since the epoch on the clock of the rank's host."""

    rank: int
    group: str
    kind: str
    start: int
    #: None if the operation was pending when its record was read; a trace then draws it until ``seen``.
    end: int | None
    #: Time at which the rank's records were read.
    seen: int
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The number of a collective in its group, which is the same on every rank; 0 for a message."""
        return 0 if self.kind in MESSAGES else int(self.args.get("number", 0))


def from_records(rank: int, group: str, records: Iterable[Mapping[str, Any]], now: int, wall: int) -> list[Slice]:
    """The slices of a group. ``rank`` is the global rank; ``now`` and ``wall`` are one moment on two clocks."""
    offset = wall - now
    return [
        Slice(
            rank=rank,
            group=group,
            kind=record["kind"],
            start=record["issued"] + offset,
            end=record["ended"] + offset if record["ended"] else None,
            seen=wall,
            args={
                **{name: record[name] for name in DETAILS if name in record},
                **{f"{name}_us": record[name] / 1e3 for name in ("waiting", "copying", "reducing")},
            },
        )
        for record in records
    ]


def events(slices: Sequence[Slice]) -> list[dict[str, Any]]:
    """Chrome's events: a process for each rank, and for each group as many rows as operations ran at the same time.

    Arrows (flow events) connect the same collective of several ranks.
    """
    found: list[dict[str, Any]] = []
    groups = sorted({(each.rank, each.group) for each in slices})
    for rank in sorted({rank for rank, _ in groups}):
        named = {"ph": "M", "pid": rank}
        found.append({**named, "name": "process_name", "args": {"name": f"rank {rank}"}})
        found.append({**named, "name": "process_sort_index", "args": {"sort_index": rank}})
    placed: list[tuple[Slice, int]] = []
    for rank, group in groups:
        row = [name for at, name in groups if at == rank].index(group) * ROWS
        mine = sorted((each for each in slices if (each.rank, each.group) == (rank, group)), key=lambda one: one.start)
        lanes = _lanes(mine)
        for lane in range(max(lanes, default=-1) + 1):
            title = f"group {group}" + (f", {lane + 1}" if lane else "")
            found.append({"ph": "M", "pid": rank, "name": "thread_name", "tid": row + lane, "args": {"name": title}})
        placed += [(each, row + lane) for each, lane in zip(mine, lanes, strict=True)]
    found += [_event(each, row) for each, row in placed]
    return found + _arrows(placed)


def _lanes(ordered: Sequence[Slice]) -> list[int]:
    """For each operation, in the order of their starts: the first row that is free at its start."""
    busy: list[int] = []  # for each row: the end of its last operation
    lanes = []
    for each in ordered:
        lane = next((lane for lane, free in enumerate(busy) if free <= each.start), len(busy))
        if lane == len(busy):
            busy.append(0)
        busy[lane] = each.seen if each.end is None else each.end
        lanes.append(lane)
    return lanes


def _event(each: Slice, row: int) -> dict[str, Any]:
    end = each.seen if each.end is None else each.end
    return {
        "ph": "X",
        "cat": "sagellm",
        "name": f"sagellm:{each.kind}",
        "pid": each.rank,
        "tid": row,
        "ts": each.start / 1e3,
        "dur": max(end - each.start, 0) / 1e3,
        "args": {**each.args, "group": each.group},
    }


def _arrows(placed: Sequence[tuple[Slice, int]]) -> list[dict[str, Any]]:
    calls: dict[tuple[str, str, int], list[tuple[Slice, int]]] = {}
    for each, row in placed:
        if each.number:
            calls.setdefault((each.group, each.kind, each.number), []).append((each, row))
    found = []
    for (group, kind, number), ranks in calls.items():
        ordered = sorted(ranks, key=lambda one: one[0].start)
        for at, (each, row) in enumerate(ordered if len(ordered) > 1 else []):
            step = "s" if at == 0 else "f" if at + 1 == len(ordered) else "t"
            arrow: dict[str, Any] = {"ph": step, "cat": "sagellm", "name": kind, "id": f"{group}/{kind}/{number}"}
            arrow |= {"pid": each.rank, "tid": row, "ts": each.start / 1e3}
            found.append(arrow | ({"bp": "e"} if step == "f" else {}))
    return found


# ------------------------------------------------------------------------------------------------- reading files


class Merged(NamedTuple):
    """The result of ``merge_traces``.

    Example::

        own = f"own-{dist.get_rank()}.json"
        torch_sagellm.write_trace(own)
        merged = torch_sagellm.merge_traces([own], f"merged-{dist.get_rank()}.json")
        print(merged.ranks, merged.operations, merged.shifts)
    """

    ranks: list[int]
    operations: int
    #: For each rank: the nanoseconds that were added to its times, if clocks were aligned.
    shifts: dict[int, int]


class _Plain(pickle.Unpickler):
    """Loads only numbers, texts, lists and dicts.

    A flight record contains nothing else; other pickles could run code.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no flight record does")


def read_file(path: str | os.PathLike[str]) -> list[Slice]:
    """Reads the operations in a file: of ``write_trace``, of ``SAGELLM_DUMP_DIR``, or a flight record, ours or torch's.

    It raises a ValueError for any other file.
    """
    data = Path(path).read_bytes()
    first = data.lstrip()[:1]
    try:
        if first in (b"", b"["):
            raise ValueError("it is empty" if not first else "it holds a list")
        found = json.loads(data) if first == b"{" else _load(data)
        if "traceEvents" in found:
            return _of_trace(found["traceEvents"])
        if "records" in found:
            rank = found["members"][found["rank"]]
            return from_records(rank, found["group"], found["records"], found["now"], found["wall"])
        if "entries" not in found:
            raise ValueError("it holds no operations")
        return _of_flight_record(_last_number(Path(path)), found["entries"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"sagellm: {path} is no trace of write_trace, no file of SAGELLM_DUMP_DIR and no flight record: {error}"
        ) from None


def _load(data: bytes) -> Any:
    """The content of a pickle. For a file that is not a pickle, Python raises one of many exceptions; convert them."""
    try:
        return _Plain(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise ValueError(str(error) if "it holds" in str(error) else "it is neither JSON nor a pickle") from None
    except Exception:
        raise ValueError("it is neither JSON nor a pickle") from None


def _last_number(path: Path) -> int:
    """The rank at the end of a flight record's file name."""
    digits = re.search(r"(\d+)$", path.stem if path.suffix in (".json", ".pickle", ".pkl") else path.name)
    if digits is None:
        raise ValueError("the name of a flight record ends with its rank")
    return int(digits[1])


def _of_trace(raw: Iterable[Mapping[str, Any]]) -> list[Slice]:
    slices = []
    for event in raw:
        if event.get("ph") != "X" or event.get("cat") != "sagellm":
            continue
        args = dict(event["args"])
        start = round(event["ts"] * 1e3)
        end = start + round(event["dur"] * 1e3)
        pending = args.get("state") == "pending"
        kind = event["name"].removeprefix("sagellm:")
        slices.append(Slice(event["pid"], str(args.pop("group", "")), kind, start, None if pending else end, end, args))
    return slices


def _of_flight_record(rank: int, entries: Iterable[Mapping[str, Any]]) -> list[Slice]:
    slices = []
    entries = list(entries)
    ends = [entry["time_discovered_completed_ns"] or entry["time_created_ns"] for entry in entries]
    for entry in entries:
        start = entry["time_created_ns"]
        end = entry["time_discovered_completed_ns"]
        if entry.get("duration_ms") and end is None:
            end = start + round(entry["duration_ms"] * 1e6)
        title = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
        args = {"number": entry["collective_seq_id"], "state": entry["state"]}
        args |= {name: entry[name] for name in ("input_sizes", "output_sizes", "input_dtypes") if name in entry}
        slices.append(
            Slice(rank, entry["process_group"][0], title.split(" ")[0], start, end, max(ends), {**args, "title": title})
        )
    return slices


def _files(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The given files, and the files in given folders; a ValueError if there is none."""
    found: list[Path] = []
    for each in map(Path, paths):
        if each.is_dir():
            found += sorted(path for path in each.iterdir() if path.is_file() and not path.name.startswith("."))
        elif each.is_file():
            found.append(each)
        else:
            raise ValueError(f"sagellm: there is no file or folder {each}")
    if not found:
        raise ValueError("sagellm: there is nothing to merge: the folders are empty")
    return found


def _once(slices: Iterable[Slice]) -> list[Slice]:
    """Each operation once, because two files may contain it. A record of the ended operation is preferred."""
    found: list[Slice] = []
    last: dict[tuple[int, str, str, int], int] = {}
    for each in sorted(slices, key=lambda each: (each.start, each.end is None)):
        key = (each.rank, each.group, each.kind, each.number)
        at = last.get(key)
        if at is not None and each.start - found[at].start <= (NEAR if each.number else NEAR_MESSAGES):
            if found[at].end is None:
                found[at] = each
            continue
        last[key] = len(found)
        found.append(each)
    return found


def _aligned(slices: list[Slice]) -> tuple[list[Slice], dict[int, int]]:
    """Shifts every rank's times so that its collectives end, in the median, at the same times as on the lowest rank
    with which it shares collectives."""
    ends: dict[int, dict[tuple[str, str, int], int]] = {}
    for each in slices:
        if each.end is not None and each.number and each.kind in TOGETHER:
            ends.setdefault(each.rank, {})[(each.group, each.kind, each.number)] = each.end
    shifts: dict[int, int] = {}
    for rank in sorted(ends):
        for other in sorted(shifts):
            common = ends[rank].keys() & ends[other].keys()
            if common:
                gaps = [ends[other][call] + shifts[other] - ends[rank][call] for call in common]
                shifts[rank] = round(statistics.median(gaps))
                break
        else:
            shifts[rank] = 0
    moved = []
    for each in slices:
        shift = shifts.get(each.rank, 0)
        end = None if each.end is None else each.end + shift
        moved.append(replace(each, start=each.start + shift, end=end, seen=each.seen + shift))
    return moved, shifts


def merge_traces(
    paths: Iterable[str | os.PathLike[str]], into: str | os.PathLike[str], *, align: bool = False
) -> Merged:
    """Merges the dumps of several ranks into one Chrome trace, the file ``into``.

    ``paths`` are files or folders of files: traces of ``write_trace``, files that failed groups wrote into
    ``SAGELLM_DUMP_DIR``, flight records of ``dump_flight_record`` or of torch. Times are those of each rank's host. If
    the clocks of hosts differ, ``align`` shifts the times of every rank so that collectives end together.

    It needs no process group. It raises a ValueError that names a file of another format, or folders without files.

    Example::

        torch_sagellm.write_trace(f"rank-{dist.get_rank()}.json")
        dist.barrier()  # every file is there
        if dist.get_rank() == 0:
            torch_sagellm.merge_traces([f"rank-{rank}.json" for rank in range(dist.get_world_size())], "job.json")
    """
    from torch_sagellm.observe import export

    slices = _once(each for path in _files(paths) for each in read_file(path))
    shifts: dict[int, int] = {}
    if align:
        slices, shifts = _aligned(slices)
    trace = {"traceEvents": events(slices), "displayTimeUnit": "ns"}
    if not slices:
        return Merged([], 0, shifts)  # do not overwrite an existing trace, which may contain more
    export.write_atomically(into, json.dumps(trace).encode())
    return Merged(sorted({each.rank for each in slices}), len(slices), shifts)
