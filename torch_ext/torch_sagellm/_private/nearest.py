"""The known word nearest to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Of all variables of this package: alike in it are those, too, that have nothing else in common.
PREFIX = "sagellm_"


def meant(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'all_reduce'?`` to end a message with, or nothing where no known word is near."""
    by_letters = {each.lower().replace("-", "_").removeprefix(PREFIX): each for each in known}
    near = difflib.get_close_matches(word.lower().replace("-", "_").removeprefix(PREFIX), by_letters, 1, cutoff=0.6)
    return f"; did you mean {by_letters[near[0]]!r}?" if near else ""
