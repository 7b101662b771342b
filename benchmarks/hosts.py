#!/usr/bin/env python3
"""Compare groups over several hosts: this backend, gloo, a second gloo as the control, and gloo as the delegate.

Hosts are network namespaces of this machine. Each layout (hosts x ranks) is run over each link; within a run the groups
of the same processes take turns. Each rank writes its tensor before each call, as a program does. A sample is the time
per call of two consecutive calls on the slowest rank. The benchmark needs root and the programs `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import collectives
import torch
import torch.distributed as dist
from measure import machine as machines
from measure import ranks as processes
from measure import report
from measure.cases import DTYPES, Case
from measure.stats import by_pairs, format_time, percentile, slowest_rank, summarize

import torch_sagellm
from torch_sagellm._private.units import parse_size, show_size

EXAMPLES = """examples:
  python benchmarks/hosts.py                                     the default selection, under ten minutes
  python benchmarks/hosts.py --layouts 2x1 --links none --ops broadcast --sizes 16MiB
  python benchmarks/hosts.py --all --limit 36000                 every layout, link, operation and size: hours
  python benchmarks/hosts.py --layouts 2x1 --links none --perftest --backends sagellm,sagellm:ucx,gloo
  python benchmarks/hosts.py --layouts 4x1 --links none --backends 'sagellm,sagellm:*:64KiB-=ring,gloo'
  python benchmarks/hosts.py --forced --out out                  the choice against each algorithm forced by a rule
