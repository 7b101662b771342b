"""The arguments of ``Options``, which C++ hands over: here a wrong one is refused with the one that is meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from torch_sagellm._private import delegate, nearest, variables

#: The options of a group, and what each takes. The defaults stand in cpp/c10d/options.hpp.
OPTIONS: dict[str, type] = {
    "engine": str,
    "delegate": str,
    "fusion": bool,
    "strict": bool,
    "algorithm": str,
    "vendor": str,
    "topology": str,
    "measure_link": bool,
    "soft_timeout": Real,
    "on_device_failure": str,
    "blocking_wait": bool,
}
#: What some of them must be; rules of algorithms and topologies are judged by the core, when a group is made.
_JUDGES: dict[str, Callable[[str], str | None]] = {
    "engine": variables.words("auto", "delegate"),
    "vendor": variables.RULES["SAGELLM_VENDOR"].judge,
    "on_device_failure": variables.RULES["SAGELLM_ON_DEVICE_FAILURE"].judge,
}
_WORDS = {str: "a text", bool: "True or False", Real: "seconds, or None"}


def apply(options: Any, positional: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Sets the options that were given."""
    if positional:
        raise TypeError(f"sagellm Options: {positional[0]!r} has no name, expected such as Options(fusion=False)")
    for name, value in given.items():
        if name not in OPTIONS:
            near = nearest.meant(name, OPTIONS) or f"; the options are {', '.join(OPTIONS)}"
            raise TypeError(f"sagellm Options: there is no option {name!r}{near}")
        expected = OPTIONS[name]
        if expected is bool and value in (0, 1):
            value = bool(value)
        if not (isinstance(value, expected) or (expected is Real and value is None)):
            raise TypeError(f"sagellm Options: {name} is {value!r}, expected {_WORDS[expected]}")
        _judge(name, value)
        setattr(options, name, value)


def _judge(name: str, value: Any) -> None:
    """A ValueError for a value of the right type that no group takes."""
    expected = _JUDGES[name](value) if name in _JUDGES else None
    if expected:
        raise ValueError(f"sagellm: the option {name} is {value!r}, expected {expected}")
    if name == "soft_timeout" and value is not None and not value >= 0:
        raise ValueError(f"sagellm: the option soft_timeout is {value:g} s, expected 0 (none) or more")
    if name == "delegate":
        delegate.check(value)


def shown(options: Any) -> str:
    """The options as a program writes them: those that are not the default."""
    default = type(options)()
    values = {name: getattr(options, name) for name in OPTIONS}
    given = ", ".join(f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name))
    return f"Options({given})"
