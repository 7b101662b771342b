"""The operations that are measured: how each is called, and its expected result.

A case owns the buffers of one operation at one size. Timed calls use zeros, so that sums in place stay finite for any
number of repetitions. Checks first fill the same buffers with values that differ by rank and index.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.distributed as dist

OPS = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "all_to_all_single",
    "reduce",
    "gather",
    "scatter",
    "ping_pong",
    "all_reduce_x10",
    "all_reduce_x1000",
    "fused_x10",
    "fused_x1000",
    "apart_x10",
    "apart_x1000",
    "region_x10",
    "region_x1000",
    "barrier",
)
# Many operations in flight at the same time: asynchronous calls one by one, one call of fused_all_reduce for a list,
# and calls within torch's coalescing manager. The tensors of `fused` are slices of one tensor, which are contiguous and
# need no packing. The tensors of `apart` were allocated one by one with other allocations between them, like a
# program's gradients.
BURSTS = {"all_reduce_x10": 10, "all_reduce_x1000": 1000}
APART = {"apart_x10": 10, "apart_x1000": 1000}
LISTS = {"fused_x10": 10, "fused_x1000": 1000} | APART
REGIONS = {"region_x10": 10, "region_x1000": 1000}
MANY = BURSTS | LISTS | REGIONS
# Measured at one size only: a barrier has no size, and many operations in flight are measured with small ones.
FIXED_SIZE = {"barrier": 0} | dict.fromkeys(MANY, 2048)
ROOT = 0
PERIOD = 13
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


@lru_cache(maxsize=4)
def _base(count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count + PERIOD) % PERIOD + 1).to(dtype)


def pattern(count: int, rank: int, salt: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's input in a check: small whole numbers, so that sums are exact in every dtype.

    The caller must not write the tensor, because it is a part of a cached tensor.
    """
    return _base(count, dtype)[(5 * rank + salt) % PERIOD :][:count]