"""
#: The layouts and links that are run if none are given.
DEFAULT = (("2x1", "none"), ("2x2", "none"), ("4x1", "none"), ("2x1", "1ms"), ("2x2", "1ms"), ("2x1", "1gbit"))
LAYOUTS = [f"{hosts}x{ranks}" for hosts in (2, 3, 4, 8) for ranks in (1, 2, 4)]
LINKS = ["none", "10gbit", "1gbit", "0.05ms", "0.2ms", "1ms"]
OPS = "all_reduce,all_gather_into_tensor,reduce_scatter_tensor,broadcast,all_to_all_single,ping_pong"
SIZES = "8,64KiB,1MiB,16MiB"
ALL_SIZES = "8,512,4KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
BACKENDS = "sagellm,gloo,gloo,sagellm:delegate"
OURS, GLOO, CONTROL = "sagellm", "gloo", "gloo #2"
#: With --forced: the algorithms that a rule forces. An algorithm takes part in the cases that it serves.
FORCED = (
    "ring",
    "torus",
    "binomial_tree",
    "double_tree",
    "recursive_doubling",
    "halving_doubling",
    "direct",
    "direct_two_step",
    "bruck",
)
CHOSEN = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
RULE, AGAIN = "sagellm:*:0-=", "sagellm #2"
#: A choice is good enough if no forced algorithm is faster by more than this part.
NEAR = 0.1
#: Estimated seconds for starting a run's ranks and their groups; used only to divide the time limit.
START = 12
Result = dict[str, Any]


# ------------------------------------------------------------------------------------------------ one run's ranks


def samples(case: Case, backend: collectives.Backend, count: int) -> tuple[list[float], float]:
    """Times of this rank's calls in microseconds; empty if the rank takes no part.

    The rank writes its tensor before each call. The second result is the processor time of the rank's process for one
    call, including the writing of the tensor.
    """
    calls = case.calls(backend.group)
    dist.barrier(group=backend.group)
    taken, used = [], time.process_time()
    for i in range(count if case.takes_part() else 0):
        case.inputs[i % len(calls)].fill_(1)
        begin = time.perf_counter_ns()
        calls[i % len(calls)]()
        taken.append((time.perf_counter_ns() - begin) / 1e3)
    used = time.process_time() - used
    if case.op == "ping_pong":
        dist.barrier()  # ranks that take no part wait here
    return taken, used * 1e6 / count


def choice(case: Case, group: dist.ProcessGroup) -> str:
    """The name of the algorithm that the group takes."""
    # A case's size is that of the whole tensor, and `explain` asks for the size of one rank's part.
    size = case.size // case.ranks if case.op == "all_gather_into_tensor" else case.size
    return torch_sagellm.explain(case.op, size, group=group).choice.partition("(")[0]


def fitting(case: Case, taken: list[float], seconds: float) -> int:
    """The number of calls that fit in a round, by the slowest rank."""
    needed = torch.tensor([percentile(taken, 0.5) / 1e6 if case.takes_part() else 0.0], dtype=torch.float64)
    dist.all_reduce(needed, op=dist.ReduceOp.MAX)
    return max(2, min(collectives.MOST_SAMPLES, int(seconds / max(needed.item(), 1e-7))))


def measure(case: Case, backends: list[collectives.Backend], args: argparse.Namespace, seconds: float) -> Result:
    """Measures one operation at one size on all backends in turns, in about `seconds`."""
    begin = time.monotonic()
    failed: dict[str, str] = {}
    counts: dict[str, int] = {}
    rounds: dict[str, list[list[float]]] = {each.label: [] for each in backends}
    used: dict[str, list[float]] = {each.label: [] for each in backends}
    for number in range(args.rounds):
        turn = [each for each in backends[:: 1 if number % 2 == 0 else -1] if each.label not in failed]
        late = number >= 2 and time.monotonic() - begin > seconds
        errors, stop = collectives.agree({each.label: collectives.check(case, each, number) for each in turn}, late)
        failed |= errors
        if stop:
            break
        for backend in (each for each in turn if each.label not in failed):
            if backend.label not in counts:
                counts[backend.label] = fitting(case, samples(case, backend, 3)[0], args.budget / args.rounds)
            taken, processor = samples(case, backend, counts[backend.label])
            rounds[backend.label].append(taken)
            used[backend.label].append(processor)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rounds)
    all_used: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_used, used)
    times: Result = {label: {"error": failed[label]} for label in failed}
    for label in (each.label for each in backends if each.label not in failed):
        taking_part = [rank[label] for rank in everyone if any(rank[label])]
        merged = [slowest_rank([by_pairs(rank) for rank in taken]) for taken in zip(*taking_part, strict=True)]
        half = 2 if case.op == "ping_pong" else 1  # a round trip is two messages
        times[label] = summarize([[us / half for us in taken] for taken in merged]).as_dict()
        of_rounds = [sum(ranks) for ranks in zip(*(rank[label] for rank in all_used), strict=True)]
        times[label]["processor"] = percentile(of_rounds, 0.5) / half
    return {"op": case.op, "size": case.size, "times": {each.label: times[each.label] for each in backends}}


def measure_forced(case: Case, backends: list[collectives.Backend], args: argparse.Namespace, seconds: float) -> Result:
    """Finds the fastest forced algorithm, and then measures it again beside the choice, with new samples.

    The algorithm that seems the fastest of many owes this partly to noise, so its first samples are too fast.
    """
    served = [
        each
        for each in backends
        if not each.label.startswith(RULE) or choice(case, each.group) == each.label.removeprefix(RULE)
    ]
    first = measure(case, served, args, seconds / 2)
    right = {label: times["p10"] for label, times in first["times"].items() if "p10" in times}
    best = min((label for label in right if label.startswith(RULE)), key=right.__getitem__, default="")
    chosen = choice(case, backends[0].group)
    collectives.say(f"{args.layouts} {args.links}: {case.op} {show_size(case.size)}: {chosen}, fastest {best}")
    compared = [each for each in served if each.label in (OURS, AGAIN, best)]
    return measure(case, compared, args, seconds / 2) | {"chosen": chosen, "fastest": best}


def run_rank(args: argparse.Namespace) -> int:
    """Runs all cases of one layout and link on one rank; rank 0 writes the results."""
    dist.init_process_group("gloo", timeout=collectives.timedelta(seconds=args.timeout))
    torch.set_num_threads(1)
    backends = collectives.open_backends(args)
    plan = list(itertools.product(args.ops.split(","), map(parse_size, args.sizes.split(","))))
    busy, mine, begin = machines.busy_seconds(), time.process_time(), time.monotonic()
    collectives.quiet_collector()
    results: list[Result] = []
    for done, (op, size) in enumerate(plan, 1):
        case = Case(op, size, DTYPES["float32"], 2, partner=dist.get_world_size() - 1)
        share = 1.5 * (args.limit - (time.monotonic() - begin)) / (len(plan) - done + 1)
        if args.forced:
            results.append(measure_forced(case, backends, args, share))
            continue
        results.append(measure(case, backends, args, share))
        collectives.say(f"{args.layouts} {args.links}: {line(results[-1])}")
    seconds = time.monotonic() - begin
    own = torch.tensor([time.process_time() - mine], dtype=torch.float64)
    dist.all_reduce(own)
    others = max(0.0, (machines.busy_seconds() - busy - own.item()) / (seconds * machines.usable_cores()))
    if dist.get_rank() == 0:
        found = {"layout": args.layouts, "link": args.links, "others": round(others, 3), "results": results}
        args.part.write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


# ------------------------------------------------------------------------------------------------------- reports


def ratios(result: Result, label: str) -> tuple[float, float] | None:
    """gloo's p10 divided by that of the backend `label`, and the same for the medians. Above 1 `label` is faster."""
    theirs, own = result["times"].get(GLOO, {}), result["times"].get(label, {})
    return (theirs["p10"] / own["p10"], theirs["median"] / own["median"]) if "p10" in theirs and "p10" in own else None


