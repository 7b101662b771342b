"""The command line. ``doctor`` reports facts of this machine and runs a self-test of two ranks; ``tune``, ``table`` and
``explain`` measure and show the algorithm choice (``tune.py``); ``simulate`` predicts collectives on other machines.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from sagellm.cli import ranks, simulate, tune

EXAMPLES = """examples:
  python -m sagellm doctor                 facts about this machine, then a short self-test
  python -m sagellm doctor --no-self-test  the facts alone
  SAGELLM_LOG=debug python -m sagellm doctor
  python -m sagellm tune --ranks 4         measure the fastest algorithm of each operation and save the table
  python -m sagellm table --ranks 4        every choice of a group of 4 ranks, and its source
  python -m sagellm explain all_reduce 1MiB --ranks 4
"""
RANKS = 2
#: The self-test measures for this long; starting two interpreters with torch takes longer than that.
MEASURE_SECONDS = 2.0
START_SECONDS = 60.0
SMALL, LARGE = 2, 1 << 20  # elements of four bytes: 8 B and 4 MiB


def show(name: str, value: object) -> None:
    print(f"{name:<28} {value}", flush=True)


def facts(extension: Any) -> None:
    """Versions, then the core's facts about this machine."""
    import torch

    from sagellm import _load, _serve_as

    show("sagellm", f"{_load.version()} ({getattr(extension, '__file__', 'built in')})")
    show("torch", f"{torch.__version__}, built for {extension.torch_version_built}")
    show("python", f"{platform.python_version()} ({sys.executable})")
    for name, value in extension.doctor().items():
        show(name, value)
    if _serve_as.serves():
        show("groups called gloo", f"are served by sagellm ({_serve_as.VARIABLE})")
    for name in sorted(name for name in os.environ if name.startswith("SAGELLM_")):
        show(name, os.environ[name])


def self_test() -> int:
    """Two ranks of this program meet on the loopback interface; 0 when both report success."""
    ended, _ = ranks.run("doctor", RANKS, seconds=START_SECONDS + MEASURE_SECONDS)
    for rank, one in enumerate(ended):
        if one.failure:
            show(f"self-test, rank {rank}", f"FAILED, {one.failure}")
        if one.output.strip():
            print(one.output.rstrip(), flush=True)
    failed = any(one.failure for one in ended)
    show("self-test", "FAILED" if failed else f"{RANKS} ranks: passed")
    return 1 if failed else 0


def run_rank(rank: int, count: int, port: int) -> int:
    """One rank of the self-test: checks sums, and measures their time. Rank 0 prints."""
    import torch
    import torch.distributed as dist

    ranks.join("sagellm", rank, count, port, 20.0)
    for numbers, name in ((SMALL, "8 B"), (LARGE, "4 MiB")):
        tensor = torch.full((numbers,), float(rank + 1))
        dist.all_reduce(tensor)
        wanted = float(sum(range(1, RANKS + 1)))
        if not bool((tensor == wanted).all()):
            print(f"all_reduce of {name}: expected {wanted}, got {tensor.unique().tolist()}")
            return 1
        times = _times(tensor)
        if rank == 0:
            show(f"all_reduce of {name}", f"median {times[len(times) // 2] * 1e6:.1f} us of {len(times)}")
    dist.destroy_process_group()
    return 0


def _times(tensor: Any) -> list[float]:
    """Sorted seconds of repeated calls. Rank 0's clock alone decides when to stop; the data carries its decision."""
    import torch
    import torch.distributed as dist

    times: list[float] = []
    until = time.monotonic() + MEASURE_SECONDS / 2
    again = torch.ones(1)
    while again.item() > 0:
        for _ in range(20):
            started = time.perf_counter()
            dist.all_reduce(tensor.zero_())
            times.append(time.perf_counter() - started)
        again.fill_(float(time.monotonic() < until))
        dist.broadcast(again, src=0)
    return sorted(times)


def doctor(with_self_test: bool) -> int:
    from sagellm import _load
    from sagellm.observe import log

    try:
        extension = _load.extension()
    except ImportError as error:
        print(f"sagellm: {error}", file=sys.stderr)
        return 1
    log.configure(extension)
    facts(extension)
    return self_test() if with_self_test else 0


class Parser(argparse.ArgumentParser):
    """Prints the error in one line; the usage is in the help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _run_rank(command: str, rank: str, count: str, port: str, *words: str) -> int:
    """One rank of a command."""
    from sagellm.cli import measure

    bodies: dict[str, Callable[..., int]] = {
        "doctor": run_rank,
        "simulate": measure.run_rank,
        "tune": tune.run_rank,
    }
    return bodies[command](int(rank), int(count), int(port), *words)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="sagellm",
        description="A torch.distributed backend; its commands examine this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    checked = commands.add_parser(
        "doctor",
        help="facts about this machine and a self-test of two ranks",
        description="Prints versions, usable cores, memory limits and kernel features, then lets two ranks "
        "on this host communicate for two seconds. Exits with 1 when something does not work.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    checked.add_argument("--no-self-test", action="store_true", help="print the facts and end")
    simulated = commands.add_parser(
        "simulate",
        help="predicted times of collectives, by algorithm, size and number of ranks",
        description="Prices the schedules of this package under a model of links (latency, time per byte, combining "
        "numbers) and prints a table of times and the sizes at which one algorithm overtakes another.",
        epilog=simulate.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    simulate.add_arguments(simulated)
    _add_choosing(commands)
    given = sys.argv[1:] if arguments is None else arguments
    # What `ranks.run` starts: no command for people, so no help lists it.
    if given[:1] == ["_rank"]:
        return _run_rank(*given[1:])
    parsed = parser.parse_args(given)
    if parsed.command == "doctor":
        return doctor(with_self_test=not parsed.no_self_test)
    if parsed.command == "simulate":
        return simulate.run(parsed)
    try:
        return _choosing(parsed)
    except (ImportError, ValueError) as error:
        text = str(error)
        print(text if text.startswith("sagellm") else f"sagellm {parsed.command}: {text}", file=sys.stderr)
        return 2


def _add_choosing(commands: Any) -> None:
    tuned = commands.add_parser("tune", help="measure the fastest algorithm of each operation and save the table")
    tuned.add_argument(
        "--budget", type=float, default=60.0, metavar="SECONDS", help="measure for so long (default: 60)"
    )
    tuned.add_argument(
        "--max-size", type=simulate.parse_size, default=64 << 20, metavar="BYTES", help="largest size (default: 64MiB)"
    )
    tuned.add_argument("--dry-run", action="store_true", help="print what would be measured, and exit")
    shown = commands.add_parser("table", help="print every choice of a group, and its source")
    asked = commands.add_parser("explain", help="explain the algorithm choice of an operation")
    asked.add_argument("op", help="all_reduce, broadcast, ...")
    asked.add_argument("bytes", type=simulate.parse_size, help="bytes that one rank gives: 4096, 64KiB, 1MiB")
    asked.add_argument("--dtype", default="float32", help="element type (default: float32)")
    for command in (tuned, shown, asked):
        command.add_argument("--ranks", type=int, default=2, help="ranks of the group, all on this host (default: 2)")


def _choosing(parsed: argparse.Namespace) -> int:
    from sagellm import _load
    from sagellm.observe import log

    log.configure(_load.extension())
    if parsed.command == "tune":
        return tune.tune(parsed.budget, parsed.ranks, parsed.dry_run, parsed.max_size)
    if parsed.command == "table":
        return tune.show_table(parsed.ranks)
    return tune.show_explanation(parsed.op, parsed.bytes, parsed.ranks, parsed.dtype)
