"""A linear layer whose weights are distributed over the ranks of a tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from torch_sagellm.parallel import autograd

MODES = ("column", "row")


class TensorParallelLinear(nn.Module):  # type: ignore[misc]  # torch has no annotations for mypy
    """``torch.nn.Linear`` over several ranks: the same outputs and gradients; each rank holds a part of the weights.

    In mode "column" a rank holds rows of the weight matrix, which produce some of the output features. In mode "row" it
    holds columns, which use some of the input features, and the outputs are summed. A column layer with
    ``gather_output=False`` followed by a row layer with ``input_is_split=True`` needs one all_reduce for both.

    Args:
        in_features, out_features: sizes of the whole layer. The one that is split must be a multiple of ``world_size``
            (ValueError).
        world_size: number of ranks of the group (ValueError if the group has another number).
        mode: "column" or "row".
        bias: whether the layer has a bias. In mode "row" every rank holds the whole bias.
        group: the group of the ranks; None means the default group.
        gather_output: "column" only: if True, every rank returns all output features, otherwise only its own.
        input_is_split: "row" only: if True, the input has only this rank's features; otherwise the layer selects them.
        device, dtype: device and dtype of the parameters.

    Rank 0 of the group creates the initial weights, like ``torch.nn.Linear``, and sends each rank its part.

    Shapes: input ``(*, in_features)``, output ``(*, out_features)``; a split one has 1 / world_size of the features.

    Example::

        layer = torch_sagellm.TensorParallelLinear(8, 6, dist.get_world_size(), mode="column")
        assert layer(torch.ones(3, 8)).shape == (3, 6)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        world_size: int,
        mode: str = "column",
        bias: bool = True,
        *,
        group: Any = None,
        gather_output: bool = True,
        input_is_split: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"sagellm TensorParallelLinear: mode={mode!r}, expected one of {', '.join(MODES)}")
        found = dist.get_world_size(group) if dist.is_initialized() else 1
        if world_size != found:
            raise ValueError(
                f"sagellm TensorParallelLinear: world_size is {world_size}, and the group has {found} ranks"
            )
        name, split = ("out_features", out_features) if mode == "column" else ("in_features", in_features)
        if split % world_size:
            raise ValueError(
                f"sagellm TensorParallelLinear: {name} is {split}, expected a multiple of the {world_size} ranks"
            )
        self.in_features, self.out_features, self.world_size, self.mode = in_features, out_features, world_size, mode
        self.group, self.gather_output, self.input_is_split = group, gather_output, input_is_split
        part = split // world_size
        shape = (part, in_features) if mode == "column" else (out_features, part)
        made = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(shape, **made))
        size = part if mode == "column" else out_features
        self.bias = nn.Parameter(torch.empty(size, **made)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights on rank 0 of the group and sends each rank its part. All ranks call it."""
        whole = None
        if self.world_size == 1 or dist.get_rank(self.group) == 0:
            whole = nn.Linear(
                self.in_features,
                self.out_features,
                bias=self.bias is not None,
                device=self.weight.device,
                dtype=self.weight.dtype,
            )
        self._take(whole)

    @classmethod
    def from_linear(
        cls, layer: nn.Linear, mode: str = "column", *, group: Any = None, **more: Any
    ) -> TensorParallelLinear:
        """Creates the parallel form of a layer: rank 0's weights are distributed over the ranks. All ranks call it."""
        made = cls(
            layer.in_features,
            layer.out_features,
            dist.get_world_size(group) if dist.is_initialized() else 1,
            mode,
            layer.bias is not None,
            group=group,
            device=layer.weight.device,
            dtype=layer.weight.dtype,
            **more,
        )
        made._take(layer)
        return made

    def _take(self, whole: nn.Linear | None) -> None:
        """Fills this rank's parameters with its part of the layer ``whole``, which rank 0 passes.

        The others pass None.
        """
        with torch.no_grad():
            self._copy(whole)

    def _copy(self, whole: nn.Linear | None) -> None:
        if self.world_size == 1:
            assert whole is not None
            self.weight.copy_(whole.weight)
            if self.bias is not None:
                self.bias.copy_(whole.bias)
            return
        self._scatter(self.weight, whole and whole.weight, dim=0 if self.mode == "column" else 1)
        if self.bias is None:
            return
        if self.mode == "column":
            self._scatter(self.bias, whole and whole.bias, dim=0)
        else:
            if whole is not None:
                self.bias.copy_(whole.bias)
            dist.broadcast(self.bias.data, group_src=0, group=self.group)

    def _scatter(self, part: torch.Tensor, whole: torch.Tensor | None, dim: int) -> None:
        root = dist.get_rank(self.group) == 0
        parts = (
            [each.contiguous() for each in whole.chunk(self.world_size, dim)] if root and whole is not None else None
        )
        dist.scatter(part.data, parts, group_src=0, group=self.group)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the layer's outputs, equal to those of the whole layer up to the order of additions."""
        if self.world_size == 1:
            return functional.linear(input, self.weight, self.bias)
        if self.mode == "column":
            own = functional.linear(autograd.copy_to_all(input, self.group), self.weight, self.bias)
            return autograd.gather_from_all(own, self.group) if self.gather_output else own
        part = input if self.input_is_split else autograd.slice_of_all(input, self.group)
        total = autograd.reduce_from_all(functional.linear(part, self.weight), self.group)
        return total if self.bias is None else total + self.bias

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, {self.mode} of {self.world_size}, bias={self.bias is not None}"
        )
