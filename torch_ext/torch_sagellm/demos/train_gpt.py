"""Train a small byte-level GPT with DistributedDataParallel and measure its communication.

The text is the source code of the Python standard library, which is on every machine. The script is ordinary
DDP: the backend is a name on the command line. With --compare the same steps run over a second backend in the
same processes, in alternating blocks, so that both see the same load of the machine. Communication times are
read from torch.profiler's records "<backend>:<op>", which every backend writes in the same form. If the first
backend is sagellm, `torch_sagellm.step()` also measures its steps that run without the profiler.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import sysconfig
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

# The profiler's library writes its set-up steps to stderr, which would interrupt the progress bar.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

EXAMPLES = """examples:
  torch-sagellm demo --ranks 2 --steps 100
  torchrun --nproc-per-node=2 -m torch_sagellm.demos.train_gpt
  torchrun --nproc-per-node=2 -m torch_sagellm.demos.train_gpt --backend gloo --compare none
"""
STEP_RECORD = "train_step"
DTYPE_BYTES = {
    "float": 4,
    "double": 8,
    "int": 4,
    "long int": 8,
    "long": 8,
    "short int": 2,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "c10::complex<float>": 8,
}


# ------------------------------------------------------------------------------------------------- the model


@dataclass
class Config:
    """Shape of the network, saved with the weights, so that a later program can rebuild it."""

    layers: int = 4
    dim: int = 192
    heads: int = 6
    context: int = 128
    vocabulary: int = 256


class Block(nn.Module):  # type: ignore[misc]
    """One transformer layer: attention, then a two-layer perceptron, both with a residual path."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.norm2 = nn.LayerNorm(config.dim)
        wide = 4 * config.dim
        self.mlp = nn.Sequential(nn.Linear(config.dim, wide), nn.GELU(), nn.Linear(wide, config.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):  # type: ignore[misc]
    """A byte-level GPT; forward returns the loss if targets are given, otherwise the logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, data: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(data) + self.positions(torch.arange(data.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# -------------------------------------------------------------------------------------------------- the data


def read_standard_library(limit: int) -> torch.Tensor:
    """The standard library's *.py files in sorted order, cut at `limit` bytes, as one tensor of bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if path.parent.name in {"site-packages", "test", "tests"}:
            continue
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 100_000:
        raise SystemExit(f"the standard library at {root} holds only {len(text)} bytes of *.py files: too few to train")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def draw_batch(text: torch.Tensor, batch: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`batch` random pieces of the text, and the same pieces shifted by one. The result depends only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context - 1, (batch,), generator=generator).tolist()
    pieces = torch.stack([text[s : s + context + 1] for s in starts]).long()
    return pieces[:, :-1], pieces[:, 1:]


# ------------------------------------------------------------------- communication, from the profiler's records

Interval = tuple[float, float]


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time as sorted, disjoint intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract(from_: list[Interval], minus: list[Interval]) -> list[Interval]:
    """The time in `from_` that is not in `minus`; both must be sorted and disjoint, as `union` returns them."""
    left: list[Interval] = []
    first = 0
    for start, end in from_:
        while first < len(minus) and minus[first][1] <= start:
            first += 1
        at = start
        for low, high in minus[first:]:
            if low >= end:
                break
            if low > at:
                left.append((at, low))
            at = max(at, high)
        if at < end:
            left.append((at, end))
    return left


def length_within(intervals: list[Interval], window: Interval) -> float:
    return sum(max(0.0, min(end, window[1]) - max(start, window[0])) for start, end in intervals)


@dataclass
class Communication:
    """The communication times of one rank's profiled steps, in microseconds.

    in_flight: at least one operation was running, whether or not the training thread computed meanwhile.
    waited:    an operation was running or being issued, and the training thread computed nothing.
    """

    steps: list[float] = field(default_factory=list)
    in_flight: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    operations: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, events: list[Any], backend: str) -> None:
        """Reads one profile. It uses only names, times, shapes and the thread, which every backend records alike."""
        windows = [e for e in events if e.name == STEP_RECORD]
        thread = windows[0].thread
        records, calls, computing = [], [], []
        for e in events:
            span = (e.time_range.start, e.time_range.end)
            if e.name.startswith(f"{backend}:"):
                records.append(span)
                self.operations[e.name.partition(":")[2], payload_bytes(e)].append(span[1] - span[0])
            elif e.thread == thread and e.name.startswith("c10d::"):
                calls.append(span)
            elif e.thread == thread and e.name.startswith(("aten::", "autograd::")):
                computing.append(span)
        in_flight = union(records)
        # DDP issues its all_reduces inside autograd's records, so those calls are removed from the computing time.
        waited = subtract(union(records + calls), subtract(union(computing), union(calls)))
        for e in windows:
            window = (e.time_range.start, e.time_range.end)
            self.steps.append(window[1] - window[0])
            self.in_flight.append(length_within(in_flight, window))
            self.waited.append(length_within(waited, window))


