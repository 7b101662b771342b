"""Forked children: data-loader workers run during a live group, and a child that calls a collective is refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, launch, monitored_barrier, run_fresh
from limits import patience
from net import INTERFACE, enter
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset[torch.Tensor]):
    """A dataset of numbers and their squares."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(index * index)])


def loader(ctx: Context) -> None:
    ctx.init()
    total = torch.zeros(2)
    for batch in DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context="fork"):
        mine = batch.sum(0)
        dist.all_reduce(mine)
        total += mine
    assert total.tolist() == [2.0 * sum(range(64)), 2.0 * sum(i * i for i in range(64))]
    dist.destroy_process_group()


@pytest.mark.quick
def test_rule_26_data_loader_workers_with_a_live_group() -> None:
    """Rule 26 and pitfall 11: workers are forked while the group works, and exit without harm to it."""
    run_fresh(loader, 2, normal_exit=True)


def child_calls(ctx: Context) -> None:
    ctx.init()
    dist.all_reduce(torch.ones(1))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "nothing was raised"
        try:
            dist.all_reduce(torch.ones(1))
        except (ValueError, RuntimeError) as error:
            text = str(error)
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    text = os.read(read, 10_000).decode()
    os.waitpid(pid, 0)
    assert "fork" in text, text
    found = torch.ones(3)
    dist.all_reduce(found)
    assert found.tolist() == [2.0] * 3
    dist.destroy_process_group()


@beyond_gloo("hangs")
@pytest.mark.quick
def test_rule_26_a_forked_child_is_refused_and_the_group_goes_on() -> None:
    """Rule 26: the child never writes to the segment."""
    run_fresh(child_calls, 2, normal_exit=True)


def child_exits(ctx: Context) -> None:
    ctx.init()
    work: Any = dist.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    pid = os.fork()
    if pid == 0:
        raise SystemExit(4)  # the whole finalisation runs, with the parent's group and Work alive in the copied memory
    end = time.monotonic() + 10
    status = 0
    done = 0
    while not done:
        assert time.monotonic() < end, "the child hangs at its end"
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 4
    found = torch.ones(3)
    dist.all_reduce(found)
    assert found.tolist() == [2.0] * 3
    dist.destroy_process_group()


@beyond_gloo("its destructor may hang in the child")
def test_rule_26_a_forked_child_that_ends_normally_harms_no_rank() -> None:
    """The child runs atexit handlers and destructors on its copy of the group. The parent's ranks continue."""
    run_fresh(child_exits, 2, normal_exit=True)


def child_uses_what_it_inherited(ctx: Context) -> None:
    """While the parent is stopped, the child tries to drive and to abort the parent's pending operations."""
    ctx.init()
    numbers = torch.arange(4 << 20, dtype=torch.float32) % 1000
    mine = numbers * (ctx.rank + 1)
    if ctx.rank == 1:
        ctx.listen()
        dist.all_reduce(mine)
        dist.all_reduce(torch.eye(2).to_sparse())
        assert torch.equal(mine, numbers * 3)
        dist.destroy_process_group()
        return
    work: Any = dist.all_reduce(mine, async_op=True)
    sparse: Any = dist.all_reduce(torch.eye(2).to_sparse(), async_op=True)  # a callback thread ends this operation
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        os.kill(os.getppid(), signal.SIGSTOP)  # from here on only the child could advance the operation
        try:
            ctx.tell("forked")  # makes rank 1 call, so that the operation could advance
            waits = [lambda: work.get_future().wait(), lambda: work.get_future_result().wait(), sparse.wait]
            for call in (work.wait, backend.abort, backend.shutdown, backend._stats, *waits):
                try:
                    call()
                    said.append("nothing was raised")
                except (ValueError, RuntimeError) as error:
                    said.append(str(error))
        finally:
            os.kill(os.getppid(), signal.SIGCONT)
            os.write(write, "\n".join(said).encode())
            os._exit(0)
    os.close(write)
    texts = os.read(read, 10_000).decode().split("\n")
    os.waitpid(pid, 0)
    assert "forked child" in texts[0], texts
    assert texts[1:3] == ["nothing was raised"] * 2, texts
    assert all("forked child" in text for text in texts[3:]) and len(texts) == 7, texts
    work.wait()
    sparse.wait()
    assert torch.equal(mine, numbers * 3)
    dist.destroy_process_group()


@beyond_gloo("the child uses its parent's connections")
def test_rule_26_a_forked_child_cannot_move_what_its_parent_has_pending() -> None:
    """Rule 26: wait, abort and shutdown of objects that a child inherited do not change the parent's memory."""
    with launch(child_uses_what_it_inherited, 2, normal_exit=True) as job:
        assert job.hear(0) == "forked"
        job.say(1, "go on")
        job.values(60)


