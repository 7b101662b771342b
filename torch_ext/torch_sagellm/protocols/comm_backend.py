"""The operations of a communication backend by name, and the abstract class that backends implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class CommOp(str, Enum):
    """The operations; each member is also the string that statistics and ``explain`` use, such as ``"all_reduce"``.

    Example::

        found = torch_sagellm.explain(torch_sagellm.CommOp.ALL_GATHER, 1 << 20)
        assert found.op == torch_sagellm.CommOp.ALL_GATHER == "all_gather"
    """

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"

    def __str__(self) -> str:
        return str(self.value)


class CommBackendProtocol(ABC):
    """The methods that every communication backend has.

    The backends of this package implement it (``torch_sagellm.create_comm_backend`` creates them), and other backends
    may do so. A program that uses only these five methods runs with any such backend. A subclass that lacks one cannot
    be instantiated (TypeError).

    Example::

        class Recording(torch_sagellm.CommBackendProtocol):
            ...  # the five methods, which record their calls
    """

    @abstractmethod
    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", async_op: bool = False
    ) -> torch.Tensor | torch.futures.Future[torch.Tensor]:
        """Combines ``tensor`` element by element over all ranks, in place, and returns it.

        With ``async_op`` it returns a ``torch.futures.Future`` whose ``wait()`` returns the tensor.
        """

    @abstractmethod
    def fused_all_reduce(self, tensors: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
        """``all_reduce`` of each tensor of a list, in place and in one call; returns the tensors."""

    @abstractmethod
    def all_gather(
        self, tensor: torch.Tensor, output: torch.Tensor | None = None, async_op: bool = False
    ) -> torch.Tensor | torch.futures.Future[torch.Tensor]:
        """Returns the tensors of all ranks, in rank order, concatenated along dimension 0."""

    @abstractmethod
    def reduce_scatter(
        self, tensor: torch.Tensor, op: str = "sum", async_op: bool = False
    ) -> torch.Tensor | torch.futures.Future[torch.Tensor]:
        """Combines ``tensor`` over all ranks and returns this rank's slice along dimension 0."""

    @abstractmethod
    def get_stats(self) -> Mapping[str, Any]:
        """Returns the statistics of the backend."""


def __getattr__(name: str) -> Any:
    """Older code imports other public names from this module too."""
    import torch_sagellm

    return torch_sagellm._public(__name__, name)
