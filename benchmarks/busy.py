#!/usr/bin/env python3
"""Compare this backend with gloo while other processes compute: data-loader workers, a tokenizer, a second job.

For each number of computing processes the ranks are started several times, because the cores on which the kernel first
places them affect a whole start. Within a start the backends' groups take turns, each rank writes its tensor before
each call, and a sample is the time per call of two consecutive calls on the slowest rank. A cell is gloo's time divided
by ours: in the median start, and in the worst one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import collectives
import hosts
import torch
import torch.distributed as dist
from measure import machine as machines
from measure import ranks as processes
from measure.cases import DTYPES, Case
from measure.stats import format_time, percentile

from torch_sagellm._private.units import parse_size, show_size

EXAMPLES = """examples:
  python benchmarks/busy.py                                        beside 0, 1, 2 and 4 processes, about ten minutes
  python benchmarks/busy.py --beside 2 --starts 3 --ops all_reduce --sizes 64,64KiB
  python benchmarks/busy.py --backends sagellm,gloo,gloo           with a second gloo: how much of a ratio is noise
"""
OPS = "all_reduce,reduce,all_to_all_single,ping_pong"
SIZES = "64,64KiB,1MiB,16MiB"
#: Program of a computing process: it computes until its parent has exited.
COMPUTE = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(20_000))"
Result = dict[str, Any]


@contextmanager
def computing(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs `count` computing processes during the block."""
    children = [subprocess.Popen([sys.executable, "-c", COMPUTE]) for _ in range(count)]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def run_rank(args: argparse.Namespace) -> int:
    """Runs all cases of one start on one rank; rank 0 writes the results."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    torch.set_num_threads(1)
    backends = collectives.open_backends(args)
    collectives.quiet_collector()
    results: list[Result] = []
    for op, size in itertools.product(args.ops.split(","), map(parse_size, args.sizes.split(","))):
        case = Case(op, size, DTYPES["float32"], 2)
        results.append(hosts.measure(case, backends, args, args.limit))
    if dist.get_rank() == 0:
        args.part.write_text(json.dumps(results))
    dist.destroy_process_group()
    return 0


def one_start(args: argparse.Namespace, beside: int) -> tuple[int, list[Result]]:
    """Starts the ranks once beside `beside` computing processes.

    Returns the exit code, and the results if there are any.
    """
    with tempfile.TemporaryDirectory() as folder, processes.here() as place, computing(beside):
        part = Path(folder) / "part.json"
        code = processes.run(args.ranks, {"OMP_NUM_THREADS": 1, **place}, words=[f"--part={part}"])
        return code, json.loads(part.read_text()) if part.exists() else []


def kept(results: list[Result]) -> list[Result]:
    """The part of a start's results that the table uses: the 10th percentile and the median of each cell."""
    cells = ("p10", "median")
    return [
        {**row, "times": {label: {cell: timed[cell] for cell in cells} for label, timed in row["times"].items()}}
        for row in results
    ]


def of_cell(starts: list[list[Result]], index: int, label: str) -> list[tuple[float, float]]:
    """gloo's time divided by `label`'s in each start: for the 10th percentile, and for the median."""
    found = [hosts.ratios(start[index], label) for start in starts]
    return [ratio for ratio in found if ratio is not None]


def show(ratios: list[tuple[float, float]]) -> str:
    """The median start and, in brackets, the worst one: by the 10th percentile, then by the median."""
    if not ratios:
        return "-"
    columns = [[ratio[at] for ratio in ratios] for at in (0, 1)]
    return ", ".join(f"{percentile(column, 0.5):.2f} ({min(column):.2f})" for column in columns)


