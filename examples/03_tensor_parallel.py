#!/usr/bin/env python3
"""Tensor parallel: each rank holds a part of every layer's weights, and a small GPT generates text over all ranks.

    torchrun --standalone --nproc-per-node=2 examples/03_tensor_parallel.py

The program reads the weights that the demo writes (`make demo`, or --weights FILE); without them it uses random
weights. The check runs the whole model on one process, which must give the same logits and the same text. The numbers
of heads and of features must be multiples of the number of ranks: random weights have 12 heads, the demo's weights 6.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import torch_sagellm
from torch_sagellm.demos.train_gpt import Block, Config, Gpt

PROMPT = b"import os\n\n\ndef read_lines(path):\n"


class ParallelBlock(nn.Module):
    """A layer of the demo's model in which each rank computes some of the heads and some of the hidden features.

    Each layer needs two all_reduces: the row layers sum the ranks' results of the column layers.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        dim = block.out.in_features
        self.heads, self.size = block.heads // ranks, dim // block.heads
        self.norm1, self.norm2 = block.norm1, block.norm2
        # The weight has the rows of q, then those of k and of v. From each of the three a rank keeps the rows of its
        # heads.
        part = dim // ranks
        rows = torch.cat([torch.arange(part) + third * dim + rank * part for third in range(3)])
        self.qkv = nn.Linear(dim, 3 * part)
        self.qkv.load_state_dict({"weight": block.qkv.weight[rows], "bias": block.qkv.bias[rows]})
        parallel = torch_sagellm.TensorParallelLinear.from_linear
        self.out = parallel(block.out, "row", input_is_split=True)
        self.up = parallel(block.mlp[0], "column", gather_output=False)
        self.down = parallel(block.mlp[2], "row", input_is_split=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, self.heads * self.size))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def parallel_form(model: Gpt, config: Config) -> Gpt:
    """Returns the model with its layers split over the ranks. Every rank has the whole embeddings and norms."""
    made = Gpt(config)
    made.load_state_dict(model.state_dict())
    made.blocks = nn.ModuleList(ParallelBlock(block) for block in model.blocks)
    return made.eval()


@torch.no_grad()
def generate(model: Gpt, count: int, context: int) -> tuple[bytes, torch.Tensor]:
    """Generates the most probable bytes after the prompt. Returns the text and the last logits."""
    text = torch.tensor([list(PROMPT)])
    logits = torch.empty(0)
    for _ in range(count):
        logits = model(text[:, -context:])[0, -1]
        text = torch.cat([text, logits.argmax().view(1, 1)], dim=1)
    return bytes(text[0].tolist()), logits


def load(weights: Path) -> tuple[Gpt, Config]:
    torch.manual_seed(1)
    if not weights.is_file():
        config = Config(heads=12)
        return Gpt(config).eval(), config
    saved = torch.load(weights)
    config = Config(**saved["config"])
    model = Gpt(config)
    model.load_state_dict(saved["model"])
    return model.eval(), config


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--weights", type=Path, default=Path("out/train_gpt.pt"), help="what the demo saved")
    parser.add_argument("--count", type=int, default=64, help="bytes to generate (default: 64)")
    arguments = parser.parse_args()
    dist.init_process_group("sagellm")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    whole, config = load(arguments.weights)
    if config.heads % ranks or config.dim % ranks:
        if rank == 0:
            what = f"{config.heads} heads of a width of {config.dim}"
            print(f"03_tensor_parallel.py: {what} cannot be split over {ranks} ranks; start 2 or 3", file=sys.stderr)
        dist.destroy_process_group()
        sys.exit(2)
    split = parallel_form(whole, config)
    torch_sagellm.reset_stats()
    text, logits = generate(split, arguments.count, config.context)
    stats = torch_sagellm.get_stats()
    expected_text, expected_logits = generate(whole, arguments.count, config.context)
    assert torch.allclose(logits, expected_logits, atol=1e-4), (logits - expected_logits).abs().max()
    assert text == expected_text, f"{text!r}, expected {expected_text!r}"

    if rank == 0:
        count = [sum(p.numel() for p in model.blocks.parameters()) for model in (whole, split)]
        where = arguments.weights if arguments.weights.is_file() else "random weights (make demo trains better ones)"
        print(f"{where}: {count[0]} parameters in the layers, {count[1]} of them on each of {ranks} ranks")
        print(f"{stats['all_reduce_count'] / arguments.count:.0f} all_reduces for each byte; the text:")
        # Random weights give random bytes, which could contain control characters for the terminal.
        print(text.decode() if text.isascii() and arguments.weights.is_file() else text)
        print("the whole model on one process says the same")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
