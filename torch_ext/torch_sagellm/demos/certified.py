"""The stages of ``torch-sagellm certify`` on each rank; rank 0 puts the results into the store."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch_sagellm.cli import bench, collectives
from torch_sagellm.cli import ranks as processes
from torch_sagellm.demos import hang

#: In seconds: the timeout of groups; that of the operation that hangs; the limit within which a killed rank must be
#: named.
SET_UP, DEADLINE, NOTICED = 120.0, 5.0, 5.0
VALUE_SIZES = (8, 100_004, 4 << 20)
VALUE_TYPES = ("float32", "bfloat16", "int64")
ROUNDS = 5

Found = dict[str, Any]


def run_rank(rank: int, count: int, port: int, words: Found) -> int:
    import torch.distributed as dist

    stages: dict[str, Callable[[Found, Any], Found]] = {
        "values": values,
        "late": late,
        "killed": killed,
        "bandwidth": bandwidth,
        "overlap": overlap,
    }
    job = _job(words)
    bench._choose_device(job, rank)
    store = processes.join(bench.OURS, rank, count, port, SET_UP)
    found = stages[words["stage"]](words, store)
    if rank == 0:
        store.set("found", json.dumps(found))
    if words["stage"] in ("late", "killed"):
        os._exit(0)  # a failed group cannot be left in order
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _job(words: Found) -> bench.Job:
    backends = [bench.OURS, *([words["rival"]] if words["rival"] else [])]
    return bench.Job(words["ops"], words["sizes"], "float32", "sum", 3, 10, backends, words["device"])


def _sum(numbers: list[float]) -> list[float]:
    import torch
    import torch.distributed as dist

    found = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(found)
    return [float(number) for number in found]


# -------------------------------------------------------------------------------------------------------- values


def values(words: Found, _: Any) -> Found:
    """Checks all collectives, dtypes, reductions and sizes, then messages, then bits across ranks."""
    import torch
    import torch.distributed as dist

    calls, wrong, refused = 0, 0, set()
    for op, dtype, size in itertools.product(collectives.OPS, VALUE_TYPES, VALUE_SIZES):
        for redop in collectives.REDUCTIONS if op in collectives.REDUCING else ["sum"]:
            if redop == "avg" and dtype not in collectives.FLOATS:
                continue
            try:
                wrong += collectives.make(op, size, dtype, redop, words["device"]).wrong(dist.group.WORLD)
                calls += 1
            except ValueError as error:  # the same on every rank
                refused.add(str(error).splitlines()[0])
    wrong += _messages(words["device"])
    found: Found = {"calls": calls, "refused": sorted(refused)}
    torch.manual_seed(dist.get_rank())
    own = torch.randn(100_003, device=words["device"])
    theirs = own.clone()
    dist.all_reduce(own)
    bits = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(bits, own)
    wrong += sum(not torch.equal(bits[0], each) for each in bits)
    if words["rival"]:
        dist.all_reduce(theirs, group=dist.new_group(backend=words["rival"]))
        found["difference"] = float((own - theirs).abs().max())
        wrong += found["difference"] > 1e-4
    found["wrong"] = int(_sum([wrong])[0])
    dist.barrier()
    return {**found, "failure": f"{found['wrong']} wrong values"} if found["wrong"] else found


def _messages(device: str) -> int:
    """Every rank sends to the next one; returns the number of wrong messages."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks < 2:
        return 0
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    sent, came = torch.full((70_001,), float(rank), device=device), torch.zeros(70_001, device=device)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, came, before)]):
        work.wait()
    return int((came.cpu() != before).any())


# -------------------------------------------------------------------------------------------------- what fails


def _until_error(device: str, group: Any) -> tuple[float, str]:
    """One all_reduce that other ranks do not join, or several until one fails; returns seconds and the error text."""
    import torch
    import torch.distributed as dist

    began = time.monotonic()
    try:
        while time.monotonic() - began < 4 * DEADLINE:
            work: Any = dist.all_reduce(torch.ones(1024, device=device), group=group, async_op=True)
            work.wait(timedelta(seconds=4 * DEADLINE))
    except RuntimeError as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, ""


def _judge(text: str, seconds: float, most: float, needed: list[str]) -> Found:
    missing = [each for each in needed if each not in text]
    failure = "no error came" if not text else f"its text lacks {missing}" if missing else ""
    if not failure and seconds > most:
        failure = f"the error came after {seconds:.1f} s, at most {most:.1f} expected"
    return {"text": text, "seconds": seconds, **({"failure": failure} if failure else {})}


