"""The logger ``sagellm``, and the level of the core's log lines.

Without the variable ``SAGELLM_LOG`` the levels of Python's logging apply; these are warnings and errors unless the
program configured something else. With the variable, its level applies, and a program that has not configured logging
gets the lines on stderr.
"""

from __future__ import annotations

import logging
import os
from types import ModuleType

NAME = "sagellm"
VARIABLE = "SAGELLM_LOG"
TRACE = 5
#: For each value of ``SAGELLM_LOG``: the level of Python's logging, and the level of the core.
LEVELS = {
    "off": (logging.CRITICAL + 1, 0),
    "error": (logging.ERROR, 1),
    "warn": (logging.WARNING, 2),
    "info": (logging.INFO, 3),
    "debug": (logging.DEBUG, 4),
    "trace": (TRACE, 5),
}

logger = logging.getLogger(NAME)
_handler: logging.Handler | None = None


def core_level(python_level: int) -> int:
    """The core's level that drops the same lines as Python's logging."""
    for level, core in sorted(LEVELS.values()):
        if python_level <= level:
            return core
    return 0


def configure(extension: ModuleType) -> None:
    """Reads ``SAGELLM_LOG`` and sets the core's level.

    Called when a group is created, so changes of logging apply from the next group on.
    """
    text = os.environ.get(VARIABLE, "").strip().lower()
    text = {"warning": "warn", "none": "off"}.get(text, text)
    if text in LEVELS:
        level, core = LEVELS[text]
        _show(level)
        extension.set_log_level(core)
        return
    extension.set_log_level(core_level(logger.getEffectiveLevel()))
    if text:
        logger.warning("%s=%s is not a level; the levels are %s", VARIABLE, text, ", ".join(LEVELS))


def _show(level: int) -> None:
    """Sets our level; adds a handler for stderr if the program has no handler."""
    global _handler
    logging.addLevelName(TRACE, "TRACE")
    logger.setLevel(level)
    if _handler is None and not logger.hasHandlers():
        _handler = logging.StreamHandler()
        rank = os.environ.get("RANK")
        who = f"{NAME} rank {rank}" if rank else NAME
        _handler.setFormatter(logging.Formatter(f"[{who}] %(levelname)s %(message)s"))
        logger.addHandler(_handler)
