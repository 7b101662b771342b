"""An operation that hangs: which rank is missing, what that rank does and at which line, and which rank waits for
which.

The texts are golden files (`hang_texts`). The lines that they name are compared with marks in this file.
"""

from __future__ import annotations

import ctypes
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from hang_texts import compare, line_in
from harness import Context, Job, beyond_gloo, expect_raises, launch
from limits import patience

pytestmark = beyond_gloo("it does not say")

#: Seconds until the operations here fail. After half of this time the ranks are asked what they do.
TIMEOUT = 4
#: The timeout over several hosts. It is longer, because ranks answer only when they next poll the store.
HOSTS_TIMEOUT = 8
ENV = {"GLOO_SOCKET_IFNAME": net.INTERFACE}
HANG = (RuntimeError,)


def line_of(mark: str) -> int:
    return line_in(__file__, mark)


def reduce_it(size: int = 3) -> None:
    dist.all_reduce(torch.ones(size))  # mark: waits here


#: When a call began and when it ended, and its error.
Timed = tuple[float, float, str]


def told(call: Callable[[], Any]) -> Timed:
    """Makes a call that fails."""
    began = time.monotonic()
    text = expect_raises(HANG, call)
    return began, time.monotonic(), text


def begin(ctx: Context, names: list[str] | None = None, **options: Any) -> None:
    """Creates the default group. ``names`` are the hosts, whose ranks meet in a file; without them all ranks are on one
    host."""
    if options:
        import torch_sagellm

        options = {"pg_options": torch_sagellm.Options(**options)}
    if names:
        net.enter(names[ctx.rank * len(names) // ctx.world_size])
        store = dist.FileStore(f"{ctx.tmp}/store", ctx.world_size)
        options |= {"store": store, "timeout": timedelta(seconds=30)}
    ctx.init(operations=timedelta(seconds=HOSTS_TIMEOUT if names else TIMEOUT), **options)
    dist.broadcast(torch.ones(2), 0)
    ctx.tell("ready")
    ctx.listen()


# --------------------------------------------------------------------------------------------- what the late rank does


def asleep(ctx: Context) -> None:
    time.sleep(patience(60))  # mark: asleep here


def computing(ctx: Context) -> None:
    end = time.monotonic() + patience(30)
    # The interpreter switches threads when the loop begins its next turn, so either of two lines may be reported.
    while time.monotonic() < end:  # mark: begins anew
        sum(range(100_000))  # mark: computes here


def in_native_code(ctx: Context) -> None:
    # PyDLL, unlike CDLL, does not release the interpreter's lock.
    ctypes.PyDLL(None).sleep(2 * TIMEOUT)


def late(ctx: Context, what: str, **options: Any) -> Timed | None:
    """Rank 1 does something else, and the other ranks wait for it."""
    begin(ctx, **options)
    if ctx.rank == 1:
        globals()[what](ctx)
        return None
    found = told(reduce_it)
    ctx.tell("done")
    ctx.listen()
    return found


def start(job: Job) -> None:
    """Waits until all ranks have the group, and lets them continue."""
    for each in job.ranks:
        assert job.hear(each.rank) == "ready"
    for each in job.ranks:
        job.say(each.rank, "go")


def failures(job: Job, ranks: int) -> list[str]:
    """Starts the ranks, waits until the call of each has failed, and returns their texts."""
    start(job)
    for rank in range(ranks):
        job.hear(rank)
    for rank in range(ranks):
        job.say(rank, "go")
    return [job.wait_rank(rank, 20).value for rank in range(ranks)]


def survivors(job: Job, ranks: list[int], deadline: float = TIMEOUT) -> list[str]:
    """Returns the error texts of these ranks. Checks that each came at the deadline."""
    for rank in ranks:
        assert job.hear(rank) == "done"
    for rank in ranks:
        job.say(rank, "go")
    found: list[Timed] = [job.wait_rank(rank, 20).value for rank in ranks]
    first = min(began for began, _, _ in found)
    for began, ended, _ in found:
        # The first rank that waits reaches the deadline and fails the group, so a rank that has begun later waits for
        # less. On an idle machine the error comes within a tenth of the deadline. A busy machine runs the waiting
        # thread later.
        assert ended - first > deadline * 0.95, (first, began, ended)
        assert ended - began < deadline * 1.1 + patience(0.5), (first, began, ended)
    return [text for _, _, text in found]


@pytest.mark.parametrize("what", ["asleep", "computing"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_line_that_a_late_rank_is_at_is_named(what: str, ranks: int) -> None:
    """If a rank hangs in Python, every rank that waits for it names its line, and also the line of its own call."""
    with launch(late, ranks, what) as job:
        start(job)
        texts = survivors(job, [rank for rank in range(ranks) if rank != 1])
    marks = {"asleep": ["asleep here"], "computing": ["computes here", "begins anew"]}[what]
    places = [f"{Path(__file__).name}:{line_of('mark: ' + mark)} in {what}" for mark in marks]
    for text in texts:
        assert any(place in text for place in places), text
        assert f"{Path(__file__).name}:{line_of('mark: waits here')} in reduce_it" in text, text
    if ranks == 2:
        compare(f"hang_{what}", texts[0])


def test_a_rank_whose_native_code_keeps_the_interpreter_is_named_so() -> None:
    """While native code keeps the interpreter's lock, no line can be read. The error says what keeps the lock."""
    with launch(late, 2, "in_native_code") as job:
        start(job)
        compare("hang_in_native_code", survivors(job, [0])[0])


def test_a_stopped_rank_is_named_so() -> None:
    with launch(late, 2, "asleep") as job:
        for rank in range(2):
            assert job.hear(rank) == "ready"
        job.signal(1, signal.SIGSTOP)
        job.say(0, "go")
        compare("hang_stopped", survivors(job, [0])[0])


def test_a_rank_that_is_killed_while_others_wait_is_named_at_once() -> None:
    with launch(late, 2, "asleep") as job:
        start(job)
        time.sleep(0.5)
        job.signal(1, signal.SIGKILL)
        assert job.hear(0) == "done"
        job.say(0, "go")
        began, ended, text = job.wait_rank(0, 20).value
    assert ended - began < TIMEOUT, (began, ended)
    compare("hang_killed", text)


# ------------------------------------------------------------------------------------------------- wrong programs


def skipped_call(ctx: Context, names: list[str] | None = None) -> str | None:
    """Rank 1 skips the second all_reduce, and is therefore missing in the third."""
    begin(ctx, names)
    for turn in range(3):
        if ctx.rank == 1 and turn == 1:
            continue
        try:
            reduce_it()
        except HANG as error:
            return str(error)
    time.sleep(patience(60))
    return None


def swapped_calls(ctx: Context, names: list[str] | None = None) -> str | None:
    """Rank 1 makes the two calls in the opposite order."""
    begin(ctx, names)
    calls: list[Callable[[], Any]] = [reduce_it, lambda: dist.broadcast(torch.ones(4), 1)]

    def both() -> None:
        calls[ctx.rank]()
        calls[1 - ctx.rank]()

    text = told(both)[2]
    ctx.tell("done")
    ctx.listen()
    return text


def different_shapes(ctx: Context, names: list[str] | None = None) -> str | None:
    begin(ctx, names)
    text = told(lambda: reduce_it(3 + ctx.rank))[2]
    ctx.tell("done")
    ctx.listen()
    return text


def mismatched_groups(ctx: Context) -> str | None:
    """Every rank waits in its own group for a rank that waits in another group."""
    begin(ctx)
    n = ctx.world_size
    groups = [dist.new_group([rank, (rank + 1) % n], timeout=timedelta(seconds=TIMEOUT)) for rank in range(n)]
    text = told(lambda: dist.all_reduce(torch.ones(3), group=groups[ctx.rank]))[2]  # mark: waits in a group
    ctx.tell("done")
    ctx.listen()
    return text


@pytest.mark.parametrize("over_hosts", [False, True])
def test_a_call_that_one_rank_skips_names_where_that_rank_is(over_hosts: bool, request: pytest.FixtureRequest) -> None:
    names = request.getfixturevalue("hosts") if over_hosts else None
    with launch(skipped_call, 2, names, env=ENV if over_hosts else {}) as job:
        start(job)
        text = job.wait_rank(0, 20).value
    assert text
    compare("hang_over_hosts_skipped_call" if over_hosts else "hang_skipped_call", text)


@pytest.mark.parametrize("case", ["swapped_calls", "different_shapes"])
@pytest.mark.parametrize("over_hosts", [False, True])
def test_calls_that_do_not_match_are_shown(case: str, over_hosts: bool, request: pytest.FixtureRequest) -> None:
    names = request.getfixturevalue("hosts") if over_hosts else None
    with launch(globals()[case], 2, names, env=ENV if over_hosts else {}) as job:
        start(job)
        for rank in range(2):
            job.hear(rank)
        for rank in range(2):
            job.say(rank, "go")
        text = job.wait_rank(0, 20).value
    compare(f"hang_over_hosts_{case}" if over_hosts else f"hang_{case}", text)


def other_roots(ctx: Context, names: list[str]) -> str | None:
    """Each rank waits for the data of a broadcast whose root, it believes, is the other rank."""
    begin(ctx, names)
    text = told(lambda: dist.broadcast(torch.ones(20_000), 1 - ctx.rank))[2]
    ctx.tell("done")
    ctx.listen()
    return text


def test_ranks_that_wait_for_each_others_data_over_hosts_get_both_calls_at_once(hosts: list[str]) -> None:
    """No data is exchanged, so nothing but a rank's Question shows that the calls differ. The Question comes long
    before the deadline; an error at the deadline would name the deadline."""
    with launch(other_roots, 2, hosts, env=ENV) as job:
        texts = failures(job, 2)
    for text in texts:
        assert "ranks called different operations as number 2 of their group" in text, text
        assert "rank 0 called broadcast(80000 bytes, root 1)" in text, text
        assert "rank 1 called broadcast(80000 bytes, root 0)" in text, text


def two_roots(ctx: Context, names: list[str], count: int) -> str:
    """Each rank calls a broadcast as its root, and then a barrier."""
    begin(ctx, names)
    dist.barrier()

    def calls() -> None:
        dist.broadcast(torch.ones(count), ctx.rank)
        dist.barrier()

    text = told(calls)[2]
    assert text
    ctx.tell("done")
    ctx.listen()
    return text


@pytest.mark.parametrize("count", [2, 20_000, 200_000, 400_000])
def test_two_roots_of_a_broadcast_over_hosts_learn_it_by_their_next_call(count: int, hosts: list[str]) -> None:
    """A root that does not wait for its receivers may learn of the other root only in its next call."""
    with launch(two_roots, 2, hosts, count, env=ENV) as job:
        texts = failures(job, 2)
    calls = [f"rank {rank} called broadcast({count * 4} bytes, root {rank})" for rank in range(2)]
    for text in texts:
        assert "different operations" in text or "agree about barrier() number 4" in text, text
        assert any(call in text for call in calls), text


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_wait_for_each_other_in_different_groups_are_named(ranks: int) -> None:
    """Rank 0 waits for rank 1 in one group, rank 1 for the next rank in another group, and so on round to rank 0."""
    with launch(mismatched_groups, ranks) as job:
        texts = failures(job, ranks)
    circles = [re.search(r"(?m)^  deadlock.*?: (.*)$", text) for text in texts]
    assert any(circles), texts
    for circle in filter(None, circles):
        steps = re.findall(r"rank (\d)(?: waits)? for rank (\d) in", circle[1])
        assert len(steps) == ranks and {a for a, _ in steps} == {str(rank) for rank in range(ranks)}, circle[1]
        assert all(b == steps[(at + 1) % ranks][0] for at, (_, b) in enumerate(steps)), circle[1]
    if ranks == 2:
        # The rank whose deadline passes last may find that the other rank has given up. Then the other rank's text
        # counts.
        first = next(rank for rank in range(ranks) if circles[rank])
        text = re.sub(r"rank ([01])\b", lambda found: f"rank {int(found[1]) ^ first}", texts[first] or "")
        compare("hang_mismatched_groups", re.sub(r"group '\d+'", "group '<name>'", text))


# ---------------------------------------------------------------------------------------------------- the soft limit


#: The soft limit of the tests in seconds.
SOFT = 0.5


def slow(ctx: Context, soft_timeout: float | None = None) -> float:
    """Rank 1 is late. Returns the seconds for which this rank has waited after the test has let rank 1 go on."""
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(soft_timeout=soft_timeout))
    dist.broadcast(torch.ones(2), 0)
    ctx.tell("ready")
    if ctx.rank == 1:
        while not ctx.conn.poll(0):
            time.sleep(0.01)  # mark: slow here
    began = time.monotonic()
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    ended = time.monotonic()
    dist.destroy_process_group()
    return ended - began


@pytest.mark.parametrize(("process", "option"), [(str(SOFT), None), ("0", SOFT)])
def test_one_line_at_the_soft_limit_and_the_operation_goes_on(process: str, option: float | None) -> None:
    """A rank that waits for longer than the soft limit logs one line, even with several pending operations. A rank that
    others wait for logs no line, and nothing fails. The group's option has priority over the limit of the process."""
    with launch(slow, 2, soft_timeout=option, env={"SAGELLM_SOFT_TIMEOUT": process}) as job:
        for rank in range(2):
            job.hear(rank)
        end = time.monotonic() + patience(10)
        while "has waited" not in job.ranks[0].output():
            assert time.monotonic() < end, job.report()
            time.sleep(0.05)
        job.say(1, "go")
        took = job.values()[1]
        lines = [job.ranks[rank].output().splitlines() for rank in range(2)]
    found = [line for line in lines[0] if "has waited" in line]
    assert len(found) == 1, lines
    # Rank 1 reaches the soft limit only if the machine does not run rank 0 for that long.
    assert not lines[1] or took >= SOFT, (took, lines)
    assert f":{line_of('mark: slow here')} in slow" in found[0], found
    compare("hang_soft_limit", found[0])


@pytest.mark.parametrize(("process", "options"), [("0", {}), ("0.5", {"soft_timeout": 0})], ids=["process", "group"])
def test_without_a_soft_limit_nothing_is_logged_and_the_error_says_the_same(
    process: str, options: dict[str, Any]
) -> None:
    with launch(late, 2, "asleep", env={"SAGELLM_SOFT_TIMEOUT": process}, **options) as job:
        start(job)
        text = survivors(job, [0])[0]
        assert not job.ranks[0].output(), job.report()
    compare("hang_asleep", text)


def test_a_soft_limit_below_zero_is_refused() -> None:
    import torch_sagellm

    with pytest.raises(ValueError, match=r"soft_timeout is -1 s, expected 0 \(none\) or more"):
        torch_sagellm.Options(soft_timeout=-1)
    options = torch_sagellm.Options()
    options.soft_timeout = -1
    with pytest.raises(ValueError, match=r"soft_timeout is -1 s, expected 0 \(none\) or more"):
        dist.init_process_group(
            "sagellm", store=dist.HashStore(), rank=0, world_size=1, pg_options=options, timeout=timedelta(seconds=20)
        )


#: The soft limit of `quiet` in seconds.
QUIET = 0.3


def quiet(ctx: Context) -> int:
    """Makes operations for several times the soft limit of the test. Returns how many of them did not end in time,
    because the machine did not run a rank."""
    ctx.init()
    late, before = 0, time.monotonic()
    end = before + 2
    while True:
        going = torch.tensor([float(time.monotonic() < end)])
        for call in (lambda going=going: dist.broadcast(going, 0), lambda: dist.all_reduce(torch.ones(3))):
            call()
            now = time.monotonic()
            late, before = late + (now - before >= QUIET), now
        if not going.item():
            break
    dist.destroy_process_group()
    return late


def test_operations_that_end_in_time_ask_nobody() -> None:
    """A rank logs no more lines than it had late operations. On a machine that does not stall, none is late."""
    with launch(quiet, 2, env={"SAGELLM_SOFT_TIMEOUT": str(QUIET)}) as job:
        for each, late in zip(job.ranks, job.values(), strict=True):
            lines = each.output().splitlines()
            assert len([line for line in lines if "has waited" in line]) <= late, job.report()
            assert late or not lines, job.report()


def recorded(ctx: Context) -> str | None:
    ctx.init(operations=timedelta(seconds=TIMEOUT))
    dist.broadcast(torch.ones(2), 0)
    ctx.tell("ready")
    if ctx.rank == 1:
        ctx.listen()
        return None
    work: Any = dist.all_reduce(torch.ones(3), async_op=True)  # mark: issued here
    text = told(lambda: work.wait())[2]  # mark: waited for here
    ctx.tell("done")
    ctx.listen()
    return text


def test_with_the_option_the_place_of_the_call_is_named_too() -> None:
    """With SAGELLM_CALL_SITES=1 the error names the line that called an asynchronous operation and the line that waits
    for it."""
    with launch(recorded, 2, env={"SAGELLM_CALL_SITES": "1"}) as job:
        for rank in range(2):
            job.hear(rank)
        job.hear(0)
        job.say(0, "go")
        text = job.wait_rank(0, 20).value
        job.say(1, "go")
    called, waits = line_of("mark: issued here"), line_of("mark: waited for here")
    name = Path(__file__).name
    assert re.search(rf"called at [^,]*{name}:{called} in recorded, waiting at [^,]*{name}:{waits} in ", text), text


def ends(ctx: Context) -> None:
    """The process ends while a question to it is open and native code holds the interpreter's lock."""
    ctx.init(operations=timedelta(seconds=TIMEOUT))
    dist.broadcast(torch.ones(2), 0)
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
    ctypes.PyDLL(None).usleep(700_000)


def test_a_process_may_end_while_it_is_asked() -> None:
    """The process neither crashes nor hangs, although the answering thread requests the interpreter's lock while the
    interpreter ends."""
    with launch(ends, 2, env={"SAGELLM_SOFT_TIMEOUT": "0.2"}) as job:
        for rank in range(2):
            assert job.wait_rank(rank, 30).code == 0, job.report()


# ------------------------------------------------------------------------------------------------------ over hosts


def receive_from(rank: int) -> None:
    dist.recv(torch.ones(3), rank)  # mark: receives here


def late_on_hosts(ctx: Context, names: list[str], what: str, victim: int, waits: str = "all") -> Timed | None:
    """Like `late`, on two hosts that meet in a file. ``waits``: all ranks wait in a collective, or rank 0 waits for a
    message from the late rank or from any rank, while the other ranks wait for the test."""
    begin(ctx, names)
    if ctx.rank == victim:
        globals()[what](ctx)
        return None
    if waits != "all" and ctx.rank != 0:
        ctx.listen()
        return None
    found = told(
        {"all": reduce_it, "message": lambda: receive_from(victim), "anyone": lambda: dist.recv(torch.ones(3))}[waits]
    )
    ctx.tell(found[2] if waits == "anyone" else "done")
    ctx.listen()
    return found


@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), (4, 3), (4, 1)])
def test_a_late_rank_on_another_host_is_named_with_its_line(hosts: list[str], ranks: int, victim: int) -> None:
    """The late rank is named even if it is not the rank that connects its host to the others."""
    with launch(late_on_hosts, ranks, hosts, "asleep", victim, env=ENV) as job:
        start(job)
        texts = survivors(job, [rank for rank in range(ranks) if rank != victim], HOSTS_TIMEOUT)
    for text in texts:
        assert f"rank {victim} (" in text and f":{line_of('mark: asleep here')} in asleep" in text, text
        assert f":{line_of('mark: waits here')} in reduce_it" in text, text
    if ranks == 2:
        compare("hang_over_hosts", texts[0])


