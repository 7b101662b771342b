"""Converts results to a markdown table, a plot and JSON. It works on the plain data that the JSON contains."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch_sagellm._private.units import show_size

from .stats import busbw, format_bandwidth, format_ratio, format_time

Result = dict[str, Any]
REFERENCE = "gloo"
FLOOR = "no-op"


def ops_of(results: Iterable[Result]) -> list[str]:
    """The operations in the order in which they were measured."""
    return list(dict.fromkeys(r["op"] for r in results))


def speedups(result: Result, reference: str = REFERENCE) -> dict[str, tuple[float, float]]:
    """For each backend: the reference's p10 divided by the backend's median, and divided by the backend's p10.

    The first comparison favours the reference.
    """
    times = {label: t for label, t in result["times"].items() if "p10" in t}
    if reference not in times:
        return {}
    base = times[reference]["p10"]
    return {label: (base / t["median"], base / t["p10"]) for label, t in times.items() if label != reference}


def cell(timed: Result) -> str:
    """The median and, in brackets, the 10th and 99th percentile."""
    if "error" in timed:
        return timed["error"].partition("\n")[0][:60].replace("|", "/")
    return f"{format_time(timed['median'])} ({format_time(timed['p10'])}, {format_time(timed['p99'])})"


def is_control(label: str, reference: str = REFERENCE) -> bool:
    """Whether the label is the second group of the reference."""
    return label.startswith(f"{reference} #")


def reference_of(run: Result) -> str:
    """The backend with which a run compares: gloo, except for runs on devices."""
    return str(run.get("reference", REFERENCE))


def markdown(run: Result) -> str:
    """All tables of a run."""
    machine, reference = run["machine"], reference_of(run)
    caches = ", ".join(f"{level} {size}" for level, size in machine["caches"].items())
    lines = [
        f"# Collectives: {run['ranks']} ranks{_where(run)}, {run['dtype']}, {run['date']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores{' (virtual)' if machine['virtual'] else ''}, {caches}, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']}, "
        f"torch {machine['torch']}, sagellm {machine['sagellm']}; "
        f"load average before the run {machine['load_before'][0]:.2f}; during it other processes kept "
        f"{100 * run['others']:.0f} % of the cores busy. "
        f"Up to {run['rounds']} rounds, buffers: {run['buffers']}. Command: `{run['command']}`.",
        "",
        f"{_what(run)}Times: median (p10, p99) of the slowest rank. "
        + ("" if run.get("clock") == "issue" else "busbw: GB/s from the median, by the definition of nccl-tests. ")
        + f"{reference} p10 / x: the {reference} time at its 10th percentile over the median of x, and over its p10; "
        "below 1 is marked as lost. A/A: the p10 of two equal groups, which would be 1 without noise.",
    ]
    for op in ops_of(run["results"]):
        rows = [r for r in run["results"] if r["op"] == op]
        head = _head(rows[0], run)
        lines += ["", f"## {op}", "", "| " + " | ".join(head) + " |", "|" + " ---: |" * len(head)]
        lines += ["| " + " | ".join(_row(row, run)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _what(run: Result) -> str:
    """The device and the measured interval, unless they are the CPU and a single call."""
    clocks = {
        "call": "A time is that of the host, from the call to its return. ",
        "issue": "A time is that of the host, from the call to its return, beside a device that has little to do. ",
        "device": "A time is that of a series of calls until the device was done, over their number. ",
        "series": "A time is that of a series of calls one after the other, over their number. ",
    }
    if run.get("clock") == "series":
        return clocks["series"]
    return f"On {run['device']}. {clocks[run['clock']]}" if run.get("device") else ""


def _where(run: Result) -> str:
    """Each rank's host and the link between them, if hosts were simulated."""
    if not run.get("hosts"):
        return ""
    link = run["rate"] or (f"{run['delay_ms']:g} ms one way" if run["delay_ms"] else "no shaping")
    return f" on hosts {run['hosts']} ({link})"


def _has_bandwidth(row: Result, run: Result, label: str) -> bool:
    """Whether to show a bandwidth. False if no data was moved, or if the host did not wait for the data."""
    return bool(row["size"]) and label != FLOOR and run.get("clock") != "issue"


