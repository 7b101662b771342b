"""`torch_sagellm.recover`: the survivors agree on who is left and continue in a new group, or all fail."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Job, beyond_gloo, expect_raises, launch, monitored_barrier
from helpers import has_stopped, nothing_left, until
from limits import patience
from net import INTERFACE, Network, Unavailable, enter, run

pytestmark = beyond_gloo("it cannot recover a group")

#: A deadline for events that must happen long before it.
FAR = timedelta(seconds=120)
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
BETWEEN = {"GLOO_SOCKET_IFNAME": "eth0"}


def adds(members: list[int], first: int) -> None:
    """Checks that the default group can sum and can create a group. `members` has its ranks' numbers in the first
    group; `first` is this rank's number there."""
    place = members.index(first)
    assert (dist.get_world_size(), dist.get_rank()) == (len(members), place)
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(len(members)))
    value = torch.full((70_000,), float(first + 1))
    dist.all_reduce(value)
    assert (value == sum(rank + 1 for rank in members)).all(), (members, value[0])
    other = dist.new_group(list(range(len(members))))
    gathered: list[int | None] = [None] * len(members)
    dist.all_gather_object(gathered, first, group=other)
    assert gathered == members
    source = torch.tensor([float(place)])
    dist.broadcast(source, src=len(members) - 1)
    assert source.item() == len(members) - 1


def until_it_fails() -> str:
    """Calls collectives until one fails. Returns the error's text."""
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
    except RuntimeError as error:
        return str(error)


def survives(ctx: Context, victims: list[int], engine: str, timeout: float) -> float:
    """Works until ranks die, recovers, and works again. Returns the seconds that the recovery took."""
    import torch_sagellm

    ctx.init(timeout=FAR, pg_options=torch_sagellm.Options(engine=engine))
    ctx.tell("ready")
    until_it_fails()
    begin = time.monotonic()
    new = torch_sagellm.recover(timeout=timeout)
    took = time.monotonic() - begin
    assert new is dist.group.WORLD
    adds([rank for rank in range(ctx.world_size) if rank not in victims], ctx.rank)
    options = new._get_backend(torch.device("cpu")).options
    assert options._timeout == FAR, "operations keep the timeout of the old group"
    dist.barrier()
    dist.destroy_process_group()
    return took


def kill_them(job: Job, victims: list[int]) -> None:
    for rank in range(len(job.ranks)):
        assert job.hear(rank) == "ready"
    for victim in victims:
        job.signal(victim, signal.SIGKILL)


def end_well(job: Job, ranks: list[int], seconds: float = 90) -> list[Any]:
    outcomes = [job.wait_rank(rank, seconds) for rank in ranks]
    assert all(each.code == 0 and each.error is None for each in outcomes), job.report()
    return [each.value for each in outcomes]


@pytest.mark.parametrize("victims", [[2], [0], [1, 3], [0, 1, 2]], ids=str)
def test_the_survivors_of_kill_9_go_on(victims: list[int]) -> None:
    """One rank, rank 0, two ranks, or all but one are killed. The recovery does not wait for a deadline."""
    left = [rank for rank in range(4) if rank not in victims]
    with launch(survives, 4, victims, "auto", 60.0) as job:
        kill_them(job, victims)
        times = end_well(job, left)
    assert max(times) < 30, f"at a deadline, perhaps: {times} s"
    nothing_left(each.pid for each in job.ranks)


def test_where_a_delegate_serves_the_group_the_dead_are_found_by_their_ports() -> None:
    """No socket of ours connects the ranks. On one host their ports are at the loopback address."""
    with launch(survives, 3, [1], "delegate", 60.0, env=LOOPBACK) as job:
        kill_them(job, [1])
        times = end_well(job, [0, 2])
    assert max(times) < 30, f"at a deadline, perhaps: {times} s"