def test_a_rank_on_another_host_that_is_killed_is_named_at_once(hosts: list[str]) -> None:
    with launch(late_on_hosts, 2, hosts, "asleep", 1, env=ENV) as job:
        start(job)
        time.sleep(0.5)
        job.signal(1, signal.SIGKILL)
        assert job.hear(0) == "done"
        job.say(0, "go")
        began, ended, text = job.wait_rank(0, 20).value
    assert ended - began < HOSTS_TIMEOUT / 2, (began, ended)
    compare("hang_over_hosts_killed", text)


def test_a_stopped_rank_on_another_host_is_named_so(hosts: list[str]) -> None:
    """The stopped rank cannot answer. The other rank of its host sees that the process is stopped."""
    with launch(late_on_hosts, 4, hosts, "asleep", 3, env=ENV) as job:
        for rank in range(4):
            assert job.hear(rank) == "ready"
        job.signal(3, signal.SIGSTOP)
        for rank in range(3):
            job.say(rank, "go")
        texts = survivors(job, [0, 1, 2], HOSTS_TIMEOUT)
    for text in texts:
        assert re.search(r"rank 3 \([^)]*its process is stopped", text), text
    # The text is that of the first rank whose deadline passes. A rank on another host adds the host's name.
    text = re.sub(r"^sagellm: rank \d", "sagellm: rank <rank>", texts[0])
    compare("hang_over_hosts_stopped", re.sub(r"rank 3 \(pid \d+(?:, host [\w.-]+)?,", "rank 3 (<process>,", text))


