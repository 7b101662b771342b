"""The status file of this process: small, replaced once a second, and written only if the environment requests it.

Nothing happens unless ``SAGELLM_STATUS_DIR`` names a folder when the first group is created. Then one Python thread
writes ``sagellm-<host>-<pid>.json`` into it; ``watch.py`` reads it. docs/internals/status-files.md states the cost of
this thread, and when the file is removed.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_sagellm.observe import export, stats, watch
from torch_sagellm.observe.log import logger

if TYPE_CHECKING:
    from torch_sagellm import _C

#: Seconds between two writes of the file.
EVERY = 1.0
#: Number of records in which the last call is searched for: some records belong to parts of a call.
LAST = 8
#: Number of peers that are named: those for which this rank waited longest.
PEERS = 3
#: Seconds within which the writer must end. If a file system hangs, the process goes on without the writer.
END_SECONDS = 2.0

_lock = threading.Lock()
_writer: Writer | None = None


def start() -> None:
    """Starts this process's writer if ``SAGELLM_STATUS_DIR`` is set; later calls do nothing.

    Called when a group is created. A folder that does not exist is created for this user alone. A failure is logged
    once and never raised, because the job is more important than its observation.
    """
    global _writer
    folder = os.environ.get(watch.VARIABLE, "")
    if not folder:
        return
    with _lock:
        # A forked child has its parent's object but not its thread; it starts its own writer with its own file.
        if _writer is not None and _writer.pid == os.getpid():
            return
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            _writer = Writer(Path(folder))
        except OSError as error:
            logger.warning("%s=%s: no status is written: %s", watch.VARIABLE, folder, error)
            return
        atexit.register(_writer.end)


class Writer:
    """The thread and its file. Only the thread changes ``_warned`` and ``_before``; any thread may call ``end``."""

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self.path = folder / f"{watch.PREFIX}{socket.gethostname()}-{self.pid}.json"
        self._process = _process()
        self._stop = threading.Event()
        self._warned = False
        #: For each group: the time and the sums of the previous file, from which rates are computed.
        self._before: dict[str, tuple[int, dict[str, int]]] = {}
        self._thread = threading.Thread(target=self._run, name="sagellm-status", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._write()
            if self._stop.wait(EVERY):
                return

    def _write(self) -> None:
        try:
            export.write_atomically(self.path, json.dumps(self.snapshot()).encode())
        except Exception as error:  # a group that is just being destroyed, a full disk: the next write may succeed
            if not self._warned:
                logger.warning("%s: a status could not be written: %s", self.path, error)
            self._warned = True

    def snapshot(self) -> dict[str, Any]:
        """The content of the file."""
        import torch.distributed as dist

        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else _from_launcher()
        return {
            "format": watch.FORMAT,
            "written": time.time(),
            "every": EVERY,
            "process": {**self._process, "rank": rank, "world_size": size},
            "groups": [self._group(member) for member in stats.members("all")],
        }

    def _group(self, member: stats.Member) -> dict[str, Any]:
        import torch.distributed as dist

        backend = member.backend
        raw: _C.Stats = backend._stats()
        offset = raw["wall"] - raw["now"]
        records: list[_C.Record] = backend._records(LAST)
        calls = [record for record in records if record["counts"] or record["tensors"]]
        pending = [record for record in calls if record["state"] == "pending"]
        ranks = dist.get_process_group_ranks(member.group)
        waits = sorted(((total, ranks[peer]) for peer, (_, total, _) in enumerate(raw["waits"]) if total), reverse=True)
        kinds: dict[str, int] = {}
        for cell in raw["cells"]:
            kinds[cell["kind"]] = kinds.get(cell["kind"], 0) + cell["count"]
        sums = {key: sum(cell[key] for cell in raw["cells"]) for key in ("count", "failed", "bytes", "waiting")}
        return {
            "name": member.name,
            "rank": raw["rank"],
            "ranks": ranks,
            "serves": backend.describe().partition(": ")[2],
            "fault": backend.fault,
            "issued": raw["issued"],
            **sums,
            "kinds": kinds,
            "per_second": self._rates(member.name, raw["now"], sums),
            "last": _call(calls[-1], offset, ranks) if calls else None,
            "pending": _call(pending[0], offset, ranks) if pending else None,
            "waited_for": [{"rank": rank, "seconds": total / 1e9} for total, rank in waits[:PEERS]],
        }

    def _rates(self, name: str, now: int, sums: dict[str, int]) -> dict[str, float]:
        """Rates per second since the previous file; 0 in the first file, and after the statistics were reset."""
        since, before = self._before.get(name, (now, sums))
        self._before[name] = (now, sums)
        seconds = max(now - since, 1) / 1e9
        return {key: max(0.0, (sums[key] - before[key]) / seconds) for key in sums}

    def end(self) -> None:
        """Ends the thread and removes the file, because a process that ends in order leaves none.

        Does nothing in a fork.
        """
        if self.pid != os.getpid():
            return
        self._stop.set()
        self._thread.join(END_SECONDS)
        try:
            watch.leave_in_order(self.path.parent)
        except OSError:
            pass  # only a message of `torch-sagellm health` uses this count
        self.path.unlink(missing_ok=True)


def _from_launcher() -> tuple[int, int]:
    """Rank and number of ranks before there is a group; -1 if no launcher sets them."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdecimal() else -1, int(size) if size.isdecimal() else -1


def _process() -> dict[str, Any]:
    """Constant facts, from which a reader determines whether this process is still alive."""
    here = watch.here()
    return {
        "pid": os.getpid(),
        "began": watch.began(os.getpid()),
        "boot_id": here.boot_id,
        "pid_namespace": here.pid_namespace,
        "host": socket.gethostname(),
        "program": os.path.basename(sys.argv[0] if sys.argv else ""),
    }


def _call(record: _C.Record, offset: int, ranks: list[int]) -> dict[str, Any]:
    """One operation. Times are in seconds, ``since`` since the epoch. Ranks are global ranks."""
    from torch_sagellm.observe import sites

    file, line, _ = sites.site_of(record["site"])
    late = record["late"]
    return {
        "kind": record["kind"],
        "number": record["number"],
        "bytes": max(record["read"], record["written"]),
        "path": record["path"],
        "state": record["state"],
        "since": (record["issued"] + offset) / 1e9,
        "took": (record["ended"] - record["issued"]) / 1e9 if record["ended"] else None,
        "waited_for": ranks[late] if 0 <= late < len(ranks) else None,
        "site": f"{file}:{line}" if file else None,
    }
