#!/usr/bin/env python3
"""All_reduce with several threads a rank, on a machine with many cores: one command, one file to send.

The ranks share the cores evenly, and torch's intra-op threads of each rank fill its share, except in one layout, whose
ranks use half of their cores. These ways take turns in the same processes: ours on tensors that peers can reach, ours
on ordinary tensors, an asynchronous call that no thread waits for (it uses free cores), all of these with one thread a
rank, and gloo. On a machine with several NUMA nodes or last-level caches, each rank of a large group is bound to one,
and ours with the option `numa` is one more way.

In the same turns all ranks also copy their tensor at the same time, with the same number of threads. A plain copy is
the limit of an all_reduce that fits into the cache. It is no limit for a larger all_reduce: a copy writes a second
tensor, and an all_reduce works in place. Each rank writes its tensor before each call, as a program does, and every
result is checked once per size.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import machine as machines
from measure import ranks as processes
from measure.cases import DTYPES
from measure.stats import format_time, percentile, slowest_rank

from torch_sagellm._private.units import parse_size, show_size

EXAMPLES = """examples:
  python benchmarks/wide.py                          2 ranks, then 4, then a rank per core: about fifteen minutes
  python benchmarks/wide.py --layouts 2x8,4x4        ranks x threads
  python benchmarks/wide.py --dtypes float32 --sizes 1MiB,32MiB --rounds 5
