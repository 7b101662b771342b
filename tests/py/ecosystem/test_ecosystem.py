"""Programs from PyPI that ask for "gloo", run by torch's gloo and with SAGELLM_AS=gloo: the same numbers to the last
bit on every rank, and groups that were ours. `make test-ecosystem` installs the programs and runs this."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from limits import patience

HERE = Path(__file__).resolve().parent
RANKS = 2
SECONDS = 300  # for one run of one program on an idle machine

# Left out of the runs that name no marks: `make test-ecosystem` names this one.
pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * SECONDS + 30)]


@dataclass(frozen=True)
class Program:
    """A script of this folder, the package it needs, and how it is started."""

    script: str
    needs: str
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")

    @property
    def name(self) -> str:
        return " ".join([self.script.removesuffix(".py"), *self.arguments])


PROGRAMS = [
    Program("accelerate_state.py", "accelerate"),
    Program("trainer.py", "transformers"),
    Program("tensor_parallel.py", "transformers"),
    Program("lightning_ddp.py", "lightning"),
    Program("deepspeed_zero.py", "deepspeed", ("1",)),
    Program("deepspeed_zero.py", "deepspeed", ("2",)),
    Program("deepspeed_zero.py", "deepspeed", ("3",)),
    Program("ray_train.py", "ray", launcher=()),
    Program("vllm_tokens.py", "vllm", ("tensor",), launcher=()),
    Program("vllm_tokens.py", "vllm", ("pipeline",), launcher=()),
]


def run(program: Program, folder: Path, served: bool) -> list[dict[str, Any]]:
    """What each rank reported."""
    place = folder / ("sagellm" if served else "gloo")
    place.mkdir()
    environment = {**os.environ, "ECOSYSTEM_REPORT": str(place / "report"), "OMP_NUM_THREADS": "1"}
    environment.pop("SAGELLM_AS", None)
    # DeepSpeed compiles one of its operators with the ninja of this environment.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if served:
        environment["SAGELLM_AS"] = "gloo"
    # A new session, so that the ranks can be ended with it in any case.
    with subprocess.Popen(
        [sys.executable, *program.launcher, str(HERE / program.script), *program.arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=patience(SECONDS))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            pytest.fail(f"{program.name} did not end within {patience(SECONDS)} s:\n{said[-4000:]}")
    assert process.returncode == 0, f"{program.name}:\n{said[-6000:]}"
    return [json.loads(Path(f"{place / 'report'}.{rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_same_numbers_as_gloo_from_groups_of_ours(program: Program, tmp_path: Path) -> None:
    if importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed here; requirements-ecosystem*.txt say for which platforms")
    theirs, ours = run(program, tmp_path, served=False), run(program, tmp_path, served=True)
    assert [rank["found"] for rank in ours] == [rank["found"] for rank in theirs]
    assert all(rank["name"] == "gloo" for rank in theirs + ours), "programs compare this name"
    assert all(rank["operations"] == 0 for rank in theirs) and all(rank["operations"] > 0 for rank in ours)