def payload_bytes(event: object) -> int:
    """Bytes of the tensors in a record; needs the profiler's record_shapes."""
    total = 0
    shapes = getattr(event, "input_shapes", None) or []
    dtypes = getattr(event, "input_dtypes", None) or ["float"] * len(shapes)  # older torch keeps no dtypes
    for shape, dtype in zip(shapes, dtypes, strict=False):
        # An argument that is not a tensor also has the shape [], and a dtype such as "Scalar".
        if dtype in DTYPE_BYTES:
            total += math.prod(shape) * DTYPE_BYTES[dtype]
    return total


# ----------------------------------------------------------------------------------------------- the training


class Trainer:
    """One model that trains over one process group; two trainers with equal seeds use equal data."""

    def __init__(
        self,
        args: argparse.Namespace,
        name: str,
        label: str,
        group: dist.ProcessGroup,
        text: torch.Tensor,
        shared: bool = False,
        counted: AbstractContextManager[None] | None = None,
    ) -> None:
        #: The context of each timed step.
        self.counted = counted or nullcontext()
        self.args, self.name, self.group, self.text = args, name, group, text
        self.label = label
        torch.manual_seed(args.seed)
        self.config = Config(layers=args.layers, dim=args.dim, context=args.context)
        self.model = DistributedDataParallel(Gpt(self.config), process_group=group)
        if shared:
            from torch_sagellm import share_buckets

            share_buckets(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.98))
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, args.lr, total_steps=args.steps + 1)
        self.losses: list[float] = []
        self.seconds: list[float] = []  # of every timed step, without a profiler
        self.communication = Communication()

    def step(self) -> None:
        """One optimiser step; the recorded loss is the mean over the ranks."""
        world, rank = dist.get_world_size(), dist.get_rank()
        seed = self.args.seed + (len(self.losses) * world + rank + 1) * 1009
        data, targets = draw_batch(self.text, self.args.batch, self.config.context, seed)
        loss = self.model(data, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=self.group)
        self.losses.append(mean.item() / world)

    def timed_steps(self, count: int, bar: Bar) -> None:
        dist.barrier(group=self.group)
        for _ in range(count):
            begin = time.perf_counter()
            with self.counted:
                self.step()
            self.seconds.append(time.perf_counter() - begin)
            bar.advance(self)

    def profiled_steps(self, count: int, bar: Bar) -> None:
        """A few steps under the profiler. The records are reduced to sums immediately, so memory use stays small."""
        dist.barrier(group=self.group)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            for _ in range(count):
                with record_function(STEP_RECORD):
                    self.step()
                bar.advance(self)
        self.communication.add(list(profiler.events() or []), self.name)


