#!/usr/bin/env python3
"""Writes the tables of docs/internals/benchmarks.md from the JSON files in runs/: no figure in them is typed by hand.

python benchmarks/update_docs.py

Each table replaces the text between `<!-- table: NAME -->` and `<!-- end -->`. The table of the goals reads every run.
Every other table reads the runs that are named below. If a newer run shall replace one of these runs, change the name
below.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import busy
import pictures
import wide
from measure import report
from measure.stats import format_ratio, format_time

from torch_sagellm._private.units import show_size

RUNS = Path(__file__).resolve().parent / "runs"
PAGE = RUNS.parent.parent / "docs/internals/benchmarks.md"
DOCS = RUNS.parent.parent / "docs"
OURS, UNFUSED = "sagellm", "sagellm:unfused"
ONE_LEADER = "sagellm:*:0-=direct(leaders=1)"

EPYC_21, EPYC, XEON_21, XEON = (
    f"{date}-{machine}" for machine in ("amd-epyc-2c", "intel-xeon-2c") for date in ("2026-11-21", "2026-11-22")
)
CLOSE = [f"{EPYC}/goals-2r", f"{XEON}/lone-2r"]
COLLECTIVES = [f"{EPYC_21}/collectives-2r-float32", f"{EPYC_21}/collectives-4r-float32"]
SIXTEEN = "2026-11-26-intel-xeon-16c"
WIDE = [f"{SIXTEEN}/collectives-{ranks}r-float32" for ranks in (2, 4, 8, 16)]
#: A run of gpu.py: host times of the calls of one rank on one GPU.
CARD = [f"{SIXTEEN}/gpu-host-time-2"]
FUSION = [
    f"{EPYC}/fusion-2r", f"{XEON_21}/fusion-2r-floor", f"{XEON_21}/fusion-2r",
    f"{EPYC}/fusion-4r", f"{EPYC}/fused-4r", f"{XEON_21}/fusion-4r",
    f"{EPYC}/fusion-hosts-01-1ms", f"{XEON}/fusion-hosts-01-1ms",
]  # fmt: skip
HOSTS = [
    f"{EPYC}/hosts-0123-1ms-series", f"{EPYC}/hosts-0123-1ms", f"{XEON}/hosts-0123-1ms",
    f"{EPYC}/hosts-00001111-1ms-series", f"{EPYC}/hosts-00001111-1ms", f"{XEON}/hosts-00001111-1ms",
    f"{EPYC}/hosts-0011-1gbit", f"{EPYC}/hosts-0101-1gbit",
]  # fmt: skip
#: Runs of wide.py: on a machine with 16 cores, and on one with 2.
THREADS = f"{SIXTEEN}/threads"
ONE_THREAD = "2026-11-26-amd-epyc-2c/wide"
#: A run of messages.py.
MESSAGES = "2026-11-26-amd-epyc-2c/messages"
#: A run of hosts.py.
EVERY_HOST = "2026-11-29-amd-epyc-2c/hosts"
#: A run of busy.py. Its file has the results of many starts of the ranks.
BUSY = "2026-11-25-amd-epyc-2c/busy"
LEADERS = [f"{EPYC}/columns-0011-10gbit-direct", f"{EPYC}/columns-0011-1gbit-direct"]

KiB, MiB = 1 << 10, 1 << 20
# Key: the ranks (their number, or each rank's host), link, operation and bytes. Value: the smallest good ratio of the
# rival's time to our median, and the rival: gloo (its time is its p10), or this backend without fusion (its median).
GOALS: dict[tuple[str, str, str, int], tuple[float, str]] = {
    ("2", "", "all_reduce", 8): (30, "gloo"),
    ("2", "", "all_reduce", 4 * KiB): (30, "gloo"),
    ("2", "", "all_reduce", 64 * KiB): (15, "gloo"),
    ("2", "", "all_reduce", MiB): (5, "gloo"),
    ("2", "", "all_reduce", 64 * MiB): (6, "gloo"),
    ("2", "", "barrier", 0): (20, "gloo"),
    ("4", "", "all_reduce", 8): (20, "gloo"),
    ("2", "", "all_reduce_x10", 2 * KiB): (60, "gloo"),
    ("4", "", "all_reduce_x10", 2 * KiB): (60, "gloo"),
    ("4", "", "all_reduce_x1000", 2 * KiB): (2, "not fused"),
    ("0,1", "1 ms", "all_reduce_x1000", 2 * KiB): (5, "not fused"),
    ("0,1,2,3", "1 ms", "all_reduce", 8): (2.5, "gloo"),
    ("0,1,2,3", "1 ms", "all_reduce", 4 * KiB): (2.5, "gloo"),
    ("0,0,0,0,1,1,1,1", "1 ms", "all_reduce", 8): (3, "gloo"),
    ("0,0,0,0,1,1,1,1", "1 ms", "all_reduce", 4 * KiB): (3, "gloo"),
    ("0,0,1,1", "1 Gbit/s", "all_reduce", 16 * MiB): (1.35, "gloo"),
    ("0,1,0,1", "1 Gbit/s", "all_reduce", 16 * MiB): (2.5, "gloo"),
}

Run = report.Result
Table = list[list[str]]


def load(name: str) -> Run:
    """Loads one run by its folder and name."""
    run: Run = json.loads((RUNS / f"{name}.json").read_text())
    return run


def ranks_of(layout: str) -> str:
    """The ranks and hosts of a layout as text: "0,0,1,1" is 2 hosts x 2 ranks."""
    if "," not in layout:
        return f"{layout} ranks"
    hosts = layout.split(",")
    each = next(iter(Counter(hosts).values()))
    order = "" if hosts == sorted(hosts) else ", alternating"
    return f"{len(set(hosts))} hosts x {each} rank{'s' if each > 1 else ''}{order}"


def layout_of(run: Run) -> str:
    return run.get("hosts") or str(run["ranks"])


def link_of(run: Run) -> str:
    rate, delay = run.get("rate") or "", run.get("delay_ms") or 0
    return rate.replace("gbit", " Gbit/s") or (f"{delay:g} ms" if delay else "")


def machine_of(run: Run) -> str:
    cores = run["machine"]["cores"]
    more = "" if cores == 2 else f" with {cores} cores"
    return f"{'AMD EPYC' if 'EPYC' in run['machine']['cpu'] else 'Intel Xeon'}{more}, {run['date']}"


def size_of(row: Run) -> str:
    return show_size(row["size"]) if row["size"] else "-"


def median(row: Run, label: str) -> str:
    """A backend's median; "-" if it was not measured."""
    return format_time(row["times"][label]["median"]) if label in row["times"] else "-"