def without_evidence(ctx: Context) -> None:
    """No rank can open a port, and rank 1 dies."""
    import torch_sagellm
    from torch_sagellm._private import alive

    alive._listen = no_port
    ctx.init(timeout=FAR, pg_options=torch_sagellm.Options(engine="delegate"))
    ctx.tell("ready")
    until_it_fails()
    text = expect_raises(torch_sagellm.CommTimeoutError, lambda: torch_sagellm.recover(timeout=3))
    assert "rank 1 (not known to be gone)" in text and "leave_silent=True" in text, text
    torch_sagellm.recover(timeout=3, leave_silent=True)
    adds([0, 2], ctx.rank)
    dist.barrier()
    dist.destroy_process_group()


def no_port(address: str) -> Any:
    raise OSError(24, "Too many open files")


def test_a_rank_without_a_port_is_left_out_only_where_the_caller_says_so() -> None:
    with launch(without_evidence, 3, env=LOOPBACK) as job:
        kill_them(job, [1])
        end_well(job, [0, 2])
        assert "cannot tell whether this process runs" in job.ranks[0].output()


def dies_meanwhile(ctx: Context, at: str) -> None:
    """Rank 3 has died and the other ranks recover; rank 1 dies in the step `at` of this recovery."""
    import torch_sagellm
    from torch_sagellm.api import recovery

    ctx.init(timeout=FAR)
    ctx.tell("ready")
    until_it_fails()
    if ctx.rank == 1:
        holder: Any = recovery._Conversation if at != "built" else recovery._Building
        name = {"called": "_agree_on_members", "decided": "_build", "built": "take"}[at]
        setattr(holder, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if at == "built":  # after its group was created, and before its peers know that
            tell = recovery._Conversation._tell

            def last_word(self: Any, **facts: Any) -> None:
                if facts.get("built"):
                    os.kill(os.getpid(), signal.SIGKILL)
                tell(self, **facts)

            recovery._Conversation._tell = last_word  # type: ignore[method-assign]
    torch_sagellm.recover(timeout=60)
    adds([0, 2], ctx.rank)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("at", ["called", "decided", "built"])
def test_a_second_death_while_the_others_recover(at: str) -> None:
    """Rank 1 dies before its call, after the ranks have decided to include it, or when it has its new group."""
    with launch(dies_meanwhile, 4, at) as job:
        kill_them(job, [3])
        end_well(job, [0, 2], 60)
    nothing_left(each.pid for each in job.ranks)


def twice(ctx: Context) -> None:
    """Recovers a group that was recovered before."""
    import torch_sagellm

    ctx.init(timeout=FAR)
    members = list(range(ctx.world_size))
    for victim in (0, 2):
        ctx.tell("ready")
        until_it_fails()
        torch_sagellm.recover(timeout=60)
        members.remove(victim)
        adds(members, ctx.rank)
    ctx.tell("ready")
    dist.barrier()
    dist.destroy_process_group()


def test_a_recovered_group_is_recovered_again() -> None:
    with launch(twice, 4) as job:
        left = [0, 1, 2, 3]
        for victim in (0, 2):
            for rank in left:
                assert job.hear(rank) == "ready"
            job.signal(victim, signal.SIGKILL)
            left.remove(victim)
        end_well(job, left)


def waits_elsewhere(ctx: Context) -> None:
    """Rank 2 waits for a message from rank 0, which does not need rank 1. Rank 2 must learn that the others recover.

    Rank 1 dies without a call. If it had joined rank 0's call, its data would still be available after its death. Rank
    0 would then miss only rank 2, which lives, and would wait for it until the deadline (rule 21).
    """
    import torch_sagellm

    ctx.init(timeout=FAR)
    dist.barrier()
    ctx.tell("ready")
    if ctx.rank == 1:
        ctx.listen(FAR.total_seconds())  # until it is killed
    waits = {0: until_it_fails, 2: lambda: expect_raises(RuntimeError, lambda: dist.recv(torch.ones(4), 0))}
    text = waits[ctx.rank]()
    assert "Timed out" not in text, text
    torch_sagellm.recover(timeout=60)
    adds([0, 2], ctx.rank)
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_waits_for_a_survivor_hears_of_it() -> None:
    with launch(waits_elsewhere, 3) as job:
        kill_them(job, [1])
        end_well(job, [0, 2], 60)


def healthy(ctx: Context) -> None:
    import torch_sagellm

    ctx.init()
    world = dist.group.WORLD
    for _ in range(3):
        assert torch_sagellm.recover(timeout=60) is world, "nothing has failed"
    adds([0, 1, 2], ctx.rank)
    text = expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(2 + (ctx.rank == 1))))
    assert "all_reduce" in text
    new = torch_sagellm.recover(timeout=60)
    assert new is not world and new is dist.group.WORLD
    adds([0, 1, 2], ctx.rank)
    expect_raises(ValueError, lambda: torch_sagellm.recover(world))
    dist.barrier()
    dist.destroy_process_group()
    expect_raises(ValueError, torch_sagellm.recover)


