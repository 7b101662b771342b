"""Checks options: the arguments of ``Options``, which C++ passes to this module, and those of a new group.

The error for an unknown name suggests the nearest option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from torch_sagellm._private import delegate, load, nearest, variables

#: The options of a group, and the type of each. Their defaults are in cpp/c10d/options.hpp.
OPTIONS: dict[str, type] = {
    "engine": str,
    "delegate": str,
    "fusion": bool,
    "strict": bool,
    "algorithm": str,
    "vendor": str,
    "topology": str,
    "measure_link": bool,
    "numa": bool,
    "threads": int,
    "links": int,
    "soft_timeout": Real,
    "verify": str,
    "on_device_failure": str,
    "blocking_wait": bool,
}
#: Checks of some options' values. The core checks rules of algorithms and topologies; see ``_judge``.
_JUDGES: dict[str, Callable[[str], str | None]] = {
    "engine": variables.words("auto", "delegate"),
    "vendor": variables.RULES["SAGELLM_VENDOR"].judge,
    "verify": variables.RULES["SAGELLM_VERIFY"].judge,
    "on_device_failure": variables.RULES["SAGELLM_ON_DEVICE_FAILURE"].judge,
}
_WORDS = {str: "a text", bool: "True or False", int: "a whole number", Real: "seconds, or None"}


def apply(options: Any, positional: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Sets the given options on ``options``; raises for an unknown name or a wrong value."""
    if positional:
        raise TypeError(f"sagellm Options: {positional[0]!r} has no name, expected such as Options(fusion=False)")
    for name, value in given.items():
        if name not in OPTIONS:
            near = nearest.meant(name, OPTIONS) or f"; the options are {', '.join(OPTIONS)}"
            raise TypeError(f"sagellm Options: there is no option {name!r}{near}")
        expected = OPTIONS[name]
        if expected is bool and value in (0, 1):
            value = bool(value)
        if expected is int and isinstance(value, bool):
            raise TypeError(f"sagellm Options: {name} is {value!r}, expected {_WORDS[expected]}")
        if not (isinstance(value, expected) or (expected is Real and value is None)):
            raise TypeError(f"sagellm Options: {name} is {value!r}, expected {_WORDS[expected]}")
        _judge(name, value)
        setattr(options, name, value)


def _judge(name: str, value: Any) -> None:
    """Raises a ValueError for a value of the right type that no group accepts."""
    expected = _JUDGES[name](value) if name in _JUDGES else None
    if expected:
        raise ValueError(f"sagellm: the option {name} is {value!r}, expected {expected}")
    # C++ counts whole milliseconds.
    if name == "soft_timeout" and value is not None and not 0 <= value < 1e9:
        raise ValueError(f"sagellm: the option soft_timeout is {value:g} s, expected 0 (none) or more")
    if name == "threads" and not 0 <= value <= 4096:
        raise ValueError(f"sagellm: the option threads is {value}, expected 0 (as torch) to 4096")
    if name == "links" and not 1 <= value <= variables.MOST_LINKS:
        raise ValueError(f"sagellm: the option links is {value}, expected 1 to {variables.MOST_LINKS}")
    if name == "delegate":
        delegate.check(value)
    # The core parses the text here; otherwise it would refuse a wrong text only when a group is created.
    if name == "algorithm" and value:
        load.extension().explain_without_group("barrier", 0, "float32", 2, value)
    if name == "topology" and value:
        try:
            load.extension().start_rule("all_reduce", 0, 2, value)
        except ValueError as error:
            raise ValueError(str(error).replace("the topology is", "the option topology is", 1)) from None


def overridden(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that variables override, and their values; a ValueError for a wrong value. An empty variable counts
    as unset."""
    found: dict[str, Any] = {}
    for variable, (option, judge) in variables.OVERRIDES.items():
        if text := variables.accepted(environment, variable, judge):
            kind = OPTIONS[option]
            found[option] = variables.SWITCH[text.lower()] if kind is bool else kind(text)
    return found


def check(options: Any) -> None:
    """Checks all options before a group is created, because a program may have set attributes after ``apply`` checked
    them. Also spells words as the core expects them."""
    options.vendor = options.vendor or "auto"
    for name in OPTIONS:
        value = getattr(options, name)
        _judge(name, value)
        if name in _SPELT:
            setattr(options, name, _SPELT[name](value))


def _vendor(text: str) -> str:
    """A name in lower case, then optionally a colon and the library's file."""
    name, colon, library = text.strip().partition(":")
    return name.lower() + colon + library


#: Functions that spell a valid value of an option as the core reads it.
_SPELT: dict[str, Callable[[str], str]] = {
    "engine": str.lower,
    "delegate": delegate.check,
    "vendor": _vendor,
    "verify": str.lower,
    "on_device_failure": str.lower,
}


def shown(options: Any) -> str:
    """The options as a program would write them: only those that differ from the default."""
    default = type(options)()
    values = {name: getattr(options, name) for name in OPTIONS}
    given = ", ".join(f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name))
    return f"Options({given})"