"""
SIZES = "8,4KiB,64KiB,256KiB,1MiB,4MiB,16MiB,32MiB,64MiB,256MiB"
LIMIT = "limit"
#: The variable that names the folder into which rank 0 writes its results.
FOLDER = "SAGELLM_WIDE_FOLDER"


def layouts(text: str, cores: int) -> list[tuple[int, int]]:
    """Pairs of ranks and threads. By default 2 and 4 ranks that share the cores, 2 that use half of them, and a rank
    for each core."""
    if not text:
        wanted = [(ranks, max(1, cores // ranks)) for ranks in (2, 4, min(cores, 256)) if ranks <= max(cores, 2)]
        if cores >= 8:
            wanted.insert(1, (2, cores // 4))
        return list(dict.fromkeys(wanted))
    pairs = [one.split("x") for one in text.split(",")]
    if not all(len(pair) == 2 and all(word.isdigit() and int(word) > 0 for word in pair) for pair in pairs):
        raise ValueError(f"--layouts {text}: expected ranks x threads, such as 2x8,4x4")
    return [(int(ranks), int(threads)) for ranks, threads in pairs]


def bind_to_node(rank: int, ranks: int) -> bool:
    """Binds this rank to a NUMA node, or, if there is only one, to a last-level cache. Each gets equally many ranks, at
    least two. Returns whether this was possible."""
    allowed = os.sched_getaffinity(0)
    system = Path("/sys/devices/system")
    nodes = cpus_by_list(allowed, list(system.glob("node/node[0-9]*/cpulist")))
    if len(nodes) < 2:
        caches = [max(system.glob(f"cpu/cpu{cpu}/cache/index*"), key=level_of, default=None) for cpu in allowed]
        nodes = cpus_by_list(allowed, [cache / "shared_cpu_list" for cache in caches if cache])
    if len(nodes) < 2 or ranks % len(nodes) or ranks == len(nodes):
        return False
    os.sched_setaffinity(0, nodes[rank * len(nodes) // ranks])
    return True


def level_of(cache: Path) -> int:
    return int((cache / "level").read_text())


def cpus_by_list(allowed: set[int], lists: list[Path]) -> list[set[int]]:
    """The CPUs in each of these files that this process may use, without repetition, by their first CPU."""
    found = {tuple(sorted(allowed & cpus_of(path.read_text()))) for path in lists}
    return [set(cpus) for cpus in sorted(found) if cpus]


def cpus_of(text: str) -> set[int]:
    """The CPUs of a list as the kernel writes it, such as 0-3,8."""
    ends = [range_.split("-") for range_ in text.strip().split(",") if range_]
    return {cpu for each in ends for cpu in range(int(each[0]), int(each[-1]) + 1)}


def cores() -> int:
    """The cores of this process. Two threads that copy on one core are not faster than one."""
    allowed = os.sched_getaffinity(0)
    siblings = Path(f"/sys/devices/system/cpu/cpu{min(allowed)}/topology/thread_siblings_list")
    per_core = len(allowed & cpus_of(siblings.read_text())) if siblings.is_file() else 1
    return machines.usable_cores() // max(1, per_core)


def ways(count: int, dtype: torch.dtype, groups: dict[str, Any]) -> dict[str, tuple[torch.Tensor, Callable[[], Any]]]:
    """For each label: the tensor that this rank writes before each call, and the call."""
    import torch_sagellm

    def reduces(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Callable[[], Any]]:
        return tensor, lambda: dist.all_reduce(tensor, group=groups[name])

    def polled(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Callable[[], Any]]:
        def call() -> None:
            work: Any = dist.all_reduce(tensor, group=groups[name], async_op=True)
            while not work.is_completed():
                time.sleep(1e-5)

        return tensor, call

    source, target = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
    threads = torch.get_num_threads()
    found: dict[str, tuple[torch.Tensor, Callable[[], Any]]] = {LIMIT: (source, lambda: target.copy_(source))}
    if threads > 1:
        found[f"reachable, {threads} threads"] = reduces(torch_sagellm.empty(count, dtype=dtype), "all")
        found[f"ordinary, {threads} threads"] = reduces(torch.empty(count, dtype=dtype), "all")
        found[f"asynchronous, {threads} threads"] = polled(torch_sagellm.empty(count, dtype=dtype), "all")
        found["asynchronous, 1 thread"] = polled(torch_sagellm.empty(count, dtype=dtype), "one")
    if "numa" in groups:
        found["reachable, node by node"] = reduces(torch_sagellm.empty(count, dtype=dtype), "numa")
    found["reachable, 1 thread"] = reduces(torch_sagellm.empty(count, dtype=dtype), "one")
    found["ordinary, 1 thread"] = reduces(torch.empty(count, dtype=dtype), "one")
    found["gloo"] = reduces(torch.empty(count, dtype=dtype), "gloo")
    return found


def check(way: tuple[torch.Tensor, Callable[[], Any]], label: str) -> None:
    tensor, call = way
    tensor.fill_(dist.get_rank() + 1)
    call()
    ranks = dist.get_world_size()
    if label != LIMIT and not bool((tensor == ranks * (ranks + 1) // 2).all()):
        raise RuntimeError(f"{label}: the sum is wrong on rank {dist.get_rank()}")


def measure(count: int, dtype: torch.dtype, groups: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Measures all ways at one size; returns, on every rank, the times of the slowest rank."""
    found = ways(count, dtype, groups)
    source = torch.ones(count, dtype=dtype)
    for label, way in found.items():
        check(way, label)
    taken: dict[str, list[float]] = {label: [] for label in found}

    def sample(label: str) -> None:
        tensor, call = found[label]
        tensor.copy_(source)
        dist.barrier()
        begin = time.perf_counter()
        call()
        taken[label].append(1e6 * (time.perf_counter() - begin))

    begin = time.perf_counter()
    sample("gloo")
    taken["gloo"].clear()
    # The number of samples is the same for all ways and ranks: as many as fit with gloo, presumably the slowest way.
    needed = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(needed, op=dist.ReduceOp.MAX)
    count_of_samples = max(2, min(200, int(args.budget / args.rounds / needed.item())))
    for turn in range(args.rounds):
        labels = list(found)
        for label in labels if turn % 2 == 0 else labels[::-1]:
            for _ in range(count_of_samples):
                sample(label)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, taken)
    times = {label: slowest_rank([rank[label] for rank in everyone]) for label in found}
    return {
        label: {"p10": percentile(us, 0.1), "median": percentile(us, 0.5), "samples": len(us)}
        for label, us in times.items()
    }