def test_with_no_rank_gone() -> None:
    """`recover` returns a healthy group unchanged. A group with a failure is replaced by a new group of the same
    ranks."""
    with launch(healthy, 3) as job:
        end_well(job, [0, 1, 2])


def without_the_group_of_rank_1(ctx: Context, how: str) -> tuple[str, Any]:
    """Rank 1 does not get its new group, because of an error with the words of a deadline or because rank 1 is late."""
    import torch_sagellm
    from torch_sagellm._private import groups
    from torch_sagellm.api import recovery

    def fails(self: Any, without: list[int], options: Any) -> None:
        self.error = RuntimeError("rank 0 (mine) Timed out after 5 s in the loader")
        self._ended.set()

    ctx.init(timeout=FAR)
    dist.barrier()
    if ctx.rank == 1:
        recovery._Building._run = fails if how == "fails" else lambda *_: None  # type: ignore[method-assign]
    groups.backend_of(dist.group.WORLD).abort()
    with pytest.raises(dist.DistBackendError) as raised:
        torch_sagellm.recover(timeout=5)
    error = raised.value
    return str(error), error.missing_ranks if isinstance(error, torch_sagellm.CommTimeoutError) else None


@pytest.mark.parametrize("how", ["fails", "is late"])
def test_the_words_of_a_ranks_error_do_not_choose_the_class(how: str) -> None:
    with launch(without_the_group_of_rank_1, 2, how) as job:
        for text, missing in job.values(60):
            if how == "fails":
                assert missing is None and "rank 1 could not make the new group: rank 0 (mine) Timed out" in text, text
            else:
                assert missing == [0, 1] and "Timed out after 5 s: rank 0 (alive), rank 1 (alive)" in text, text


def beside_one_that_is_stopped(ctx: Context) -> None:
    import torch_sagellm

    ctx.init(timeout=FAR)
    ctx.tell("ready")
    if ctx.rank == 1:
        until_it_fails()
        torch_sagellm.recover(timeout=60)
        adds([0, 1, 2], ctx.rank)
        dist.barrier()
        dist.destroy_process_group()
        return
    ctx.listen()
    dist.group.WORLD.abort()
    text = expect_raises(torch_sagellm.CommTimeoutError, lambda: torch_sagellm.recover(timeout=1.5))
    assert "rank 1 (alive" in text and "rank 2 (" not in text and "rank 0 (" not in text, text
    ctx.tell(text)
    ctx.listen()
    torch_sagellm.recover(timeout=60)
    adds([0, 1, 2], ctx.rank)
    dist.barrier()
    dist.destroy_process_group()