def processor(result: Result, label: str) -> str:
    """gloo's processor time of a call divided by that of the backend `label`, summed over all ranks.

    Other programs affect this ratio less than the ratio of the times.
    """
    theirs, own = result["times"].get(GLOO, {}), result["times"].get(label, {})
    return f"{theirs['processor'] / max(own['processor'], 1e-3):.2f}" if "p10" in theirs and "p10" in own else "-"


def shown(found: tuple[float, float] | None) -> str:
    return "-" if found is None else f"{found[0]:.2f} ({found[1]:.2f})"


def line(result: Result) -> str:
    against = ", ".join(
        f"{label} {shown(ratios(result, label))} {processor(result, label)}"
        for label in result["times"]
        if label != GLOO
    )
    return f"{result['op']} {show_size(result['size'])}: {against}"


def lost(runs: list[Result], label: str) -> list[tuple[float, str]]:
    """The cells in which gloo is faster by the 10th percentile, the worst first."""
    cells = []
    for run in runs:
        for result in run["results"]:
            found = ratios(result, label)
            if found is not None and found[0] < 1:
                where = f"{run['layout']}, {run['link']}: {result['op']} {show_size(result['size'])} {shown(found)}"
                cells.append((found[0], where))
    return sorted(cells)


def markdown(whole: Result) -> str:
    """All runs: times, and gloo's time divided by each other backend's, for p10 and, in brackets, for the median."""
    machine = whole["machine"]
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores, {whole['date']}. gloo's time over that of the other: 10th "
        "percentile (median); below 1 gloo is faster. Times are medians (10th, 99th percentile) per call of two "
        "consecutive calls on the slowest rank; after a semicolon the ratio of the processor time of all ranks. "
        f"{CONTROL} is a second group of gloo: how far it is from 1 is noise. TCP's congestion control: "
        f"{whole.get('congestion') or 'the default of this machine'}."
    ]
    for run in whole["runs"]:
        labels = list(run["results"][0]["times"])
        others = [label for label in labels if label != GLOO]
        parts.append(f"\n## {run['layout']}, link {run['link']} (others used {run['others']:.0%} of the cores)\n")
        parts.append("| operation | size | " + " | ".join([*(f"gloo / {label}" for label in others), *labels]) + " |")
        parts.append("| --- | --- |" + " --- |" * (len(others) + len(labels)))
        for result in run["results"]:
            cells = [f"{shown(ratios(result, label))}; {processor(result, label)}" for label in others]
            cells += [report.cell(result["times"][label]) for label in labels]
            parts.append(f"| {result['op']} | {show_size(result['size'])} | " + " | ".join(cells) + " |")
        if floor := run.get("perftest"):
            times = ", ".join(f"{show_size(int(size))}: {format_time(us)}" for size, us in floor.items())
            parts.append(f"\n`ucx_perftest` between two of the hosts, a message one way (median): {times}.")
    cells_of = [ratios(result, OURS) for run in whole["runs"] for result in run["results"]]
    compared = [found for found in cells_of if found is not None]
    if compared:
        by = [percentile([found[at] for found in compared], 0.5) for at in (0, 1)]
        behind = lost(whole["runs"], OURS)
        parts.append(f"\n{len(compared)} cells, {len(behind)} lost by p10; the median cell is {shown((by[0], by[1]))}.")
        parts += [f"- lost: {where}" for _, where in behind]
    return "\n".join(parts)