class Bar:
    """A progress bar on rank 0: one moving line on a terminal, a line every few seconds in a log."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.begin, self.shown = total, 0, time.monotonic(), 0.0
        self.terminal = sys.stdout.isatty()

    def advance(self, trainer: Trainer) -> None:
        self.done += 1
        now = time.monotonic()
        due = 0.1 if self.terminal else 5.0
        if dist.get_rank() != 0 or (now - self.shown < due and self.done < self.total):
            return
        self.shown = now
        left = (now - self.begin) / self.done * (self.total - self.done)
        filled = 28 * self.done // self.total
        loss = sum(trainer.losses[-20:]) / len(trainer.losses[-20:])
        line = (
            f"[{'#' * filled}{'.' * (28 - filled)}] {100 * self.done // self.total:3d} %  {trainer.label:<8} "
            f"step {len(trainer.losses):4d}  loss {loss:.3f}  {int(left) // 60}:{int(left) % 60:02d} left"
        )
        end = "\n" if not self.terminal or self.done == self.total else ""
        print(f"\r{line}\x1b[K" if self.terminal else line, end=end, flush=True)


def train(args: argparse.Namespace, trainers: list[Trainer]) -> None:
    """All steps of all trainers, in rounds: a block of each in turn, the last steps of a block under the profiler."""
    bar = Bar(args.steps * len(trainers))
    with profile(activities=[ProfilerActivity.CPU]):
        pass  # the first profile of a process takes long to set up, so do it outside a round
    done = 0
    for number in range(args.rounds):
        block = args.steps * (number + 1) // args.rounds - done
        profiled = min(args.profile_steps, block // 2)
        # Every second round is in reverse order, so that no backend always runs after the same other one.
        for trainer in trainers if number % 2 == 0 else trainers[::-1]:
            trainer.timed_steps(block - profiled, bar)
            if profiled:
                trainer.profiled_steps(profiled, bar)
        done += block


def validation_loss(trainer: Trainer, text: torch.Tensor) -> float:
    """Mean loss on text that was not trained on, over the same pieces on every rank."""
    model = trainer.model.module.eval()
    with torch.no_grad():
        losses = [model(*draw_batch(text, 8, trainer.config.context, 10_000_019 + i)).item() for i in range(8)]
    return float(sum(losses) / len(losses))


# ------------------------------------------------------------------------------------------------ the report


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def human_time(us: float) -> str:
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


@dataclass
class Summary:
    """The report of one backend, over all ranks; times in microseconds per profiled step."""

    label: str
    backend: str
    steps_per_second: float
    step: float
    costs: dict[str, float]  # in the order of the table
    per_step: dict[tuple[str, int], float]  # how often a rank called (operation, bytes)
    operations: dict[tuple[str, int], list[float]]
    exposed: str = ""  # of the steps without the profiler, in one line


def summarize(trainer: Trainer, group: dist.ProcessGroup) -> Summary:
    """Combines the records of all ranks to means over ranks and profiled steps. Collective: every rank calls it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (trainer.seconds, trainer.communication), group=group)
    warm = min(5, len(trainer.seconds) - 1)  # the first steps of a process are slower
    seconds = [s for taken, _ in everyone for s in taken[warm:]]
    costs: list[Communication] = [communication for _, communication in everyone]
    operations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for cost in costs:
        for key, spans in cost.operations.items():
            operations[key] += spans
    profiled = max(1, sum(len(cost.steps) for cost in costs))
    exposed = ""
    if not isinstance(trainer.counted, nullcontext):
        from torch_sagellm import step

        exposed = str(step().report(group))
    return Summary(
        label=trainer.label,
        backend=trainer.name,
        steps_per_second=len(seconds) / sum(seconds),
        step=sum(sum(cost.steps) for cost in costs) / profiled,
        costs={
            "waited for communication": sum(sum(cost.waited) for cost in costs) / profiled,
            # The last rank to arrive waits for no other rank, so a step's smallest wait contains no wait for a slower
            # rank.
            "  without waiting for slower ranks": sum(map(min, zip(*(cost.waited for cost in costs), strict=True)))
            * len(costs)
            / profiled,
            "communication in flight": sum(sum(cost.in_flight) for cost in costs) / profiled,
        },
        per_step={key: len(spans) / profiled for key, spans in operations.items()},
        operations=dict(operations),
        exposed=exposed,
    )


