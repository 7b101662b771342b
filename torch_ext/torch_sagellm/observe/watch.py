"""Reads the status files of running processes (``status.py`` writes them) and judges the processes. Needs no torch.

Whether a process is alive and whether its groups work are separate questions: if a liveness probe fails, the process is
restarted; if a readiness probe fails, it only gets no more work.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The environment variable that names the folder of the status files, for the processes that write or read them.
VARIABLE = "SAGELLM_STATUS_DIR"
FORMAT = 1
PREFIX = "sagellm-"
#: The file with a character for each process that ended in order; these have removed their own files.
LEFT = "ended-in-order"
#: A file is too old if it is older than INTERVALS of its write intervals, and also older than LEAST_SECONDS.
INTERVALS, LEAST_SECONDS = 5, 5.0
RUNNING, STOPPED, SILENT, ENDED = "running", "stopped", "silent", "ended"


@dataclass(frozen=True)
class Here:
    """Identifies the system and the pid namespace of this process."""

    boot_id: str
    pid_namespace: str


def here() -> Here:
    """The boot id and the pid namespace of this process; both are "" if the system does not provide them."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Here(boot_id, os.readlink("/proc/self/ns/pid"))
    except OSError:
        return Here("", "")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third (the state) on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def began(pid: int) -> int:
    """The start time of a process in ticks since boot; 0 if unknown. With its pid, it identifies a process uniquely."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


@dataclass(frozen=True)
class Process:
    """The last status of one process, and the condition of the process."""

    path: Path
    raw: dict[str, Any]
    #: RUNNING, STOPPED by a signal or debugger, SILENT (no recent status), or ENDED.
    condition: str
    #: Seconds since the status was written.
    age: float

    @property
    def rank(self) -> int:
        """The global rank; -1 as long as it has none."""
        return int(self.raw["process"]["rank"])

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Its groups, in the form in which ``status.py`` writes them."""
        return list(self.raw["groups"])

    def __str__(self) -> str:
        about = self.raw["process"]
        who = f"rank {self.rank}" if self.rank >= 0 else "a process without a rank"
        return f"{who} (process {about['pid']} on {about['host']})"


def folder_of(given: str | os.PathLike[str] | None) -> Path:
    """The folder of the status files; a ValueError if neither ``given`` nor ``SAGELLM_STATUS_DIR`` names one."""
    named = given or os.environ.get(VARIABLE)
    if not named:
        raise ValueError(
            "which folder? Processes write their status into the folder that SAGELLM_STATUS_DIR names when their first "
            "group is made; set it for the job and here, or pass --dir"
        )
    return Path(named)


def read(folder: str | os.PathLike[str]) -> list[Process]:
    """The processes that have a status file, by rank; an empty list if the folder does not exist yet.

    A process that has ended is omitted if a later process has the same rank: the job was then started again.
    """
    own, now = here(), time.time()
    found = []
    for path in sorted(Path(folder).glob(f"{PREFIX}*.json")):
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            continue  # it has just ended in order
        except (OSError, ValueError):
            continue  # a file of another program, or one that this user may not read
        if isinstance(raw, dict) and raw.get("format") == FORMAT and _is_whole(raw):
            age = max(0.0, now - raw["written"])
            found.append(Process(path, raw, _condition(raw, age, own), age))
    latest = {each.rank: each.raw["written"] for each in sorted(found, key=lambda each: each.raw["written"])}
    kept = [each for each in found if each.condition != ENDED or latest[each.rank] == each.raw["written"]]
    return sorted(kept, key=lambda each: (each.rank, str(each.path)))


def _is_whole(raw: dict[str, Any]) -> bool:
    """Whether the content is that of a status file; a foreign file must not make a probe raise an exception."""
    about = raw.get("process")
    numbers = [raw.get("written"), raw.get("every")]
    if isinstance(about, dict):
        numbers += [about.get(name) for name in ("rank", "pid", "began")]
    return (
        isinstance(about, dict)
        and {"host", "boot_id", "pid_namespace"} <= about.keys()
        and all(isinstance(each, int | float) for each in numbers)
        and isinstance(raw.get("groups"), list)
    )


