"""An ordinary program for torchrun: DDP, a DataLoader with workers, a checkpoint; nothing in it knows the backend."""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Trains a line through points and checks that all ranks agree."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    backend = parser.parse_args().backend
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert int(os.environ["LOCAL_RANK"]) == rank
    torch.manual_seed(0)
    data = torch.randn(64, 4)
    target = data @ torch.tensor([[1.0], [2.0], [-1.0], [0.5]])
    dataset = TensorDataset(data, target)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    total = torch.tensor([loss.item()])
    dist.all_reduce(total)
    assert total.item() / world < 0.05, total
    path = [tempfile.mktemp() if rank == 0 else None]
    dist.broadcast_object_list(path)
    if rank == 0:
        torch.save(model.state_dict(), path[0])
    dist.barrier()
    saved = torch.load(path[0])
    assert torch.equal(saved["module.weight"], model.module.weight)
    dist.barrier()
    if rank == 0:
        os.unlink(path[0])
    dist.destroy_process_group()
    print(f"rank {rank} of {world}: fine")


if __name__ == "__main__":
    main()
