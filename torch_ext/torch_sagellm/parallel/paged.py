"""Sends pages of a paged key-value cache to another rank, with a block table on each side, layer by layer."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_sagellm.api.arguments import checked_dense, checked_written, wraps
from torch_sagellm.parallel import moving, packing
from torch_sagellm.parallel.transfer import WINDOW

#: The header before each layer has HEADER_BYTES. It begins with MAGIC; a description of the layer follows.
MAGIC = b"sagepgs1"
HEADER_BYTES = 256


def send_pages(
    layers: Iterable[Tensor],
    blocks: Sequence[int] | Tensor,
    dst: int,
    group: Any = None,
    *,
    tag: int = 0,
    window: int = WINDOW,
) -> None:
    """Sends the pages ``blocks`` of a cache, layer by layer, to rank ``dst``, which calls ``recv_pages``.

    A layer is a tensor on the CPU whose first dimension counts pages; keys and values may be two layers, or one layer
    with both in a page. ``layers`` may be a generator that computes: a layer is sent when it is yielded, and the next
    layer is requested while this one is in flight. At most ``window`` bytes are in flight, so a slow receiver delays
    the generator. Pages are sent from their memory; if a page has less than 1 KiB, or the layer is not contiguous, the
    pages are copied together first. The function returns when all pages may be changed again; until then, pages in
    flight must not change.

    If a layer is not dense or not on the CPU, or has no page for a block, it raises a ValueError before it sends the
    layer. If a layer is not a tensor, it raises a TypeError.

    Example::

        cache = torch.zeros(2, 16, 4, 8)  # layers, pages, tokens of a page, size
        if dist.get_rank() == 0:
            torch_sagellm.send_pages(cache.unbind(0), [3, 4, 9], dst=1)
        elif dist.get_rank() == 1:
            torch_sagellm.recv_pages(cache.unbind(0), [0, 7, 2], src=0)
    """
    if window < 1:
        raise ValueError(f"sagellm send_pages: window is {window} bytes, expected 1 or more")
    table = _table("send_pages", blocks)
    ours = moving.lists_of(group)
    under_way: deque[Callable[[], None]] = deque()

    def begin(work: Callable[[], Any]) -> None:
        if len(under_way) == 2:
            under_way.popleft()()
        under_way.append(work().wait)

    def send(data: Tensor) -> None:
        begin(lambda: dist.isend(data, group_dst=dst, group=group, tag=tag))

    def send_part(layer: Tensor, part: Tensor) -> None:
        if _is_in_place(ours, layer):
            begin(lambda: ours._send_rows(layer, part, dst, tag))
        else:
            send(_together(layer, part))

    number = 0
    try:
        for number, layer in enumerate(layers, 1):
            _check("send_pages", number - 1, layer, table)
            send(_header([packing.name(layer.dtype), list(layer.shape[1:]), len(table), window]))
            for part in _parts(table, layer, window):
                send_part(layer.detach(), part)
        send(_header(number))
    except BaseException:
        send(_header(-1))  # the receiver then expects no more layers
        raise
    finally:
        # Operations in flight read the caller's memory, so wait for them.
        for end in under_way:
            end()


def recv_pages(
    layers: Sequence[Tensor],
    blocks: Sequence[int] | Tensor,
    src: int,
    group: Any = None,
    *,
    tag: int = 0,
    ready: Callable[[int], None] | None = None,
) -> None:
    """Receives the pages that rank ``src`` sends by ``send_pages`` into the pages ``blocks`` of ``layers``.

    The sender's first page is stored in the first of ``blocks``, and so on. The two sides' numbers may differ; each
    number may occur once on this side. ``ready(n)`` is called when layer n has been received, so that this layer can be
    used while the next ones are in flight.

    It raises a ValueError if the sender has other layers, pages or types. Even then it receives everything, so that
    later messages arrive. It stores neither the layer that differs nor later layers. It raises a RuntimeError if the
    sender has stopped with an error, or if the data from ``src`` is not a message of ``send_pages``.

    Example::

        cache, usable = torch.zeros(2, 16, 4, 8), []
        if dist.get_rank() == 0:
            torch_sagellm.send_pages(cache.unbind(0), range(8), dst=1)
        elif dist.get_rank() == 1:
            torch_sagellm.recv_pages(cache.unbind(0), range(8), src=0, ready=usable.append)
    """
    table = _table("recv_pages", blocks)
    if len(table.unique()) < len(table):
        raise ValueError("sagellm recv_pages: blocks names a page twice, expected each once")
    for number, layer in enumerate(layers):
        _check("recv_pages", number, layer, table)
        checked_written(f"recv_pages: layer {number}", layer)
    wrong = ""
    number = 0
    while not isinstance(came := _described(src, group, tag), int):
        dtype, shape, count, window = came
        layer = layers[number] if number < len(layers) else None
        expected = None if layer is None else (layer.dtype, list(layer.shape[1:]), len(table))
        if not wrong and layer is not None and (dtype, shape, count) != expected:
            have = f"{len(table)} pages of {list(layer.shape[1:])} of {packing.name(layer.dtype)}"
            wrong = f"layer {number} is {count} pages of {shape} of {packing.name(dtype)}, expected {have}"
        if layer is None or wrong:
            layer, places = torch.empty((count, *shape), dtype=dtype), torch.arange(count)
        else:
            places = table
        _receive(layer.detach(), places, src, group, tag, window)
        if not wrong and number < len(layers) and ready is not None:
            ready(number)
        number += 1
    if not wrong and number != len(layers):
        wrong = f"{number} layers came, expected {len(layers)}"
    if wrong:
        raise ValueError(f"sagellm recv_pages: {wrong}")


def _table(call: str, blocks: Sequence[int] | Tensor) -> Tensor:
    table = torch.as_tensor(list(blocks) if isinstance(blocks, range) else blocks).cpu()
    if not table.numel():
        table = table.long()
    if table.dim() != 1 or table.is_floating_point() or table.is_complex() or table.dtype is torch.bool:
        raise ValueError(
            f"sagellm {call}: blocks are {table.dtype} of shape {list(table.shape)}, expected a list of page numbers"
        )
    return (table.clone() if wraps(table) else table).long().contiguous()


def _check(call: str, number: int, layer: Tensor, table: Tensor) -> None:
    if not isinstance(layer, Tensor):
        raise TypeError(f"sagellm {call}: layer {number} is a {type(layer).__name__}, expected a tensor")
    checked_dense(f"{call}: layer {number}", layer)
    if wraps(layer):
        raise ValueError(
            f"sagellm {call}: layer {number} is a {type(layer).__name__}, which has its own __torch_dispatch__, "
            "expected a plain tensor (of a DTensor, its to_local())"
        )
    if not layer.is_cpu or layer.dim() < 1 or not packing.travels(layer.dtype):
        raise ValueError(
            f"sagellm {call}: layer {number} is {layer.dtype} of shape {list(layer.shape)} on {layer.device}, expected "
            "pages of whole bytes on cpu"
        )
    if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < len(layer):
        raise ValueError(
            f"sagellm {call}: blocks from {int(table.min())} to {int(table.max())}, and layer {number} has pages 0 to "
            f"{len(layer) - 1}"
        )


def _parts(table: Tensor, layer: Tensor, window: int) -> Iterator[Tensor]:
    """The blocks of each message: at most half of the window, or one page. Both ranks cut by this rule."""
    size = layer[:1].numel() * layer.element_size() if len(layer) else 0
    if size and len(table):
        yield from table.split(max(1, window // 2 // size))


def _follow(part: Tensor) -> bool:
    first = int(part[0])
    return int(part[-1]) - first + 1 == len(part) and torch.equal(part, torch.arange(first, first + len(part)))


def _is_plain(layer: Tensor) -> bool:
    """Whether the bytes of the layer are its numbers, page after page.

    A view that is conjugated or negated when it is read must not be passed: torch would refuse it, or pass a copy to
    the backend.
    """
    return layer.is_contiguous() and not (layer.is_conj() or layer.is_neg())


def _is_in_place(ours: Any, layer: Tensor) -> bool:
    """Whether one call takes the pages of a message from where they are, or to where they belong.

    The bytes of the message are the same either way, so each side decides for itself. Tiny pages are copied together.
    """
    return ours is not None and _is_plain(layer) and layer[:1].nbytes >= packing.TINY


def _together(layer: Tensor, part: Tensor) -> Tensor:
    """The pages of a message in contiguous memory; not copied if their numbers are consecutive."""
    if _follow(part):
        return layer[int(part[0]) : int(part[0]) + len(part)].resolve_conj().resolve_neg().contiguous()
    return layer.index_select(0, part).resolve_conj().resolve_neg().contiguous()


def _receive(layer: Tensor, table: Tensor, src: int, group: Any, tag: int, window: int) -> None:
    """Receives the pages of a layer, with two messages in flight."""
    under_way: deque[tuple[Any, Tensor, Tensor | None]] = deque()

    def end() -> None:
        work, data, part = under_way.popleft()
        work.wait()
        if part is not None:
            with torch.inference_mode():  # every tensor may be written in this mode
                layer.index_copy_(0, part, data)

    ours = moving.lists_of(group)
    in_place, plain = _is_in_place(ours, layer), _is_plain(layer)
    for part in _parts(table, layer, window):
        if len(under_way) == 2:
            end()
        if in_place:
            under_way.append((ours._recv_rows(layer, part, src, tag), layer, None))
            continue
        direct = plain and _follow(part)
        if direct:
            data = layer[int(part[0]) : int(part[0]) + len(part)]
        else:
            data = torch.empty((len(part), *layer.shape[1:]), dtype=layer.dtype)
        work = dist.irecv(data, group_src=src, group=group, tag=tag)
        under_way.append((work, data, None if direct else part))
    while under_way:
        end()


def _header(what: Any) -> Tensor:
    """The header: a description of the layer that follows or, after the last layer, the number of layers."""
    text = MAGIC + json.dumps(what, separators=(",", ":")).encode()
    if len(text) > HEADER_BYTES:
        raise ValueError(f"sagellm send_pages: a page of {what[1]} has too many dimensions to be described")
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def _described(src: int, group: Any, tag: int) -> int | tuple[torch.dtype, list[int], int, int]:
    """Dtype, shape and number of the pages that follow, and the sender's window.

    After the last layer it returns the number of layers instead.
    """
    into = bytearray(HEADER_BYTES)
    dist.recv(torch.frombuffer(into, dtype=torch.uint8), group_src=src, group=group, tag=tag)
    try:
        if not into.startswith(MAGIC):
            raise ValueError
        found = json.loads(into[len(MAGIC) :])
        if not isinstance(found, int):
            name, sides, pages, most = found
            dtype, shape, count, window = getattr(torch, name), [int(side) for side in sides], int(pages), int(most)
            fine = packing.travels(dtype) and min([count, window - 1, *shape]) >= 0
            if not fine or packing.Run(dtype, (count, *shape), 1).nbytes >= 1 << 47:
                raise ValueError
            return dtype, shape, count, window
    except (ValueError, TypeError, AttributeError):
        raise RuntimeError(
            f"sagellm recv_pages: rank {src} did not call send_pages: what came from it with tag {tag} is another "
            "message, expected send_pages of the same version on that rank, and a tag that no other send has"
        ) from None
    if found < 0:
        raise RuntimeError(
            f"sagellm recv_pages: rank {src} has given up: its send_pages raised an error, expected all its layers; "
            "its traceback says why"
        )
    return found
