"""Lists of tensors from one rank to another, such as a cache of keys and values between prefill and decode."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_sagellm.api.arguments import checked_dense, checked_result, checked_written

#: The first message: these bytes (their digit is the version), the length of the description, as much of that as fits.
MAGIC = b"sagetns1"
HEADER_BYTES = 4096
LENGTH_BYTES = 8
PREFIX_BYTES = len(MAGIC) + LENGTH_BYTES
#: The longest description: of some ten million tensors.
MOST_BYTES = 1 << 30
#: Bytes that are under way at most, unless the caller says otherwise; a larger tensor travels alone.
WINDOW = 64 << 20


def send_tensors(
    tensors: Sequence[torch.Tensor], dst: int, group: Any = None, *, tag: int = 0, window: int = WINDOW
) -> None:
    """Sends a list of tensors of any shapes and dtypes to rank ``dst`` of the group, which calls ``recv_tensors``.

    One header describes all of them; then they follow in batches, at most ``window`` bytes at a time: a receiver that
    is slow holds the sender back instead of filling memory. On a device the tensors of a batch are packed into one
    message, of which only the two ranks take part. Returns when their memory may be used again. All tensors are dense,
    have data and are on one device (ValueError, before anything is sent).

    Example::

        if dist.get_rank() == 0:
            torch_sagellm.send_tensors([torch.ones(2, 3), torch.arange(5)], dst=1)
        elif dist.get_rank() == 1:
            keys, numbers = torch_sagellm.recv_tensors(src=0)
    """
    if isinstance(tensors, torch.Tensor):
        raise TypeError("sagellm send_tensors: got a tensor, expected a list of tensors")
    listed = [_checked(tensor, number) for number, tensor in enumerate(tensors)]
    devices = {tensor.device for tensor in listed}
    if len(devices) > 1:
        raise ValueError(
            f"sagellm send_tensors: the tensors are on {', '.join(map(str, devices))}, expected one device"
        )
    if window < 1:
        raise ValueError(f"sagellm send_tensors: window is {window} bytes, expected 1 or more")
    described = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in listed]
    text = json.dumps([window, described], separators=(",", ":")).encode()
    if len(text) > MOST_BYTES:
        raise ValueError(
            f"sagellm send_tensors: the description of {len(listed)} tensors has {len(text)} bytes, expected at most "
            f"{MOST_BYTES}; send them in several calls"
        )
    whole = MAGIC + len(text).to_bytes(LENGTH_BYTES, "little") + text
    device = next(iter(devices), torch.device("cpu"))
    _send_bytes(whole[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), device, dst, group, tag)
    if len(whole) > HEADER_BYTES:
        _send_bytes(whole[HEADER_BYTES:], device, dst, group, tag)
    _in_batches(dist.isend, listed, dst, group, tag, window)


def recv_tensors(
    src: int,
    group: Any = None,
    *,
    tag: int = 0,
    device: torch.device | str = "cpu",
    window: int = WINDOW,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Receives what rank ``src`` sends by ``send_tensors``, in new tensors on ``device`` or in those of ``out``.

    ``device`` is of the kind that the sender's tensors are on. ``out`` must be dense tensors on one device, each
    element in memory of its own (ValueError, before anything is received). It must have the shapes and dtypes that
    come, else a ValueError says which differs; the tensors are then received and dropped, so that later messages
    arrive. On a device the sender's ``window`` applies: the sender has packed the messages by it. Where the first
    message that comes is not one of ``send_tensors``, a RuntimeError says so.

    Example::

        if dist.get_rank() == 0:
            torch_sagellm.send_tensors([torch.ones(2, 3)], dst=1)
        elif dist.get_rank() == 1:
            torch_sagellm.recv_tensors(src=0, out=[torch.empty(2, 3)])
    """
    given = None if out is None else _checked_out(out)
    where = given[0].device if given else torch.device(device)
    first = _recv_bytes(HEADER_BYTES, where, src, group, tag)
    length = int.from_bytes(first[len(MAGIC) : PREFIX_BYTES], "little")
    if not first.startswith(MAGIC) or length > MOST_BYTES:
        raise RuntimeError(
            f"sagellm recv_tensors: rank {src} did not call send_tensors: what came from it with tag {tag} is another "
            "message, expected send_tensors of the same version on that rank, and a tag that no other send has"
        )
    end = PREFIX_BYTES + length
    rest = _recv_bytes(end - HEADER_BYTES, where, src, group, tag) if end > HEADER_BYTES else b""
    packed_by, described = json.loads((first + rest)[PREFIX_BYTES:end])
    wrong = _differs(described, given) if given is not None else ""
    if given is None or wrong:
        made = [torch.empty(shape, dtype=getattr(torch, dtype), device=where) for dtype, shape in described]
    else:
        made = given
    _in_batches(dist.irecv, made, src, group, tag, window if where.type == "cpu" else packed_by)
    if wrong:
        raise ValueError(f"sagellm recv_tensors: {wrong}")
    return made if out is None else list(out)


