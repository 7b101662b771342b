"""Checks the values of this package's environment variables: when the first group is created, and in ``doctor``.

An invalid value of a variable that overrides an option, or that chooses the link, makes every group fail
(``Rule.is_refused``). An invalid value of another variable has the effect that ``Rule.then`` states, usually the
default's, and each process warns once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

#: Accepted spellings of a switch. The core's own switches accept only "1".
SWITCH = {"0": False, "off": False, "false": False, "no": False, "1": True, "on": True, "true": True, "yes": True}


@dataclass(frozen=True)
class Wrong:
    """A variable whose value does not have the effect that its user wants."""

    what: str
    fix: str
    #: Whether every group is refused because of this value.
    is_refused: bool
    #: Whether the code that reads the variable reports the wrong value itself.
    is_told: bool


def _whole(text: str) -> str | None:
    return None if text.isascii() and text.isdecimal() else "a whole number from 0 on"


def _count(text: str) -> str | None:
    return None if _whole(text) is None and int(text) <= 4096 else "a whole number from 0 (as torch) to 4096"


#: Limit of connections between two processes (`MOST_PATHS` of src/engine/multihost/wire/path.rs).
MOST_LINKS = 16


def _links(text: str) -> str | None:
    is_number = text.isascii() and text.isdecimal()
    return None if is_number and 1 <= int(text) <= MOST_LINKS else f"a whole number from 1 to {MOST_LINKS}"


def _seconds(text: str) -> str | None:
    try:
        return None if 0 <= float(text) < 1e9 else "seconds from 0 on"
    except ValueError:
        return "seconds from 0 on"


def _one(text: str) -> str | None:
    return None if text in ("0", "1") else "1 or 0"


def _switch(text: str) -> str | None:
    return None if text.lower() in SWITCH else "1 or 0 (on or off)"


def words(*known: str) -> Callable[[str], str | None]:
    return lambda text: None if text.lower() in known else f"one of {', '.join(known)}"


def _folder(text: str) -> str | None:
    """Accepts a folder that exists and is writable, or that can be created."""
    path = os.path.abspath(text)
    if os.path.exists(path):
        return None if os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK) else "a folder that can be written"
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return (
        None if os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK) else "a folder that can be made and written"
    )


@dataclass(frozen=True)
class Rule:
    """The valid values of a variable: ``judge`` returns a text with the expected values, or None for a valid value."""

    judge: Callable[[str], str | None]
    #: The effect of any other value.
    then: str
    is_told: bool = False
    #: The option of every group that the variable overrides; "" if it overrides none.
    option: str = ""
    #: Whether every group is refused because of a wrong value.
    is_refused: bool = False


def _refused(judge: Callable[[str], str | None], option: str = "") -> Rule:
    return Rule(judge, "every group is refused", option=option, is_refused=True)


def _overrides(option: str, judge: Callable[[str], str | None]) -> Rule:
    return _refused(judge, option)


#: What carries the bytes between hosts.
LINK = "SAGELLM_LINK"
RULES: dict[str, Rule] = {
    "SAGELLM_BLOCKING_WAIT": _overrides("blocking_wait", _switch),
    "SAGELLM_CACHE_DIR": Rule(_folder, "torch-sagellm tune cannot write its table, and no times of calls are kept"),
    "SAGELLM_CALL_SITES": Rule(_one, "no call records its line"),
    "SAGELLM_DOUBLE_AS_FLOAT": Rule(_one, "float64 is refused as without it"),
    "SAGELLM_DUMP_DIR": Rule(_folder, "a group that fails leaves no record"),
    "SAGELLM_EXPLAIN": Rule(_one, "it counts as 0"),
    "SAGELLM_FUSION": _overrides("fusion", _switch),
    "SAGELLM_KEEP_TIMES": Rule(_switch, "it counts as 1"),
    "SAGELLM_KERNELS": Rule(words("portable", "avx2", "avx512"), "the widest of the processor are used", is_told=True),
    LINK: _refused(words("tcp", "ucx")),
    "SAGELLM_LINKS": _overrides("links", _links),
    "SAGELLM_LOG": Rule(
        words("off", "error", "warn", "warning", "info", "debug", "trace"), "it counts as warn", is_told=True
    ),
    "SAGELLM_MEASURE_LINK": _overrides("measure_link", _switch),
    "SAGELLM_NUMA": _overrides("numa", _switch),
    "SAGELLM_ON_DEVICE_FAILURE": _overrides("on_device_failure", words("raise", "exit", "none")),
    "SAGELLM_RING": Rule(_whole, "a group remembers 1024 operations"),
    "SAGELLM_SHARED_BYTES": Rule(_whole, "half of the free memory is the limit"),
    "SAGELLM_SHARED_TENSORS": Rule(_switch, "it counts as 0"),
    "SAGELLM_SOFT_TIMEOUT": Rule(_seconds, "it counts as 30"),
    "SAGELLM_STATUS_DIR": Rule(_folder, "no status is written"),
    "SAGELLM_STRICT": _overrides("strict", _switch),
    "SAGELLM_THREADS": _overrides("threads", _count),
    "SAGELLM_VENDOR": _overrides(
        "vendor", lambda text: words("auto", "host", "nccl", "hccl", "cncl")(text.partition(":")[0])
    ),
    "SAGELLM_VERIFY": _overrides("verify", words("off", "sampled", "all", "sampled:warn", "all:warn")),
}
#: Each variable that overrides an option of every group: the option, and the judge of its values. If two variables
#: override one option, the later one in this table wins. See docs/settings.md.
OVERRIDES: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "TORCH_NCCL_BLOCKING_WAIT": ("blocking_wait", _switch),
    **{name: (rule.option, rule.judge) for name, rule in RULES.items() if rule.option},
}


def accepted(environment: Mapping[str, str], name: str, judge: Callable[[str], str | None]) -> str:
    """The value of a variable, "" if it is unset or empty; a ValueError if the judge refuses it."""
    text = environment.get(name, "").strip()
    if text and (expected := judge(text)):
        raise ValueError(f"sagellm: {name}={text!r}, expected {expected}")
    return text


def link(environment: Mapping[str, str]) -> str:
    """What carries the bytes between hosts."""
    return accepted(environment, LINK, RULES[LINK].judge).lower() or "tcp"


def wrong(environment: Mapping[str, str]) -> Iterator[Wrong]:
    """The variables with invalid values. An empty variable counts as unset."""
    for name, rule in RULES.items():
        text = environment.get(name, "").strip()
        expected = rule.judge(text) if text else None
        if expected:
            yield Wrong(
                f"{name}={text}: expected {expected}; {rule.then}",
                f"correct it, or unset {name}",
                rule.is_refused,
                rule.is_told,
            )


#: Acquired at the first check and never released.
_told = threading.Lock()


def check() -> None:
    """At the first group of the process: warns about values that have no effect, and creates the folder of dumps."""
    if not _told.acquire(blocking=False):
        return
    from torch_sagellm.observe.log import logger

    for found in wrong(os.environ):
        if not (found.is_refused or found.is_told):
            logger.warning("%s. %s", found.what, found.fix)
    folder = os.environ.get("SAGELLM_DUMP_DIR", "").strip()
    if folder and _folder(folder) is None:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            logger.warning("SAGELLM_DUMP_DIR=%s: a group that fails leaves no record: %s", folder, error)
