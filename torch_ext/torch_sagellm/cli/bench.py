"""``torch-sagellm bench``: times and bandwidths of collectives in the table format of nccl-tests.

Every size is first checked on known values. Then this size is run in turns on all groups (ours, and that of a backend
of torch with ``--compare``), forwards and backwards, so that a slow phase of the machine affects all of them. A time is
the mean of one call over the iterations, on the slowest rank. `benchmarks/` has measurements with percentiles, and
earlier results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch_sagellm._private.units import show_size
from torch_sagellm.cli import arguments, chart, collectives
from torch_sagellm.cli import ranks as processes
from torch_sagellm.cli.show import Bar, columns, complain, counted, fit, is_terminal, paint
from torch_sagellm.cli.simulate import parse_sizes

HELP = "measure collectives: size, time, algbw, busbw, wrong values; compare with gloo"
DESCRIPTION = """Measures collectives and prints the table of nccl-tests, on CPU tensors or with --device on those of an
accelerator; the head says what carried them, and each row whether that was a simulator. Starts its own ranks on this
host, or measures between those of torchrun where it runs under it. Sizes are those of the whole tensor (the output of
a gather, the input of a scatter). algbw is size by time; busbw, which compares with the speed of a link, is algbw
times 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter, all_to_all, gather and scatter, 1 for the
others. Exits with 1 when a value was wrong or a rank failed."""
EXAMPLES = """examples:
  torch-sagellm bench                                     all_reduce between two ranks, 8 bytes to 64 MiB
  torch-sagellm bench --preset quick --compare gloo       1, 10 and 100 MB, 10 warm-ups, 100 iterations, beside gloo
  torch-sagellm bench --op all --ranks 4 --sizes 4KiB..4MiB
  torch-sagellm bench --plot                              also draws the bandwidths here; --plot bw.png needs matplotlib
  torch-sagellm bench --device cuda --ranks 4             each rank on the device of its number
  torchrun --nproc-per-node=2 -m torch_sagellm bench --op all_gather
"""
CPU = "cpu"
#: Prefix of the names of the libraries that tests/simulators builds.
SIMULATOR = "libsagellm_sim_"
OURS = "sagellm"
BACKENDS = ("gloo", "mpi", "ucc")
OP_HELP = f"{', '.join(collectives.OPS)}, or all"
#: Seconds after which ranks are killed, so that a hanging measurement ends.
LIMIT = 3600.0
SET_UP_SECONDS = 120.0


class Preset(NamedTuple):
    """Sizes in bytes, and the number of calls before and in each measurement."""

    sizes: list[int]
    warmup: int
    iterations: int


DEFAULT = Preset(parse_sizes("8..64MiB:8"), 5, 20)
PRESETS = {"quick": Preset([10**6, 10**7, 10**8], 10, 100)}


@dataclass(frozen=True)
class Job:
    """The measurement that the arguments request."""

    ops: list[str]
    sizes: list[int]
    dtype: str
    redop: str
    warmup: int
    iterations: int
    backends: list[str]
    #: "cpu", or torch's name of the accelerator.
    device: str


@dataclass(frozen=True)
class Row:
    """One operation at one size on one backend: seconds per call on the slowest rank. A GB/s is 10^9 bytes per second.

    ``carrier`` says what carried tensors of a device; it is empty on the CPU. ``simulated`` marks figures of a
    simulator, which say nothing about a device.
    """

    op: str
    backend: str
    size: int
    count: int
    dtype: str
    redop: str
    seconds: float
    algbw: float
    busbw: float
    wrong: int
    device: str = CPU
    carrier: str = ""
    simulated: bool = False


def _sizes(text: str) -> list[int]:
    found = parse_sizes(text)
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a size of 0, which nothing moves")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--op", default="all_reduce", type=arguments.one_of([*collectives.OPS, "all"]), help=f"{OP_HELP} (all_reduce)"
    )
    parser.add_argument("--sizes", type=_sizes, help="bytes of the whole tensor: 8,4KiB..16MiB:2 (8..64MiB:8)")
    types, ways = ", ".join(collectives.DTYPES), ", ".join(collectives.REDUCTIONS)
    parser.add_argument(
        "--dtype", default="float32", choices=collectives.DTYPES, metavar="TYPE", help=f"{types} (float32)"
    )
    parser.add_argument(
        "--redop", choices=list(collectives.REDUCTIONS), metavar="OP", help=f"how to combine: {ways} (sum)"
    )
    parser.add_argument(
        "--device", default=CPU, help="where the tensors are: cpu, or cuda, npu, mlu as torch names it (cpu)"
    )
    parser.add_argument("--ranks", type=arguments.ranks(), help="ranks to start on this host (2)")
    parser.add_argument("--warmup", type=arguments.whole(1, 10**9), help="calls before the timed ones (5)")
    parser.add_argument("--iterations", type=arguments.whole(1, 10**9), help="timed calls (20)")
    parser.add_argument("--preset", choices=list(PRESETS), help="quick: 1, 10, 100 MB, 10 warm-ups, 100 iterations")
    parser.add_argument("--compare", choices=BACKENDS, help="measure this backend of torch as well")
    parser.add_argument(
        "--plot",
        nargs="?",
        const=chart.HERE,
        metavar="FILE",
        help="draw the bandwidths here, or into a picture (.png, .svg)",
    )
    arguments.add_json_file(parser)
    arguments.add_yes(parser)


def job_of(parsed: argparse.Namespace) -> Job:
    """The job that the arguments request; arguments have priority over a preset's values."""
    base = PRESETS[parsed.preset] if parsed.preset else DEFAULT
    return Job(
        ops=list(collectives.OPS) if parsed.op == "all" else [parsed.op],
        sizes=parsed.sizes or base.sizes,
        dtype=parsed.dtype,
        redop=parsed.redop or "sum",
        warmup=parsed.warmup or base.warmup,
        iterations=parsed.iterations or base.iterations,
        backends=[OURS] + ([parsed.compare] if parsed.compare else []),
        device=parsed.device,
    )


