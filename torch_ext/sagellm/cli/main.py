"""The command line. ``doctor`` says what this machine offers and whether two ranks can talk; ``tune``, ``table`` and
``explain`` are about the ways operations go (``tune.py``); ``simulate`` says what collectives cost on other machines.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any, NoReturn

from sagellm.cli import simulate, tune

EXAMPLES = """examples:
  python -m sagellm doctor                 facts about this machine, then a short self-test
  python -m sagellm doctor --no-self-test  the facts alone
  SAGELLM_LOG=debug python -m sagellm doctor
  python -m sagellm tune --ranks 4         measure which way each operation goes fastest here, and keep it
  python -m sagellm table --ranks 4        every choice of a group of 4 ranks, and where it comes from
  python -m sagellm explain all_reduce 1MiB --ranks 4
"""
LOOPBACK = "127.0.0.1"
RANKS = 2
#: The self-test measures for this long; starting two interpreters with torch takes longer than that.
MEASURE_SECONDS = 2.0
START_SECONDS = 60.0
SMALL, LARGE = 2, 1 << 20  # numbers of four bytes: 8 B and 4 MiB


def show(name: str, value: object) -> None:
    print(f"{name:<28} {value}", flush=True)


def facts(extension: Any) -> None:
    """Versions, then what the core found out."""
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
    """Starts two ranks of this program that meet on the loopback interface; 0 when both report success."""
    from torch.distributed import TCPStore

    store = TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=START_SECONDS), wait_for_workers=False)
    started = time.monotonic()
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "sagellm", "_rank", str(rank), str(store.port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    failed = False
    for rank, child in enumerate(children):
        try:
            left = max(1.0, START_SECONDS + MEASURE_SECONDS - (time.monotonic() - started))
            output, _ = child.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
            output += f"rank {rank} did not end within {START_SECONDS + MEASURE_SECONDS:.0f} s and was ended"
        if child.returncode != 0:
            failed = True
            show(f"self-test, rank {rank}", f"FAILED, status {child.returncode}")
            print(output.rstrip(), flush=True)
        elif output.strip():
            print(output.rstrip(), flush=True)
    show("self-test", "FAILED" if failed else f"{RANKS} ranks: passed")
    return 1 if failed else 0


def run_rank(rank: int, port: int) -> int:
    """One rank of the self-test: right sums, and how long they take. Rank 0 prints."""
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=20)
    store = dist.TCPStore(LOOPBACK, port, None, False, timeout)
    dist.init_process_group("sagellm", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    for count, name in ((SMALL, "8 B"), (LARGE, "4 MiB")):
        tensor = torch.full((count,), float(rank + 1))
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
    """Sorted seconds of repeated calls. Rank 0's clock alone decides when to stop, and tells it in the data."""
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
    """Says what is wrong in one line; the usage is in the help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="sagellm",
        description="A torch.distributed backend; its commands look at this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    checked = commands.add_parser(
        "doctor",
        help="facts about this machine and a self-test of two ranks",
        description="Prints versions, usable cores, memory limits and what the kernel allows, then lets two ranks "
        "on this host talk for two seconds. Ends with 1 when something does not work.",
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
    # What the self-test, tune and `simulate --check` start: no commands for people, so no help lists them.
    if given[:1] == ["_rank"]:
        return run_rank(int(given[1]), int(given[2]))
    if given[:1] == ["_simulated_rank"]:
        from sagellm.cli import measure

        return measure.run_rank(int(given[1]), int(given[2]), int(given[3]), given[4])
    if given[:1] == ["_tune_rank"]:
        return tune.run_rank(int(given[1]), int(given[2]), int(given[3]), float(given[4]), int(given[5]))
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


def _size(text: str) -> int:
    from sagellm.observe import explain

    try:
        return explain.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_choosing(commands: Any) -> None:
    tuned = commands.add_parser("tune", help="measure which way each operation goes fastest here, and keep it")
    tuned.add_argument(
        "--budget", type=float, default=60.0, metavar="SECONDS", help="measure for so long (default: 60)"
    )
    tuned.add_argument(
        "--max-size", type=_size, default=64 << 20, metavar="BYTES", help="largest size (default: 64MiB)"
    )
    tuned.add_argument("--dry-run", action="store_true", help="say what would be measured, and end")
    shown = commands.add_parser("table", help="print every choice of a group, and where it comes from")
    asked = commands.add_parser("explain", help="say why an operation would travel the way it would")
    asked.add_argument("op", help="all_reduce, broadcast, ...")
    asked.add_argument("bytes", type=_size, help="bytes that one rank gives: 4096, 64KiB, 1MiB")
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
