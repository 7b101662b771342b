"""Time limits of tests."""

from __future__ import annotations

#: Multiplies every limit, because limits are written for an idle machine with two cores. If other programs share the
#: cores, everything takes longer: about four times as long next to a compiler. A hang still exceeds every limit.
SHARED = 4


def patience(seconds: float) -> float:
    """Returns the time limit for something that takes up to `seconds` on an idle machine."""
    return SHARED * seconds
