"""The name "gloo", served by this package, for programs that insist on it. All that is patched in torch is here.

torch 2.15 keeps the creators of its own backends in ``Backend._plugins``; 2.11 to 2.13 call the class
``ProcessGroupGloo`` of ``torch.distributed.distributed_c10d``. Both are replaced where they exist, and so is the name
in ``torch.distributed``. ``isinstance`` and ``create_device`` of the class go on working. The link between hosts and
delegates use torch's own gloo (``_delegate``), which is taken from torch's extension module and never patched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

#: Set to "gloo", it does what ``serve_as("gloo")`` does, as soon as torch is imported.
VARIABLE = "SAGELLM_AS"
NAMES = ("gloo",)
CLASS = "ProcessGroupGloo"
#: Attributes of torch that were replaced, with what stood there; empty while nothing is.
_replaced: list[tuple[Any, str, Any]] = []


@dataclass(frozen=True)
class _Facts:
    """What the creator of a group reads, for a group that is made by calling the class."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str = ""
    global_ranks_in_group: tuple[int, ...] = ()


def serve_as(name: str = "gloo") -> None:
    """Makes every group that this process asks for under the name "gloo" from now on a group of this package.

    That holds for ``init_process_group``, ``new_group``, ``DeviceMesh``, "cpu:gloo,cuda:nccl" and calls of the class
    ``ProcessGroupGloo``. ``get_backend()`` goes on saying "gloo", so that programs' own checks hold; the log says once
    who really serves, and ``describe()`` of the backend each time. All ranks of a group must do the same. Groups that
    exist stay what they are. A second call does nothing. ``SAGELLM_AS=gloo`` in the environment does the same.

    A ValueError for another name.
    """
    if name not in NAMES:
        raise ValueError(f"sagellm serve_as: {name!r} cannot be served, expected one of {', '.join(NAMES)}")
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    if _replaced:
        return
    if not distributed.is_gloo_available():
        raise RuntimeError("sagellm serve_as: this torch was built without gloo, whose name is to be served")
    served = _class()
    for module in (c10d, distributed):
        if hasattr(module, CLASS):
            _replace(module, CLASS, served)
    plugins = getattr(c10d.Backend, "_plugins", {})
    if hasattr(c10d.Backend, "_ensure_backend_registered"):
        c10d.Backend._ensure_backend_registered(name)  # else torch would put its own in our place later
    if name.upper() in plugins:
        _replaced.append((plugins, name.upper(), plugins[name.upper()]))
        plugins[name.upper()] = c10d.Backend._BackendPlugin(_create, True)
    _tell()


def serves() -> bool:
    """Whether groups called "gloo" are made by this package."""
    return bool(_replaced)


def stop() -> None:
    """Gives the name back to torch; groups that exist stay what they are."""
    while _replaced:
        holder, name, before = _replaced.pop()
        if isinstance(holder, dict):
            holder[name] = before
        else:
            setattr(holder, name, before)


@contextmanager
def serving(name: str = "gloo") -> Iterator[None]:
    """``serve_as`` while a block runs."""
    serve_as(name)
    try:
        yield
    finally:
        stop()


def from_environment() -> None:
    """Does what ``SAGELLM_AS`` says, if it is set."""
    name = os.environ.get(VARIABLE, "").strip().lower()
    if name:
        if name not in NAMES:
            raise ValueError(f"sagellm: {VARIABLE}={name!r}, expected one of {', '.join(NAMES)}, or unset")
        serve_as(name)


def _replace(holder: Any, name: str, value: Any) -> None:
    _replaced.append((holder, name, getattr(holder, name)))
    setattr(holder, name, value)


def _tell() -> None:
    from sagellm.observe import log

    log.logger.info("groups called 'gloo' are served by sagellm from now on in this process")


def real() -> Any:
    """torch's own class, also while its name is served here."""
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, CLASS)


def _create(options: Any, pg_options: Any = None) -> Any:
    """Makes the backend of a group that is asked for as "gloo"; torch calls it."""
    from sagellm import _load, _register
    from sagellm.observe import log

    if getattr(options, "enable_reconfigure", False):
        log.logger.info("group %s is torch's gloo, because it is asked for with enable_reconfigure", options.group_id)
        theirs = next(before for holder, _, before in _replaced if isinstance(holder, dict))
        return theirs.creator_fn(options, pg_options)
    ours = _load.extension().Options
    if pg_options is not None and not isinstance(pg_options, ours):
        # Devices and threads of gloo: there is nothing here that they could set.
        log.logger.debug("group %s: options of gloo are not used", options.group_id)
        pg_options = None
    return _register.create(options, pg_options)


def _class() -> Any:
    """A subclass of torch's class; calling it makes a group of ours."""
    base = real()

    class ProcessGroupGloo(base):  # type: ignore[misc, valid-type]  # torch's class has no annotations
        """torch's class with our groups: see ``sagellm.serve_as``."""

        def __new__(
            cls, store: Any, rank: int, size: int, timeout: Any = None, enable_reconfigure: bool = False, **more: Any
        ) -> Any:
            given = more.pop("options", None)
            if timeout is not None and not isinstance(timeout, timedelta):
                given, timeout = timeout, None  # the form with an options object
            if given is not None:
                timeout = given._timeout
            if enable_reconfigure:
                return base(store, rank, size, timeout=timeout, enable_reconfigure=True)
            if timeout is None:
                from torch.distributed.constants import default_pg_timeout

                timeout = default_pg_timeout
            return _create(_Facts(store, rank, size, timeout))

    ProcessGroupGloo.__module__ = base.__module__
    ProcessGroupGloo.__qualname__ = CLASS
    return ProcessGroupGloo