def control_of(row: Run) -> float | None:
    """The ratio of the p10s of two equal gloo groups: the noise of the row."""
    return next((ratio[1] for label, ratio in report.speedups(row).items() if report.is_control(label)), None)


def control(row: Run) -> str:
    found = control_of(row)
    return "-" if found is None else f"{found:.2f}"


def noted(ratio: float, row: Run, *, control: bool, others: Iterable[str] = ()) -> str:
    """The ratio as text, with notes in brackets: ``others``, and the A/A control of the row if that is far from 1."""
    noise = control_of(row) if control else None
    notes = [*others, *([f"A/A {noise:.2f}"] if noise is not None and not 0.8 <= noise <= 1.25 else [])]
    return format_ratio(ratio) + (f" ({', '.join(notes)})" if notes else "")


def against_unfused(row: Run) -> float | None:
    times = row["times"]
    return times[UNFUSED]["median"] / times[OURS]["median"] if UNFUSED in times else None


# ------------------------------------------------------------------------------------------------------- tables


def goals(runs: list[Run]) -> Table:
    """Every run of every goal, so that no run hides another. A goal without a measurement keeps its row."""
    columns = list(dict.fromkeys(map(machine_of, sorted(runs, key=lambda r: (machine_of(r), r["date"])))))
    table = [["what", "goal", *columns]]
    for case, (factor, rival) in GOALS.items():
        layout, link, op, size = case
        found: dict[str, list[str]] = {column: [] for column in columns}
        for run in runs:
            for row in run["results"]:
                if (layout_of(run), link_of(run), row["op"], row["size"]) == case:
                    found[machine_of(run)] += goal_cell(run, row, factor, rival)
        what = ", ".join(filter(None, [ranks_of(layout), link, op, show_size(size) if size else ""]))
        table.append([what, f"{factor:g}x {rival}", *(", ".join(found[column]) or "-" for column in columns)])
    return table


