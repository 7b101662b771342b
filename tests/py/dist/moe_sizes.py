"""Lets a MoEDispatcher keep the memory of few rows as it keeps that of many."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def few_are_many(many: bool = True) -> Iterator[None]:
    """With ``many``, every dispatch keeps the memory of its exchange for the next one."""
    from torch_sagellm.parallel import moe

    before = moe._MANY
    moe._MANY = 1 if many else before
    try:
        yield
    finally:
        moe._MANY = before