def print_summary(summary: Summary) -> None:
    """Prints the table of one backend."""
    print(f"\n{summary.label}: {summary.steps_per_second:.2f} steps/s")
    if summary.exposed:
        print(f"  without a profiler: {summary.exposed}")
    if not summary.operations:
        print(f'  no profiled record is named "{summary.backend}:<op>": no step was profiled, or it titles no work')
        return
    for cost, us in summary.costs.items():
        print(f"  {cost:<36} {human_time(us):>10} per step  {100 * us / summary.step:5.1f} % of the time")
    print(f"  {'operation':<16} {'bytes':>10} {'per step':>9} {'MiB/step':>9} {'mean':>11} {'p50':>11} {'p90':>11}")
    for (name, size), spans in sorted(summary.operations.items()):
        count = summary.per_step[name, size]
        times = (sum(spans) / len(spans), percentile(spans, 0.5), percentile(spans, 0.9))
        print(
            f"  {name:<16} {human_bytes(size):>10} {count:9.1f} {count * size / 2**20:9.2f} "
            + " ".join(f"{human_time(us):>11}" for us in times)
        )


def compare(args: argparse.Namespace, mine: Trainer, other: Trainer, a: Summary, b: Summary) -> bool:
    """Prints the ratios, and whether both backends trained the same model; returns False if they did not."""
    print(f"\n{a.label} against {b.label}, the same {args.steps} steps in the same run:")
    print(f"  {'steps/s':<36} {a.steps_per_second / b.steps_per_second:6.2f} x")
    for cost, us in a.costs.items():
        if us > 0 and b.costs[cost] > 0:
            change = f"{human_time(b.costs[cost])} -> {human_time(us)} per step"
            print(f"  {cost:<36} {b.costs[cost] / us:6.2f} x less  ({change})")
    worst = max(abs(x - y) for x, y in zip(mine.losses, other.losses, strict=True))
    # With two ranks, a + b equals b + a to the last bit. With three or more, the order of the sum differs between
    # backends, and training amplifies the difference. The comparison is negated so that a NaN counts as a failure.
    allowed = args.tolerance if args.tolerance is not None else (1e-6 if dist.get_world_size() <= 2 else 0.05)
    failed = not worst <= allowed
    verdict = "the losses are equal to the last bit" if worst == 0 else f"largest difference of a loss: {worst:.3g}"
    print(f"  {verdict}{f', more than the {allowed:g} allowed: FAILED' if failed else ''}")
    return not failed


# ------------------------------------------------------------------------------------------------ the program


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", default="sagellm", help="name of the torch.distributed backend (default: sagellm)")
    add("--compare", default="gloo", help='second backend for the same steps, or "none" (default: gloo)')
    add("--shared", action="store_true", help="gradients of the first backend travel in tensors that ranks can reach")
    add("--steps", type=int, default=300, help="optimiser steps per backend (default: 300)")
    add("--batch", type=int, default=4, help="pieces of text per rank and step (default: 4)")
    add("--layers", type=int, default=4)
    add("--dim", type=int, default=192, help="width of the network, a multiple of 6 (default: 192)")
    add("--context", type=int, default=128, help="bytes the network sees (default: 128)")
    add("--lr", type=float, default=2e-3, help="highest learning rate (default: 2e-3)")
    add("--seed", type=int, default=1)
    add("--data-mib", type=float, default=4.0, help="how much of the standard library to read (default: 4)")
    add("--rounds", type=int, default=6, help="blocks of steps per backend, taken in turn (default: 6)")
    add("--profile-steps", type=int, default=5, help="profiled steps at the end of each block (default: 5)")
    add(
        "--tolerance",
        type=float,
        help="largest difference of a loss between the backends (default: 1e-6 for two ranks, 0.05 for more)",
    )
    add(
        "--save",
        type=Path,
        default=Path("out/train_gpt.pt"),
        help='where the weights go, or "none" (default: out/train_gpt.pt)',
    )
    args = parser.parse_args()
    if args.steps < 1 or args.rounds < 1 or args.dim % Config.heads:
        parser.error(f"--steps and --rounds must be at least 1, --dim a multiple of {Config.heads}")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun:\n" + EXAMPLES)
    return args