def goal_cell(run: Run, row: Run, factor: float, rival: str) -> list[str]:
    ratio = report.speedups(row)[OURS][0] if rival == "gloo" else against_unfused(row)
    if ratio is None:
        return []
    series = ["series"] if run.get("clock") == "series" else []
    text = noted(ratio, row, control=rival == "gloo", others=series)
    return [text if ratio >= factor else f"**{text} missed**"]


def collectives(runs: list[Run]) -> Table:
    """Median and ratio of every operation, by size."""
    sizes = [8, 4 * KiB, 64 * KiB, MiB, 16 * MiB, 64 * MiB]
    table = [["ranks", "operation", *map(show_size, sizes)]]
    for run in runs:
        for op in report.ops_of(run["results"]):
            if op == "all_reduce_x10":
                continue
            cells = {}
            for row in (r for r in run["results"] if r["op"] == op):
                # A barrier has no bytes, and the smallest all_gather of four ranks has 16 bytes; both are in the column
                # of 8 bytes.
                column = row["size"] if row["size"] > 16 else 8
                cells[column] = f"{median(row, OURS)}, {noted(report.speedups(row)[OURS][0], row, control=True)}"
            table.append([str(run["ranks"]), op, *(cells.get(size, "-") for size in sizes)])
    return table


def close(runs: list[Run]) -> Table:
    """all_reduce and barrier with their lower bounds and their noise."""
    head = ["ranks", "machine", "operation", "size", "sagellm median (p10, p99)", "no-op median", "gloo p10"]
    table = [[*head, "gloo p10 / median", "gloo p10 / p10", "A/A"]]
    for run in runs:
        for row in (r for r in run["results"] if r["op"] in {"all_reduce", "barrier"}):
            times, ratios = row["times"], report.speedups(row)[OURS]
            table.append(
                [
                    str(run["ranks"]), machine_of(run), row["op"], size_of(row), report.cell(times[OURS]),
                    median(row, report.FLOOR), format_time(times["gloo"]["p10"]), *map(format_ratio, ratios),
                    control(row),
                ]
            )  # fmt: skip
    return table


def fusion(runs: list[Run]) -> Table:
    """Many small operations, fused and not fused."""
    head = ["ranks", "machine", "operation", "sagellm median (p10, p99)", "not fused, median", "no-op median"]
    table = [[*head, "gloo p10", "not fused / fused", "gloo p10 / median"]]
    for run in runs:
        where = ", ".join(filter(None, [ranks_of(layout_of(run)), link_of(run)]))
        for row in run["results"]:
            gain = against_unfused(row)
            table.append(
                [
                    where, machine_of(run), row["op"], report.cell(row["times"][OURS]), median(row, UNFUSED),
                    median(row, report.FLOOR), format_time(row["times"]["gloo"]["p10"]),
                    "-" if gain is None else format_ratio(gain), format_ratio(report.speedups(row)[OURS][0]),
                ]
            )  # fmt: skip
    return table


