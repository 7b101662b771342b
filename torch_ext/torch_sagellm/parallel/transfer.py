"""Lists of tensors from one rank to another, such as a cache of keys and values between prefill and decode."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from torch_sagellm.api.arguments import checked_dense, checked_result, checked_written

#: The first message: these bytes (their digit is the version), the length of the description, as much of that as fits.
MAGIC = b"sagetns2"
HEADER_BYTES = 4096
LENGTH_BYTES = 8
PREFIX_BYTES = len(MAGIC) + LENGTH_BYTES
#: The longest description: of two million tensors that all differ. Nobody makes more room for what a message claims.
MOST_BYTES = 64 << 20
#: On the CPU tensors of fewer bytes than the first travel together, in messages of at most the second.
SMALL, PACK = 32 << 10, 1 << 20
#: A tensor, or what a header says of one: it has ``nbytes`` and ``dtype``.
Sized = TypeVar("Sized", torch.Tensor, "_Coming")
#: Bytes that are under way at most, unless the caller says otherwise; a larger tensor travels alone.
WINDOW = 64 << 20


def send_tensors(
    tensors: Sequence[torch.Tensor], dst: int, group: Any = None, *, tag: int = 0, window: int = WINDOW
) -> None:
    """Sends a list of tensors of any shapes and dtypes to rank ``dst`` of the group, which calls ``recv_tensors``.

    One header describes all of them; then they follow in batches, at most ``window`` bytes at a time: a receiver that
    is slow holds the sender back instead of filling memory. Small tensors of one dtype that follow each other are
    packed into one message; on a device all tensors of a batch are, and only the two ranks take part. Returns when
    their memory may be used again. All tensors are dense, have data, a dtype with whole bytes, and are on one device
    (ValueError, before anything is sent).

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


def _checked_list(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    listed = [_checked(tensor, number) for number, tensor in enumerate(tensors)]
    devices = {tensor.device for tensor in listed}
    if len(devices) > 1:
        raise ValueError(
            f"sagellm send_tensors: the tensors are on {', '.join(map(str, devices))}, expected one device"
        )
    return listed


def _send(listed: list[torch.Tensor], dst: int, group: Any, tag: int, window: int) -> None:
    if window < 1:
        raise ValueError(f"sagellm send_tensors: window is {window} bytes, expected 1 or more")
    # Equal tensors that follow each other are one entry with their number.
    runs = groupby(listed, key=lambda tensor: (tensor.dtype, tensor.shape))
    described = [[_name(dtype), list(shape), sum(1 for _ in run)] for (dtype, shape), run in runs]
    text = json.dumps([window, described], separators=(",", ":")).encode()
    if len(text) > MOST_BYTES:
        raise ValueError(
            f"sagellm send_tensors: the description of {len(listed)} tensors has {len(text)} bytes, expected at most "
            f"{MOST_BYTES}; send them in several calls"
        )
    whole = MAGIC + len(text).to_bytes(LENGTH_BYTES, "little") + text
    device = listed[0].device if listed else torch.device("cpu")
    _send_bytes(whole[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), device, dst, group, tag)
    if len(whole) > HEADER_BYTES:
        _send_bytes(whole[HEADER_BYTES:], device, dst, group, tag)
    _in_batches(dist.isend, listed, dst, group, tag, window, window)


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
    arrive. On a device the sender's ``window`` applies: the sender has packed the messages by it. New tensors that came
    in one message lie in one piece of memory, of at most 1 MiB on the CPU. Where the first message that comes is not
    one of ``send_tensors``, a RuntimeError says so.

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
    given: list[torch.Tensor] | None,
) -> list[torch.Tensor]:
    where = given[0].device if given else device
    packed_by, described = _described(src, where, group, tag)
    wrong = _differs(described, given) if given is not None else ""
    made = _made(described, where, packed_by) if given is None or wrong else given
    _in_batches(dist.irecv, made, src, group, tag, window if where.type == "cpu" else packed_by, packed_by)
    if wrong:
        raise ValueError(f"sagellm recv_tensors: {wrong}")
    return made if out is None else list(out)


def _described(src: int, where: torch.device, group: Any, tag: int) -> tuple[int, list[Any]]:
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
        runs = [(dtype, [int(side) for side in shape], int(count)) for dtype, shape, count in described]
        fine = packed_by >= 1 and all(
            count > 0 and min(shape, default=0) >= 0 and _travels(getattr(torch, dtype)) for dtype, shape, count in runs
        )
        total = sum(prod(shape) * getattr(torch, dtype).itemsize * count for dtype, shape, count in runs)
        fine = fine and total < 1 << 47 and sum(count for *_, count in runs) <= MOST_BYTES
    except (ValueError, TypeError, AttributeError):
        fine = False
    if not fine:
        raise RuntimeError(
            f"sagellm recv_tensors: the header that came from rank {src} with tag {tag} describes no tensors, expected "
            "one of send_tensors: it was damaged, or another send has this tag"
        )
    return packed_by, runs


