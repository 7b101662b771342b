"""The memory that a group uses, a tiny /dev/shm, control groups, and the option that selects the delegate."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, run_fresh, run_ranks

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 16384, 1 << 18


def mapped() -> int:
    """Returns the bytes of memfd mappings of this process."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            total += end - start
    return total


def one_group(ctx: Context) -> tuple[int, int]:
    before = mapped()
    ctx.init()
    for count in (1, 5000, 3_000_000):
        dist.all_reduce(torch.ones(count))
    while_used = mapped() - before
    dist.destroy_process_group()
    return while_used, mapped() - before


@beyond_gloo("maps nothing")
def test_a_group_of_two_ranks_takes_less_than_eight_mebibytes() -> None:
    """Checked after large operations. The memory is unmapped when the group has ended."""
    for used, left in run_fresh(one_group, 2):
        assert 0 < used < 8 << 20, used
        assert left == 0, left


def many_lives(ctx: Context) -> tuple[int, int, int]:
    def state() -> tuple[int, int, int]:
        return mapped(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for turn in range(15):
        ctx.init(key=f"{ctx.key}-{turn}")
        dist.all_reduce(torch.ones(1000))
        dist.destroy_process_group()
        if turn == 4:
            early = state()
    late = state()
    assert late[0] <= early[0] and late[1] <= early[1] + 2 and late[2] <= early[2] + 1, (early, late)
    return late


def test_groups_leave_nothing_behind_in_the_process() -> None:
    """Fifteen groups one after the other leave no mapping, file descriptor or thread behind."""
    run_fresh(many_lives, 2)


def tiny_shm(ctx: Context) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return f"a mount namespace may not be made here: {os.strerror(ctypes.get_errno())}"
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m") != 0:
        return f"/dev/shm may not be mounted here: {os.strerror(ctypes.get_errno())}"
    stat = os.statvfs("/dev/shm")
    assert stat.f_blocks * stat.f_frsize <= 1 << 20
    ctx.init()
    found = torch.ones(2_000_000)
    dist.all_reduce(found)
    assert (found == ctx.world_size).all()
    assert not [name for name in os.listdir("/dev/shm") if "sagellm" in name]
    dist.destroy_process_group()
    return ""


def test_a_tiny_dev_shm_is_enough() -> None:
    """1 MiB of /dev/shm suffices for tensors of 8 MB."""
    reasons = run_fresh(tiny_shm, 2)
    if any(reasons):
        pytest.skip(reasons[0])


# ------------------------------------------------------------------------------------------------ control groups


def memory_group() -> tuple[Path, str, str]:
    """Returns the folder of this process's memory control group, and the file names of its limit and of its usage."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes", "memory.usage_in_bytes"
        if controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").is_file():
            return Path("/sys/fs/cgroup" + path), "memory.max", "memory.current"
    pytest.skip("no memory control group is mounted where it usually is")


#: Limit in bytes. A rank needs less to exit, although its exit touches most pages that it shares with its parent
#: process.
LIMIT = 512 << 20


@contextlib.contextmanager
def limited_group() -> Iterator[tuple[str, str]]:
    """Creates a control group limited to `LIMIT` bytes below the control group of this process. Yields its folder and
    the name of its usage file."""
    parent, limit, used = memory_group()
    folder = parent / f"sagellm-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a control group may not be made here: {error}")
    try:
        try:
            (folder / limit).write_text(str(LIMIT))
        except OSError as error:
            pytest.skip(f"a control group's memory may not be limited here: {error}")
        # With swap, memory beyond the limit would be swapped out instead.
        for swap, value in (("memory.memsw.limit_in_bytes", str(LIMIT)), ("memory.swap.max", "0")):
            with contextlib.suppress(OSError):
                if (folder / swap).is_file():
                    (folder / swap).write_text(value)
        yield str(folder), used
    finally:
        folder.rmdir()


def fill(folder: str, used: str, spare: int) -> list[bytes]:
    """Joins the control group and allocates memory until `spare` bytes are left. Pages that the kernel can reclaim
    count as left."""
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))

    def left() -> int:
        stat = Path(folder, "memory.stat").read_text()
        files = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
        assert files is not None, stat
        return LIMIT - int(Path(folder, used).read_text()) + int(files[1])

    taken = []
    while (more := left() - spare) > 0:
        taken.append(b"\1" * max(more // 2, 128 << 10))
    return taken


#: The control experiment: this program populates 16 MiB of a memfd although only 4 MiB are left, which the engine must
#: never do.
PAST_THE_LIMIT = """
import mmap, os, sys
from test_memory import fill
taken = fill(sys.argv[1], sys.argv[2], 4 << 20)
descriptor = os.memfd_create("test")
os.ftruncate(descriptor, 16 << 20)
memory = mmap.mmap(descriptor, 16 << 20)
for at in range(0, 16 << 20, 4096):
    memory[at] = 1
"""


def little_memory(ctx: Context, folder: str, used: str, spare: int) -> tuple[int, str]:
    """Creates a group while rank 0 has `spare` bytes left. Returns the bytes that the group mapped and its choice."""
    import torch_sagellm

    # Creates both kinds of groups once before, because their imported modules and mapped files take memory too.
    for engine in ("delegate", "auto"):
        ctx.init(key=f"{ctx.key}-{engine}", pg_options=torch_sagellm.Options(engine=engine))
        dist.all_reduce(torch.ones(10))
        dist.destroy_process_group()
    taken = fill(folder, used, spare) if ctx.rank == 0 else []
    before = mapped()
    ctx.init()
    shared = mapped() - before
    del taken
    for count in (1, 5000, 3_000_000):
        value = torch.full((count,), ctx.rank + 1.0)
        dist.all_reduce(value)
        assert (value == 3).all()
    choice = torch_sagellm.explain("all_reduce", 8).choice
    dist.destroy_process_group()
    return shared, choice


@beyond_gloo("maps nothing")
def test_rule_24_a_control_group_that_is_almost_full_shrinks_the_segment_or_delegates() -> None:
    """Rule 24: the kernel kills a process that populates memory beyond the limit of its control group. So the segment
    uses at most a quarter of the memory that is left, or the group is delegated."""
    with limited_group() as (folder, used):
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        past = subprocess.run([sys.executable, "-c", PAST_THE_LIMIT, folder, used], env=path, timeout=60)
        assert past.returncode == -signal.SIGKILL, "this control group does not limit anything"
        for shared, choice in run_fresh(little_memory, 2, folder, used, 16 << 20):
            # With enough memory the segment has 4.3 MiB.
            assert 0 < shared < 4 << 20 and "delegate" not in choice, (shared, choice)
        for shared, choice in run_fresh(little_memory, 2, folder, used, 4 << 20):
            assert shared == 0 and choice == "gloo", (shared, choice)


def filled_afterwards(ctx: Context, folder: str, used: str) -> str:
    """Memory is free when the group is created. 5 MiB are left when a large operation first needs memory.

    The operation needs 3 MiB, but may use only half of what is left. The other 2 MiB leave room to raise the exception.
    """
    tensor = torch.ones(3_000_000)
    ctx.init()
    dist.all_reduce(torch.ones(10))
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    dist.barrier()
    taken = fill(folder, used, 5 << 20) if ctx.rank == 0 else []
    dist.barrier()
    text = ""
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        text = str(error)
    del taken
    assert (tensor == 1).all() or text == ""
    dist.destroy_process_group()
    return text


@beyond_gloo("fills no shared memory")
def test_rule_24_the_limit_is_looked_at_again_before_more_is_filled() -> None:
    """Rule 24: if too little memory is left for a large operation, all ranks raise an error that says so, and no rank
    is killed."""
    with limited_group() as (folder, used):
        for text in run_fresh(filled_afterwards, 2, folder, used):
            assert re.search(r"rank \d has too little memory .* need \d+ KiB more .* \d+ KiB", text), text


def delegated(ctx: Context) -> str:
    import torch_sagellm

    options: Any = torch_sagellm.Options()
    options.engine = "delegate"
    ctx.init(pg_options=options)
    n, me = ctx.world_size, ctx.rank
    found = torch.full((1000,), float(me + 1))
    dist.all_reduce(found)
    assert (found == sum(range(1, n + 1))).all()
    work: Any = dist.all_gather([torch.empty(3) for _ in range(n)], torch.ones(3), async_op=True)
    work.get_future().wait()
    out = torch.empty(2)
    dist.reduce_scatter_tensor(out, torch.ones(2 * n))
    assert out.tolist() == [float(n)] * 2
    if me == 0:
        dist.send(torch.ones(2), 1)
    elif me == 1:
        dist.recv(out, 0)
    dist.barrier()
    assert mapped() == 0, "shared memory was made although the delegate was asked for"
    dist.destroy_process_group()
    return dist.get_backend() if dist.is_initialized() else ""


@beyond_gloo("not this package")
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_option_engine_delegate(world_size: int) -> None:
    """With `Options(engine="delegate")` torch's gloo serves a group on one host."""
    run_fresh(delegated, world_size)


def wrong_delegate(ctx: Context) -> str:
    import torch_sagellm

    options: Any = torch_sagellm.Options()
    options.engine, options.delegate = "delegate", "carrier-pigeon"
    try:
        ctx.init(pg_options=options)
    except ValueError as error:
        return str(error)
    raise AssertionError("the name was accepted")


@beyond_gloo("not this package")
def test_a_delegate_that_does_not_exist_is_refused_by_name() -> None:
    """The error is raised before the ranks meet."""
    for text in run_fresh(wrong_delegate, 2):
        assert "carrier-pigeon" in text and re.search(r"\bgloo\b", text), text


def shares(ctx: Context) -> list[int]:
    sizes = [mapped()]
    groups = []
    for _ in range(5):
        groups.append(dist.new_group())
        dist.all_reduce(torch.ones(10), group=groups[-1])
        sizes.append(mapped())
    for group in groups:
        dist.destroy_process_group(group)
    return sizes


@beyond_gloo("maps nothing")
def test_rule_25_further_groups_of_the_same_ranks_are_bounded() -> None:
    """Rule 25: each further group of the same ranks maps less than eight mebibytes."""
    for sizes in run_ranks(shares, 2):
        steps = [after - before for before, after in pairwise(sizes)]
        assert max(steps) < 8 << 20, sizes
