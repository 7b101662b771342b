"""Texts that come from outside this process."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with "?" for each unprintable character.

    Any process that reaches the store or a port of ours may write there, and a terminal would obey the control
    characters.
    """
    return "".join(each if each.isprintable() else "?" for each in text)
