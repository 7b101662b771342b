"""The NVIDIA card of these tests: whether there is one, if not why, and how bodies of `on_device` run on it."""

from __future__ import annotations

import ctypes
import functools
import os
import site
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, run_fresh
from on_device import SHARED_CARD, Trained, same_training

#: The first NCCL that lets several ranks use one card.
SHARES_A_CARD = (2, 30, 3)
#: The timeout of a group. Ranks that share a card use it in turns of some milliseconds.
PATIENCE = timedelta(seconds=60)


def no_card() -> str:
    """Returns why nothing can run on a card here, or an empty text if something can."""
    if torch.cuda.is_available():
        return ""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"no CUDA device (torch {torch.__version__}, {built})"


def version_of(library: str) -> tuple[int, int, int]:
    found = ctypes.c_int()
    if ctypes.CDLL(library).ncclGetVersion(ctypes.byref(found)) != 0:
        raise RuntimeError(f"{library} does not tell its version")
    return found.value // 10_000, found.value // 100 % 100, found.value % 100


@functools.cache
def nccl_version() -> tuple[int, int, int]:
    """Returns the version of the library that serves a group: the one that is named, or torch's own."""
    places = [Path(folder) / "nvidia/nccl/lib/libnccl.so.2" for folder in site.getsitepackages()]
    named = os.environ.get("SAGELLM_NCCL_LIBRARY") or next(map(str, filter(Path.is_file, places)), "libnccl.so.2")
    return version_of(named)


def not_shared() -> str:
    """Returns why several ranks cannot use one card; empty if they can."""
    reason = no_card()
    if reason:
        return reason
    if nccl_version() >= SHARES_A_CARD:
        return ""
    found, wanted = (".".join(map(str, version)) for version in (nccl_version(), SHARES_A_CARD))
    return f"NCCL {found} has one rank a card; {wanted} or newer has several (SAGELLM_NCCL_LIBRARY names a file)"


@functools.cache
def rivals_version() -> tuple[int, int, int]:
    """Returns the version of the library that torch's own backend calls: torch's copy, or one that LD_PRELOAD names."""
    return version_of("libnccl.so.2")  # loaded with torch, and found by its name


def rival_not_shared() -> str:
    """Returns why several ranks cannot use one card over torch's own backend; empty if they can."""
    reason = not_shared()
    if reason or rivals_version() >= SHARES_A_CARD:
        return reason
    found = ".".join(map(str, rivals_version()))
    return (
        f"torch's own NCCL {found} has one rank a card: its backend cannot be compared with (LD_PRELOAD names another)"
    )


needs_card = pytest.mark.skipif(bool(no_card()), reason=no_card() or "-")
needs_shared_card = pytest.mark.skipif(bool(not_shared()), reason=not_shared() or "-")
needs_shared_rival = pytest.mark.skipif(bool(rival_not_shared()), reason=rival_not_shared() or "-")


def in_group(ctx: Context, body: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Called on a rank: runs the body in a new group."""
    torch.cuda.set_device(0)
    ctx.init(timeout=PATIENCE, **options)
    value = body(ctx, "cuda", *args)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return value


def on_card(ranks: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Runs `body(context, "cuda", *args)` on every rank, in a group with the given options. Returns the ranks'
    values."""
    return run_fresh(in_group, ranks, body, args, options, env=SHARED_CARD, timeout=100)


def by_both(ctx: Context, program: Callable[..., Trained], args: tuple[Any, ...]) -> list[float]:
    """Called on a rank: trains over this backend and over torch's nccl. The two must agree to the last bit."""
    torch.cuda.set_device(0)
    found = []
    for backend in (ctx.backend, "nccl"):
        ctx.init(backend=backend, key=f"{ctx.key}-{backend}", timeout=PATIENCE)
        found.append(program("cuda", ctx.rank, *args))
        torch.cuda.synchronize()
        dist.destroy_process_group()
    same_training(*found)
    return found[0][0]


def same_as_nccl(ranks: int, program: Callable[..., Trained], *args: Any) -> None:
    """Runs a training of `on_device` over both backends, in the same processes."""
    for losses in run_fresh(by_both, ranks, program, args, env=SHARED_CARD, timeout=100):
        assert len(losses) > 1 and losses[-1] < losses[0], losses
