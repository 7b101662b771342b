"""``torch-sagellm tune``: measures the fastest algorithm of each operation on this machine, and writes a table of them.

It starts ranks on this host. Every algorithm has a separate group that uses only this algorithm. At each size the
groups take turns, forwards and backwards, so that other load on the machine affects all of them. Two groups use the
defaults: their difference is the noise (A/A), and a different algorithm is kept only if it is better by more than the
noise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

from torch_sagellm._private.units import parse_size, show_time, size_text
from torch_sagellm.cli import arguments
from torch_sagellm.cli import ranks as processes
from torch_sagellm.cli.show import Bar, complain, fit
from torch_sagellm.observe import explain

HELP = "measure the fastest algorithm of each operation and save the table"
DESCRIPTION = """Starts ranks on this host, measures every algorithm at every size against the default, and writes the
winners to a table that new groups of the same number of ranks use. Exits with 1 when nothing was written. Run it while
nothing else runs."""
EXAMPLES = """examples:
  torch-sagellm tune --dry-run                   what would be measured
  torch-sagellm tune --ranks 4                   a minute of measurements for groups of 4 ranks
  torch-sagellm tune --budget 300 --max-size 16MiB
  torch-sagellm table --ranks 4                  the table that this wrote
"""
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all")
SIZES = tuple(1 << power for power in range(10, 27, 2))  # 1 KiB to 64 MiB
START = "start"
LEAST_ROUNDS = 7
#: A larger A/A spread (as a fraction) means that other programs use the machine.
BUSY = 0.15
#: From this spread on, a table describes the other load rather than the machine; it is written only with --force.
USELESS = 1.0
#: Approximate seconds of one group's turn; the clock is read only at its beginning and end.
TURN_SECONDS = 0.002
#: Seconds for starting the interpreters, importing torch and creating the groups.
SET_UP_SECONDS = 120.0


@dataclass(frozen=True)
class Cell:
    """One operation at one size, with its measured times."""

    op: str
    nbytes: int
    #: The default choice, such as "slots" or "rounds(512KiB)".
    start: str
    #: Median seconds by algorithm; START holds the better of its two groups.
    medians: dict[str, float]
    #: Difference of the two groups that use the defaults, as a fraction.
    spread: float


def ways(op: str, nbytes: int, ranks: int) -> tuple[str, list[str]]:
    """The default choice for an operation, and the alternatives to measure."""
    from torch_sagellm._private import load

    kind = explain.kind_name(op)
    answer = load.extension().explain_without_group(kind, nbytes, explain.dtype_name(None), ranks, "*:0-=start")
    found = explain.read(answer)
    rounds = [other.way for other in found.rejected if other.predicted is not None and other.way != "slots"]
    if op != "all_to_all":
        # All chunk sizes that hold the whole operation are equivalent, so measure at most one of them.
        small = [way for way in rounds if chunk_of(way) < nbytes]
        rounds = small or ([] if found.choice.startswith("rounds") else rounds[:1])
    return found.choice, rounds


def chunk_of(way: str) -> int:
    """The bytes of a choice such as ``rounds(64KiB)``."""
    return parse_size(way.removeprefix("rounds(").removesuffix(")"))


def plan(ranks: int, largest: int) -> list[tuple[str, int, str, list[str]]]:
    """Operation, bytes, default and alternatives for everything that is measured."""
    # In a gather every rank contributes a block. The largest block is a quarter of the largest size, so that the total
    # is about the same.
    tops = {"all_gather": largest // 4, "gather": largest // 4}
    cells = [(op, nbytes) for op in OPS for nbytes in SIZES if nbytes <= tops.get(op, largest)]
    return [(op, nbytes, *ways(op, nbytes, ranks)) for op, nbytes in cells]


def _largest(text: str) -> int:
    found = arguments.size(text)
    if found < SIZES[0]:
        raise argparse.ArgumentTypeError(f"{text!r} is below {size_text(SIZES[0])}, the smallest size that is measured")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget", type=arguments.seconds, default=60.0, metavar="SECONDS", help="measure for so long (default: 60)"
    )
    parser.add_argument(
        "--max-size", type=_largest, default=64 << 20, metavar="BYTES", help="largest size (default: 64MiB)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be measured, and exit")
    parser.add_argument(
        "--ranks", type=arguments.ranks(2), default=2, help="ranks of the group, all on this host (default: 2)"
    )
    parser.add_argument("--force", action="store_true", help="write the table even where the machine was busy")
    arguments.add_json(parser, "what was measured, times in seconds,")
    arguments.add_yes(parser)


#: The exit code, and what ``--json`` prints.
Result = tuple[int, dict[str, Any]]


def run(parsed: argparse.Namespace) -> int:
    if not parsed.dry_run:
        _check_cache()
        arguments.agree(parsed.ranks, parsed.yes)
    with arguments.text_beside(parsed.json):
        code, found = tune(parsed.budget, parsed.ranks, parsed.dry_run, parsed.max_size, parsed.force)
    if parsed.json and found:
        print(json.dumps(found, indent=1))
    return code


def _check_cache() -> None:
    """Checks, before a minute of measurements, that their table can be written."""
    folder = cache_folder()
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        where = "SAGELLM_CACHE_DIR" if os.environ.get("SAGELLM_CACHE_DIR") else "the folder of tables"
        raise ValueError(f"{where}, {folder}: no table can be written there: {error.strerror}") from None


def cache_folder() -> str:
    """The folder in which the core keeps tables."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("SAGELLM_CACHE_DIR") or os.path.join(home, "sagellm")


