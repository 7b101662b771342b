"""Texts about operations that hang, as golden files `tests/golden/hang_<case>.txt`.

Times, process numbers, hosts, folders and line numbers stand there as <time>, <pid>, <host>, <path> and <line>, the
words of a delegate or a link as <words>.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def line_in(file: str, mark: str) -> int:
    """The number of the line in a file that ends with this mark."""
    lines = Path(file).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    assert len(found) == 1, f"{mark}: {found}"
    return found[0]


def plain(text: str) -> str:
    """The text without what differs from run to run."""
    text = re.sub(r" \(reported by rank \d+\)", "", text)
    text = re.sub(r"\bpid \d+", "pid <pid>", text)
    text = re.sub(r"\bhost [\w.-]+", "host <host>", text)
    text = re.sub(r"[\w./-]+/(\w+\.py):\d+", r"<path>/\1:<line>", text)
    text = re.sub(r"The delegate says: .*", "The delegate says: <words>", text)
    text = re.sub(r"(to go on) \(.*\)$", r"\1 (<words>)", text)  # of the link
    return re.sub(r"\b\d+(?:\.\d+)? (s|ms)\b", r"<time> \1", text).strip()


def compare(case: str, text: str) -> None:
    """Compares with the golden file, or writes it."""
    golden = GOLDEN / f"hang_{case}.txt"
    if os.environ.get("SAGELLM_UPDATE_GOLDEN"):
        golden.write_text(plain(text) + "\n")
    found, expected = plain(text), golden.read_text().strip()
    assert found == expected, f"{golden.name}:\n  expected: {expected}\n  found:    {found}"
