"""Sends lists of tensors from one rank to another, such as a key-value cache between prefill and decode."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_sagellm._private import groups, load
from torch_sagellm.api.arguments import checked_dense, checked_result, checked_written
from torch_sagellm.parallel import packing
from torch_sagellm.parallel.packing import Listed, Message, Run

#: The first message has HEADER_BYTES: MAGIC (its digit is the version), the length of the description in LENGTH_BYTES,
#: and the beginning of the description.
MAGIC = b"sagetns2"
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
    at most 4 MiB, or one larger tensor, and tensors are sent from where they are. On a device, and on another backend
    for tensors below 32 KiB, a message is packed. Only the two ranks take part. It returns when the tensors' memory may
    be changed. All tensors must be dense, have data and a dtype of whole bytes, and be on one device (ValueError,
    before anything is sent).

    Example::

        if dist.get_rank() == 0:
            torch_sagellm.send_tensors([torch.ones(2, 3), torch.arange(5)], dst=1)
        elif dist.get_rank() == 1:
            keys, numbers = torch_sagellm.recv_tensors(src=0)
    """
    if isinstance(tensors, torch.Tensor):
        raise TypeError("sagellm send_tensors: got a tensor, expected a list of tensors")
    _wait_for_earlier(("send", group, dst, tag))
    _send(_checked_list(tensors), dst, group, tag, window)


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
    _send_bytes(whole[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), listed.device, dst, group, tag)
    if len(whole) > HEADER_BYTES:
        _send_bytes(whole[HEADER_BYTES:], listed.device, dst, group, tag)
    ours = _lists_of(group)
    on_cpu = listed.device.type == "cpu"
    begin = _sends(ours, listed, dst, group, tag) if on_cpu else _sends_packed(listed, dst, group, tag)
    _in_flight(_messages(listed.runs, ours, on_cpu, window), begin, window)


