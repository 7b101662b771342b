"""A hang: one of three ranks does not call a collective. What gloo reports about it, and what this package reports.

    torch-sagellm demo hang
    torch-sagellm demo hang --kind stop
    torchrun --standalone --nproc-per-node=3 -m torch_sagellm.demos.hang --kind skip

With `--kind python` the last rank is busy in its own Python code, with `stop` a signal has stopped its process, and
with `skip` an `if` makes it skip the call. The same program runs in a group of gloo and then in a group of ours, each
with a timeout of some seconds. It prints the warning that rank 0 gets before the timeout and the errors of the waiting
ranks, and checks that the errors of ours name the missing rank.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from datetime import timedelta
from textwrap import fill

import torch
import torch.distributed as dist


def load_batch(store: dist.Store, keys: list[str]) -> None:
    """A data loader that hangs until all keys are in the store. It calls no other Python code, so every look at this
    rank finds it in this function."""
    while not store.check(keys):
        time.sleep(0.3)


def train_step(kind: str, store: dist.Store, answers: list[str]) -> None:
    """One step: the ranks sum a gradient, then rank 0 broadcasts. `kind` says what makes this rank late."""
    gradient, decision = torch.ones(1024), torch.ones(1)
    if kind == "python":
        load_batch(store, answers)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind != "skip":
        dist.all_reduce(gradient)
    dist.broadcast(decision, 0)


def meet(store: dist.Store, where: str, rank: int, ranks: int) -> None:
    """A barrier over the store, which needs no process group."""
    store.set(f"{where}/{rank}", "")
    store.wait([f"{where}/{each}" for each in range(ranks)])


def hang(backend: str, kind: str, timeout: float, store: dist.Store, rank: int, ranks: int) -> list[str]:
    """Two steps in a new group; the second hangs. Rank 0 returns the errors of the waiting ranks."""
    late = ranks - 1
    answers = [f"told/{each}" for each in range(late)]
    meet(store, "imported", rank, ranks)  # starting Python and torch takes longer than the timeout
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    train_step("", store, answers)
    store.set(f"pid/{rank}", str(os.getpid()))
    meet(store, "first step", rank, ranks)
    began, text = time.monotonic(), "nothing: the call returned"
    try:
        train_step(kind if rank == late else "", store, answers)
    except RuntimeError as error:
        text = str(error)
    store.set(f"told/{rank}", f"rank {rank}, after {time.monotonic() - began:.1f} s:\n{text}")
    told = []
    if rank == 0:
        told = [store.get(answer).decode() for answer in answers]
        os.kill(int(store.get(f"pid/{late}")), signal.SIGCONT)
    meet(store, "over", rank, ranks)
    dist.destroy_process_group()
    return told


class Shown(logging.Handler):
    """Prints the warnings of this package laid out like its errors."""

    def emit(self, record: logging.LogRecord) -> None:
        text = "rank 0, before it fails:\n" + record.getMessage().replace("; ", "\n  ")
        print("sagellm warns " + laid_out(text), flush=True)


def laid_out(text: str) -> str:
    """Keeps the lines of a text, and wraps each at 120 columns."""
    first, *lines = text.splitlines()
    wrapped = [fill("  " + line, 120, subsequent_indent="      ") for line in lines]
    return "\n".join([first, *wrapped])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--kind", choices=("python", "stop", "skip"), default="python", help="why the last rank is late"
    )
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds of the groups' timeout (default: 5)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store, rank, ranks = next(dist.rendezvous("env://"))
    logging.getLogger("sagellm").addHandler(Shown() if rank == 0 else logging.NullHandler())
    for backend in ("gloo", "sagellm"):
        told = hang(backend, arguments.kind, arguments.timeout, dist.PrefixStore(backend, store), rank, ranks)
        for each in told:
            print(f"{backend} told " + laid_out(each), flush=True)
        assert backend == "gloo" or all(f"rank {ranks - 1}" in each for each in told), told


if __name__ == "__main__":
    main()
