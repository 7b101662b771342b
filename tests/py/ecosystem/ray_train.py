"""Ray Train's TorchTrainer with two workers on this machine: the losses and the weights of both."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

HERE = str(Path(__file__).resolve().parent)


def train(_: dict[str, Any]) -> None:
    """What each worker runs."""
    sys.path.insert(0, HERE)
    import torch
    import torch.distributed as dist
    from report import digest, report, step

    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    source = torch.Generator().manual_seed(11 + dist.get_rank())
    losses = []
    for _step in range(40):
        optimizer.zero_grad()
        loss = net(torch.randn(8, 16, generator=source)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        step()
    report(losses=losses, weights=digest(net.parameters()))
    dist.barrier()


def main() -> None:
    """Starts Ray, which starts the workers."""
    carried = {
        name: os.environ[name] for name in ("ECOSYSTEM_REPORT", "SAGELLM_AS", "PYTHONPATH") if name in os.environ
    }
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": carried}, logging_level="ERROR")
    storage = Path(os.environ["ECOSYSTEM_REPORT"]).parent / "ray"
    TorchTrainer(
        train,
        train_loop_config={},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(storage)),
    ).fit()


if __name__ == "__main__":
    main()
