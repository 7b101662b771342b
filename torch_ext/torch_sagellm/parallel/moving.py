"""Moves the messages of a list of tensors: from the tensors themselves, or packed; with a bounded number in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torch_sagellm._private import groups
from torch_sagellm.parallel import packing
from torch_sagellm.parallel.packing import Listed, Message, Run


def lists_of(group: Any) -> Any:
    """The backend of the group if it sends a list of CPU tensors as one message without packing it, else None."""
    group = dist.group.WORLD if group is None else group
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:  # the first message raises or warns
        return None
    ours = groups.backend_of(group)
    return None if ours is None or ours.delegate_reason else ours


def messages(runs: list[Run], ours: Any, on_cpu: bool, window: int) -> Iterator[Message]:
    """Cuts the list for the sender's window. The largest message is half of the window, so that two are in flight."""
    most = max(1, window // 2)
    if not on_cpu:
        return packing.messages(runs, most, None, True)
    if ours is None:
        return packing.messages(runs, min(most, packing.PACK), packing.SMALL, False)
    return packing.messages(runs, min(most, packing.JOINED), packing.LARGE, True)


class Waits(Protocol):
    """A Work, or a message that is unpacked when it has arrived."""

    def wait(self) -> Any: ...


Begin = Callable[[Message], Waits]


@dataclass
class _Unpacked:
    """A message that is being received; ``unpack`` copies it to its tensors."""

    work: Any
    unpack: Callable[[], None]

    def wait(self) -> None:
        self.work.wait()
        self.unpack()


def in_flight(messages: Iterable[Message], begin: Begin, window: int) -> None:
    """Sends or receives messages in order, with at most ``window`` bytes (or one message) in flight."""
    under_way: deque[tuple[int, Waits]] = deque()
    flying = 0
    for message in messages:
        while under_way and flying + message.nbytes > window:
            nbytes, first = under_way.popleft()
            first.wait()
            flying -= nbytes
        under_way.append((message.nbytes, begin(message)))
        flying += message.nbytes
    for _, each in under_way:
        each.wait()


def sends(ours: Any, listed: Listed, dst: int, group: Any, tag: int) -> Begin:
    """Sends CPU tensors. Our backend sends them from where they are, unless they are tiny; all others are packed."""

    def begin(message: Message) -> Any:
        if _goes_as_list(ours, listed, message):
            return ours._send_list(listed.tensors, message.begin, message.end, dst, tag)
        return dist.isend(packing.packed(listed, message), group_dst=dst, group=group, tag=tag)

    return begin


def receives(ours: Any, given: Listed, src: int, group: Any, tag: int) -> Begin:
    """Receives what ``sends`` sends into CPU tensors."""

    def begin(message: Message) -> Any:
        if _goes_as_list(ours, given, message):
            return ours._recv_list(given.tensors, message.begin, message.end, src, tag)
        whole = packing.room(given, message)
        work = dist.irecv(whole, group_src=src, group=group, tag=tag)
        return _Unpacked(work, lambda: packing.unpack(given, message, whole))

    return begin


def _goes_as_list(ours: Any, listed: Listed, message: Message) -> bool:
    """Whether one call takes the tensors of a message. Tensors that the extension cannot pack are never packed."""
    return ours is not None and not (listed.plain and message.is_tiny)


def sends_packed(listed: Listed, dst: int, group: Any, tag: int) -> Begin:
    """Sends tensors on a device, packed into one message.

    ``batch_isend_irecv`` would use the communicator of all ranks, which its first call creates only after all ranks
    have called. A single message needs only the communicator of its two ranks.
    """

    def begin(message: Message) -> Any:
        parts = [each for each in listed.tensors[message.begin : message.end] if each.nbytes]
        whole = parts[0]
        if len(parts) > 1:
            whole = torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in parts])
        return dist.isend(whole, group_dst=dst, group=group, tag=tag)

    return begin


def receives_packed(made: Listed, src: int, group: Any, tag: int) -> Begin:
    """Receives a message of ``sends_packed`` and unpacks it."""

    def begin(message: Message) -> Any:
        parts = [each for each in made.tensors[message.begin : message.end] if each.nbytes]
        if len(parts) == 1:
            return dist.irecv(parts[0], group_src=src, group=group, tag=tag)
        whole = torch.empty(message.nbytes, dtype=torch.uint8, device=parts[0].device)
        work = dist.irecv(whole, group_src=src, group=group, tag=tag)
        return _Unpacked(work, lambda: _unpack_on_device(whole, parts))

    return begin


def _unpack_on_device(whole: torch.Tensor, parts: list[torch.Tensor]) -> None:
    with torch.inference_mode():  # every tensor may be written in this mode
        for each, part in zip(parts, whole.split([each.nbytes for each in parts]), strict=True):
            dense = each if each.is_contiguous() else torch.empty(each.shape, dtype=each.dtype, device=each.device)
            dense.view(-1).view(torch.uint8).copy_(part)
            if dense is not each:
                each.copy_(dense)