class Case:
    """One operation at one size on this rank, over several sets of buffers that are used in turn.

    Groups may use another form of the operation: the forms in `MANY` with the same number of operations share their
    buffers.
    """

    def __init__(
        self, op: str, size: int, dtype: torch.dtype, sets: int, device: str = "cpu", partner: int = 1
    ) -> None:
        self.partner = partner  # rank 0's partner in ping_pong
        self.op, self.dtype, self.device = op, dtype, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        item = torch.empty(0, dtype=dtype).element_size()
        split = op in {"all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "gather", "scatter"}
        parts = self.ranks if split else 1
        # The size of the whole tensor, as nccl-tests counts it: the gathered output, the scattered input. It is rounded
        # up to one element per rank.
        self.part = 0 if op == "barrier" else max(1, size // item // parts)
        self.size = self.part * parts * item
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        for _ in range(max(1, sets)):
            counts = self._counts()
            # Write the tensors, so that their pages are present.
            self.inputs.append(torch.ones(counts[0], dtype=dtype, device=device).zero_())
            self.outputs.append(torch.ones(counts[1], dtype=dtype, device=device).zero_())
        self._separate: dict[int, list[torch.Tensor]] = {}
        self._between: list[torch.Tensor] = []

    def _apart(self, i: int) -> list[torch.Tensor]:
        """The tensors of `APART` for a set of buffers: each in a separate allocation, none adjacent to another."""
        if i not in self._separate:
            found: list[torch.Tensor] = []
            for _ in range(self.inputs[i].numel() // self.part):
                found.append(torch.ones(self.part, dtype=self.dtype, device=self.device).zero_())
                self._between.append(torch.empty(self.part + 1, dtype=self.dtype, device=self.device))
            self._separate[i] = found
        return self._separate[i]

    def _counts(self) -> tuple[int, int]:
        """The number of elements of input and output."""
        whole = self.part * self.ranks
        at_root = whole if self.rank == ROOT else 0
        return {
            "all_gather_into_tensor": (self.part, whole),
            "reduce_scatter_tensor": (whole, self.part),
            "all_to_all_single": (whole, whole),
            "gather": (self.part, at_root),
            "scatter": (at_root, self.part),
        }.get(self.op, (self.part * MANY.get(self.op, 1), 0))

    def takes_part(self) -> bool:
        """Whether this rank takes part in the operation; ping-pong needs only two ranks."""
        return self.op != "ping_pong" or self.rank in {0, self.partner}

    def calls(self, group: dist.ProcessGroup, form: str = "") -> list[Callable[[], object]]:
        """One call for each set of buffers. Everything except the operation is done here, outside the measured time."""
        return [self._call(group, i, form or self.op) for i in range(len(self.inputs))]

    def _call(self, group: dist.ProcessGroup, i: int, op: str) -> Callable[[], object]:
        x, y = self.inputs[i], self.outputs[i]
        if op == "barrier":
            devices = None if self.device == "cpu" else [torch.accelerator.current_device_index()]
            return lambda: dist.barrier(group=group, device_ids=devices)
        if op == "all_reduce":
            return lambda: dist.all_reduce(x, group=group)
        if op == "all_gather_into_tensor":
            return lambda: dist.all_gather_into_tensor(y, x, group=group)
        if op == "reduce_scatter_tensor":
            return lambda: dist.reduce_scatter_tensor(y, x, group=group)
        if op == "broadcast":
            return lambda: dist.broadcast(x, ROOT, group=group)
        if op == "all_to_all_single":
            return lambda: dist.all_to_all_single(y, x, group=group)
        if op == "reduce":
            return lambda: dist.reduce(x, ROOT, group=group)
        if op == "gather":
            parts = list(y.split(self.part)) if self.rank == ROOT else None
            return lambda: dist.gather(x, parts, ROOT, group=group)
        if op == "scatter":
            pieces = list(x.split(self.part)) if self.rank == ROOT else None
            return lambda: dist.scatter(y, pieces, ROOT, group=group)
        if op in BURSTS:
            tensors = x.split(self.part)
            return lambda: burst(tensors, group)
        if op in REGIONS:
            pieces = x.split(self.part)
            return lambda: region(pieces, group)
        if op in LISTS:
            from torch_sagellm import fused_all_reduce  # it also serves groups of other backends

            listed = self._apart(i) if op in APART else list(x.split(self.part))
            return lambda: fused_all_reduce(listed, group=group)
        if op == "ping_pong":
            return (lambda: ping(x, self.partner, group)) if self.rank == 0 else (lambda: pong(x, group))
        raise ValueError(f"unknown operation {op!r}; known: {', '.join(OPS)}")

    def check(self, group: dist.ProcessGroup, turn: int, form: str = "") -> str | None:
        """Runs the operation once on known values; returns the error or None. Then sets the buffers to zero."""
        i = turn % len(self.inputs)
        x, y = self.inputs[i], self.outputs[i]
        x.copy_(pattern(x.numel(), self.rank, turn, self.dtype))
        y.fill_(77)
        apart = self._apart(i) if (form or self.op) in APART else []
        for piece, own in zip(x.split(self.part) if apart else (), apart, strict=True):
            own.copy_(piece)
        if self.takes_part():
            self._call(group, i, form or self.op)()
        for piece, own in zip(x.split(self.part) if apart else (), apart, strict=True):
            piece.copy_(own)
            own.zero_()
        wanted = self._wanted(turn)
        wrong = None
        if wanted is not None:
            got = (y if y.numel() == wanted.numel() and self._writes_output() else x).cpu()
            if not torch.equal(got, wanted):
                at = int(got.ne(wanted).nonzero()[0])
                wrong = f"rank {self.rank}: element {at} is {got[at].item()}, expected {wanted[at].item()}"
        x.zero_()
        y.zero_()
        return wrong

    def _writes_output(self) -> bool:
        return bool(self.outputs[0].numel()) and self.op not in {"all_reduce", "broadcast", "reduce", "ping_pong"}

    def _wanted(self, turn: int) -> torch.Tensor | None:
        """The expected result on this rank; None if this rank has no result."""

        def sent(rank: int, count: int) -> torch.Tensor:
            return pattern(count, rank, turn, self.dtype)

        everyone, part, whole = range(self.ranks), self.part, self.part * self.ranks
        mine = slice(self.rank * part, (self.rank + 1) * part)
        if self.op == "all_reduce" or self.op in MANY:
            return total([sent(r, self.inputs[0].numel()) for r in everyone])
        if self.op == "reduce":
            return total([sent(r, part) for r in everyone]) if self.rank == ROOT else None
        if self.op == "reduce_scatter_tensor":
            return total([sent(r, whole) for r in everyone])[mine]
        if self.op == "all_gather_into_tensor" or (self.op == "gather" and self.rank == ROOT):
            return torch.cat([sent(r, part) for r in everyone])
        if self.op == "all_to_all_single":
            return torch.cat([sent(r, whole)[mine] for r in everyone])
        if self.op == "broadcast":
            return sent(ROOT, part)
        if self.op == "scatter":
            return sent(ROOT, whole)[mine]
        if self.op == "ping_pong":
            return sent(0, part) if self.takes_part() else None
        return None


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    result = parts[0].clone()
    for part in parts[1:]:
        result += part
    return result


def burst(parts: tuple[torch.Tensor, ...], group: dist.ProcessGroup) -> None:
    """Many operations in flight at the same time, like in a program with many small gradients."""
    works = [dist.all_reduce(part, group=group, async_op=True) for part in parts]
    for work in works:
        work.wait()


def region(parts: tuple[torch.Tensor, ...], group: dist.ProcessGroup) -> None:
    """The same calls within torch's coalescing manager."""
    with dist._coalescing_manager(group=group):
        for part in parts:
            dist.all_reduce(part, group=group)


def ping(x: torch.Tensor, partner: int, group: dist.ProcessGroup) -> None:
    dist.send(x, partner, group=group)
    dist.recv(x, partner, group=group)


def pong(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.recv(x, 0, group=group)
    dist.send(x, 0, group=group)
