"""Rank processes as a test sees them: jobs of fresh processes, and the pool that all tests share. See `harness.py`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Listener
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import torch.distributed as dist
from in_rank import BACKEND, pool_member
from limits import patience
from scripts import HERE, end_server, without_noise

POOL_SIZE = 4


class Zygote:
    """The process whose forks are the ranks. There is one for each test session, started when it is first needed."""

    _one: Zygote | None = None

    def __init__(self) -> None:
        self.tmp = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.lock = threading.Lock()
        env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        self.server = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.jobs = 0
        self._reply()

    @classmethod
    def get(cls) -> Zygote:
        """Returns the session's zygote."""
        if cls._one is None or cls._one.process.poll() is not None:
            cls._one = Zygote()
            atexit.register(cls._one.close)
        return cls._one

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the zygote ended")
        return json.loads(line)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends one request and returns the reply."""
        with self.lock:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            return self._reply()

    def next_key(self) -> str:
        """Returns a new prefix in the store."""
        with self.lock:
            self.jobs += 1
            return f"job{self.jobs}"

    def close(self) -> None:
        """Ends the zygote. The kernel then kills the remaining ranks, by their parent-death signal."""
        end_server(self.process, self.tmp)


@dataclass
class Outcome:
    """How one rank ended. `value` and `error` are None if the rank did not report them. A signal is a negative
    `code`."""

    rank: int
    code: int | None = None
    value: Any = None
    error: dict[str, str] | None = None
    output: str = ""

    def __str__(self) -> str:
        lines = [f"--- rank {self.rank}: exit code {self.code}"]
        if self.error:
            lines.append(self.error["traceback"])
        if self.output:
            lines.append("output:\n" + self.output[-6000:])
        return "\n".join(lines)


class Rank:
    """A rank process as the test sees it."""

    def __init__(self, rank: int, pid: int, log: Path) -> None:
        self.rank, self.pid, self.log = rank, pid, log
        self.conn: Connection | None = None
        self.code: int | None = None
        self.words: list[Any] = []
        self.outcome = Outcome(rank)
        self.said = False  # a value or an error was received
        self.seen = False  # the test has the outcome
        # The zygote, the rank's parent, collects the exit code only in `poll`. Until then the pid is still the rank's.
        self.pidfd: int | None = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Returns the exit code, or None while the rank runs."""
        if self.code is None:
            self.code = Zygote.get().ask({"poll": self.pid})["status"]
        if self.code is not None and self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        return self.code

    def rest(self, seconds: float) -> None:
        """Pauses until the rank sends something or ends, for at most `seconds`; polling would use the rank's cores."""
        wait_for_any([each for each in (self.conn, self.pidfd) if each is not None], seconds)

    def pump(self) -> None:
        """Receives everything that the rank has sent so far."""
        while self.conn is not None:
            try:
                if not self.conn.poll(0):
                    return
                message = self.conn.recv()
            except (EOFError, ConnectionResetError):
                self.conn.close()
                self.conn = None
                return
            if message[0] == "word":
                self.words.append(message[1])
            elif message[0] == "value":
                self.outcome.value, self.said = message[1], True
            elif message[0] == "error":
                self.outcome.error, self.said = message[1], True

    def output(self) -> str:
        """Returns everything that the rank has printed so far."""
        return without_noise(self.log.read_text(errors="replace")) if self.log.exists() else ""


