"""The last operations of every group in the format of torch's flight recorder, for torch's analyser.

``python -m torch.distributed.flight_recorder.fr_trace <folder>`` reads one file for each rank; the file's name ends
with the rank.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_sagellm.observe import export, stats

if TYPE_CHECKING:
    from torch_sagellm import _C

#: The format version of these files, as torch writes it.
VERSION = "2.10"
#: Messages are numbered from here on. Collectives have smaller numbers, and the analyser compares all entries that
#: have the same number.
MESSAGES_FROM = 1 << 32
NO_TYPE = 255


class _Group(NamedTuple):
    """A group's records, and the facts about the group that the analyser needs."""

    name: str
    desc: str
    rank: int
    ranks: list[int]
    #: Nanoseconds to add to the records' clock to get the time since the epoch.
    offset: int
    records: list[_C.Record]


def _live(member: stats.Member) -> _Group:
    import torch.distributed as dist

    raw: _C.Stats = member.backend._stats()
    desc = getattr(member.group, "group_desc", "") or "undefined"
    ranks = dist.get_process_group_ranks(member.group)
    return _Group(member.name, desc, raw["rank"], ranks, raw["wall"] - raw["now"], member.backend._records())


def _sizes(record: _C.Record) -> tuple[list[list[int]], list[list[int]], str]:
    """Inputs and outputs in elements, as the analyser compares them between ranks, and their dtype."""
    from torch_sagellm._private import load

    name, size = "Byte", 1
    if record["element"] != NO_TYPE:
        name, size = load.extension()._element(record["element"])
    read, written = record["read"] // size, record["written"] // size
    kind = record["kind"]
    if kind == "barrier":
        return [[]], [[]], name
    if kind in ("broadcast", "reduce", "send", "recv"):
        read = written = max(read, written)
    # Only the root of a gather has outputs, and only the root of a scatter has inputs; an empty shape is not compared.
    inputs = [[read]] if read or kind != "scatter" else [[]]
    outputs = [[written]] if written or kind != "gather" else [[]]
    return inputs, outputs, name


def _title(record: _C.Record, rank: int) -> str:
    kind = record["kind"]
    if kind == "send":
        return f"sagellm:send {rank}->{record['root']}"
    if kind == "recv":
        source = record["root"] if record["root"] >= 0 else record["late"]
        return f"sagellm:recv {rank}<-{source if source >= 0 else '?'}"
    return f"sagellm:{kind}"


def _frames(record: _C.Record) -> list[dict[str, Any]]:
    from torch_sagellm.observe import sites

    file, line, function = sites.site_of(record["site"])
    return [{"name": function, "filename": file, "line": line}] if file else []


def _entries(groups: Iterable[_Group]) -> list[dict[str, Any]]:
    """All records as entries for the analyser, in the order of their issue."""
    entries: list[dict[str, Any]] = []
    lost = 0
    for at, group in enumerate(groups):
        lost += group.records[0]["id"] if group.records else 0
        last = 0  # number of the previous collective
        for record in group.records:
            if not record["counts"] and record["tensors"] == 0:
                continue  # a part of a call; the call has its own record
            message = record["kind"] in ("send", "recv")
            last = last if message else record["number"]
            inputs, outputs, dtype = _sizes(record)
            done = record["state"] == "done"
            created = record["issued"] + group.offset
            entries.append(
                {
                    "pg_id": at,
                    "process_group": (group.name, group.desc),
                    "collective_seq_id": last,
                    "p2p_seq_id": MESSAGES_FROM + record["id"] if message else 0,
                    "op_id": record["id"] + 1,
                    "profiling_name": _title(record, group.rank),
                    "time_created_ns": created,
                    "duration_ms": (record["ended"] - record["issued"]) / 1e6 if done else None,
                    "input_sizes": inputs,
                    "input_dtypes": [dtype] * len(inputs),
                    "output_sizes": outputs,
                    "output_dtypes": [dtype] * len(outputs),
                    "state": "completed" if done else "started",
                    "time_discovered_started_ns": created,
                    "time_discovered_completed_ns": record["ended"] + group.offset if done else None,
                    "retired": record["state"] != "pending",
                    "timeout_ms": 0,
                    "is_p2p": message,
                    "frames": _frames(record),
                }
            )
    entries.sort(key=lambda entry: entry["time_created_ns"])
    # The analyser drops entries that some rank has overwritten. It finds these entries by their ids.
    for at, entry in enumerate(entries):
        entry["record_id"] = lost + at
    return entries


def snapshot(group: Any = "all") -> dict[str, Any]:
    """The last operations of the groups that exist, like a dump of torch's recorder; ``group`` as for ``get_stats``."""
    return _dump([_live(member) for member in stats.members(group)])


def _dump(groups: list[_Group]) -> dict[str, Any]:
    config = {
        group.name: {"name": group.name, "desc": group.desc, "ranks": json.dumps(sorted(group.ranks))}
        for group in groups
    }
    status = {
        str(at): {
            "last_enqueued_collective": max((record["number"] for record in group.records), default=0),
            "last_completed_collective": max(
                (record["number"] for record in group.records if record["state"] == "done"), default=0
            ),
        }
        for at, group in enumerate(groups)
    }
    return {"version": VERSION, "pg_config": config, "pg_status": status, "entries": _entries(groups)}


def dump_flight_record(path: str | os.PathLike[str], group: Any = "all") -> str:
    """Writes this rank's last operations for torch's flight-recorder analyser, and returns the file's path.

    ``path`` is a file or a folder. A file's name must end with the global rank, so that the analyser accepts the file.
    In a folder the file is called ``sagellm_<rank>``. ``group`` as for ``get_stats``. Each rank writes its own file.
    This works even after a failure, as long as the group is not destroyed.

    Example::

        torch_sagellm.dump_flight_record(".")  # then: torchfrtrace .
    """
    import torch.distributed as dist

    target = Path(path)
    if target.is_dir():
        target = target / f"sagellm_{dist.get_rank()}"
    export.write_atomically(target, pickle.dumps(snapshot(group)))
    return str(target)


def convert_dumps(folder: str | os.PathLike[str], into: str | os.PathLike[str]) -> list[str]:
    """Converts the files of failed groups in ``SAGELLM_DUMP_DIR`` to files for the analyser, one per rank.

    Returns their paths.

    It needs no process group. It raises a ValueError if the folder has no such file.

    Example::

        torch_sagellm.convert_dumps("dumps", "analysed")  # SAGELLM_DUMP_DIR was "dumps" when the group failed
    """
    ranks: dict[int, list[_Group]] = {}
    for source in sorted(Path(folder).glob("sagellm-*.json")):
        raw = json.loads(source.read_text())
        offset = raw["wall"] - raw["now"]
        found = _Group(raw["group"], "undefined", raw["rank"], raw["members"], offset, raw["records"])
        ranks.setdefault(raw["members"][raw["rank"]], []).append(found)
    if not ranks:
        raise ValueError(
            f"sagellm: {folder} has no sagellm-*.json; groups write them there when SAGELLM_DUMP_DIR names it"
        )
    paths = []
    for rank, groups in sorted(ranks.items()):
        target = Path(into) / f"sagellm_{rank}"
        export.write_atomically(target, pickle.dumps(_dump(groups)))
        paths.append(str(target))
    return paths