def tune(budget: float, ranks: int, dry_run: bool, largest: int = SIZES[-1], force: bool = False) -> Result:
    """Measures for about ``budget`` seconds with ``ranks`` ranks, prints the results and writes the table."""
    cells = plan(ranks, largest)
    if dry_run:
        for op, nbytes, start, rivals in cells:
            others = ", ".join(rivals) or "nothing"
            print(fit(f"{op:<15} {size_text(nbytes):>8}  {start} against {others}", 26))
        what = f"{len(cells)} operations and sizes in about {budget:.0f} s"
        print(fit(f"{what}; nothing was measured, nothing was written", 2))
        names = ("op", "size", "default", "rivals")
        return 0, {"ranks": ranks, "planned": [dict(zip(names, cell, strict=True)) for cell in cells]}
    found = _run_ranks(budget, ranks, largest)
    if found is None:
        return 1, {}
    spread = overall_spread(found)
    text = "\n".join(lines(found, spread, slot_bytes(ranks)))
    _show(found, spread)
    document = {"ranks": ranks, "spread": spread, "measured": [asdict(cell) for cell in found], "table": None}
    if spread > USELESS and not force:
        what = f"two equal groups differed by {spread * 100:.0f} %, so these times say nothing; no table was written"
        complain(f"torch-sagellm tune: {what}. Measure when nothing else runs, or pass --force")
        return 1, document
    from torch_sagellm._private import load

    made = f"{time.strftime('%Y-%m-%d')}, {len(found)} sizes in {budget:.0f} s, A/A spread {spread * 100:.1f} %"
    document["table"] = load.extension().save_table(ranks, made, text)
    print(fit(f"written to {document['table']}; groups of {ranks} ranks use it from now on", 2))
    return 0, document


def slot_bytes(ranks: int) -> int:
    """The number of bytes that fit into a slot."""
    from torch_sagellm._private import load

    found: int = load.extension().explain_without_group("all_reduce", 0, "float32", ranks)["slot_bytes"]
    return found


def overall_spread(cells: list[Cell]) -> float:
    """The 90th percentile of the cells' spreads."""
    ordered = sorted(cell.spread for cell in cells)
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * 0.9))] if ordered else 0.0


def winner(cell: Cell, spread: float) -> str:
    """The fastest algorithm if it beats the default by more than the noise, otherwise the default."""
    start = cell.medians[START]
    best = min(cell.medians, key=lambda way: cell.medians[way])
    needed = start * (1 - max(spread, cell.spread))
    return best if best != START and cell.medians[best] < needed else cell.start


