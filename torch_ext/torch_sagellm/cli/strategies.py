"""``torch-sagellm simulate --strategy``: the communication of a parallel strategy in a training step, and its times.

The formulas are in docs/internals/simulate.md; tests compare them with the bytes that real layers count. The cost model
predicts the times of calls made one after the other. Neither calls nor computing overlap, so the predicted times are an
upper bound.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_sagellm._private.units import show_size, show_time
from torch_sagellm.cli import arguments, show
from torch_sagellm.cli.predict import Machine, algorithms, predict, show_machine
from torch_sagellm.observe.stats import BUS_FACTORS

MESSAGE = "send"
#: Size of a row count that MoEDispatcher exchanges.
COUNT_BYTES = 8
MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Model:
    """The model to train. Parameters, gradients and activations have the same element size."""

    parameters: int
    layers: int
    hidden: int
    #: Features of the keys (and of the values) in one layer: fewer than ``hidden`` with grouped queries.
    kv_hidden: int
    sequence: int
    #: Number of sequences in one step: per rank, but with tp, pp and cp per group, because the ranks of a group work on
    #: the same sequences.
    batch: int
    item: int
    microbatches: int
    experts: int
    experts_per_token: int
    #: Size in bytes of a gradient bucket of data parallelism.
    bucket: int

    @property
    def tokens(self) -> int:
        """Number of tokens of one step."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class Traffic:
    """A number of equal calls of one step on one rank."""

    primitive: str
    when: str
    calls: int
    #: The payload of one call as get_stats counts it: the size of the input or the output, whichever is larger.
    nbytes: int

    @property
    def step_bytes(self) -> int:
        return self.calls * self.nbytes

    def sent(self, ranks: int) -> float:
        """Bytes that this rank sends in a step, with the algorithms that move the fewest bytes."""
        factor = BUS_FACTORS.get(self.primitive)
        return self.step_bytes * (factor(ranks) if factor else 1.0)


def data_parallel(model: Model, ranks: int) -> list[Traffic]:
    """Gradients are summed, bucket by bucket."""
    total = model.parameters * model.item
    whole, rest = divmod(total, model.bucket)
    found = [Traffic("all_reduce", "backward: a bucket of gradients", whole, model.bucket)] if whole else []
    return [*found, Traffic("all_reduce", "backward: the last bucket", 1, rest)] if rest else found


def fully_sharded(model: Model, ranks: int) -> list[Traffic]:
    """Every layer's parameters are gathered before the layer's forward and backward pass; its gradients are
    scattered."""
    layer = math.ceil(model.parameters / model.layers / ranks) * ranks * model.item
    return [
        Traffic("all_gather", "forward: parameters of a layer", model.layers, layer),
        Traffic("all_gather", "backward: parameters of a layer", model.layers, layer),
        Traffic("reduce_scatter", "backward: gradients of a layer", model.layers, layer),
    ]


def tensor_parallel(model: Model, ranks: int) -> list[Traffic]:
    """Attention and MLP are each a column layer followed by a row layer: one sum in each direction."""
    if model.hidden % ranks:
        raise ValueError(f"--hidden {model.hidden} is no multiple of the {ranks} ranks")
    activations = model.tokens * model.hidden * model.item
    return [
        Traffic("all_reduce", "forward: behind attention and MLP", 2 * model.layers, activations),
        Traffic("all_reduce", "backward: before attention and MLP", 2 * model.layers, activations),
    ]


def pipeline_parallel(model: Model, ranks: int) -> list[Traffic]:
    """A stage in the middle of the pipeline; the first and the last stage have half of its traffic."""
    if ranks > model.layers:
        raise ValueError(f"--ranks {ranks}: there are no more stages than the {model.layers} layers (--layers)")
    if model.batch % model.microbatches:
        raise ValueError(f"--batch {model.batch} is no multiple of the {model.microbatches} microbatches")
    block = model.tokens // model.microbatches * model.hidden * model.item
    return [
        Traffic(MESSAGE, "forward: activations to the next stage", model.microbatches, block),
        Traffic(MESSAGE, "backward: gradients to the stage before", model.microbatches, block),
    ]


