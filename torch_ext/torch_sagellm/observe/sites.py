"""Finds places in the user's program: the place from which a call is issued (as a number), and where a thread is.

Another rank asks for the place of a thread while it waits for this rank.

With ``SAGELLM_CALL_SITES=1`` C++ asks for the number at each call; otherwise never, because this acquires the
interpreter's lock.
"""

from __future__ import annotations

import itertools
import sys
import sysconfig
import threading
from types import FrameType

import torch

import torch_sagellm

#: File, line and function; all empty if the place is unknown.
Site = tuple[str, int, str]

#: The largest number of places; further places get the number 0. Programs call from few places.
MOST = 1 << 16

#: Frames of files in these folders belong to torch or to this package, and are not places in the user's program. The
#: folders are spelled like the file names in the code that the interpreter loaded, so that comparing text is enough.
_FOLDERS = tuple(folder + "/" for package in (torch, torch_sagellm) for folder in package.__path__)
#: Programs in the package that count as a user's program (`torch-sagellm demo`).
_PROGRAMS = tuple(folder + "/demos/" for folder in torch_sagellm.__path__)
_LIBRARY = sysconfig.get_path("stdlib") + "/"
_numbers: dict[Site, int] = {}
_sites: dict[int, Site] = {}
#: A shared counter, so that two threads never get the same number.
_next = itertools.count(1)


def number() -> int:
    """A number for the place in the user's program from which this is called; 0 if there is none."""
    site = _site(sys._getframe(), past_library=False)
    if site is None:
        return 0
    known = _numbers.get(site)
    if known is None and len(_numbers) < MOST:
        known = _numbers.setdefault(site, next(_next))
        _sites[known] = site
    return known or 0


def site_of(number: int) -> Site:
    """The place that has a number; empty for 0 and for unknown numbers."""
    return _sites.get(number, ("", 0, ""))


def text_of(number: int) -> str:
    """The place that has a number, as "FILE:LINE in FUNCTION"."""
    return _text(_sites.get(number))


def place_of_thread(thread: int) -> str:
    """Where the thread with this ``threading.get_ident`` is, as "FILE:LINE in FUNCTION".

    For an unknown thread it returns where the main thread is.

    A frame of Python's library is skipped if the program called it, because a waiting thread is often in such a frame.
    """
    frames = sys._current_frames()
    frame = frames.get(thread) or frames.get(threading.main_thread().ident or 0)
    return _text(_site(frame, past_library=True))


def _site(frame: FrameType | None, past_library: bool) -> Site | None:
    """The first place from ``frame`` outwards that is outside torch and this package."""
    inner = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_FOLDERS) or file.startswith(_PROGRAMS):
            site = (file, frame.f_lineno or 0, frame.f_code.co_name)
            if not (past_library and _is_library(file)):
                return site
            inner = inner or site
        frame = frame.f_back
    return inner


def _is_library(file: str) -> bool:
    # Installed packages may be below the library's folder, in site-packages or dist-packages.
    return file.startswith("<frozen") or (file.startswith(_LIBRARY) and "-packages/" not in file)


def _text(site: Site | None) -> str:
    return f"{site[0]}:{site[1]} in {site[2]}" if site else ""
