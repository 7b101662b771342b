"""``torch-sagellm top``: a live view of a running job, by rank and group."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_sagellm._private.units import show_size, show_time
from torch_sagellm.cli import arguments
from torch_sagellm.cli.show import CLEAR_BELOW, HOME, clip, complain, is_terminal, paint, table
from torch_sagellm.observe import ras, watch

HELP = "live view of a running job: last operation, rates and waits by rank and group"
DESCRIPTION = """Reads the status files that processes write once a second when SAGELLM_STATUS_DIR names a folder, and
shows for each rank and group the last operation or the oldest pending one, calls and bytes per second, the share of
time in which operations waited for peers, and the peer that was waited for longest. Refreshes on a terminal;
elsewhere it prints one table after the other. Ctrl-C ends it. Exits with 1 where --once or --json finds no process."""
EXAMPLES = """examples:
  torch-sagellm top --dir /run/job
  torch-sagellm top --once                     one table; SAGELLM_STATUS_DIR names the folder
  torch-sagellm top --rank 0 --rank 3 --every 5
  torch-sagellm top --json                     the whole job as ncclras -f json prints it
"""
HEAD = ("rank", "process", "group", "last operation", "state", "since", "calls/s", "bytes/s", "waiting", "waited for")
LEFT = ("process", "group", "last operation", "state", "waited for")
#: The columns that are hidden on a narrow terminal, the first one first.
SPARE = ("bytes/s", "calls/s", "since", "waited for", "process")
COLOURS = {watch.RUNNING: "", watch.STOPPED: "red", watch.SILENT: "red", watch.ENDED: "red"}


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no interval from 0.1 to 3600 seconds")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=arguments.path, help="the folder of the status files (SAGELLM_STATUS_DIR)")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--every", type=_interval, metavar="SECONDS", help="time between two tables (1)")
    parser.add_argument(
        "--rank", type=arguments.whole(0, 10**6), action="append", help="show this global rank alone; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print the job once, in the form of NCCL's RAS")


def run(parsed: argparse.Namespace) -> int:
    folder = watch.folder_of(parsed.dir)
    watch.check_folder(folder)
    if parsed.json or parsed.once:
        arguments.refuse(parsed, "--json" if parsed.json else "--once", ("every",))
    if parsed.json:
        began = time.monotonic()
        found = _read(folder, parsed.rank)
        print(json.dumps(ras.report(found, time.monotonic() - began), indent=2))
        return 0 if found else 1
    terminal = is_terminal(sys.stdout)
    redraw = terminal and not parsed.once
    if redraw:
        print("\x1b[2J", end="")
    while True:
        found = _read(folder, parsed.rank)
        width = shutil.get_terminal_size((200, 50)).columns if terminal else 0
        lines = view(folder, found, time.time(), parsed.rank, width)
        if redraw:
            print(HOME + "\n".join(f"{clip(line, width)}\x1b[K" for line in lines), CLEAR_BELOW, flush=True)
        else:
            print("\n".join(lines), flush=True)
        if parsed.once:
            if not found and not folder.is_dir():
                complain(f"torch-sagellm top: there is no folder {folder}")
            return 0 if found else 1
        time.sleep(parsed.every or 1.0)


def _read(folder: Path, ranks: Sequence[int] | None) -> list[watch.Process]:
    return [each for each in watch.read(folder) if not ranks or each.rank in ranks]


def view(
    folder: Path,
    processes: Sequence[watch.Process],
    now: float,
    ranks: Sequence[int] | None = None,
    width: int = 0,
) -> list[str]:
    """Returns one table as lines, with totals above it and faults below it. ``ranks`` are those that the user named. If
    the table is wider than ``width`` and ``width`` is not 0, columns of ``SPARE`` are hidden, and the last line names
    them."""
    found = watch.health(processes)
    findings = found.findings if processes else [watch.nobody(folder, watch.read(folder), ranks)]
    state = paint(watch.NAMES[found.code], "green" if found.code == watch.READY else "red")
    lines = [
        f"torch-sagellm top  {time.strftime('%H:%M:%S', time.localtime(now))}  {folder}  "
        f"{len(processes)} process{'' if len(processes) == 1 else 'es'}, {state}"
    ]
    rows, colours = [], []
    for process in processes:
        groups: list[dict[str, Any] | None] = [*process.groups] or [None]
        for group in groups:
            rows.append(_row(process, group, now))
            failed = bool(group and group["fault"])
            colours.append("red" if failed else COLOURS[process.condition])
    (head, *text), hidden = _fitted(rows, width)
    lines.append(paint(head, "bold"))
    lines += [paint(line, colour) for line, colour in zip(text, colours, strict=True)]
    lines += [paint(finding, "red") for finding in findings]
    return lines + ([f"(hidden, the terminal is narrow: {', '.join(hidden)})"] if hidden else [])


def _fitted(rows: Sequence[Sequence[str]], width: int) -> tuple[list[str], list[str]]:
    """The lines of the table, and the columns that were hidden to make it fit."""
    for count in range(len(SPARE) + 1):
        shown = [at for at, name in enumerate(HEAD) if name not in SPARE[:count]]
        lines = table([HEAD[at] for at in shown], [[row[at] for at in shown] for row in rows], LEFT)
        if not width or max(map(len, lines)) <= width:
            break
    return lines, list(SPARE[:count])


def _row(process: watch.Process, group: dict[str, Any] | None, now: float) -> list[str]:
    about = process.raw["process"]
    who = [str(process.rank) if process.rank >= 0 else "-", f"{about['host']}:{about['pid']} {process.condition}"]
    if group is None:
        return [*who, "-", "no group", *[""] * 6]
    call = group["pending"] or group["last"]
    what = ["-", "", ""]
    if call:
        number = f" {call['number']}" if call["number"] else ""
        what = [
            f"{call['kind']}{number}, {show_size(call['bytes'])}",
            call["state"],
            show_time(max(0.0, now - call["since"])),
        ]
    if group["fault"]:
        what[1] = "group failed"
    rates = group["per_second"]
    longest = group["waited_for"][:1]
    return [
        *who,
        group["name"],
        *what,
        f"{rates['count']:.0f}",
        show_size(rates["bytes"]),
        f"{rates['waiting'] / 1e7:.0f} %",
        *(f"rank {each['rank']}, {show_time(each['seconds'])}" for each in longest),
        *[""] * (1 - len(longest)),
    ]
