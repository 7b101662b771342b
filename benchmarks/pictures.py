"""Draws docs/latency.svg from runs: the time of an all_reduce by its size, for this backend, for gloo, and for torch
alone.

`update_docs.py` calls it. The picture adapts its colours to the reader's light or dark page.
"""

from __future__ import annotations

import math
from typing import Any

Run = dict[str, Any]
#: The curves and their quantiles: gloo's 10th percentile and our median, as in the tables.
LINES = (
    ("gloo", "p10", "gloo, 10th percentile"),
    ("sagellm", "median", "sagellm, median"),
    ("no-op", "median", "the limit: torch alone, moving no data"),
)
STYLE = """
text { font: 12px sans-serif; fill: #333 }
.page { fill: #fff }
.grid { stroke: #e3e3e3 }
.line { fill: none; stroke-width: 2.2 }
.gloo { stroke: #d9822b }
.sagellm { stroke: #2f6db3 }
.no-op { stroke: #888; stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
text { fill: #ddd }
.page { fill: #1e2129 }
.grid { stroke: #3a3f4b }
.gloo { stroke: #f0a35e }
.sagellm { stroke: #7db4f0 }
.no-op { stroke: #999 }
}"""
SIZES = {8: "8 B", 512: "512 B", 4 << 10: "4 KiB", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 64 << 20: "64 MiB"}
TIMES = {1: "1 us", 10: "10 us", 100: "100 us", 1_000: "1 ms", 10_000: "10 ms", 100_000: "100 ms"}
WIDTH, HEIGHT, LEFT, TOP, GAP = 280, 230, 56, 58, 70


def panel(run: Run, left: float, title: str) -> list[str]:
    """Draws one machine; both axes are logarithmic."""
    rows = [row for row in run["results"] if row["op"] == "all_reduce"]

    def x(size: float) -> float:
        return left + WIDTH * math.log(size / 8) / math.log((64 << 20) / 8)

    def y(microseconds: float) -> float:
        return TOP + HEIGHT * (1 - math.log10(microseconds) / 5)

    parts = [f'<text x="{left}" y="{TOP - 12}">{title}</text>']
    for at, label in TIMES.items():
        parts.append(f'<line class="grid" x1="{left}" x2="{left + WIDTH}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{label}</text>')
    for size, label in SIZES.items():
        if size != 512:
            parts.append(f'<text x="{x(size):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{label}</text>')
    for label, quantile, _ in LINES:
        points = " ".join(f"{x(row['size']):.1f},{y(row['times'][label][quantile]):.1f}" for row in rows)
        parts.append(f'<polyline class="line {label}" points="{points}"/>')
    return parts


def picture(runs: list[tuple[Run, str]]) -> str:
    """An SVG with a titled panel for each run."""
    width, height = LEFT + len(runs) * (WIDTH + GAP), TOP + HEIGHT + 34
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>']
    parts.append(f'<rect class="page" width="{width}" height="{height}"/>')
    at = LEFT
    for label, _, words in LINES:
        parts.append(f'<line class="line {label}" x1="{at}" x2="{at + 26}" y1="18" y2="18"/>')
        parts.append(f'<text x="{at + 32}" y="22">{words}</text>')
        at += 60 + 7 * len(words)
    for number, (run, title) in enumerate(runs):
        parts += panel(run, LEFT + number * (WIDTH + GAP), title)
    return "\n".join([*parts, "</svg>"]) + "\n"
