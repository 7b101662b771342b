"""The form of a program: ranks, buffers, groups, and a list of steps, all of it plain data that JSON can hold.

Every rank has the same buffers. A tensor of a step is a view of a buffer: `[buffer, offset, sizes, strides]`. A rank
runs the steps that name it, in their order. The steps, by `do`:

* a collective (`COLLECTIVES`): `id`, `g` (number of the group), `how` (for each member: "sync", "keep" its Work, or
  "drop" it), `ins` and `outs` (for each member its list of views), and, if they apply, `red`, `root` (member number),
  `form`.
* `send`, `recv`: `id`, `m` (number of the message, equal in both steps), `g`, `rank`, `peer`, `tag`, `how`, `v`. `any`
  is true for a receive from any rank. `batch`: `id`, `g`, `moves` (each with `m`, `src`, `dst`, `tag`, `sv`, `dv`), all
  issued together.
* `region`: `id`, `g`, `how`, `calls` (collectives) and `tail` (at most one list), made inside a coalescing region, with
  a device (`form` "region") or without ("manager"). `abandon` is a region that every member leaves by an exception;
  `runs` is the number of its calls that are issued nevertheless.
* A `region` and a `batch` may be `broken`: for each rank in it, the index of the call `at` which an exception comes,
  and `why` ("refused", "own", "raised", "signal"). The rank then makes the calls that were not issued, so the step has
  the same result as without the exception. Or the step may be `struck`: for each rank in it, the number of microseconds
  after which a SIGINT comes. Here, too, the rank then makes the remaining calls. A `wait` may be `struck`, too.
* `anyone`: ranks send to one rank, which receives from any rank, in whatever order the messages arrive.
* `wait`: `rank`, `id`, `via`; via "thread" starts a thread that waits, and `join` waits for that thread.
* `fill` (all ranks write a buffer), `sleep`, `fork`, `object` (an object collective), `leave` (a rank destroys its
  groups).
* as the last step, `disagree` (one member calls `other` instead of `step`) or `twice` (a list that contains one tensor
  twice, which may be rejected).

Ranks are global numbers, except where "member" is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

Step = dict[str, Any]
View = list[Any]

COLLECTIVES = {
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into",
    "reduce_scatter",
    "reduce_scatter_into",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "reduce_list",
    "gather_list",
    "scatter_list",
    "barrier",
}
REDUCING = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_into", "reduce_list", "scatter_list"}
#: Bytes of an element, and the number of bits up to which whole numbers are exact (0: whole numbers that wrap around).
DTYPES = {
    "float32": (4, 24),
    "float64": (8, 53),
    "float16": (2, 11),
    "bfloat16": (2, 8),
    "int8": (1, 0),
    "uint8": (1, 0),
    "int16": (2, 0),
    "int32": (4, 0),
    "int64": (8, 0),
}


@dataclass
class Program:
    """One program; `seed` is only a name."""

    ranks: int
    buffers: list[list[Any]]
    groups: list[list[int]]
    steps: list[Step] = field(default_factory=list)
    seed: str = ""

    def to_json(self) -> str:
        head = {"seed": self.seed, "ranks": self.ranks, "buffers": self.buffers, "groups": self.groups}
        lines = ",\n".join("  " + json.dumps(step) for step in self.steps)
        return json.dumps(head)[:-1] + ', "steps": [\n' + lines + "\n]}"

    @staticmethod
    def from_json(text: str) -> Program:
        return Program(**json.loads(text))


def numel(view: View) -> int:
    count = 1
    for size in view[2]:
        count *= size
    return count


def flat(buffer: int, offset: int, count: int) -> View:
    return [buffer, offset, [count], [1]]


def contiguous(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view[2]), reversed(view[3]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def span(view: View) -> tuple[int, int]:
    """Returns the index of the first element, and of the one after the last."""
    if numel(view) == 0:
        return view[1], view[1]
    return view[1], view[1] + 1 + sum((size - 1) * stride for size, stride in zip(view[2], view[3], strict=True))


@lru_cache(maxsize=512)
def _elements(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    found = np.array([offset])
    for size, stride in zip(sizes, strides, strict=True):
        found = (found[:, None] + np.arange(size) * stride).reshape(-1)
    return found


def overlap(a: View, b: View) -> bool:
    """Returns whether two views share an element. Views that only interleave do not."""
    if a[0] != b[0] or not numel(a) or not numel(b):
        return False
    (low, high), (other_low, other_high) = span(a), span(b)
    if high <= other_low or other_high <= low:
        return False
    if contiguous(a) and contiguous(b):
        return True
    one, two = (_elements(v[1], tuple(v[2]), tuple(v[3])) for v in (a, b))
    marked = np.zeros(max(high, other_high), dtype=bool)
    marked[one] = True
    return bool(marked[two].any())


def involved(step: Step, program: Program) -> list[int]:
    """Returns the ranks that run a step."""
    kind = step["do"]
    if kind in COLLECTIVES or kind in ("object", "twice", "region", "abandon"):
        return program.groups[step["g"]]
    if kind == "disagree":
        return program.groups[step["step"]["g"]]
    if kind == "batch":
        return sorted({rank for move in step["moves"] for rank in (move["src"], move["dst"])})
    if kind == "anyone":
        return sorted({step["dst"], *step["senders"]})
    if kind == "fill":
        return list(range(program.ranks))
    return [step["rank"]]