def check_folder(folder: Path) -> None:
    """Raises a ValueError if ``folder`` is not a readable folder. A missing folder is accepted: the first group creates
    it."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is no folder; expected the one of SAGELLM_STATUS_DIR")
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise ValueError(f"the folder {folder} cannot be read by this user")


def ended_in_order(folder: str | os.PathLike[str]) -> int:
    """How many processes that wrote a status into the folder have ended in order."""
    try:
        return len((Path(folder) / LEFT).read_bytes())
    except OSError:
        return 0


def nobody(folder: Path, every: Sequence[Process], ranks: Sequence[int] | None) -> str:
    """The reason why there is no process to judge. ``every`` has all processes of the folder, of all hosts and
    ranks."""
    if every and ranks:
        there = ", ".join(str(each.rank) for each in every)
        return f"none of the ranks that were named has written its status; there are those of {there}"
    if every:
        hosts = ", ".join(sorted({str(each.raw["process"]["host"]) for each in every}))
        here = f"no process of this host, {socket.gethostname()}, has written its status"
        return f"{here}; {len(every)} of {hosts} have: --all-hosts"
    ended = ended_in_order(folder)
    if ended:
        return f"{ended} process{' has' if ended == 1 else 'es have'} ended in order, and none has come since"
    return "no process has written its status"


def leave_in_order(folder: Path) -> None:
    """Counts this process as ended in order: appends a character, which is atomic, because ranks end together."""
    with (folder / LEFT).open("ab", buffering=0) as file:
        file.write(b".")


def _condition(raw: dict[str, Any], age: float, own: Here) -> str:
    about = raw["process"]
    if own.boot_id and (about["boot_id"], about["pid_namespace"]) == (own.boot_id, own.pid_namespace):
        fields = _stat(about["pid"])
        if not fields or int(fields[19]) != about["began"] or fields[0] in "ZX":
            return ENDED
        if fields[0] in "Tt":
            return STOPPED
    return SILENT if age > max(INTERVALS * raw["every"], LEAST_SECONDS) else RUNNING


# ------------------------------------------------------------------------------------------------- health

#: Kinds of operations that are numbered separately from collectives.
MESSAGES = ("send", "recv")
#: Exit codes of a probe; 0 means ready. 2 is not used, because it means wrong arguments.
READY, NOT_READY, FAULT, DEAD = 0, 1, 3, 4
NAMES = {READY: "ready", NOT_READY: "not ready", FAULT: "fault", DEAD: "dead"}


@dataclass(frozen=True)
class Health:
    """The worst finding as an exit code, and the text of each finding."""

    code: int
    findings: list[str]


def health(
    processes: Iterable[Process],
    expected: int | None = None,
    stall: float | None = None,
    known: Iterable[Process] | None = None,
) -> Health:
    """Judges processes. At least ``expected`` must exist.

    No operation may be pending for longer than ``stall`` seconds. If one is, ``known`` (None means the judged
    processes) is searched for the ranks that have not called it.
    """
    every = list(processes)
    peers = every if known is None else list(known)
    codes, findings = [READY], []

    def find(code: int, text: str) -> None:
        codes.append(code)
        findings.append(f"{NAMES[code]}: {text}")

    for each in every:
        if each.condition != RUNNING:
            find(DEAD, f"{each} {_why(each)}")
            continue
        if not each.groups:
            find(NOT_READY, f"{each} has no group yet, or none any more")
        for group in each.groups:
            pending = group["pending"]
            if group["fault"]:
                find(FAULT, f"{each}, group {group['name']}: {group['fault']}")
            elif stall is not None and pending and each.raw["written"] - pending["since"] > stall:
                waiting = called(pending, each.raw["written"])
                find(FAULT, f"{each}, group {group['name']}: {waiting}{_missing(group, peers)}")
    if not every:
        find(NOT_READY, "no process has written its status")
    elif expected is not None and len(every) < expected:
        find(NOT_READY, f"{len(every)} of {expected} processes have written their status")
    return Health(max(codes), findings)


def _why(process: Process) -> str:
    if process.condition == ENDED:
        return "has ended without leaving in order: it was killed, or it crashed"
    if process.condition == STOPPED:
        return "is stopped by a signal or a debugger"
    return f"has not written its status for {process.age:.0f} s: its interpreter does not run, or its host is gone"


def _missing(group: dict[str, Any], processes: Iterable[Process]) -> str:
    """Returns the end of a sentence: the ranks that have not made the pending call of this group, and each one's last
    call.

    Messages have numbers of their own, so a rank whose last call was a message is not judged.
    """
    number, late = group["pending"]["number"], []
    if group["pending"]["kind"] in MESSAGES:
        return ""
    for process in processes:
        for other in process.groups:
            last = other["last"]
            if other["name"] != group["name"] or other["ranks"] != group["ranks"]:
                continue
            if last is None:
                late.append(f"rank {process.rank} has not made it, nor any call before it")
            elif last["kind"] not in MESSAGES and last["number"] < number:
                where = f" at {last['site']}" if last["site"] else ""
                before = f"{last['kind']} number {last['number']}{where}"
                late.append(f"rank {process.rank} has not made it; its last call was {before}")
    return "".join(f"; {each}" for each in late)


def called(call: dict[str, Any], now: float) -> str:
    """One operation as text: kind, for how long it has been pending, and its call site."""
    where = f", called at {call['site']}" if call["site"] else ""
    number = f" number {call['number']}" if call["number"] else ""
    return f"{call['kind']}{number} has been pending for {max(0.0, now - call['since']):.0f} s{where}"