def late(words: Found, store: Any) -> Found:
    """The last rank is busy in its own code; the error must name the rank and the function."""
    import torch
    import torch.distributed as dist

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group(timeout=timedelta(seconds=DEADLINE))
    dist.all_reduce(torch.ones(4, device=words["device"]), group=group)
    dist.barrier()
    if rank == last:
        hang.load_batch(store, [f"told/{each}" for each in range(last)])
        return {}
    seconds, text = _until_error(words["device"], group)
    store.set(f"told/{rank}", "")
    store.wait([f"told/{each}" for each in range(last)])
    return _judge(text, seconds, 2 * DEADLINE, [f"rank {last} (", "in load_batch"])


def killed(words: Found, store: Any) -> Found:
    """The last rank is killed; the other ranks must name it, and continue without it."""
    import torch
    import torch.distributed as dist

    import torch_sagellm

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dist.all_reduce(torch.ones(4, device=words["device"]))
    dist.barrier()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    seconds, text = _until_error(words["device"], None)
    found = _judge(text, seconds, NOTICED, [f"rank {last} ("])
    torch_sagellm.recover(timeout=60)
    total = torch.ones(1024, device=words["device"])
    dist.all_reduce(total)
    if not bool((total.cpu() == last).all()):
        found["failure"] = f"after recover() the sum is {total[0].item()}, {last} expected"
    # Rank 0 may exit only after the other ranks have their result.
    store.set(f"over/{rank}", "")
    store.wait([f"over/{each}" for each in range(last)])
    return found


# ------------------------------------------------------------------------------------------------------ measured


def bandwidth(words: Found, _: Any) -> Found:
    """The rows of `torch-sagellm bench`, and the bandwidth in GB/s of plain copies that all ranks make at the same
    time."""
    job = _job(words)
    rows = bench.measure(job)
    wrong = sum(row.wrong for row in rows)
    found: Found = {"rows": [asdict(row) for row in rows], "copy": _copies(job)}
    return {**found, "failure": f"{wrong} wrong values"} if wrong else found


def _copies(job: bench.Job) -> float:
    """The slowest rank's bandwidth of copying the largest size while all ranks copy."""
    import torch
    import torch.distributed as dist

    size = max(job.sizes)
    source = torch.zeros(max(1, size // 4), device=job.device)
    target = torch.empty_like(source)
    dist.barrier()
    times = []
    for _ in range(ROUNDS):
        bench._come_to_an_end(job)
        began = time.perf_counter()
        target.copy_(source)
        bench._come_to_an_end(job)
        times.append(time.perf_counter() - began)
    slowest = torch.tensor([sorted(times)[ROUNDS // 2]], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return size / float(slowest) / 1e9


def overlap(words: Found, _: Any) -> Found:
    """For each backend: the share of an all_reduce that is hidden behind a computation which does not need its
    result."""
    import torch
    import torch.distributed as dist

    job = _job(words)
    data = torch.zeros(max(1, max(job.sizes) // 8), device=job.device)
    square = torch.zeros(512, 512, device=job.device)
    products = 1

    def compute() -> None:
        for _ in range(products):
            torch.mm(square, square)

    def timed(group: Any, communicates: bool, computes: bool) -> float:
        bench._come_to_an_end(job)
        dist.barrier(group)
        began = time.perf_counter()
        work: Any = dist.all_reduce(data, group=group, async_op=True) if communicates else None
        if computes:
            compute()
        if work is not None:
            work.wait()
        bench._come_to_an_end(job)
        return time.perf_counter() - began

    groups = {name: dist.group.WORLD if name == bench.OURS else dist.new_group(backend=name) for name in job.backends}
    timed(dist.group.WORLD, False, True)  # warms up
    once = timed(dist.group.WORLD, False, True)
    # The computation takes as long as the slowest communication, the same on every rank.
    wanted = torch.tensor([max([timed(group, True, False) for group in groups.values()]) / once])
    dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
    products = max(1, min(10_000, int(wanted.item())))
    ways = {"communication": (True, False), "computation": (False, True), "both": (True, True)}
    times: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in groups}
    for turn in range(ROUNDS + 1):
        for (name, group), (way, how) in itertools.product(groups.items(), ways.items()):
            seconds = timed(group, *how)
            if turn:  # the first one warms up
                times[name][way].append(seconds)
    found: Found = {"hidden": {}, "times": {}}
    for name, by_way in times.items():
        middle = {way: sorted(each)[ROUNDS // 2] for way, each in by_way.items()}
        could = min(middle["communication"], middle["computation"])
        hidden = (middle["communication"] + middle["computation"] - middle["both"]) / could
        found["hidden"][name] = min(1.0, max(0.0, hidden))
        found["times"][name] = ", ".join(f"{way} {seconds * 1e3:.3g} ms" for way, seconds in middle.items())
    return found
