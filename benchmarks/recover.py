#!/usr/bin/env python3
"""Measures the time from a kill -9 until the survivors have the next good all_reduce after `torch_sagellm.recover`.

In each trial new ranks run all_reduces without a pause until some of them are killed. The survivors get the error, call
`recover`, and all_reduce in the new group; the result is checked. The times begin just before the signal is sent and
end on the slowest survivor: when it has the error, the new group, and the result. The goal holds for the slowest trial.

    python benchmarks/recover.py
    python benchmarks/recover.py --only "3 ranks" --trials 10

Cases with two hosts need root, because hosts are network namespaces. The exit code is 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import machine
from measure import ranks as processes
from measure.stats import percentile

import torch_sagellm

GOAL = 1.0
#: Seconds within which a trial must start, and within which it must then recover.
PATIENCE = 120.0


@dataclass(frozen=True)
class Case:
    words: str
    ranks: int
    victims: tuple[int, ...]
    hosts: int = 1


CASES = [
    Case("3 ranks, 1 killed", 3, (1,)),
    Case("8 ranks, 1 killed", 8, (3,)),
    Case("2 hosts x 2 ranks, 1 killed", 4, (3,), 2),
    Case("2 hosts x 2 ranks, all of a host killed", 4, (2, 3), 2),
]


def rank(folder: Path, victims: int) -> None:
    """Runs one rank until it is killed, or has recovered and run one more all_reduce. Then it writes its times."""
    torch.set_num_threads(1)
    dist.init_process_group("sagellm")
    number, left = dist.get_rank(), dist.get_world_size() - victims
    dist.all_reduce(torch.ones(1000))
    (folder / f"ready{number}").touch()
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
    except RuntimeError:
        noticed = time.monotonic()
    torch_sagellm.recover()
    recovered = time.monotonic()
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    good = time.monotonic()
    times = {"noticed": noticed, "recovered": recovered, "good": good, "right": bool((ones == left).all())}
    (folder / f"part{number}").write_text(json.dumps(times))
    (folder / f"part{number}").rename(folder / f"times{number}")
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def place(case: Case) -> Iterator[tuple[dict[str, Any], list[list[str]]]]:
    """The environment of the ranks of a case, and the words with which each rank's command begins."""
    if case.hosts == 1:
        with processes.here() as where:
            yield where, [[]] * case.ranks
        return
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/py"))
    import net

    with net.Network(case.hosts) as network:
        where = {"MASTER_ADDR": network.address(0), "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": net.INTERFACE}
        each = case.ranks // case.hosts
        yield where, [["ip", "netns", "exec", network.names[number // each]] for number in range(case.ranks)]


def appear(paths: list[Path], children: list[subprocess.Popen[bytes]]) -> None:
    """Waits until all files exist. Fails if a rank that was not killed ends meanwhile."""
    until = time.monotonic() + PATIENCE
    while not all(path.exists() for path in paths):
        failed = [number for number, child in enumerate(children) if child.poll() not in (None, 0, -signal.SIGKILL)]
        if failed or time.monotonic() > until:
            raise SystemExit(f"recover: ranks {failed} failed" if failed else "recover: it took too long")
        time.sleep(0.01)


def trial(case: Case) -> dict[str, float]:
    """Seconds from the signal until every survivor has its error, its new group, and its first result."""
    with tempfile.TemporaryDirectory() as name, place(case) as (where, prefixes):
        folder, children = Path(name), []
        common = {**where, "RECOVER_INTO": name, "RECOVER_VICTIMS": len(case.victims), "OMP_NUM_THREADS": 1}
        try:
            for number in range(case.ranks):
                variables = {**common, "WORLD_SIZE": case.ranks, "RANK": number}
                environment = os.environ | {key: str(value) for key, value in variables.items()}
                children.append(subprocess.Popen([*prefixes[number], sys.executable, __file__], env=environment))
            appear([folder / f"ready{number}" for number in range(case.ranks)], children)
            time.sleep(0.3)  # all ranks are in their loops
            began = time.monotonic()
            for victim in case.victims:
                children[victim].kill()
            left = [folder / f"times{number}" for number in range(case.ranks) if number not in case.victims]
            appear(left, children)
            found = [json.loads(path.read_text()) for path in left]
            for child in children:
                child.wait(PATIENCE)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
    if not all(each["right"] for each in found):
        raise SystemExit(f"recover: {case.words}: the result after it is wrong")
    return {key: max(each[key] for each in found) - began for key in ("noticed", "recovered", "good")}


def line(case: Case, trials: list[dict[str, float]]) -> str:
    good = [each["good"] for each in trials]
    medians = [percentile([each[key] for each in trials], 0.5) for key in ("noticed", "recovered", "good")]
    cells = [case.words, str(len(trials)), *(f"{each:.3f} s" for each in (*medians, min(good), max(good)))]
    return "| " + " | ".join([*cells, f"{GOAL:g} s", "met" if max(good) <= GOAL else "missed"]) + " |"


def main() -> int:
    if processes.is_rank():
        rank(Path(os.environ["RECOVER_INTO"]), int(os.environ["RECOVER_VICTIMS"]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help='only cases with these words, such as "8 ranks"')
    parser.add_argument("--trials", type=int, default=5, help="of each case (default: 5)")
    arguments = parser.parse_args()
    facts = machine.describe()
    print(f"# {facts['cpu']}, {facts['cores']} cores, {date.today()}, load before {os.getloadavg()[0]:.1f}")
    titles = ["case", "trials", "error", "new group", "good all_reduce", "least", "most", "goal", "verdict"]
    print("| " + " | ".join(titles) + " |\n|" + " --- |" * len(titles), flush=True)
    for case in (each for each in CASES if arguments.only in each.words):
        try:
            print(line(case, [trial(case) for _ in range(arguments.trials)]), flush=True)
        except Exception as reason:
            if type(reason).__name__ != "Unavailable":
                raise
            print(f"# {case.words}: not measured, {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
