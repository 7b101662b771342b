"""transformers' Trainer, data parallel on the CPU: the losses of forty steps and the weights after them."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from llama import small_llama
from report import digest, report, step
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same on every rank and in every run."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.randint(0, 256, (rows, 32), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Clock(TrainerCallback):
    """Counts the steps."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        step()


def main() -> None:
    """Trains and reports."""
    set_seed(0)
    model = LlamaForCausalLM(small_llama(layers=2, positions=64))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=4,
            max_steps=40,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(400), callbacks=[Clock()])
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        report(losses=losses, weights=digest(model.parameters()))


if __name__ == "__main__":
    main()
