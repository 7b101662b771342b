"""The README's three lines of use run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import IS_GLOO, torchrun

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(IS_GLOO, reason="gloo: the README is about this package")
def test_the_readme_example_runs_under_torchrun(tmp_path: Path) -> None:
    """The first Python block that makes a group, saved to a file and started with two ranks."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    examples = [block for block in blocks if "init_process_group" in block]
    assert examples, "the README has no Python block with init_process_group"
    script = tmp_path / "example.py"
    script.write_text(examples[0])
    torchrun(script, 2)
