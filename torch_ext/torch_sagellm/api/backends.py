"""Communication backends as objects, for serving engines and training frameworks, without c10d's argument forms.

Each is a thin layer over one process group of this package (``group_choice`` finds or creates the group,
``comm_backend`` has the methods). ``create_comm_backend`` returns the backend of a type.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from torch_sagellm._private import nearest
from torch_sagellm.api.arguments import (
    OpOrOperator,
    Seconds,
    operator_or_op,
)
from torch_sagellm.api.comm_backend import CommBackend, named_vendor
from torch_sagellm.api.group_choice import GroupSettings, is_alive
from torch_sagellm.observe import log
from torch_sagellm.topology import TopologyInfo, TopologyManager


class CPUBackend(CommBackend):
    """CPU tensors through shared memory on one host, and over a link between hosts.

    Example::

        torch_sagellm.CPUBackend(dist.get_rank(), dist.get_world_size()).all_reduce(torch.ones(4))
    """

    backend_type = "cpu"


class NCCLBackend(CommBackend):
    """Tensors on NVIDIA GPUs through NCCL; CPU tensors as in ``CPUBackend``.

    Raises:
        RuntimeError: this process has no device of type cuda. ``SAGELLM_VENDOR=nccl`` lets a device of another
            type count as one.

    Example::

        comm = torch_sagellm.NCCLBackend(dist.get_rank(), dist.get_world_size())
        comm.all_reduce(torch.ones(4, device="cuda"))
    """

    backend_type = "nccl"
    vendor = "nccl"
    device_type = "cuda"


class HCCLBackend(CommBackend):
    """Tensors on Ascend NPUs through HCCL; CPU tensors as in ``CPUBackend``.

    Raises:
        RuntimeError: this process has no device of type npu. ``SAGELLM_VENDOR=hccl`` lets a device of another
            type count as one.

    Example::

        comm = torch_sagellm.HCCLBackend(dist.get_rank(), dist.get_world_size())
        comm.all_reduce(torch.ones(4, device="npu"))
    """

    backend_type = "hccl"
    vendor = "hccl"
    device_type = "npu"


class CNCLBackend(CommBackend):
    """Tensors on Cambricon MLUs through CNCL; CPU tensors as in ``CPUBackend``.

    Raises:
        RuntimeError: this process has no device of type mlu. ``SAGELLM_VENDOR=cncl`` lets a device of another
            type count as one.

    Example::

        comm = torch_sagellm.CNCLBackend(dist.get_rank(), dist.get_world_size())
        comm.all_reduce(torch.ones(4, device="mlu"))
    """

    backend_type = "cncl"
    vendor = "cncl"
    device_type = "mlu"


class GlooBackend(CommBackend):
    """CPU tensors as in ``CPUBackend``; tensors on a device through host memory, without the library of its vendor.

    Example::

        torch_sagellm.GlooBackend(dist.get_rank(), dist.get_world_size()).all_reduce(torch.ones(4))
    """

    backend_type = "gloo"
    vendor = "host"


BACKENDS: dict[str, type[CommBackend]] = {
    each.backend_type: each for each in (CPUBackend, NCCLBackend, HCCLBackend, CNCLBackend, GlooBackend)
}
#: The type of backend for each type of device.
BY_DEVICE = {each.device_type: each.backend_type for each in BACKENDS.values() if each.device_type is not None}
#: The backends that ``create_comm_backend`` has created, by the type that was asked for, the type that was chosen, and
#: the settings.
_made: dict[tuple[str, str, GroupSettings], CommBackend] = {}


def create_comm_backend(
    backend_type: str = "auto",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "",
    topology_manager: TopologyManager | TopologyInfo | None = None,
    fusion: bool = True,
    timeout: Seconds | None = None,
    soft_timeout: Seconds | None = None,
    retry: int = 0,
) -> CommBackend:
    """Returns a communication backend over the ranks of this job.

    It uses the running process group (or ``group``). If that group is of a different backend or has different settings,
    it creates a further group over the same ranks. If no group is running, it starts one from the environment that
    torchrun sets. Without that environment it starts a group of one rank. Equal arguments return the same object, as
    long as its group exists.

    Args:
        backend_type: "auto" (the library of this process's accelerator, or "cpu" if there is none; the backend's
            ``reason``, its ``repr`` and the log say what was found), "cpu", "nccl", "hccl", "cncl", or "gloo" (tensors
            on devices through host memory).
        rank, world_size, group, algorithm, topology_manager, fusion, timeout, soft_timeout, retry: see ``CommBackend``.

    Raises:
        ValueError: the name is unknown, or ``rank`` or ``world_size`` differs from the group's.
        RuntimeError: the type needs a device that this process does not have.

    Example::

        comm = torch_sagellm.create_comm_backend()
        total = comm.all_reduce(torch.ones(4))
    """
    asked = str(backend_type).lower()
    chosen, why = _auto() if asked == "auto" else (asked, "")
    if chosen not in BACKENDS:
        near = nearest.meant(asked, ["auto", *BACKENDS])
        raise ValueError(f"sagellm: backend_type={backend_type!r}, expected one of auto, {', '.join(BACKENDS)}{near}")
    settings = GroupSettings.of(
        "create_comm_backend",
        BACKENDS[chosen].vendor,
        rank=rank,
        world_size=world_size,
        group=group,
        algorithm=algorithm,
        topology_manager=topology_manager,
        fusion=fusion,
        timeout=timeout,
        soft_timeout=soft_timeout,
        retry=retry,
    )
    known = _made.get((asked, chosen, settings.in_group(group)))
    if known is not None and is_alive(known.group):
        return known
    made = BACKENDS[chosen]._with(settings)
    if why:
        made.reason = f"auto: {why}"
    for stale in [each for each, backend in _made.items() if not is_alive(backend.group)]:
        del _made[stale]
    # A group that was started here is the default group from now on, so the next call looks it up under that group.
    _made[asked, chosen, settings.in_group(group)] = made
    return made


def safe_all_reduce(
    tensor: torch.Tensor,
    op: OpOrOperator = "sum",
    timeout: Seconds = 30.0,
    backend: CommBackend | None = None,
) -> torch.Tensor:
    """Combines ``tensor`` over all ranks, in place, and returns it; never waits longer than ``timeout``.

    On a device the call returns when it is queued, like every call of torch on a device. If the deadline passes, the
    next call in the group raises the error.

    Args:
        tensor: a tensor of the same shape and dtype on every rank.
        op: "sum", "avg" ("mean"), "max", "min", "prod", or torch's ReduceOp; or an ``AllReduceOperator``, which means
            "sum" over the ranks of its communicator.
        timeout: in seconds, or as timedelta.
        backend: the backend; None means that of ``create_comm_backend()``.

    Raises:
        CommTimeoutError: the deadline has passed; the error names the ranks that are missing.
        ValueError: the op is unknown. Nothing was sent.

    Example::

        torch_sagellm.safe_all_reduce(torch.ones(4), timeout=5)  # four times the number of ranks
    """
    operator, named = operator_or_op("safe_all_reduce", op, backend)
    if operator is not None:
        return operator._safe(tensor, timeout)
    return (create_comm_backend() if backend is None else backend).safe_all_reduce(tensor, named, timeout)


def _auto() -> tuple[str, str]:
    """The type of backend for this process, and the reason."""
    found = torch.accelerator.current_accelerator(check_available=True)
    named = named_vendor()
    if found is None:
        chosen, why = "cpu", "this process has no accelerator"
    elif named in BY_DEVICE.values():
        chosen, why = named, f"SAGELLM_VENDOR names it for devices of type {found.type}"
    elif found.type in BY_DEVICE:
        chosen, why = BY_DEVICE[found.type], f"this process has a device of type {found.type}"
    else:
        chosen, why = "gloo", f"no library is known for devices of type {found.type}: they go through host memory"
    log.logger.info("backend_type 'auto' is %r: %s", chosen, why)
    return chosen, why
