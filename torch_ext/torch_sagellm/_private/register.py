"""Creates the backend of a group. torch calls it through `_torch_sagellm_autoload`, which registers the name."""

from __future__ import annotations

import atexit
import os
import site
import threading
from types import ModuleType
from typing import Any, NoReturn

import _torch_sagellm_autoload

NAME = "sagellm"
#: This switch lets peers reach all CPU tensors of 16 KiB or more that torch allocates after the first group.
SHARED = "SAGELLM_SHARED_TENSORS"
#: The folder for the status file of this process, for `torch-sagellm health` and `torch-sagellm top`.
STATUS = "SAGELLM_STATUS_DIR"
#: Each lock is acquired once and never released, because it guards an action that happens once per process.
_at_exit = threading.Lock()
_told = threading.Lock()


def create(options: Any, pg_options: Any = None) -> Any:
    """Creates the backend of one group, after a rendezvous with its other ranks. torch calls it.

    ``options`` is the struct in which torch describes the group. The fields ``process_group`` and ``split_from`` are
    not read, because torch 2.11 does not have them. ``pg_options`` are the user's options, if any: ours, or the plain
    options of torch.
    """
    # `_torch_sagellm_autoload` uses `regions` for torch's coalescing manager once `regions` is imported.
    from torch_sagellm._private import load, regions, variables  # noqa: F401
    from torch_sagellm.observe import log

    if getattr(options, "enable_reconfigure", False):
        raise NotImplementedError(
            f"sagellm: group {options.group_id!r} has enable_reconfigure=True, which sagellm does not "
            "offer. Leave it out, and after a failure make a new group of the ranks that are left"
        )
    extension = load.extension()
    log.configure(extension)
    variables.check()
    variables.link(os.environ)  # every group refuses a wrong value, also one that needs no link
    if variables.SWITCH.get(os.environ.get(SHARED, "").strip().lower(), False):
        extension._share_allocations(True)
    if os.environ.get(log.VARIABLE):
        _log_versions(extension)
    if os.environ.get(STATUS):
        from torch_sagellm.observe import status

        status.start()
    ours = _settings(extension, inherited(extension, options) if pg_options is None else pg_options)
    ours._library_folders = site.getsitepackages()
    _step_at_exit(extension)
    _detach_flight_recorder()
    return _meet(extension, options, ours)


def part(ours: Any, store: Any, rank: int, size: int) -> Any:
    """Creates the backend of a group of some ranks of another group, in a split or a shrink. C++ calls it."""
    from torch_sagellm._private import delegate as _delegate
    from torch_sagellm._private import load
    from torch_sagellm._private import options as _options

    _options.check(ours)  # the caller of split_group or shrink_group may pass options
    ranks = list(ours.global_ranks_in_group)
    facts = _delegate.Facts(store, rank, size, ours._timeout, ours.group_name, ranks)
    return _meet(load.extension(), facts, ours, is_part=True)


def _meet(extension: ModuleType, options: Any, ours: Any, is_part: bool = False) -> Any:
    """Meets the other ranks, then builds the backend with what they decided on: a link, a delegate or neither."""
    from torch_sagellm._private import address, alive, variables
    from torch_sagellm._private import delegate as _delegate

    ours._forked = os.getpid() != _torch_sagellm_autoload.PROCESS
    addresses = address.find(options.store)
    ours._addresses = addresses.text()
    decided = extension.rendezvous(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        group_name=options.group_id or "",
        global_ranks=list(options.global_ranks_in_group or []),
        options=ours,
    )
    if not decided.delegate_reason and not decided.spans_hosts:
        return decided.build()
    if is_part and ours.delegate == "mpi":
        _refuse_mpi(options.group_id, decided.delegate_reason)
    if decided.delegate_reason:
        _tell_delegate(ours.delegate, decided.delegate_reason, options)
    chosen = addresses.chosen(decided.network)
    alive.announce(options.store, options.group_rank, chosen, agreed=bool(decided.network))
    links = max(ours.links, len(chosen) if os.environ.get(address.OURS, "").strip() else 1)
    link = variables.link(os.environ)
    if names := address.interfaces(address.OURS):
        link += ":" + ",".join(names)  # the interfaces that UCX uses
    return decided.build(*_delegate.make(ours.delegate, options, decided, chosen, links, link))