def run(parsed: argparse.Namespace) -> int:
    if parsed.plot:
        chart.check(parsed.plot)
    if parsed.json and parsed.json != arguments.HERE:
        arguments.check_output("--json", parsed.json)
    with arguments.text_beside(parsed.json == arguments.HERE):
        rows = _run(parsed)
    if rows is None:
        return 1
    if parsed.json and int(os.environ.get("RANK", 0)) == 0:
        text = json.dumps([asdict(row) for row in rows], indent=1)
        print(text) if parsed.json == arguments.HERE else parsed.json.write_text(text)
    return 1 if any(row.wrong for row in rows) else 0


def _run(parsed: argparse.Namespace) -> list[Row] | None:
    job = job_of(parsed)
    if parsed.redop and not any(op in collectives.REDUCING for op in job.ops):
        raise ValueError(f"--redop {parsed.redop}: {parsed.op} combines no numbers")
    _check_device(job)
    _check_rival(job)
    _check_average(job)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _check_launcher()
        if parsed.ranks:
            raise ValueError(
                f"--ranks {parsed.ranks}: a launcher has started {os.environ['WORLD_SIZE']} ranks; leave it out"
            )
        rows = _under_a_launcher(job)
    else:
        count = parsed.ranks or 2
        _check_memory(job, count)
        arguments.agree(count, parsed.yes)
        rows = _with_own_ranks(job, count)
    wrong = sum(row.wrong for row in rows or ())
    if rows and int(os.environ.get("RANK", 0)) == 0:
        if wrong:
            print(paint(f"# {wrong} wrong values", "red"))
        if parsed.plot:
            chart.plot(parsed.plot, _series(rows))
    return rows


