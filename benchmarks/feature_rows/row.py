"""Defines a row of the table of ``benchmarks/features.py``, and the hosts and ranks on which the row is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: The feature's call, the compared call, and a function that releases what they use. Every rank creates them, and
#: compares their results once.
Made = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]


@dataclass(frozen=True)
class Place:
    """Ranks on one host, or on hosts that are network namespaces with a delay or a rate between them."""

    ranks: int
    hosts: int = 1
    delay_ms: float = 0
    rate: str = ""

    @property
    def words(self) -> str:
        if self.hosts == 1:
            return f"{self.ranks} ranks, 1 host"
        link = f"{self.delay_ms:g} ms" if self.delay_ms else self.rate or "no limit"
        return f"{self.hosts} hosts x {self.ranks // self.hosts}, {link}"


@dataclass(frozen=True)
class Row:
    """One case of a feature."""

    name: str
    case: str
    against: str
    place: Place
    #: The largest ratio of the feature's time to the compared time that is good enough.
    goal: float
    make: Callable[[], Made]
    #: The smallest number of samples.
    least: int = 5


def nothing() -> None:
    """The third function of a row that has nothing to release."""


HERE = Place(2)
HERE_4 = Place(4)
FAR = Place(4, 2, delay_ms=1)
SLOW = Place(2, 2, rate="1gbit")
SLOW_4 = Place(4, 2, rate="100mbit")
