"""Mixture of experts over several ranks: tokens go to the ranks of their experts and come back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_sagellm.api.arguments import checked_dense
from torch_sagellm.parallel import hosts
from torch_sagellm.parallel.autograd import exchange_rows


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one call went: the data that ``combine`` needs, and figures of the call.

    A token that is sent to k experts counts as k assignments.

    Example::

        moe = torch_sagellm.MoEDispatcher(num_experts=dist.get_world_size(), capacity_factor=1.0)
        rows, routing = moe.dispatch(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))  # all to expert 0
        print(routing.dropped, routing.imbalance)
    """

    #: For each row of the tokens that were sent, in the order of the experts, which assignment it is.
    order: torch.Tensor
    #: Tokens and experts for each token of the call.
    tokens: int
    choices: int
    #: Rows that were sent to each rank, and that came from each rank.
    sent: list[int]
    received: list[int]
    #: Rows for each expert of this rank, padding included; the rows that came are sorted by expert.
    rows: list[int]
    #: For each received row its place among them, sorted by expert.
    sorting: torch.Tensor
    #: Assignments of this rank's tokens that found no room.
    dropped: int
    #: Rows that were sent empty, so that all experts get as many.
    padding: int
    #: The most assignments to one expert divided by the mean over all experts, before any is dropped; 1 is even.
    imbalance: float


