"""What a test function needs in a rank: the group, messages to the test, and facts about torch. See `harness.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from limits import patience

BACKEND = os.environ.get("SAGELLM_TEST_BACKEND", "sagellm")
IS_GLOO = BACKEND == "gloo"
# torch's TCPStore looks up the name of every peer's address, even of 127.0.0.1. A name server that drops the query must
# not cost five seconds each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
GROUP_TIMEOUT = timedelta(seconds=30)
#: Whether this torch turns on the timing of works for every backend.
TIMES_WORKS = hasattr(torch._C._distributed_c10d.Backend, "_enable_collectives_timing")


def torch_at_least(major: int, minor: int) -> bool:
    """Returns whether torch has at least this version; for tests of features that older versions lack or implement
    differently."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (major, minor)


def error_of(work: Any) -> BaseException | None:
    """Returns the error of a Work that has ended; torch 2.11 cannot give it to Python, but its wait raises it."""
    if torch_at_least(2, 12):
        found: BaseException | None = work.exception()
        return found
    try:
        work.wait()
    except RuntimeError as error:
        return error
    return None


def monitored_barrier(timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """`dist.monitored_barrier` on the default group. Older torch allows only gloo groups, so there the group's
    own method is called."""
    if torch_at_least(2, 15) or IS_GLOO:
        dist.monitored_barrier(timeout=timeout, wait_all_ranks=wait_all_ranks)
    else:
        group = dist.distributed_c10d._get_default_group()
        group.monitored_barrier(GROUP_TIMEOUT if timeout is None else timeout, wait_all_ranks)


def beyond_gloo(reason: str) -> pytest.MarkDecorator:
    """Marks a test of a feature that gloo lacks, so that the suite can be validated with gloo."""
    return pytest.mark.skipif(IS_GLOO, reason=f"gloo: {reason}")


@dataclass
class Context:
    """The first argument of a rank's function."""

    rank: int
    world_size: int
    key: str
    store_port: int
    backend: str
    tmp: str
    conn: Connection = field(repr=False)

    def store(self, key: str | None = None) -> dist.Store:
        """Returns a client of the session's store, with this job's prefix. The server is the test process."""
        client = dist.TCPStore("127.0.0.1", self.store_port, is_master=False, timeout=timedelta(seconds=30))
        return dist.PrefixStore(key or self.key, client)

    def init(
        self,
        timeout: timedelta = GROUP_TIMEOUT,
        key: str | None = None,
        operations: timedelta | None = None,
        **options: Any,
    ) -> None:
        """Creates the default group of this job's ranks. `operations` is the timeout after the creation, for tests in
        which it elapses. On a busy machine the ranks need longer than that to create the group."""
        options.setdefault("backend", self.backend)
        options.setdefault("rank", self.rank)
        options.setdefault("world_size", self.world_size)
        if "store" not in options:
            options["store"] = self.store(key)
        if operations is not None and not hasattr(dist, "set_timeout"):  # torch 2.11
            timeout = operations
        dist.init_process_group(timeout=timeout, **options)
        if operations not in (None, timeout):
            dist.distributed_c10d._get_default_group().set_timeout(operations)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of the default group's later operations. A test in which a short timeout elapses calls this
        after the first operation, because the first operation takes longer on a busy machine."""
        group = dist.distributed_c10d._get_default_group()
        if hasattr(dist, "set_timeout"):
            group.set_timeout(timeout)
        else:  # torch 2.11
            group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)

    def tell(self, word: Any) -> None:
        """Sends a message to the test, which reads it with `Job.hear`."""
        self.conn.send(("word", word))

    def listen(self, timeout: float = 60.0) -> Any:
        """Waits for a message from the test (`Job.say`)."""
        limit = patience(timeout)
        if not self.conn.poll(limit):
            raise TimeoutError(f"the test said nothing for {limit} s")
        return self.conn.recv()


def expect_raises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> str:
    """Runs `call` and returns the text of the exception, which must be of `kind`."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind}, nothing was raised")


def pool_member(context: Context) -> None:
    """The main loop of a pool process: keeps a default group of the last requested size, and runs functions in it."""
    from zygote import describe_error, resolve

    current: str | None = None
    while True:
        order = context.conn.recv()
        if order is None:
            break
        key, world_size, module, name, args, kwargs = order
        context.world_size = world_size
        try:
            if current != key:
                if dist.is_initialized():
                    dist.destroy_process_group()
                current, context.key = key, key
                context.init()
            value = resolve(module, name)(context, *args, **kwargs)
        except BaseException as error:  # reported to the test, which ends the pool
            context.conn.send(("error", describe_error(error)))
        else:
            context.conn.send(("value", value))
        if not dist.is_initialized():
            current = None
    if dist.is_initialized():
        dist.destroy_process_group()
