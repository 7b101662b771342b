"""The known word nearest to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'all_reduce'?`` to end a message with, or nothing where no known word is near."""
    by_letters = {each.lower().replace("-", "_"): each for each in known}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), by_letters, 1, cutoff=0.6)
    return f"; did you mean {by_letters[near[0]]!r}?" if near else ""