@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), (4, 3)])
def test_a_sender_on_another_host_that_does_not_come_is_named_with_its_line(
    hosts: list[str], ranks: int, victim: int
) -> None:
    """The rank is named as for a collective, even if no other rank waits."""
    with launch(late_on_hosts, ranks, hosts, "asleep", victim, "message", env=ENV) as job:
        start(job)
        text = survivors(job, [0], HOSTS_TIMEOUT)[0]
    assert f":{line_of('mark: asleep here')} in asleep" in text, text
    assert f"waiting at {__file__}:{line_of('mark: receives here')} in receive_from" in text, text
    if ranks == 2:
        compare("hang_message_over_hosts", text)


def test_a_receive_from_anyone_on_other_hosts_names_what_each_does(hosts: list[str]) -> None:
    with launch(late_on_hosts, 4, hosts, "asleep", 3, "anyone", env=ENV) as job:
        start(job)
        # Does not wait until the ranks exit: the text is enough, and `launch` kills them.
        text = job.hear(0)
    assert f":{line_of('mark: asleep here')} in asleep" in text, text
    for rank in (1, 2, 3):
        assert f"rank {rank} (pid {job.pid(rank)}" in text, text


def test_a_sender_on_another_host_that_is_stopped_is_named_so(hosts: list[str]) -> None:
    with launch(late_on_hosts, 4, hosts, "asleep", 3, "message", env=ENV) as job:
        for rank in range(4):
            assert job.hear(rank) == "ready"
        job.signal(3, signal.SIGSTOP)
        for rank in range(3):
            job.say(rank, "go")
        compare("hang_message_over_hosts_stopped", survivors(job, [0], HOSTS_TIMEOUT)[0])