def _in_batches(start: Any, tensors: Sequence[torch.Tensor], peer: int, group: Any, tag: int, window: int) -> None:
    """Sends or receives all tensors in batches of at most half of ``window`` bytes (or one tensor), two under way."""
    under_way: deque[Callable[[], None]] = deque()
    filled = [tensor for tensor in tensors if tensor.nbytes]  # the others are whole without a message
    for batch in _batches(filled, max(1, window // 2)):
        if len(under_way) == 2:
            under_way.popleft()()
        begin = _one_by_one if batch[0].is_cpu else _packed
        under_way.append(begin(start, batch, peer, group, tag))
    for end in under_way:
        end()


def _one_by_one(start: Any, batch: list[torch.Tensor], peer: int, group: Any, tag: int) -> Callable[[], None]:
    """Begins a message for each tensor; returns what waits for all."""
    messages = [dist.P2POp(start, each, group=group, tag=tag, group_peer=peer) for each in batch]
    works = dist.batch_isend_irecv(messages)

    def end() -> None:
        for work in works:
            work.wait()

    return end


def _packed(start: Any, batch: list[torch.Tensor], peer: int, group: Any, tag: int) -> Callable[[], None]:
    """Begins one message with all tensors, on a device; returns what waits for it and unpacks what came.

    ``batch_isend_irecv`` would travel by the communicator of all ranks, which the first call makes once all have come;
    a single message needs no rank but its two.
    """
    sends = start is dist.isend
    if len(batch) == 1:
        whole = batch[0]
    elif sends:
        whole = torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in batch])
    else:
        whole = torch.empty(sum(each.nbytes for each in batch), dtype=torch.uint8, device=batch[0].device)
    work = start(whole, **{"group_dst" if sends else "group_src": peer}, group=group, tag=tag)

    def end() -> None:
        work.wait()
        if whole is batch[0] or sends:
            return
        with torch.inference_mode():  # in which every tensor may be written
            for each, part in zip(batch, whole.split([each.nbytes for each in batch]), strict=True):
                dense = each if each.is_contiguous() else torch.empty(each.shape, dtype=each.dtype, device=each.device)
                dense.view(-1).view(torch.uint8).copy_(part)
                if dense is not each:
                    each.copy_(dense)

    return end


def _batches(tensors: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if batch and nbytes + tensor.nbytes > most:
            yield batch
            batch, nbytes = [], 0
        batch.append(tensor)
        nbytes += tensor.nbytes
    if batch:
        yield batch


def _checked(tensor: torch.Tensor, number: int) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"sagellm send_tensors: element {number} is a {type(tensor).__name__}, expected a tensor")
    checked_dense(f"send_tensors: element {number}", tensor)
    return tensor.detach().resolve_conj().resolve_neg()


def _checked_out(out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        raise TypeError("sagellm recv_tensors: out is a tensor, expected a list of tensors")
    for number, tensor in enumerate(out):
        what = f"recv_tensors: element {number} of out"
        checked_result(what, tensor)
        checked_written(what, tensor)
    devices = {tensor.device for tensor in out}
    if len(devices) > 1:
        raise ValueError(
            f"sagellm recv_tensors: the tensors of out are on {', '.join(map(str, devices))}, expected one device"
        )
    return [tensor.detach() for tensor in out]


def _differs(described: list[Any], out: Sequence[torch.Tensor]) -> str:
    if len(described) != len(out):
        return f"{len(described)} tensors came, and out has {len(out)}"
    for number, ((dtype, shape), tensor) in enumerate(zip(described, out, strict=True)):
        have = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        if have != [dtype, shape]:
            return f"tensor {number} is {dtype} of shape {shape}, and out has {have[0]} of shape {have[1]}"
    return ""


def _send_bytes(data: bytes, device: torch.device, dst: int, group: Any, tag: int) -> None:
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), group_dst=dst, group=group, tag=tag)


def _recv_bytes(count: int, device: torch.device, src: int, group: Any, tag: int) -> bytes:
    data = torch.empty(count, dtype=torch.uint8, device=device)
    dist.recv(data, group_src=src, group=group, tag=tag)
    return bytes(data.tolist())
