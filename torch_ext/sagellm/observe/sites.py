"""Where in the caller's program calls come from, by number: C++ asks for the number at each call.

Only with ``SAGELLM_CALL_SITES=1``, because it takes the interpreter's lock for every call.
"""

from __future__ import annotations

import itertools
import sys

import torch

import sagellm

#: File, line and function; all empty where nothing is known.
Site = tuple[str, int, str]

#: Programs call from few places; later ones are not told apart any more.
MOST = 1 << 16

#: Frames in these belong to torch or to this package, and are no place that a user would look for. They are written as
#: the interpreter writes them into the code that it loads from there, so that comparing text is enough.
_FOLDERS = tuple(folder + "/" for package in (torch, sagellm) for folder in package.__path__)
_numbers: dict[Site, int] = {}
_sites: dict[int, Site] = {}
#: Two threads never take the same.
_next = itertools.count(1)


def number() -> int:
    """A number for the place in the caller's program from which this is called; 0 where there is none."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(_FOLDERS):
        if frame.f_back is None:
            return 0
        frame = frame.f_back
    site = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    known = _numbers.get(site)
    if known is None and len(_numbers) < MOST:
        known = _numbers.setdefault(site, next(_next))
        _sites[known] = site
    return known or 0


def site_of(number: int) -> Site:
    """The place behind a number; empty for 0 and for numbers that were never given out."""
    return _sites.get(number, ("", 0, ""))