def context_parallel(model: Model, ranks: int) -> list[Traffic]:
    """Keys and values go around the ring in the forward pass, and again in the backward pass; their gradients return to
    the owner."""
    if model.sequence % ranks:
        raise ValueError(f"--sequence {model.sequence} is no multiple of the {ranks} ranks")
    block = model.tokens // ranks * model.kv_hidden * model.item
    return [
        Traffic(MESSAGE, "forward: keys and values", 2 * (ranks - 1) * model.layers, block),
        Traffic(MESSAGE, "backward: keys and values", 2 * (ranks - 1) * model.layers, block),
        Traffic(MESSAGE, "backward: their gradients", 2 * ranks * model.layers, block),
    ]


def expert_parallel(model: Model, ranks: int) -> list[Traffic]:
    """Tokens are sent to the ranks of their experts and back, in forward and backward pass.

    The routing is assumed even.
    """
    if model.experts % ranks:
        raise ValueError(f"--experts {model.experts} is no multiple of the {ranks} ranks")
    rows = model.tokens * model.experts_per_token * model.hidden * model.item
    counts = model.experts * COUNT_BYTES * ranks
    return [
        Traffic("all_to_all", "forward: tokens to experts and back", 2 * model.layers, rows),
        Traffic("all_to_all", "backward: their gradients", 2 * model.layers, rows),
        Traffic("all_gather", "forward: numbers of rows", model.layers, counts),
    ]


STRATEGIES: dict[str, Callable[[Model, int], list[Traffic]]] = {
    "dp": data_parallel,
    "fsdp": fully_sharded,
    "tp": tensor_parallel,
    "pp": pipeline_parallel,
    "cp": context_parallel,
    "ep": expert_parallel,
}
WHAT = {
    "dp": "data parallel",
    "fsdp": "fully sharded data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline parallel, a stage in the middle",
    "cp": "context parallel, a ring",
    "ep": "expert parallel, even routing",
}