def _head(row: Result, run: Result) -> list[str]:
    labels, reference = run["labels"], reference_of(run)
    head = ["size"]
    for label in labels:
        head += [label, "busbw"] if _has_bandwidth(row, run, label) else [label]
    if reference in labels:
        for label in labels:
            if is_control(label, reference):
                head.append("A/A")
            elif label not in {reference, FLOOR}:
                head.append(f"{reference} p10 / {label}")
    return head


def _row(row: Result, run: Result) -> list[str]:
    labels, ranks, reference = run["labels"], run["ranks"], reference_of(run)
    cells = [show_size(row["size"]) if row["size"] else "-"]
    for label in labels:
        timed = row["times"][label]
        cells.append(cell(timed))
        if _has_bandwidth(row, run, label):
            bus = busbw(row["op"], row["size"], timed["median"], ranks) if "median" in timed else None
            cells.append("-" if bus is None else format_bandwidth(bus))
    ratios = speedups(row, reference)
    if reference in labels:
        for label in (label for label in labels if label not in {reference, FLOOR}):
            if label not in ratios:
                cells.append("-")
            elif is_control(label, reference):
                cells.append(f"{ratios[label][1]:.2f}")
            else:
                cells.append(", ".join(map(format_ratio, ratios[label])))
    return cells


def plot(run: Result, path: Path) -> str | None:
    """Draws latency by size, and the ratio to the reference. Returns the reason if nothing was drawn."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot: matplotlib is missing (pip install matplotlib)"
    by_op = {op: [r for r in run["results"] if r["op"] == op] for op in ops_of(run["results"])}
    by_op = {op: rows for op, rows in by_op.items() if len(rows) > 1}
    if not by_op:
        return "no plot: no operation was measured at two sizes or more"
    columns = min(3, len(by_op))
    bands = -(-len(by_op) // columns)
    figure, axes = pyplot.subplots(
        2 * bands, columns, figsize=(5.2 * columns, 5.4 * bands), squeeze=False, sharex="col",
        gridspec_kw={"height_ratios": [3, 1.4] * bands}, layout="constrained",
    )  # fmt: skip
    for i, (op, rows) in enumerate(by_op.items()):
        upper, lower = axes[2 * (i // columns)][i % columns], axes[2 * (i // columns) + 1][i % columns]
        _plot_op(upper, lower, op, rows, run["labels"], reference_of(run))
    for i in range(len(by_op), bands * columns):
        axes[2 * (i // columns)][i % columns].axis("off")
        axes[2 * (i // columns) + 1][i % columns].axis("off")
    machine = run["machine"]
    figure.suptitle(
        f"{run['ranks']} ranks on {machine['cores']} cores ({machine['cpu']}), {run['dtype']}, {run['date']}"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return None


def _plot_op(upper: Any, lower: Any, op: str, rows: list[Result], labels: list[str], reference: str) -> None:
    for number, label in enumerate(labels):
        good = [r for r in rows if "median" in r["times"][label]]
        sizes = [r["size"] for r in good]
        times = [r["times"][label] for r in good]
        colour = f"C{number}"
        upper.plot(sizes, [t["median"] for t in times], "o-", color=colour, label=label, markersize=3)
        upper.fill_between(sizes, [t["p10"] for t in times], [t["p99"] for t in times], color=colour, alpha=0.15)
        if label in {reference, FLOOR}:
            continue
        # A control is compared p10 with p10, so that its line shows the noise.
        found = [(r["size"], speedups(r, reference)) for r in good]
        ratios = [(size, each[label][is_control(label, reference)]) for size, each in found if label in each]
        if ratios:
            lower.plot(*zip(*ratios, strict=True), "o-", color=colour, markersize=3)
    upper.set(title=op, xscale="log", yscale="log", ylabel="us: median, p10 to p99")
    upper.legend(fontsize=8)
    lower.axhline(1, color="grey", linewidth=0.8)
    lower.set(xscale="log", yscale="log", xlabel="bytes", ylabel=f"{reference} p10 / median")
    for axis in (upper, lower):
        axis.grid(True, which="major", alpha=0.3)


def write(run: Result, folder: Path, name: str) -> list[str]:
    """Writes JSON and PNG under one name; returns the lines to print for the user."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(run, indent=1) + "\n")
    why_not = plot(run, folder / f"{name}.png")
    return [f"written: {folder}/{name}.json", why_not or f"written: {folder}/{name}.png"]
