"""A program may end at any moment: it exits with its own code, does not hang, and leaves nothing behind.

The long runs keep several jobs running at the same time. A job mostly waits for its processes, and on a busy machine
rare orders of events are more frequent than on an idle one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import IS_GLOO, Context, Zygote, beyond_gloo, launch, run_script
from helpers import nothing_left
from limits import patience

KEEP: list[Any] = []  # objects that are alive when the interpreter ends
JOBS_AT_ONCE = 4
OFTEN = int(os.environ.get("SAGELLM_TEST_EXITS", "200"))


def before_first_op(ctx: Context) -> None:
    """Creates a group and exits without using or destroying it."""
    ctx.init()


def after_work(ctx: Context) -> None:
    """Uses a group and exits without destroying it."""
    ctx.init()
    dist.all_reduce(torch.ones(10))


def after_destroy(ctx: Context) -> None:
    """Uses a group and destroys it."""
    ctx.init()
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


def in_flight(ctx: Context) -> None:
    """Rank 0 exits as soon as it has issued its operations, which rank 1 never joins."""
    ctx.init()
    store = ctx.store()
    dist.all_reduce(torch.ones(1))
    if ctx.rank == 0:
        KEEP.append(dist.all_reduce(torch.ones(10), async_op=True))
        KEEP.append(dist.irecv(torch.ones(10), 1))
        KEEP.append(dist.isend(torch.ones(100_000), 1))
        store.set("issued", "")
    else:
        store.get("issued")


def live_work(ctx: Context) -> None:
    """Completed Works, futures and tensors outlive the group and are alive when the interpreter ends."""
    ctx.init()
    for i in range(20):
        work: Any = dist.all_reduce(torch.ones(100 * i + 1), async_op=True)
        KEEP.append((work, work.get_future().then(lambda done: done.value()[0].sum().item())))
    for work, _ in KEEP:
        work.wait()
    dist.destroy_process_group()


def live_work_no_destroy(ctx: Context) -> None:
    """Completed Works and futures are alive when the interpreter ends, and the group was not destroyed."""
    ctx.init()
    for i in range(20):
        work: Any = dist.all_reduce(torch.ones(100 * i + 1), async_op=True)
        KEEP.append((work, work.get_future()))
    for work, _ in KEEP:
        work.wait()


def from_atexit(ctx: Context) -> None:
    """Calls the last collective and destroys the group in atexit."""
    ctx.init()

    def last() -> None:
        found = torch.ones(3)
        dist.all_reduce(found)
        assert found.tolist() == [float(ctx.world_size)] * 3
        dist.destroy_process_group()

    atexit.register(last)


def destroy_in_atexit_with_error(ctx: Context) -> None:
    """A program that fails: sys.exit(3) with a live group."""
    ctx.init()
    dist.all_reduce(torch.ones(3))
    sys.exit(3)


def unhandled(ctx: Context) -> None:
    """No rank destroys the group. Rank 0 exits with code 7, all others with code 0."""
    ctx.init()
    dist.all_reduce(torch.ones(3))
    sys.exit(7 if ctx.rank == 0 else 0)


def live_group_object(ctx: Context) -> None:
    """A reference to the backend object is alive when the interpreter ends."""
    ctx.init()
    group = dist.distributed_c10d._get_default_group()
    KEEP.append((group, group._get_backend(torch.device("cpu"))))
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


def thread_in_a_wait(ctx: Context) -> None:
    """A daemon thread, which is never joined, waits in a collective when the interpreter ends."""
    ctx.init()
    dist.all_reduce(torch.ones(3))
    if ctx.rank == 0:
        group = dist.distributed_c10d._get_default_group()
        KEEP.append(group)

        def hang() -> None:
            with contextlib.suppress(BaseException):
                dist.all_reduce(torch.ones(5))

        threading.Thread(target=hang, daemon=True).start()
        time.sleep(0.1)


def callbacks_pending(ctx: Context) -> None:
    """Callbacks of futures are queued when the interpreter ends."""
    ctx.init()
    for _ in range(30):
        work: Any = dist.all_reduce(torch.ones(3), async_op=True)
        work.get_future().then(lambda done: time.sleep(0.001))
    dist.destroy_process_group()


def many_groups_no_destroy(ctx: Context) -> None:
    """Ten groups with one operation each, without destroy."""
    ctx.init()
    for _ in range(10):
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        KEEP.append(group)


MOMENTS: dict[str, tuple[Any, list[int]]] = {
    "before the first operation": (before_first_op, [0, 0]),
    "after work, no destroy": (after_work, [0, 0]),
    "after destroy": (after_destroy, [0, 0]),
    "in flight": (in_flight, [0, 0]),
    "live work": (live_work, [0, 0]),
    "live work, no destroy": (live_work_no_destroy, [0, 0]),
    "atexit": (from_atexit, [0, 0]),
    "sys.exit(3)": (destroy_in_atexit_with_error, [3, 3]),
    "one fails": (unhandled, [7, 0]),
    "live group object": (live_group_object, [0, 0]),
    "thread in a wait": (thread_in_a_wait, [0, 0]),
    "callbacks pending": (callbacks_pending, [0, 0]),
    "many groups, no destroy": (many_groups_no_destroy, [0, 0]),
}
GLOO_CANNOT = {"in flight", "thread in a wait", "after destroy", "live group object", "callbacks pending", "live work"}


def repeat(turns: int, once: Callable[[int], None], say: Callable[[str], None]) -> None:
    """Calls `once(turn)` for every turn, several at a time, and reports the progress. The first failure ends the
    run."""
    Zygote.get()
    with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        running = [pool.submit(once, turn) for turn in range(turns)]
        try:
            for done, each in enumerate(as_completed(running), 1):
                each.result()
                if done % 50 == 0:
                    say(f"{done} of {turns}")
        finally:
            pool.shutdown(cancel_futures=True)


def exit_once(moment: str, turn: int) -> None:
    """Runs a job of the exit scenario ``moment``. Its exit codes must be right, and no file may be left in /dev/shm."""
    fn, expected = MOMENTS[moment]
    with launch(fn, 2, normal_exit=True) as job:
        codes = [outcome.code for outcome in job.wait(60)]
        assert codes == expected, f"turn {turn}: {codes}\n{job.report()}"
        for each in job.ranks:
            output = each.output()
            assert "Traceback" not in output or moment == "one fails", output
            assert "terminate called" not in output and "panicked" not in output, output
    nothing_left(each.pid for each in job.ranks)


def skip_what_gloo_cannot(moment: str) -> None:
    """Skips exit scenarios in which gloo fails, if the suite itself is being checked with gloo."""
    if IS_GLOO and moment in GLOO_CANNOT:
        pytest.skip("gloo: may hang, or lose the race of a fast destroy")


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_exit_at_any_moment_three_times(moment: str) -> None:
    """Pitfall 10 and rule 10: the process neither aborts nor hangs, and has the right exit code."""
    skip_what_gloo_cannot(moment)
    for turn in range(3):
        exit_once(moment, turn)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_exit_at_any_moment_often(moment: str, say: Callable[[str], None]) -> None:
    """Two hundred turns, so that rare orders of events occur."""
    skip_what_gloo_cannot(moment)
    repeat(OFTEN, lambda turn: exit_once(moment, turn), say)


def at_a_random_moment(ctx: Context, delay: float) -> None:
    ctx.init(timeout=timedelta(seconds=20))
    ctx.tell("ready")

    def leave() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
    if ctx.rank == 0:
        threading.Thread(target=leave, daemon=True).start()
    turn = 0
    try:
        while True:
            KEEP.append(dist.all_reduce(torch.ones(1 + 5000 * (turn % 3)), async_op=True))
            if turn % 5 == 4:
                KEEP.pop().wait()
                KEEP.clear()
            turn += 1
    except RuntimeError as error:
        assert "rank 0" in str(error), error
        ctx.tell(time.monotonic())
        sys.exit(6)


def leave_once(turn: int) -> None:
    """Rank 0 calls sys.exit in a signal handler in the middle of its work."""
    with launch(at_a_random_moment, 2, 0.002 * (turn % 17), normal_exit=True) as job:
        codes = [outcome.code for outcome in job.wait(60)]
        assert codes == [5, 6], f"turn {turn}: {codes}\n{job.report()}"


@beyond_gloo("does not look for signals while it waits")
def test_exit_from_a_signal_handler_in_the_middle() -> None:
    """The rank that leaves exits with its code, and its peer's error names it."""
    for turn in range(3):
        leave_once(turn)


