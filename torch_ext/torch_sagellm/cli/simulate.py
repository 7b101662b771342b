"""``torch-sagellm simulate``: predicts the times of the core's schedules on other machines.

``src/select/cost.rs`` computes the times from the same schedules that links execute. This file parses the arguments,
prints the table and the sizes at which one algorithm overtakes another, and draws the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_sagellm._private import nearest
from torch_sagellm._private.units import BINARY, DECIMAL, show_size, show_time
from torch_sagellm.cli import arguments as checked
from torch_sagellm.cli import chart
from torch_sagellm.cli.predict import TWO_LEVELS, Link, Machine, Prediction, algorithms, predict, show_machine
from torch_sagellm.cli.show import Bar, counted

HELP = "predicted times of collectives, by algorithm, size and number of ranks"
DESCRIPTION = """Predicts the times of this package's schedules by a model of links (latency, time per byte) and of
combining numbers, and prints them with the sizes at which one algorithm overtakes another. With --strategy it prints
what a training step of a parallel strategy communicates instead: primitives, bytes of a rank, and predicted times."""
EXAMPLES = """examples:
  torch-sagellm simulate
  torch-sagellm simulate --ranks 4,64,100000 --ranks-per-host 8 --sizes 8,4KiB,16MiB
  torch-sagellm simulate --op all_gather --link 1ms,1Gbit --host 2us,10GB --reduce 20GB
  torch-sagellm simulate --algorithms ring,direct --sizes 1KiB..1GiB --plot times.png
  torch-sagellm simulate --ranks 2,4 --sizes 8,64KiB,1MiB --check
  torch-sagellm simulate --strategy fsdp --params 7B --ranks 8,64
  torch-sagellm simulate --strategy tp --layers 32 --hidden 4096 --sequence 4096 --batch 1

sizes   8, 4KiB, 16MiB, 1GB; a range 1KiB..1GiB goes in steps of 4, 1KiB..1GiB:2 in steps of 2. Counted are the
        vector of all_reduce, broadcast and reduce; all blocks together of all_gather, reduce_scatter, gather and
        scatter; what one rank has for all ranks of all_to_all.
links   LATENCY,SPEED[,OVERHEAD]: the time until an empty message has arrived (ns, us, ms, s); the speed in each
        direction in bytes (10GB) or bits (1Gbit) per second; what each further message sent at the same moment costs.
        Left out, the overhead is 5 us, or the latency where that is less.