def test_a_sender_on_another_host_that_is_killed_is_named_at_once(hosts: list[str]) -> None:
    with launch(late_on_hosts, 2, hosts, "asleep", 1, "message", env=ENV) as job:
        start(job)
        time.sleep(0.5)
        job.signal(1, signal.SIGKILL)
        assert job.hear(0) == "done"
        job.say(0, "go")
        began, ended, text = job.wait_rank(0, 20).value
    assert ended - began < HOSTS_TIMEOUT / 2, (began, ended)
    compare("hang_message_over_hosts_killed", text)


def each_receives(ctx: Context, names: list[str]) -> Timed:
    """Two ranks on two hosts that both receive first. Rank 0's deadline passes first."""
    net.enter(names[ctx.rank])
    ctx.init(
        store=dist.FileStore(f"{ctx.tmp}/store", ctx.world_size),
        timeout=timedelta(seconds=30),
        operations=timedelta(seconds=HOSTS_TIMEOUT * (1 + 2 * ctx.rank)),
    )
    ctx.tell("ready")
    ctx.listen()
    found = told(lambda: receive_from(1 - ctx.rank))
    ctx.tell("done")
    ctx.listen()
    return found


def test_two_ranks_on_two_hosts_that_both_receive_first_are_a_circle(hosts: list[str]) -> None:
    with launch(each_receives, 2, hosts, env=ENV) as job:
        start(job)
        text = survivors(job, [0, 1], HOSTS_TIMEOUT)[0]
    if text.startswith("sagellm: rank 1 "):  # rank 1's deadline passed first
        text = re.sub(r"rank ([01])", lambda found: f"rank {1 - int(found[1])}", text)
    compare("hang_message_over_hosts_circle", text)


