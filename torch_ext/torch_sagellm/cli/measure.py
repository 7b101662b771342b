"""``python -m torch_sagellm simulate --check``: runs the schedules on this machine and prints the model's error.

Ranks are processes that exchange messages through torch's gloo over loopback. First all ranks together measure the
parameters of the model, by messages around a ring: small ones, large ones, many at the same time, and ones that the
receiver copies or adds. Then they run the schedules, check the results, and print the predicted and the measured time.
The executor is simple Python code; its cost is part of both the measured parameters and the runs.

The core has another executor, `src/engine/multihost`, and links between threads for its tests, `src/engine/local.rs`.
Neither can replace this executor. A link between threads is a copy under a lock inside one process, and has neither the
latency nor the bandwidth of the links in the model. Over a real link the engine runs only if ranks are on several
hosts. It then also agrees on batches and combines inside each host, but this program measures a schedule alone.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch_sagellm._private.units import show_size, show_time, size_text
from torch_sagellm.cli import ranks as processes
from torch_sagellm.cli.predict import TWO_LEVELS, Link, Machine, Prediction, predict
from torch_sagellm.cli.show import complain, fit

MOST_RANKS, MOST_BYTES = 8, 16 << 20
START_SECONDS = 60.0
#: The ranks' deadline allows this many seconds for each schedule at one size: many, because many ranks may share few
#: cores.
CASE_SECONDS = 60.0
#: One schedule at one size is repeated for RUN_SECONDS, but at least `LEAST_TIMES` times.
RUN_SECONDS, LEAST_TIMES = 0.2, 5
BYTES_OF_A_NUMBER = 4
#: Sizes in bytes if none were named.
SIZES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)
#: Size in bytes of a large message, and number of messages in a burst, for measuring the links.
LARGE, BURST = 1 << 20, 8


#: The number of parts of the vector, and this rank's messages: step, whether this rank sends it, peer, the parts in it,
#: and how the receiver combines them.
Program = tuple[int, list[tuple[int, bool, int, list[int], str]]]


@dataclass
class Message:
    peer: int
    #: Ranges of the vector, as (start, end).
    runs: list[tuple[int, int]]
    how: str
    room: Any


@dataclass
class Step:
    #: Number of the step in the schedule; also the tag of its messages, because ranks may skip different steps.
    number: int
    sends: list[Message] = field(default_factory=list)
    recvs: list[Message] = field(default_factory=list)


class Runner:
    """Executes one rank's schedule over vectors of float32. For kinds that move blocks, the parts are equal blocks."""

    def __init__(self, op: str, program: Program, ranks: int, rank: int, numbers: int) -> None:
        import torch

        self.op, self.ranks, self.rank = op, ranks, rank
        self.parts, messages = program
        cuts = ranks if op == "all_to_all" else max(1, self.parts)
        sizes = [numbers // cuts + (part < numbers % cuts) for part in range(cuts)]
        if op == "all_to_all":
            sizes = [numbers // cuts] * self.parts
        self.starts = [0]
        for size in sizes:
            self.starts.append(self.starts[-1] + size)
        steps: dict[int, Step] = {}
        for number, sends, peer, parts, how in messages:
            runs = self._runs(parts)
            # A barrier's messages are empty but must be sent, so each carries one number.
            length = sum(end - start for start, end in runs) if op != "barrier" else 1
            if length:
                step = steps.setdefault(number, Step(number))
                (step.sends if sends else step.recvs).append(Message(peer, runs, how, torch.zeros(length)))
        self.steps = list(steps.values())

    def _runs(self, parts: Sequence[int]) -> list[tuple[int, int]]:
        """The ranges of the vector for some parts; adjacent ranges are merged."""
        runs: list[tuple[int, int]] = []
        for part in parts:
            start, end = self.starts[part], self.starts[part + 1]
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], end)
            elif end > start:
                runs.append((start, end))
        return runs

    def start_values(self) -> Any:
        """Whole numbers, so that sums are exact: rank + 1 if elements are combined, else each part's number + 1 at its
        owner."""
        import torch

        values = torch.full((self.starts[-1],), -1.0)
        if self.op in ("all_reduce", "reduce", "reduce_scatter"):
            return values.fill_(self.rank + 1.0)
        for part in range(self.parts):
            owner = {"all_gather": part, "gather": part, "all_to_all": part // self.ranks}.get(self.op, 0)
            if owner == self.rank:
                values[self.starts[part] : self.starts[part + 1]] = part + 1.0
        return values

    def is_right(self, values: Any) -> bool:
        """Whether the parts that belong to this rank hold the result."""
        total = self.ranks * (self.ranks + 1) / 2
        for part in range(self.parts):
            mine = {
                "reduce": self.rank == 0,
                "gather": self.rank == 0,
                "scatter": part == self.rank,
                "reduce_scatter": part == self.rank,
                "all_to_all": part % self.ranks == self.rank,
            }.get(self.op, True)
            wanted = total if self.op in ("all_reduce", "reduce", "reduce_scatter") else part + 1.0
            if mine and not bool((values[self.starts[part] : self.starts[part + 1]] == wanted).all()):
                return False
        return True

    def run(self, values: Any) -> None:
        import torch
        import torch.distributed as dist

        for step in self.steps:
            works = [dist.irecv(recv.room, recv.peer, tag=step.number) for recv in step.recvs]
            for send in step.sends:
                # Copied before this step writes anything, because a send has the data from before the step.
                if send.runs:
                    torch.cat([values[start:end] for start, end in send.runs], out=send.room)
                works.append(dist.isend(send.room, send.peer, tag=step.number))
            for work in works:
                work.wait()
            if step.recvs and step.recvs[0].how == "in_rank_order":
                self._fold(values, step.recvs)
            else:
                self._take(values, step.recvs)

    def _fold(self, values: Any, recvs: list[Message]) -> None:
        """Combines received data and this rank's own data in rank order."""
        start, end = recvs[0].runs[0]
        all_values = {self.rank: values[start:end].clone(), **{recv.peer: recv.room for recv in recvs}}
        first, *rest = (all_values[rank] for rank in sorted(all_values))
        values[start:end] = first
        for room in rest:
            values[start:end] += room

    def _take(self, values: Any, recvs: list[Message]) -> None:
        for recv in recvs:
            at = 0
            for start, end in recv.runs:
                theirs = recv.room[at : at + end - start]
                at += end - start
                if recv.how == "copy":
                    values[start:end] = theirs
                else:
                    values[start:end] += theirs


def _seconds(body: Callable[[], object]) -> float:
    """The median time of one call on the slowest rank, if all ranks begin together."""
    import torch
    import torch.distributed as dist

    times: list[float] = []
    body()
    for _ in range(2):
        # Rank 0 alone decides the number of repetitions, from the time of one call.
        count = torch.tensor([max(LEAST_TIMES, int(RUN_SECONDS / 2 / max(times[-1], 1e-6))) if times else 3.0])
        dist.broadcast(count, src=0)
        for _ in range(min(200, int(count.item()))):
            dist.barrier()
            started = time.perf_counter()
            body()
            times.append(time.perf_counter() - started)
    slowest = torch.tensor([statistics.median(times[3:])], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())


def _measured_machine(rank: int, ranks: int) -> Machine:
    """Measures the parameters of the cost model, by messages around a ring in which all ranks send and receive at the
    same time."""
    import torch

    after, before = (rank + 1) % ranks, (rank - 1) % ranks

    def around(messages: int, size: int, how: str = "copy") -> float:
        """Seconds of one step in which each rank sends this number of messages of this size."""
        lines = [(0, True, after, [2 * i], how) for i in range(messages)]
        lines += [(0, False, before, [2 * i + 1], how) for i in range(messages)]
        numbers = 2 * messages * (size // BYTES_OF_A_NUMBER)
        runner = Runner("ring", (2 * messages, lines), ranks, rank, numbers)
        return _seconds(partial(runner.run, torch.zeros(numbers)))

    alpha = around(1, BYTES_OF_A_NUMBER)
    overhead = max(0.0, around(BURST, BYTES_OF_A_NUMBER) - alpha) / (BURST - 1)
    large = around(1, LARGE)
    beta = max(1e-13, (large - alpha) / LARGE)
    # The time of an addition, without the copying that is part of every message.
    gamma = max(1e-13, (around(1, LARGE, "reduce_after") - large) / LARGE)
    link = Link(alpha, overhead, beta)
    return Machine(link, link, gamma, ranks)


def run_rank(rank: int, ranks: int, port: int, job: str) -> int:
    """Runs one process of the check; rank 0 prints its results as the last line."""
    import torch
    import torch.distributed as dist

    from torch_sagellm._private import load

    core = load.extension()
    torch.set_num_threads(1)
    processes.join("gloo", rank, ranks, port, START_SECONDS)
    asked = json.loads(job)
    shared: list[Any] = [_measured_machine(rank, ranks)]
    dist.broadcast_object_list(shared, src=0)
    machine: Machine = shared[0]
    lines = []
    for size in asked["sizes"]:
        for name in asked["algorithms"]:
            predicted: Prediction = predict(core, asked["op"], [name], ranks, [size], machine)[name][0]
            program = core.program(asked["op"], name, ranks, predicted.segments, rank)
            runner = Runner(asked["op"], program, ranks, rank, size // BYTES_OF_A_NUMBER)
            values = runner.start_values()
            runner.run(values)
            if not runner.is_right(values):
                print(f"rank {rank}: {asked['op']} by {name} gave a wrong result at {size} bytes")
                return 1
            measured = _seconds(partial(runner.run, values))
            lines.append([name, size, predicted.segments, predicted.seconds, measured])
    dist.barrier()
    if rank == 0:
        print(json.dumps({"machine": [*machine.host.numbers(), machine.gamma], "lines": lines}))
    dist.destroy_process_group()
    return 0


def _ranks_at_work(ranks: int, cases: int, job: str) -> dict[str, Any]:
    """Starts the ranks and returns what rank 0 printed; a RuntimeError with a rank's output if it fails."""
    limit = START_SECONDS + cases * CASE_SECONDS
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended, _ = processes.run("simulate", ranks, job, seconds=limit, environment=environment)
    for rank, one in enumerate(ended):
        if one.failure:
            raise RuntimeError(f"rank {rank} of {ranks} {one.failure}: {one.output.strip()}")
    found: dict[str, Any] = json.loads(ended[0].output.splitlines()[-1])
    return found


def check(
    op: str, names: Sequence[str], asked: Sequence[int] | None, sizes: Sequence[int] | None
) -> dict[str, Any] | None:
    """Runs schedules on this machine, prints predicted and measured times and the error; None if a rank fails."""
    names = [name for name in names if name != TWO_LEVELS]
    counts = list(asked or (2, 4))
    if wrong := [ranks for ranks in counts if not 2 <= ranks <= MOST_RANKS]:
        raise ValueError(f"--ranks {wrong[0]}: --check starts from 2 to {MOST_RANKS} ranks on this machine")
    if wrong := [size for size in sizes or () if not BYTES_OF_A_NUMBER <= size <= MOST_BYTES]:
        least, most = size_text(BYTES_OF_A_NUMBER), size_text(MOST_BYTES)
        raise ValueError(f"--sizes {size_text(wrong[0])}: --check runs sizes from {least} to {most}")
    fitting = list(sizes or SIZES)
    cores = len(os.sched_getaffinity(0))
    many = ", ".join(map(str, counts))
    sizes_text = f"{len(fitting)} size{'s' * (len(fitting) > 1)}"
    print(fit(f"{op} by gloo messages over loopback, {cores} usable cores; {many} ranks, {sizes_text}", 2))
    groups = []
    for ranks in counts:
        job = json.dumps({"op": op, "algorithms": list(names), "sizes": fitting})
        try:
            found = _ranks_at_work(ranks, len(names) * len(fitting), job)
        except RuntimeError as error:
            complain(f"torch-sagellm simulate: {error}")
            return None
        alpha, overhead, beta, gamma = found["machine"]
        links = f"measured links: {Link(alpha, overhead, beta)}; combining {1e-9 / gamma:.3g} GB/s"
        print("\n" + fit(f"{ranks} ranks; {links}", 2))
        print(f"{'bytes':>10}  {'algorithm':<20} {'predicted':>10} {'measured':>10} {'error':>7}")
        errors, runs = [], []
        for name, size, segments, predicted, measured in found["lines"]:
            errors.append(predicted / measured - 1)
            run = {"algorithm": name, "size": size, "segments": segments}
            runs.append({**run, "predicted": predicted, "measured": measured})
            shown = f"{name} ({segments})" if segments > 1 else name
            times = f"{show_time(predicted):>10} {show_time(measured):>10}"
            print(f"{show_size(size):>10}  {shown:<20} {times} {errors[-1]:>+7.0%}")
        groups.append({"ranks": ranks, "measured_links": vars(Link(alpha, overhead, beta)), "runs": runs})
        worst = max(errors, key=abs)
        print(
            f"error of the model, {ranks} ranks: median {statistics.median(map(abs, errors)):.0%}, worst {worst:+.0%}"
        )
        if ranks > cores:
            what = f"{ranks} ranks share {cores} cores here"
            print(fit(f"{what}; the model accounts for that only through the measured links.", 2))
    return {"op": op, "groups": groups}
