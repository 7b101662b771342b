"""Creating groups: the store requests of a further group, the connection that it uses, and refused options."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import resource
import selectors
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace, TracebackType

import net
import pytest
import torch
import torch.distributed as dist
from cases import IN_ORDER_GIVEN
from harness import Context, beyond_gloo, expect_raises, launch, run_fresh
from net import enter

CLONE_NEWNS = 0x20000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


class Gate:
    """Forwards connections to a port of this host and counts them."""

    def __init__(self, port: int) -> None:
        self.to = port
        self.count = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.ends: dict[socket.socket, socket.socket] = {}
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._pass_on, daemon=True)

    def __enter__(self) -> Gate:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop.set()
        self.thread.join(10)
        for each in [self.listener, *self.ends]:
            each.close()

    def _pass_on(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self.listener, selectors.EVENT_READ)
            while not self.stop.is_set():
                for key, _ in ready.select(0.1):
                    if key.fileobj is self.listener:
                        one, other = self.listener.accept()[0], socket.create_connection(("127.0.0.1", self.to))
                        self.count += 1
                        self.ends.update({one: other, other: one})
                        for end in (one, other):
                            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                            ready.register(end, selectors.EVENT_READ)
                        continue
                    assert isinstance(key.fileobj, socket.socket)
                    other = self.ends[key.fileobj]
                    with contextlib.suppress(OSError):
                        if data := key.fileobj.recv(1 << 16):
                            other.sendall(data)
                            continue
                    for end in (key.fileobj, other):
                        with contextlib.suppress(KeyError):
                            ready.unregister(end)
                        end.close()
                        del self.ends[end]


def forty_more(ctx: Context, port: int) -> None:
    """Creates the first group, then forty more. The test counts connections in between."""
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    ctx.init(store=dist.PrefixStore(ctx.key, client))
    dist.barrier()
    ctx.tell("first")
    ctx.listen()
    everyone = list(range(ctx.world_size))
    for turn in range(40):
        group = dist.new_group(everyone if turn % 2 else everyone[::-1], **IN_ORDER_GIVEN)
        found = torch.ones(3)
        dist.all_reduce(found, group=group)
        assert found.tolist() == [ctx.world_size] * 3
    ctx.tell("more")
    ctx.listen()


def test_a_further_group_opens_no_connection_to_the_store() -> None:
    """Each rank has the user's connection to the store and one of ours, regardless of the number of groups."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with Gate(server.port) as gate, launch(forty_more, 3, gate.port) as job:
        counts = []
        for word in ("first", "more"):
            assert [job.hear(rank, 60) for rank in range(3)] == [word] * 3
            counts.append(gate.count)
            for rank in range(3):
                job.say(rank, "go on")
        job.values(60)
    assert counts[0] <= 6 and counts[1] == counts[0], counts


def beside_a_blocked_client(ctx: Context) -> None:
    """Creates a group while another thread waits in the user's client of the store."""
    from torch_sagellm._private import register

    client = dist.TCPStore("127.0.0.1", ctx.store_port, is_master=False, timeout=timedelta(seconds=30))
    end = f"{ctx.key}/end/{ctx.rank}"
    waiter = threading.Thread(target=client.wait, args=([end], timedelta(seconds=50)))
    waiter.start()
    time.sleep(0.3)  # until the thread waits
    backend = register.create(
        SimpleNamespace(
            store=dist.PrefixStore("inner", dist.PrefixStore(ctx.key, client)),
            group_rank=ctx.rank,
            group_size=ctx.world_size,
            timeout=timedelta(seconds=20),
            group_id="made beside",
            global_ranks_in_group=[],
        )
    )
    assert waiter.is_alive()
    backend.barrier().wait()
    other = dist.TCPStore("127.0.0.1", ctx.store_port, is_master=False, timeout=timedelta(seconds=30))
    other.set(end, "now")
    waiter.join(20)
    assert not waiter.is_alive()
    backend.shutdown()


@beyond_gloo("makes a group of the backend without torch")
def test_a_client_that_waits_holds_up_no_group() -> None:
    """A thread of the program may block in the user's store for minutes."""
    run_fresh(beside_a_blocked_client, 2)


