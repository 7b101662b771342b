"""Sends this process a SIGINT at an arbitrary moment, and raises one exception for each requested signal."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from functools import cache
from types import FrameType

CLOCK_MONOTONIC = 1


class Event(ctypes.Structure):
    """sigevent: the signal that a timer sends. Its first union has the size of a pointer, and the whole has 64
    bytes."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("how", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    ]


class Span(ctypes.Structure):
    """itimerspec: the interval, then the time that is left."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "left_s", "left_ns")]


@cache
def timer() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Returns a timer of the kernel, which sends its signal while the interpreter runs other code."""
    library, made = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    event = Event(None, signal.SIGINT, 0, b"")
    if library.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(made)) != 0:
        raise OSError(ctypes.get_errno(), "timer_create")
    return library, made


def set_timer(microseconds: int) -> None:
    library, made = timer()
    library.timer_settime(made, 0, ctypes.byref(Span(0, 0, 0, 1000 * microseconds)), None)


class Interrupts:
    """While `armed`, a SIGINT raises KeyboardInterrupt, once; otherwise it is ignored. For the main thread."""

    def __init__(self) -> None:
        self.armed = False
        self.before = signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def at_some_moment(self, microseconds: int, call: Callable[[], None], then: Callable[[], None]) -> bool:
        """Runs `call`. If the signal comes meanwhile, also runs `then` while the exception is being handled, like
        programs that save their state. Returns whether the signal came."""
        self.armed = True
        try:
            set_timer(microseconds)
            call()
            self.armed = False
        except KeyboardInterrupt:
            then()
            return True
        finally:
            self.armed = False
            set_timer(0)
        return False

    def now(self) -> None:
        self.armed = True
        signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        set_timer(0)
        signal.signal(signal.SIGINT, self.before)