def run_rank(args: argparse.Namespace) -> int:
    import torch_sagellm

    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    ranks = int(os.environ["WORLD_SIZE"])
    by_node = ranks > 12 and bind_to_node(int(os.environ["RANK"]), ranks)
    patience = timedelta(seconds=args.timeout)
    dist.init_process_group("sagellm", timeout=patience, pg_options=torch_sagellm.Options(threads=1))
    groups = {
        "all": dist.new_group(timeout=patience, pg_options=torch_sagellm.Options(threads=threads)),
        "one": dist.group.WORLD,
        "gloo": dist.new_group(backend="gloo", timeout=patience),
    }
    if by_node:
        options = torch_sagellm.Options(threads=threads, numa=True)
        groups["numa"] = dist.new_group(timeout=patience, pg_options=options)
    gc.collect()
    gc.freeze()
    gc.disable()
    results = []
    for name in args.dtypes.split(","):
        dtype = DTYPES[name]
        for size in map(parse_size, args.sizes.split(",")):
            times = measure(max(1, size // dtype.itemsize), dtype, groups, args)
            results.append({"dtype": name, "size": size, "times": times})
            if dist.get_rank() == 0:
                texts = [f"{label} {format_time(one['p10'])}" for label, one in times.items()]
                print(f"{name} {show_size(size)}: {', '.join(texts)}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        cpu = torch.device("cpu")
        described = {name: each._get_backend(cpu).describe() for name, each in groups.items() if name != "gloo"}
        found = {"groups": described, "results": results}
        Path(os.environ[FOLDER], "results.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


def table(run: dict[str, Any]) -> str:
    """The p10 of each way, and its share of the limit."""
    lines = [f"## {run['ranks']} ranks x {run['threads']} threads, p10, share of the limit", ""]
    labels = list(run["results"][0]["times"])
    lines += ["| dtype | size | " + " | ".join(labels) + " |", "| --- |" + " ---: |" * (len(labels) + 1)]
    for row in run["results"]:
        limit = row["times"][LIMIT]["p10"]
        cells = [
            format_time(one["p10"]) + ("" if label == LIMIT else f", {100 * limit / one['p10']:.0f} %")
            for label, one in row["times"].items()
        ]
        lines.append(f"| {row['dtype']} | {show_size(row['size'])} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def spawn(args: argparse.Namespace) -> int:
    """Starts new processes for each layout, prints the layout's table, and writes one file with all results."""
    machine, runs = machines.describe(), []
    for ranks, threads in layouts(args.layouts, cores()):
        with tempfile.TemporaryDirectory() as folder, processes.here() as store:
            print(f"{ranks} ranks x {threads} threads", file=sys.stderr, flush=True)
            code = processes.run(ranks, store | {"OMP_NUM_THREADS": threads, FOLDER: folder})
            if code:
                return code
            found_here = json.loads(Path(folder, "results.json").read_text())
        runs.append({"ranks": ranks, "threads": threads, **found_here})
        print(table(runs[-1]), flush=True)
    found = {"date": date.today().isoformat(), "machine": machine, "rounds": args.rounds, "runs": runs}
    folder = args.out / f"{found['date']}-{machines.slug(machine)}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{args.name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {path}; please attach it to an issue of the project if its machine has 8 cores or more", flush=True)
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layouts", default="", help="ranks x threads (default: 2, 4 and a rank per core on all cores, 2 on half)")
    add("--sizes", default=SIZES, help=f"bytes of each rank's tensor (default: {SIZES})")
    add("--dtypes", default="float32,bfloat16", help="default: float32,bfloat16")
    add("--rounds", type=int, default=10, help="turns per way and size (default: 10)")
    add("--budget", type=float, default=0.5, help="seconds of calls per way and size (default: 0.5)")
    add("--timeout", type=float, default=60, help="seconds until a stuck operation is an error (default: 60)")
    add("--out", type=Path, default=Path(__file__).parent / "runs", help="folder of results (default: benchmarks/runs)")
    add("--name", default="wide", help="name of the result file (default: wide)")
    args = parser.parse_args()
    if unknown := set(args.dtypes.split(",")) - set(DTYPES):
        parser.error(f"unknown dtype {', '.join(sorted(unknown))}; known: {', '.join(DTYPES)}")
    try:
        if any(ranks < 2 for ranks, _ in layouts(args.layouts, cores())):
            parser.error("an all_reduce needs at least 2 ranks")
        for size in args.sizes.split(","):
            parse_size(size)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> int:
    args = parse_args()
    try:
        return run_rank(args) if processes.is_rank() else spawn(args)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
