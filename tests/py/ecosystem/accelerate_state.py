"""accelerate's ``PartialState`` and ``Accelerator``, with their gather and reduce. They know only the name "gloo"."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from report import digest, report, step
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Trains a linear model on different data on each rank, and reports."""
    state = PartialState(cpu=True, backend="gloo")
    assert state.num_processes == dist.get_world_size() and state.backend == "gloo", state
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    data = torch.randn(640, 8, generator=torch.Generator().manual_seed(3))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, wanted in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        step()
    everyone = accelerator.gather(torch.full((2,), float(state.process_index))).tolist()
    names = gather_object([f"rank {state.process_index}"])
    told = broadcast_object_list([state.process_index])
    padded = accelerator.pad_across_processes(torch.ones(state.process_index + 1))
    assert len(padded) == state.num_processes
    report(losses=losses, everyone=everyone, names=names, told=told, weights=digest(model.parameters()))
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