def parse_count(text: str) -> int:
    """Parses a number of parameters: ``7B``, ``350M`` or ``1000``."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", text.strip().upper())
    if not found or not (float(found[1]) * MULTIPLES[found[2]]).is_integer() or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters: 1000, 350M, 7B")
    count = int(float(found[1]) * MULTIPLES[found[2]])
    if count > 10**18:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters that a model has")
    return count


_from_one = arguments.whole(1, 10**9)
#: The options of this mode by their names in the arguments, with their defaults.
DEFAULTS: dict[str, int | None] = {
    "params": 7 * 10**9,
    "layers": 32,
    "hidden": 4096,
    "kv_hidden": None,
    "sequence": 4096,
    "batch": 8,
    "item": 2,
    "microbatches": 8,
    "experts": 64,
    "experts_per_token": 2,
    "bucket": 25 << 20,
}
#: The options by which the figures of a strategy change. The others are refused, because they would have no effect.
USES: dict[str, tuple[str, ...]] = {
    "dp": ("params", "item", "bucket"),
    "fsdp": ("params", "layers", "item"),
    "tp": ("layers", "hidden", "sequence", "batch", "item"),
    "pp": ("layers", "hidden", "sequence", "batch", "item", "microbatches"),
    "cp": ("layers", "hidden", "kv_hidden", "sequence", "batch", "item"),
    "ep": ("layers", "hidden", "sequence", "batch", "item", "experts", "experts_per_token"),
}


def _bucket(text: str) -> int:
    found = arguments.size(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of a bucket: at least a byte")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    found = parser.add_argument_group("with --strategy")
    found.add_argument("--strategy", choices=list(STRATEGIES), help="what a training step communicates")
    found.add_argument("--params", type=parse_count, help="dp, fsdp: parameters: 350M, 7B (7B)")
    found.add_argument("--layers", type=_from_one, help="all but dp: layers (32)")
    found.add_argument("--hidden", type=_from_one, help="tp, pp, cp, ep: features of a token (4096)")
    found.add_argument("--kv-hidden", type=_from_one, help="cp: features of the keys of a layer (as --hidden)")
    found.add_argument("--sequence", type=_from_one, help="tp, pp, cp, ep: tokens of a sequence (4096)")
    found.add_argument("--batch", type=_from_one, help="tp, pp, cp, ep: sequences of a step; with ep of one rank (8)")
    found.add_argument("--item", type=_from_one, metavar="BYTES", help="bytes of a number (2)")
    found.add_argument("--microbatches", type=_from_one, help="pp: parts of a batch (8)")
    found.add_argument("--experts", type=_from_one, help="ep: experts of a layer, on all ranks (64)")
    found.add_argument("--experts-per-token", type=_from_one, help="ep: experts of a token (2)")
    found.add_argument("--bucket", type=_bucket, help="dp: bytes summed at a time (25MiB)")


def unused(parsed: argparse.Namespace) -> list[str]:
    """The given options of this mode that have no effect on the figures of the strategy."""
    given = [name for name in DEFAULTS if getattr(parsed, name) is not None]
    used = USES.get(parsed.strategy, ())
    # A ring sends only keys and values. If --kv-hidden is given, it replaces --hidden as the number of their features.
    return [name for name in given if name not in used or (name == "hidden" and "kv_hidden" in given)]


def model_of(parsed: argparse.Namespace) -> Model:
    """The model that the arguments describe."""
    given = {name: getattr(parsed, name) for name in DEFAULTS}
    values: dict[str, Any] = {name: DEFAULTS[name] if one is None else one for name, one in given.items()}
    values["parameters"] = values.pop("params")
    return Model(**{**values, "kv_hidden": values["kv_hidden"] or values["hidden"]})


def seconds(core: Any, traffic: Traffic, ranks: int, machine: Machine) -> float:
    """The predicted time of all calls, one after the other, each with its fastest algorithm."""
    if traffic.primitive == MESSAGE:
        link = machine.host if ranks <= machine.ranks_per_host else machine.network
        return traffic.calls * (link.alpha + traffic.nbytes * link.beta)
    names = algorithms(core, traffic.primitive)
    times = predict(core, traffic.primitive, names, ranks, [traffic.nbytes], machine)
    return traffic.calls * min(found[0].seconds for found in times.values())


def run(core: Any, parsed: argparse.Namespace, ranks: list[int], machine: Machine) -> dict[str, Any]:
    """Prints a table for each number of ranks."""
    groups = []
    model = model_of(parsed)
    plans = {count: [each for each in STRATEGIES[parsed.strategy](model, count) if each.calls] for count in ranks}
    show_machine(machine)
    for count, plan in plans.items():
        hosts = -(-count // machine.ranks_per_host)
        print(f"\n{WHAT[parsed.strategy]}: {count} ranks on {show.counted(hosts, 'host')}, each in one step")
        print("\n".join(lines(core, plan, count, machine)), flush=True)
        calls = [
            {**vars(each), "sent": each.sent(count), "seconds": seconds(core, each, count, machine)} for each in plan
        ]
        groups.append({"ranks": count, "hosts": hosts, "calls": calls})
    return {"strategy": parsed.strategy, "groups": groups}


def lines(core: Any, plan: list[Traffic], ranks: int, machine: Machine) -> list[str]:
    """The table of one plan, with a line of sums."""
    head = ["primitive", "when", "calls", "bytes a call", "bytes a step", "a rank sends", "predicted"]
    times = [seconds(core, each, ranks, machine) for each in plan]
    rows = [
        [
            each.primitive,
            each.when,
            str(each.calls),
            show_size(each.nbytes),
            show_size(each.step_bytes),
            show_size(each.sent(ranks)),
            show_time(time),
        ]
        for each, time in zip(plan, times, strict=True)
    ]
    total = [sum(each.calls for each in plan), sum(each.step_bytes for each in plan)]
    sent = sum(each.sent(ranks) for each in plan)
    rows.append(["all", "", str(total[0]), "", show_size(total[1]), show_size(sent), show_time(sum(times))])
    found = show.table(head, rows, left=("primitive", "when"))
    if not show.is_terminal(sys.stdout) or len(max(found, key=len)) <= shutil.get_terminal_size().columns:
        return found
    # On a narrow terminal the column "when" is printed below each line.
    narrow = show.table([*head[:1], *head[2:]], [[*row[:1], *row[2:]] for row in rows], left=("primitive",))
    remarks = [f"  {row[1]}" if row[1] else "" for row in rows]
    below = [[line, *([remark] if remark else [])] for line, remark in zip(narrow[1:], remarks, strict=True)]
    return [narrow[0], *itertools.chain.from_iterable(below)]
