#!/usr/bin/env python3
"""The cost of one more process group of the same ranks: time, descriptors, address space, memory.

Backends take turns (A B A B) in the same processes, and every group exists until the end. Two times of the slowest rank
are shown: for creating the group, and for creating it and running one operation, because a backend may defer work until
the first operation. `--first` instead creates the first group of fresh processes and measures each step of it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import ranks as processes
from measure.stats import format_time, percentile

EXAMPLES = """examples:
  python benchmarks/groups.py                          20 groups of 2 ranks, sagellm and gloo
  python benchmarks/groups.py --ranks 8 --groups 50
  python benchmarks/groups.py --large                  the memory of groups that run large operations
  python benchmarks/groups.py --first --ranks 4        the first group, part by part
"""


def cost_now() -> torch.Tensor:
    """Figures of this process: open descriptors, bytes of address space, resident bytes (with a share of shared
    memory)."""
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    proportional = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    resident = int(proportional.group(1)) * 1024 if proportional else 0
    return torch.tensor([len(os.listdir("/proc/self/fd")), address_space, resident])


def measure(groups: int, backends: list[str], elements: int) -> None:
    """Runs one rank; rank 0 prints the table. The first operation of each group has `elements` elements."""
    dist.init_process_group(backends[0], timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    report = dist.new_group(backend="gloo")
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    used: dict[str, list[float]] = {backend: [] for backend in backends}
    costs: dict[str, torch.Tensor] = {backend: torch.zeros(3, dtype=torch.int64) for backend in backends}
    payload = torch.ones(elements).zero_()  # allocated before, so it is not counted as memory of a group
    for turn in range(groups + 1):
        for backend in backends:
            before = cost_now()
            dist.barrier(group=report)
            start = time.perf_counter()
            group = dist.new_group(backend=backend)
            made = time.perf_counter()
            dist.all_reduce(payload, group=group)
            slowest = torch.tensor([made - start, time.perf_counter() - start], dtype=torch.float64) * 1e6
            cost = cost_now() - before
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=report)
            if turn > 0:  # the first turn includes the one-time loading of a backend
                times[backend].append(slowest[0].item())
                used[backend].append(slowest[1].item())
                costs[backend] += cost
    for backend in backends:
        most = costs[backend].clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=report)
        dist.all_reduce(costs[backend], group=report)
        if rank == 0:
            p10, p50, p90 = (format_time(percentile(times[backend], share)) for share in (0.1, 0.5, 0.9))
            most_time, with_one = format_time(max(times[backend])), format_time(percentile(used[backend], 0.5))
            descriptors, addresses, _ = (most / groups).tolist()
            resident = costs[backend][2].item() / groups / 2**20
            print(
                f"{backend}: {p50} (p10 {p10}, p90 {p90}, most {most_time}), {with_one} with the first operation; per "
                f"rank {descriptors:.1f} descriptors, "
                f"{addresses / 2**20:.1f} MiB of addresses; {resident:.1f} MiB of memory for all {ranks} ranks",
                flush=True,
            )
    dist.destroy_process_group()


def first(backend: str) -> None:
    """Creates one rank's first group; rank 0 prints the steps. The interpreter and torch are already loaded."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    parts: dict[str, tuple[float, float]] = {}

    def part(name: str, call: Callable[[], Any]) -> Any:
        start, used = time.perf_counter(), time.process_time()
        value = call()
        parts[name] = (time.perf_counter() - start, time.process_time() - used)
        return value

    if backend == "sagellm":
        from torch_sagellm._private import load

        part("load the extension", load.extension)
    client = part(
        "connect to the store",
        lambda: dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=60)),
    )
    client.set(str(rank), "here")
    client.wait([str(other) for other in range(ranks)])
    part("connect once more", client.clone)
    options: dict[str, Any] = {"rank": rank, "world_size": ranks, "store": client}
    part("make the group", lambda: dist.init_process_group(backend, **options))
    part("first small operation", lambda: dist.all_reduce(torch.ones(1000)))
    part("second small operation", lambda: dist.all_reduce(torch.ones(1000)))
    part("first large operation", lambda: dist.all_reduce(torch.ones(1 << 20)))
    part("second large operation", lambda: dist.all_reduce(torch.ones(1 << 20)))
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, parts)
    if rank == 0:
        for name in parts:
            wall, used = (max(each[name][at] for each in everyone) * 1e6 for at in (0, 1))
            print(f"{backend}: {name}: {format_time(wall)}, of the processor {format_time(used)}", flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--backends", default="sagellm,gloo", help="the first one makes the default group")
    parser.add_argument("--first", action="store_true", help="the parts of the first group")
    parser.add_argument(
        "--large", action="store_true", help="a first operation of 4 MiB, for which a group takes all of its memory"
    )
    arguments = parser.parse_args()
    backends = arguments.backends.split(",")
    if processes.is_rank():
        if arguments.first:
            first(backends[0])
        else:
            measure(arguments.groups, backends, 1 << 20 if arguments.large else 1000)
        return 0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not arguments.first:
        print(f"{arguments.groups} more groups of {arguments.ranks} ranks", flush=True)
    for each in backends if arguments.first else [arguments.backends]:
        with processes.here() as place:
            if status := processes.run(arguments.ranks, place, words=["--backends", each]):
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