def child_uses_an_inherited_delegate(ctx: Context, names: list[str]) -> None:
    """The child waits for Works that its parent has pending, and makes calls: in a delegate's group or, with `names`,
    in a group over two hosts."""
    import torch_sagellm

    if names:
        enter(names[ctx.rank])
    store = dist.FileStore(f"{ctx.tmp}/store", ctx.world_size)
    ctx.init(store=store, pg_options=torch_sagellm.Options(engine="auto" if names else "delegate"))
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    done: Any = dist.all_reduce(torch.ones(3), async_op=True)
    done.wait()
    if ctx.rank == 1:
        ctx.listen()
        dist.all_reduce(torch.ones(3))
        dist.send(torch.ones(3), 0)
        dist.barrier()
        dist.destroy_process_group()
        return
    reduced, received = torch.ones(3), torch.zeros(3)
    collective: Any = dist.all_reduce(reduced, async_op=True)
    message: Any = dist.irecv(received, 1)
    waiter = threading.Thread(target=message.wait)
    waiter.start()  # so that a thread waits for a message at the fork and holds its locks
    # Settings that this package passes on to the delegate.
    hook = [group._enable_collectives_timing, lambda: backend._set_default_timeout(timedelta(seconds=5))]
    refused = [
        collective.wait,
        lambda: collective.get_future().wait(),
        message.wait,
        lambda: monitored_barrier(timedelta(seconds=5)),
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.send(torch.ones(3), 1),
        lambda: dist.recv(torch.ones(3), 1),
        dist.barrier,
        *(hook if not names else []),
    ]
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(patience(20)))  # ends a child that hangs
        for call in [done.wait, backend.abort, group._wait_for_pending_works, *refused]:
            try:
                call()
                os.write(write, b"nothing was raised\n")
            except (ValueError, RuntimeError) as error:
                os.write(write, str(error).replace("\n", " ").encode() + b"\n")
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        texts = lines.read().splitlines()
    os.waitpid(pid, 0)
    assert texts[:3] == ["nothing was raised"] * 3, texts
    assert all("forked child" in text for text in texts[3:]) and len(texts) == 3 + len(refused), texts
    ctx.tell("forked")
    collective.wait()
    waiter.join()
    dist.barrier()
    assert reduced.tolist() == [2.0] * 3 and received.tolist() == [1.0] * 3
    dist.destroy_process_group()


def end_beside_a_child(names: list[str]) -> None:
    interface = {"GLOO_SOCKET_IFNAME": INTERFACE if names else "lo"}
    with launch(child_uses_an_inherited_delegate, 2, names, env=interface, normal_exit=True) as job:
        assert job.hear(0, 60) == "forked"
        job.say(1, "go on")
        job.values(60)


@beyond_gloo("the child uses its parent's connections")
def test_rule_26_a_forked_child_of_a_delegated_group_is_refused() -> None:
    """Rule 26: every wait ends, and nothing is written to the parent's connections."""
    end_beside_a_child([])


@beyond_gloo("the child uses its parent's connections")
def test_rule_26_a_forked_child_of_a_group_over_hosts_is_refused(hosts: list[str]) -> None:
    """Rule 26: collectives, messages and monitored barriers are refused."""
    end_beside_a_child(hosts)


def fork_and(call: Any) -> Any:
    """Calls `call` in a forked child. The returned function waits for the child's text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(patience(40)))  # ends a child that hangs
        try:
            text = str(call())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)

    def result() -> str:
        with os.fdopen(read) as lines:
            text = lines.read()
        assert os.waitpid(pid, 0)[1] == 0, "the child hangs"
        return text

    return result


def works_alone(ctx: Context, backend: str, store: str) -> str:
    """Creates, uses and destroys a default group. Its members are the ranks, their children or their grandchildren."""
    made = dist.FileStore(f"{ctx.tmp}/{store}", ctx.world_size)
    dist.init_process_group(
        backend, store=made, rank=ctx.rank, world_size=ctx.world_size, timeout=timedelta(seconds=patience(20))
    )
    value = torch.ones(3)
    dist.all_reduce(value)
    work: Any = dist.all_reduce(value, async_op=True)  # the progress thread carries it out
    work.wait()
    dist.destroy_process_group()
    return str(value[0].item())


def forks(ctx: Context, backend: str, when: str) -> list[str]:
    """Returns the texts of a child that creates a group and of a child that calls its parent's group."""
    import torch_sagellm

    if backend == "gloo":
        torch_sagellm.serve_as("gloo")
    parents: Any = None
    if when != "before any group":
        store = dist.FileStore(f"{ctx.tmp}/parents", ctx.world_size)
        ctx.init(backend=backend, store=store)
        dist.all_reduce(torch.ones(3))
        parents = dist.group.WORLD._get_backend(torch.device("cpu"))
        if when != "with a living group":
            dist.destroy_process_group()

    def child_makes() -> str:
        if dist.is_initialized():
            dist.destroy_process_group()  # the copy of its parent's group
        return works_alone(ctx, backend, "children")

    def child_calls() -> str:
        if parents is None:
            return "none"
        work = parents.allreduce([torch.ones(3)])
        return "waited" if work is None else str(work.wait())

    def grandchild_makes() -> str:
        works_alone(ctx, backend, "between")
        return str(fork_and(child_makes)())

    calls = [grandchild_makes if when == "twice" else child_makes, child_calls]
    found: list[str] = []
    if when == "from a thread":
        thread = threading.Thread(target=lambda: found.extend(fork_and(call)() for call in calls))
        thread.start()
        thread.join()
    else:
        found.extend(fork_and(call)() for call in calls)
    if when == "with a living group":
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
    found.append(works_alone(ctx, backend, "again"))
    return found


@beyond_gloo("is about who refuses")
@pytest.mark.parametrize("when", ["before any group", "after destroy", "with a living group", "from a thread", "twice"])
@pytest.mark.parametrize("backend", ["sagellm", "gloo"])
def test_rule_26_a_forked_child_makes_groups_where_none_of_its_parent_lived(backend: str, when: str) -> None:
    """A child's own groups work and end if no group lived at the fork. Calls of its parent's group are refused in every
    case."""
    two = str(2.0 * 2)
    for made, called, again in run_fresh(forks, 2, backend, when):
        if when == "with a living group":
            assert "was forked from one that had a process group" in made, made
        else:
            assert made == two, made
        assert called == "none" if when == "before any group" else "forked child" in called, called
        assert again == two, "the parent goes on"
