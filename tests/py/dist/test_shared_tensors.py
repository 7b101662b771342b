"""Tensors in memory that peers can reach: how long they live, what torch does with them, and where there are none."""

from __future__ import annotations

import io
import logging
import os
import resource
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch, run_fresh
from limits import patience

import torch_sagellm

pytestmark = beyond_gloo("has no such tensors")

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def usage() -> dict[str, Any]:
    from torch_sagellm._private import load

    return load.extension()._shared_usage()


class Lines(logging.Handler):
    """The lines of our log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("sagellm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def read(self) -> list[str]:
        from torch_sagellm._private import load

        load.extension().drain_log()
        return self.lines


def resident() -> int:
    """Bytes of shared memory that this process has in its page tables."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssShmem")).split()[1])


def alone(function: Callable[..., Any], env: dict[str, str] | None = None) -> None:
    """Runs it in a process of its own: what is looked at belongs to the process."""
    run_fresh(function, 1, env=env or {"SAGELLM_SHARED_BYTES": str(256 * MIB)})


# ------------------------------------------------------------------------------------------------------------- life


def freed_and_used_again(ctx: Context) -> None:
    first = torch_sagellm.empty(MIB)
    at = first.data_ptr()
    assert at % PAGE == 0 and first.dtype == torch.float32
    found = usage()
    assert (found["limit"], found["used"], found["extents"]) == (256 * MIB, 4 * MIB, 1)
    first.fill_(1)
    view = first[10:]
    del first
    assert usage()["extents"] == 1 and view.sum().item() == MIB - 10
    del view
    assert (usage()["used"], usage()["extents"], usage()["cached"]) == (0, 0, 4 * MIB)
    again = torch_sagellm.empty(MIB)
    assert again.data_ptr() == at and torch_sagellm.zeros(4).data_ptr() != at
    # No more than a quarter of the limit stays filled.
    before = resident()
    large = torch_sagellm.zeros(100 * MIB, dtype=torch.uint8)
    assert resident() - before > 99 * MIB  # the kernel counts some pages later
    del large
    assert resident() - before < MIB and usage()["cached"] <= 64 * MIB
    assert usage()["refused"] == 0


def test_freed_memory_is_used_again_and_goes_back_to_the_system() -> None:
    """A view keeps the memory; without one it is the next tensor's, or the system's."""
    alone(freed_and_used_again)


def resized(ctx: Context) -> None:
    own = torch_sagellm.zeros(1000)
    own.resize_(MIB)
    assert torch_sagellm.is_reachable(own) and own[:1000].count_nonzero() == 0 and usage()["extents"] == 1
    own.untyped_storage().resize_(0)
    assert usage()["extents"] == 0 and not torch_sagellm.is_reachable(own)
    own.untyped_storage().resize_(4 * MIB)
    assert torch_sagellm.is_reachable(own) and own.fill_(2).sum() == 2 * MIB
    with torch_sagellm.shared_tensors():
        made = torch.ones(MIB)
    assert torch_sagellm.is_reachable(made)
    made.resize_(2 * MIB)  # by the rule of this thread now
    assert not torch_sagellm.is_reachable(made) and made[:MIB].sum() == MIB and usage()["extents"] == 1


def test_resize_keeps_the_contents_and_the_kind_of_memory_that_its_allocator_gives() -> None:
    alone(resized)


def several_owners(ctx: Context) -> None:
    one = torch_sagellm.zeros(MIB)
    other = torch.empty(0).set_(one)
    assert torch_sagellm.is_reachable(other) and other.data_ptr() == one.data_ptr()
    del one
    assert usage()["extents"] == 1 and other.count_nonzero() == 0
    array = other.numpy()
    del other
    array[5] = 3
    back = torch.from_numpy(array)
    assert torch_sagellm.is_reachable(back) and back[5] == 3
    del back, array
    assert usage()["extents"] == 0
    with torch_sagellm.shared_tensors():  # the array has memory of numpy's
        assert not torch_sagellm.is_reachable(torch.from_numpy(numpy.ones(MIB)))
    weight = torch.nn.Parameter(torch.ones(MIB))
    weight.data = torch_sagellm.shared(weight.data)
    assert torch_sagellm.is_reachable(weight) and usage()["extents"] == 1