class Job:
    """Some rank processes running one function."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        env: dict[str, str],
        normal_exit: bool = False,
    ) -> None:
        zygote = Zygote.get()
        self.normal_exit = normal_exit
        self.key = zygote.next_key()
        self.tmp = zygote.tmp / self.key
        self.tmp.mkdir()
        self.ranks: list[Rank] = []
        address = str(self.tmp / "door")
        with Listener(address, backlog=world_size, authkey=b"ranks") as listener:
            for rank in range(world_size):
                self.ranks.append(self._spawn(zygote, rank, world_size, address, env))
            for _ in range(world_size):
                conn = accept(listener, patience(30.0))
                _, rank, _ = conn.recv()
                self.ranks[rank].conn = conn
        for each in self.ranks:
            assert each.conn is not None
            each.conn.send((fn.__module__, fn.__qualname__, args, kwargs))

    def _spawn(self, zygote: Zygote, rank: int, world_size: int, address: str, env: dict[str, str]) -> Rank:
        log = self.tmp / f"rank{rank}.log"
        context = {
            "rank": rank,
            "world_size": world_size,
            "key": self.key,
            "store_port": zygote.server.port,
            "backend": BACKEND,
            "tmp": str(self.tmp),
        }
        order = {
            "rank": rank,
            "log": str(log),
            "env": env,
            "address": address,
            "sys_path": [path for path in sys.path if path],
            "normal_exit": self.normal_exit,
            "context": context,
        }
        return Rank(rank, zygote.ask({"spawn": order})["pid"], log)

    def pid(self, rank: int) -> int:
        """Returns the process id of a rank."""
        return self.ranks[rank].pid

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to one rank."""
        os.kill(self.ranks[rank].pid, number)

    def say(self, rank: int, word: Any) -> None:
        """Sends a message to a rank that listens."""
        conn = self.ranks[rank].conn
        assert conn is not None, f"rank {rank} has ended\n{self.report()}"
        try:
            conn.send(word)
        except OSError as error:
            raise AssertionError(f"rank {rank} does not listen: {error}\n{self.report()}") from None

    def hear(self, rank: int, timeout: float = 30.0) -> Any:
        """Waits for the next message of a rank, and returns it."""
        each = self.ranks[rank]
        limit = patience(timeout)
        end = time.monotonic() + limit
        while time.monotonic() < end:
            each.pump()
            if each.words:
                return each.words.pop(0)
            if each.said or each.poll() is not None:
                break
            each.rest(0.1)
        self.kill()
        raise AssertionError(f"rank {rank} said nothing within {limit} s\n{self.report()}")

    def wait_rank(self, rank: int, timeout: float = 60.0) -> Outcome:
        """Waits until one rank's process has ended."""
        return self._wait_until(rank, time.monotonic() + patience(timeout))

    def _wait_until(self, rank: int, end: float) -> Outcome:
        each, begin = self.ranks[rank], time.monotonic()
        while each.poll() is None:
            each.pump()
            if time.monotonic() > end:
                self._dump_stacks()
                self.kill()
                raise AssertionError(f"rank {rank} did not end within {end - begin:.0f} s\n{self.report()}")
            each.rest(0.1)
        each.pump()
        each.outcome.code, each.outcome.output, each.seen = each.code, each.output(), True
        return each.outcome

    def wait(self, timeout: float = 60.0) -> list[Outcome]:
        """Waits until every process has ended. At the time limit it kills them and raises an error with all that is
        known."""
        end = time.monotonic() + patience(timeout)
        return [self._wait_until(each.rank, end) for each in self.ranks]

    def values(self, timeout: float = 60.0) -> list[Any]:
        """Calls `wait`, requires that every rank has returned, and returns their values."""
        outcomes = self.wait(timeout)
        if any(outcome.error or outcome.code for outcome in outcomes):
            raise AssertionError(self.report())
        return [outcome.value for outcome in outcomes]

    def check_unseen(self) -> None:
        """Raises an error if a rank that the test did not wait for has ended because of a mistake in the test itself.
        Such a rank is often the one that should be late or fail in another way."""
        mistakes = {"TypeError", "NameError", "AttributeError", "ImportError", "AssertionError", "KeyError"}
        for each in self.ranks:
            each.pump()
            if not each.seen and each.outcome.error is not None and each.outcome.error["type"] in mistakes:
                raise AssertionError(f"rank {each.rank} ended by a mistake\n{self.report()}")

    def _dump_stacks(self) -> None:
        for each in self.ranks:
            if each.poll() is None:
                os.kill(each.pid, signal.SIGUSR1)
        time.sleep(0.3)

    def kill(self) -> None:
        """Kills the processes that still run, by pid."""
        for each in self.ranks:
            if each.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGCONT)
                    os.kill(each.pid, signal.SIGKILL)
        end = time.monotonic() + patience(5)
        while any(each.poll() is None for each in self.ranks) and time.monotonic() < end:
            time.sleep(0.003)
        for each in self.ranks:
            each.pump()

    def report(self) -> str:
        """Returns everything that is known about every rank, for the message of a failing test."""
        lines = []
        for each in self.ranks:
            each.pump()
            each.outcome.code, each.outcome.output = each.poll(), each.output()
            lines.append(str(each.outcome))
        return "\n".join(lines)


