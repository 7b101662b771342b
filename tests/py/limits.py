"""How long something may take."""

from __future__ import annotations

#: Limits are written for an idle machine with two cores. Where other programs share the cores everything takes longer,
#: about four times beside a compiler. A hang still meets every limit.
SHARED = 4


def patience(seconds: float) -> float:
    """The limit for what may take `seconds` on an idle machine."""
    return SHARED * seconds