def against_forced(whole: Result) -> str:
    """For each case: our choice, the fastest forced algorithm, and that algorithm's time divided by our choice's, p10
    (median).

    The last column has this ratio for a second group without rules; it shows the noise.
    """
    head = "| layout, link | operation | size | choice | fastest forced | its time / the choice's | the control's |"
    lines, near, count = [head, "|" + " --- |" * 7], 0, 0
    for run in whole["runs"]:
        for result in run["results"]:
            times = {label: found for label, found in result["times"].items() if "p10" in found}
            if len(times) != len((OURS, AGAIN, result["fastest"])):
                lines.append(
                    f"| {run['layout']}, {run['link']} | {result['op']} | {show_size(result['size'])} | failed |"
                )
                continue
            by, control = (
                [times[label][key] / times[OURS][key] for key in ("p10", "median")]
                for label in (result["fastest"], AGAIN)
            )
            count += 1
            near += by[0] >= 1 - NEAR
            cells = [f"{run['layout']}, {run['link']}", result["op"], show_size(result["size"])]
            cells += [result["chosen"], result["fastest"].removeprefix(RULE)]
            cells += [f"{by[0]:.2f} ({by[1]:.2f})", f"{control[0]:.2f} ({control[1]:.2f})"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"In {near} of {count} cells no forced algorithm is over {NEAR:.0%} faster by p10."])


