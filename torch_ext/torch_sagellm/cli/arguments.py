"""Types of arguments that several commands share; each has one check and one error text.

The name of an operation is accepted in any spelling: ``all_reduce``, ``allreduce``, ``AllReduce``, ``all-reduce``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch_sagellm._private import nearest, units
from torch_sagellm.observe.explain import operation_name

#: The largest group of the engine; torch's gloo serves larger ones.
MOST_RANKS = 256
#: Sizes must be smaller than this, the core's limit.
MOST_BYTES = 1 << 62
#: The file name that means stdout.
HERE = Path("-")
#: A command asks before it starts more ranks per core than this.
RANKS_A_CORE = 4


def whole(least: int, most: int, what: str = "number") -> Callable[[str], int]:
    """Parses whole numbers from ``least`` to ``most``."""

    def read(text: str) -> int:
        number = text.strip()
        if not number.isdecimal() or not number.isascii() or len(number) > 19 or not least <= int(number) <= most:
            bound = f"from {least} on" if most >= MOST_BYTES else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is no {what} {bound}")
        return int(number)

    return read


def ranks(least: int = 1, most: int = MOST_RANKS) -> Callable[[str], int]:
    """Parses a number of ranks."""
    return whole(least, most, "number of ranks")


def seconds(text: str) -> float:
    """Parses a positive number of seconds."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds over 0 and below 1e9")
    return found


def seconds_from_zero(text: str) -> float:
    """Parses a number of seconds from 0 on."""
    return 0.0 if text.strip() == "0" else seconds(text)


def size(text: str) -> int:
    """Parses a size such as ``4KiB``; raises the error that argparse expects."""
    try:
        found = units.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found >= MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is more than any memory holds")
    return found


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """Parses one of ``known`` (operations, or other words such as "all"), in any of their spellings."""
    names = list(known)

    def read(text: str) -> str:
        found = text if text in names else operation_name(text, names)
        if found is None:
            near = nearest.meant(text, names)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}{near}")
        return found

    return read


def path(text: str) -> Path:
    """Parses the name of a file or folder.

    An empty name is refused: it comes from an unset variable and would mean `.`.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; expected that of a file or folder")
    return Path(text)


def check_output(named: str, target: Path) -> None:
    """Raises a ValueError, before anything is measured, if the file of the option ``named`` cannot be written."""
    # A link may lead to a file that does not exist yet. Try the file itself, so that its removal below keeps the link.
    file = Path(os.path.realpath(target))
    if file.is_dir():
        raise ValueError(f"{named} {target}: this is a folder; expected the name of a file")
    if not file.parent.is_dir():
        where = file.parent if target.is_symlink() else target.parent
        raise ValueError(f"{named} {target}: there is no folder {where}")
    there = file.exists()
    if there and not file.is_file():
        return  # opening a pipe would wait for its reader
    try:
        file.open("ab").close()
        if not there:
            file.unlink()
    except OSError as error:
        raise ValueError(f"{named} {target}: it cannot be written: {error.strerror}") from None


def option(name: str) -> str:
    """An option as it is typed, from its name among the parsed arguments."""
    return "--" + name.replace("_", "-")


def refuse(parsed: argparse.Namespace, beside: str, names: Iterable[str]) -> None:
    """Raises a ValueError if one of these options was given, because it has no effect together with ``beside``."""
    for name in names:
        if getattr(parsed, name) is not None and getattr(parsed, name) is not False:
            raise ValueError(f"{option(name)} has no effect with {beside}")


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds ``--json``: one JSON document on stdout; the text for people is then on stderr."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def add_json_file(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json [FILE]``, for commands whose figures are worth keeping in a file."""
    parser.add_argument(
        "--json",
        type=path,
        nargs="?",
        const=HERE,
        metavar="FILE",
        help="write all figures as JSON; without FILE here, and the text to stderr",
    )


@contextlib.contextmanager
def text_beside(is_json: bool, dropped: bool = False) -> Iterator[None]:
    """If a JSON document is printed on stdout, the block's text for people is printed on stderr, or dropped."""
    beside = io.StringIO() if dropped else sys.stderr
    with contextlib.redirect_stdout(beside) if is_json else contextlib.nullcontext():
        yield


def agree(count: int, yes: bool) -> None:
    """If ``count`` ranks are many for this machine: asks the user before they are started; without a terminal
    refuses."""
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
    """Adds the option ``--yes``, which answers the question that ``agree`` asks."""
    parser.add_argument(
        "--yes", action="store_true", help=f"start more than {RANKS_A_CORE} ranks a core without asking"
    )
