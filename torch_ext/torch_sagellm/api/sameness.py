"""``assert_same``: whether all ranks have the same bits."""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist

from torch_sagellm.api.arguments import checked_dense, in_memory
from torch_sagellm.api.errors import with_timeouts

#: The largest number of tensors that an error text names.
MOST_NAMED = 10
Tensors: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]]"


def assert_same(params: Tensors, group: dist.ProcessGroup | None = None) -> None:
    """Raises an AssertionError on every rank if the bits of a tensor are not the same on all ranks of ``group``.

    The text names each such tensor and the ranks that differ: if a majority of ranks agree, the ranks outside the
    majority. Each tensor's bits, shape, dtype and name are hashed, and one collective compares the hashes, so a
    training loop may call this function occasionally. Bits count: 0.0 and -0.0 differ, and equal NaN are the same.
    Tensors on a device are copied to the host for hashing.

    Args:
        params: a module (its parameters and buffers), tensors by name, or tensors, alone or as pairs with a name, as
            ``model.named_parameters()`` returns them; the same number on every rank.

    Raises:
        AssertionError: some tensor differs.
        ValueError: a tensor has no data, or is not dense.

    Example::

        model = torch.nn.Linear(4, 2)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        torch_sagellm.assert_same(model)
    """
    named = _named(params)
    own = torch.tensor([_hash(name, tensor) for name, tensor in named], dtype=torch.int64)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with_timeouts(lambda: dist.all_gather(every, own, group=group))
    table = torch.stack(every)
    different = (table != table[0]).any(0).nonzero().flatten().tolist()
    if not different:
        return
    lines = []
    for at in different[:MOST_NAMED]:
        name, tensor = named[at]
        what = f"{name} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on this rank)"
        lines.append(f"{what}: {_verdict(table[:, at].tolist())}")
    if len(different) > MOST_NAMED:
        lines.append(f"and {len(different) - MOST_NAMED} more")
    raise AssertionError(
        f"sagellm assert_same: {len(different)} of {len(named)} tensors differ between ranks; " + "; ".join(lines)
    )


def _named(params: Tensors) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, torch.nn.Module):
        return [*params.named_parameters(), *params.named_buffers()]
    pairs = params.items() if isinstance(params, Mapping) else params
    found = []
    for number, each in enumerate(pairs):
        found.append((f"tensor {number}", each) if isinstance(each, torch.Tensor) else (str(each[0]), each[1]))
    return found


def _hash(name: str, tensor: torch.Tensor) -> int:
    """A 64-bit hash of a tensor's name, dtype, shape and bits, as a signed number."""
    checked_dense("assert_same", tensor)
    plain = in_memory(tensor.detach()).cpu()
    hashed = hashlib.blake2b(f"{name} {plain.dtype} {list(plain.shape)}".encode(), digest_size=8)
    if plain.nbytes:
        hashed.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
    return int.from_bytes(hashed.digest(), "little", signed=True)


def _verdict(hashes: list[int]) -> str:
    """Names the ranks outside the majority, from each rank's hash; without a majority, each set of ranks that agree."""
    (most, count), *_ = Counter(hashes).most_common()
    if 2 * count > len(hashes):
        odd = [rank for rank, each in enumerate(hashes) if each != most]
        one = len(odd) == 1
        return f"rank{'' if one else 's'} {_list(odd)} differ{'s' if one else ''} from the {count} others"
    sides = [[rank for rank, each in enumerate(hashes) if each == other] for other in dict.fromkeys(hashes)]
    return " against ".join(f"rank{'s' if len(side) > 1 else ''} {_list(side)}" for side in sides)


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
