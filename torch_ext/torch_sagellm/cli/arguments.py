"""The kinds of argument that several commands take: each is checked in one place, and refused with one text.

A name of an operation is taken however people write it: ``all_reduce``, ``allreduce``, ``AllReduce``, ``all-reduce``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable

from torch_sagellm import _nearest, _units
from torch_sagellm.observe.explain import operation_name

#: The engine's groups; larger ones are served by torch's gloo.
MOST_RANKS = 256
#: Sizes are below, as the core counts them.
MOST_BYTES = 1 << 62
#: From this many ranks for each core on, a command asks before it starts them.
RANKS_A_CORE = 4


def whole(least: int, most: int, what: str = "number") -> Callable[[str], int]:
    """Whole numbers from ``least`` to ``most``."""

    def read(text: str) -> int:
        number = text.strip()
        if not number.isdecimal() or not number.isascii() or len(number) > 19 or not least <= int(number) <= most:
            bound = f"from {least} on" if most >= MOST_BYTES else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is no {what} {bound}")
        return int(number)

    return read


def ranks(least: int = 1, most: int = MOST_RANKS) -> Callable[[str], int]:
    """A number of ranks."""
    return whole(least, most, "number of ranks")


def seconds(text: str) -> float:
    """A time over 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds over 0")
    return found


def seconds_from_zero(text: str) -> float:
    """A time, or 0."""
    return 0.0 if text.strip() == "0" else seconds(text)


def size(text: str) -> int:
    """Bytes of ``4KiB``; the error is the one that argparse expects."""
    try:
        found = _units.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found >= MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is more than any memory holds")
    return found


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """One of these operations, or another word among them such as "all", in any of their spellings."""
    names = list(known)

    def read(text: str) -> str:
        found = text if text in names else operation_name(text, names)
        if found is None:
            near = _nearest.meant(text, names)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}{near}")
        return found

    return read


def agree(count: int, yes: bool) -> None:
    """Before ``count`` ranks are started: asks where they are many for this machine, and refuses without a terminal."""
    cores = len(os.sched_getaffinity(0))
    if yes or count <= RANKS_A_CORE * cores:
        return
    what = f"{count} ranks are {count} processes, and this machine gives them {cores} cores"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ValueError(f"{what}; --yes starts them")
    print(f"{what}. Start them? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ValueError("nothing was started")


def add_yes(parser: argparse.ArgumentParser) -> None:
    """The option that answers ``agree``."""
    parser.add_argument(
        "--yes", action="store_true", help=f"start more than {RANKS_A_CORE} ranks a core without asking"
    )