"""
TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
SPEED_UNITS = {name: float(factor) for name, factor in (*DECIMAL, *BINARY)}
SPEED_UNITS |= {f"{prefix}bit": factor / 8 for prefix, factor in (("k", 1e3), ("M", 1e6), ("G", 1e9))}
#: Default time of a further message in seconds: about the processor time of a send over TCP.
DEFAULT_OVERHEAD = 5e-6
MOST_RANKS = 100_000
#: Number of sizes per doubling at which crossover points are searched.
PER_DOUBLING = 4


def _number(text: str, units: dict[str, float], what: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}: a number with one of {known}")
    return float(found[1]) * units[found[2]]


#: Parses a size such as ``4KiB``.
parse_size = checked.size


def parse_sizes(text: str) -> list[int]:
    """Parses sizes such as ``8,4KiB..16MiB`` to bytes in ascending order without duplicates."""
    sizes: set[int] = set()
    for item in text.split(","):
        first, dots, rest = item.partition("..")
        if not dots:
            sizes.add(parse_size(item))
            continue
        last, _, step = rest.partition(":")
        size, end, factor = parse_size(first), parse_size(last), _number(step or "4", {"": 1.0}, "a step")
        if size < 1 or end < size or factor < 1.1:
            raise argparse.ArgumentTypeError(f"{item!r} is no range: LEAST..MOST or LEAST..MOST:STEP, with STEP over 1")
        while size <= end:
            sizes.add(size)
            size = max(size + 1, round(size * factor))
    return sorted(sizes)


def parse_ranks(text: str) -> list[int]:
    """Parses numbers of ranks such as ``4,64``."""
    return [checked.ranks(1, MOST_RANKS)(item) for item in text.split(",")]


def parse_speed(text: str) -> float:
    """Parses a speed such as ``1Gbit`` or ``10GB/s`` to seconds per byte."""
    per_second = _number(text.removesuffix("/s"), dict(SPEED_UNITS), "a speed")
    if not 0 < per_second < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no speed: it must be over 0")
    return 1.0 / per_second


def parse_link(text: str) -> Link:
    """Parses a link: ``1ms,1Gbit`` or ``1ms,1Gbit,5us``."""
    fields = text.split(",")
    if len(fields) not in (2, 3):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no link: LATENCY,SPEED[,OVERHEAD], such as 1ms,1Gbit or 2us,10GB,1us"
        )
    alpha = _number(fields[0], dict(TIME_UNITS), "a time")
    overhead = _number(fields[2], dict(TIME_UNITS), "a time") if len(fields) == 3 else min(alpha, DEFAULT_OVERHEAD)
    return Link(alpha, overhead, parse_speed(fields[1]))


def fine_sizes(sizes: Sequence[int]) -> list[float]:
    """Closely spaced sizes from the smallest to the largest given size."""
    least, most = max(1, sizes[0]), max(1, sizes[-1])
    count = max(1, math.ceil(math.log2(most / least) * PER_DOUBLING))
    return [least * (most / least) ** (i / count) for i in range(count + 1)]


def crossovers(times: dict[str, list[Prediction]], sizes: Sequence[float]) -> list[tuple[float, str]]:
    """The ranges between the crossover points: the first size of each, and its fastest algorithm."""
    found: list[tuple[float, str]] = []
    for at, size in enumerate(sizes):
        # A tie keeps the previous algorithm, so that equally fast ones do not alternate.
        ahead = found[-1][1] if found else ""
        best = min(times, key=lambda name: (times[name][at].seconds, name != ahead))
        if best != ahead:
            found.append((size, best))
    return found


def table(times: dict[str, list[Prediction]], sizes: Sequence[int], width: int = 79) -> list[str]:
    """One line for each size, one column for each algorithm; the fastest is marked, segments are in parentheses.

    If the columns do not fit into the width, they continue in a second block.
    """
    names = list(times)
    columns = {name: max(len(name), 13) + 3 for name in names}
    best = [min(names, key=lambda name: (times[name][at].seconds, names.index(name))) for at in range(len(sizes))]
    lines: list[str] = []
    while names:
        block = [names.pop(0)]
        while names and 10 + sum(columns[name] for name in [*block, names[0]]) <= width:
            block.append(names.pop(0))
        lines.append(f"{'bytes':>10}" + "".join(f"{name:>{columns[name] - 1}} " for name in block))
        for at, size in enumerate(sizes):
            cells = ""
            for name in block:
                one = times[name][at]
                # A group of one rank takes no time (-0.0 in some schedules), so no algorithm is marked.
                mark = "*" if name == best[at] and one.seconds > 0 else " "
                text = show_time(one.seconds + 0.0) + (f" ({one.segments})" if one.segments > 1 else "")
                cells += f"{text:>{columns[name] - 1}}{mark}"
            lines.append(f"{show_size(size):>10}" + cells)
        lines += [""] if names else []
    return lines


def plot(path: Path, op: str, sizes: Sequence[float], all_times: dict[int, dict[str, list[Prediction]]]) -> None:
    """Draws one panel for each number of ranks: time by size, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(all_times), figsize=(5.5 * len(all_times), 4.5), squeeze=False, sharey=True, layout="constrained"
    )
    for panel, (ranks, times) in zip(panels[0], all_times.items(), strict=True):
        for name, predictions in times.items():
            panel.plot(sizes, [one.seconds for one in predictions], label=name)
        panel.set(title=f"{op}, {ranks} ranks", xlabel="bytes", xscale="log", yscale="log")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("predicted seconds")
    panels[0][-1].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", help="the collective (default: all_reduce)")
    parser.add_argument("--ranks", type=parse_ranks, help="numbers of ranks (default: 8,64,1024; with --strategy 8)")
    parser.add_argument(
        "--ranks-per-host",
        type=checked.whole(1, MOST_RANKS),
        metavar="N",
        help="ranks on one host (default: 8)",
    )
    parser.add_argument("--sizes", type=parse_sizes, help="default: 8..1GiB:8, with --check up to 16MiB")
    parser.add_argument("--link", type=parse_link, help="between hosts (30us,10Gbit)")
    parser.add_argument("--host", type=parse_link, help="inside a host (1us,10GB,0.2us)")
    parser.add_argument("--reduce", type=parse_speed, metavar="SPEED", help="combining numbers (10GB)")
    parser.add_argument(
        "--algorithms", metavar="NAMES", help="only these, with commas (default: all that serve the op)"
    )
    parser.add_argument("--plot", type=checked.path, metavar="FILE.png", help="draw the times over the sizes")
    parser.add_argument(
        "--check",
        action="store_true",
        help="run the schedules on this machine over loopback, at most 8 ranks and 16 MiB, and print the model's error",
    )

    from torch_sagellm.cli import strategies

    checked.add_json(parser, "the times in seconds")
    strategies.add_arguments(parser)


