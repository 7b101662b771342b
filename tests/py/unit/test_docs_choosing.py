"""The examples of docs/choosing.md run as they stand, and the files it describes are there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness import IS_GLOO, torchrun

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "choosing.md").read_text()

pytestmark = pytest.mark.skipif(IS_GLOO, reason="gloo: the page is about this package")


def blocks(language: str) -> list[str]:
    """The code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.S)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples(code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    if "init_process_group(" in code.replace("# torch", ""):
        torchrun(script, 2)
    else:
        subprocess.run([sys.executable, str(script)], check=True, timeout=100, capture_output=True)


@pytest.mark.parametrize("line", "".join(blocks("console")).splitlines())
def test_commands(line: str) -> None:
    words = shlex.split(line)
    assert words[0] == "python"
    done = subprocess.run([sys.executable, *words[1:]], check=False, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr


def test_the_files_it_names_are_there() -> None:
    for folder, names in (
        ("src/select", re.findall(r"`(\w+\.rs)`", TEXT)),
        ("torch_ext/sagellm", re.findall(r"`((?:observe|cli)/\w+\.py)`", TEXT)),
    ):
        assert names
        for name in names:
            assert (ROOT / folder / name).is_file(), name
    assert (ROOT / "src/group/explain.rs").is_file()
