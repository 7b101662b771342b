#!/usr/bin/env python3
"""Failure and recovery: one rank is killed in the middle of the training, and the other ranks continue without it.

    torchrun --standalone --nproc-per-node=3 examples/08_recovery.py

When a process is killed, the operations that need it fail on all other ranks in less than a second. The survivors find
out which ranks are left and get a group of these. They copy the state of the lowest rank and repeat the step. The check
computes all steps on one process.

torchrun itself ends all ranks as soon as one of its processes fails. So each process that torchrun starts runs its rank
as a child process, and reports success even if that child was killed on purpose.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import torch_sagellm

STEPS = 10
FAILS_IN = 4
VICTIM = 1


def gradient(weights: torch.Tensor, step: int, worker: int) -> torch.Tensor:
    """Returns the gradient of one worker's samples in one step."""
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1000 * step + worker))
    return inputs.T @ (inputs @ weights - inputs.sum(1)) / len(inputs)


def plain(workers: int) -> torch.Tensor:
    """Computes all steps on one process. From the failure on, the killed rank's gradients do not count."""
    weights = torch.zeros(8)
    for step in range(STEPS):
        live = [worker for worker in range(workers) if step < FAILS_IN or worker != VICTIM]
        weights -= 0.1 * sum(gradient(weights, step, worker) for worker in live) / len(live)
    return weights


def train(worker: int) -> torch.Tensor:
    weights, step = torch.zeros(8), 0
    while step < STEPS:
        if step == FAILS_IN and worker == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        mine = gradient(weights, step, worker)
        began = time.monotonic()
        try:
            dist.all_reduce(mine)
        except dist.DistBackendError as error:
            print(f"worker {worker}, after {time.monotonic() - began:.2f} s: {str(error).splitlines()[0]}", flush=True)
            torch_sagellm.recover()
            # Ranks may have completed different steps before the failure, so all continue from the state of one rank.
            state = torch.cat([weights, torch.tensor([float(step)])])
            dist.broadcast(state, 0)
            weights, step = state[:-1].clone(), int(state[-1])
            continue
        weights -= 0.1 * mine / dist.get_world_size()
        step += 1
    return weights


def run_rank() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("sagellm", timeout=timedelta(seconds=60))
    worker, workers = dist.get_rank(), dist.get_world_size()
    weights = train(worker)
    assert dist.get_world_size() == workers - 1
    assert torch.allclose(weights, plain(workers), atol=1e-6), (weights, plain(workers))
    if dist.get_rank() == 0:
        print(f"{STEPS} steps, {workers} ranks before the failure and {dist.get_world_size()} after it")
        print("the weights are those of one process that computes the same steps")
    dist.destroy_process_group()


def main() -> int:
    if "--rank" in sys.argv:
        run_rank()
        return 0
    rank = subprocess.Popen([sys.executable, __file__, "--rank"])
    signal.signal(signal.SIGTERM, lambda *_: rank.terminate())
    code = rank.wait()
    return 0 if code == -signal.SIGKILL and int(os.environ["RANK"]) == VICTIM else code


if __name__ == "__main__":
    sys.exit(main())
