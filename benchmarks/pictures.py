"""Draws the pictures of the documents from runs: the time of an all_reduce by its size, and its bandwidth.

`update_docs.py` calls it. The pictures adapt their colours to the reader's light or dark page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Run = dict[str, Any]
STYLE = """
text { font: 12px sans-serif; fill: #333 }
.page { fill: #fff }
.grid { stroke: #e3e3e3 }
.line { fill: none; stroke-width: 2.2 }
.gloo { stroke: #d9822b }
.ours { stroke: #2f6db3 }
.second { stroke: #58a868 }
.limit { stroke: #888; stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
text { fill: #ddd }
.page { fill: #1e2129 }
.grid { stroke: #3a3f4b }
.gloo { stroke: #f0a35e }
.ours { stroke: #7db4f0 }
.second { stroke: #86d096 }
.limit { stroke: #999 }
}"""
#: Ticks of the axes: value and text.
SIZES = {8: "8 B", 4 << 10: "4 KiB", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 64 << 20: "64 MiB"}
TIMES = {1: "1 us", 10: "10 us", 100: "100 us", 1_000: "1 ms", 10_000: "10 ms", 100_000: "100 ms"}
LARGE = {64 << 10: "64 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB", 256 << 20: "256 MiB"}
RATES = {0.1: "0.1 GB/s", 1: "1 GB/s", 10: "10 GB/s", 100: "100 GB/s"}
WIDTH, HEIGHT, LEFT, TOP, GAP = 280, 230, 66, 58, 76


@dataclass(frozen=True)
class Curve:
    """One curve: its class in STYLE, its words in the legend, and its points (size, value)."""

    style: str
    words: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    title: str
    curves: list[Curve]


def latency(runs: list[tuple[Run, str]]) -> str:
    """Times of an all_reduce: gloo's 10th percentile, our median, and the median of a backend that moves no data. Each
    run has its title."""
    lines = (
        ("gloo", "p10", "gloo", "gloo, 10th percentile"),
        ("sagellm", "median", "ours", "sagellm, median"),
        ("no-op", "median", "limit", "the limit: torch alone, moving no data"),
    )

    def panel(run: Run, title: str) -> Panel:
        rows = [row for row in run["results"] if row["op"] == "all_reduce"]
        curves = [
            Curve(style, words, [(row["size"], row["times"][label][quantile]) for row in rows])
            for label, quantile, style, words in lines
        ]
        return Panel(title, curves)

    return picture([panel(run, title) for run, title in runs], SIZES, TIMES)


def bandwidth(runs: list[tuple[Run, str]]) -> str:
    """Bytes of the tensor per second in an all_reduce of float32, by 10th percentiles. A run is one layout of
    `wide.py`."""

    def panel(run: Run, title: str) -> Panel:
        threads = f"{run['threads']} thread{'s' if run['threads'] > 1 else ''}"
        lines = (
            ("limit", "limit", "a plain copy"),
            (f"reachable, {threads}", "ours", "sagellm, reachable tensors"),
            (f"ordinary, {threads}", "second", "ordinary tensors"),
            ("gloo", "gloo", "gloo"),
        )
        rows = [row for row in run["results"] if row["dtype"] == "float32" and row["size"] >= min(LARGE)]
        curves = [
            Curve(style, words, [(row["size"], row["size"] / row["times"][label]["p10"] / 1e3) for row in rows])
            for label, style, words in lines
        ]
        return Panel(title, curves)

    return picture([panel(run, title) for run, title in runs], LARGE, RATES)


def picture(panels: list[Panel], sizes: dict[int, str], values: dict[Any, str]) -> str:
    """An SVG with the panels side by side; all axes are logarithmic and have the given ticks."""
    width, height = LEFT + len(panels) * (WIDTH + GAP), TOP + HEIGHT + 34
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>']
    parts.append(f'<rect class="page" width="{width}" height="{height}"/>')
    at = LEFT
    for curve in panels[0].curves:
        parts.append(f'<line class="line {curve.style}" x1="{at}" x2="{at + 26}" y1="18" y2="18"/>')
        parts.append(f'<text x="{at + 32}" y="22">{curve.words}</text>')
        at += 48 + 7 * len(curve.words)
    for number, panel in enumerate(panels):
        parts += drawn(panel, LEFT + number * (WIDTH + GAP), sizes, values)
    return "\n".join([*parts, "</svg>"]) + "\n"


def drawn(panel: Panel, left: float, sizes: dict[int, str], values: dict[Any, str]) -> list[str]:
    def along(value: float, ticks: dict[Any, str]) -> float:
        """Position between the first tick (0) and the last (1)."""
        return math.log(value / min(ticks)) / math.log(max(ticks) / min(ticks))

    def x(size: float) -> float:
        return left + WIDTH * along(size, sizes)

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - along(value, values))

    parts = [f'<text x="{left}" y="{TOP - 12}">{panel.title}</text>']
    for at, label in values.items():
        parts.append(f'<line class="grid" x1="{left}" x2="{left + WIDTH}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{label}</text>')
    for size, label in sizes.items():
        parts.append(f'<text x="{x(size):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{label}</text>')
    for curve in panel.curves:
        points = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in curve.points)
        parts.append(f'<polyline class="line {curve.style}" points="{points}"/>')
    return parts
