"""Programs from PyPI that request "gloo", run with torch's gloo and with SAGELLM_AS=gloo: the numbers must be the same
to the last bit on every rank, and the groups must have been ours. `make test-ecosystem` installs the programs and runs
this."""

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
from net import INTERFACE, address

HERE = Path(__file__).resolve().parent
RANKS = 2
SECONDS = 300  # for one run of one program on an idle machine

# Runs that select no marks leave these tests out; `make test-ecosystem` selects this mark.
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
    Program("torchrec_dlrm.py", "torchrec"),
    Program("vllm_tokens.py", "vllm", ("tensor",), launcher=()),
    Program("vllm_tokens.py", "vllm", ("pipeline",), launcher=()),
]


def surroundings(place: Path, served: bool, variables: dict[str, str]) -> dict[str, str]:
    """Returns the environment of a program that reports into this folder."""
    environment = {**os.environ, **variables, "ECOSYSTEM_REPORT": str(place / "report"), "OMP_NUM_THREADS": "1"}
    environment.pop("SAGELLM_AS", None)
    # DeepSpeed compiles one of its operators with the ninja of this environment.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if served:
        environment["SAGELLM_AS"] = "gloo"
    return environment


def run(
    program: Program, place: Path, served: bool, inside: tuple[str, ...] = (), **variables: str
) -> list[dict[str, Any]]:
    """Returns what each rank reported. `place` is a folder that does not exist yet, `inside` a command that runs the
    program."""
    place.mkdir()
    # A new session, so that the ranks can be ended with it in any case.
    with subprocess.Popen(
        [*inside, sys.executable, *program.launcher, str(HERE / program.script), *program.arguments],
        env=surroundings(place, served, variables),
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


def alike(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """Checks that the numbers are the same, that `get_backend` says "gloo" in both runs, and that our groups counted
    operations in the second run alone."""
    assert [rank["found"] for rank in ours] == [rank["found"] for rank in theirs]
    assert all(rank["name"] == "gloo" for rank in theirs + ours)
    assert all(rank["operations"] == 0 for rank in theirs) and all(rank["operations"] > 0 for rank in ours)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_same_numbers_as_gloo_from_groups_of_ours(program: Program, tmp_path: Path) -> None:
    if importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed here; requirements-ecosystem*.txt say for which platforms")
    alike(run(program, tmp_path / "gloo", served=False), run(program, tmp_path / "sagellm", served=True))


def test_vllm_over_two_hosts(hosts: list[str], tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here; requirements-ecosystem*.txt say for which platforms")
    program = next(program for program in PROGRAMS if program.name == "vllm_tokens tensor")
    found = []
    for served in (False, True):
        place = tmp_path / f"served {served}"
        insides = [("ip", "netns", "exec", name) for name in hosts]
        variables = [
            {
                "ECOSYSTEM_HOST": str(host),
                "ECOSYSTEM_MASTER": address(0),
                "VLLM_HOST_IP": address(host),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "VLLM_CPU_OMP_THREADS_BIND": str(host),
            }
            for host in range(RANKS)
        ]
        with subprocess.Popen(
            [*insides[1], sys.executable, str(HERE / program.script), *program.arguments],
            env=surroundings(place, served, variables[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as follower:
            try:
                found.append(run(program, place, served, insides[0], **variables[0]))
            finally:
                os.killpg(follower.pid, signal.SIGKILL)
    alike(*found)
