"""Sizes and times as text: exact in rules, as the core parses them, and with three digits in tables."""

from __future__ import annotations

import re
from fractions import Fraction

BINARY = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
DECIMAL = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
#: Binary units in any case, also as a prefix alone (k, M, G). Decimal units only in their exact spelling, because KB
#: may mean either.
_ANY_CASE = {"": 1, "b": 1, **{short: factor for name, factor in BINARY for short in (name.lower(), name[0].lower())}}
_EXACT = dict(DECIMAL)


def parse_size(text: str) -> int:
    """Bytes of ``4096``, ``64KiB`` or ``1.5MB``; a ValueError for any other text."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    unit = found and (_EXACT.get(found[2]) or _ANY_CASE.get(found[2].lower()))
    size = Fraction(found[1]) * unit if found and unit else Fraction(1, 2)  # exact, unlike a float with 53 bits
    if size.denominator != 1:
        raise ValueError(f"{text!r} is no size; expected bytes, or a number with KiB, MiB or GiB, such as 64KiB")
    return int(size)


def size_text(nbytes: int) -> str:
    """An exact size as rules write it, such as ``64KiB`` for 65536."""
    name, factor = next(((name, factor) for name, factor in BINARY if nbytes and nbytes % factor == 0), (" bytes", 1))
    return f"{nbytes // factor}{name}"


def show_size(size: float) -> str:
    """A size with up to three digits (four from 1000 on), such as ``64 KiB`` or ``1.43 MiB``."""
    name, factor = next(((name, factor) for name, factor in BINARY if size >= 0.9995 * factor), ("B", 1))
    number = size / factor
    return f"{number:.0f} {name}" if number >= 999.5 else f"{number:.3g} {name}"


def show_time(seconds: float, digits: int = 3) -> str:
    """A time such as ``3.04 us`` or ``12.3 ms``: with three digits, or fewer if it is known less precisely."""
    if digits < 3:
        seconds = float(f"{seconds:.{digits}g}")
    for name, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * factor:
            number = seconds / factor
            decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
            return f"{number:.{max(0, decimals - 3 + digits)}f} {name}"
    return f"{seconds * 1e9:.3g} ns"
