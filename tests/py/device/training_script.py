"""An ordinary program for torchrun: some steps of DDP on the CPU or on the device of a simulated vendor.

It installs the device first, as the import of a vendor's package would. The rest of the program does not know that the
device is simulated.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def main() -> None:
    """Trains. Prints this rank's losses with all bits, and the carrier of an all_reduce of device tensors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--streams", help="whose streams the simulated device has")
    asked = parser.parse_args()
    if asked.streams:
        import simdevice

        simdevice.install(asked.device).use_library(os.environ["SAGELLM_TEST_RUNTIME"], asked.streams)
    dist.init_process_group("sagellm")
    rank, device = dist.get_rank(), torch.device(asked.device)
    assert rank == int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(device)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step)).to(device)
        optimizer.zero_grad()
        loss = parallel(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach().cpu()).hex())
    import torch_sagellm

    work = dist.all_reduce(torch.ones(10, device=device), async_op=True)
    assert work is not None
    work.wait()
    path = torch_sagellm.explain(work).path
    staged = torch_sagellm.get_stats()["host_staged_count"]
    dist.destroy_process_group()
    # One write per rank, so that lines of two ranks do not mix.
    print(f"\nrank {rank} losses {' '.join(losses)}\nrank {rank} staged {staged} by {path}", flush=True)


if __name__ == "__main__":
    main()
