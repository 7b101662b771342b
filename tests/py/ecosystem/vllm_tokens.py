"""vLLM on the CPU, 2 ranks, with a random model of four layers: the tokens that it generates, and how fast.

    python vllm_tokens.py tensor|pipeline

With ``ECOSYSTEM_PRIVATE_PATH=1`` vLLM keeps its path of its own over shared memory; else its groups carry the tensors.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# vLLM reads these while it is imported, also in its other processes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("ECOSYSTEM_PRIVATE_PATH", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")

from vllm import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
PROMPT = list(range(1, 17))
TOKENS = 64
#: How the model is split over the 2 ranks. vLLM 0.32 makes the buffers of a pipeline's later ranks while it warms a
#: compiled model up; with enforce_eager it has none and fails. The mode traces, and "eager" compiles nothing.
SPLITS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "enforce_eager": True},
    "pipeline": {"pipeline_parallel_size": 2, "compilation_config": {"mode": 2, "backend": "eager"}},
}


def generate(llm: LLM) -> list[int]:
    """The tokens after the prompt."""
    settings = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": PROMPT}
    return list(llm.generate([prompt], settings, use_tqdm=False)[0].outputs[0].token_ids)


def main(split: str) -> None:
    """Generates twice and reports; the second time is timed."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=256,
            dtype="float32",
            seed=0,
            worker_extension_cls="vllm_workers.Reporting",
            **SPLITS[split],
        )
        first = generate(llm)
        begin = time.perf_counter()
        second = generate(llm)
        print(f"tokens/s {TOKENS / (time.perf_counter() - begin):.1f}", flush=True)
        llm.collective_rpc("tell", args=({"tokens": [first, second]},))


if __name__ == "__main__":
    main(sys.argv[1])