def accept(listener: Listener, timeout: float) -> Connection:
    """Like `listener.accept`, but with a time limit."""
    listener._listener._socket.settimeout(timeout)  # type: ignore[attr-defined]
    conn = listener.accept()
    os.set_blocking(conn.fileno(), True)
    return conn


@contextlib.contextmanager
def launch(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    normal_exit: bool = False,
    **kwargs: Any,
) -> Iterator[Job]:
    """Starts fresh processes that run `fn(context, *args, **kwargs)`. They have no group until `fn` makes one. At the
    end of the `with` block, those that still run are killed.

    `normal_exit`: after `fn` has returned, the interpreter ends as in a program, with all its cost (see `zygote.end`).
    """
    job = Job(fn, world_size, args, kwargs, env or {}, normal_exit)
    try:
        yield job
        job.check_unseen()
    finally:
        job.kill()
        for each in job.ranks:
            if each.conn is not None:
                each.conn.close()


class Pool:
    """Processes that live across tests. They keep a default group of the size last used."""

    _one: Pool | None = None

    def __init__(self) -> None:
        self.job = Job(pool_member, POOL_SIZE, (), {}, {})
        self.key = ""
        self.world_size = 0
        self.tests = 0

    @classmethod
    def get(cls) -> Pool:
        """Returns the session's pool."""
        if cls._one is None:
            cls._one = Pool()
            atexit.register(cls.end)
        return cls._one

    @classmethod
    def end(cls) -> None:
        """Asks the processes to end, and kills those that do not end."""
        pool, cls._one = cls._one, None
        if pool is None:
            return
        for each in pool.job.ranks:
            if each.conn is not None:
                with contextlib.suppress(OSError):
                    each.conn.send(None)
        with contextlib.suppress(AssertionError):
            pool.job.wait(10)
        pool.job.kill()

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        fresh_group: bool,
    ) -> list[Any]:
        """Runs `fn` on the first `world_size` processes. Any failure ends the pool and raises."""
        if fresh_group or world_size != self.world_size:
            self.key, self.world_size = Zygote.get().next_key(), world_size
        members = self.job.ranks[:world_size]
        for each in members:
            each.said, each.outcome = False, Outcome(each.rank)
            assert each.conn is not None
            each.conn.send((self.key, world_size, fn.__module__, fn.__qualname__, args, kwargs))
        end = time.monotonic() + patience(timeout)
        failed = False
        while True:
            for each in members:
                each.pump()
                if each.outcome.error and not failed:
                    failed = True
                    end = min(end, time.monotonic() + patience(3))  # the other ranks may report more, or hang
                if each.conn is None:
                    end = min(end, time.monotonic() + patience(1))
            silent = [each for each in members if not each.said]
            if not silent:
                break
            if time.monotonic() > end:
                self.job._dump_stacks()
                break
            # Until one of them sends something or ends, because polling would use the ranks' cores.
            wait_for_any([each.conn for each in silent if each.conn is not None], 0.1)
        if fresh_group:
            self.world_size = 0
        if all(each.said and not each.outcome.error for each in members):
            return [each.outcome.value for each in members]
        type(self)._one = None
        self.job.kill()
        raise AssertionError(f"{fn.__name__} failed on {world_size} ranks\n{self.job.report()}")


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    fresh_group: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Calls `fn(context, *args, **kwargs)` on every rank of a live default group. Returns their values in rank order.

    `fresh_group` makes a new default group first, and another one for the next test, because `fn` may destroy it. If a
    rank raises, or returns nothing within `patience(timeout)`, this fails with the tracebacks and the output of all
    ranks.
    """
    return Pool.get().run(fn, world_size, args, kwargs, timeout, fresh_group)


def run_fresh(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
    normal_exit: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Like `run_ranks`, in fresh processes with the given environment. `fn` makes the group itself (`context.init`)."""
    with launch(fn, world_size, *args, env=env, normal_exit=normal_exit, **kwargs) as job:
        return job.values(timeout)