def run(args: argparse.Namespace) -> int:
    """Runs the whole program on one rank; returns the exit code."""
    dist.init_process_group(args.backend, timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", world))))
    text = read_standard_library(int(args.data_mib * 2**20))
    split = len(text) * 9 // 10

    default_group = dist.group.WORLD
    assert default_group is not None  # init_process_group has just created it
    label = f"{args.backend} --shared" if args.shared else args.backend
    counted = None
    if args.backend == "sagellm":
        from torch_sagellm import step

        counted = step()
    trainers = [Trainer(args, args.backend, label, default_group, text[:split], args.shared, counted)]
    if args.compare != "none":
        group = dist.new_group(backend=args.compare, timeout=timedelta(seconds=120))
        label = args.compare if args.compare != args.backend or args.shared else f"{args.compare} again"
        trainers.append(Trainer(args, args.compare, label, group, text[:split]))
    main = trainers[0]
    if rank == 0:
        count = sum(p.numel() for p in main.model.parameters())
        print(
            f"{world} ranks x {torch.get_num_threads()} threads on {cores} cores, torch {torch.__version__}; "
            f"GPT of {count / 1e6:.2f} M parameters on {len(text) / 2**20:.1f} MiB of the standard library; "
            f"{args.steps} steps over {' and '.join(t.label for t in trainers)}",
            flush=True,
        )

    train(args, trainers)
    summaries = [summarize(trainer, default_group) for trainer in trainers]
    ok = True
    if rank == 0:
        last = sum(main.losses[-20:]) / len(main.losses[-20:])
        valid = validation_loss(main, text[split:])
        bits = valid / math.log(2)
        print(f"\nloss {main.losses[0]:.3f} -> {last:.3f}, on unseen text {valid:.3f} ({bits:.2f} bits per byte)")
        if args.steps >= 50 and last >= main.losses[0]:
            print("the loss did not fall: FAILED")
            ok = False
        for summary in summaries:
            print_summary(summary)
        if len(trainers) == 2:
            ok = compare(args, main, trainers[1], summaries[0], summaries[1]) and ok
        if str(args.save) != "none":
            save(args, main, last, valid)
    verdict = [ok]
    dist.broadcast_object_list(verdict, src=0)
    dist.destroy_process_group()
    return 0 if verdict[0] else 1


def save(args: argparse.Namespace, trainer: Trainer, loss: float, valid: float) -> None:
    """Saves the weights with the shape of their network."""
    args.save.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "config": asdict(trainer.config),
            "model": trainer.model.module.state_dict(),
            "steps": args.steps,
            "loss": loss,
            "validation_loss": valid,
        },
        args.save,
    )
    print(f"weights: {args.save}", flush=True)


def main() -> int:
    args = parse_args()
    interrupted = False

    def on_interrupt(_signal: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun forwards a signal that the terminal has already sent
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        return run(args)
    except (KeyboardInterrupt, RuntimeError):
        # After Ctrl-C a rank may see its peer leave before it gets its own signal; the resulting error is not reported.
        if not interrupted:
            raise
        if os.environ.get("RANK") == "0":
            print("\ninterrupted", flush=True)
        sys.stdout.flush()
        # The groups are not destroyed, because their peers may be gone; the exit closes everything.
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
