"""Computes the routes of rows to experts: on the CPU by the core (``src/routing.rs``), on a device by torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_sagellm._private import load


@dataclass(frozen=True)
class Routing:
    """The routes of the tokens of one call: the data that ``combine`` needs, and figures of the call.

    A token that is sent to k experts counts as k assignments.

    Example::

        moe = torch_sagellm.MoEDispatcher(num_experts=dist.get_world_size(), capacity_factor=1.0)
        rows, routing = moe.dispatch(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))  # all to expert 0
        print(routing.dropped, routing.imbalance)
    """

    #: For each row that was sent, the index of its assignment; -1 for padding. The rows are in the order of the
    #: experts.
    order: Tensor
    #: Number of tokens of the call, and number of experts for each token.
    tokens: int
    choices: int
    #: For each rank: number of rows sent to it, and number of rows received from it.
    sent: list[int]
    received: list[int]
    #: Number of rows for each expert of this rank, including padding; the received rows are sorted by expert.
    rows: list[int]
    #: For each row that ``dispatch`` returned: its index in the received rows.
    sorting: Tensor
    #: For each received row: its index in the rows that ``dispatch`` returned.
    unsorted: Tensor
    #: For each row that was sent: the index of its token; token 0 for padding.
    sources: Tensor
    #: For each assignment: the index of the row that was sent for it; -1 if the assignment was dropped.
    places: Tensor
    #: Number of assignments of this rank's tokens that were dropped because the expert had no room.
    dropped: int
    #: Number of padding rows that were sent so that all experts get the same number of rows.
    padding: int
    #: The largest number of assignments to one expert, divided by the mean over all experts, before any is dropped; 1
    #: is even. With ``pad`` only this rank's tokens are counted, because no counts are exchanged.
    imbalance: float


class _Rows(NamedTuple):
    """The result of ``_by_core`` and ``_by_torch``; each field has the same meaning as in ``Routing``."""

    sent: list[int]
    received: list[int]
    rows: list[int]
    order: Tensor
    sources: Tensor
    places: Tensor
    sorting: Tensor
    unsorted: Tensor
    #: The largest number of rows for one expert, and the number of all rows of all ranks.
    busiest: int
    all_rows: int


class Router:
    """Computes routes to experts that are numbered over the ranks of a group; the arguments are a dispatcher's."""

    def __init__(self, num_experts: int, group: Any, capacity_factor: float | None, pad: bool) -> None:
        self.group, self.num_experts = group, num_experts
        self.ranks: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)
        self.local_experts = num_experts // self.ranks
        self.capacity_factor, self.pad = capacity_factor, pad

    def route(self, experts: Tensor) -> Routing:
        """Routes to experts (T,) or (T, k)."""
        if experts.is_floating_point() or experts.is_complex():
            raise ValueError(f"sagellm MoEDispatcher: experts are {experts.dtype}, expected whole numbers")
        flat = experts.reshape(-1).long().contiguous()
        assignments = flat.shape[0]
        tokens, choices = experts.shape[0], experts.shape[1] if experts.dim() == 2 else 1
        wanted, order = self._sort(flat)
        if self.pad:
            taken = wanted.new_full((self.ranks * self.num_experts,), self._capacity(assignments))
        else:
            table = wanted if self.ranks == 1 else wanted.new_empty(self.ranks * self.num_experts)
            if self.ranks > 1:
                dist.all_gather_into_tensor(table, wanted, group=self.group)
            taken = table if self.capacity_factor is None else self._limited(table)
        rows = (self._by_core if flat.is_cpu else self._by_torch)(flat, order, wanted, taken, choices)
        busiest, total = rows.busiest, rows.all_rows
        if self.capacity_factor is not None:  # before any is dropped
            demand = (wanted if self.pad else table.view(self.ranks, -1).sum(0)).tolist()
            busiest, total = max(demand), sum(demand)
        padding = int((rows.order < 0).sum()) if self.pad else 0
        return Routing(
            order=rows.order,
            tokens=tokens,
            choices=choices,
            sent=rows.sent,
            received=rows.received,
            rows=rows.rows,
            sorting=rows.sorting,
            unsorted=rows.unsorted,
            sources=rows.sources,
            places=rows.places,
            dropped=assignments - (rows.order.shape[0] - padding),
            padding=padding,
            imbalance=busiest * self.num_experts / total if total else 1.0,
        )

    def _capacity(self, assignments: int) -> int:
        """The largest number of rows that an expert accepts from a rank with this number of assignments."""
        assert self.capacity_factor is not None
        return math.ceil(self.capacity_factor * assignments / self.num_experts)

    def _limited(self, table: Tensor) -> Tensor:
        """Limits ``table``, the number of rows from each rank to each expert, to the experts' capacity."""
        each = table.view(self.ranks, self.num_experts)
        limits = [[self._capacity(total)] for total in each.sum(1).tolist()]
        return torch.minimum(each, torch.tensor(limits, device=table.device)).view(-1)

    def _sort(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The number of assignments of each expert, and the assignments sorted by expert."""
        if flat.is_cpu:
            wanted, order = flat.new_empty(self.num_experts), torch.empty_like(flat)
            load.extension()._sort_assignments(flat, wanted, order)
            return wanted, order
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_experts:
            raise ValueError(
                f"sagellm MoEDispatcher: experts from {int(flat.min())} to {int(flat.max())}, expected 0 to "
                f"{self.num_experts - 1}"
            )
        return torch.bincount(flat, minlength=self.num_experts), torch.argsort(flat, stable=True)

    def _by_core(self, flat: Tensor, order: Tensor, wanted: Tensor, taken: Tensor, choices: int) -> _Rows:
        core = load.extension()
        figures = flat.new_empty(2 * self.ranks + self.local_experts + 2)
        core._row_figures(taken, self.num_experts, self.rank, figures)
        found = figures.tolist()
        sent, received = found[: self.ranks], found[self.ranks : 2 * self.ranks]
        leaving, places = flat.new_empty((2, sum(sent))), torch.empty_like(order)
        rows, sources = leaving.unbind(0)
        core._rows_leaving(taken, self.rank, order, wanted, choices, rows, sources, places)
        sorting, unsorted = flat.new_empty((2, sum(received))).unbind(0)
        core._rows_coming(taken, self.num_experts, self.rank, sorting, unsorted)
        *each, busiest, total = found[2 * self.ranks :]
        return _Rows(sent, received, each, rows, sources, places, sorting, unsorted, busiest, total)

    def _by_torch(self, flat: Tensor, order: Tensor, wanted: Tensor, taken: Tensor, choices: int) -> _Rows:
        table = taken.view(self.ranks, self.num_experts)
        pairs = table.view(self.ranks, self.ranks, self.local_experts).sum(2).tolist()
        sent, received = pairs[self.rank], [line[self.rank] for line in pairs]
        first = self.rank * self.local_experts
        theirs = table[:, first : first + self.local_experts]
        rows = self._filled(order, flat, wanted, table[self.rank])
        places = torch.full_like(order, -1)
        real = (rows >= 0).nonzero().squeeze(1)
        places[rows[real]] = real
        sorting = self._sorting(theirs)
        sources = rows.clamp(min=0).div(choices, rounding_mode="floor")
        every, unsorted = table.sum(0).tolist(), torch.argsort(sorting)
        each = every[first : first + self.local_experts]
        return _Rows(sent, received, each, rows, sources, places, sorting, unsorted, max(every), sum(every))

    def _filled(self, order: Tensor, flat: Tensor, wanted: Tensor, taken: Tensor) -> Tensor:
        """The accepted assignments of each expert, its first ones; padded with -1 if the expert has fewer."""
        experts = flat[order]
        place = torch.arange(len(order), device=order.device) - (wanted.cumsum(0) - wanted)[experts]
        kept = place < taken[experts]
        filled = order.new_full((int(taken.sum()),), -1)
        filled[(taken.cumsum(0) - taken)[experts[kept]] + place[kept]] = order[kept]
        return filled

    def _sorting(self, theirs: Tensor) -> Tensor:
        """The indices that sort the received rows by expert, then by rank."""
        ranks = torch.arange(self.ranks, device=theirs.device)
        keys = torch.arange(self.local_experts, device=theirs.device) * self.ranks + ranks.unsqueeze(1)
        return torch.argsort(keys.reshape(-1).repeat_interleave(theirs.reshape(-1)), stable=True)
