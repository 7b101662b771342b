"""Serves the name "gloo" with this package, for programs that insist on it. All patches of torch for this are here.

torch 2.15 keeps the creators of its own backends in ``Backend._plugins``. torch 2.11 to 2.13 call the class
``ProcessGroupGloo`` of ``torch.distributed.distributed_c10d``, and check that the result is an instance of that class.
The creator and the class are replaced if they exist, and so is the class's name in ``torch.distributed``.
``isinstance`` treats our groups as instances of that class, and ``create_device`` continues to work. Delegates use
torch's own gloo (``delegate``), which is read from torch's extension module and never patched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import _torch_sagellm_autoload

#: If this variable is "gloo", `_torch_sagellm_autoload` calls ``serve_as("gloo")`` as soon as torch is imported.
VARIABLE = _torch_sagellm_autoload.AS
NAMES = _torch_sagellm_autoload.SERVED
CLASS = "ProcessGroupGloo"
#: For each replaced attribute or table entry of torch: its holder, its name and the original value; empty if nothing is
#: replaced.
_replaced: list[tuple[Any, str, Any]] = []
#: Acquired once and never released: the log says once per process that sagellm serves the name.
_told = threading.Lock()


@dataclass(frozen=True)
class _Facts:
    """The facts that a group's creator reads, for a group that is created by calling the class."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str = ""
    global_ranks_in_group: tuple[int, ...] = ()


def serve_as(name: str = "gloo") -> None:
    """Makes every group that this process creates under the name "gloo" from now on a group of this package.

    This applies to ``init_process_group``, ``new_group``, ``DeviceMesh``, "cpu:gloo,cuda:nccl" and calls of the class
    ``ProcessGroupGloo``. ``get_backend()`` still returns "gloo", so that programs' own checks pass. The log says once
    that sagellm serves these groups, and ``describe()`` of each backend says so, too. All ranks of a group must do the
    same. Existing groups do not change, and groups with ``enable_reconfigure`` remain torch's own. A second call does
    nothing. ``SAGELLM_AS=gloo`` in the environment has the same effect.

    It raises a ValueError for any other name, and a RuntimeError if this torch creates its groups in an unknown way.

    Example::

        torch_sagellm.serve_as("gloo")  # before the program makes its groups
        assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"  # served by this package
    """
    if name not in NAMES:
        raise ValueError(f"sagellm serve_as: {name!r} cannot be served, expected one of {', '.join(NAMES)}")
    import torch
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    if _replaced:
        return
    if not distributed.is_gloo_available():
        raise RuntimeError("sagellm serve_as: this torch was built without gloo, whose name is to be served")
    plugins = getattr(c10d.Backend, "_plugins", {})
    kept = hasattr(c10d.Backend, "_ensure_backend_registered")
    if kept:
        c10d.Backend._ensure_backend_registered(name)  # otherwise torch would later replace our creator by its own
    if (kept and name.upper() not in plugins) or not hasattr(c10d, CLASS):
        raise RuntimeError(
            f"sagellm serve_as: torch {torch.__version__} has no {CLASS} in torch.distributed.distributed_c10d, or no "
            f'creator of {name!r} in Backend._plugins, which would be replaced; ask for the backend "sagellm" instead'
        )
    served = _class()
    for module in (c10d, distributed):
        if hasattr(module, CLASS):
            _replace(module, CLASS, served)
    if name.upper() in plugins:
        _replaced.append((plugins, name.upper(), plugins[name.upper()]))
        plugins[name.upper()] = c10d.Backend._BackendPlugin(_create, True)


def serves() -> bool:
    """Whether groups called "gloo" are created by this package."""
    return bool(_replaced)


def stop() -> None:
    """Restores torch's own attributes; existing groups do not change."""
    while _replaced:
        holder, name, before = _replaced.pop()
        if isinstance(holder, dict):
            holder[name] = before
        else:
            setattr(holder, name, before)


@contextmanager
def serving(name: str = "gloo") -> Iterator[None]:
    """Applies ``serve_as`` during a ``with`` block."""
    serve_as(name)
    try:
        yield
    finally:
        stop()


def _replace(holder: Any, name: str, value: Any) -> None:
    _replaced.append((holder, name, getattr(holder, name)))
    setattr(holder, name, value)


def real() -> Any:
    """torch's own class, even while its name is served by this package."""
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, CLASS)


def _create(options: Any, pg_options: Any = None) -> Any:
    """Creates the backend of a group that is requested as "gloo"; torch calls it."""
    from torch_sagellm._private import load, register
    from torch_sagellm.observe import log

    if getattr(options, "enable_reconfigure", False):
        log.logger.info("group %s is torch's gloo, because it is asked for with enable_reconfigure", options.group_id)
        theirs = next(before for holder, _, before in _replaced if isinstance(holder, dict))
        return theirs.creator_fn(options, pg_options)
    extension = load.extension()
    log.configure(extension)
    if _told.acquire(blocking=False):
        log.logger.info("groups called 'gloo' are served by sagellm in this process")
    ours = extension.Options
    if pg_options is not None and not isinstance(pg_options, ours):
        log.logger.info(
            "group %s: the devices and threads in the options of gloo are not used, because ranks of one host share "
            "memory, and gloo between hosts takes its interface from GLOO_SOCKET_IFNAME",
            options.group_id,
        )
        pg_options = None
    given = register.inherited(extension, options) if pg_options is None else pg_options.__copy__()
    given._as_gloo = True
    return register.create(options, given)


def _class() -> Any:
    """Returns a subclass of torch's class; calling the subclass creates a group of ours."""
    base = real()
    base_options = base._Options

    class Meta(type(base)):  # type: ignore[misc]  # torch's class has no annotations
        def __instancecheck__(cls, instance: Any) -> bool:
            from torch_sagellm._private import load

            ours = load.extension().SageBackend
            return isinstance(instance, base) or (isinstance(instance, ours) and instance.options._as_gloo)

    class OptionsMeta(type(base_options)):  # type: ignore[misc]  # the same
        def __instancecheck__(cls, instance: Any) -> bool:
            from torch_sagellm._private import load

            ours = load.extension().Options
            return isinstance(instance, base_options) or (isinstance(instance, ours) and instance._as_gloo)

    class Options(base_options, metaclass=OptionsMeta):  # type: ignore[misc, valid-type]  # the same
        """torch's options; ``isinstance`` also accepts the options of our groups that were requested as gloo."""

    class ProcessGroupGloo(base, metaclass=Meta):  # type: ignore[misc, valid-type]  # torch's class has no annotations
        """torch's class, whose instances include our groups: see ``torch_sagellm.serve_as``."""

        def __new__(
            cls, store: Any, rank: int, size: int, timeout: Any = None, enable_reconfigure: bool = False, **more: Any
        ) -> Any:
            given = more.pop("options", None)
            if timeout is not None and not isinstance(timeout, timedelta):
                given, timeout = timeout, None  # the older signature with an options object
            if given is not None:
                timeout = given._timeout
            if enable_reconfigure:
                return base(store, rank, size, timeout=timeout, enable_reconfigure=True)
            if timeout is None:
                from torch.distributed.constants import default_pg_timeout

                timeout = default_pg_timeout
            return _create(_Facts(store, rank, size, timeout), given)

    ProcessGroupGloo._Options = Options
    ProcessGroupGloo.__module__ = base.__module__
    ProcessGroupGloo.__qualname__ = CLASS
    return ProcessGroupGloo