def markdown(whole: Result) -> str:
    """A table for each number of computing processes, followed by the cells in which gloo was faster in any start."""
    machine = whole["machine"]
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores, {whole['ranks']} ranks, {whole['date']}. gloo's time over the "
        "other's: by the 10th percentile, then by the median; each is that of the median start and, in brackets, of "
        "the worst one. Below 1 gloo is faster. Times are medians over the starts of a start's median."
    ]
    for beside, starts in whole["runs"].items():
        if not starts:
            continue
        labels = list(starts[0][0]["times"])
        others = [label for label in labels if label != hosts.GLOO]
        parts.append(f"\n## Beside {beside} computing processes, {len(starts)} starts\n")
        parts.append("| operation | size | " + " | ".join([*(f"gloo / {label}" for label in others), *labels]) + " |")
        parts.append("| --- | --- |" + " --- |" * (len(others) + len(labels)))
        lost = []
        for index, result in enumerate(starts[0]):
            cells = [show(of_cell(starts, index, label)) for label in others]
            for label in labels:
                times = [start[index]["times"][label] for start in starts]
                cells.append(format_time(percentile([each["median"] for each in times if "median" in each], 0.5)))
            parts.append(f"| {result['op']} | {show_size(result['size'])} | " + " | ".join(cells) + " |")
            behind = sum(min(ratio) < 1 for ratio in of_cell(starts, index, hosts.OURS))
            if behind:
                lost.append(f"{result['op']} {show_size(result['size'])} in {behind} of {len(starts)}")
        parts.append("\nLost by p10 or median: " + ("; ".join(lost) or "none") + ".")
    return "\n".join(parts)


def spawn(args: argparse.Namespace) -> int:
    machine = machines.describe()
    runs: dict[str, list[list[Result]]] = {}
    levels = [int(beside) for beside in args.beside.split(",")]
    begin, total = time.monotonic(), args.starts * len(levels)
    # The numbers of processes take turns, so that a slow minute of the machine affects all of them.
    for done, (_, beside) in enumerate(itertools.product(range(args.starts), levels), 1):
        code, results = one_start(args, beside)
        if code:
            return code
        wrong = [row for row in results if any("error" in timed for timed in row["times"].values())]
        if wrong:
            print(f"wrong: {wrong}", file=sys.stderr)
            return 1
        runs.setdefault(str(beside), []).append(kept(results))
        left = (time.monotonic() - begin) / done * (total - done)
        print(f"[{done}/{total}] beside {beside} ({left:.0f} s left)", file=sys.stderr, flush=True)
    whole = {"date": date.today().isoformat(), "machine": machine, "ranks": args.ranks, "runs": runs}
    print(markdown(whole))
    folder = args.out / f"{whole['date']}-{machines.slug(machine)}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "busy.json").write_text(json.dumps(whole) + "\n")
    (folder / "busy.md").write_text(markdown(whole) + "\n")
    print(f"written: {folder}/busy.json, busy.md", file=sys.stderr)
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--beside", default="0,1,2,4", help="numbers of processes that compute meanwhile (default: 0,1,2,4)")
    add("--starts", type=int, default=10, help="starts of the ranks for each number (default: 10)")
    add("--ranks", type=int, default=2, help="default: 2")
    add("--ops", default=OPS, help=f"default: {OPS}; ping_pong is a send and a receive, one way")
    add("--sizes", default=SIZES, help=f"bytes of the whole tensor (default: {SIZES})")
    add("--backends", default="sagellm,gloo", help="default: sagellm,gloo; a name twice is its own control")
    add("--rounds", type=int, default=4, help="turns of each backend in a case (default: 4)")
    add("--budget", type=float, default=0.2, help="seconds of timed calls of a backend in a case (default: 0.2)")
    add("--limit", type=float, default=4, help="seconds for a case; slow ones get fewer rounds (default: 4)")
    add("--timeout", type=float, default=60, help="seconds until a stuck operation is an error (default: 60)")
    add(
        "--out", type=Path, default=Path(__file__).parent / "runs", help="folder for results (default: benchmarks/runs)"
    )
    add("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.control, args.floor, args.device = False, False, "cpu"  # needed by `collectives`
    if not all(beside.isdigit() for beside in args.beside.split(",")):
        parser.error(f"--beside {args.beside}: expected numbers with commas between them, such as 0,1,2")
    if unknown := set(args.ops.split(",")) - set(collectives.OPS):
        parser.error(f"unknown operation {', '.join(sorted(unknown))}; known: {', '.join(collectives.OPS)}")
    if min(args.starts, args.ranks - 1) < 1:
        parser.error("--starts must be at least 1 and --ranks at least 2")
    return args


def main() -> int:
    args = parse_args()
    try:
        return run_rank(args) if processes.is_rank() else spawn(args)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
