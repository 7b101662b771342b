"""Whole programs under torchrun: an ordinary training script, and accelerate's own test scripts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from harness import BACKEND, beyond_gloo, run_script, torchrun

HERE = Path(__file__).resolve().parent
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="the package accelerate is not installed"
)


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [1, 2])
def test_ddp_script(ranks: int) -> None:
    """DDP, data-loader workers, object broadcast, checkpoint; the backend is only a name on the command line.

    With one rank, the interpreters are fresh, as for a user.
    """
    output = torchrun(HERE / "ddp_script.py", ranks, "--backend", BACKEND, warm=ranks > 1)
    assert output.count(": fine") == ranks, output


@needs_accelerate
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "module",
    [
        "accelerate.test_utils.scripts.test_ops",
        "accelerate.test_utils.scripts.test_sync",
        "accelerate.test_utils.scripts.test_script",
    ],
)
def test_accelerate_scripts(module: str) -> None:
    """What `accelerate test` runs, and its scripts for operations and gradient accumulation.

    accelerate's test_distributed_data_loop is left out: it joins uneven inputs, which accelerate does for accelerators
    only. On the CPU the ranks then call different collectives (over gloo it hangs).
    """
    output = torchrun(HERE / "accelerate_script.py", 2, BACKEND, module, timeout=380)
    assert output.count("ended well") == 2, output


@needs_accelerate
@beyond_gloo("the name is this package's")
@pytest.mark.timeout(400)
def test_accelerate_asks_for_gloo_and_is_served() -> None:
    """accelerate's script for operations, unchanged: accelerate makes the group, under the only name that it knows for
    CPUs."""
    module, env = "accelerate.test_utils.scripts.test_ops", {"SAGELLM_AS": "gloo"}
    output = torchrun(HERE / "accelerate_script.py", 2, "gloo", module, timeout=380, env=env)
    assert output.count("ended well") == 2, output


FAILING = """
import sys, torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    raise ValueError("this rank gives up")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.quick
def test_torchrun_reports_a_failing_rank(tmp_path: Path) -> None:
    """One rank raises: the job ends soon, with an error code and that rank's traceback."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = run_script(
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), BACKEND], timeout=60
    )
    assert done.returncode == 1, done.stdout
    assert "this rank gives up" in done.stdout


RESTARTING = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
t = torch.ones(3)
dist.all_reduce(t)
assert t.tolist() == [2.0] * 3
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 0:
    os._exit(9)
dist.barrier() if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" else dist.all_reduce(t)
dist.destroy_process_group()
print("second life")
"""


def test_rule_23_torchrun_restarts_workers(tmp_path: Path) -> None:
    """Rule 23: after a crash torchrun starts all ranks again, with the keys of the first incarnation in the store."""
    script = tmp_path / "restarting.py"
    script.write_text(RESTARTING)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    done = run_script([*command, str(script), BACKEND], timeout=110, warm=True)
    assert done.returncode == 0 and done.stdout.count("second life") == 2, done.stdout
