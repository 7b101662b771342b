"""Compares error texts with golden files `tests/golden/<case>.txt`.

In these files <time>, <pid>, <host>, <path> and <line> stand for times, process ids, hosts, folders and line numbers,
and <words> for the text of a delegate or a link.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def line_in(file: str, mark: str) -> int:
    """Returns the number of the line that ends with this mark as a comment."""
    lines = Path(file).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    assert len(found) == 1, f"{mark}: {found}"
    return found[0]


def plain(text: str) -> str:
    """Returns the text without the parts that differ from run to run."""
    text = re.sub(r" \(reported by rank \d+\)", "", text)
    text = re.sub(r"\bpid \d+", "pid <pid>", text)
    text = re.sub(r"\bhost [\w.-]+", "host <host>", text)
    text = re.sub(r"[\w./-]+/(\w+\.py):\d+", r"<path>/\1:<line>", text)
    text = re.sub(r"(?m)^  gloo: .*", "  gloo: <words>", text)
    text = re.sub(r"(?m)(lost the connection to rank \d on another host): .*", r"\1: <words>", text)  # of the link
    return re.sub(r"\b\d+(?:\.\d+)? (s|ms)\b", r"<time> \1", text).strip()


def check_layout(text: str) -> None:
    """Checks the layout of a text: a head that begins with "sagellm", then indented lines, none with a period at its
    end."""
    head, *lines = text.splitlines()
    assert head.startswith("sagellm"), text
    assert all(re.match(r"  [^ ]", line) for line in lines), text
    assert not head.endswith(".") and not any(line.endswith(".") for line in lines), text


def compare(case: str, text: str) -> None:
    """Compares the text with the golden file. With SAGELLM_UPDATE_GOLDEN set, writes the file first."""
    golden = GOLDEN / f"{case}.txt"
    if text.startswith("sagellm"):
        check_layout(text)
    if os.environ.get("SAGELLM_UPDATE_GOLDEN"):
        golden.write_text(plain(text) + "\n")
    found, expected = plain(text), golden.read_text().strip()
    assert found == expected, f"{golden.name}, expected:\n{expected}\nfound:\n{found}"
