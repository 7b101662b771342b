#!/usr/bin/env python3
"""Writes the measured part of docs/benchmarks.md from JSON files of collectives.py, so that no figure is typed by hand.

python benchmarks/update_docs.py benchmarks/runs/<date>-<machine>/*.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from measure import report
from measure.stats import format_ratio, format_size, format_time

PAGE = Path(__file__).resolve().parent.parent / "docs/benchmarks.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
OURS = "sagellm"
# (ranks, operation, bytes) -> how many times faster than gloo's p10 the backend is meant to be at least.
GOALS = {
    (2, "all_reduce", 8): 30,
    (2, "all_reduce", 4 << 10): 30,
    (2, "all_reduce", 64 << 10): 15,
    (2, "all_reduce", 1 << 20): 5,
    (2, "all_reduce", 64 << 20): 6,
    (2, "barrier", 0): 20,
    (4, "all_reduce", 8): 20,
}

# (each rank's host or number of ranks, link, operation, bytes) -> at least so many times faster than gloo's p10 (True),
# or than the same backend without fusion (False), by the median.
WIDE_GOALS = {
    ("0,1,2,3", "1 ms", "all_reduce", 8): (True, 2.5),
    ("0,1,2,3", "1 ms", "all_reduce", 4 << 10): (True, 2.5),
    ("0,0,0,0,1,1,1,1", "1 ms", "all_reduce", 8): (True, 3),
    ("0,0,0,0,1,1,1,1", "1 ms", "all_reduce", 4 << 10): (True, 3),
    ("0,0,1,1", "1gbit", "all_reduce", 16 << 20): (True, 1.35),
    ("0,1,0,1", "1gbit", "all_reduce", 16 << 20): (True, 2.5),
    ("2 ranks", "-", "all_reduce_x10", 2048): (True, 60),
    ("4 ranks", "-", "all_reduce_x10", 2048): (True, 60),
    ("4 ranks", "-", "all_reduce_x1000", 2048): (False, 2),
    ("0,1", "1 ms", "all_reduce_x1000", 2048): (False, 5),
}
UNFUSED = f"{OURS}:unfused"


def link_of(run: dict[str, Any]) -> str:
    delay = run.get("delay_ms") or 0
    return run.get("rate") or (f"{delay:g} ms" if delay else "-")


def wide_rows(runs: list[dict[str, Any]]) -> list[str]:
    """Runs over several hosts and those that switch fusion off, one line for each operation and size.

    Every run of a case has its line. A goal that was not measured is not left out."""
    head = [
        "| ranks (each one's host) | run of | link | clock | op | size | gloo p10 | no-op, median | not fused, median "
        "| sagellm median (p10, p99) | gloo p10 / no-op | gloo p10 / median | not fused / median | goal | |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    lines: list[str] = []
    seen: set[tuple[str, str, str, int]] = set()
    for run in runs:
        place = run.get("hosts") or f"{run['ranks']} ranks"
        for row in run["results"]:
            times, ratios = row["times"], report.speedups(row)
            if OURS not in ratios or not (run.get("hosts") or UNFUSED in times):
                continue
            own = times[OURS]["median"]
            unfused = times[UNFUSED]["median"] if "median" in times.get(UNFUSED, {}) else None
            found = {True: ratios[OURS][0], False: unfused / own if unfused else 0.0}
            case = (place, link_of(run), row["op"], row["size"])
            goal = WIDE_GOALS.get(case)
            verdict = "" if goal is None else "reached" if found[goal[0]] >= goal[1] else "**missed**"
            gloo, floor = times["gloo"]["p10"], times.get(report.FLOOR, {}).get("median")
            seen.add(case)
            lines.append(
                f"| {place} | {run['machine']['cpu']}, {run['date']} | {link_of(run)} | {run.get('clock', 'call')} "
                f"| {row['op']} | {format_size(row['size'])} "
                f"| {format_time(gloo)} | {format_time(floor) if floor else '-'} "
                f"| {format_time(unfused) if unfused else '-'} | {report.cell(times[OURS])} "
                f"| {format_ratio(gloo / floor) if floor else '-'} | {format_ratio(found[True])} "
                f"| {format_ratio(found[False]) if unfused else '-'} | {wide_goal(goal)} | {verdict} |"
            )
    missing = [
        f"| {place} | - | {link} | - | {op} | {format_size(size)} | not measured | | | | | | | {wide_goal(goal)} | |"
        for (place, link, op, size), goal in WIDE_GOALS.items()
        if (place, link, op, size) not in seen
    ]
    return head + lines + missing


def wide_goal(goal: tuple[bool, float] | None) -> str:
    return "" if goal is None else f"{goal[1]}x {'gloo' if goal[0] else 'not fused'}"


def goal_rows(runs: list[dict[str, Any]]) -> list[str]:
    """Every run of a case that has a goal: none stands for another. A goal that was not measured is not left out."""
    lines = [
        "| ranks | op | size | goal | run | gloo p10 | no-op, median | sagellm median (p10, p99) | over our median "
        "| over our p10 | A/A | |",
        "| ---: | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for (ranks, op, size), goal in GOALS.items():
        head = f"| {ranks} | {op} | {format_size(size) if size else '-'} | {goal}x "
        found = [
            (run, row)
            for run in runs
            if run["ranks"] == ranks and run["dtype"] == "float32" and not run.get("hosts")
            for row in run["results"]
            if (row["op"], row["size"]) == (op, size) and OURS in report.speedups(row)
        ]
        lines += [head + goal_cells(run, row, goal) for run, row in found]
        if not found:
            lines.append(head + "| - | not measured | | | | | | |")
    return lines


def goal_cells(run: dict[str, Any], row: dict[str, Any], goal: float) -> str:
    ratios, times = report.speedups(row), row["times"]
    by_median, by_p10 = ratios[OURS]
    verdict = "reached" if by_median >= goal else "reached by p10 only" if by_p10 >= goal else "**missed**"
    control = next((f"{ratio[1]:.2f}" for label, ratio in ratios.items() if report.is_control(label)), "-")
    floor = times.get(report.FLOOR, {}).get("median")
    return (
        f"| {run['machine']['cpu']}, {run['date']} | {format_time(times['gloo']['p10'])} "
        f"| {format_time(floor) if floor else '-'} | {report.cell(times[OURS])} "
        f"| {format_ratio(by_median)} | {format_ratio(by_p10)} | {control} | {verdict} |"
    )


def measured(runs: list[dict[str, Any]], links: list[str]) -> str:
    """The generated part of the page."""
    lines = ["## Against the goals", "", *goal_rows(runs), ""]
    lines += ["## Several hosts, and fusion", "", *wide_rows(runs), ""]
    for run, link in zip(runs, links, strict=True):
        # One heading level below this page's own; the run's title becomes a section.
        lines += [
            re.sub(r"^#", "##", report.markdown(run), flags=re.MULTILINE),
            f"Raw: [{Path(link).name}]({link})",
            "",
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("json", nargs="+", type=Path, help="result files, in the order of the page")
    args = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in args.json]
    links = [f"../{path.resolve().relative_to(PAGE.parent.parent)}" for path in args.json]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    if END not in rest:
        print(f"{PAGE} holds no lines {BEGIN} and {END}: nowhere to write", file=sys.stderr)
        return 1
    PAGE.write_text(f"{before}{BEGIN}\n\n{measured(runs, links)}\n{END}{rest.partition(END)[2]}")
    print(f"written: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