def hosts(runs: list[Run]) -> Table:
    """all_reduce between hosts."""
    head = ["layout, link", "machine", "clock", "operation", "size", "sagellm median (p10, p99)", "gloo p10"]
    table = [[*head, "gloo p10 / median", "A/A", "other processes"]]
    for run in runs:
        for row in run["results"]:
            table.append(
                [
                    f"{ranks_of(layout_of(run))}, {link_of(run)}", machine_of(run), run.get("clock", "call"), row["op"],
                    size_of(row), report.cell(row["times"][OURS]), format_time(row["times"]["gloo"]["p10"]),
                    format_ratio(report.speedups(row)[OURS][0]), control(row), f"{100 * run['others']:.0f} %",
                ]
            )  # fmt: skip
    return table


def every_host(runs: list[Run]) -> Table:
    """gloo's times divided by ours, p10 (median), in every cell of a run of hosts.py; bold if below 1 by p10."""
    (whole,) = runs
    sizes = [("8 B", 8, 16), ("64 KiB", 64 * KiB, 64 * KiB), ("1 MiB", MiB, MiB), ("16 MiB", 16 * MiB, 16 * MiB)]
    table = [["hosts x ranks, link", "operation", *(name for name, _, _ in sizes)]]
    for run in whole["runs"]:
        place = f"{run['layout'].replace('x', ' x ')}, {'no limit' if run['link'] == 'none' else run['link']}"
        for op in dict.fromkeys(row["op"] for row in run["results"]):
            rows = {row["size"]: row["times"] for row in run["results"] if row["op"] == op}
            cells = []
            for _, least, most in sizes:
                times = next((rows[size] for size in rows if least <= size <= most), None)
                p10, median = (times["gloo"][key] / times[OURS][key] for key in ("p10", "median")) if times else (0, 0)
                text = f"{p10:.2f} ({median:.2f})" if times else "-"
                cells.append(f"**{text}**" if times and p10 < 1 else text)
            table.append([place, op, *cells])
    return table


def leaders(runs: list[Run]) -> Table:
    """Large operations between hosts: in two groups in which all ranks take part, and in one with a leader per host."""
    head = ["operation", "link", "all ranks", "all ranks, second group", "one leader a host", "gloo p10"]
    table = [[*head, "one leader / all ranks", "second group / first"]]
    for run in runs:
        for row in run["results"]:
            first, second, one = (row["times"][label]["median"] for label in (OURS, f"{OURS} #2", ONE_LEADER))
            table.append(
                [
                    f"{row['op']}, {size_of(row)}", link_of(run), *map(format_time, (first, second, one)),
                    format_time(row["times"]["gloo"]["p10"]), f"{one / first:.2f}, {one / second:.2f}",
                    f"{second / first:.2f}",
                ]
            )  # fmt: skip
    return table


def busy_cores(runs: list[Run]) -> Table:
    """gloo's time divided by ours, beside computing processes: in the median start and in the worst one."""
    (run,) = runs
    levels = run["runs"]
    table = [["operation", "size", *(f"beside {beside}" if beside != "0" else "alone" for beside in levels)]]
    for index, row in enumerate(levels["0"][0]):
        cells = [busy.show(busy.of_cell(starts, index, OURS)) for starts in levels.values()]
        table.append([row["op"], size_of(row), *cells])
    return table


def host_times(runs: list[Run]) -> Table:
    """For calls on a GPU: the 10th percentile of our host time, and that of nccl divided by ours."""
    (run,) = runs
    sizes = [8, 4 * KiB, MiB, 64 * MiB]
    table = [["operation", *map(show_size, sizes)]]
    for op in report.ops_of(run["results"]):
        cells = {}
        for row in (r for r in run["results"] if r["op"] == op):
            ours, theirs = (row["times"][who]["p10"] for who in (OURS, "nccl"))
            lost = " **lost**" if theirs < ours else ""
            cells[row["size"] or 8] = f"{format_time(ours)}, {theirs / ours:.2f}x{lost}"
        table.append([op, *(cells.get(size, "-") for size in sizes)])
    return table


