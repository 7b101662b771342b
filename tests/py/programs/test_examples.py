"""Every file of examples/ is started as its head says, with two ranks or three, and checks itself."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from harness import IS_GLOO, torchrun

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SECONDS = 60  # what an example may take on an idle machine with two cores
#: Arguments that make the demo, which trains for minutes, a short one.
SHORT = ["--steps", "12", "--rounds", "2", "--profile-steps", "2", "--data-mib", "0.5"]

pytestmark = pytest.mark.skipif(IS_GLOO, reason="gloo: the examples are about this package")


def command(example: Path) -> tuple[int, str]:
    """The number of ranks and the file in the first torchrun command of an example's head."""
    head = ast.get_docstring(ast.parse(example.read_text())) or ""
    found = re.search(r"^ *(torchrun .*)$", head, re.M) or re.search(r"^ *(torchrun .*)$", example.read_text(), re.M)
    assert found, f"{example.name} does not say how torchrun starts it"
    words = shlex.split(found.group(1))
    ranks = re.search(r"--nproc-per-node=(\d+)", found.group(1))
    assert ranks and f"examples/{example.name}" in words, found.group(1)
    return int(ranks.group(1)), found.group(1)


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "train_gpt.py"))
def test_the_example_runs_as_its_head_says(name: str) -> None:
    """It prints what it shows, and it has an assertion: without one its end would say nothing."""
    example = EXAMPLES / name
    ranks, _ = command(example)
    tree = ast.parse(example.read_text())
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree)), f"{name} checks nothing"
    printed = torchrun(example, ranks, timeout=SECONDS)
    assert any(line.strip() and "OMP_NUM_THREADS" not in line and "***" not in line for line in printed.splitlines())


@pytest.mark.timeout(2 * SECONDS + 60)
def test_the_demo_trains_and_its_weights_generate_over_all_ranks(tmp_path: Path) -> None:
    """A short run of train_gpt.py, compared with gloo; the third example then reads what it saved."""
    weights = tmp_path / "weights.pt"
    ranks, line = command(EXAMPLES / "train_gpt.py")
    assert "--backend sagellm" in line, line
    trained = torchrun(
        EXAMPLES / "train_gpt.py", ranks, "--backend", "sagellm", "--save", str(weights), *SHORT, timeout=SECONDS
    )
    assert "the losses are equal to the last bit" in trained and weights.is_file(), trained
    generated = torchrun(EXAMPLES / "03_tensor_parallel.py", 2, "--weights", str(weights), timeout=SECONDS)
    assert f"{weights}: " in generated and "says the same" in generated, generated
