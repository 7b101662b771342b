"""Finds the known word that is nearest to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Common prefix of all variables of this package. It is ignored, because it would make unrelated names look alike.
PREFIX = "sagellm_"


def meant(word: str, known: Iterable[str]) -> str:
    """A hint to append to a message, such as ``; did you mean 'all_reduce'?``, or "" if no known word is near."""
    by_letters = {each.lower().replace("-", "_").removeprefix(PREFIX): each for each in known}
    near = difflib.get_close_matches(word.lower().replace("-", "_").removeprefix(PREFIX), by_letters, 1, cutoff=0.6)
    return f"; did you mean {by_letters[near[0]]!r}?" if near else ""