def test_memory_lives_as_long_as_the_last_tensor_or_array_over_it() -> None:
    alone(several_owners)


def saved_and_sent(ctx: Context) -> None:
    from torch import multiprocessing

    tensor = torch_sagellm.shared(torch.arange(float(MIB)))
    file = io.BytesIO()
    torch.save({"tensor": tensor, "part": tensor[5:9]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["tensor"], tensor) and loaded["part"].tolist() == [5, 6, 7, 8]
    assert loaded["part"].data_ptr() == loaded["tensor"].data_ptr() + 20

    context = multiprocessing.get_context("fork")
    there, back = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=adds_one, args=(there, back))
    child.start()
    there.put(tensor)  # moves it into memory of torch's, which both processes have
    assert back.get() == float(MIB) * (MIB - 1) / 2
    child.join(30)
    assert child.exitcode == 0 and tensor[:3].tolist() == [1, 2, 3]
    assert tensor.is_shared() and not torch_sagellm.is_reachable(tensor) and usage()["extents"] == 0

    other = torch_sagellm.zeros(MIB)
    assert not other.is_shared() and other.share_memory_().is_shared() and usage()["extents"] == 0


def adds_one(there: Any, back: Any) -> None:
    got = there.get()
    total = got.sum(dtype=torch.float64).item()
    got += 1
    back.put(total)


def test_torch_saves_loads_and_sends_them() -> None:
    """And `share_memory_()`: what torch moves into memory of its own gives ours back."""
    alone(saved_and_sent)


# -------------------------------------------------------------------------------------------------------- as others


