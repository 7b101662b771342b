"""Every file of examples/ checks itself: started as its head says, and with 2, 3 and 4 ranks."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import signal
import sys
from pathlib import Path

import pytest
from harness import IS_GLOO, Context, launch, run_script, torchrun

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PACKAGE = EXAMPLES.parent / "torch_ext" / "torch_sagellm" / "demos"
#: Programs that the package has, for `torch-sagellm demo`; the example only starts them.
DEMOS = {"09_hang.py": "hang.py", "train_gpt.py": "train_gpt.py"}
SECONDS = 60  # time limit of an example on an idle machine with two cores
#: Arguments that shorten the demo, which otherwise trains for minutes.
SHORT = ["--steps", "12", "--rounds", "2", "--profile-steps", "2", "--data-mib", "0.5"]
#: Examples in which each process of torchrun runs its rank as a child process: the child's arguments, and the rank that
#: is killed.
AS_CHILD = {"08_recovery.py": (["--rank"], 1)}
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "train_gpt.py")

#: For this example torchrun and the ranks are fresh interpreters, as for a user.
COLD = NAMES[0]

pytestmark = pytest.mark.skipif(IS_GLOO, reason="gloo: the examples are about this package")


def command(example: Path) -> tuple[int, str]:
    """Returns the number of ranks and the file in the first torchrun command of an example's head."""
    head = ast.get_docstring(ast.parse(example.read_text())) or ""
    found = re.search(r"^ *(torchrun .*)$", head, re.M) or re.search(r"^ *(torchrun .*)$", example.read_text(), re.M)
    assert found, f"{example.name} does not say how torchrun starts it"
    words = shlex.split(found.group(1))
    ranks = re.search(r"--nproc-per-node=(\d+)", found.group(1))
    assert ranks and f"examples/{example.name}" in words, found.group(1)
    return int(ranks.group(1)), found.group(1)


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs_as_its_head_says(name: str) -> None:
    """The example prints something and contains an assertion, without which its exit code would prove nothing."""
    example = EXAMPLES / name
    ranks, _ = command(example)
    packaged = DEMOS.get(name)
    tree = ast.parse((PACKAGE / packaged if packaged else example).read_text())
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree)), f"{name} checks nothing"
    printed = torchrun(example, ranks, timeout=SECONDS, warm=name != COLD)
    assert any(line.strip() and "OMP_NUM_THREADS" not in line and "***" not in line for line in printed.splitlines())


def as_main(context: Context, name: str, words: list[str]) -> None:
    """Runs the example in this rank, which has already imported torch. A process of torchrun would take seconds for the
    import."""
    import torch.distributed as dist

    # As under torchrun, the store exists already, and each job has its own part of the store.
    os.environ.update(RANK=str(context.rank), WORLD_SIZE=str(context.world_size), LOCAL_RANK=str(context.rank))
    dist.rendezvous = lambda *_, **__: iter([(context.store(), context.rank, context.world_size)])
    dist.distributed_c10d.rendezvous = dist.rendezvous
    os.chdir(context.tmp)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *words]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def other_runs() -> list[tuple[str, int, str]]:
    """Returns example, number of ranks, and arguments, for 2, 3 and 4 ranks except the number that the example's head
    names."""
    few = {"03_tensor_parallel.py": "--count 8"}
    runs = [(name, ranks, few.get(name, "")) for name in NAMES for ranks in {2, 3, 4} - {command(EXAMPLES / name)[0]}]
    hangs = [
        ("09_hang.py", ranks, f"--timeout 2 --kind {kind}") for ranks, kind in ((2, "stop"), (3, "skip"), (4, "skip"))
    ]
    return [run for run in runs if run[0] != "09_hang.py"] + hangs + [("09_hang.py", 4, "--timeout 2 --kind python")]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(("name", "ranks", "words"), other_runs())
