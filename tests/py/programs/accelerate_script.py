"""Runs one of accelerate's own test scripts with the default group made beforehand.

accelerate knows its backends by a fixed list; a group that exists when it starts is used as it is. Usage (under
torchrun): accelerate_script.py BACKEND MODULE.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

os.environ["ACCELERATE_USE_CPU"] = "true"

import torch.distributed as dist


def main() -> None:
    """Makes the group, then runs the module as a program."""
    backend, module = sys.argv[1:3]
    dist.init_process_group(backend)
    from accelerate import PartialState

    state = PartialState(cpu=True)
    assert state.num_processes == dist.get_world_size() and state.device.type == "cpu", state
    assert dist.get_backend() == backend
    sys.argv = [importlib.import_module(module).__file__ or module]
    runpy.run_module(module, run_name="__main__")
    if dist.is_initialized():
        assert dist.get_backend() == backend
        dist.barrier()
        dist.destroy_process_group()
    print("accelerate's script ended well")


if __name__ == "__main__":
    main()