def history(make: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """What autograd and the counters of changes say of a tensor."""
    start = torch.arange(1.0, 1 + 4096 * 4).reshape(4096, 4)
    leaf = make(start).requires_grad_()
    found: list[Any] = [leaf._version, leaf.is_leaf, leaf.stride()]
    (leaf * leaf).sum().backward()
    found += [leaf.grad.sum().item() if leaf.grad is not None else None]
    plain = make(start)
    view = plain[3:].t()
    view += 1
    plain.add_(view[0, 0].item())
    found += [plain._version, view._version, view._base is plain, plain.sum(dtype=torch.float64).item()]
    saved = make(start).requires_grad_()
    root = saved * 1
    squared = root * root
    with torch.no_grad():
        root.zero_()
    try:
        squared.sum().backward()
    except RuntimeError as error:
        found.append("modified by an inplace operation" in str(error))
    detached = plain.detach()
    detached.zero_()
    return [*found, plain._version, torch.equal(plain, torch.zeros_like(plain)), plain.is_inference()]


def as_ordinary(ctx: Context) -> None:
    def in_block(tensor: torch.Tensor) -> torch.Tensor:
        with torch_sagellm.shared_tensors():
            made = torch.empty_like(tensor)
        assert torch_sagellm.is_reachable(made)
        return made.copy_(tensor)

    wanted = history(lambda tensor: torch.empty_like(tensor).copy_(tensor))
    assert wanted[-4] is True  # the error of autograd was seen
    assert history(lambda tensor: torch_sagellm.empty_like(tensor).copy_(tensor)) == wanted
    assert history(in_block) == wanted
    with torch.inference_mode():
        assert torch_sagellm.empty(5).is_inference() and torch_sagellm.shared(torch.ones(3)).tolist() == [1, 1, 1]


def test_autograd_and_versions_are_those_of_ordinary_tensors() -> None:
    alone(as_ordinary)


def profiled(ctx: Context) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as of_torch:
        kept = torch.empty(MIB)
        torch.empty(MIB)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as ours, torch_sagellm.shared_tensors():
        kept_too = torch.empty(MIB)
        torch.empty(MIB)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as asked:
        kept_last = torch_sagellm.empty(MIB)
    assert not torch_sagellm.is_reachable(kept) and torch_sagellm.is_reachable(kept_too)
    assert kept_last.nbytes == 4 * MIB

    def counted(found: Any) -> int:
        return sum(event.self_cpu_memory_usage for event in found.events())

    assert counted(of_torch) == counted(ours) == counted(asked) == 4 * MIB


def test_the_memory_profiler_counts_them_as_it_counts_others() -> None:
    alone(profiled)


def by_many_threads(ctx: Context) -> None:
    wrong: list[Any] = []

    def work(number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        kept: list[torch.Tensor] = []
        for step in range(300):
            bytes_ = int(torch.randint(1, 300_000, (), generator=draw))
            with torch_sagellm.shared_tensors():
                tensor = torch.empty(bytes_, dtype=torch.uint8)
            if torch_sagellm.is_reachable(tensor) != (bytes_ >= 16384):
                wrong.append((number, step, bytes_))
            kept.append(tensor.fill_(number))
            if len(kept) > 8:
                gone = kept.pop(int(torch.randint(0, 8, (), generator=draw)))
                if not bool((gone == number).all()):
                    wrong.append((number, step, gone.unique().tolist()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not wrong and not any(each.is_alive() for each in threads), wrong[:3]
    assert (usage()["used"], usage()["extents"], usage()["refused"]) == (0, 0, 0)


def test_many_threads_allocate_at_once() -> None:
    alone(by_many_threads)


# -------------------------------------------------------------------------------------------------------- the block


def blocks(ctx: Context) -> None:
    def reachable(count: int = MIB) -> bool:
        return torch_sagellm.is_reachable(torch.empty(count, dtype=torch.uint8))

    block = torch_sagellm.shared_tensors()
    assert not reachable()
    with block:
        assert reachable() and reachable(16384) and not reachable(16383)
        with torch_sagellm.shared_tensors(), block:
            assert reachable()
        assert reachable()
        other: list[bool] = []
        thread = threading.Thread(target=lambda: other.append(reachable()))
        thread.start()
        thread.join(30)
        assert other == [False]
    assert not reachable()
    with pytest.raises(KeyError), torch_sagellm.shared_tensors():
        raise KeyError
    assert not reachable()
    with torch_sagellm.shared_tensors():
        layer = torch.nn.Linear(256, 256)
        layer(torch.ones(256, 256)).sum().backward()
    assert torch_sagellm.is_reachable(layer.weight) and layer.weight.grad is not None
    assert torch_sagellm.is_reachable(layer.weight.grad) and not torch_sagellm.is_reachable(layer.bias)
    with pytest.raises(RuntimeError, match="was not entered"):
        block.__exit__(None, None, None)

    block.__enter__()
    thread = threading.Thread(target=leave_elsewhere, args=(block,))
    thread.start()
    thread.join(30)
    assert reachable(), "this thread is still within the block"
    block.__exit__(None, None, None)
    assert not reachable()


def leave_elsewhere(block: Any) -> None:
    with pytest.raises(RuntimeError, match="ends on another thread than it began on"):
        block.__exit__(None, None, None)


def test_a_block_holds_for_its_thread_and_ends_with_an_exception() -> None:
    alone(blocks)


def without_deleters(ctx: Context) -> None:
    from torch_sagellm._private import load

    raw = load.extension()._share_raw
    assert not raw(MIB)
    with torch_sagellm.shared_tensors():
        assert raw(MIB) and not raw(100) and not raw(0)
        assert usage()["extents"] == 0 and usage()["cached"] == MIB
    assert not raw(MIB)


def test_a_caller_that_keeps_addresses_gives_each_back_to_its_owner() -> None:
    alone(without_deleters)


# ------------------------------------------------------------------------------------------------ where there is none


def full(ctx: Context) -> None:
    log = Lines()
    fits = torch_sagellm.zeros(3 * MIB // 4)
    assert torch_sagellm.is_reachable(fits)
    for _ in range(3):
        assert torch_sagellm.zeros(MIB).sum() == 0
        with torch_sagellm.shared_tensors():
            assert not torch_sagellm.is_reachable(torch.ones(MIB))
    assert usage()["refused"] == 6
    (line,) = log.read()
    assert f"of {4 * MIB} bytes {3 * MIB} are in use" in line and "SAGELLM_SHARED_BYTES" in line, line
    del fits
    assert torch_sagellm.is_reachable(torch_sagellm.zeros(MIB)), "there is room again"


def test_past_the_limit_memory_is_ordinary_and_the_log_says_so_once() -> None:
    alone(full, {"SAGELLM_SHARED_BYTES": str(4 * MIB)})


def switched_off(ctx: Context) -> None:
    log = Lines()
    ordinary_instead(log, "SAGELLM_SHARED_BYTES is 0")


def ordinary_instead(log: Lines, why: str) -> None:
    for _ in range(2):
        tensor = torch_sagellm.zeros(MIB)
        assert tensor.sum() == 0 and not torch_sagellm.is_reachable(tensor)
        with torch_sagellm.shared_tensors():
            assert not torch_sagellm.is_reachable(torch.ones(MIB))
    (line,) = log.read()
    assert why in line and "ordinary memory" in line, line
    assert why in usage()["why_not"] and usage()["limit"] == usage()["used"] == 0


def test_a_limit_of_zero_switches_it_off() -> None:
    alone(switched_off, {"SAGELLM_SHARED_BYTES": "0"})


def little_address_space(ctx: Context) -> None:
    torch_sagellm.is_reachable(torch.ones(1))  # loads the extension
    size = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (size + 200 * MIB, resource.RLIM_INFINITY))
    ordinary_instead(Lines(), "cannot map")


def test_a_small_limit_of_address_space_leaves_ordinary_memory() -> None:
    alone(little_address_space, {"SAGELLM_SHARED_BYTES": str(1 << 30)})


def small_files(ctx: Context) -> None:
    log = Lines()
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    ordinary_instead(log, "ulimit -f")


def test_a_small_limit_of_files_leaves_ordinary_memory() -> None:
    """A file beyond the limit would end the process by SIGXFSZ."""
    alone(small_files, {"SAGELLM_SHARED_BYTES": str(1 << 30)})


# ------------------------------------------------------------------------------------------------------------ forks


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of one tensor; a worker that is asked for one also overwrites its own copy."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> torch.Tensor:
        found = self.rows[number].clone()
        assert os.getpid() != parent
        self.rows[number] = -1
        return found


parent = 0


def workers(ctx: Context) -> None:
    global parent
    parent = os.getpid()
    log = Lines()
    rows = torch_sagellm.shared(torch.arange(64 * 8192.0).reshape(64, 8192))
    loader = torch.utils.data.DataLoader(
        Rows(rows), batch_size=8, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    with torch_sagellm.shared_tensors():
        got = torch.cat(list(loader))
    wanted = torch.arange(64 * 8192.0).reshape(64, 8192)
    assert torch.equal(got, wanted) and torch.equal(rows, wanted), "a write of a worker came here"
    assert torch_sagellm.is_reachable(got) and torch_sagellm.is_reachable(rows) and log.read() == []


def test_data_loader_workers_read_them_and_their_writes_stay_there() -> None:
    alone(workers)


def in_child(body: Callable[[], bool]) -> bool:
    """What `body` says in a forked child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if body() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def forked(ctx: Context) -> None:
    log = Lines()
    kept = torch_sagellm.shared(torch.arange(float(MIB)))
    freed = [torch_sagellm.zeros(MIB)]

    def child() -> bool:
        freed.clear()
        kept[0] = 7
        new = torch_sagellm.zeros(MIB)
        with torch_sagellm.shared_tensors():
            other = torch.ones(MIB)
        own = in_child(lambda: bool(kept[0] == 7 and kept[1] == 1))
        plain = not torch_sagellm.is_reachable(new) and not torch_sagellm.is_reachable(other)
        return own and plain and bool(other.sum() == MIB) and new.count_nonzero() == 0 and log.read() == []

    assert in_child(child)
    assert kept[0] == 0 and usage()["extents"] == 2 and freed[0].count_nonzero() == 0
    again = torch_sagellm.zeros(MIB)
    assert again.data_ptr() not in (kept.data_ptr(), freed[0].data_ptr()) and usage()["extents"] == 3


def test_a_forked_child_frees_writes_and_allocates_without_a_trace_in_its_parent() -> None:
    alone(forked)


# ----------------------------------------------------------------------------------------------------- in a group


def everywhere(ctx: Context) -> None:
    early = torch.ones(MIB)
    ctx.init()
    late, small = torch.full((MIB,), ctx.rank + 1.0), torch.ones(16)
    assert torch_sagellm.is_reachable(late) and not torch_sagellm.is_reachable(small)
    assert not torch_sagellm.is_reachable(early)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(MIB)))
    thread.start()
    thread.join(30)
    assert torch_sagellm.is_reachable(found[0])
    dist.all_reduce(late)
    assert bool((late == 3).all())
    dist.destroy_process_group()


@pytest.mark.parametrize("value", ["1", "on"])
def test_the_variable_shares_from_the_first_group_on(value: str) -> None:
    run_fresh(everywhere, 2, env={"SAGELLM_SHARED_TENSORS": value})


def values_of(ctx: Context, kind: str) -> list[torch.Tensor]:
    """The results of collectives over tensors of which all, none, or this rank's alone can be reached."""
    shares = kind == "all" or (kind == "one" and ctx.rank == 0)
    make = torch_sagellm.empty if shares else torch.empty
    found: list[torch.Tensor] = []
    for count in (1000, 5000, 100_003, 1_500_000):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            own = make(count, dtype=dtype)
            own.copy_((torch.arange(count) % 251) * (ctx.rank + 1))
            rows = make(ctx.world_size, count, dtype=dtype)
            dist.all_gather_into_tensor(rows, own)
            dist.all_reduce(own[1:])  # a view that begins in the middle of a page
            part = make(count, dtype=dtype)
            dist.reduce_scatter_tensor(part, rows.reshape(-1).clone() if not shares else torch_sagellm.shared(rows))
            sent = make(count, dtype=dtype).fill_(ctx.rank)
            dist.broadcast(sent, 1)
            found += [own, rows, part, sent]
    return [each.clone() for each in found]


def same_bits(ctx: Context) -> dict[str, Any]:
    ctx.init()
    results = {kind: values_of(ctx, kind) for kind in ("none", "all", "one")}
    for kind in ("all", "one"):
        for number, (wanted, got) in enumerate(zip(results["none"], results[kind], strict=True)):
            assert torch.equal(wanted, got), (kind, number)
    stats = torch_sagellm.get_stats()["shared_memory"]
    dist.destroy_process_group()
    return stats


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_over_them_give_the_bits_of_others(world_size: int) -> None:
    """All ranks with such tensors, none, and one rank alone."""
    for stats in run_fresh(same_bits, world_size):
        assert stats["limit"] > 0 and stats["taken_out"] == 0 and stats["why_not"] == ""


def fails_here(ctx: Context) -> None:
    """Rank 1 does not come a second time; by the first call ranks learn where their tensors are."""
    ctx.init(operations=timedelta(seconds=patience(1)))
    tensor, other = torch_sagellm.zeros(MIB), torch_sagellm.zeros(MIB)
    dist.all_reduce(tensor[5:])
    if ctx.rank == 0:
        expect_raises(dist.DistBackendError, lambda: dist.all_reduce(tensor[5:]))
        ctx.tell("failed")
        assert not torch_sagellm.is_reachable(tensor) and torch_sagellm.is_reachable(other)
        assert usage()["taken_out"] == 4 * MIB and usage()["extents"] == 2
        assert tensor.fill_(3).sum() == 3 * MIB
        tensor.resize_(2 * MIB)
        assert torch_sagellm.is_reachable(tensor) and tensor[:MIB].sum() == 3 * MIB
    else:
        assert ctx.listen() == "end"


def test_what_a_failed_operation_was_to_write_is_an_ordinary_tensor() -> None:
    """It has its address and its values; what is made anew can be reached."""
    with launch(fails_here, 2, env={"SAGELLM_SHARED_BYTES": str(256 * MIB)}) as job:
        assert job.hear(0) == "failed"
        job.say(1, "end")
        job.values()


def ddp(ctx: Context, how: str) -> tuple[list[bool], list[list[float]]]:
    """Which buckets of five steps can be reached, and the gradients."""
    from torch.nn.parallel import DistributedDataParallel

    ctx.init()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    if how == "in a block":
        with torch_sagellm.shared_tensors():
            model = DistributedDataParallel(layers, find_unused_parameters=True)
    else:
        model = DistributedDataParallel(layers, bucket_cap_mb=0.1)
    if how == "share_buckets":
        assert torch_sagellm.share_buckets(model) is model
    reachable: list[bool] = []

    def looks(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations that are given
        reachable.append(torch_sagellm.is_reachable(bucket.buffer()))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, looks)
    for step in range(5):
        if step == 1:
            model.module(torch.ones(4, 64))
            with torch.no_grad():
                model(torch.ones(4, 64))
            with pytest.raises(RuntimeError):  # two sides that do not match
                model.module(torch.ones(4, 65))
        model(torch.full((4, 64), ctx.rank + step + 1.0)).sum().backward()
        assert not torch_sagellm.is_reachable(torch.empty(MIB)), "the block has ended"
    found = [parameter.grad.flatten().tolist() for parameter in layers.parameters() if parameter.grad is not None]
    dist.destroy_process_group()
    return reachable, found


def test_buckets_of_a_replica_can_be_reached_once_torch_has_made_them_anew() -> None:
    plain = run_fresh(ddp, 2, "as always")
    shared = run_fresh(ddp, 2, "share_buckets")
    block = run_fresh(ddp, 2, "in a block")
    assert not any(plain[0][0]) and all(block[0][0])
    first = shared[0][0].index(True)
    assert 0 < first < len(shared[0][0]) / 2 and all(shared[0][0][first:]), shared[0][0]
    for others in (shared, block):
        for (_, wanted), (_, got) in zip(plain, others, strict=True):
            assert wanted == got, "the gradients differ"


def failing_first(ctx: Context) -> None:
    from torch.nn.parallel import DistributedDataParallel

    ctx.init()
    model = torch_sagellm.share_buckets(DistributedDataParallel(torch.nn.Linear(64, 512)))
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 65))
    with pytest.raises(TypeError):
        model()
    assert not torch_sagellm.is_reachable(torch.empty(MIB)), "the block has ended"
    with pytest.raises(ValueError, match="find_unused_parameters"):
        torch_sagellm.share_buckets(DistributedDataParallel(torch.nn.Linear(3, 3), find_unused_parameters=True))
    with pytest.raises(TypeError, match="got a Linear, expected a DistributedDataParallel"):
        torch_sagellm.share_buckets(torch.nn.Linear(3, 3))  # type: ignore[arg-type]
    dist.destroy_process_group()


def test_a_call_of_a_replica_that_fails_leaves_no_block_open() -> None:
    run_fresh(failing_first, 2)
