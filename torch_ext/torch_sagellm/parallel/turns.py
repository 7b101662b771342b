"""The order of transfers between two ranks with one tag: the messages of two lists must not mix."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Direction, group, other rank and tag. Transfers with the same key must not mix.
Key = tuple[Any, ...]
#: Re-entrant, because a signal handler may begin a transfer while its thread is already beginning one.
_lock = threading.RLock()
#: For each key: its last transfer, as long as that transfer may not have ended.
_latest: dict[Key, Turn] = {}


class Turn:
    """The place of a transfer in the order of its key."""

    def __init__(self, key: Key, thread: int) -> None:
        self.key = key
        #: The identifier of the thread whose call moves the data, or 0 if a separate thread moves it.
        self.thread = thread
        self.ended = threading.Event()
        #: The transfer before this one. Set as long as this transfer may have to wait for the earlier one.
        self.before: Turn | None = None

    def wait(self) -> None:
        """Waits until it is this transfer's turn."""
        earlier = self.before
        while earlier is not None:
            earlier.ended.wait()
            earlier = earlier.before  # set if that transfer was given up while it waited
        self.before = None

    def end(self) -> None:
        with _lock:
            if _latest.get(self.key) is self:
                del _latest[self.key]
                if self.before is not None:
                    _latest[self.key] = self.before
        self.ended.set()


def _last(key: Key) -> Turn | None:
    found = _latest.get(key)
    return None if found is None or (found.ended.is_set() and found.before is None) else found


def take(key: Key, thread: int = 0) -> Turn:
    """Takes the turn after all transfers of this key that have begun. The caller waits for this turn, and ends it."""
    turn = Turn(key, thread)
    with _lock:
        turn.before, _latest[key] = _last(key), turn
    return turn


def take_if_free(key: Key) -> Turn | None:
    """Takes a turn that need not wait; returns None if an earlier transfer of this key has not ended."""
    turn = Turn(key, threading.get_ident())
    with _lock:
        if _last(key) is not None:
            return None
        _latest[key] = turn
    return turn


@contextmanager
def one_after_the_other(key: Key, call: str) -> Iterator[None]:
    """Runs its body when all earlier transfers of this key have ended."""
    me = threading.get_ident()
    turn = take(key, me)
    try:
        if turn.before is not None and turn.before.thread == me:
            raise RuntimeError(
                f"sagellm {call}: this thread is in the middle of a transfer with the same rank and tag, as in a "
                "signal handler; use another tag there"
            )
        turn.wait()
        yield
    finally:
        turn.end()


def _forget() -> None:
    """Called in a forked child, where the threads of the parent's transfers do not exist."""
    global _lock
    _lock = threading.RLock()
    _latest.clear()


os.register_at_fork(after_in_child=_forget)