# ------------------------------------------------------------------------------------------------ under a delegate


@pytest.mark.parametrize("ranks", [2, 3])
def test_under_a_delegate_the_line_that_a_late_rank_is_at_is_named(ranks: int) -> None:
    """Every rank that waits names the line, although the delegate cannot name ranks."""
    with launch(late, ranks, "asleep", engine="delegate") as job:
        start(job)
        texts = survivors(job, [rank for rank in range(ranks) if rank != 1])
    for text in texts:
        assert f"{Path(__file__).name}:{line_of('mark: asleep here')} in asleep" in text, text
        assert f"waiting at {__file__}:{line_of('mark: waits here')} in reduce_it" in text, text
    if ranks == 2:
        compare("hang_under_delegate", texts[0])


def test_under_a_delegate_a_stopped_rank_is_named_so() -> None:
    with launch(late, 2, "asleep", engine="delegate") as job:
        for rank in range(2):
            assert job.hear(rank) == "ready"
        job.signal(1, signal.SIGSTOP)
        job.say(0, "go")
        compare("hang_under_delegate_stopped", survivors(job, [0])[0])


def late_with_a_future(ctx: Context) -> Timed | None:
    """Waits as DDP does: for the future of an operation that several ranks have in flight."""
    begin(ctx, engine="delegate")
    if ctx.rank == 1:
        asleep(ctx)
        return None
    work: Any = dist.all_reduce(torch.ones(3), async_op=True)
    found = told(lambda: work.get_future().wait())
    ctx.tell("done")
    ctx.listen()
    return found


