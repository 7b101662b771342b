"""Sends lists of tensors from one rank to another, such as a key-value cache between prefill and decode."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_sagellm._private import load
from torch_sagellm.api.arguments import checked_dense, checked_result, checked_written, wraps
from torch_sagellm.parallel import moving, packing, turns
from torch_sagellm.parallel.packing import Listed, Run

#: The first message has HEADER_BYTES: MAGIC (its digit is the version), the length of the description in LENGTH_BYTES,
#: and the beginning of the description.
MAGIC = b"sagetns3"
HEADER_BYTES = 4096
LENGTH_BYTES = 8
PREFIX_BYTES = len(MAGIC) + LENGTH_BYTES
#: The longest accepted description, enough for two million different tensors. It limits the memory that a message can
#: claim.
MOST_BYTES = 64 << 20
#: The largest number of bytes in flight, unless the caller sets another; a larger tensor is sent alone.
WINDOW = 64 << 20


def send_tensors(
    tensors: Sequence[torch.Tensor], dst: int, group: Any = None, *, tag: int = 0, window: int = WINDOW
) -> None:
    """Sends a list of tensors of any shapes and dtypes to rank ``dst`` of the group, which calls ``recv_tensors``.

    One header describes all tensors. They follow in messages of several tensors, with at most ``window`` bytes in
    flight, so a slow receiver delays the sender instead of filling memory. On the CPU of a sagellm group a message has
    at most 4 MiB, or one larger tensor. Its tensors are sent from where they are, or packed if they have on average
    less than 1 KiB. On a device, and on another backend for tensors below 32 KiB, a message is packed. Only the two
    ranks take part. It returns when the tensors' memory may be changed. All tensors must be dense, have data and a
    dtype of whole bytes, and be on one device (ValueError, before anything is sent).

    Example::

        if dist.get_rank() == 0:
            torch_sagellm.send_tensors([torch.ones(2, 3), torch.arange(5)], dst=1)
        elif dist.get_rank() == 1:
            keys, numbers = torch_sagellm.recv_tensors(src=0)
    """
    if isinstance(tensors, torch.Tensor):
        raise TypeError("sagellm send_tensors: got a tensor, expected a list of tensors")
    listed = _checked_list(tensors)
    with turns.one_after_the_other(_key("send", group, dst, tag), "send_tensors"):
        _send(listed, dst, group, tag, window)


def _checked_list(tensors: Sequence[torch.Tensor]) -> Listed:
    given = list(tensors)
    found = packing.plain(given, written=False)
    if found is not None:
        return found
    listed = [_checked(tensor, number) for number, tensor in enumerate(given)]
    devices = {tensor.device for tensor in listed}
    if len(devices) > 1:
        raise ValueError(
            f"sagellm send_tensors: the tensors are on {', '.join(map(str, devices))}, expected one device"
        )
    return Listed(listed, packing.described(listed), False)


def _send(listed: Listed, dst: int, group: Any, tag: int, window: int) -> None:
    for header in _headers(listed, window):
        dist.send(header, group_dst=dst, group=group, tag=tag)
    ours = moving.lists_of(group)
    on_cpu = listed.device.type == "cpu"
    begin = moving.sends(ours, listed, dst, group, tag) if on_cpu else moving.sends_packed(listed, dst, group, tag)
    moving.in_flight(moving.messages(listed.runs, ours, on_cpu, window), begin, window)


def _headers(listed: Listed, window: int) -> list[torch.Tensor]:
    """The messages that describe the list: one of HEADER_BYTES, and a second one if the description is longer."""
    if window < 1:
        raise ValueError(f"sagellm send_tensors: window is {window} bytes, expected 1 or more")
    described = [[packing.name(run.dtype), run.shape, run.number] for run in listed.runs]
    text = json.dumps([window, described], separators=(",", ":")).encode()
    if len(text) > MOST_BYTES:
        raise ValueError(
            f"sagellm send_tensors: the description of {len(listed.tensors)} tensors has {len(text)} bytes, expected "
            f"at most {MOST_BYTES}; send them in several calls"
        )
    whole = MAGIC + len(text).to_bytes(LENGTH_BYTES, "little") + text
    parts = [whole[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), whole[HEADER_BYTES:]]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8).to(listed.device) for part in parts if part]


def recv_tensors(
    src: int,
    group: Any = None,
    *,
    tag: int = 0,
    device: torch.device | str = "cpu",
    window: int = WINDOW,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Receives the tensors that rank ``src`` sends by ``send_tensors``, in new tensors on ``device`` or in ``out``.

    ``device`` must be of the same type as the sender's. The tensors of ``out`` must be dense and on one device, and no
    two elements may share memory (ValueError, before anything is received). ``out`` must have the shapes and dtypes of
    the sent tensors. Otherwise a ValueError says which tensor differs; the tensors are then received and dropped, so
    that later messages arrive. On a device the sender's ``window`` applies, because the sender has packed the messages
    by its own window. On the CPU, new tensors below 32 KiB of one dtype and shape share blocks of at most 1 MiB. A
    RuntimeError is raised if the first received message is not one of ``send_tensors``.

    Example::

        if dist.get_rank() == 0:
            torch_sagellm.send_tensors([torch.ones(2, 3)], dst=1)
        elif dist.get_rank() == 1:
            torch_sagellm.recv_tensors(src=0, out=[torch.empty(2, 3)])
    """
    given = None if out is None else _checked_out(out)
    with turns.one_after_the_other(_key("recv", group, src, tag), "recv_tensors"):
        return _recv(src, group, tag, torch.device(device), window, out, given)