def test_a_stopped_rank_is_named_and_never_left_out() -> None:
    """When the stopped rank continues, all ranks recover."""
    with launch(beside_one_that_is_stopped, 3) as job:
        for rank in range(3):
            assert job.hear(rank) == "ready"
        job.signal(1, signal.SIGSTOP)
        for rank in (0, 2):
            job.say(rank, "go")
        for rank in (0, 2):
            job.hear(rank)
        job.signal(1, signal.SIGCONT)
        for rank in (0, 2):
            job.say(rank, "again")
        end_well(job, [0, 1, 2])


def left_out(ctx: Context) -> str:
    """A delegate's group without ports. The survivors allow `recover` to exclude a silent rank."""
    import torch_sagellm
    from torch_sagellm._private import alive

    alive._listen = no_port
    ctx.init(timeout=FAR, pg_options=torch_sagellm.Options(engine="delegate"))
    if ctx.rank == 1:
        ctx.listen()
        text = expect_raises(dist.DistBackendError, lambda: torch_sagellm.recover(timeout=60))
        assert "went on without rank 1" in text and "[0, 2]" in text, text
        os._exit(0)
    torch_sagellm.recover(timeout=2, leave_silent=True)
    adds([0, 2], ctx.rank)
    ctx.tell("done")
    dist.destroy_process_group()
    return ""


def test_a_rank_that_was_left_out_is_told_so() -> None:
    with launch(left_out, 3, env=LOOPBACK) as job:
        for rank in (0, 2):
            assert job.hear(rank) == "done"
        job.say(1, "late")
        end_well(job, [0, 1, 2])


def of_some(ctx: Context) -> None:
    """A group of some ranks, in another order, recovers. The default group stays unchanged."""
    import torch_sagellm

    ctx.init(timeout=FAR)
    world = dist.group.WORLD
    some = dist.new_group([3, 1, 2])
    ctx.tell("ready")
    if ctx.rank == 0:
        ctx.listen()
        return
    try:
        while True:
            dist.all_reduce(torch.ones(1000), group=some)
    except RuntimeError:
        pass
    new = torch_sagellm.recover(some, timeout=60)
    assert dist.group.WORLD is world and dist.get_process_group_ranks(new) == [1, 3]
    assert dist.get_rank(new) == [1, 3].index(ctx.rank)
    value = torch.tensor([float(ctx.rank)])
    dist.broadcast(value, src=3, group=new)
    assert value.item() == 3
    dist.barrier(group=new)


def test_a_group_of_some_ranks() -> None:
    with launch(of_some, 4) as job:
        kill_them(job, [2])
        end_well(job, [1, 3])
        job.say(0, "end")


def without_a_store(ctx: Context) -> str:
    """Rank 0 only serves the store. Ranks 1 and 2 are the group."""
    import torch_sagellm

    path = Path(ctx.tmp) / "port"
    if ctx.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
        ctx.tell("ready")
        ctx.listen()
        return ""
    while not path.exists():
        time.sleep(0.01)
    store = dist.TCPStore("127.0.0.1", int(path.read_text()), 3, timeout=timedelta(seconds=60))
    ctx.init(timeout=FAR, store=store, rank=ctx.rank - 1, world_size=2)
    dist.barrier()
    ctx.tell("ready")
    ctx.listen()
    dist.group.WORLD.abort()
    begin = time.monotonic()
    text = expect_raises(dist.DistBackendError, lambda: torch_sagellm.recover(timeout=3))
    assert time.monotonic() - begin < 20, "not until the timeout of the store"
    return text


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "store of the group is gone"), (signal.SIGSTOP, "does not answer")]
)
def test_without_a_store_there_is_an_error_that_says_so(number: signal.Signals, words: str) -> None:
    with launch(without_a_store, 3) as job:
        for rank in range(3):
            assert job.hear(rank) == "ready"
        job.signal(0, number)
        if number == signal.SIGKILL:
            job.wait_rank(0)
        for rank in (1, 2):
            job.say(rank, "go")
        for text in end_well(job, [1, 2]):
            assert words in text and "torchrun" in text, text


