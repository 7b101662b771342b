"""The collectives that ``torch-sagellm bench`` measures: how each is called, and its expected result.

Every case has its own tensors. Checked calls use small whole numbers that differ by rank and index, so that results are
exact in every dtype. Timed calls use zeros, so that sums in place stay finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_sagellm.observe.stats import BUS_FACTORS

if TYPE_CHECKING:
    import torch

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
#: Collectives whose tensor consists of a block for each rank.
BLOCKS = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = (*FLOATS, "int32", "int64", "uint8")
#: Names of reduce ops in the arguments, and torch's names.
REDUCTIONS = {"sum": "SUM", "prod": "PRODUCT", "max": "MAX", "min": "MIN", "avg": "AVG"}
#: Backends of torch that have no AVG.
WITHOUT_AVG = ("gloo", "mpi")
PERIOD = 5
#: From this rank on, ranks contribute the neutral 0 or 1 to a checked reduction, because bfloat16 is exact only up to
#: 256.
ADDENDS = {"sum": 85, "prod": 5, "max": 1 << 16, "min": 1 << 16}


class Case:
    """One operation at one size on this rank.

    ``size`` is the number of bytes of the whole tensor, ``count`` its elements, rounded up so that every rank has a
    block.
    """

    def __init__(self, op: str, size: int, dtype: str, redop: str, device: str) -> None:
        import torch
        import torch.distributed as dist

        self.op, self.redop, self.dtype, self.device = op, redop, getattr(torch, dtype), torch.device(device)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        item: int = torch.empty(0, dtype=self.dtype).element_size()
        blocks = self.ranks if op in BLOCKS else 1
        self.block = max(1, -(-size // (item * blocks)))
        self.count = self.block * blocks
        self.size = self.count * item
        factor = BUS_FACTORS.get(op)
        self.bus_factor: float = factor(self.ranks) if factor else 1.0
        #: The input and the output of this rank; the same tensor if the operation works in place.
        self.given = self._zeros(self.block if op in ("all_gather", "gather") else self.count)
        in_place = op in ("all_reduce", "broadcast", "reduce")
        self.taken = self.given if in_place else self._zeros(self._result_count())
        self.call = self._bound(dist, getattr(dist.ReduceOp, REDUCTIONS[redop]))

    def _zeros(self, count: int) -> torch.Tensor:
        import torch

        return torch.zeros(count, dtype=self.dtype, device=self.device)

    def _result_count(self) -> int:
        return self.block if self.op in ("reduce_scatter", "scatter") else self.count

    def _bound(self, dist: Any, combine: Any) -> Callable[[Any], object]:
        """A function that calls the operation over a group. The root is rank 0."""
        given, taken = self.given, self.taken
        if self.op == "all_reduce":
            return lambda group: dist.all_reduce(given, op=combine, group=group)
        if self.op == "broadcast":
            return lambda group: dist.broadcast(given, src=0, group=group)
        if self.op == "reduce":
            return lambda group: dist.reduce(given, dst=0, op=combine, group=group)
        if self.op == "all_gather":
            return lambda group: dist.all_gather_into_tensor(taken, given, group=group)
        if self.op == "reduce_scatter":
            return lambda group: dist.reduce_scatter_tensor(taken, given, op=combine, group=group)
        if self.op == "all_to_all":
            return lambda group: dist.all_to_all_single(taken, given, group=group)
        if self.op == "gather":
            parts = list(taken.view(self.ranks, self.block).unbind()) if self.rank == 0 else None
            return lambda group: dist.gather(given, parts, dst=0, group=group)
        pieces = list(given.view(self.ranks, self.block).unbind()) if self.rank == 0 else None
        return lambda group: dist.scatter(taken, pieces, src=0, group=group)

    def _values(self, rank: int, count: int) -> torch.Tensor:
        """A rank's input in a checked call: numbers so small that every sum and product is exact even in 16 bits."""
        import torch

        if self.op in REDUCING and self.redop == "avg":
            # In each pair of ranks one adds 1 and the other subtracts 1, so that the average is a whole number.
            pair = 0 if rank == self.ranks - 1 and self.ranks % 2 else 1 - 2 * (rank % 2)
            return ((torch.arange(count) % PERIOD) % 3 + 2 + pair).to(self.dtype)
        if self.op in REDUCING and rank >= ADDENDS[self.redop]:
            return torch.full((count,), 0 if self.redop == "sum" else 1, dtype=self.dtype)
        return ((torch.arange(count) % PERIOD + rank) % 3 + 1).to(self.dtype)

    def _combined(self, count: int) -> torch.Tensor:
        """The combined values of all ranks, in rank order. uint8 wraps around, as in the operation."""
        import torch

        if self.redop == "avg":
            return ((torch.arange(count) % PERIOD) % 3 + 2).to(self.dtype)
        combine = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}[self.redop]
        result = self._values(0, count)
        for rank in range(1, self.ranks):
            result = combine(result, self._values(rank, count))
        return result

    def _expected(self) -> torch.Tensor | None:
        """The expected output of this rank; None if it has no output."""
        import torch

        every, block = range(self.ranks), slice(self.rank * self.block, (self.rank + 1) * self.block)
        if self.rank != 0 and self.op in ("reduce", "gather"):
            return None
        if self.op in ("all_reduce", "reduce"):
            return self._combined(self.count)
        if self.op == "reduce_scatter":
            return self._combined(self.count)[block]
        if self.op == "broadcast":
            return self._values(0, self.count)
        if self.op == "scatter":
            return self._values(0, self.count)[block]
        if self.op == "all_to_all":
            return torch.cat([self._values(rank, self.count)[block] for rank in every])
        return torch.cat([self._values(rank, self.block) for rank in every])

    def wrong(self, group: Any) -> int:
        """Runs the operation on known values over a group.

        Returns the number of wrong elements. Then sets zeros again.
        """
        self.taken.fill_(0)
        self.given.copy_(self._values(self.rank, self.given.numel()))
        self.call(group)
        expected = self._expected()
        found = 0 if expected is None else int((self.taken.cpu() != expected).sum().item())
        self.given.zero_()
        self.taken.zero_()
        return found


def make(op: str, size: int, dtype: str, redop: str, device: str = "cpu") -> Case:
    """Creates a case over the ranks of the default group, with tensors on a device."""
    return Case(op, size, dtype, redop, device)