def _recv(
    src: int,
    group: Any,
    tag: int,
    device: torch.device,
    window: int,
    out: Sequence[torch.Tensor] | None,
    given: Listed | None,
) -> list[torch.Tensor]:
    where = given.device if given and given.tensors else device
    packed_by, runs = _described(src, where, group, tag)
    wrong = _differs(runs, given) if given is not None else ""
    ours = moving.lists_of(group)
    on_cpu = where.type == "cpu"
    if given is None or wrong:
        given = _made(runs, where)
    begin = moving.receives(ours, given, src, group, tag) if on_cpu else moving.receives_packed(given, src, group, tag)
    moving.in_flight(moving.messages(runs, ours, on_cpu, packed_by), begin, window if on_cpu else packed_by)
    if wrong:
        raise ValueError(f"sagellm recv_tensors: {wrong}")
    return given.tensors if out is None else list(out)


def _described(src: int, where: torch.device, group: Any, tag: int) -> tuple[int, list[Run]]:
    """The sender's window, and dtype, shape and number of the tensors that follow; all lengths are checked."""
    first = _recv_bytes(HEADER_BYTES, where, src, group, tag)
    length = int.from_bytes(first[len(MAGIC) : PREFIX_BYTES], "little")
    if not first.startswith(MAGIC) or length > MOST_BYTES:
        raise RuntimeError(
            f"sagellm recv_tensors: rank {src} did not call send_tensors: what came from it with tag {tag} is another "
            "message, expected send_tensors of the same version on that rank, and a tag that no other send has"
        )
    end = PREFIX_BYTES + length
    rest = _recv_bytes(end - HEADER_BYTES, where, src, group, tag) if end > HEADER_BYTES else b""
    try:
        packed_by, described = json.loads((first + rest)[PREFIX_BYTES:end])
        runs = [
            Run(getattr(torch, dtype), tuple(int(side) for side in shape), int(count))
            for dtype, shape, count in described
        ]
        fine = packed_by >= 1 and all(
            run.number > 0 and min(run.shape, default=0) >= 0 and packing.travels(run.dtype) for run in runs
        )
        fine = fine and sum(run.nbytes * run.number for run in runs) < 1 << 47
        fine = fine and sum(run.number for run in runs) <= MOST_BYTES
    except (ValueError, TypeError, AttributeError):
        fine = False
    if not fine:
        raise RuntimeError(
            f"sagellm recv_tensors: the header that came from rank {src} with tag {tag} describes no tensors, expected "
            "one of send_tensors: it was damaged, or another send has this tag"
        )
    return packed_by, runs


def _made(runs: list[Run], where: torch.device) -> Listed:
    if where.type == "cpu":
        return Listed(packing.made(runs), runs, True)
    made = [torch.empty(run.shape, dtype=run.dtype, device=where) for run in runs for _ in range(run.number)]
    return Listed(made, runs, False)


