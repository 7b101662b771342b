"""Runs one of accelerate's own test scripts, in a default group that is made beforehand, or in one that accelerate
makes.

accelerate has a fixed list of backends, but if a group exists when it starts, it uses this group. With SAGELLM_AS
accelerate makes the group itself, as gloo. Usage (under torchrun): accelerate_script.py BACKEND MODULE.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

os.environ["ACCELERATE_USE_CPU"] = "true"

import torch.distributed as dist


def main() -> None:
    """Makes the group if accelerate does not, then runs the module as a program."""
    backend, module = sys.argv[1:3]
    renamed = "SAGELLM_AS" in os.environ
    if not renamed:
        dist.init_process_group(backend)
    from accelerate import PartialState

    state = PartialState(cpu=True)
    assert state.num_processes == dist.get_world_size() and state.device.type == "cpu", state
    assert dist.get_backend() == backend
    if renamed:
        import torch_sagellm

        dist.barrier()
        assert torch_sagellm.get_stats()["total_count"] == 1, "the script's group, which it destroys, is this package's"
    # accelerate's test data has no seed, so this sets one: if a gradient came near zero, the tolerance of the test
    # would be smaller than the rounding.
    from accelerate.test_utils import RegressionDataset

    RegressionDataset.__init__.__defaults__ = (2, 3, 64, state.process_index)
    sys.argv = [importlib.import_module(module).__file__ or module]
    runpy.run_module(module, run_name="__main__")
    if dist.is_initialized():
        assert dist.get_backend() == backend
        dist.barrier()
        dist.destroy_process_group()
    print("accelerate's script ended well")


if __name__ == "__main__":
    main()
