"""Selects the process group of a backend: the running group, a new group over the same ranks, or a newly started
group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_sagellm._private import groups, load
from torch_sagellm.api.arguments import Seconds, as_timedelta, checked_number, soft_seconds
from torch_sagellm.observe import log
from torch_sagellm.topology import TopologyInfo, TopologyManager, option_of

#: The variables of torchrun's environment that ``init_process_group`` needs.
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Pauses in seconds between attempts to create a group: the first one, doubled after each attempt up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class GroupSettings:
    """The arguments of a backend about its group. Equal arguments, in whatever form they are given, are equal here."""

    #: The option ``vendor`` of the group; None if any value is accepted.
    vendor: str | None
    rank: int | None
    world_size: int | None
    group: Any
    algorithm: str
    topology: str
    fusion: bool
    timeout: timedelta | None
    soft_timeout: float | None
    #: Does not count in comparisons, because it has no effect on a group that exists.
    retry: int = field(compare=False)

    @classmethod
    def of(
        cls,
        who: str,
        vendor: str | None,
        *,
        rank: int | None,
        world_size: int | None,
        group: Any,
        algorithm: str,
        topology_manager: TopologyManager | TopologyInfo | None,
        fusion: bool,
        timeout: Seconds | None,
        soft_timeout: Seconds | None,
        retry: int,
    ) -> GroupSettings:
        """Checks and converts the arguments of the call or class ``who``."""
        checked_number(who, "retry", retry, least=0)
        # Without a device the option ``vendor`` has no effect, so a group with any value fits.
        has_device = torch.accelerator.current_accelerator(check_available=True) is not None
        return cls(
            vendor=vendor if has_device else None,
            rank=rank,
            world_size=world_size,
            group=group,
            algorithm=algorithm,
            topology=option_of(topology_manager),
            fusion=fusion,
            timeout=None if timeout is None else as_timedelta(timeout),
            soft_timeout=soft_seconds(soft_timeout),
            retry=retry,
        )

    def in_group(self, group: Any) -> GroupSettings:
        """The same settings for ``group``, or for the default group if ``group`` is None and there is a default
        group."""
        default = dist.group.WORLD if dist.is_initialized() else None
        return replace(self, group=group if group is not None else default)

    def hold_for(self, backend: Any) -> bool:
        """Whether a group has these settings."""
        options = backend.options
        return bool(
            (self.vendor is None or options.vendor.partition(":")[0] in (self.vendor, *self._also()))
            and (not self.algorithm or options.algorithm == self.algorithm)
            and (not self.topology or options.topology == self.topology)
            and options.fusion == self.fusion
            and (self.timeout is None or options._timeout == self.timeout)
            and (self.soft_timeout is None or options.soft_timeout == self.soft_timeout)
        )

    def _also(self) -> tuple[str, ...]:
        # "auto" may select a vendor's library by itself, but never the path through host memory.
        return () if self.vendor == "host" else ("auto",)

    def options(self) -> Any:
        return load.extension().Options(
            fusion=self.fusion,
            algorithm=self.algorithm,
            topology=self.topology,
            soft_timeout=self.soft_timeout,
            **({} if self.vendor is None else {"vendor": self.vendor}),
        )


def group_for(settings: GroupSettings, who: str) -> Any:
    """The process group to work in: the given one, the default one, a new one over its ranks, or a new default one."""
    if settings.group is None and not dist.is_initialized():
        _start(settings, who)
    base = settings.group if settings.group is not None else dist.group.WORLD
    if base is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"sagellm {who}: this process is no member of the group")
    for name, given, found in (
        ("rank", settings.rank, dist.get_rank(base)),
        ("world_size", settings.world_size, dist.get_world_size(base)),
    ):
        if given is not None and given != found:
            raise ValueError(f"sagellm {who}: {name} is {given}, and the process group says {found}")
    ours = groups.backend_of(base)
    if ours is not None and settings.hold_for(ours):
        return base
    why = "is of another backend" if ours is None else "has other settings"
    log.logger.info("%s makes a new group over the same ranks: the running one %s", who, why)
    return _tried(
        settings.retry,
        who,
        lambda: dist.new_group(
            dist.get_process_group_ranks(base),
            timeout=settings.timeout,
            backend="sagellm",
            pg_options=settings.options(),
            use_local_synchronization=True,
        ),
    )


def _tried(retry: int, who: str, make: Callable[[], Result]) -> Result:
    """Creates a group, in several attempts if needed. A retry is safe, because no rank has the group yet."""
    world = dist.distributed_c10d._world
    number = world.group_count
    for attempt in range(retry):
        try:
            return make()
        except RuntimeError as error:  # from torch's store or from the rendezvous; wrong arguments are ValueErrors
            pause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE)
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            log.logger.warning(
                "%s: making the group failed (%s); attempt %d of %d follows in %g s",
                who,
                text,
                attempt + 2,
                retry + 1,
                pause,
            )
        # torch names groups by a count. A failed attempt has incremented it, so the ranks would look for different
        # names.
        world.group_count = number
        time.sleep(pause)
    return make()


def _start(settings: GroupSettings, who: str) -> None:
    """Starts the default group: from torchrun's environment, or with this process as its only rank."""
    rank, world_size = settings.rank, settings.world_size
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    common = {"timeout": settings.timeout, "pg_options": settings.options()}
    if not missing:

        def start() -> None:
            dist.init_process_group(
                "sagellm",
                rank=-1 if rank is None else rank,
                world_size=-1 if world_size is None else world_size,
                **common,
            )

        _tried(settings.retry, who, start)
        return
    if (world_size or 1) > 1 or (rank or 0) > 0:
        raise RuntimeError(
            f"sagellm {who}: rank {rank} of {world_size} cannot meet the others, because there is no process group and "
            f"{', '.join(missing)} is not in the environment. Start the program with torchrun, or call "
            "init_process_group first"
        )
    dist.init_process_group("sagellm", store=dist.HashStore(), rank=0, world_size=1, **common)


def is_alive(group: Any) -> bool:
    """Whether the group still exists, that is, has not been destroyed."""
    try:
        dist.get_world_size(group)
    except (RuntimeError, ValueError):
        return False
    return bool(dist.is_initialized())
