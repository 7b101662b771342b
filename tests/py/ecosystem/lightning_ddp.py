"""Lightning's DDPStrategy: the losses and the weights."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from report import digest, report, step
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    """A small network; keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def on_train_end(self) -> None:
        report(losses=self.losses, weights=digest(self.parameters()))


def main() -> None:
    """Trains; the model reports while its group exists."""
    warnings.filterwarnings("ignore")
    lightning.seed_everything(0)
    data = torch.randn(640, 8, generator=torch.Generator().manual_seed(5))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=16))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