class MoEDispatcher:
    """Sends tokens to experts that live on several ranks, and brings the results back.

    Experts are numbered over the ranks: with E experts on n ranks, rank r has those from r * E / n on. Tokens travel in
    one all_to_all each way whose sizes follow the routing; where several hosts have the same number of ranks, more than
    one, in two: first between hosts, then inside them. Gradients pass both ways.

    Args:
        num_experts: of all ranks, a multiple of them (ValueError).
        group: the ranks; None the default group.
        capacity_factor: None: no token is dropped. Otherwise an expert takes from each rank at most ``ceil(factor *
            assignments / num_experts)`` tokens, the first ones; of the others ``combine`` adds nothing.
        pad: every expert gets as many rows as it may take, so that shapes are known before; needs a capacity factor.
        hierarchical: False to send rows straight to their rank on other hosts, too.

    Example::

        moe = torch_sagellm.MoEDispatcher(num_experts=2 * dist.get_world_size())
        experts = [torch.nn.Linear(8, 8) for _ in range(moe.local_experts)]
        tokens, chosen = torch.ones(6, 8), torch.tensor([[0, 1]] * 6)  # (T, D), and (T, k): experts
        rows, routing = moe.dispatch(tokens, chosen)
        results = torch.cat([expert(part) for expert, part in zip(experts, rows.split(routing.rows))])
        output = moe.combine(results, routing, torch.full((6, 2), 0.5))  # weights (T, k)
    """

    def __init__(
        self,
        num_experts: int,
        group: Any = None,
        *,
        capacity_factor: float | None = None,
        pad: bool = False,
        hierarchical: bool = True,
    ) -> None:
        self.group = group
        self.ranks: int = dist.get_world_size(group)
        if num_experts < 1 or num_experts % self.ranks:
            raise ValueError(
                f"sagellm MoEDispatcher: num_experts is {num_experts}, expected a multiple of the {self.ranks} ranks"
            )
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"sagellm MoEDispatcher: capacity_factor is {capacity_factor}, expected more than 0")
        if pad and capacity_factor is None:
            raise ValueError("sagellm MoEDispatcher: pad=True needs a capacity_factor, which says how far to pad")
        self.num_experts, self.capacity_factor, self.pad = num_experts, capacity_factor, pad
        self.local_experts = num_experts // self.ranks
        self.hierarchical = hierarchical
        #: The hosts of the ranks, which the first dispatch finds out.
        self._among: hosts.Hosts | None = None
        self._looked = not hierarchical

    def dispatch(self, tokens: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """Sends each token to its experts; returns the rows for this rank's experts, sorted by expert, and the routing.

        Args:
            tokens: (T, D), as many as this rank has; other ranks may have more or fewer (with ``pad`` as many).
            experts: (T,) or (T, k), whole numbers from 0 to ``num_experts`` - 1: the experts of each token.
        """
        chosen = self._checked(tokens, experts)
        flat = chosen.reshape(-1)
        wanted = torch.bincount(flat, minlength=self.num_experts)
        order = torch.argsort(flat, stable=True)
        capacity = self._capacity(flat.numel())
        taken = wanted if capacity is None else wanted.clamp(max=capacity)
        kept = self._first_of_each(flat[order], wanted, capacity)
        order = order[kept]
        rows = tokens[order // chosen.shape[1]]
        counts = taken
        padding = 0
        if self.pad:
            assert capacity is not None
            rows, order = self._padded(rows, order, flat, capacity)
            counts = torch.full_like(taken, capacity)
            padding = int(capacity * self.num_experts - int(taken.sum()))
        theirs, demand = self._tell(counts, wanted)
        sent = counts.view(self.ranks, self.local_experts).sum(1).tolist()
        received = theirs.sum(1).tolist()
        if not self._looked:
            self._among, self._looked = hosts.find(self.group), True
        came = exchange_rows(rows, sent, received, self.group, self._among)
        # The received rows are sorted by rank and then by expert; each expert needs its rows together.
        labels = torch.arange(self.local_experts, device=theirs.device).repeat(self.ranks)
        sorting = torch.argsort(labels.repeat_interleave(theirs.reshape(-1)), stable=True)
        mean = demand.float().mean().item()
        routing = Routing(
            order=order,
            tokens=tokens.shape[0],
            choices=chosen.shape[1],
            sent=sent,
            received=received,
            rows=theirs.sum(0).tolist(),
            sorting=sorting,
            dropped=int(wanted.sum() - taken.sum()),
            padding=padding,
            imbalance=demand.max().item() / mean if mean else 1.0,
        )
        return came[sorting], routing

    def combine(self, results: torch.Tensor, routing: Routing, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Brings the experts' results back to their tokens: (T, D), each the weighted sum over the token's experts.

        ``results`` has a row for each row of ``dispatch``, in its order. ``weights`` is (T, k), or (T,) where k is 1
        (ValueError for another shape); with None every weight is 1.
        """
        checked_dense("MoEDispatcher", results)
        if results.shape[0] != sum(routing.rows):
            raise ValueError(
                f"sagellm MoEDispatcher: {results.shape[0]} results, expected {sum(routing.rows)}, a row for each that "
                "dispatch gave"
            )
        shape = (routing.tokens, routing.choices)
        shapes = [shape] if routing.choices > 1 else [shape, shape[:1]]
        if weights is not None and weights.shape not in shapes:
            raise ValueError(
                f"sagellm MoEDispatcher: weights of shape {tuple(weights.shape)}, expected {shape}, one for each token "
                "and its experts"
            )
        unsorted = torch.empty_like(routing.sorting)
        unsorted[routing.sorting] = torch.arange(len(unsorted), device=unsorted.device)
        back = exchange_rows(results[unsorted], routing.received, routing.sent, self.group, self._among)
        order = routing.order
        if routing.padding:
            real = order >= 0
            back, order = back[real], order[real]
        if weights is not None:
            back = back * weights.reshape(-1)[order].unsqueeze(1).to(back.dtype)
        output = back.new_zeros((routing.tokens, *back.shape[1:]))
        return output.index_add(0, order // routing.choices, back)

    def _checked(self, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        for tensor in (tokens, experts):
            checked_dense("MoEDispatcher", tensor)
        if tokens.dim() != 2 or experts.dim() not in (1, 2) or experts.shape[0] != tokens.shape[0]:
            raise ValueError(
                f"sagellm MoEDispatcher: tokens of shape {tuple(tokens.shape)} and experts of shape "
                f"{tuple(experts.shape)}, expected (T, D) and (T,) or (T, k)"
            )
        if experts.is_floating_point() or experts.is_complex():
            raise ValueError(f"sagellm MoEDispatcher: experts are {experts.dtype}, expected whole numbers")
        if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < self.num_experts:
            raise ValueError(
                f"sagellm MoEDispatcher: experts from {int(experts.min())} to {int(experts.max())}, expected 0 to "
                f"{self.num_experts - 1}"
            )
        return experts.long() if experts.dim() == 2 else experts.long().unsqueeze(1)

    def _capacity(self, assignments: int) -> int | None:
        """The most rows that an expert takes from this rank."""
        if self.capacity_factor is None:
            return None
        return math.ceil(self.capacity_factor * assignments / self.num_experts)

    @staticmethod
    def _first_of_each(sorted_experts: torch.Tensor, wanted: torch.Tensor, capacity: int | None) -> torch.Tensor:
        """Of assignments sorted by expert, whether each is among the first ``capacity`` of its expert."""
        if capacity is None:
            return torch.ones_like(sorted_experts, dtype=torch.bool)
        begins = wanted.cumsum(0) - wanted
        place = torch.arange(len(sorted_experts), device=sorted_experts.device) - begins[sorted_experts]
        return place < capacity

    def _padded(
        self, rows: torch.Tensor, order: torch.Tensor, flat: torch.Tensor, capacity: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and their assignments with empty rows (assignment -1) behind those of each expert."""
        experts = flat[order]
        counts = torch.bincount(experts, minlength=self.num_experts)
        begins = counts.cumsum(0) - counts
        places = experts * capacity + torch.arange(len(experts), device=experts.device) - begins[experts]
        size = capacity * self.num_experts
        filled = rows.new_zeros((size, *rows.shape[1:])).index_copy(0, places, rows)
        assigned = order.new_full((size,), -1).index_copy(0, places, order)
        return filled, assigned

    def _tell(self, counts: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that come from each rank for each expert here, and the assignments of all ranks to each expert."""
        theirs = torch.empty_like(counts)
        exchanged = dist.all_to_all_single(theirs, counts, group=self.group, async_op=True)
        demand = wanted.clone()
        dist.all_reduce(demand, group=self.group)
        exchanged.wait()
        return theirs.view(self.ranks, self.local_experts), demand
