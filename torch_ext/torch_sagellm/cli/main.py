"""The command line. Each command has a module in this folder with its texts, ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from torch_sagellm._private import load, nearest
from torch_sagellm.cli import (
    bench,
    certify,
    demo,
    doctor,
    explain,
    health,
    info,
    ranks,
    simulate,
    table,
    top,
    trace,
    tune,
    version,
)
from torch_sagellm.cli.show import complain

#: If a remark has fewer columns than this, it is printed below what it describes.
MOST_OF_A_REMARK = 34


class Command(Protocol):
    """The interface of a command's module."""

    #: One line; one or more paragraphs; and lines of which the first is "examples:".
    HELP: str
    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, parsed: argparse.Namespace) -> int: ...


COMMANDS: dict[str, Any] = {
    "info": info,
    "doctor": doctor,
    "demo": demo,
    "bench": bench,
    "certify": certify,
    "health": health,
    "top": top,
    "trace": trace,
    "simulate": simulate,
    "tune": tune,
    "table": table,
    "explain": explain,
}
#: A shell's exit code for Ctrl-C.
INTERRUPTED = 130
#: Commands that need only files: a probe that runs every few seconds must not import torch.
WITHOUT_TORCH = ("health", "top", "trace")
#: Commands that work even if the extension cannot be used, and report the reason.
ALWAYS = ("info", "doctor")
EXAMPLES = """examples:
  torch-sagellm info                      versions, and what serves which tensors
  torch-sagellm doctor                    facts about this machine, what to mend, and a short self-test
  torch-sagellm demo hang                 a rank does not come: what gloo says, what this says
  torch-sagellm bench --preset quick      1, 10 and 100 MB between two ranks of this host
  torch-sagellm explain all_reduce 1MiB   the algorithm of an operation, and why
  torch-sagellm COMMAND --help            what a command does, with examples

`python -m torch_sagellm COMMAND` is the same.
"""


