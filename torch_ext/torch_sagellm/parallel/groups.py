"""The groups of a job that splits its work in several dimensions."""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torch_sagellm.api.arguments import checked_number

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The dimensions, ordered by the difference between the ranks of two neighbours: largest in the first dimension, 1 in
#: the last.
DIMENSIONS = ("dp", "pp", "cp", "tp")
#: The groups that every rank is in.
GROUPS = ("tp", "cp", "pp", "dp", "cp_dp", "pp_dp", "ep")


class ProcessGroupManager:
    """This rank's groups for tensor (tp), context (cp), pipeline (pp), data (dp) and expert (ep) parallelism.

    The ranks of the default group form a grid. The index along tp changes fastest from rank to rank, then cp, pp and
    dp, so that the ranks of a tensor-parallel group are neighbours. Each group has the ranks that differ only in the
    named dimensions. It is a new group, even if it has all ranks. Experts are distributed over ranks that hold the same
    part of the rest of the model: ep groups are runs of ``ep_size`` ranks of a cp-and-dp group.

    All ranks create the manager at the same point of the program.

    Args:
        tp_size, cp_size, pp_size, dp_size: their product is the number of ranks (ValueError).
        ep_size: divides ``cp_size * dp_size`` (ValueError).
        backend: backend of the new groups; None means the default group's.
        timeout: timeout of the new groups, as a timedelta; None means the default.

    Example::

        groups = torch_sagellm.ProcessGroupManager(tp_size=2, dp_size=dist.get_world_size() // 2)
        dist.all_reduce(torch.ones(4), group=groups.tp_group)
        groups.destroy()
    """

    def __init__(
        self,
        tp_size: int = 1,
        cp_size: int = 1,
        pp_size: int = 1,
        dp_size: int = 1,
        ep_size: int = 1,
        *,
        backend: str | None = None,
        timeout: Any = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "sagellm ProcessGroupManager: there is no default process group; call init_process_group first"
            )
        self.tp_size, self.cp_size, self.pp_size, self.dp_size = tp_size, cp_size, pp_size, dp_size
        self.ep_size = ep_size
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._check()
        self.grid = torch.arange(self.world_size).view(dp_size, pp_size, cp_size, tp_size)
        dp, pp, cp, tp = (int(place) for place in (self.grid == self.rank).nonzero()[0])
        #: This rank's index along each dimension.
        self.tp_rank, self.cp_rank, self.pp_rank, self.dp_rank = tp, cp, pp, dp
        self._made: dict[str, dist.ProcessGroup] = {}
        for name in GROUPS:
            self._made[name] = dist.new_group(
                self.ranks(name),
                backend=backend,
                timeout=timeout,
                use_local_synchronization=True,
                group_desc=f"sagellm {name}",
            )

    def _check(self) -> None:
        sizes = {"tp": self.tp_size, "cp": self.cp_size, "pp": self.pp_size, "dp": self.dp_size, "ep": self.ep_size}
        for name, size in sizes.items():
            checked_number("ProcessGroupManager", f"{name}_size", size)
        total = self.tp_size * self.cp_size * self.pp_size * self.dp_size
        if total != self.world_size:
            raise ValueError(
                f"sagellm ProcessGroupManager: tp {self.tp_size} x cp {self.cp_size} x pp {self.pp_size} x dp "
                f"{self.dp_size} = {total}, expected {self.world_size}, the number of ranks"
            )
        if (self.cp_size * self.dp_size) % self.ep_size:
            raise ValueError(
                f"sagellm ProcessGroupManager: ep_size is {self.ep_size}, expected a divisor of cp {self.cp_size} x dp "
                f"{self.dp_size} = {self.cp_size * self.dp_size}"
            )

    def ranks(self, name: str) -> list[int]:
        """The ranks (of the default group, ascending) of this rank's group ``name``: "tp", "cp_dp", "ep" and so on."""
        if name == "ep":
            over = self.ranks("cp_dp")
            first = over.index(self.rank) // self.ep_size * self.ep_size
            return over[first : first + self.ep_size]
        _check_name(name)
        joined = name.split("_")
        own = dict(zip(DIMENSIONS, (self.dp_rank, self.pp_rank, self.cp_rank, self.tp_rank), strict=True))
        places = product(
            *(
                range(size) if each in joined else [own[each]]
                for each, size in zip(DIMENSIONS, self.grid.shape, strict=True)
            )
        )
        return sorted(int(self.grid[place]) for place in places)

    def group(self, name: str) -> dist.ProcessGroup:
        """This rank's group by its name, like ``tp_group`` and the others."""
        _check_name(name)
        return self._made[name]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks that hold parts of the same layers."""
        return self._made["tp"]

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """The ranks that hold parts of the same sequences."""
        return self._made["cp"]

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The stages of one pipeline."""
        return self._made["pp"]

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model for other samples."""
        return self._made["dp"]

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """The ranks that hold the experts of the same layers."""
        return self._made["ep"]

    @property
    def cp_dp_group(self) -> dist.ProcessGroup:
        """The ranks that average the gradients of the same parameters."""
        return self._made["cp_dp"]

    @property
    def pp_dp_group(self) -> dist.ProcessGroup:
        """All stages of all pipelines with this rank's indices along tp and cp."""
        return self._made["pp_dp"]

    @property
    def ep_rank(self) -> int:
        """This rank's index in its ep group."""
        return self.ranks("ep").index(self.rank)

    @property
    def cp_dp_rank(self) -> int:
        """This rank's index in its cp_dp group."""
        return self.ranks("cp_dp").index(self.rank)

    @property
    def cp_dp_size(self) -> int:
        """The number of ranks of a cp_dp group."""
        return self.cp_size * self.dp_size

    @property
    def pp_dp_rank(self) -> int:
        """This rank's index in its pp_dp group."""
        return self.ranks("pp_dp").index(self.rank)

    @property
    def pp_dp_size(self) -> int:
        """The number of ranks of a pp_dp group."""
        return self.pp_size * self.dp_size

    # ------------------------------------------------------------------------------------------- neighbours

    @property
    def pp_is_first_stage(self) -> bool:
        """Whether this rank holds the first layers."""
        return self.pp_rank == 0

    @property
    def pp_is_last_stage(self) -> bool:
        """Whether this rank holds the last layers."""
        return self.pp_rank == self.pp_size - 1

    @property
    def pp_next_rank(self) -> int | None:
        """The rank (of the default group) of the next stage; None at the last stage."""
        return None if self.pp_is_last_stage else self.ranks("pp")[self.pp_rank + 1]

    @property
    def pp_prev_rank(self) -> int | None:
        """The rank of the previous stage; None at the first stage."""
        return None if self.pp_is_first_stage else self.ranks("pp")[self.pp_rank - 1]

    @property
    def cp_next_rank(self) -> int:
        """The rank to which this rank sends in the ring of its cp group; itself if the group has one rank."""
        return self.ranks("cp")[(self.cp_rank + 1) % self.cp_size]

    @property
    def cp_prev_rank(self) -> int:
        """The rank from which this rank receives in the ring of its cp group."""
        return self.ranks("cp")[(self.cp_rank - 1) % self.cp_size]

    # Names of another framework's manager, for compatibility.

    @property
    def tp_world_size(self) -> int:
        """Alias of ``tp_size``."""
        return self.tp_size

    @property
    def cp_world_size(self) -> int:
        """Alias of ``cp_size``."""
        return self.cp_size

    @property
    def pp_world_size(self) -> int:
        """Alias of ``pp_size``."""
        return self.pp_size

    @property
    def dp_world_size(self) -> int:
        """Alias of ``dp_size``."""
        return self.dp_size

    @property
    def cp_dp_world_size(self) -> int:
        """Alias of ``cp_dp_size``."""
        return self.cp_dp_size

    @property
    def cp_send_rank(self) -> int:
        """Alias of ``cp_next_rank``."""
        return self.cp_next_rank

    @property
    def cp_recv_rank(self) -> int:
        """Alias of ``cp_prev_rank``."""
        return self.cp_prev_rank

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The same groups as a ``torch.distributed.device_mesh.DeviceMesh`` with the dimensions dp, pp, cp and tp.

        It has no dimension ep, because ep groups are parts of the cp and dp dimensions.
        """
        from torch.distributed.device_mesh import DeviceMesh

        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return DeviceMesh.from_group(
            [self._made[name] for name in DIMENSIONS],
            "cpu" if accelerator is None else accelerator.type,
            mesh=self.grid,
            mesh_dim_names=DIMENSIONS,
        )

    def destroy(self) -> None:
        """Destroys the groups; all ranks call it."""
        for group in self._made.values():
            dist.destroy_process_group(group)
        self._made = {}

    def __repr__(self) -> str:
        return (
            f"<ProcessGroupManager rank {self.rank} of {self.world_size}: tp {self.tp_rank}/{self.tp_size}, cp "
            f"{self.cp_rank}/{self.cp_size}, pp {self.pp_rank}/{self.pp_size}, dp {self.dp_rank}/{self.dp_size}, ep "
            f"{self.ep_rank}/{self.ep_size}>"
        )


def _check_name(name: str) -> None:
    if name not in GROUPS:
        raise ValueError(f"sagellm ProcessGroupManager: {name!r} is no group, expected one of {', '.join(GROUPS)}")