def _check_launcher() -> None:
    """Checks the numbers that a launcher passes, because torch's error for a wrong one does not name the variable."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        text = os.environ.get(name, "0")
        if not (text.isascii() and text.isdecimal()):
            raise ValueError(f"{name}={text!r} is no whole number; a launcher sets it, else unset it")


def _check_device(job: Job) -> None:
    """Checks the device before anything is started."""
    import torch

    if job.device == CPU:
        return
    if len(job.backends) > 1:
        raise ValueError(f"--compare {job.backends[1]}: it is compared on CPU tensors only, without --device")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != job.device:
        sees = "no accelerator" if found is None else f"the accelerator {found.type}"
        raise ValueError(
            f"--device {job.device}: torch sees {sees} here; expected cpu, or the name of one that it sees"
        )


def _check_rival(job: Job) -> None:
    """Checks the compared backends before anything is started."""
    import torch.distributed as dist

    for name in job.backends[1:]:
        if not getattr(dist, f"is_{name}_available")():
            raise ValueError(f"--compare {name}: this build of torch was made without {name}")


def _check_average(job: Job) -> None:
    """For avg, checks before the start that the dtype and the backends support it."""
    if job.redop != "avg":
        return
    if job.dtype not in collectives.FLOATS:
        raise ValueError(f"--redop avg: of {job.dtype} there is none; expected one of {', '.join(collectives.FLOATS)}")
    for name in job.backends[1:]:
        if name in collectives.WITHOUT_AVG:
            raise ValueError(f"--redop avg: {name} has none; leave out --compare, or take sum")


def _check_memory(job: Job, ranks: int) -> None:
    """Checks, before ranks are started, that there is memory for each rank's input and checked result."""
    if job.device != CPU:
        return
    most = max(job.sizes)
    held, there = 2 * most * ranks, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if held > there:
        raise ValueError(
            f"--sizes {show_size(most)}: {ranks} ranks need more than {show_size(held)} for it, and this machine has "
            f"{show_size(there)}"
        )