def test_the_example_runs_with_other_numbers_of_ranks(name: str, ranks: int, words: str) -> None:
    first, killed = AS_CHILD.get(name, ([], None))
    with launch(as_main, ranks, name, [*first, *words.split()]) as job:
        for ended in job.wait(SECONDS):
            expected = -signal.SIGKILL if ended.rank == killed else 0
            assert ended.code == expected and not ended.error, job.report()
        assert job.ranks[0].output(), job.report()


@pytest.mark.parametrize("name", ["03_tensor_parallel.py", "05_context.py"])
def test_an_example_that_cannot_use_so_many_ranks_says_in_one_line_what_it_needs(name: str) -> None:
    with launch(as_main, 5, name, []) as job:
        ended = job.wait(SECONDS)
        assert {each.code for each in ended} == {2}, job.report()
        assert re.fullmatch(rf"{name}: .* cannot be split over 5 ranks; start .*\n", ended[0].output), ended[0].output
        assert not any(each.output for each in ended[1:]), job.report()


@pytest.mark.timeout(2 * SECONDS + 60)
def test_the_demo_trains_and_its_weights_generate_over_all_ranks(tmp_path: Path) -> None:
    """A short run of train_gpt.py over reachable buckets, compared with gloo; the third example reads what it saved."""
    weights = tmp_path / "weights.pt"
    ranks, line = command(EXAMPLES / "train_gpt.py")
    assert "--backend sagellm" in line, line
    words = ["--backend", "sagellm", "--shared", "--save", str(weights), *SHORT]
    trained = torchrun(EXAMPLES / "train_gpt.py", ranks, *words, timeout=SECONDS)
    assert "sagellm --shared against gloo" in trained
    assert "the losses are equal to the last bit" in trained and weights.is_file(), trained
    generated = torchrun(EXAMPLES / "03_tensor_parallel.py", 2, "--weights", str(weights), timeout=SECONDS)
    assert f"{weights}: " in generated and "says the same" in generated, generated


@pytest.mark.timeout(2 * SECONDS)
def test_the_command_starts_the_programs_of_the_package(tmp_path: Path) -> None:
    """The command works in any folder and leaves no file there. The hang's error text names a line of the program."""
    hung = run_script(
        ["-m", "torch_sagellm", "demo", "hang", "--timeout", "2"], timeout=SECONDS, cwd=tmp_path, warm=True
    )
    assert hung.returncode == 0, hung.stdout
    assert re.search(r"gloo told rank 1, after \d+\.\d s:", hung.stdout), hung.stdout
    assert re.search(r"sagellm warns rank 0, .*:\n  rank 0 of group '0' has waited", hung.stdout), hung.stdout
    assert re.search(r"sagellm told rank 0, .*:\n  sagellm: rank \d of group", hung.stdout), hung.stdout
    assert re.search(r"demos/hang\.py:\d+\s+in\s+load_batch", hung.stdout), hung.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.quick
def test_options_of_the_other_demo_are_refused_and_those_of_its_own_are_passed() -> None:
    from torch_sagellm.cli import demo
    from torch_sagellm.cli.main import _parse

    words = demo.command(_parse(["demo", "hang", "--kind", "stop", "--timeout", "2.5"]))
    assert words == ["torch_sagellm.demos.hang", "--kind", "stop", "--timeout", "2.5"]
    words = demo.command(_parse(["demo", "--ranks", "4", "--steps", "40"]))
    assert words == ["torch_sagellm.demos.train_gpt", "--backend", "sagellm", "--steps", "40", "--save", "none"]
    words = demo.command(_parse(["demo", "--shared", "--save", "x"]))
    assert words == ["torch_sagellm.demos.train_gpt", "--backend", "sagellm", "--save", "x", "--shared"]
    with pytest.raises(ValueError, match="--kind belongs to `torch-sagellm demo hang`"):
        demo.command(_parse(["demo", "--kind", "stop"]))
    with pytest.raises(ValueError, match="--steps belongs to `torch-sagellm demo train`"):
        demo.command(_parse(["demo", "hang", "--steps", "4"]))
