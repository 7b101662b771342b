"""``torch-sagellm health``: the exit code for a readiness or liveness probe of a running job."""

from __future__ import annotations

import argparse
import json
import socket

from torch_sagellm.cli import arguments
from torch_sagellm.cli.show import paint
from torch_sagellm.observe import watch

HELP = "exit code for a readiness or liveness probe of a running job"
DESCRIPTION = """Reads the status files that processes write when SAGELLM_STATUS_DIR names a folder, and judges the
processes of this host. Imports no torch and talks to no process.

exit codes:
  0  ready: every process runs and all its groups work
  1  not ready: no status yet or none any more, fewer processes than --expect, or a process without a group
  2  wrong arguments, and with --live a folder that does not exist
  3  fault: the processes live, but a group has failed, or an operation is pending for longer than --stall
  4  dead: a process was killed or crashed, is stopped, or its interpreter no longer runs

--live answers only whether processes live: 0, or 4. Use it for a liveness probe, which restarts a process, and the
command without it for a readiness probe, which only keeps work away."""
EXAMPLES = """examples:
  torch-sagellm health --dir /run/job                  readiness of the processes of this host
  torch-sagellm health --live                          liveness; SAGELLM_STATUS_DIR names the folder
  torch-sagellm health --expect 8 --stall 300          8 processes, no operation pending for over 5 minutes
  torch-sagellm health --rank 3 --json
"""
COLOURS = {watch.READY: "green", watch.NOT_READY: "yellow", watch.FAULT: "red", watch.DEAD: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=arguments.path, help="the folder of the status files (SAGELLM_STATUS_DIR)")
    parser.add_argument("--live", action="store_true", help="answer only whether the processes live")
    parser.add_argument(
        "--expect", type=arguments.whole(1, 10**6), metavar="N", help="at least so many processes must be there"
    )
    parser.add_argument(
        "--stall", type=arguments.seconds_from_zero, metavar="SECONDS", help="no operation may be pending for longer"
    )
    parser.add_argument(
        "--rank", type=arguments.whole(0, 10**6), action="append", help="judge this global rank alone; may be repeated"
    )
    parser.add_argument("--all-hosts", action="store_true", help="judge processes of other hosts as well")
    parser.add_argument("--json", action="store_true", help="print the judgement as JSON")


def run(parsed: argparse.Namespace) -> int:
    if parsed.live:
        arguments.refuse(parsed, "--live, which asks only whether processes live", ("expect", "stall"))
    folder = watch.folder_of(parsed.dir)
    watch.check_folder(folder)
    missing = f"there is no folder {folder}: the first group that is made with SAGELLM_STATUS_DIR makes it"
    # Before its first group a job is not ready. With --live a missing folder is an error, because a mistyped name must
    # not count as a live job.
    if parsed.live and not folder.is_dir():
        raise ValueError(missing)
    every = processes = watch.read(folder)
    if parsed.rank:
        processes = [each for each in processes if each.rank in parsed.rank]
    elif not parsed.all_hosts:
        host = socket.gethostname()
        processes = [each for each in processes if each.raw["process"]["host"] == host]
    expected = len(set(parsed.rank)) if parsed.rank and parsed.expect is None else parsed.expect
    found = watch.health(processes, expected, parsed.stall, known=every)
    if not processes:
        why = watch.nobody(folder, every, parsed.rank) if folder.is_dir() else missing
        found = watch.Health(found.code, [f"{watch.NAMES[found.code]}: {why}"])
    code = found.code
    if parsed.live and code != watch.DEAD:
        code = watch.READY
    name = "alive" if parsed.live and code == watch.READY else watch.NAMES[code]
    if parsed.json:
        conditions = {str(each.path.name): each.condition for each in processes}
        print(json.dumps({"health": name, "code": code, "findings": found.findings, "processes": conditions}))
        return code
    print(paint(name, COLOURS[code]) + f": {len(processes)} process{'' if len(processes) == 1 else 'es'} in {folder}")
    for finding in found.findings:
        print(f"  {finding}")
    return code