def _series(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """For each line of the chart: size and bus bandwidth."""
    names = {row.backend for row in rows}
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        name = f"{row.op}, {row.backend}" if len(names) > 1 else row.op
        found.setdefault(name, []).append((row.size, row.busbw))
    return found


def _under_a_launcher(job: Job) -> list[Row] | None:
    """Runs in a rank that torchrun or another launcher has started."""
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_RANK", 0))
    _choose_device(job, local)
    dist.init_process_group(OURS)
    try:
        return measure(job)
    finally:
        dist.destroy_process_group()


def _with_own_ranks(job: Job, count: int) -> list[Row] | None:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    words = json.dumps(asdict(job))
    ended, store = processes.run("bench", count, words, seconds=LIMIT, environment=environment, shown=sys.stdout)
    failed = [f"rank {rank} {one.failure}" for rank, one in enumerate(ended) if one.failure]
    if failed:
        complain(f"torch-sagellm bench: {', '.join(failed)}")
        return None
    return [Row(**row) for row in json.loads(store.get("rows"))]


def run_rank(rank: int, count: int, port: int, words: str) -> int:
    """One rank of the measurement; rank 0 prints, and puts its rows into the store."""
    import torch.distributed as dist

    job = Job(**json.loads(words))
    _choose_device(job, rank)
    store = processes.join(OURS, rank, count, port, SET_UP_SECONDS)
    rows = measure(job)
    if rank == 0:
        store.set("rows", json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()
    return 0


# ------------------------------------------------------------------------------------------------- inside a rank


def _choose_device(job: Job, place: int) -> None:
    """Makes the device with this rank's number on its host current; if there are fewer devices, ranks share them."""
    import torch

    if job.device != CPU:
        torch.accelerator.set_device_index(place % torch.accelerator.device_count())


def _carrier(job: Job) -> str:
    """What carries tensors of the device in the default group; empty on the CPU."""
    from torch_sagellm.observe import explain

    return "" if job.device == CPU else explain.carrier(explain.backend_of(), job.device)


def _come_to_an_end(job: Job) -> None:
    """Waits for the calls in flight on the device."""
    import torch

    if job.device != CPU:
        torch.accelerator.synchronize()


def measure(job: Job) -> list[Row]:
    """Measures everything over the default group.

    Rank 0 prints each row immediately. Returns the same rows on every rank.
    """
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = {name: dist.group.WORLD if name == OURS else dist.new_group(backend=name) for name in job.backends}
    cells = [(op, size) for op in job.ops for size in job.sizes]
    bar = Bar(len(cells), visible=rank == 0)
    rows: list[Row] = []
    carrier = _carrier(job)
    narrow = is_terminal(sys.stdout) and columns(sys.stdout) < max(map(len, _head(job, ranks, carrier)[-2:]))
    if rank == 0:
        print("\n".join(_head(job, ranks, carrier, narrow)), flush=True)
    for at, (op, size) in enumerate(cells):
        bar.show(at, f"{op} {show_size(size)}")
        found = _measure_cell(job, groups, collectives.make(op, size, job.dtype, job.redop, job.device), carrier)
        rows += found
        bar.end()
        if rank == 0:
            print(line(found, narrow), flush=True)
    return rows


def _measure_cell(job: Job, groups: dict[str, Any], case: collectives.Case, carrier: str) -> list[Row]:
    import torch
    import torch.distributed as dist

    wrong, times = dict.fromkeys(groups, 0), dict.fromkeys(groups, 0.0)
    for name, group in groups.items():
        wrong[name] = case.wrong(group)
        for _ in range(job.warmup):
            case.call(group)
    first, second = (job.iterations + 1) // 2, job.iterations // 2
    for name, count in [*((name, first) for name in groups), *((name, second) for name in reversed(list(groups)))]:
        group = groups[name]
        _come_to_an_end(job)
        dist.barrier(group)
        began = time.perf_counter()
        for _ in range(count):
            case.call(group)
        _come_to_an_end(job)
        times[name] += time.perf_counter() - began
    slowest = torch.tensor([times[name] / job.iterations for name in groups], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    all_wrong = torch.tensor([wrong[name] for name in groups])
    dist.all_reduce(all_wrong)
    return [
        _row(case, job, name, seconds, amount, carrier)
        for name, seconds, amount in zip(groups, slowest.tolist(), all_wrong.tolist(), strict=True)
    ]


def _row(case: collectives.Case, job: Job, backend: str, seconds: float, wrong: int, carrier: str) -> Row:
    algbw = case.size / seconds / 1e9
    redop = job.redop if case.op in collectives.REDUCING else "none"
    busbw, simulated = algbw * case.bus_factor, SIMULATOR in carrier
    figures = (seconds, algbw, busbw, wrong)
    return Row(case.op, backend, case.size, case.count, job.dtype, redop, *figures, job.device, carrier, simulated)


def _head(job: Job, ranks: int, carrier: str, narrow: bool = False) -> list[str]:
    other = [] if narrow else job.backends[1:]
    names = f"{'type':>9} {'redop':>6} {'time':>11} {'algbw':>8} {'busbw':>8} {'wrong':>6}"
    units = f"{'':>9} {'':>6} {'(us)':>11} {'(GB/s)':>8} {'(GB/s)':>8} {'':>6}"
    names = f"{'size':>10} {names}" if narrow else f"{'size':>12} {'count':>12} {names}"
    units = f"{'(B)':>10} {units}" if narrow else f"{'(B)':>12} {'(elements)':>12} {units}"
    for name in other:
        names += f" {name + ' time':>11} {'busbw':>8} {'wrong':>6} {'ratio':>7}"
        units += f" {'(us)':>11} {'(GB/s)':>8} {'':>6} {'':>7}"
    calls = f"{counted(job.warmup, 'warm-up')}, {counted(job.iterations, 'iteration')}"
    who = f"# {', '.join(job.ops)}; {counted(ranks, 'rank')}; {calls}; checked"
    heads = [fit(who, 2), f"#{'op':<15}{names}", f"#{'':<15}{units}"]
    if job.device != CPU:
        heads.insert(1, f"# {job.device} tensors {carrier}")
    if SIMULATOR in carrier:
        heads.insert(2, "# by a SIMULATOR of the library: the times are those of this program, not of any device")
    return heads


def line(found: list[Row], narrow: bool = False) -> str:
    """One line of the table: the first backend's row, and the columns of the other backends.

    On a ``narrow`` terminal the number of elements is left out, and each other backend has a line below.
    """
    own = found[0]
    if narrow:
        text = f" {own.op:<15}{own.size:>10} {own.dtype:>9} {own.redop:>6} {_figures(own)}"
        for other in found[1:]:
            label = f"   {other.backend}, ratio {other.seconds / own.seconds:.2f}x"
            text += f"\n{label:<43} {_figures(other)}"
        return text + ("\n   simulator" if own.simulated else "")
    text = f" {own.op:<15}{own.size:>12} {own.count:>12} {own.dtype:>9} {own.redop:>6} {_figures(own)}"
    for other in found[1:]:
        text += f" {_figures(other, False)} {other.seconds / own.seconds:>6.2f}x"
    return text + ("  simulator" if own.simulated else "")


def _figures(row: Row, with_algbw: bool = True) -> str:
    wrong = paint(f"{row.wrong:>6}", "red" if row.wrong else "")
    middle = f" {row.algbw:>8.3f}" if with_algbw else ""
    return f"{row.seconds * 1e6:>11.2f}{middle} {row.busbw:>8.3f} {wrong}"
