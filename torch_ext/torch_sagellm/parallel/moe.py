"""Mixture of experts over several ranks: sends tokens to the ranks of their experts, and the results back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_sagellm._private import groups
from torch_sagellm.api import hosts
from torch_sagellm.api.arguments import checked_dense, in_memory, wraps
from torch_sagellm.parallel.moving import lists_of
from torch_sagellm.parallel.routing import Router, Routing


class PendingDispatch:
    """Rows in flight; ``wait()`` returns what ``dispatch`` would return, and may be called again.

    Example::

        moe = torch_sagellm.MoEDispatcher(num_experts=dist.get_world_size())
        coming = moe.dispatch_async(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
        rows, routing = coming.wait()
    """

    def __init__(self, moe: MoEDispatcher, tokens: Tensor, routing: Routing, under_way: _UnderWay) -> None:
        self._moe, self._tokens, self._routing, self._under_way = moe, tokens, routing, under_way
        self._rows: Tensor | None = None

    def wait(self) -> tuple[Tensor, Routing]:
        """Returns the rows for this rank's experts and the routing, after all rows have been received."""
        if self._rows is None:
            self._rows = self._moe._sorted(self._tokens, self._routing, self._under_way)
        return self._rows, self._routing


@dataclass
class _UnderWay:
    """An exchange in flight. It keeps the sent memory alive until the exchange ends."""

    sent: Tensor
    came: Tensor
    work: Any
    #: Whether ``came`` is sorted by expert.
    sorted: bool


class MoEDispatcher:
    """Sends tokens to experts that are distributed over several ranks, and sends the results back.

    Experts are numbered over the ranks: with E experts on n ranks, rank r has the E / n experts from r * E / n on. Each
    direction is one all_to_all whose sizes follow the routing. On the CPU it reads and writes the rows where they are:
    ``dispatch`` sends the rows of ``tokens`` and receives rows sorted by expert. (``pad`` and ``dispatch_async`` copy
    the rows to be sent first.) On devices, with ``hierarchical``, in torch's debug mode and in groups that gloo serves,
    rows are gathered before the exchange and sorted after it. ``dispatch`` first gathers the counts of all ranks,
    except with ``pad``, because all counts are then known. Gradients pass in both directions, once (not gradients of
    gradients). On CPUs the dispatcher keeps the memory of large exchanges for the next call.

    Args:
        num_experts: experts of all ranks, a multiple of the number of ranks (ValueError).
        group: the ranks; None means the default group.
        capacity_factor: None means that no token is dropped. Otherwise an expert accepts from each rank at most
            ``ceil(factor * assignments / num_experts)`` tokens, the first ones; ``combine`` adds nothing for the
            others. The factor is the same on all ranks.
        pad: every expert gets as many rows as it may accept, so that shapes are known in advance and no counts are
            exchanged. It needs a capacity factor, and the same number of tokens on every rank. It sends more rows; no
            measurement showed that it saves time.
        hierarchical: with several hosts of the same number of ranks each (at least two), rows are sent in two steps:
            first between hosts, then inside them. This needs fewer messages between hosts, but each row is copied twice
            more and a second exchange of counts precedes it. It was slower in every measured case (up to 4 ranks per
            host, 1 ms between hosts), so it is off by default.

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
        hierarchical: bool = False,
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
        self._router = Router(num_experts, group, capacity_factor, pad)
        self.hierarchical = hierarchical
        #: The hosts of the ranks, which the first dispatch determines.
        self._among: hosts.Hosts | None = None
        self._looked = not hierarchical
        #: Memory of earlier exchanges. Backward passes use it on another thread, so it is only popped and appended.
        self._spare: list[Tensor] = []

    def dispatch(self, tokens: Tensor, experts: Tensor) -> tuple[Tensor, Routing]:
        """Sends each token to its experts; returns the rows for this rank's experts, sorted by expert, and the routing.

        Args:
            tokens: (T, D); T may differ between ranks, except with ``pad``.
            experts: (T,) or (T, k), whole numbers from 0 to ``num_experts`` - 1: the experts of each token.
        """
        routing = self._route(tokens, experts)
        return self._sorted(tokens, routing, None), routing

    def dispatch_async(self, tokens: Tensor, experts: Tensor) -> PendingDispatch:
        """``dispatch`` without waiting for the rows, so that experts of an earlier call can compute meanwhile.

        When it returns, the counts have been exchanged, and ``tokens`` may be changed.
        """
        routing = self._route(tokens, experts)
        with torch.no_grad():
            under_way = self._begin_spread(tokens, routing, None, wait=False)
        return PendingDispatch(self, tokens, routing, under_way)

    def combine(self, results: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
        """Sends the experts' results back; returns (T, D): for each token the weighted sum over its experts.

        ``results`` has a row for each row of ``dispatch``, in its order. ``weights`` is (T, k), or (T,) if k is 1
        (ValueError for another shape); with None every weight is 1.
        """
        checked_dense("MoEDispatcher", results)
        if results.shape[0] != len(routing.sorting):
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
        flat = results if results.dim() == 2 else results.flatten(1)
        if weights is not None:
            weights = weights.reshape(-1).to(flat.dtype)
        output: Tensor
        if torch.is_grad_enabled() and (flat.requires_grad or (weights is not None and weights.requires_grad)):
            output = _Combine.apply(flat, weights, self, routing)
        else:
            output = self._combined(flat, routing, weights)
        return output if results.dim() == 2 else output.unflatten(1, results.shape[1:])

    def _route(self, tokens: Tensor, experts: Tensor) -> Routing:
        """Computes the routes; the ranks exchange their counts first if the counts are not known."""
        for tensor in (tokens, experts):
            checked_dense("MoEDispatcher", tensor)
        if tokens.dim() != 2 or experts.dim() not in (1, 2) or experts.shape[0] != tokens.shape[0]:
            raise ValueError(
                f"sagellm MoEDispatcher: tokens of shape {tuple(tokens.shape)} and experts of shape "
                f"{tuple(experts.shape)}, expected (T, D) and (T,) or (T, k)"
            )
        if not self._looked:
            self._among, self._looked = hosts.find(self.group), True
        return self._router.route(experts)

    def _sorted(self, tokens: Tensor, routing: Routing, under_way: _UnderWay | None) -> Tensor:
        """Returns the received rows, sorted by expert."""
        if torch.is_grad_enabled() and tokens.requires_grad:
            rows: Tensor = _Dispatch.apply(tokens, self, routing, under_way)
            return rows
        return self._spread(tokens, routing, None, under_way)

    def _spread(
        self, tokens: Tensor, routing: Routing, weights: Tensor | None, under_way: _UnderWay | None = None
    ) -> Tensor:
        """From tokens to rows: sends each token to its experts, multiplied by the assignments' weights if there are
        any."""
        with torch.no_grad():
            begun = under_way or self._begin_spread(tokens, routing, weights, wait=True)
            if begun.work is not None:
                begun.work.wait()
            if begun.sent is not tokens and begun.sent is not begun.came:
                self._keep(begun.sent)
            if begun.sorted:
                return begun.came
            rows = begun.came.index_select(0, routing.sorting)
            self._keep(begun.came)
        return rows

    def _begin_spread(self, tokens: Tensor, routing: Routing, weights: Tensor | None, wait: bool) -> _UnderWay:
        """Begins to send rows to the experts; ``wait`` means that the caller waits at once."""
        in_place = self._in_place(tokens)
        leaving, picked = tokens, routing.sources
        # Without waiting, the caller may change the tokens, so they are copied.
        if in_place is None or not wait or weights is not None or routing.padding or not _is_plain(tokens):
            # A single rank returns these rows, so their memory cannot be kept for the next call.
            many = len(routing.order)
            leaving = self._memory(many, tokens) if self.ranks > 1 else tokens.new_empty((many, tokens.shape[1]))
            picked = None
            torch.index_select(tokens, 0, routing.sources, out=leaving)
            if weights is not None:
                leaving *= weights[routing.order].unsqueeze(1)
            if routing.padding:
                leaving[routing.order < 0] = 0
        if in_place is None:
            came, work = self._exchange(leaving, routing.sent, routing.received, wait)
            return _UnderWay(leaving, came, work, sorted=self.ranks == 1)
        rows = tokens.new_empty((len(routing.unsorted), tokens.shape[1]))
        work = in_place._all_to_all_rows(
            rows, routing.unsorted, routing.received, leaving, picked, routing.sent, async_op=not wait
        )
        return _UnderWay(leaving, rows, work, sorted=True)

    def _collect(self, results: Tensor, routing: Routing) -> Tensor:
        """From results sorted by expert to rows in the order of ``routing.order``.

        The caller then passes the rows to ``_keep``.
        """
        in_place = self._in_place(results)
        if in_place is not None and _is_plain(results):
            back = self._memory(len(routing.order), results)
            in_place._all_to_all_rows(
                back, None, routing.sent, results, routing.unsorted, routing.received, async_op=False
            )
            return back
        leaving = self._memory(len(routing.unsorted), results)
        torch.index_select(results, 0, routing.unsorted, out=leaving)
        back, _ = self._exchange(leaving, routing.received, routing.sent, wait=True)
        if back is not leaving:
            self._keep(leaving)
        return back

    def _in_place(self, like: Tensor) -> Any:
        """Returns the backend if it exchanges rows that are not contiguous; None if they must be gathered first."""
        if self.ranks == 1 or not like.is_cpu or self._among is not None:
            return None
        ours = lists_of(self.group)
        # In torch's debug mode a wrapper of the backend compares the ranks' calls, so no call may bypass it.
        return ours if ours is not None and not groups.is_wrapped(self.group) else None

    def _exchange(self, leaving: Tensor, sent: list[int], received: list[int], wait: bool) -> tuple[Tensor, Any]:
        """Exchanges contiguous rows; returns the received rows, and the Work unless ``wait``.

        A single rank receives the rows that it sends, in the same memory. They are sorted by expert already.
        """
        if self.ranks == 1:
            return leaving, None
        if self._among is not None:
            return hosts.exchange(leaving, sent, received, self._among), None
        came = self._memory(sum(received), leaving)
        work = dist.all_to_all_single(came, leaving, received, sent, group=self.group, async_op=not wait)
        return came, work

    def _memory(self, rows: int, like: Tensor) -> Tensor:
        """Uninitialized rows like those of ``like``.

        On the CPU, many rows reuse memory of an earlier call, because its pages are already populated.
        """
        width = like.shape[1]
        if rows * width >= _MANY and like.is_cpu:
            try:
                spare = self._spare.pop()
            except IndexError:
                pass
            else:
                if spare.dtype == like.dtype and spare.numel() >= rows * width:
                    return spare[: rows * width].view(rows, width)
        return like.new_empty((rows, width))

    def _keep(self, rows: Tensor) -> None:
        """Keeps the memory of rows that are no longer used, for a later exchange."""
        # Memory of inference mode may be written only in that mode.
        if rows.numel() >= _MANY and rows.is_cpu and not rows.is_inference() and len(self._spare) < 4:
            whole = rows if rows._base is None else rows._base
            self._spare.append(whole.view(-1))

    def _combined(self, results: Tensor, routing: Routing, weights: Tensor | None) -> Tensor:
        """Returns the sum of each token's rows."""
        with torch.no_grad():
            back = self._collect(results, routing)
            output = _summed(back, routing, weights)
            self._keep(back)
        return output


#: From this many elements on, the memory of an exchange is kept for the next one. For fewer, this takes longer than it
#: saves (2 ranks, 2026-11-27).
_MANY = 1 << 17
#: The dtypes that torch's embedding_bag can sum.
_BAGGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _is_plain(rows: Tensor) -> bool:
    """Whether the memory of the tensor holds its rows one after the other. Some subclasses have no memory."""
    return rows.is_contiguous() and not rows.is_conj() and not rows.is_neg() and not wraps(rows)


def _places(routing: Routing) -> tuple[Tensor, Tensor]:
    """The assignments that were sent, ascending, and the row of each."""
    if not routing.dropped:
        return torch.arange(len(routing.places), device=routing.places.device), routing.places
    assignments = (routing.places >= 0).nonzero().squeeze(1)
    return assignments, routing.places[assignments]


def _summed(back: Tensor, routing: Routing, weights: Tensor | None) -> Tensor:
    """For each token the sum of its rows, each multiplied by its weight, in the order of the token's experts."""
    if len(routing.places) == routing.dropped:
        return back.new_zeros((routing.tokens, back.shape[1]))
    begins = torch.arange(0, routing.tokens * routing.choices, routing.choices, device=back.device)
    if back.dtype in _BAGGED and not routing.dropped:
        # Like torch.nn.functional.embedding_bag with mode="sum", whose checks take half of the time of a few rows.
        summed: Tensor = torch.embedding_bag(back, routing.places, begins, False, 0, False, weights)[0]
        return summed
    assignments, places = _places(routing)
    if back.dtype not in _BAGGED:
        part = back[places] if weights is None else back[places] * weights[assignments].unsqueeze(1)
        output = back.new_zeros((routing.tokens, back.shape[1]))
        return output.index_add(0, assignments.div(routing.choices, rounding_mode="floor"), part)
    each = None if weights is None else weights[assignments]
    bag: Any = torch.nn.functional.embedding_bag
    by_token: Tensor = bag(places, back, torch.searchsorted(assignments, begins), mode="sum", per_sample_weights=each)
    return by_token


# torch calls `forward` and `backward` by these names, with its own context object; it has no annotations for mypy.
class _Dispatch(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, moe: MoEDispatcher, routing: Routing, under_way: _UnderWay | None) -> Tensor:
        ctx.of = (moe, routing)
        return moe._spread(tokens, routing, None, under_way)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        moe, routing = ctx.of
        return moe._combined(in_memory(grad), routing, None), None, None, None


class _Combine(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor | None, moe: MoEDispatcher, routing: Routing) -> Tensor:
        ctx.of = (moe, routing, weights)
        back = moe._collect(results, routing)
        # The gradient of the weights needs the rows. If no such gradient is needed, `_keep` gets their memory below.
        ctx.back = back if weights is not None and ctx.needs_input_grad[1] else None
        output = _summed(back, routing, weights)
        if ctx.back is None:
            moe._keep(back)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        moe, routing, weights = ctx.of
        slope = None
        if ctx.back is not None:
            assignments, places = _places(routing)
            tokens = assignments.div(routing.choices, rounding_mode="floor")
            slope = torch.zeros_like(weights)
            slope[assignments] = (ctx.back[places] * grad[tokens]).sum(1)
        return moe._spread(in_memory(grad), routing, weights), slope, None, None