def _lists_of(group: Any) -> Any:
    """The backend of the group if it sends a list of CPU tensors as one message without packing it, else None."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    ours = groups.backend_of(dist.group.WORLD if group is None else group)
    return None if ours is None or ours.delegate_reason else ours


def _messages(runs: list[Run], ours: Any, on_cpu: bool, window: int) -> Iterator[Message]:
    """Cuts the list for the sender's window. Half of it is the largest message, so that two are in flight."""
    most = max(1, window // 2)
    if on_cpu:
        most = min(most, packing.PACK if ours is None else packing.JOINED)
    return packing.messages(runs, most, ours is not None or not on_cpu)


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
    the sent tensors. Otherwise a ValueError says which differs; the tensors are then received and dropped, so that
    later messages arrive. On a device the sender's ``window`` applies, because the sender has packed the messages by
    it. On the CPU, equal new tensors below 32 KiB are parts of one memory block of at most 1 MiB. If the first received
    message is not a message of ``send_tensors``, it raises a RuntimeError.

    Example::

        if dist.get_rank() == 0:
            torch_sagellm.send_tensors([torch.ones(2, 3)], dst=1)
        elif dist.get_rank() == 1:
            torch_sagellm.recv_tensors(src=0, out=[torch.empty(2, 3)])
    """
    _wait_for_earlier(("recv", group, src, tag))
    given = None if out is None else _checked_out(out)
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
    ours = _lists_of(group)
    on_cpu = where.type == "cpu"
    if given is None or wrong:
        given = _made(runs, where)
    begin = _receives(ours, given, src, group, tag) if on_cpu else _receives_packed(given, src, group, tag)
    _in_flight(_messages(runs, ours, on_cpu, packed_by), begin, window if on_cpu else packed_by)
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


#: Begins a message and returns a function that waits for its end.
Begin = Callable[[Message], Any]


def _in_flight(messages: Iterable[Message], begin: Begin, window: int) -> None:
    """Sends or receives messages in order, with at most ``window`` bytes (or one message) in flight."""
    under_way: deque[tuple[int, Callable[[], Any]]] = deque()
    flying = 0
    for message in messages:
        while under_way and flying + message.nbytes > window:
            nbytes, end = under_way.popleft()
            end()
            flying -= nbytes
        under_way.append((message.nbytes, begin(message)))
        flying += message.nbytes
    for _, end in under_way:
        end()


def _sends(ours: Any, listed: Listed, dst: int, group: Any, tag: int) -> Begin:
    """Sends CPU tensors: on our backend, unless they are tiny, from where they are; otherwise packed."""

    def begin(message: Message) -> Any:
        if _goes_as_list(ours, listed, message):
            return ours._send_list(listed.tensors, message.begin, message.end, dst, tag).wait
        return dist.isend(packing.packed(listed, message), group_dst=dst, group=group, tag=tag).wait

    return begin


def _receives(ours: Any, given: Listed, src: int, group: Any, tag: int) -> Begin:
    """Receives what ``_sends`` sends into CPU tensors."""

    def begin(message: Message) -> Any:
        if _goes_as_list(ours, given, message):
            return ours._recv_list(given.tensors, message.begin, message.end, src, tag).wait
        whole = packing.room(given, message)
        work = dist.irecv(whole, group_src=src, group=group, tag=tag)

        def end() -> None:
            work.wait()
            packing.unpack(given, message, whole)

        return end

    return begin


def _goes_as_list(ours: Any, listed: Listed, message: Message) -> bool:
    """Whether one call takes the tensors of a message. Tensors that the extension cannot pack are never packed."""
    return ours is not None and not (listed.plain and message.is_tiny)


def _sends_packed(listed: Listed, dst: int, group: Any, tag: int) -> Begin:
    """Sends tensors on a device, packed into one message.

    ``batch_isend_irecv`` would use the communicator of all ranks, which its first call creates only after all ranks
    have called. A single message needs only the communicator of its two ranks.
    """

    def begin(message: Message) -> Any:
        parts = [each for each in listed.tensors[message.begin : message.end] if each.nbytes]
        whole = parts[0]
        if len(parts) > 1:
            whole = torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in parts])
        return dist.isend(whole, group_dst=dst, group=group, tag=tag).wait

    return begin


def _receives_packed(made: Listed, src: int, group: Any, tag: int) -> Begin:
    """Receives a message of ``_sends_packed`` and unpacks it."""

    def begin(message: Message) -> Any:
        parts = [each for each in made.tensors[message.begin : message.end] if each.nbytes]
        whole = parts[0]
        if len(parts) > 1:
            whole = torch.empty(message.nbytes, dtype=torch.uint8, device=whole.device)
        work = dist.irecv(whole, group_src=src, group=group, tag=tag)

        def end() -> None:
            work.wait()
            if len(parts) > 1:
                _unpack_on_device(whole, parts)

        return end

    return begin


def _unpack_on_device(whole: torch.Tensor, parts: list[torch.Tensor]) -> None:
    with torch.inference_mode():  # every tensor may be written in this mode
        for each, part in zip(parts, whole.split([each.nbytes for each in parts]), strict=True):
            dense = each if each.is_contiguous() else torch.empty(each.shape, dtype=each.dtype, device=each.device)
            dense.view(-1).view(torch.uint8).copy_(part)
            if dense is not each:
                each.copy_(dense)


def _checked(tensor: torch.Tensor, number: int) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"sagellm send_tensors: element {number} is a {type(tensor).__name__}, expected a tensor")
    checked_dense(f"send_tensors: element {number}", tensor)
    if not packing.travels(tensor.dtype):
        raise ValueError(
            f"sagellm send_tensors: element {number} is {tensor.dtype}, expected a dtype of whole bytes: send its "
            "numbers and what belongs to them as tensors"
        )
    return tensor.detach().resolve_conj().resolve_neg()


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


def _send_bytes(data: bytes, device: torch.device, dst: int, group: Any, tag: int) -> None:
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), group_dst=dst, group=group, tag=tag)


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

    def __init__(self, work: Callable[[], list[torch.Tensor]], key: tuple[Any, ...]) -> None:
        self._work, self._key = work, key
        self._ended = threading.Event()
        self._found: list[torch.Tensor] = []
        self._error: BaseException | None = None
        with _lock:
            self._earlier, _latest[key] = _latest.get(key), self
        threading.Thread(target=self._run, name="sagellm-transfer", daemon=True).start()

    def _run(self) -> None:
        try:
            if self._earlier is not None:
                self._earlier._ended.wait()
            self._found = self._work()
        except BaseException as error:  # raised by wait()
            self._error = error
        finally:
            self._earlier = None
            with _lock:
                if _latest.get(self._key) is self:
                    del _latest[self._key]
            self._ended.set()

    def done(self) -> bool:
        """Whether the transfer has ended, with or without an error."""
        return self._ended.is_set()

    def wait(self) -> list[torch.Tensor]:
        """Returns the received tensors after all have arrived.

        Raises the error of the transfer. May be called again.
        """
        self._ended.wait()  # each message has the group's deadline
        if self._error is not None:
            raise self._error
        return self._found


_lock = threading.Lock()
#: The last transfer in flight between two ranks with one tag. Messages of two lists must not mix, so each transfer
#: waits for the one before it.
_latest: dict[tuple[Any, ...], PendingTransfer] = {}


def _wait_for_earlier(key: tuple[Any, ...]) -> None:
    with _lock:
        earlier = _latest.get(key)
    if earlier is not None:
        earlier._ended.wait()


def isend_tensors(
    tensors: Sequence[torch.Tensor], dst: int, group: Any = None, *, tag: int = 0, window: int = WINDOW
) -> PendingTransfer:
    """``send_tensors`` on a separate thread, for tensors on the CPU (ValueError), which must not change until its end.

    Lists to the same rank with the same tag are sent one after the other, in the order of the calls.

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

    def work() -> list[torch.Tensor]:
        _send(listed, dst, group, tag, window)
        return []

    return PendingTransfer(work, ("send", group, dst, tag))


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
    return PendingTransfer(lambda: _recv(src, group, tag, where, window, out, given), ("recv", group, src, tag))
