"""Sums in fewer bytes: 16 bits, whole numbers of eight bits with a scale per block, or the largest elements only.

``compressed_all_reduce`` is one call; ``CompressionHook`` is the same for the buckets of DistributedDataParallel.
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
    """The bytes of the tensors, and of them the share that a plain all_reduce would have sent in their place.

    ``sent_bytes`` / ``plain_bytes`` is what leaves a host, or a rank where all are on one host, over what leaves it in
    a plain all_reduce of the same tensors.

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
        """The bytes saved; negative where compression cost more than it saved."""
        return self.plain_bytes - self.sent_bytes


def compression(how: str | Compression) -> Compression:
    """A compression by its name: "fp16", "bf16", "int8", "topk" or "auto"; a ValueError names them."""
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
    """A ValueError or a TypeError where there is no compressed sum of this kind."""
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

    Autograd does not see the call: the tensor may be a parameter, or one that a graph holds.

    Args:
        tensor: of floats (ValueError otherwise); every rank passes the same shape and dtype.
        how: "fp16", "bf16", "int8", "topk", an object of one of the classes, or "auto": int8 between hosts, and no
            compression on one host. There int8 and top-k are slower than none, which the log says once. A ``TopK``
            object keeps what it leaves out for the next call; "topk" by its name is one call alone, and what it leaves
            out is lost.
        op: "sum" or "avg" ("mean").
        key: names the tensor for a ``TopK`` object, which needs it (ValueError): the same in every call with this
            tensor, and no other's. The parameter will do whose gradient it is; the gradient itself is a new tensor in
            every step.
        stats: counts the bytes, if given.

    Raises:
        TypeError: it is no tensor.
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
        # In place where it can be. Methods compute with dense numbers of at least 16 bits.
        direct = own.is_contiguous() and own.element_size() > 1 and not own.is_neg() and not own.is_inference()
        work = own if direct else _dense(own)
        reduce = method.all_reduce if checked_op("compressed_all_reduce", op) == "SUM" else method.average
        _say_if_slower(method, group, tensor)
        sent = reduce(work, group, key)
        if not direct:
            # Tensors of inference mode may be written in that mode only, and all others may be written there, too.
            with torch.inference_mode():
                own.copy_(work)
    if stats is not None:
        stats.calls += 1
        stats.plain_bytes += tensor.nbytes
        stats.sent_bytes += sent
    return tensor


_said: Any = WeakKeyDictionary()


def _say_if_slower(method: Compression, group: Any, tensor: torch.Tensor) -> None:
    """One line of the log for each group on one host whose CPU tensors are compressed."""
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