@beyond_gloo("does not look for signals while it waits")
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_exit_from_a_signal_handler_in_the_middle_often(say: Callable[[str], None]) -> None:
    """The same, two hundred times."""
    repeat(OFTEN, leave_once, say)


def kill_once(turn: int) -> None:
    """Rank 0 is killed at a moment that shifts from turn to turn. Rank 1 reports when it got the error."""
    with launch(at_a_random_moment, 2, 100.0, normal_exit=True) as job:
        job.hear(0)
        job.hear(1)
        time.sleep(0.001 * (turn % 23))
        killed = time.monotonic()
        job.signal(0, signal.SIGKILL)
        learned = job.hear(1)
        assert job.wait_rank(1, 60).code == 6, job.report()
        assert learned - killed < patience(2.0), f"turn {turn}: after {learned - killed} s"


@beyond_gloo("kills are slow to be seen")
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_kill_9_often(say: Callable[[str], None]) -> None:
    """A rank is killed two hundred times, and its peer always gets the error soon."""
    repeat(OFTEN, kill_once, say)


WAITS_AT_THE_END = """
import threading, time
from datetime import timedelta
import torch.distributed as dist
from torch_sagellm._private import load

class Slow:
    def __del__(self):  # while the interpreter ends
        time.sleep(2)

def waits():
    load.extension()._outlive_python()
    store.wait(["missing"], timedelta(seconds=1))

store, slow = dist.HashStore(), Slow()
threading.Thread(target=waits, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.quick
def test_a_thread_that_waits_in_torch_while_the_interpreter_ends_does_not_end_the_process() -> None:
    """A thread that connects to a rank which has failed waits like this."""
    done = run_script(["-c", WAITS_AT_THE_END], env={"RES_OPTIONS": "timeout:1 attempts:1"})
    assert done.returncode == 0, done.stdout
