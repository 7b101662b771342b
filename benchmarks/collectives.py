#!/usr/bin/env python3
"""Compare torch.distributed backends, operation by operation, in the same processes and the same minutes.

Backends take turns in short rounds (A B A B), because a machine's speed changes within seconds and a difference between
two separate runs proves nothing. Every result is checked in every round, outside the measured time. README.md in this
folder says how to read the output and which cases are unfair.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import clock as clocks
from measure import machine as machines
from measure import ranks as processes
from measure import report
from measure.cases import DTYPES, FIXED_SIZE, OPS, Case
from measure.stats import format_time, percentile, slowest_rank, summarize

from torch_sagellm._private.units import parse_size, show_size

EXAMPLES = """examples:
  python benchmarks/collectives.py --ranks 2 --quick
  python benchmarks/collectives.py --ranks 4 --ops all_reduce,barrier --sizes 8,64KiB,1MiB
  python benchmarks/collectives.py --backends gloo --control       how much of a difference is noise
  python benchmarks/collectives.py --backends sagellm,sagellm:unfused,gloo --ops all_reduce_x1000
  python benchmarks/collectives.py --hosts 0,0,1,1 --delay-ms 1 --ops all_reduce --sizes 8,4KiB     two hosts, as root
  python benchmarks/collectives.py --backends 'sagellm,sagellm:*:1MiB-=rounds(64KiB)' --sizes 4MiB    a rule
  python benchmarks/collectives.py --device cuda --ranks 8 --ops all_reduce --sizes 1MiB         a card each, and nccl
  torchrun --nproc-per-node=2 benchmarks/collectives.py --backends sagellm,gloo
"""
SIZES = "8,512,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
QUICK_SIZES = "8,4KiB,64KiB,1MiB,16MiB"
MOST_SAMPLES = 2000
LAST_LEVEL_CACHE = 64 << 20  # assumed; with --cold a rank uses buffers of twice this size in turn, at most 1024 sets
#: For each type of device: the reference backend. The default clock of a device (`parse_args`) waits for the device,
#: because a call returns before its result is there.
REFERENCES = {"cpu": report.REFERENCE, "cuda": "nccl", "npu": "hccl", "mlu": "cncl"}
Calls = Sequence[Callable[[], object]]


class Backend:
    """One column of the tables: a process group and its label."""

    def __init__(self, label: str, group: dist.ProcessGroup, form: str = "") -> None:
        self.label, self.group = label, group
        self.form = form  # for an operation with several forms (see `Case`): the form; empty means the case's own
        self.checked = label != report.FLOOR  # torch's fake backend moves no data between ranks, so results are wrong


# ------------------------------------------------------------------------------------------------- measuring


def check(case: Case, backend: Backend, turn: int) -> str | None:
    """Makes one unmeasured call on known values; returns the error on this rank, or None."""
    try:
        return case.check(backend.group, turn, backend.form) if backend.checked else None
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def agree(errors: dict[str, str | None], out_of_time: bool) -> tuple[dict[str, str], bool]:
    """Combines the errors of all ranks, so that all skip a backend together, and rank 0's decision to stop."""
    flags = torch.tensor(
        [*(error is not None for error in errors.values()), out_of_time and dist.get_rank() == 0]
    ).int()
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    if not flags[:-1].any():
        return {}, bool(flags[-1])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, errors)
    found = {label: next((rank[label] for rank in everyone if rank[label]), None) for label in errors}
    return {label: error for label, error in found.items() if error}, bool(flags[-1])


def samples_per_round(case: Case, calls: Calls, seconds: float, timed_block: clocks.Clock) -> int:
    """The number of calls that fit in a round, by the slowest rank's clock, so that all ranks make the same number."""
    needed = torch.zeros(1, dtype=torch.float64)
    if case.takes_part():
        timed_block(calls, 1, 0)
        needed[0] = percentile(timed_block(calls, 5, 1), 0.5) / 1e6
    dist.all_reduce(needed, op=dist.ReduceOp.MAX)
    return max(2, min(MOST_SAMPLES, int(seconds / max(needed.item(), 1e-7))))


