"""vLLM on the CPU, 2 ranks, with a random model of four layers: the tokens that it generates, and how fast.

    python vllm_tokens.py tensor|pipeline

With ``ECOSYSTEM_PRIVATE_PATH=1`` vLLM keeps its own path over shared memory; otherwise its groups carry the tensors.
With ``ECOSYSTEM_HOST=0|1`` and ``ECOSYSTEM_MASTER=<address>`` each rank has its own host, which runs this script.
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
#: How the model is split over the 2 ranks. vLLM 0.32 makes the buffers of a pipeline's later ranks while it warms up a
#: compiled model. With enforce_eager it makes no buffers and fails. So this mode traces the model, with the backend
#: "eager", which compiles nothing.
SPLITS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "enforce_eager": True},
    "pipeline": {"pipeline_parallel_size": 2, "compilation_config": {"mode": 2, "backend": "eager"}},
}


def generate(llm: LLM, logprobs: int | None = None) -> Any:
    """Returns what follows the prompt: tokens, and with `logprobs` how probable each was."""
    settings = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=logprobs)
    prompt: Any = {"prompt_token_ids": PROMPT}
    return llm.generate([prompt], settings, use_tqdm=False)[0].outputs[0]


def between_hosts() -> dict[str, Any]:
    """vLLM's arguments if each rank has its own host."""
    if "ECOSYSTEM_HOST" not in os.environ:
        return {}
    host = int(os.environ["ECOSYSTEM_HOST"])
    return {
        "distributed_executor_backend": "mp",
        "nnodes": 2,
        "node_rank": host,
        "master_addr": os.environ["ECOSYSTEM_MASTER"],
    }


def lead(arguments: dict[str, Any]) -> None:
    """Generates twice and reports; the second time is timed. The tokens of a random model repeat, logprobs do not."""
    llm = LLM(**arguments)
    first = generate(llm, logprobs=1)
    logprobs = [choice[token].logprob for token, choice in zip(first.token_ids, first.logprobs, strict=True)]
    begin = time.perf_counter()
    second = generate(llm)
    milliseconds = 1e3 * (time.perf_counter() - begin) / TOKENS
    found = {"tokens": [list(first.token_ids), list(second.token_ids)], "logprobs": logprobs}
    llm.collective_rpc("tell", args=(milliseconds, found))


def follow(arguments: dict[str, Any]) -> None:
    """Runs the worker of a further host, as ``vllm serve --headless`` does, until it ends or this process is ended."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = EngineArgs(**arguments).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def main(split: str) -> None:
    """Makes the model and does this host's part."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        arguments = {
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "dtype": "float32",
            "seed": 0,
            "worker_extension_cls": "vllm_workers.Reporting",
            **SPLITS[split],
            **between_hosts(),
        }
        (follow if arguments.get("node_rank") else lead)(arguments)


if __name__ == "__main__":
    main(sys.argv[1])
