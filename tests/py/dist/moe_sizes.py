"""Lets a MoEDispatcher treat few rows as it treats many."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def few_are_many(many: bool = True) -> Iterator[None]:
    """With ``many``, every dispatch treats its rows as if they were many.

    Rows that stay on the rank are then not part of the exchange, and memory is used again.
    """
    from torch_sagellm.parallel import moe

    before = moe._MANY
    moe._MANY = 1 if many else before
    try:
        yield
    finally:
        moe._MANY = before