def _checked(tensor: torch.Tensor, number: int) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"sagellm send_tensors: element {number} is a {type(tensor).__name__}, expected a tensor")
    checked_dense(f"send_tensors: element {number}", tensor)
    if not packing.travels(tensor.dtype):
        raise ValueError(
            f"sagellm send_tensors: element {number} is {tensor.dtype}, expected a dtype of whole bytes: send its "
            "numbers and what belongs to them as tensors"
        )
    return _unwrapped("send_tensors: element", number, tensor).detach().resolve_conj().resolve_neg()


def _unwrapped(what: str, number: int, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or the plain tensor that a subclass stands for: functional collectives return such a subclass."""
    if wraps(tensor):
        tensor = tensor.clone()
    if wraps(tensor):
        raise ValueError(
            f"sagellm {what} {number} is a {type(tensor).__name__}, which has its own __torch_dispatch__; pass the "
            "plain tensors that it stands for (of a DTensor, its to_local())"
        )
    return tensor


def _checked_out(out: Sequence[torch.Tensor]) -> Listed:
    if isinstance(out, torch.Tensor):
        raise TypeError("sagellm recv_tensors: out is a tensor, expected a list of tensors")
    given = list(out)
    found = packing.plain(given, written=True)
    if found is not None:
        return found
    for number, tensor in enumerate(given):
        what = f"recv_tensors: element {number} of out"
        checked_result(what, tensor)
        if wraps(tensor):
            raise ValueError(
                f"sagellm {what} is a {type(tensor).__name__}, which has its own __torch_dispatch__; expected a plain "
                "tensor"
            )
        checked_written(what, tensor)
    devices = {tensor.device for tensor in given}
    if len(devices) > 1:
        raise ValueError(
            f"sagellm recv_tensors: the tensors of out are on {', '.join(map(str, devices))}, expected one device"
        )
    shared = load.extension()._shared(given)
    if shared is not None:
        raise ValueError(
            f"sagellm recv_tensors: elements {shared[0]} and {shared[1]} of out share memory, which would be written "
            "twice; pass each piece of memory once"
        )
    listed = [tensor.detach() for tensor in given]
    return Listed(listed, packing.described(listed), False)


def _differs(came: list[Run], given: Listed) -> str:
    """Which tensor of ``out`` differs from the one received; empty if none differs."""
    if came == given.runs:
        return ""
    count = sum(run.number for run in came)
    if count != len(given.tensors):
        return f"{count} tensors came, and out has {len(given.tensors)}"
    number = 0
    for run in came:
        for tensor in given.tensors[number : number + run.number]:
            if tensor.dtype is not run.dtype or tensor.shape != run.shape:
                have = [packing.name(tensor.dtype), list(tensor.shape)]
                wanted = f"{packing.name(run.dtype)} of shape {list(run.shape)}"
                return f"tensor {number} is {wanted}, and out has {have[0]} of shape {have[1]}"
            number += 1
    return ""


def _recv_bytes(count: int, device: torch.device, src: int, group: Any, tag: int) -> bytes:
    into = bytearray(count)
    data = torch.frombuffer(into, dtype=torch.uint8)
    came = data if device.type == "cpu" else torch.empty_like(data, device=device)
    dist.recv(came, group_src=src, group=group, tag=tag)
    if came is not data:
        data.copy_(came)
    return bytes(into)


class PendingTransfer:
    """A list in flight; ``wait()`` returns what ``recv_tensors`` would, or an empty list at the sender.

    Example::

        if dist.get_rank() == 0:
            torch_sagellm.isend_tensors([torch.ones(2, 3)], dst=1).wait()
        elif dist.get_rank() == 1:
            (keys,) = torch_sagellm.irecv_tensors(src=0).wait()
    """

    def __init__(self, wait: Callable[[], list[torch.Tensor]], done: Callable[[], bool]) -> None:
        self._wait, self._done = wait, done

    def done(self) -> bool:
        """Whether the transfer has ended, with or without an error."""
        return self._done()

    def wait(self) -> list[torch.Tensor]:
        """Returns the received tensors after all have arrived.

        Raises the error of the transfer. May be called again.
        """
        return self._wait()


class _OnThread:
    """A transfer on a separate thread, after the earlier ones of the same ``key``."""

    def __init__(self, work: Callable[[], list[torch.Tensor]], key: turns.Key) -> None:
        self._work = work
        self._found: list[torch.Tensor] = []
        self._error: BaseException | None = None
        self._turn = turns.take(key)
        self.ended = self._turn.ended
        try:
            threading.Thread(target=self._run, name="sagellm-transfer", daemon=True).start()
        except BaseException:  # no thread could be started
            self._turn.end()
            raise

    def _run(self) -> None:
        try:
            self._turn.wait()
            self._found = self._work()
        except BaseException as error:  # raised by wait()
            self._error = error
        finally:
            self._turn.end()

    def wait(self) -> list[torch.Tensor]:
        self.ended.wait()  # each message has the group's deadline
        if self._error is not None:
            raise self._error
        return self._found


def _key(direction: str, group: Any, peer: int, tag: int) -> turns.Key:
    return direction, dist.group.WORLD if group is None else group, peer, tag


def isend_tensors(
    tensors: Sequence[torch.Tensor], dst: int, group: Any = None, *, tag: int = 0, window: int = WINDOW
) -> PendingTransfer:
    """Begins ``send_tensors`` for tensors on the CPU (ValueError), which must not change until its end.

    Lists to the same rank with the same tag are sent one after the other, in the order of the calls. On a sagellm group
    the call itself begins all messages of a list of at most ``window`` bytes, and raises the error of a group that has
    failed. Otherwise a separate thread sends the list, and ``wait()`` raises its errors.

    Example::

        if dist.get_rank() == 0:
            sending = torch_sagellm.isend_tensors([torch.ones(2, 3)], dst=1)
            sending.wait()  # after other work
        elif dist.get_rank() == 1:
            torch_sagellm.recv_tensors(src=0)
    """
    if isinstance(tensors, torch.Tensor):
        raise TypeError("sagellm isend_tensors: got a tensor, expected a list of tensors")
    listed = _checked_list(tensors)
    if listed.device.type != "cpu":
        raise ValueError(f"sagellm isend_tensors: the tensors are on {listed.device}, expected cpu")
    if window < 1:
        raise ValueError(f"sagellm isend_tensors: window is {window} bytes, expected 1 or more")
    key = _key("send", group, dst, tag)
    ours = moving.lists_of(group)
    fits = sum(run.nbytes * run.number for run in listed.runs) <= window
    turn = turns.take_if_free(key) if fits and ours is not None else None
    if turn is not None:
        try:
            return _begun(ours, listed, dst, group, tag, window)
        finally:
            turn.end()

    def work() -> list[torch.Tensor]:
        _send(listed, dst, group, tag, window)
        return []

    thread = _OnThread(work, key)
    return PendingTransfer(thread.wait, thread.ended.is_set)


def _begun(ours: Any, listed: Listed, dst: int, group: Any, tag: int, window: int) -> PendingTransfer:
    """Begins all messages of a list; they end without a further call."""
    works: list[Any] = [dist.isend(each, group_dst=dst, group=group, tag=tag) for each in _headers(listed, window)]
    works += map(moving.sends(ours, listed, dst, group, tag), moving.messages(listed.runs, ours, True, window))

    def wait() -> list[torch.Tensor]:
        for work in works:
            work.wait()
        works.clear()  # and so drop the tensors
        return []

    return PendingTransfer(wait, lambda: all(work.is_completed() for work in works))


def irecv_tensors(
    src: int,
    group: Any = None,
    *,
    tag: int = 0,
    window: int = WINDOW,
    out: Sequence[torch.Tensor] | None = None,
) -> PendingTransfer:
    """``recv_tensors`` on a separate thread, for tensors on the CPU (ValueError if ``out`` is elsewhere).

    Example::

        if dist.get_rank() == 0:
            torch_sagellm.send_tensors([torch.ones(2, 3)], dst=1)
        elif dist.get_rank() == 1:
            coming = torch_sagellm.irecv_tensors(src=0)
            (keys,) = coming.wait()  # after other work
    """
    given = None if out is None else _checked_out(out)
    if given and given.device.type != "cpu":
        raise ValueError(f"sagellm irecv_tensors: the tensors of out are on {given.device}, expected cpu")
    where = torch.device("cpu")
    thread = _OnThread(lambda: _recv(src, group, tag, where, window, out, given), _key("recv", group, src, tag))
    return PendingTransfer(thread.wait, thread.ended.is_set)