def many_host_times(runs: list[Run]) -> Table:
    """The host time of many small all_reduces together: for each form (see gpu.py) its 10th percentile."""
    (run,) = runs
    labels = list(run["many"][0]["times"])
    rows = [
        [row["op"].rpartition("_x")[2], *(format_time(row["times"][each]["p10"]) for each in labels)]
        for row in run["many"]
    ]
    return [["calls", *labels], *rows]


def several_threads(runs: list[Run]) -> Table:
    """The 10th percentiles of float32 all_reduces in each way and layout, and their share of the speed of a plain
    copy."""
    (run,) = runs
    sizes = [8, 64 * KiB, 1 * MiB, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB]
    table = [["ranks x threads", "way", *map(show_size, sizes)]]
    for layout in run["runs"]:
        times = {row["size"]: row["times"] for row in layout["results"] if row["dtype"] == "float32"}
        for way in times[8]:
            cells = []
            for size in sizes:
                ours, limit = (times[size][each]["p10"] for each in (way, wide.LIMIT))
                share = "" if way == wide.LIMIT or size < MiB else f", {100 * limit / ours:.0f} %"
                cells.append(f"{format_time(ours)}{share}")
            name = "plain copy" if way == wide.LIMIT else way
            table.append([f"{layout['ranks']} x {layout['threads']}", name, *cells])
    return table


TABLES: dict[str, tuple[Callable[[list[Run]], Table], list[str] | None]] = {
    "goals": (goals, None),
    "close": (close, CLOSE),
    "collectives": (collectives, COLLECTIVES),
    "wide": (collectives, WIDE),
    "threads": (several_threads, [THREADS]),
    "card": (host_times, CARD),
    "card many": (many_host_times, CARD),
    "fusion": (fusion, FUSION),
    "hosts": (hosts, HOSTS),
    "every host": (every_host, [EVERY_HOST]),
    "leaders": (leaders, LEADERS),
    "busy": (busy_cores, [BUSY]),
}


def markdown(table: Iterable[list[str]]) -> str:
    head, *rows = table
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def filled(page: str) -> str:
    """The page with each of its tables replaced."""
    every = [str(path.relative_to(RUNS).with_suffix("")) for path in sorted(RUNS.glob("*/*.json"))]
    every = [run for run in every if run not in (BUSY, THREADS, ONE_THREAD, MESSAGES, EVERY_HOST)]
    for name, (write, names) in TABLES.items():
        begin, end = f"<!-- table: {name} -->", "<!-- end -->"
        text = markdown(write([load(run) for run in names or every]))
        page, found = re.subn(f"{begin}.*?{end}", lambda _, t=f"{begin}\n{text}\n{end}": t, page, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"{PAGE}: expected one table {begin} ... {end}, found {found}")
    return page


def latency() -> str:
    """The picture of time by size on two machines: one whose run has all sizes, and a slower one."""
    runs = [load(COLLECTIVES[0]), load(CLOSE[0])]
    return pictures.latency([(run, f"all_reduce, 2 ranks, {machine_of(run)}") for run in runs])


def bandwidth() -> str:
    """The picture of bandwidth by size: 2 ranks with one thread each, and 2 ranks with eight threads each."""
    found = []
    for name in (ONE_THREAD, THREADS):
        whole = load(name)
        run = whole["runs"][0]
        found.append((run, f"{run['ranks']} ranks, {machine_of(whole)}"))
    return pictures.bandwidth(found)


#: The pictures of the documents, by file.
PICTURES = {DOCS / "latency.svg": latency, DOCS / "bandwidth.svg": bandwidth}


def main() -> int:
    PAGE.write_text(filled(PAGE.read_text()))
    for path, draw in PICTURES.items():
        path.write_text(draw())
    print("written:", *[PAGE, *PICTURES], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
