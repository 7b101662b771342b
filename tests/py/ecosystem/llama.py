"""The model of the programs that need transformers: small, so that a CPU trains and runs it in seconds."""

from __future__ import annotations

from transformers import LlamaConfig


def small_llama(layers: int, positions: int) -> LlamaConfig:
    """Returns the configuration of a Llama for sequences of up to ``positions`` bytes; its heads can be split over 2
    ranks."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
    )