def hide_names(resolver: str, hosts: str) -> None:
    """Makes this process resolve names only through the server in ``resolver``; no file answers."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = [(b"none", b"/", MS_REC | MS_PRIVATE), (resolver.encode(), b"/etc/resolv.conf", MS_BIND)]
    steps.append((hosts.encode(), b"/etc/hosts", MS_BIND))
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for source, target, flags in steps:
        if libc.mount(source, target, None, flags, None) != 0:
            raise OSError(ctypes.get_errno(), f"mount over {target.decode()}")


class NameServer:
    """Answers "no such name" to each question when it arrives for the second time, and counts the questions."""

    def __init__(self, namespace: str) -> None:
        self.questions = 0
        with open("/proc/self/ns/net") as home:
            enter(namespace)
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            net.enter_file(home)
        self.socket.bind(("127.0.0.1", 53))
        self.socket.settimeout(0.1)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> NameServer:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop.set()
        self.thread.join(10)
        self.socket.close()

    def _answer(self) -> None:
        heard = set()
        while not self.stop.is_set():
            with contextlib.suppress(TimeoutError):
                question, asker = self.socket.recvfrom(2048)
                if (asker, question[:2]) in heard:
                    self.socket.sendto(question[:2] + b"\x81\x83" + question[4:6] + bytes(6) + question[12:], asker)
                else:
                    heard.add((asker, question[:2]))
                    self.questions += 1


def where_no_name_is_known(ctx: Context, host: str, resolver: str, hosts: str) -> None:
    """Creates the first group, then forty more. The test counts questions in between."""
    enter(host)
    hide_names(resolver, hosts)
    client = dist.TCPStore(
        "127.0.0.1", 29513, is_master=ctx.rank == 0, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    ctx.init(store=dist.PrefixStore(ctx.key, client), timeout=timedelta(seconds=60))
    dist.barrier()
    ctx.tell("first")
    ctx.listen()
    for _ in range(40):
        dist.new_group(list(range(ctx.world_size)))


def test_a_further_group_looks_up_no_name(lone_host: str, tmp_path: Path) -> None:
    """The name server answers late, so each look-up takes a second. Forty groups of four ranks must make no look-up."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:2\n")
    (tmp_path / "hosts").write_text("")
    files = (str(tmp_path / "resolv.conf"), str(tmp_path / "hosts"))
    env = {"RES_OPTIONS": "timeout:1 attempts:2", "GLOO_SOCKET_IFNAME": "lo"}
    with NameServer(lone_host) as names, launch(where_no_name_is_known, 4, lone_host, *files, env=env) as job:
        assert [job.hear(rank, 90) for rank in range(4)] == ["first"] * 4
        asked = names.questions
        for rank in range(4):
            job.say(rank, "go on")
        job.values(120)
        assert names.questions == asked
    if asked == 0:
        pytest.skip("this torch's store looks up no names")


def without_descriptors(ctx: Context, left: int) -> str:
    """Rank 1 may open only `left` more files when a second group is created. The first group stays usable."""
    ctx.init(timeout=timedelta(seconds=30))
    dist.barrier()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ctx.rank == 1:
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + left, hard))
    try:
        return expect_raises(dist.DistBackendError, lambda: dist.new_group([1, 0]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        dist.barrier()


@beyond_gloo("ends the process")
@pytest.mark.parametrize("left", [0, 2])
def test_a_rank_without_descriptors_has_the_group_refused_on_all(left: int) -> None:
    """Rank 1 needs a descriptor for its socket or for the memory that it receives there. gloo, which needs more, is not
    tried."""
    for text in run_fresh(without_descriptors, 2, left):
        assert "cannot be made" in text and "rank 1" in text and "open files" in text and "ulimit -n" in text, text


def test_a_gloo_group_is_refused_where_too_few_descriptors_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo opens a descriptor for each other rank, and its thread ends the process if it gets none."""
    from torch_sagellm._private import delegate

    facts = delegate.Facts(None, 0, 64, timedelta(seconds=1), "7", list(range(64)))
    used = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 80, used + 80))
    delegate._require_descriptors(facts)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 50, used + 50))
    text = expect_raises(dist.DistBackendError, lambda: delegate._require_descriptors(facts))
    assert "opens about 72 files" in text and f"of the {used + 50} that" in text and "ulimit -n" in text, text


def asks_to_be_reconfigured(ctx: Context) -> str:
    return expect_raises(NotImplementedError, lambda: ctx.init(enable_reconfigure=True))


@beyond_gloo("can be reconfigured")
@pytest.mark.skipif(
    "enable_reconfigure" not in inspect.signature(dist.init_process_group).parameters,
    reason="this torch has no such flag",
)
def test_a_group_that_could_be_reconfigured_is_refused() -> None:
    """torch's flag is refused, not ignored."""
    for text in run_fresh(asks_to_be_reconfigured, 2):
        assert "enable_reconfigure=True" in text and "new group" in text


def reads_a_key_that_comes_and_goes(ctx: Context, kind: str) -> None:
    """A thread reads a key again and again while the main thread sets and deletes it. No read may wait for the key."""
    from torch_sagellm._private import load

    extension = load.extension()
    store = dist.HashStore() if kind == "HashStore" else dist.FileStore(f"{ctx.tmp}/keys", 1)
    decided = extension.rendezvous(store, 0, 1, timedelta(seconds=30), options=extension.Options())
    key, reads, stop = f"sagellm/failed/{decided.id}/text", [0], threading.Event()
    store.set(key, "text")
    assert decided._told_failure() == "text"
    wrong = []

    def read() -> None:
        while not stop.is_set() and not wrong:
            text = decided._told_failure()
            wrong.extend([text] if text not in ("", "text") else [])
            reads[0] += 1

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for number in range(1000):
        store.set(key, "text")
        store.delete_key(key)
        before, end = reads[0], time.monotonic() + 20
        while reads[0] < before + 2:
            assert not wrong, wrong
            assert time.monotonic() < end, f"in round {number} a read waits for a deleted key"
            time.sleep(0)
    stop.set()
    reader.join()


@beyond_gloo("the requests of our own rendezvous")
@pytest.mark.parametrize("kind", ["HashStore", "FileStore"])
def test_a_read_of_the_store_never_waits_for_a_key_that_another_rank_deletes(kind: str) -> None:
    """A rank that collects answers removes old questions, while a slow rank may still read them."""
    run_fresh(reads_a_key_that_comes_and_goes, 1, kind)
