"""Starts the ranks of a command: processes of this program on this host, which meet over loopback."""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, Any, NoReturn

LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1
#: The first words of every rank's command line.
MODULE = ["-m", "torch_sagellm"]
#: The word for a command that makes a rank call `run_module`.
PROGRAM = "program"
#: Seconds after which a rank exits by itself if its parent has not killed it.
PATIENCE = 10.0


@dataclass
class Ended:
    """A rank that has ended: its output, and the text of its failure or an empty text."""

    output: str
    failure: str


def run(
    command: str,
    count: int,
    *words: object,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    shown: IO[str] | None = None,
) -> tuple[list[Ended], Any]:
    """Runs `run_rank(rank, count, port, *words)` of a command on every rank, and kills ranks that take too long.

    Returns how the ranks ended, and the store in which they met. If `shown` is given (the stdout or stderr of
    this process), the ranks print there instead of into the returned outputs.
    """
    from torch.distributed import TCPStore

    common = dict(os.environ if environment is None else environment)
    check_variables(common)
    # The system chooses the port, because a port that is free now may be in use when the ranks connect.
    store = TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=seconds), wait_for_workers=False)
    calls = [["_rank", command, *map(str, (rank, count, store.port, *words))] for rank in range(count)]
    return start(calls, [common] * count, seconds, shown), store


def run_program(module: str, words: Sequence[str], count: int, seconds: float) -> list[Ended]:
    """Runs `python -m module` on every rank with torchrun's variables; the ranks print where this process prints.

    torchrun itself would print an additional traceback, and after a second Ctrl-C leave its ranks running.
    """
    from torch.distributed import TCPStore

    check_variables(os.environ)
    store = TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=seconds), wait_for_workers=False)
    common = {"OMP_NUM_THREADS": "1", **os.environ, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    common |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common["TORCHELASTIC_RESTART_COUNT"] = "0"
    each = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return start([["_rank", PROGRAM, module, *words]] * count, each, seconds, sys.stdout)


def check_variables(environment: Mapping[str, str]) -> None:
    """Raises a ValueError, before ranks are started, if the value of a variable would make each rank refuse its
    group."""
    from torch_sagellm._private import load, variables

    for found in variables.wrong(environment):
        if found.is_refused:
            raise ValueError(f"{found.what}; {found.fix}")
    if rules := environment.get("SAGELLM_ALGORITHM", ""):
        try:
            load.extension().explain_without_group("barrier", 0, "float32", 2, rules)
        except ValueError as error:
            raise ValueError(str(error).replace("the option algorithm", "SAGELLM_ALGORITHM")) from None


def start(
    calls: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    seconds: float,
    shown: IO[str] | None,
) -> list[Ended]:
    """Starts a process of this command line for each call, and waits. No process is left, even if this function raises.

    Each process has a separate session, so only this process receives Ctrl-C. This process then kills the ranks, and
    none of them prints a traceback.
    """
    deadline = time.monotonic() + seconds
    output = subprocess.PIPE if shown is None else _descriptor(shown)
    children: list[subprocess.Popen[str]] = []
    with _signals_end_it():
        try:
            for call, environment in zip(calls, environments, strict=True):
                with _signals_wait():
                    children.append(
                        subprocess.Popen(
                            [sys.executable, *MODULE, *call],
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT if shown is None else None,
                            text=True,
                            env=environment,
                            start_new_session=True,
                        )
                    )
            return [_wait(child, deadline, seconds) for child in children]
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait()


def _descriptor(stream: IO[str]) -> int | None:
    """The file descriptor on which the ranks print; None (inherit) if the stream exists only in Python."""
    try:
        return stream.fileno()
    except OSError:
        return None


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """Converts signals that would end this process to exceptions, so that it kills the ranks first."""

    def leave(number: int, _: object) -> NoReturn:
        if number == signal.SIGPIPE:
            raise BrokenPipeError
        raise SystemExit(128 + number)

    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGPIPE: signal.SIG_IGN}
    ends = usual if threading.current_thread() is threading.main_thread() else {}
    before = [(each, signal.signal(each, leave)) for each, now in ends.items() if signal.getsignal(each) is now]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Delays the signals that have a handler of Python. If one raised inside ``Popen``, nobody could kill the child."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ()
    handled = [each for each in numbers if callable(signal.getsignal(each))]
    before = [(each, signal.signal(each, lambda number, _: came.append(number))) for each in handled]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)


def nobody_reads() -> NoReturn:
    """In a rank whose output nothing reads: makes the parent kill all ranks, before one of them reports a lost peer."""
    os.kill(os.getppid(), signal.SIGPIPE)
    time.sleep(PATIENCE)
    os._exit(1)


def run_module(module: str, words: Sequence[str]) -> int:
    """In a rank: runs a program of the package like `python -m`."""
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def end_with_parent() -> None:
    """In a rank: makes the system kill the rank if its parent is killed, because the parent then cannot do it."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _wait(child: subprocess.Popen[str], deadline: float, seconds: float) -> Ended:
    try:
        output, _ = child.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        return Ended(output or "", f"did not end within {seconds:.0f} s and was ended")
    return Ended(output or "", f"ended with status {child.returncode}" if child.returncode else "")


def join(backend: str, rank: int, count: int, port: int, seconds: float, **options: Any) -> Any:
    """In a rank: creates the default group with the other ranks; returns the store."""
    import torch.distributed as dist

    limit = timedelta(seconds=seconds)
    store = dist.TCPStore(LOOPBACK, port, None, False, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit, **options)
    return store
