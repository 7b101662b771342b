#!/usr/bin/env python3
"""Messages between two ranks of one host, in one direction and in both: tensors that the ranks can reach, ordinary
tensors twice (the second set is a control), and gloo take turns in the same processes. Each rank writes its tensor
before each message, as a program does, and both ranks wait for the message. Every received tensor is compared once per
size.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import machine as machines
from measure import ranks as processes
from measure.stats import format_time, percentile, slowest_rank

from torch_sagellm._private.units import parse_size, show_size

EXAMPLES = """examples:
  python benchmarks/messages.py                          three starts, about two minutes
  python benchmarks/messages.py --starts 1 --sizes 1MiB
"""
SIZES = "64KiB,256KiB,1MiB,4MiB,8MiB,16MiB,32MiB,64MiB"
DIRECTIONS = ("one", "both")
REACHABLE, ORDINARY, CONTROL, GLOO = "reachable", "ordinary", "ordinary again", "gloo"
#: The variable that names the folder into which rank 0 writes its results.
FOLDER = "SAGELLM_MESSAGES_FOLDER"


class Way:
    """Messages of one kind of tensor in one group."""

    def __init__(self, count: int, group: dist.ProcessGroup | None, reachable: bool) -> None:
        import torch_sagellm

        empty = torch_sagellm.empty if reachable else torch.empty
        self.sent, self.received, self.group = empty(count), empty(count), group

    def write(self, value: float) -> None:
        self.sent.fill_(value)

    def send(self, direction: str) -> None:
        """Rank 0 sends to rank 1, or each rank to the other one."""
        rank = dist.get_rank()
        if direction == "both":
            out = dist.P2POp(dist.isend, self.sent, 1 - rank, self.group)
            back = dist.P2POp(dist.irecv, self.received, 1 - rank, self.group)
            for work in dist.batch_isend_irecv([out, back]):
                work.wait()
        elif rank == 0:
            dist.send(self.sent, 1, self.group)
        else:
            dist.recv(self.received, 0, self.group)

    def check(self, label: str, direction: str) -> None:
        rank = dist.get_rank()
        self.write(rank + 1)
        self.received.zero_()
        self.send(direction)
        if (direction == "both" or rank == 1) and not bool((self.received == 2 - rank).all()):
            raise RuntimeError(f"{label}: rank {rank} has received something else than was sent")


def measure(size: int, direction: str, gloo: dist.ProcessGroup, samples: int) -> dict[str, Any]:
    """The times of the slowest rank, in microseconds, by the label of a way."""
    count = max(1, size // 4)
    ways = {
        REACHABLE: Way(count, None, reachable=True),
        ORDINARY: Way(count, None, reachable=False),
        CONTROL: Way(count, None, reachable=False),
        GLOO: Way(count, gloo, reachable=False),
    }
    taken: dict[str, list[float]] = {label: [] for label in ways}
    for label, way in ways.items():
        way.check(label, direction)
    for turn in range(samples):
        labels = list(ways)
        for label in labels if turn % 2 == 0 else labels[::-1]:
            ways[label].write(turn)
            dist.barrier()
            begin = time.perf_counter()
            ways[label].send(direction)
            taken[label].append(1e6 * (time.perf_counter() - begin))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, taken)
    times = {label: slowest_rank([rank[label] for rank in everyone]) for label in ways}
    return {label: {"p10": percentile(us, 0.1), "median": percentile(us, 0.5)} for label, us in times.items()}


def run_rank(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    patience = timedelta(seconds=60)
    dist.init_process_group("sagellm", timeout=patience)
    gloo = dist.new_group(backend="gloo", timeout=patience)
    gc.collect()
    gc.freeze()
    gc.disable()
    results = []
    for size in map(parse_size, args.sizes.split(",")):
        samples = max(10, min(args.samples, (1 << 30) // size))
        for direction in DIRECTIONS:
            times = measure(size, direction, gloo, samples)
            results.append({"size": size, "direction": direction, "samples": samples, "times": times})
            if dist.get_rank() == 0:
                texts = [f"{label} {format_time(one['p10'])}" for label, one in times.items()]
                print(f"{show_size(size)}, {direction}: {', '.join(texts)}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        Path(os.environ[FOLDER], "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()
    return 0


def table(starts: list[list[dict[str, Any]]]) -> str:
    """Each cell: a way's time divided by that of reachable tensors, p10 (median), the lowest and the highest start."""
    lines = []
    for direction in DIRECTIONS:
        lines += [f"## {direction}", "", f"| size | {REACHABLE} | {ORDINARY} | {CONTROL} / {ORDINARY} | {GLOO} |"]
        lines.append("| --- | --- | --- | --- | --- |")
        for at, row in enumerate(starts[0]):
            if row["direction"] != direction:
                continue
            times = [start[at]["times"] for start in starts]

            def ratio(over: str, under: str, times: list[dict[str, Any]] = times) -> str:
                cells = [sorted(one[over][of] / one[under][of] for one in times) for of in ("p10", "median")]
                p10, median = (f"{cell[0]:.2f} to {cell[-1]:.2f}" for cell in cells)
                return f"{p10} ({median})"

            own = min(one[REACHABLE]["median"] for one in times)
            ratios = [ratio(ORDINARY, REACHABLE), ratio(CONTROL, ORDINARY), ratio(GLOO, REACHABLE)]
            lines.append(f"| {show_size(row['size'])} | {format_time(own)} | " + " | ".join(ratios) + " |")
        lines.append("")
    return "\n".join(lines)


def spawn(args: argparse.Namespace) -> int:
    """Starts new processes for each start, prints the table, and writes one file with all results."""
    starts = []
    for number in range(args.starts):
        with tempfile.TemporaryDirectory() as folder, processes.here() as store:
            print(f"start {number + 1} of {args.starts}", file=sys.stderr, flush=True)
            if code := processes.run(2, store | {"OMP_NUM_THREADS": 1, FOLDER: folder}):
                return code
            starts.append(json.loads(Path(folder, "results.json").read_text()))
    print(table(starts), flush=True)
    machine = machines.describe()
    found = {"date": date.today().isoformat(), "machine": machine, "starts": starts}
    folder = args.out / f"{found['date']}-{machines.slug(machine)}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{args.name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {path}", flush=True)
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", default=SIZES, help=f"bytes of a message (default: {SIZES})")
    add("--samples", type=int, default=300, help="messages per way and size, fewer of large ones (default: 300)")
    add("--starts", type=int, default=3, help="how often the ranks are started (default: 3)")
    add("--out", type=Path, default=Path(__file__).parent / "runs", help="folder of results (default: benchmarks/runs)")
    add("--name", default="messages", help="name of the result file (default: messages)")
    args = parser.parse_args()
    try:
        for size in args.sizes.split(","):
            parse_size(size)
    except ValueError as error:
        parser.error(str(error))
    if args.starts < 1 or args.samples < 1:
        parser.error("--starts and --samples must be at least 1")
    return args


def main() -> int:
    args = parse_args()
    try:
        return run_rank(args) if processes.is_rank() else spawn(args)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