def plot(whole: Result, path: Path) -> str | None:
    """Plots, for each run, gloo's p10 divided by ours, by size. Returns the reason if nothing was drawn."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot: matplotlib is missing (pip install matplotlib)"
    runs = whole["runs"]
    columns = min(3, len(runs))
    figure, axes = pyplot.subplots(
        -(-len(runs) // columns), columns, figsize=(5 * columns, 3.6 * -(-len(runs) // columns)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, run in itertools.zip_longest(axes.flat, runs):
        if run is None:
            axis.axis("off")
            continue
        for op in report.ops_of(run["results"]):
            rows = [(row["size"], ratios(row, OURS)) for row in run["results"] if row["op"] == op]
            points = [(size, found[0]) for size, found in rows if found is not None]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", markersize=3, label=op)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(
            title=f"{run['layout']}, {run['link']}",
            xscale="log",
            yscale="log",
            xlabel="bytes",
            ylabel="gloo / ours, p10",
        )
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return None


def write(whole: Result, text: str, stem: Path, plotted: bool) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text + "\n")
    why_not = plot(whole, stem.with_suffix(".png")) if plotted else "no plot"
    print(f"written: {stem}.json, .md" + (f"; {why_not}" if why_not else ", .png"), file=sys.stderr)


# ---------------------------------------------------------------------------------------------------- the program


def missing(perftest: bool = False) -> str:
    """What this machine lacks for the measurement; empty if it lacks nothing."""
    lacking = ["root (run it with sudo)"] if os.geteuid() != 0 else []
    lacking += ["ucx_perftest (package ucx-utils)"] if perftest and shutil.which("ucx_perftest") is None else []
    lacking += [f"the program `{name}` (package iproute2)" for name in ("ip", "tc") if shutil.which(name) is None]
    return ", ".join(lacking)


def link_of(name: str) -> tuple[str, float]:
    """The rate of the link with this name, and its delay in milliseconds."""
    if name == "none":
        return "", 0.0
    delay = re.fullmatch(r"([\d.]+)ms", name)
    return ("", float(delay[1])) if delay else (name, 0.0)


def run_layout(args: argparse.Namespace, layout: str, link: str, limit: float) -> tuple[int, Result | None]:
    """Starts the ranks of one layout over one link; returns the exit code, and the results if there are any."""
    import net

    hosts, per_host = map(int, layout.split("x"))
    rate, delay = link_of(link)
    of_host = [host for host in range(hosts) for _ in range(per_host)]
    with (
        net.Network(hosts, rate, delay, congestion=args.congestion) as network,
        tempfile.TemporaryDirectory() as folder,
    ):
        part = Path(folder) / "part.json"
        place = {
            "MASTER_ADDR": network.address(0), "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": net.INTERFACE,
            "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        inside = [["ip", "netns", "exec", network.names[host]] for host in of_host]
        words = [f"--layouts={layout}", f"--links={link}", f"--limit={limit:.1f}", f"--part={part}"]
        code = processes.run(len(of_host), place, inside, words)
        found = json.loads(part.read_text()) if part.exists() else None
        if found is not None and args.perftest:
            ends = [["ip", "netns", "exec", network.names[host]] for host in (0, 1)]
            found["perftest"] = perftest(ends, network.address(0), found["results"])
        return code, found


def perftest(ends: list[list[str]], address: str, results: list[Result]) -> dict[str, float]:
    """UCX's own program between the first two hosts: the microseconds of a message one way, by size.

    Its times are the floor for a link by UCX, because this program does nothing else, and polls.
    """
    env = {"UCX_TLS": "tcp", **os.environ}
    found = {}
    for size in sorted({result["size"] for result in results}):
        count = max(20, min(20_000, (256 << 20) // max(size, 1)))
        common = ["ucx_perftest", "-p", "13337"]
        asking = [address, "-t", "ucp_am_lat", "-s", str(size), "-n", str(count), "-w", str(count // 10), "-f", "-v"]
        server = subprocess.Popen([*ends[0], *common], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(0.5)  # it listens soon
            done = subprocess.run([*ends[1], *common, *asking], env=env, capture_output=True, text=True, timeout=60)
            last = done.stdout.strip().rpartition("\n")[2].split(",")
            found[str(size)] = float(last[1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            print(f"ucx_perftest failed with {show_size(size)}: {error}", file=sys.stderr)
        finally:
            server.kill()
            server.wait()
    return found


def spawn(args: argparse.Namespace, plan: list[tuple[str, str]]) -> int:
    """Runs every layout and link of the plan, one after the other."""
    if lacking := missing(args.perftest):
        print(f"hosts cannot be simulated here, because this is missing: {lacking}", file=sys.stderr)
        return 1
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/py"))
    import net

    machine, runs, code = machines.describe(), [], 0
    begin = time.monotonic()
    for number, (layout, link) in enumerate(plan):
        share = (args.limit - (time.monotonic() - begin)) / (len(plan) - number) - START
        try:
            failed, found = run_layout(args, layout, link, max(5.0, share))
        except net.Unavailable as reason:
            print(f"hosts cannot be simulated here: {reason}", file=sys.stderr)
            return 1
        if failed == 130:
            return failed
        wrong = (
            []
            if found is None
            else [row for row in found["results"] if any("error" in t for t in row["times"].values())]
        )
        code = code or failed or int(bool(wrong))
        if found is not None:
            runs.append(found)
    whole = {"date": date.today().isoformat(), "machine": machine, "congestion": args.congestion, "runs": runs}
    if runs:
        text = against_forced(whole) if args.forced else markdown(whole)
        print(text)
        folder = args.out / f"{whole['date']}-{machines.slug(machine)}"
        write(whole, text, folder / ("forced" if args.forced else "hosts"), not args.forced)
    return code


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    default = ", ".join(f"{layout} {link}" for layout, link in DEFAULT)
    add("--layouts", help=f"hosts x ranks on each, of {', '.join(LAYOUTS)} or others (default: {default})")
    add("--links", help=f"of {', '.join(LINKS)} or other rates or delays; each layout is run over each")
    add("--ops", default=OPS, help=f"default: {OPS}; ping_pong is a send and a receive, one way")
    add("--sizes", help=f"bytes of the whole tensor (default: {SIZES})")
    add("--backends", default=BACKENDS, help=f"default: {BACKENDS}; a name twice is its own control")
    add(
        "--forced", action="store_true",
        help="compare the choice with each algorithm forced by a rule, for operations that have a choice",
    )  # fmt: skip
    add("--perftest", action="store_true", help="then also run UCX's own ucx_perftest between two hosts, over tcp")
    add("--all", action="store_true", help=f"every layout, link and size ({ALL_SIZES}); give a --limit, too")
    add(
        "--congestion", default="cubic",
        help="TCP's congestion control between the hosts; an empty word takes this machine's (default: cubic, which "
        "most systems use)",
    )  # fmt: skip
    add("--rounds", type=int, default=6, help="turns of each backend in a case (default: 6)")
    add("--budget", type=float, default=0.4, help="seconds of timed calls of a backend in a case (default: 0.4)")
    add("--limit", type=float, default=540, help="seconds for everything (default: 540); slow cases get fewer rounds")
    add("--timeout", type=float, default=60, help="seconds until a stuck operation is an error (default: 60)")
    add(
        "--out", type=Path, default=Path(__file__).parent / "runs", help="folder for results (default: benchmarks/runs)"
    )
    add("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.control, args.floor, args.device = False, False, "cpu"  # needed by `collectives`
    if args.forced:
        args.backends = ",".join([OURS, OURS, *(RULE + name for name in FORCED)])
        args.ops = ",".join(op for op in args.ops.split(",") if op in CHOSEN)
        if not args.ops:
            parser.error(f"--forced compares {', '.join(CHOSEN)}, and --ops names none of them")
    args.sizes = args.sizes or (ALL_SIZES if args.all else SIZES)
    for layout in (args.layouts or "").split(",") if args.layouts else []:
        if re.fullmatch(r"[1-9]\d*x[1-9]\d*", layout) is None:
            parser.error(f"--layouts {layout}: expected HOSTSxRANKS, such as 2x1")
    if unknown := set(args.ops.split(",")) - set(collectives.OPS):
        parser.error(f"unknown operation {', '.join(sorted(unknown))}; known: {', '.join(collectives.OPS)}")
    return args


def planned(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The layouts and links that the arguments select."""
    if not (args.layouts or args.links or args.all):
        return list(DEFAULT)
    layouts = args.layouts.split(",") if args.layouts else LAYOUTS if args.all else ["2x1"]
    links = args.links.split(",") if args.links else LINKS if args.all else ["none"]
    return list(itertools.product(layouts, links))


def main() -> int:
    args = parse_args()
    try:
        return run_rank(args) if processes.is_rank() else spawn(args, planned(args))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