def test_under_a_delegate_a_future_names_the_line_as_well() -> None:
    with launch(late_with_a_future, 2) as job:
        start(job)
        text = survivors(job, [0])[0]
    assert f"{Path(__file__).name}:{line_of('mark: asleep here')} in asleep" in text, text


def late_after_a_refused_call(ctx: Context) -> Timed | None:
    """Rank 0 makes a call that the delegate refuses. Later rank 1 is late."""
    import torch_sagellm

    begin(ctx, engine="delegate")
    if ctx.rank == 0:
        expect_raises(RuntimeError, lambda: dist.all_gather([torch.ones(3)], torch.ones(3)))
        assert torch_sagellm.get_stats()["failed_count"] == 0, "nothing was sent that could fail"
    reduce_it()
    assert torch_sagellm.recover(timeout=60) is dist.group.WORLD
    if ctx.rank == 1:
        asleep(ctx)
        return None
    found = told(reduce_it)
    ctx.tell("done")
    ctx.listen()
    return found


def test_a_call_that_the_delegate_refuses_takes_no_number() -> None:
    """Rule 2: the refused call sent nothing. The group stays healthy, and a later hang names only the late rank."""
    with launch(late_after_a_refused_call, 3) as job:
        start(job)
        texts = survivors(job, [0, 2])
    for text in texts:
        assert "number 3" in text and "rank 1 (" in text and "asleep" in text, text
        assert "rank 0 (" not in text and "rank 2 (" not in text, text