def _made(described: list[Any], where: torch.device, packed_by: int) -> list[torch.Tensor]:
    """New tensors. Those that come in one message on the CPU are parts of one buffer, so that nothing is unpacked."""
    if where.type != "cpu":
        return [
            torch.empty(shape, dtype=getattr(torch, dtype), device=where)
            for dtype, shape, count in described
            for _ in range(count)
        ]
    every: list[_Coming] = []
    for dtype, shape, count in described:
        wanted = getattr(torch, dtype)
        every += [_Coming(wanted, torch.Size(shape), prod(shape), prod(shape) * wanted.itemsize)] * count
    made: list[torch.Tensor] = []
    # Those without data get no message, and so they do not cut one.
    for run in _messages([each for each in every if each.nbytes], min(PACK, max(1, packed_by // 2)), True):
        flat = torch.empty(sum(each.numel for each in run), dtype=run[0].dtype)
        if all(each is run[0] for each in run):
            parts: Sequence[torch.Tensor] = flat.view(len(run), *run[0].shape).unbind(0)
        else:
            parts = [part.view(each.shape) for part, each in zip(flat.split([e.numel for e in run]), run, strict=True)]
        made += [part.detach() for part in parts]  # tensors of their own to autograd
    rest = iter(made)
    return [next(rest) if each.nbytes else torch.empty(each.shape, dtype=each.dtype) for each in every]


class _Coming(NamedTuple):
    """A tensor of a header."""

    dtype: torch.dtype
    shape: torch.Size
    numel: int
    nbytes: int


def _in_batches(
    start: Any, tensors: Sequence[torch.Tensor], peer: int, group: Any, tag: int, window: int, packed_by: int
) -> None:
    """Sends or receives all tensors in batches of at most half of ``window`` bytes (or one message), two under way."""
    under_way: deque[Callable[[], None]] = deque()
    filled = [tensor for tensor in tensors if tensor.nbytes]  # the others are whole without a message
    on_cpu = bool(filled) and filled[0].is_cpu
    most = min(PACK, max(1, packed_by // 2)) if on_cpu else max(1, window // 2)
    messages = _messages(filled, most, on_cpu)
    for batch in _batches(messages, max(1, window // 2)) if on_cpu else ([each] for each in messages):
        if len(under_way) == 2:
            under_way.popleft()()
        under_way.append(
            _together(start, batch, peer, group, tag) if on_cpu else _packed(start, batch[0], peer, group, tag)
        )
    for end in under_way:
        end()


def _messages(tensors: Sequence[Sized], most: int, on_cpu: bool) -> Iterator[list[Sized]]:
    """The tensors of each message: on the CPU small ones of one dtype that follow each other, on a device as they come.

    Both ranks cut by the same rule, which sees shapes and dtypes alone.
    """
    message: list[Sized] = []
    nbytes = 0
    for tensor in tensors:
        size = tensor.nbytes
        if message and (
            nbytes + size > most
            or (on_cpu and (max(size, message[-1].nbytes) >= SMALL or tensor.dtype is not message[0].dtype))
        ):
            yield message
            message, nbytes = [], 0
        message.append(tensor)
        nbytes += size
    if message:
        yield message


def _together(start: Any, batch: list[list[torch.Tensor]], peer: int, group: Any, tag: int) -> Callable[[], None]:
    """Begins the messages of a batch on the CPU; returns what waits for all and unpacks what came."""
    sends = start is dist.isend
    unpack: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    messages = []
    for run in batch:
        if len(run) == 1:
            whole = run[0]
        elif sends:
            whole = _flatten_dense_tensors(run)
        elif _is_one_piece(run):
            whole = torch.as_strided(run[0], (sum(each.numel() for each in run),), (1,))
        else:
            whole = torch.empty(sum(each.numel() for each in run), dtype=run[0].dtype)
            unpack.append((whole, run))
        messages.append(dist.P2POp(start, whole, group=group, tag=tag, group_peer=peer))
    works = dist.batch_isend_irecv(messages)

    def end() -> None:
        for work in works:
            work.wait()
        with torch.inference_mode():  # in which every tensor may be written
            for whole, run in unpack:
                torch._foreach_copy_(run, list(_unflatten_dense_tensors(whole, run)))

    return end


def _is_one_piece(run: list[torch.Tensor]) -> bool:
    """Whether the tensors lie one behind the other in one allocation, as ``_made`` makes them."""
    storage, at = run[0].untyped_storage().data_ptr(), run[0].data_ptr()
    for each in run:
        if each.data_ptr() != at or not each.is_contiguous() or each.untyped_storage().data_ptr() != storage:
            return False
        at += each.nbytes
    return True


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


def _batches(messages: Iterator[list[torch.Tensor]], most: int) -> Iterator[list[list[torch.Tensor]]]:
    batch: list[list[torch.Tensor]] = []
    nbytes = 0
    for message in messages:
        size = sum(each.nbytes for each in message)
        if batch and nbytes + size > most:
            yield batch
            batch, nbytes = [], 0
        batch.append(message)
        nbytes += size
    if batch:
        yield batch


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _travels(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype are whole bytes without further data, unlike those of quantised tensors."""
    if _name(dtype).startswith(("q", "float4", "bits")):
        return False
    if dtype.is_complex:  # torch warns of some that are made
        return True
    try:
        return bool(torch.empty(2, dtype=dtype).view(torch.uint8).numel() == 2 * dtype.itemsize)
    except (RuntimeError, TypeError):
        return False


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether nothing can be wrong with it, as with nearly all: quick, because there may be thousands."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and _travels(tensor.dtype)
    )


def _checked(tensor: torch.Tensor, number: int) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"sagellm send_tensors: element {number} is a {type(tensor).__name__}, expected a tensor")
    if _is_plain(tensor):
        return tensor.detach()
    checked_dense(f"send_tensors: element {number}", tensor)
    if not _travels(tensor.dtype):
        raise ValueError(
            f"sagellm send_tensors: element {number} is {tensor.dtype}, expected a dtype of whole bytes: send its "
            "numbers and what belongs to them as tensors"
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _checked_out(out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        raise TypeError("sagellm recv_tensors: out is a tensor, expected a list of tensors")
    for number, tensor in enumerate(out):
        if _is_plain(tensor) and not tensor.requires_grad:
            continue
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
    came = sum(count for *_, count in described)
    if came != len(out):
        return f"{came} tensors came, and out has {len(out)}"
    number = 0
    for dtype, shape, count in described:
        wanted, size = getattr(torch, dtype), torch.Size(shape)
        for tensor in out[number : number + count]:
            if tensor.dtype is not wanted or tensor.shape != size:
                have = [_name(tensor.dtype), list(tensor.shape)]
                return f"tensor {number} is {dtype} of shape {shape}, and out has {have[0]} of shape {have[1]}"
            number += 1
    return ""


def _send_bytes(data: bytes, device: torch.device, dst: int, group: Any, tag: int) -> None:
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), group_dst=dst, group=group, tag=tag)


def _recv_bytes(count: int, device: torch.device, src: int, group: Any, tag: int) -> bytes:
    data = torch.empty(count, dtype=torch.uint8, device=device)
    dist.recv(data, group_src=src, group=group, tag=tag)
    return bytes(data.tolist())


class PendingTransfer:
    """A list that is under way; ``wait()`` returns what ``recv_tensors`` would, and an empty list where it is sent.

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
        except BaseException as error:  # wait() raises it
            self._error = error
        finally:
            self._earlier = None
            with _lock:
                if _latest.get(self._key) is self:
                    del _latest[self._key]
            self._ended.set()

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._ended.is_set()

    def wait(self) -> list[torch.Tensor]:
        """The tensors that came, when all have; raises what the transfer raised. May be called again."""
        self._ended.wait()  # each message has the group's deadline
        if self._error is not None:
            raise self._error
        return self._found


_lock = threading.Lock()
#: The last transfer under way between two ranks with one tag: messages of two lists must not mix, so each waits for the
#: one before it.
_latest: dict[tuple[Any, ...], PendingTransfer] = {}


def _wait_for_earlier(key: tuple[Any, ...]) -> None:
    with _lock:
        earlier = _latest.get(key)
    if earlier is not None:
        earlier._ended.wait()


def isend_tensors(
    tensors: Sequence[torch.Tensor], dst: int, group: Any = None, *, tag: int = 0, window: int = WINDOW
) -> PendingTransfer:
    """``send_tensors`` on a thread of its own, for tensors on the CPU (ValueError): they must not change until its end.

    Lists to the same rank with the same tag follow each other in the order of the calls.

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
    if any(not each.is_cpu for each in listed):
        raise ValueError(f"sagellm isend_tensors: the tensors are on {listed[0].device}, expected cpu")
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
    """``recv_tensors`` on a thread of its own, for tensors on the CPU (ValueError for ``out`` elsewhere).

    Example::

        if dist.get_rank() == 0:
            torch_sagellm.send_tensors([torch.ones(2, 3)], dst=1)
        elif dist.get_rank() == 1:
            coming = torch_sagellm.irecv_tensors(src=0)
            (keys,) = coming.wait()  # after other work
    """
    given = None if out is None else _checked_out(out)
    if given and not given[0].is_cpu:
        raise ValueError(f"sagellm irecv_tensors: the tensors of out are on {given[0].device}, expected cpu")
    where = torch.device("cpu")
    return PendingTransfer(lambda: _recv(src, group, tag, where, window, out, given), ("recv", group, src, tag))