def on_host(ctx: Context, names: list[str], engine: str = "auto") -> None:
    """Creates the default group over two hosts."""
    import torch_sagellm

    enter(names[ctx.rank // 2])
    store = dist.FileStore(f"{ctx.tmp}/store", ctx.world_size)
    ctx.init(store=store, timeout=FAR, pg_options=torch_sagellm.Options(engine=engine))
    described = dist.group.WORLD._get_backend(torch.device("cpu")).describe()
    assert (" hosts with " in described) == (engine == "auto"), described


def over_hosts(ctx: Context, names: list[str], engine: str, victims: list[int]) -> float:
    """Returns the time at which the rank continued, by a clock that all processes of this machine share."""
    import torch_sagellm

    on_host(ctx, names, engine)
    ctx.tell("ready")
    until_it_fails()
    torch_sagellm.recover(timeout=60)
    at = time.monotonic()
    adds([rank for rank in range(ctx.world_size) if rank not in victims], ctx.rank)
    dist.barrier()
    dist.destroy_process_group()
    return at


@pytest.mark.parametrize("victims", [[3], [0, 1], [1, 2, 3]], ids=["one of a host", "a whole host", "all but one"])
@pytest.mark.parametrize("engine", ["auto", "delegate"])
def test_over_two_hosts(hosts: list[str], engine: str, victims: list[int]) -> None:
    """A kill -9 is detected immediately, even if it hits all ranks of a host, because the host's kernel still refuses
    connections."""
    left = [rank for rank in range(4) if rank not in victims]
    with launch(over_hosts, 4, hosts, engine, victims, env=BETWEEN) as job:
        kill_them(job, victims)
        killed = time.monotonic()
        took = max(end_well(job, left)) - killed
    assert took < 30, f"at a deadline, perhaps: {took} s"


def after_what_only_elapsed(ctx: Context, names: list[str], engine: str, what: str) -> None:
    """Rank 0 waits for a message from rank 2, or in a monitored barrier, until its timeout. All ranks live."""
    import torch_sagellm

    on_host(ctx, names, engine)
    world = dist.group.WORLD
    dist.barrier()
    ctx.tell("ready")
    ctx.listen()
    if ctx.rank == 0:
        backend = world._get_backend(torch.device("cpu"))
        backend._set_default_timeout(timedelta(seconds=1.5))
        late = timedelta(seconds=1.5)
        waits = {"message": lambda: dist.recv(torch.ones(4), 2), "barrier": lambda: monitored_barrier(late)}
        expect_raises(RuntimeError, waits[what])
        backend._set_default_timeout(FAR)
        torch_sagellm.reset_stats()
        ctx.tell("elapsed")
    # Our own monitored barrier does not poison the group.
    survives = engine == "auto" and what == "barrier"
    assert (torch_sagellm.recover(timeout=60) is world) == survives
    value = torch.tensor([float(ctx.rank)])
    if ctx.rank == 2:
        dist.send(value, 0)
    elif ctx.rank == 0:
        dist.recv(value, 2)
        assert value.item() == 2
    adds([0, 1, 2, 3], ctx.rank)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("engine", "what"), [("auto", "message"), ("auto", "barrier"), ("delegate", "message"), ("delegate", "barrier")]
)
def test_over_two_hosts_with_no_rank_gone(hosts: list[str], engine: str, what: str) -> None:
    """A group is replaced if a message timed out in it, or if gloo has closed connections."""
    with launch(after_what_only_elapsed, 4, hosts, engine, what, env=BETWEEN) as job:
        for rank in range(4):
            assert job.hear(rank) == "ready"
        job.say(0, "go")
        assert job.hear(0) == "elapsed"
        for rank in (1, 2, 3):
            job.say(rank, "go")
        end_well(job, [0, 1, 2, 3])


def beside_a_silent_host(ctx: Context, names: list[str]) -> float:
    """The link to the other host goes down. For ranks 0 and 1 nothing has failed before."""
    import torch_sagellm

    on_host(ctx, names)
    ctx.tell("ready")
    ctx.listen()
    dist.group.WORLD.abort()
    text = expect_raises(torch_sagellm.CommTimeoutError, lambda: torch_sagellm.recover(timeout=4))
    assert all(f"rank {rank} (not known to be gone)" in text for rank in (2, 3)), text
    begin = time.monotonic()
    torch_sagellm.recover(timeout=4, leave_silent=True)
    took = time.monotonic() - begin
    adds([0, 1], ctx.rank)
    dist.destroy_process_group()
    return took


def test_a_host_that_is_silent_is_left_out_only_where_the_caller_says_so(hosts: list[str]) -> None:
    """The silent host's ranks may live; nothing shows that they are dead."""
    with launch(beside_a_silent_host, 4, hosts, env=BETWEEN) as job:
        for rank in range(4):
            assert job.hear(rank) == "ready"
        run("ip", "-n", hosts[1], "link", "set", INTERFACE, "down")
        for rank in (0, 1):
            job.say(rank, "go")
        assert min(end_well(job, [0, 1])) >= 3.9


def over_odd_hosts(ctx: Context, names: list[str], victim: int) -> None:
    """One rank on each host. Rank 1 is killed or stopped."""
    import torch_sagellm

    enter(names[ctx.rank])
    ctx.init(store=dist.FileStore(f"{ctx.tmp}/store", 2), timeout=FAR)
    ctx.tell("ready")
    ctx.listen()
    dist.group.WORLD.abort()
    if victim:
        limit = patience(1.5)  # on a busy machine the store is slow too
        text = expect_raises(torch_sagellm.CommTimeoutError, lambda: torch_sagellm.recover(timeout=limit))
        assert "rank 1 (alive" in text, text
    else:
        torch_sagellm.recover(timeout=60)
        adds([0], 0)
    dist.destroy_process_group()


def stop(job: Job, rank: int) -> None:
    """Stops a rank, and waits until no thread of it runs."""
    job.signal(rank, signal.SIGSTOP)
    until(lambda: has_stopped(job.ranks[rank].pid), 10, f"the stop of rank {rank}")


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock of this file and does not release it."""
    with path.open("rb+") as file:
        for _ in range(40):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.005)
            else:
                return False
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("families", ["6", "46"])
@pytest.mark.parametrize("interfaces", ["eth0", "eth0,lo", ""])
def test_the_dead_are_told_from_the_stopped_whatever_the_addresses(
    families: str, interfaces: str, number: signal.Signals
) -> None:
    try:
        with (
            Network(2, families=families) as network,
            launch(
                over_odd_hosts, 2, network.names, int(number == signal.SIGSTOP), env={"GLOO_SOCKET_IFNAME": interfaces}
            ) as job,
        ):
            for rank in range(2):
                assert job.hear(rank) == "ready"
            # A rank that is stopped in the middle of a request keeps the file's lock, so no other rank gets it. A rank
            # that is killed while it writes leaves half an entry, and torch's FileStore waits for ever for the rest.
            stop(job, 1)
            while is_locked(job.tmp / "store"):
                job.signal(1, signal.SIGCONT)
                time.sleep(0.05)
                stop(job, 1)
            job.signal(1, number)
            job.say(0, "go")
            end_well(job, [0])
    except Unavailable as reason:
        pytest.skip(f"network namespaces may not be made here: {reason}")


def beside_a_stopped_host(ctx: Context, names: list[str]) -> None:
    import torch_sagellm

    on_host(ctx, names)
    ctx.tell("ready")
    if ctx.rank < 2:
        ctx.listen()
        dist.group.WORLD.abort()
        text = expect_raises(torch_sagellm.CommTimeoutError, lambda: torch_sagellm.recover(timeout=3))
        assert "rank 2 (alive" in text and "rank 3 (alive" in text and "rank 1 (" not in text, text
        ctx.tell(text)
        ctx.listen()
    else:
        until_it_fails()
    torch_sagellm.recover(timeout=60)
    adds([0, 1, 2, 3], ctx.rank)
    dist.barrier()
    dist.destroy_process_group()


def test_a_host_whose_ranks_are_stopped_is_never_left_out(hosts: list[str]) -> None:
    """The kernel still answers for the stopped ranks. When they continue, all ranks recover."""
    with launch(beside_a_stopped_host, 4, hosts, env=BETWEEN) as job:
        for rank in range(4):
            assert job.hear(rank) == "ready"
        for rank in (2, 3):
            job.signal(rank, signal.SIGSTOP)
        for rank in (0, 1):
            job.say(rank, "go")
        for rank in (0, 1):
            job.hear(rank)
        for rank in (2, 3):
            job.signal(rank, signal.SIGCONT)
        for rank in (0, 1):
            job.say(rank, "again")
        end_well(job, [0, 1, 2, 3])


def refused(ctx: Context) -> None:
    import torch_sagellm

    dist.init_process_group("gloo", store=ctx.store(), rank=ctx.rank, world_size=ctx.world_size)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("of backend 'gloo'", torch_sagellm.recover),
        ("no member", lambda: torch_sagellm.recover(dist.GroupMember.NON_GROUP_MEMBER)),
    ]
    for words, call in cases:
        assert words in expect_raises(ValueError, call)
    ours = dist.new_group(backend="sagellm")
    assert "more than 0" in expect_raises(ValueError, lambda: torch_sagellm.recover(ours, timeout=0))
    dist.barrier(group=ours)


def test_wrong_groups_are_refused() -> None:
    with launch(refused, 2) as job:
        end_well(job, [0, 1])


def test_torchs_part_of_a_shrink_is_what_recover_uses() -> None:
    """Fails if a new torch installs a new backend differently. `recovery` must then be adapted."""
    import inspect

    from torch.distributed import distributed_c10d as c10d

    assert list(inspect.signature(c10d._finalize_shrunk_group).parameters) == [
        "group_info",
        "excluded_ranks_set",
        "new_backend",
    ]
    source = inspect.getsource(c10d._finalize_shrunk_group)
    assert 'group_info["process_group"]' in source and 'group_info["is_default_group"]' in source
    assert source.count("group_info[") == 2, "it reads nothing else"
    assert "excluded_ranks_set" in source and "get_process_group_ranks(target_pg)" in source


def strangers(ctx: Context) -> str:
    """A stranger has written bytes under every key of a recovery, and under the keys of its ports."""
    import torch_sagellm
    from torch_sagellm._private import alive
    from torch_sagellm.api import recovery

    ctx.init(timeout=FAR, pg_options=torch_sagellm.Options(engine="delegate"))
    dist.barrier()
    store = dist.group.WORLD._get_backend(torch.device("cpu"))._store
    bytes_ = "\x1b[2J\x07\x00\x9b".encode("latin1")
    if ctx.rank == 0:
        for rank in range(2):
            store.set(f"{alive.PREFIX}/{rank}", bytes_)
        store.add(f"{recovery.PREFIX}/0/news", 3)
        news = (bytes_, b"[]", b'{"rank": 0, "gone": ["x"], "sees": 1}')
        for place, said in enumerate(news, start=1):
            store.set(f"{recovery.PREFIX}/0/news/{place}", said)
    dist.barrier()
    assert torch_sagellm.recover(timeout=60) is dist.group.WORLD
    dist.barrier()
    if ctx.rank == 0:
        store.set(f"{recovery.PREFIX}/0/members", bytes_)
    dist.barrier()
    return expect_raises(dist.DistBackendError, lambda: torch_sagellm.recover(timeout=3))


def test_what_strangers_write_into_the_store_ends_in_no_terminal() -> None:
    with launch(strangers, 2) as job:
        for text in job.values():
            assert text.isprintable() and "no list of members" in text, repr(text)