def _refuse_mpi(group: str, reason: str) -> NoReturn:
    import torch.distributed as dist

    raise dist.DistBackendError(
        f"sagellm: MPI would have to serve group '{group}' ({reason}), and all ranks of the job have to make one; "
        "use torch.distributed.new_group"
    )


def inherited(extension: ModuleType, options: Any) -> Any:
    """The options of a group for which none were passed, as in ``new_group(ranks)`` or a ``DeviceMesh``.

    They are copied from a group of ours that contains all ranks of the new group, so that each of these ranks finds the
    same group. The default group is tried first, then the others in the order of their creation. If no group fits, the
    defaults are used.
    """
    from torch.distributed import distributed_c10d as c10d

    from torch_sagellm._private import groups as _groups

    ranks = set(options.global_ranks_in_group or [])
    groups = list(c10d._world.pg_map)
    default = c10d.GroupMember.WORLD
    if default in groups:
        groups.insert(0, groups.pop(groups.index(default)))
    for group in groups:
        members = c10d._world.pg_group_ranks.get(group)
        if not ranks or members is None or not ranks <= set(members):
            continue
        for backend in _groups.backends_of(group):
            found = backend.options.__copy__()
            found._as_gloo, found._attempt = False, ""
            return found
    return extension.Options()


def _settings(extension: ModuleType, given: Any) -> Any:
    """A copy of the user's options, or the defaults, with the values that environment variables override."""
    from torch_sagellm._private import options as _options

    ours = given.__copy__() if isinstance(given, extension.Options) else extension.Options()
    for option, value in _options.overridden(os.environ).items():
        setattr(ours, option, value)
    _options.check(ours)
    return ours


def _detach_flight_recorder() -> None:
    """Disables torch's generic flight recorder, unless the user enabled it by ``TORCH_FR_BUFFER_SIZE``.

    The recorder costs 1.5 us per synchronous call. When a group fails, the recorder writes its trace on a thread that
    needs the interpreter; if the program exits meanwhile, that thread aborts the process. torch (from 2.15 on) attaches
    the recorder right after ``create`` has returned, to every backend that is not in the set
    ``_FR_SELF_RECORDING_BACKENDS``.
    """
    from torch.distributed import distributed_c10d as c10d

    size = os.environ.get("TORCH_FR_BUFFER_SIZE") or os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or "0"
    backends = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(backends, set):
        if size.isdigit() and int(size) > 0:
            backends.discard(NAME)
        else:
            backends.add(NAME)
    if not (size.isdigit() and int(size) > 0):
        from torch_sagellm.observe import recorder

        recorder.install()


def _step_at_exit(extension: ModuleType) -> None:
    """Registers, once per process, the function that ends the core's threads before the interpreter exits."""
    if _at_exit.acquire(blocking=False):
        atexit.register(extension.at_exit)


def _tell_delegate(delegate: str, reason: str, options: Any) -> None:
    """Logs that a group is delegated: at level warning for the first such group of which this process is rank 0, else
    at level info."""
    import logging

    from torch_sagellm.observe import log

    first = options.group_rank == 0 and _told.acquire(blocking=False)
    log.logger.log(
        logging.WARNING if first else logging.INFO,
        "group %s of %d ranks is served by torch's %s instead of shared memory: %s",
        options.group_id,
        options.group_size,
        delegate,
        reason,
    )


def _log_versions(extension: ModuleType) -> None:
    import torch

    from torch_sagellm._private import load
    from torch_sagellm.observe import log

    where = getattr(extension, "__file__", "unknown")
    log.logger.debug("version %s under torch %s, extension %s", load.version(), torch.__version__, where)