def measure(case: Case, backends: list[Backend], args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Measures one operation at one size on all backends, in about `seconds` at most.

    Returns summaries on every rank.
    """
    begin = time.monotonic()
    calls = {b.label: case.calls(b.group, b.form) for b in backends}
    timed_block = clocks.CLOCKS[args.clock]
    failed: dict[str, str] = {}
    counts: dict[str, int] = {}
    rounds: dict[str, list[list[float]]] = {b.label: [] for b in backends}
    for number in range(args.rounds):
        # Every second round is in reverse order, so that no backend always runs after the same other one.
        turn = [b for b in (backends if number % 2 == 0 else backends[::-1]) if b.label not in failed]
        late = number >= 2 and time.monotonic() - begin > seconds
        errors, stop = agree({b.label: check(case, b, number) for b in turn}, late)
        failed |= errors
        if stop:
            break
        for backend in turn:
            label = backend.label
            if label in failed:
                continue
            if label not in counts:
                counts[label] = samples_per_round(case, calls[label], args.budget / args.rounds, timed_block)
            rounds[label].append(one_round(case, backend, calls[label], counts[label], number, timed_block))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rounds)
    times: dict[str, Any] = {label: {"error": failed[label]} for label in failed}
    for label in (b.label for b in backends if b.label not in failed):
        taking_part = [rank[label] for rank in everyone if any(rank[label])]  # ranks that take no part have no times
        merged = [slowest_rank(taken) for taken in zip(*taking_part, strict=True)]
        if case.op == "ping_pong":  # a round trip is two messages
            merged = [[us / 2 for us in taken] for taken in merged]
        times[label] = summarize(merged).as_dict()
    return {"op": case.op, "size": case.size, "times": {b.label: times[b.label] for b in backends}}


def one_round(
    case: Case, backend: Backend, calls: Calls, count: int, number: int, timed_block: clocks.Clock
) -> list[float]:
    """The measured part: warms up the caches again, synchronises the ranks, measures."""
    taken: list[float] = []
    if case.op == "ping_pong":
        if case.takes_part():
            timed_block(calls, 2, 0)
            taken = timed_block(calls, count, number)
        dist.barrier()  # ranks that take no part wait here
        return taken
    timed_block(calls, min(count, 4), 0)
    dist.barrier(group=backend.group)
    return timed_block(calls, count, number)


def buffer_sets(args: argparse.Namespace, op: str, size: int) -> int:
    """The number of sets of buffers that a case uses in turn."""
    if op == "barrier":
        return 1
    if args.cold:
        return max(args.buffers, min(1024, 2 * LAST_LEVEL_CACHE // max(size, 1)))
    return args.buffers


# --------------------------------------------------------------------------------------------------- ranks


def names_of(text: str) -> list[str]:
    """Splits names at commas, except at those within the brackets of a rule."""
    return re.split(r",(?![^(]*\))", text)


def variant_options(backend: str, variant: str) -> dict[str, Any]:
    """The options that a variant such as `sagellm:unfused` means.

    `sagellm:OP:FROM-TO=ALGORITHM` is a group with that rule.
    """
    if not variant:
        return {}
    known: dict[str, dict[str, Any]] = {
        "unfused": {"fusion": False},
        "strict": {"strict": True},
        "delegate": {"engine": "delegate"},
        "ucx": {},
    }
    if "=" in variant:
        known[variant] = {"algorithm": variant}
    if backend != "sagellm" or variant not in known:
        raise ValueError(
            f"unknown backend {backend}:{variant}; the variants are sagellm:unfused, sagellm:strict, "
            "sagellm:delegate, sagellm:ucx (between hosts) and sagellm:RULE, "
            "such as sagellm:all_gather:0-=ring(leaders=1)"
        )
    from torch_sagellm._private import load

    return {"pg_options": load.extension().Options(**known[variant])}


@contextmanager
def link_by_ucx(wanted: bool) -> Iterator[None]:
    """If ``wanted``, groups created in the block use UCX between hosts, over TCP unless UCX_TLS is set."""
    if wanted:
        os.environ.setdefault("UCX_TLS", "tcp")
        os.environ["SAGELLM_LINK"] = "ucx"
    try:
        yield
    finally:
        if wanted:
            del os.environ["SAGELLM_LINK"]


def reference_of(args: argparse.Namespace) -> str:
    return REFERENCES.get(args.device, report.REFERENCE)


def use_device(args: argparse.Namespace) -> str:
    """Makes this rank's device current and returns its description. Exits the program if there is none."""
    if args.device == "cpu":
        return ""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = 0 if accelerator is None or accelerator.type != args.device else torch.accelerator.device_count()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= found:
        raise SystemExit(f"no {args.device} device for rank {local}: torch {torch.__version__} finds {found}")
    torch.accelerator.set_device_index(local)
    return machines.describe_device(args.device)


def open_backends(args: argparse.Namespace) -> list[Backend]:
    """Creates a group for each name; a name that appears twice is its own control."""
    names = names_of(args.backends)
    if args.control:
        names.append(reference_of(args) if reference_of(args) in names else names[-1])
    backends: list[Backend] = []
    for name in names:
        before = sum(b.label.partition(" #")[0] == name for b in backends)
        label = f"{name} #{before + 1}" if before else name
        backend, _, variant = name.partition(":")
        options = variant_options(backend, variant)
        with link_by_ucx(variant == "ucx"):
            group = dist.new_group(backend=backend, timeout=timedelta(seconds=args.timeout), **options)
        backends.append(Backend(label, group))
    if args.floor:
        try:
            importlib.import_module("torch.testing._internal.distributed.fake_pg")
            backends.append(Backend(report.FLOOR, dist.new_group(backend="fake")))
        except (ImportError, RuntimeError, ValueError) as error:
            say(f"no floor: this torch has no usable fake backend ({error})")
    return backends


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def progress(done: int, total: int, case: Case, result: dict[str, Any], begin: float, reference: str) -> None:
    """Prints one line for a case."""
    parts = []
    for label, timed in result["times"].items():
        parts.append(f"{label} {format_time(timed['median']) if 'median' in timed else 'FAILED: ' + timed['error']}")
    ratios = report.speedups(result, reference)
    best = f"  {next(iter(ratios.values()))[0]:.1f}x" if ratios else ""
    left = (time.monotonic() - begin) / done * (total - done)
    say(f"[{done:3d}/{total}] {case.op:<22} {show_size(case.size):>8}  {'  '.join(parts)}{best}  ({left:.0f} s left)")


def default_name(args: argparse.Namespace, ranks: int) -> str:
    """The default name of the result files."""
    if not args.hosts:
        where = "collectives" if args.device == "cpu" else f"{args.device}-{args.clock}"
        return f"{where}-{ranks}r-{args.dtype}"
    link = args.rate or (f"{args.delay_ms:g}ms" if args.delay_ms else "plain")
    return f"hosts-{args.hosts.replace(',', '')}-{link}"


def command_line(arguments: list[str]) -> str:
    """The command for the report, without the paths of the output files."""
    kept, skip = ["benchmarks/collectives.py"], False
    for word in arguments:
        if not skip and not word.startswith(("--out", "--name")):
            kept.append(word)
        skip = word in {"--out", "--name"}
    return shlex.join(kept)


def quiet_collector() -> None:
    """Disables the garbage collector, because the time of a collection would count for the backend that is just
    running."""
    gc.collect()
    gc.freeze()
    gc.disable()


def run_rank(args: argparse.Namespace) -> int:
    """Runs the whole benchmark on one rank; returns the exit code."""
    for module in args.imports:
        importlib.import_module(module)
    device = use_device(args)
    machine = machines.describe()  # before the run itself raises the load
    # The ranks exchange the benchmark's own data over gloo; no measured operation uses this group.
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    ranks = dist.get_world_size()
    torch.set_num_threads(max(1, machines.usable_cores() // ranks))
    backends = open_backends(args)
    plan = [
        (op, size)
        for op in args.ops.split(",")
        if ranks > 1 or op != "ping_pong"
        for size in ([FIXED_SIZE[op]] if op in FIXED_SIZE else map(parse_size, args.sizes.split(",")))
    ]
    results, begin = [], time.monotonic()
    busy, mine = machines.busy_seconds(), time.process_time()
    quiet_collector()
    for done, (op, size) in enumerate(plan, 1):
        case = Case(op, size, DTYPES[args.dtype], buffer_sets(args, op, size), args.device)
        # A case may take more than its share of the time, because most cases take less. Only rank 0's clock decides.
        share = 1.5 * (args.limit - (time.monotonic() - begin)) / (len(plan) - done + 1)
        result = measure(case, backends, args, share)
        results.append(result)
        progress(done, len(plan), case, result, begin, reference_of(args))
    seconds = time.monotonic() - begin
    own = torch.tensor([time.process_time() - mine], dtype=torch.float64)
    dist.all_reduce(own)
    others = (machines.busy_seconds() - busy - own.item()) / (seconds * machines.usable_cores())
    failures = [(r["op"], r["size"], b, t["error"]) for r in results for b, t in r["times"].items() if "error" in t]
    if dist.get_rank() == 0:
        run = {
            "date": date.today().isoformat(), "machine": machine, "ranks": ranks, "dtype": args.dtype,
            "labels": [b.label for b in backends], "rounds": args.rounds, "budget_seconds": args.budget,
            "hosts": args.hosts, "rate": args.rate, "delay_ms": args.delay_ms,
            "buffers": "cold" if args.cold else args.buffers, "seconds": round(seconds, 1),
            "device": device, "clock": args.clock, "reference": reference_of(args),
            "command": command_line(sys.argv[1:]),
            "others": round(max(0.0, others), 3), "results": results,
        }  # fmt: skip
        print(report.markdown(run))
        folder = args.out / f"{run['date']}-{machines.slug(machine)}"
        for line in report.write(run, folder, args.name or default_name(args, ranks)):
            say(line)
        for op, size, label, error in failures:
            say(f"FAILED: {label}, {op}, {show_size(size)}: {error}")
    dist.destroy_process_group()
    return 1 if failures else 0


# ------------------------------------------------------------------------------------------------ the program


def spawn(args: argparse.Namespace) -> int:
    """Starts the ranks, on this host or on several simulated hosts."""
    threads = {"OMP_NUM_THREADS": max(1, machines.usable_cores() // args.ranks)}
    if not args.hosts:
        with processes.here() as place:
            return processes.run(args.ranks, threads | place)
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/py"))
    import net

    hosts = [int(host) for host in args.hosts.split(",")]
    try:
        with net.Network(max(hosts) + 1, args.rate, args.delay_ms) as network:
            # Each run has a new network, so every port is free.
            place = {
                "MASTER_ADDR": network.address(hosts[0]),
                "MASTER_PORT": 29500,
                "GLOO_SOCKET_IFNAME": net.INTERFACE,
            }
            inside = [["ip", "netns", "exec", network.names[host]] for host in hosts]
            return processes.run(args.ranks, threads | place, inside)
    except net.Unavailable as reason:
        print(f"hosts cannot be simulated here: {reason}", file=sys.stderr)
        return 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--backends", help="names, with commas (default: sagellm,gloo; on cuda sagellm,nccl, and so on)")
    add("--control", action="store_true", help="measure the other one a second time: the ratio is the noise (A/A)")
    add("--floor", action="store_true", help="also torch's fake backend, which does nothing: the cost of the call")
    add("--ranks", type=int, default=2, help="processes to start when not under torchrun (default: 2)")
    add(
        "--hosts",
        default="",
        help="simulate hosts by network namespaces: each rank's host, such as 0,0,1,1 (needs root)",
    )
    add("--rate", default="", help="with --hosts: bandwidth of each host's link, such as 1gbit")
    add("--delay-ms", type=float, default=0.0, help="with --hosts: one-way latency in milliseconds")
    add("--ops", default=",".join(OPS), help=f"default: all of {', '.join(OPS)}")
    add("--sizes", help=f"bytes of the whole tensor (default: {SIZES})")
    add("--dtype", default="float32", choices=DTYPES, help="default: float32")
    add(
        "--device",
        default="cpu",
        help="where the tensors are, a device for each rank: cpu, cuda, npu, mlu (default: cpu)",
    )
    add(
        "--clock",
        choices=["call", "series", "issue", "device"],
        help="call: until it returns (default on cpu); series: several calls in a row, for slow links; issue: "
        "each call, with a device that has little to do; device: series until the device is done (default elsewhere)",
    )
    add("--quick", action="store_true", help=f"under a minute: sizes {QUICK_SIZES}, fewer rounds")
    add("--rounds", type=int, help="turns per backend and case (default: 10, quick: 4)")
    add("--budget", type=float, help="seconds of timed calls per backend and case (default: 0.3, quick: 0.06)")
    add(
        "--limit",
        type=float,
        help="seconds for all cases together; slow ones get fewer rounds (default: 420, quick: 45)",
    )
    add("--buffers", type=int, default=4, help="sets of buffers used in turn (default: 4)")
    add("--cold", action="store_true", help="use so many buffers in turn that none is still in a cache")
    add(
        "--import",
        dest="imports",
        action="append",
        default=[],
        help="module to import first, for a backend that needs it",
    )
    add("--timeout", type=float, default=60, help="seconds until a stuck operation is an error (default: 60)")
    add(
        "--out", type=Path, default=Path(__file__).parent / "runs", help="folder for results (default: benchmarks/runs)"
    )
    add("--name", help="name of the result files (default: collectives-<ranks>r-<dtype>, hosts-<hosts>-<link>)")
    args = parser.parse_args()
    args.backends = args.backends or f"sagellm,{reference_of(args)}"
    args.clock = args.clock or ("call" if args.device == "cpu" else "device")
    args.sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    args.rounds = args.rounds or (4 if args.quick else 10)
    args.budget = args.budget or (0.06 if args.quick else 0.3)
    args.limit = args.limit or (45 if args.quick else 420)
    if unknown := set(args.ops.split(",")) - set(OPS):
        parser.error(f"unknown operation {', '.join(sorted(unknown))}; known: {', '.join(OPS)}")
    try:
        for size in args.sizes.split(","):
            parse_size(size)
    except ValueError as error:
        parser.error(str(error))
    if args.hosts:
        places = args.hosts.split(",")
        if not all(place.isdigit() for place in places) or set(map(int, places)) != set(range(len(set(places)))):
            parser.error(f"--hosts {args.hosts}: expected each rank's host, counted from 0, such as 0,0,1,1")
        args.ranks = len(places)
    elif args.rate or args.delay_ms:
        parser.error("--rate and --delay-ms need --hosts")
    if args.rate and args.delay_ms:
        parser.error("--rate or --delay-ms, not both")
    if args.ranks < 1 or args.buffers < 1:
        parser.error("--ranks and --buffers must be at least 1")
    return args


def main() -> int:
    args = parse_args()
    if not processes.is_rank():
        return spawn(args)
    try:
        return run_rank(args)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
