"""Charts of bandwidth by size: a picture drawn by matplotlib, or bars of characters in the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_sagellm._private.units import show_size
from torch_sagellm.cli import arguments

HERE = "-"
#: By the name of a line: (size in bytes, GB/s).
Series = Mapping[str, Sequence[tuple[int, float]]]


def check(target: str) -> None:
    """Raises a ValueError, before anything is measured, if the chart could not be drawn."""
    if target == HERE:
        return
    check_picture(Path(target))


def check_picture(path: Path) -> None:
    """Raises a ValueError if a chart could not be drawn into this file."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            f"--plot {path} needs matplotlib, which is not installed (pip install matplotlib); "
            "--plot alone draws in the terminal without it"
        ) from None
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot {path}: expected a name that ends with .png, .svg or .pdf")
    arguments.check_output("--plot", path)


def plot(target: str, series: Series) -> None:
    """Draws the chart into the file ``target``, or on stdout for ``HERE``."""
    if target == HERE:
        print("\n".join(bars(series, shutil.get_terminal_size((100, 24)).columns)))
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in series.items():
        panel.plot([size for size, _ in points], [speed for _, speed in points], marker="o", label=name)
    panel.set(xlabel="bytes", ylabel="busbw (GB/s)", xscale="log", yscale="log")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    print(f"# chart in {target}")


def bars(series: Series, width: int) -> list[str]:
    """One bar for each size and name, as long as its bandwidth; the longest line is a little shorter than ``width``."""
    most = max((speed for points in series.values() for _, speed in points), default=0.0)
    lines = [f"busbw in GB/s, up to {most:.3g}"]
    names = max((len(name) for name in series), default=0)
    room = max(10, width - names - 24)
    for size in sorted({size for points in series.values() for size, _ in points}):
        label = show_size(size)
        for name, points in series.items():
            for speed in (speed for at, speed in points if at == size):
                length = round(room * speed / most) if most else 0
                lines.append(f"{label:>10} {name:<{names}} {'#' * length or '|'} {speed:.3g}")
                label = ""
    return lines
