"""Sums in fewer bytes: as 16-bit floats, as 8-bit integers with a scale per block, or of the largest elements only.

``compressed_all_reduce`` is a single call; ``CompressionHook`` does the same for the buckets of
DistributedDataParallel.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torch_sagellm.api.arguments import Op, checked_dense, checked_op, checked_tensor, checked_written
from torch_sagellm.api.formats import Auto, Compression, Half, Int8, TopK, on_one_host

logger = logging.getLogger("sagellm")


@dataclass
class CompressionStats:
    """Counts the bytes of the tensors in compressed sums, and the bytes that were sent, scaled to the same unit.

    ``sent_bytes`` / ``plain_bytes`` is the traffic that leaves a host (or a rank, if all ranks are on one host),
    divided by the traffic of a plain all_reduce of the same tensors.

    Example::

        stats = torch_sagellm.CompressionStats()
        torch_sagellm.compressed_all_reduce(torch.ones(4096), "fp16", stats=stats)
        assert stats.saved_bytes == stats.plain_bytes // 2
    """

    calls: int = 0
    plain_bytes: int = 0
    sent_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """The bytes saved; negative if compression cost more than it saved."""
        return self.plain_bytes - self.sent_bytes


def compression(how: str | Compression) -> Compression:
    """A compression by its name: "fp16", "bf16", "int8", "topk" or "auto".

    The ValueError for any other name lists these names.
    """
    if isinstance(how, Compression):
        return how
    if how in ("fp16", "bf16"):
        return Half(torch.float16 if how == "fp16" else torch.bfloat16)
    if how == "int8":
        return Int8()
    if how == "topk":
        return TopK()
    if how == "auto":
        return Auto()
    raise ValueError(f"sagellm: compression {how!r}, expected one of fp16, bf16, int8, topk, auto")


def check_compressible(tensor: torch.Tensor, op: Op, method: Compression, key: Any) -> None:
    """Raises a ValueError or a TypeError if the tensor, op or key does not fit a compressed sum."""
    what = "compressed_all_reduce"
    checked_tensor(what, tensor)
    if checked_op(what, op) not in ("SUM", "AVG"):
        raise ValueError(f"sagellm {what}: op={op!r}, expected one of sum, avg, mean")
    if not tensor.is_floating_point() or tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        raise ValueError(f"sagellm {what}: the tensor is {tensor.dtype}, expected floats")
    checked_dense(what, tensor)
    checked_written(what, tensor)
    if method.needs_key and key is None:
        raise ValueError(
            f"sagellm {what}: {method.name} keeps what it leaves out for the next call, so it needs a key that names "
            "this tensor in every call, expected key=parameter, or a name or number"
        )


def compressed_all_reduce(
    tensor: torch.Tensor,
    how: str | Compression,
    *,
    op: Op = "sum",
    group: Any = None,
    key: Any = None,
    stats: CompressionStats | None = None,
) -> torch.Tensor:
    """``all_reduce`` in fewer bytes, in place; returns the tensor.

    Autograd does not record the call: the tensor may be a parameter, or one that a graph holds.

    Args:
        tensor: a tensor of floats (ValueError otherwise); every rank passes the same shape and dtype.
        how: "fp16", "bf16", "int8", "topk", an object of one of the classes, or "auto": int8 between hosts from 64 KiB
            on, and no compression on one host. On one host int8 and top-k are slower than no compression; the log says
            so once. A ``TopK`` object leaves elements out, and keeps them for the next call; with the name "topk" each
            call is independent, and these elements are lost.
        op: "sum" or "avg" ("mean").
        key: identifies the tensor for a ``TopK`` object, which needs it (ValueError): the same key in every call for
            this tensor, and a different one for every other tensor. The parameter of a gradient is a good key. The
            gradient itself is not, because it is a new tensor in every step.
        stats: counts the bytes, if given.

    Raises:
        TypeError: the argument is not a tensor.
        ValueError: the compression or the op is unknown, the tensor has no floats or is not dense (sparse, expanded,
            without data), or a key is missing. Nothing was sent.

    Example::

        gradient = torch_sagellm.compressed_all_reduce(torch.ones(512), "int8", op="avg")
    """
    method = compression(how)
    if method.needs_key and isinstance(how, str):
        if key is not None:
            raise ValueError(
                f"sagellm compressed_all_reduce: key is {key!r}, and {how!r} keeps nothing from call to call, expected "
                "an object: make one torch_sagellm.TopK(), and pass it with the key in every call"
            )
        key = how
    check_compressible(tensor, op, method, key)
    with torch.no_grad():
        own = tensor.detach()
        # In place if possible. The methods need dense numbers of at least 16 bits.
        direct = own.is_contiguous() and own.element_size() > 1 and not own.is_neg() and not own.is_inference()
        work = own if direct else _dense(own)
        reduce = method.all_reduce if checked_op("compressed_all_reduce", op) == "SUM" else method.average
        _say_if_slower(method, group, tensor)
        sent = reduce(work, group, key)
        if not direct:
            # A tensor of inference mode may be written only in that mode; any other tensor may be written in that mode,
            # too.
            with torch.inference_mode():
                own.copy_(work)
    if stats is not None:
        stats.calls += 1
        stats.plain_bytes += tensor.nbytes
        stats.sent_bytes += sent
    return tensor


_said: Any = WeakKeyDictionary()


def _say_if_slower(method: Compression, group: Any, tensor: torch.Tensor) -> None:
    """Logs once for each group on one host that compressing its CPU tensors is slower."""
    base = dist.group.WORLD if group is None else group
    if base in _said or not tensor.is_cpu or not isinstance(method, Int8 | TopK):
        return
    _said[base] = True
    if dist.get_world_size(base) > 1 and on_one_host(base):
        logger.warning(
            "all ranks of this group are on one host, where %s is slower than no compression: use compress='auto', "
            "which compresses between hosts only",
            method.name,
        )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    dtype = tensor.dtype if tensor.element_size() > 1 else torch.float32
    copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    return copy.copy_(tensor)
