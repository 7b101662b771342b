"""Finds places in the user's program: from where a call is issued (as a number), and where a thread is.

Another rank asks for the place of a thread when it waits for this rank.

C++ asks for the number at each call only with ``SAGELLM_CALL_SITES=1``, because it takes the interpreter's lock.
"""

from __future__ import annotations

import itertools
import sys
import sysconfig
import threading
from types import FrameType

import torch

import torch_sagellm

#: File, line and function; all empty where nothing is known.
Site = tuple[str, int, str]

#: Programs call from few places; later ones are not told apart any more.
MOST = 1 << 16

#: Frames of files in these folders belong to torch or to this package, and are not places in the user's program. The
#: folders are spelled as the interpreter spells them in the code that it loads from there, so that comparing text is
#: enough.
_FOLDERS = tuple(folder + "/" for package in (torch, torch_sagellm) for folder in package.__path__)
#: Except for the programs in the package that stand for a user's (`torch-sagellm demo`).
_PROGRAMS = tuple(folder + "/demos/" for folder in torch_sagellm.__path__)
_LIBRARY = sysconfig.get_path("stdlib") + "/"
_numbers: dict[Site, int] = {}
_sites: dict[int, Site] = {}
#: Two threads never get the same number.
_next = itertools.count(1)


def number() -> int:
    """A number for the place in the caller's program from which this is called; 0 where there is none."""
    site = _site(sys._getframe(), past_library=False)
    if site is None:
        return 0
    known = _numbers.get(site)
    if known is None and len(_numbers) < MOST:
        known = _numbers.setdefault(site, next(_next))
        _sites[known] = site
    return known or 0


def site_of(number: int) -> Site:
    """The place behind a number; empty for 0 and for numbers that were never given out."""
    return _sites.get(number, ("", 0, ""))


def text_of(number: int) -> str:
    """The same as "FILE:LINE in FUNCTION"."""
    return _text(_sites.get(number))


def place_of_thread(thread: int) -> str:
    """Where a thread is, as "FILE:LINE in FUNCTION", by its ``threading.get_ident``; the main thread for any other.

    Frames of Python's library are passed over where the program is further out: a thread that waits is often in one.
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
    # Packages that were installed may lie below the library's folder.
    return file.startswith("<frozen") or (file.startswith(_LIBRARY) and "-packages/" not in file)


def _text(site: Site | None) -> str:
    return f"{site[0]}:{site[1]} in {site[2]}" if site else ""
