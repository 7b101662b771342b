"""Reports the tokens that a model generates with transformers' tensor parallelism (``tp_plan="auto"``)."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from llama import small_llama
from report import report
from transformers import AutoModelForCausalLM, LlamaForCausalLM


def main() -> None:
    """Generates and reports."""
    dist.init_process_group("gloo")
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    folder = str(place[0])
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(small_llama(layers=4, positions=128)).save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_map=None)
    prompt = torch.arange(1, 9)[None]
    with torch.no_grad():
        tokens = model.generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=0)
    report(tokens=tokens.tolist())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