def _chosen(core: Any, op: str, names: str | None) -> list[str]:
    """The algorithms to predict; an unknown name is a ValueError with a one-line text."""
    serving = algorithms(core, op)
    if names is None:
        return serving
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in serving:
            near = nearest.meant(name, serving)
            raise ValueError(f"{name!r} is no algorithm for {op}; there are {', '.join(serving)}{near}")
    return chosen


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; a ValueError for arguments that contradict each other."""
    from torch_sagellm._private import load

    core = load.extension()
    _check_mode(arguments)
    arguments.op = checked.one_of([kind for kind in core.KINDS if kind not in ("send", "recv")])(
        "all_reduce" if arguments.op is None else arguments.op
    )
    if arguments.op == "barrier":
        checked.refuse(arguments, "--op barrier, which moves no bytes", ("sizes",))
        arguments.sizes = [8] if arguments.check else [0]
    machine = Machine(
        arguments.host or parse_link("1us,10GB,0.2us"),
        arguments.link or parse_link("30us,10Gbit"),
        arguments.reduce or parse_speed("10GB"),
        arguments.ranks_per_host or 8,
    )
    with checked.text_beside(arguments.json, dropped=not arguments.check):
        found = _find(core, arguments, machine)
    if arguments.json and found is not None:
        print(
            json.dumps(
                {"predicted": not arguments.check, **({} if arguments.check else _about(machine)), **found}, indent=1
            )
        )
    return 1 if found is None else 0


def _find(core: Any, arguments: argparse.Namespace, machine: Machine) -> dict[str, Any] | None:
    """Predicts or measures, and prints the results; returns them, or None if a rank failed."""
    if arguments.strategy:
        from torch_sagellm.cli import strategies

        return strategies.run(core, arguments, arguments.ranks or [8], machine)
    names = _chosen(core, arguments.op, arguments.algorithms)
    if arguments.plot is not None:
        chart.check_picture(arguments.plot)
    ranks = arguments.ranks or [8, 64, 1024]
    if arguments.check:
        if arguments.algorithms and TWO_LEVELS in names:
            raise ValueError(f"--check runs single schedules, and {TWO_LEVELS} is several")
        from torch_sagellm.cli import measure

        return measure.check(arguments.op, names, arguments.ranks, arguments.sizes)
    arguments.sizes = arguments.sizes or parse_sizes("8..1GiB:8")
    show_machine(machine)
    print(
        "* fastest; (n) segments of a pipeline. Predicted, not measured:\n--check tells how far off the model is here."
    )
    return _show_times(core, arguments, names, ranks, machine)


def _check_mode(arguments: argparse.Namespace) -> None:
    """Refuses options of another mode, because they would have no effect."""
    from torch_sagellm.cli import strategies

    unused = strategies.unused(arguments)
    if arguments.strategy:
        checked.refuse(arguments, "--strategy", ("op", "sizes", "algorithms", "plot", "check"))
        checked.refuse(arguments, f"--strategy {arguments.strategy}", unused)
    elif unused:
        raise ValueError(f"{checked.option(unused[0])} has an effect with --strategy alone")
    elif arguments.check:
        checked.refuse(arguments, "--check", ("ranks_per_host", "link", "host", "reduce", "plot"))


def _about(machine: Machine) -> dict[str, Any]:
    """The predicted machine: the costs of its two links, the seconds per combined byte, and the ranks per host."""
    links = {"host": machine.host, "network": machine.network}
    found: dict[str, Any] = {name: dict(vars(link)) for name, link in links.items()}
    return {"machine": found | {"combining": machine.gamma, "ranks_per_host": machine.ranks_per_host}}


def _show_times(
    core: Any, arguments: argparse.Namespace, names: Sequence[str], rank_counts: Sequence[int], machine: Machine
) -> dict[str, Any]:
    """Prints a table and the crossovers for each number of ranks, and draws the picture."""
    groups = []
    fine = fine_sizes(arguments.sizes)
    drawn: dict[int, dict[str, list[Prediction]]] = {}
    bar = Bar(len(rank_counts), visible=True)
    for at, ranks in enumerate(rank_counts):
        bar.show(at, f"{arguments.op}, {ranks} ranks")
        # One call for both lists, because a schedule of many ranks takes a while to evaluate.
        times = predict(core, arguments.op, names, ranks, [*arguments.sizes, *fine], machine)
        bar.end()
        exact = {name: found[: len(arguments.sizes)] for name, found in times.items()}
        drawn[ranks] = {name: found[len(arguments.sizes) :] for name, found in times.items()}
        hosts = -(-ranks // machine.ranks_per_host)
        many = "1 rank" if ranks == 1 else f"{ranks} ranks"
        print(f"\n{arguments.op}, {many} on {counted(hosts, 'host')}")
        print("\n".join(table(exact, arguments.sizes)), flush=True)
        fastest = crossovers(drawn[ranks], fine) if ranks > 1 else []
        groups.append(
            {
                "ranks": ranks,
                "hosts": hosts,
                "times": {name: [vars(one) for one in each] for name, each in exact.items()},
                "fastest": [{"from": round(size), "algorithm": name} for size, name in fastest],
            }
        )
        for size, name in fastest:
            print(f"  fastest from {show_size(size)} on: {name}", flush=True)
    if arguments.plot is not None:
        plot(arguments.plot, arguments.op, fine, drawn)
        print(f"\nplot in {arguments.plot}")
    return {"op": arguments.op, "sizes": arguments.sizes, "groups": groups}