def lines(cells: list[Cell], spread: float, slot: int) -> list[str]:
    """The table's lines, with a range of sizes for each measured size.

    Between two measured sizes a range ends at their geometric mean, or at a slot's size if that is between them. The
    largest measured size ends the last range.
    """
    text = []
    for op in dict.fromkeys(cell.op for cell in cells):
        mine = sorted((cell for cell in cells if cell.op == op), key=lambda cell: cell.nbytes)
        if op == "all_to_all":
            text.append(_line(op, "0-", *_for_all_sizes(mine, spread)))
            continue
        first = 0
        for at, cell in enumerate(mine):
            way = winner(cell, spread)
            median = cell.medians.get(way, cell.medians[START])
            last = cell.nbytes if at + 1 == len(mine) else _edge(cell.nbytes, mine[at + 1].nbytes, slot)
            text.append(_line(op, f"{first}-{last}", way, median, cell.medians[START]))
            first = last + 1
    return text


def _line(op: str, sizes: str, way: str, median: float, start: float) -> str:
    return f"{op}:{sizes}={way} {round(median * 1e9)} ns; start {round(start * 1e9)} ns"


def _edge(low: int, high: int, slot: int) -> int:
    return slot if low <= slot < high else math.isqrt(low * high)


def _for_all_sizes(cells: list[Cell], spread: float) -> tuple[str, float, float]:
    """The best algorithm for an operation whose size no rank knows, by the geometric mean of the ratios of all
    sizes."""
    common = set.intersection(*({*cell.medians} for cell in cells))

    def ratio(way: str) -> float:
        return math.prod(cell.medians[way] / cell.medians[START] for cell in cells) ** (1 / len(cells))

    best = min(sorted(common), key=ratio)
    way = best if ratio(best) < 1 - spread else START
    middle = cells[len(cells) // 2]
    return (middle.start if way == START else way), middle.medians[way], middle.medians[START]


def _show(cells: list[Cell], spread: float) -> None:
    print(f"A/A spread of equal groups: {spread * 100:.1f} % (nine of ten sizes)")
    if spread > BUSY:
        print(fit("the machine was busy: only large differences are significant. Measure when nothing else runs", 2))
    for cell in cells:
        way, start = winner(cell, spread), cell.medians[START]
        median = cell.medians.get(way, start)
        gain = "" if way == cell.start else f", {start / median:.2f}x"
        size = size_text(cell.nbytes)
        times = f"{way} {show_time(median)} (default {cell.start} {show_time(start)}{gain})"
        print(fit(f"{cell.op:<15} {size:>8}  {times}", 26))


# --------------------------------------------------------------------------------------------- processes and ranks


def _run_ranks(budget: float, ranks: int, largest: int) -> list[Cell] | None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("SAGELLM_ALGORITHM", None)
    limit = SET_UP_SECONDS + 3 * budget
    try:
        ended, store = processes.run(
            "tune", ranks, budget, largest, seconds=limit, environment=environment, shown=sys.stdout
        )
    except KeyboardInterrupt:
        complain("torch-sagellm tune: no table was written")
        raise
    failed = [f"rank {rank} {one.failure}" for rank, one in enumerate(ended) if one.failure]
    if failed:
        complain(f"torch-sagellm tune: {', '.join(failed)}; no table was written")
        return None
    found = [Cell(**cell) for cell in json.loads(store.get("found"))]
    if not found:
        complain("torch-sagellm tune: the budget was too short for a single size; no table was written")
    return found or None


def run_rank(rank: int, ranks: int, port: int, budget: str, largest: str) -> int:
    """One rank of the measurement. Rank 0's clock decides the end, and rank 0 puts the results into the store."""
    import torch
    import torch.distributed as dist

    from torch_sagellm._private import load

    torch.set_num_threads(1)
    options = load.extension().Options
    begin = options(algorithm=f"*:0-={START}")
    store = processes.join("sagellm", rank, ranks, port, SET_UP_SECONDS, pg_options=begin)
    groups: dict[str, Any] = {START: dist.group.WORLD}

    def group_for(way: str) -> Any:
        if way not in groups:
            rule = START if way == "again" else way
            groups[way] = dist.new_group(backend="sagellm", pg_options=options(algorithm=f"*:0-={rule}"))
        return groups[way]

    cells = plan(ranks, int(largest))
    bar = Bar(len(cells), visible=rank == 0)
    found, started = [], time.monotonic()
    for at, (op, nbytes, start, rivals) in enumerate(cells):
        bar.show(at, f"{op} {size_text(nbytes)}")
        left = float(budget) - (time.monotonic() - started)
        share = _agreed(left / (len(cells) - at))
        if share <= 0:
            break
        candidates = {way: group_for(way) for way in (START, "again", *rivals)}
        medians = _measure(_call(op, nbytes, rank, ranks), candidates, share)
        if medians is None:
            continue
        one, other = medians[START], medians.pop("again")
        medians[START] = min(one, other)
        found.append(Cell(op, nbytes, start, medians, abs(one - other) / min(one, other)))
    bar.end()
    if rank == 0:
        store.set("found", json.dumps([asdict(cell) for cell in found]))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _agreed(value: float) -> float:
    """Returns rank 0's value on all ranks."""
    import torch
    import torch.distributed as dist

    shared = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(shared, src=0)
    return float(shared.item())


def _measure(call: Any, groups: dict[str, Any], seconds: float) -> dict[str, float] | None:
    """Median seconds per call by algorithm, each sample from the slowest rank; None if the time is too short."""
    import torch
    import torch.distributed as dist

    names = list(groups)
    until = time.monotonic() + seconds
    probe = time.perf_counter()
    for name in names:  # this also warms the caches and the pages of every group
        call(groups[name])
    once = _agreed(max(1e-6, (time.perf_counter() - probe) / len(names)))
    calls = max(1, min(200, round(TURN_SECONDS / once)))
    # Many algorithms at a large size may exceed the time; then this size is omitted.
    if once * calls * len(names) * LEAST_ROUNDS > max(4 * seconds, 0.02):
        return None
    samples: list[list[float]] = []
    again = True
    while again:
        turn = [0.0] * len(names)
        order = range(len(names)) if len(samples) % 2 == 0 else reversed(range(len(names)))
        for at in order:
            group = groups[names[at]]
            call(group)
            began = time.perf_counter()
            for _ in range(calls):
                call(group)
            turn[at] = (time.perf_counter() - began) / calls
        samples.append(turn)
        again = _agreed(float(len(samples) < LEAST_ROUNDS or time.monotonic() < until)) > 0
    slowest = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {name: statistics.median(slowest[:, at].tolist()) for at, name in enumerate(names)}


def _call(op: str, nbytes: int, rank: int, ranks: int) -> Any:
    """A function that runs the operation once over a group, in its own memory."""
    import torch
    import torch.distributed as dist

    def numbers(bytes_: int) -> torch.Tensor:
        return torch.zeros(max(1, bytes_ // 4))

    own = numbers(nbytes)
    if op == "all_reduce":
        return lambda group: dist.all_reduce(own, group=group)
    if op == "broadcast":
        return lambda group: dist.broadcast(own, src=0, group=group)
    if op == "reduce":
        return lambda group: dist.reduce(own, dst=0, group=group)
    block = max(1, own.numel() // ranks)
    if op == "all_gather":
        every = own.new_zeros(own.numel() * ranks)
        return lambda group: dist.all_gather_into_tensor(every, own, group=group)
    if op == "gather":
        parts = list(own.new_zeros(ranks, own.numel()).unbind()) if rank == 0 else None
        return lambda group: dist.gather(own, parts, dst=0, group=group)
    whole, part = own.new_zeros(block * ranks), own.new_zeros(block)
    if op == "reduce_scatter":
        return lambda group: dist.reduce_scatter_tensor(part, whole, group=group)
    if op == "scatter":
        given = list(whole.view(ranks, block).unbind()) if rank == 0 else None
        return lambda group: dist.scatter(part, given, src=0, group=group)
    other = torch.empty_like(whole)
    return lambda group: dist.all_to_all_single(other, whole, group=group)
