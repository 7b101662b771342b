"""Shared output functions of the commands: colours, tables, a progress bar.

Colours and redrawn lines are used only on a terminal; ``NO_COLOR`` disables colours there too (https://no-color.org).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "faint": "2"}
#: Move to the upper left corner, and clear below the cursor: the old table is overwritten without flicker.
HOME, CLEAR_BELOW = "\x1b[H", "\x1b[J"


def is_terminal(stream: TextIO) -> bool:
    """Whether the output is a terminal that can be redrawn."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """The text in a colour of ``COLOURS`` on a terminal; the unchanged text elsewhere."""
    if not colour or os.environ.get("NO_COLOR") or not is_terminal(stream or sys.stdout):
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def clip(line: str, width: int) -> str:
    """The first ``width`` visible characters of a line. Colour codes do not count, and all of them are kept."""
    shown = []
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        if not part.startswith("\x1b"):
            part = part[:width]
            width -= len(part)
        shown.append(part)
    return "".join(shown)


def columns(stream: TextIO) -> int:
    """The width of the terminal that the stream writes to; ``COLUMNS`` has priority."""
    with contextlib.suppress(OSError, ValueError):
        return int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(stream.fileno()).columns or 80
    return shutil.get_terminal_size().columns


def fit(text: str, hanging: int, stream: TextIO | None = None) -> str:
    """On a terminal wraps a text to its width, with ``hanging`` columns of indentation.

    Elsewhere returns it unchanged.
    """
    stream = stream or sys.stdout
    if not is_terminal(stream):
        return text
    width = max(40, columns(stream))
    indent = " " * min(hanging, width // 2)
    wrapper = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    lines = (line if len(line) <= width else wrapper.fill(line) for line in text.splitlines())
    return "\n".join(lines)


def complain(text: str) -> None:
    """Prints an error or a warning on stderr: in one line, which a terminal's width breaks."""
    print(fit(text, 2, sys.stderr), file=sys.stderr, flush=True)


def fact(name: str, value: object) -> None:
    """Prints one line of a list of facts."""
    print(fit(f"{name:<28} {value}", 29), flush=True)


def counted(count: int, noun: str) -> str:
    """The count with its noun, such as "1 rank" or "2 ranks"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> list[str]:
    """Lines with aligned columns: the columns named in ``left`` are aligned left, the others right."""
    widths = [max(len(line[at]) for line in (head, *rows)) for at in range(len(head))]
    return [
        "  ".join(
            f"{cell:<{width}}" if name in left else f"{cell:>{width}}"
            for name, cell, width in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in (head, *rows)
    ]


class Bar:
    """A progress bar on stderr if that is a terminal; otherwise prints nothing."""

    WIDTH = 30

    def __init__(self, total: int, visible: bool) -> None:
        self.total, self.visible = total, visible and is_terminal(sys.stderr)

    def show(self, done: int, what: str) -> None:
        """Redraws the bar with the number of finished items and the name of the next one."""
        if self.visible:
            full = self.WIDTH * done // max(1, self.total)
            text = f"[{'#' * full}{'.' * (self.WIDTH - full)}] {done}/{self.total} {what}"
            print(f"\r{text:<79}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clears the line."""
        if self.visible:
            print(f"\r{'':<79}\r", end="", file=sys.stderr, flush=True)