class Help(argparse.RawDescriptionHelpFormatter):
    """Wraps the help to the terminal's width. The lines of lists and examples are not joined."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        raw = [":\n" in part or any(line.startswith(" ") for line in part.splitlines()) for part in parts]
        return "\n\n".join(
            "\n".join(fitting(line, width) for line in part.rstrip().splitlines())
            if is_raw
            else textwrap.fill(" ".join(part.split()), width)
            for part, is_raw in zip(parts, raw, strict=True)
        )


def fitting(line: str, width: int) -> str:
    """Wraps a line of a list or an example.

    A remark continues next to or below its words, a command after a backslash.
    """
    if len(line) <= width:
        return line
    found = re.fullmatch(r"(\s*\S.*?\s{2,})(\S.*)", line)
    if found and width - len(found[1]) >= MOST_OF_A_REMARK:
        return _wrapped(found[2], width, found[1], " " * len(found[1]))
    if found:
        return f"{found[1].rstrip()}\n{_wrapped(found[2], width, ' ' * 6, ' ' * 6)}"
    if line.startswith("  torch"):
        return " \\\n".join(_wrapped(line, width - 2, "", " " * 6).splitlines())
    indent = " " * (len(line) - len(line.lstrip()))
    return _wrapped(line.strip(), width, indent, indent)


def _wrapped(text: str, width: int, first: str, rest: str) -> str:
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """Prints an error in one line, with the nearest known word; the usage is only in the help."""

    def error(self, message: str) -> NoReturn:
        complain(f"{self.prog}: {message} (see {self.prog} --help)")
        self.exit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices]
            near = nearest.meant(str(value), known)
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(known)}{near}")

    def options(self) -> list[str]:
        """All options of this command. The error for a mistyped option suggests the nearest of them."""
        return [name for action in self._actions for name in action.option_strings]


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    """Creates the parser, and the commands' parsers by name."""
    parser = Parser(
        prog="torch-sagellm",
        description="A torch.distributed backend; its commands examine this machine and running jobs.",
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument(
        "--version", action="store_true", help="what is installed: commit, extension, torch, kernels; then end"
    )
    parser.add_argument("--json", dest="version_json", action="store_true", help="after --version: the same as JSON")
    commands = parser.add_subparsers(dest="command", metavar="command")
    each: dict[str, Parser] = {}
    for name, module in COMMANDS.items():
        each[name] = commands.add_parser(
            name,
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=Help,
        )
        module.add_arguments(each[name])
    return parser, each


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser, commands = _parsers()
    parsed, unknown = parser.parse_known_args(given)
    if parsed.version_json and not parsed.version:
        parser.error("--json stands after --version, or after a command that has it")
    if parsed.version and parsed.command is not None:
        parser.error(f"--version stands alone, without {parsed.command}")
    if parsed.command is None and not unknown and not parsed.version:
        parser.error(f"which command? One of {', '.join(COMMANDS)}")
    if unknown:
        command = commands.get(parsed.command, parser)
        near = nearest.meant(unknown[0].partition("=")[0], _long(command.options()))
        command.error(f"there is no {'option' if unknown[0].startswith('-') else 'argument'} {unknown[0]!r}{near}")
    return parsed


def _long(options: Iterable[str]) -> list[str]:
    return [option for option in options if option.startswith("--")]


def _run_rank(command: str, rank: str, count: str, port: str, *words: str) -> int:
    """Runs one rank of a command."""
    from torch_sagellm.cli import measure

    bodies: dict[str, Callable[..., int]] = {
        "bench": bench.run_rank,
        "certify": certify.run_rank,
        "doctor": doctor.run_rank,
        "simulate": measure.run_rank,
        "tune": tune.run_rank,
    }
    return bodies[command](int(rank), int(count), int(port), *words)


def _rank(words: Sequence[str]) -> int:
    """Runs one rank. The rank prints no traceback if its user interrupts it, or if the machine causes the error."""
    ranks.end_with_parent()
    try:
        if words[0] == ranks.PROGRAM:
            return ranks.run_module(words[1], words[2:])
        _prepare("_rank")
        code = _run_rank(*words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)  # the peers are ending too, so leaving the group would wait for them
    except BrokenPipeError:
        ranks.nobody_reads()
    except OSError as error:  # for example a full disk
        _close_stdout()
        complain(f"torch-sagellm {words[0]}, rank {words[1]}: {_plain(error)}")
        return 1
    except (MemoryError, RuntimeError, ValueError) as error:
        what = str(error)
        if isinstance(error, MemoryError) or "allocate memory" in what:
            what = f"out of memory: {what.partition(chr(10))[0] or 'no reason was given'}"
        elif not _is_told(error):
            raise
        complain(f"torch-sagellm {words[0]}, rank {words[1]}: {_plain(what)}")
        return 1


def _prepare(command: str) -> None:
    """Prepares commands that use torch: registers the backend's name, and sets the log level.

    Raises the error of a package that can make no group, except for commands that report it.
    """
    if command in WITHOUT_TORCH:
        return
    import _torch_sagellm_autoload
    from torch_sagellm.observe import log

    _torch_sagellm_autoload.register()
    try:
        log.configure(load.extension())
        _torch_sagellm_autoload.look()
    except Exception:
        if command not in ALWAYS:
            raise


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0 for success, 2 for wrong arguments, others as its help says."""
    given = sys.argv[1:] if arguments is None else arguments
    # The command that `ranks.run` starts; no help lists it, because users do not call it.
    if given[:1] == ["_rank"]:
        return _rank(given[1:])
    _open_streams()
    command = " ".join(["torch-sagellm", *(word for word in given[:1] if word in COMMANDS)])
    with _own_warnings(command):
        return _guarded(command, given)


def _guarded(command: str, given: Sequence[str]) -> int:
    """Runs a command; an error that its user or the machine caused becomes one line and an exit code."""
    try:
        return _run(given)
    except ImportError as error:
        complain(f"{command}: {_plain(error)}")
        return 1
    except (ValueError, argparse.ArgumentTypeError) as error:
        complain(f"{command}: {_plain(error)}")
        return 2
    except KeyboardInterrupt:
        complain(f"{command}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe, for example `head`, has closed it.
        _close_stdout()
        return 0
    except RuntimeError as error:
        if not _is_told(error):
            raise
        complain(f"{command}: {_plain(error)}")
        return 1
    except OSError as error:
        # For example a full disk, or a folder that cannot be written.
        _close_stdout()
        complain(f"{command}: {_plain(error)}")
        return 1


def _run(given: Sequence[str]) -> int:
    try:
        parsed = _parse(given)
    except SystemExit:
        sys.stdout.flush()  # of the help; if its reader is gone, this raises, and `_guarded` handles the error
        raise
    if parsed.version:
        code = version.show(parsed.version_json)
    else:
        _prepare(parsed.command)
        code = COMMANDS[parsed.command].run(parsed)
    sys.stdout.flush()
    return code


def _open_streams() -> None:
    """Opens /dev/null for stdout or stderr if the caller has closed it, because Python then has no such stream."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (as long as the process)


def _close_stdout() -> None:
    """Redirects stdout to /dev/null, because otherwise Python would report an error when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_told(error: Exception) -> bool:
    """Whether an error of the library names its cause and is no bug of ours, so that a traceback adds nothing."""
    return str(error).startswith("sagellm") and "internal error" not in str(error)


def _plain(message: object) -> str:
    """The text of a library error or warning without its leading name, because the command prints its own name
    there."""
    return re.sub(r"^(\[Errno \d+\] )?sagellm(?: \w+)?: ", lambda found: found[1] or "", str(message))


@contextlib.contextmanager
def _own_warnings(command: str) -> Iterator[None]:
    """Prints warnings of this package like the errors of the command, without the line of code that gave them.

    The warning that no group can be made is dropped: the commands that use torch report the reason themselves.
    """
    usual = warnings.showwarning

    def show(message: Warning | str, *where: Any, **options: Any) -> None:
        text = str(message)
        if not text.startswith("sagellm"):
            usual(message, *where, **options)
        elif "groups of this backend are refused" not in text or command == "torch-sagellm":
            complain(f"{command}: warning: {_plain(text)}")

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual
