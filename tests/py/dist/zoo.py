"""The tensor zoo for `test_tensor_zoo.py`: every kind of tensor that a program may pass, and every public call.

A call is a function that gets its tensors from a `Visit`. The role says which tensors are of the kind: with "into" the
tensors that the call only writes, with "from" those that it only reads, with "in place" those that it both reads and
writes. All others are plain. Afterwards the whole memory of each tensor is compared, byte by byte, with a twin into
which torch has written the expected values. So results are checked in the base memory, and bytes around a view must not
change.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FILLER = 3  # value of the memory around a view


def _parameter(plain: Tensor) -> Tensor:
    return nn.Parameter(plain)


def _inference(plain: Tensor) -> Tensor:
    with torch.inference_mode():
        return plain.clone()


def _leaf(plain: Tensor) -> Tensor:
    return plain.requires_grad_()


def _beside(plain: Tensor) -> Tensor:
    """Returns a part of a larger tensor: every second element of its last dimension."""
    wide = plain.new_full((*plain.shape[:-1], 2 * plain.shape[-1]), FILLER)
    return wide[..., ::2]


def _view_of_a_leaf(plain: Tensor) -> Tensor:
    return plain.new_full((plain.shape[0] + 2, *plain.shape[1:]), FILLER).requires_grad_()[1:-1]


def _transposed(plain: Tensor) -> Tensor:
    return plain.new_zeros(tuple(reversed(plain.shape))).permute(*reversed(range(plain.dim())))


def _conj(plain: Tensor) -> Tensor:
    return plain.conj()


def _neg(plain: Tensor) -> Tensor:
    return plain.new_zeros(plain.shape, dtype=torch.complex64).conj().imag


def _expanded(plain: Tensor) -> Tensor:
    return plain.new_zeros(plain.shape[-1]).expand(plain.shape)


def _channels_last(plain: Tensor) -> Tensor:
    return plain.to(memory_format=torch.channels_last)


def _shared(plain: Tensor) -> Tensor:
    return torch.full((plain.shape[0] + 2, *plain.shape[1:]), FILLER, dtype=plain.dtype).share_memory_()[1:-1]


@dataclass(frozen=True)
class Kind:
    """A kind of tensor: how to make one from zeros of a shape, and its dtype and shape."""

    make: Callable[[Tensor], Tensor]
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (4, 3)
    #: For a kind whose tensors have no memory that a call could read: words such as "sparse", "meta", "quantized".
    #: Every refusal contains one of these words.
    foreign: tuple[str, ...] = ()


def _same(plain: Tensor) -> Tensor:
    return plain


def _quantized(plain: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(plain, 1.0, 0, torch.quint8)


KINDS = {
    "plain": Kind(_same),
    "parameter": Kind(_parameter),
    "inference": Kind(_inference),
    "leaf": Kind(_leaf),
    "not a leaf": Kind(lambda plain: plain.requires_grad_() * 1),
    "view of a leaf": Kind(_view_of_a_leaf),
    "conj": Kind(_conj, torch.complex64),
    "neg": Kind(_neg),
    "expanded": Kind(_expanded),
    "strided": Kind(_beside),
    "transposed": Kind(_transposed),
    "channels-last": Kind(_channels_last, shape=(4, 2, 2, 3)),
    "0-dim": Kind(_same, shape=()),
    "empty": Kind(_same, shape=(0, 3)),
    "float8_e4m3fn": Kind(_same, torch.float8_e4m3fn),
    "float8_e5m2": Kind(_same, torch.float8_e5m2),
    "float16": Kind(_beside, torch.float16),
    "bool": Kind(_same, torch.bool),
    "complex": Kind(_beside, torch.complex64),
    "shared": Kind(_shared),
    "sparse": Kind(lambda plain: plain.to_sparse(), foreign=("sparse", "Sparse")),
    "meta": Kind(lambda plain: plain.to("meta"), foreign=("meta", "Meta")),
    "quantized": Kind(_quantized, foreign=("uantized", "quint8")),
}
PLAIN = KINDS["plain"]


def numbers(kind: Kind, seed: int, rows: int = 1) -> Tensor:
    """Returns small whole numbers of the kind's dtype and shape, the first dimension `rows` times as long."""
    shape = (kind.shape[0] * rows, *kind.shape[1:]) if kind.shape else (rows,) if rows > 1 else ()
    last = shape[-1] if shape else 1
    places = torch.arange(max(1, torch.Size(shape).numel()))
    if kind.make is _expanded:
        places = places % last
    found = ((places * 5 + seed * 3) % 7 + seed)[: torch.Size(shape).numel()].reshape(shape)
    if kind.dtype == torch.bool:
        return found % 2 == 0
    return torch.complex(found.float(), found.float() + 1) if kind.dtype.is_complex else found.to(kind.dtype)


def build(kind: Kind, values: Tensor, device: str = "cpu") -> Tensor:
    """Returns a tensor of the kind with these values."""
    if kind.foreign:
        return kind.make(values.clone())
    tensor = kind.make(torch.zeros(values.shape, dtype=kind.dtype, device=device))
    with torch.inference_mode():  # in inference mode every tensor may be written
        (tensor[(0,) * (tensor.dim() - 1)] if kind.make is _expanded else tensor).copy_(
            values[(0,) * (values.dim() - 1)] if kind.make is _expanded else values
        )
    return tensor


def memory(tensor: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Returns all bytes of the storage that the tensor is a part of."""
    flat = torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())
    return flat.cpu().clone()


@dataclass
class Visit:
    """One call with one kind of tensor in one role, on this rank."""

    kind: Kind
    role: str
    me: int
    group: Any
    comm: Any = None
    #: The device of the tensors. `anyone`: whether a receive may leave the source open on this device.
    device: str = "cpu"
    anyone: bool = True
    #: `seen`: the expected final content of each tensor. `given`: its initial content.
    seen: list[tuple[Kind, Tensor, Tensor]] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)

    def _take(self, of_kind: bool, seed: int, rows: int) -> Tensor:
        values = numbers(self.kind, seed, rows)
        kind = self.kind if of_kind else Kind(_same, self.kind.dtype, self.kind.shape)
        tensor = build(kind, values, self.device)
        self.seen.append((kind, tensor, values))
        self.given.append(values)
        return tensor

    def update(self, seed: int | None = None) -> Tensor:
        """Returns a tensor that the call reads and writes. On rank r it has the values of seed r."""
        return self._take(True, self.me if seed is None else seed, 1)

    def write(self, rows: int = 1) -> Tensor:
        """Returns a tensor that the call only writes."""
        return self._take(self.role == "into", 5, rows)

    def read(self, seed: int | None = None, rows: int = 1) -> Tensor:
        """Returns a tensor that the call only reads."""
        return self._take(self.role == "from", self.me if seed is None else seed, rows)

    def of(self, seed: int, rows: int = 1) -> Tensor:
        """Returns the values of a seed."""
        return numbers(self.kind, seed, rows)

    def total(self, *seeds: int, rows: int = 1) -> Tensor:
        """Returns the sum of the values of some seeds; for bool the logical or."""
        one, other = (numbers(self.kind, seed, rows) for seed in seeds or (0, 1))
        if one.dtype == torch.bool:
            return one | other
        return one.float() + other.float() if one.element_size() == 1 else one + other

    def summed(self, *seeds: int, rows: int = 1) -> Tensor:
        """Returns the sum, converted to the kind's dtype."""
        return self.total(*seeds, rows=rows).to(self.kind.dtype)

    def expect(self, tensor: Tensor, values: Tensor) -> None:
        """Sets the expected final content of a tensor. All other tensors must keep their contents."""
        for place, (kind, each, _) in enumerate(self.seen):
            if each is tensor:
                self.seen[place] = (kind, each, values.reshape(each.shape))
                return
        raise AssertionError("an unknown tensor")

    def forget_results(self) -> None:
        """Makes `wrong` expect the initial contents of all tensors."""
        self.seen = [(kind, tensor, before) for (kind, tensor, _), before in zip(self.seen, self.given, strict=True)]

    def wrong(self, tolerance: float = 0.0) -> str:
        """Describes the first difference from the expected memory, or returns ""."""
        for number, (kind, tensor, values) in enumerate(self.seen):
            if tensor.is_sparse:
                if not torch.equal(tensor.to_dense(), values):
                    return f"tensor {number} of the call: {tensor}, expected {values.tolist()}"
                continue
            if kind.foreign:
                continue
            twin = build(kind, values.to(kind.dtype))
            if tolerance:
                found, wanted = memory(tensor, kind.dtype).float(), memory(twin, kind.dtype).float()
                same = torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)
            else:
                same = torch.equal(memory(tensor), memory(twin))
            if not same:
                return f"tensor {number} of the call: {tensor.detach().tolist()}, expected {values.tolist()}"
            if tensor.requires_grad and not tensor.is_leaf and "CopyBackwards" in str(tensor.grad_fn):
                return f"tensor {number} of the call got the node {tensor.grad_fn}"
        return ""


@dataclass(frozen=True)
class Call:
    """A call: its function, the roles in which tensors are passed, and the ranks that pass one."""

    run: Callable[[Visit], None]
    roles: tuple[str, ...]
    #: By role, the rank that passes a tensor if only one rank does. If this rank refuses the tensor, the other rank
    #: makes no call.
    only: dict[str, int]
    #: Whether the call adds numbers.
    reduces: bool
    #: The call's name in errors.
    named: str
    tolerance: float = 0.0


CALLS: dict[str, Call] = {}


def call(
    *roles: str, reduces: bool = False, named: str = "", tolerance: float = 0.0, **only: int
) -> Callable[[Callable[[Visit], None]], Callable[[Visit], None]]:
    """Adds a function to the table of calls."""

    def add(run: Callable[[Visit], None]) -> Callable[[Visit], None]:
        ranks = {role.removesuffix("_"): rank for role, rank in only.items()}
        name = run.__name__.replace("__", ".", 1)
        CALLS[name] = Call(run, roles, ranks, reduces, named or name.rpartition(".")[2], tolerance)
        return run

    return add


def returned(found: Tensor | None, values: Tensor) -> None:
    """Compares a new tensor that a call returned with the expected values."""
    assert found is not None and found.dtype == values.dtype, found
    got, wanted = (each.detach().cpu().resolve_conj().reshape(-1) for each in (found, values))
    assert torch.equal(*(each.contiguous().view(torch.uint8) if each.numel() else each for each in (got, wanted))), (
        f"returned {found}, expected {values}"
    )


# ------------------------------------------------------------------------------------------------- torch.distributed


@call("in place", reduces=True, named="all_reduce")
def dist__all_reduce(v: Visit) -> None:
    tensor = v.update()
    dist.all_reduce(tensor, group=v.group)
    v.expect(tensor, v.total())


@call("in place", reduces=True, named="all_reduce")
def dist__all_reduce_async(v: Visit) -> None:
    tensor = v.update()
    dist.all_reduce(tensor, group=v.group, async_op=True).wait()
    v.expect(tensor, v.total())


@call("in place")
def dist__broadcast(v: Visit) -> None:
    tensor = v.update()
    dist.broadcast(tensor, group_src=1, group=v.group)
    v.expect(tensor, v.of(1))


@call("in place", reduces=True)
def dist__reduce(v: Visit) -> None:
    tensor = v.update()
    dist.reduce(tensor, group_dst=1, group=v.group)
    if v.me == 1:
        v.expect(tensor, v.total())


@call("into", "from", named="gather")
def dist__all_gather(v: Visit) -> None:
    outputs = [v.write(), v.write()]
    dist.all_gather(outputs, v.read(), group=v.group)
    for rank, output in enumerate(outputs):
        v.expect(output, v.of(rank))


@call("into", "from", named="gather")
def dist__all_gather_into_tensor(v: Visit) -> None:
    output = v.write(2)
    dist.all_gather_into_tensor(output, v.read(), group=v.group)
    v.expect(output, torch.stack([v.of(0), v.of(1)]))


@call("into", "from", into=1)
def dist__gather(v: Visit) -> None:
    outputs = [v.write(), v.write()] if v.me == 1 else None
    dist.gather(v.read(), outputs, group_dst=1, group=v.group)
    for rank, output in enumerate(outputs or []):
        v.expect(output, v.of(rank))


@call("into", "from", from_=1)
def dist__scatter(v: Visit) -> None:
    output = v.write()
    dist.scatter(output, [v.read(2), v.read(3)] if v.me == 1 else None, group_src=1, group=v.group)
    v.expect(output, v.of(2 + v.me))


@call("into", "from", reduces=True)
def dist__reduce_scatter(v: Visit) -> None:
    output = v.write()
    dist.reduce_scatter(output, [v.read(v.me), v.read(v.me + 2)], group=v.group)
    v.expect(output, v.total(2 * v.me, 2 * v.me + 1))


@call("into", "from", reduces=True, named="reduce_scatter")
def dist__reduce_scatter_tensor(v: Visit) -> None:
    output = v.write()
    dist.reduce_scatter_tensor(output, v.read(rows=2), group=v.group)
    v.expect(output, v.total(rows=2).reshape(2, *v.of(0).shape)[v.me])


@call("into", "from", named="alltoall")
def dist__all_to_all(v: Visit) -> None:
    outputs = [v.write(), v.write()]
    dist.all_to_all(outputs, [v.read(v.me), v.read(v.me + 2)], group=v.group)
    for rank, output in enumerate(outputs):
        v.expect(output, v.of(rank + 2 * v.me))


@call("into", "from", named="alltoall")
def dist__all_to_all_single(v: Visit) -> None:
    output = v.write(2)
    dist.all_to_all_single(output, v.read(rows=2), group=v.group)
    halves = [v.of(rank, 2).reshape(2, *v.of(0).shape)[v.me] for rank in range(2)]
    v.expect(output, torch.stack(halves))


@call("into", "from", from_=0, into=1, named="send/recv")
def dist__send_and_recv(v: Visit) -> None:
    if v.me == 0:
        dist.send(v.read(), group_dst=1, group=v.group)
        return
    tensor = v.write()
    dist.recv(tensor, group_src=0, group=v.group)
    v.expect(tensor, v.of(0))


@call("into", named="recv", into=1)
def dist__recv_from_anyone(v: Visit) -> None:
    if v.me == 0:
        dist.send(v.read(), group_dst=1, group=v.group)
        return
    tensor = v.write()
    dist.recv(tensor, group=v.group)
    v.expect(tensor, v.of(0))


@call("into", "from", named="send/recv", from_=0, into=1)
def dist__isend_and_irecv(v: Visit) -> None:
    if v.me == 0:
        dist.isend(v.read(), group_dst=1, group=v.group).wait()
        return
    tensor = v.write()
    dist.irecv(tensor, group_src=0, group=v.group).wait()
    v.expect(tensor, v.of(0))


@call("into", "from", named="send/recv")
def dist__batch_isend_irecv(v: Visit) -> None:
    tensor = v.write()
    messages = [
        dist.P2POp(dist.isend, v.read(), group=v.group, group_peer=1 - v.me),
        dist.P2POp(dist.irecv, tensor, group=v.group, group_peer=1 - v.me),
    ]
    if v.role == "into":  # torch starts one message after the other, so the refused one comes first and nothing is sent
        messages.reverse()
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    v.expect(tensor, v.of(1 - v.me))


@call("in place", reduces=True, named="all_reduce")
def dist__all_reduce_coalesced(v: Visit) -> None:
    tensors = [v.update(), v.update(v.me + 2)]
    dist.all_reduce_coalesced(tensors, group=v.group)
    v.expect(tensors[0], v.total())
    v.expect(tensors[1], v.total(2, 3))


@call("into", "from", named="gather")
def dist__all_gather_coalesced(v: Visit) -> None:
    outputs = [[v.write(), v.write()] for _ in range(2)]
    dist.all_gather_coalesced(outputs, [v.read(), v.read(v.me + 2)], group=v.group)
    for rank, (first, second) in enumerate(outputs):
        v.expect(first, v.of(rank))
        v.expect(second, v.of(rank + 2))


if hasattr(dist, "gather_single"):

    @call("into", "from", into=1, named="gather")
    def dist__gather_single(v: Visit) -> None:
        output = v.write(2) if v.me == 1 else None
        dist.gather_single(v.read(), output, group_dst=1, group=v.group)
        if output is not None:
            v.expect(output, torch.stack([v.of(0), v.of(1)]))


@contextlib.contextmanager
def together(v: Visit) -> Iterator[None]:
    """A region whose calls run as one operation."""
    with dist._coalescing_manager(group=v.group, device=torch.device(v.device)):
        yield


@call("in place", reduces=True, named="all_reduce")
def region__all_reduce(v: Visit) -> None:
    tensors = [v.update(), v.update(v.me + 2)]
    with together(v):
        for tensor in tensors:
            dist.all_reduce(tensor, group=v.group)
    v.expect(tensors[0], v.total())
    v.expect(tensors[1], v.total(2, 3))


@call("into", "from", named="gather")
def region__all_gather_into_tensor(v: Visit) -> None:
    outputs = [v.write(2), v.write(2)]
    with together(v):
        for number, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, v.read(v.me + 2 * number), group=v.group)
    for number, output in enumerate(outputs):
        v.expect(output, torch.stack([v.of(2 * number), v.of(2 * number + 1)]))


@call("into", "from", reduces=True, named="reduce_scatter")
def region__reduce_scatter_tensor(v: Visit) -> None:
    outputs = [v.write(), v.write()]
    with together(v):
        for number, output in enumerate(outputs):
            dist.reduce_scatter_tensor(output, v.read(v.me + 2 * number, 2), group=v.group)
    for number, output in enumerate(outputs):
        whole = v.total(2 * number, 2 * number + 1, rows=2)
        v.expect(output, whole.reshape(2, *v.of(0).shape)[v.me])


def _backend(v: Visit) -> Any:
    return v.group._get_backend(torch.device(v.device))


@call("in place", reduces=True)
def backend__allreduce(v: Visit) -> None:
    """Bypasses torch's dispatcher, so the backend gets lazily conjugated and negated views unresolved."""
    tensor = v.update()
    work = _backend(v).allreduce([tensor], dist.AllreduceOptions())
    if work is not None:
        work.wait()
    v.expect(tensor, v.total())


@call("in place")
def backend__broadcast(v: Visit) -> None:
    tensor = v.update()
    work = _backend(v).broadcast([tensor], dist.BroadcastOptions())
    if work is not None:
        work.wait()
    v.expect(tensor, v.of(0))


@call("from")
def objects__every_kind(v: Visit) -> None:
    """Tensors as parts of objects that are pickled."""
    mine = v.read()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, mine, group=v.group)
    given: list[Any] = [None]
    dist.scatter_object_list(given, every if v.me == 0 else None, group_src=0, group=v.group)
    known = list(every) if v.me == 1 else [None, None]
    dist.broadcast_object_list(known, group_src=1, group=v.group)
    parts: list[Any] = [None, None]
    dist.gather_object(mine, parts if v.me == 1 else None, group_dst=1, group=v.group)
    came: list[Any] = [mine]
    if v.me == 0:
        dist.send_object_list(came, group_dst=1, group=v.group)
    else:
        dist.recv_object_list(came, group_src=0, group=v.group)
    if v.kind.foreign:
        return
    for found, seed in zip([*every, *known, *given, *came], [0, 1, 0, 1, v.me, 0], strict=True):
        returned(found, v.of(seed))
    for seed, found in enumerate(parts if v.me == 1 else []):
        returned(found, v.of(seed))


# ------------------------------------------------------------------------------------------------- this package


@call("in place", reduces=True, named="all_reduce")
def package__fused_all_reduce(v: Visit) -> None:
    import torch_sagellm

    tensors = [v.update(), v.update(v.me + 2)]
    torch_sagellm.fused_all_reduce(tensors, group=v.group)
    v.expect(tensors[0], v.total())
    v.expect(tensors[1], v.total(2, 3))


@call("in place", reduces=True, named="all_reduce")
def package__batch_all_reduce(v: Visit) -> None:
    import torch_sagellm

    tensor = v.update()
    torch_sagellm.batch_all_reduce([tensor], backend=v.comm)
    v.expect(tensor, v.total())


@call("in place", reduces=True, named="CommFusionBuffer/all_reduce")
def package__CommFusionBuffer(v: Visit) -> None:
    import torch_sagellm

    tensors, buffer = [v.update(), v.update(v.me + 2)], torch_sagellm.CommFusionBuffer()
    for tensor in tensors:
        buffer.add_tensor(tensor)
    buffer.flush_and_all_reduce(v.comm)
    v.expect(tensors[0], v.total())
    v.expect(tensors[1], v.total(2, 3))


@call("in place", reduces=True, named="all_reduce")
def package__safe_all_reduce(v: Visit) -> None:
    import torch_sagellm

    tensor = v.update()
    torch_sagellm.safe_all_reduce(tensor, backend=v.comm)
    v.expect(tensor, v.total())


def _compressed(v: Visit, how: Any) -> None:
    import torch_sagellm

    tensor = v.update()
    made = torch_sagellm.TopK(1.0) if how == "topk" else how
    assert torch_sagellm.compressed_all_reduce(tensor, made, group=v.group, key="zoo") is tensor
    v.expect(tensor, v.total())
    other = v.update(v.me + 2)
    torch_sagellm.compressed_all_reduce(other, made, op="avg", group=v.group, key="another")
    v.expect(other, v.total(2, 3).float() / 2)


@call("in place", named="compressed_all_reduce")
def package__compressed_fp16(v: Visit) -> None:
    _compressed(v, "fp16")


@call("in place", named="compressed_all_reduce")
def package__compressed_bf16(v: Visit) -> None:
    _compressed(v, "bf16")


@call("in place", named="compressed_all_reduce", tolerance=0.3)
def package__compressed_int8(v: Visit) -> None:
    _compressed(v, "int8")


@call("in place", named="compressed_all_reduce")
def package__compressed_topk(v: Visit) -> None:
    _compressed(v, "topk")


@call("in place", named="compressed_all_reduce")
def comm__compressed_async(v: Visit) -> None:
    tensor = v.update()
    v.comm.all_reduce(tensor, async_op=True, compress="bf16").wait()
    v.expect(tensor, v.total())


@call("into", "from", from_=0, into=1, named="send_tensors/recv_tensors")
def package__send_tensors(v: Visit) -> None:
    """In the role "into" the tensors are passed as out=."""
    import torch_sagellm

    if v.me == 0:
        torch_sagellm.send_tensors([v.read(), v.read(2)], 1, group=v.group)
        return
    out = [v.write(), v.write()] if v.role == "into" else None
    found = torch_sagellm.recv_tensors(0, group=v.group, out=out, device=v.device)
    for seed, each in zip((0, 2), found, strict=True):
        if out is None:
            returned(each, v.of(seed))
        else:
            v.expect(each, v.of(seed))


@call("into", "from", from_=0, into=1, named="send_tensors/recv_tensors")
def package__isend_tensors(v: Visit) -> None:
    """The asynchronous calls, with out= in every role."""
    import torch_sagellm

    if v.me == 0:
        torch_sagellm.isend_tensors([v.read(), v.read(2)], 1, group=v.group).wait()
        return
    out = [v.write(), v.write()]
    torch_sagellm.irecv_tensors(0, group=v.group, out=out).wait()
    for seed, each in zip((0, 2), out, strict=True):
        v.expect(each, v.of(seed))


@call("into", "from", into=1, named="send_pages/recv_pages")
def package__send_pages(v: Visit) -> None:
    """Two layers; the pages are all rows of the tensors."""
    import torch_sagellm

    rows = range(v.kind.shape[0] if v.kind.shape else 1)
    if v.me == 0:
        torch_sagellm.send_pages([v.read(), v.read(2)], rows, 1, group=v.group)
        return
    layers = [v.write(), v.write()]
    torch_sagellm.recv_pages(layers, rows, 0, group=v.group)
    for seed, each in zip((0, 2), layers, strict=True):
        v.expect(each, v.of(seed))


@call("in place", reduces=True)
def package__all_reduce(v: Visit) -> None:
    import torch_sagellm

    tensor = v.update()
    assert torch_sagellm.all_reduce(tensor, group=v.group) is tensor
    v.expect(tensor, v.total())


@call("from")
def package__all_gather(v: Visit) -> None:
    import torch_sagellm

    for rank, found in enumerate(torch_sagellm.all_gather(v.read(), v.group)):
        returned(found, v.of(rank))


@call("from", reduces=True)
def package__reduce_scatter(v: Visit) -> None:
    import torch_sagellm

    found = torch_sagellm.reduce_scatter([v.read(v.me), v.read(v.me + 2)], group=v.group)
    returned(found, v.summed(2 * v.me, 2 * v.me + 1))


@call("in place")
def package__broadcast(v: Visit) -> None:
    import torch_sagellm

    tensor = v.update()
    assert torch_sagellm.broadcast(tensor, 1, v.group) is tensor
    v.expect(tensor, v.of(1))


@call("into", "from")
def package__all_to_all(v: Visit) -> None:
    import torch_sagellm

    outputs = [v.write(), v.write()]
    torch_sagellm.all_to_all([v.read(v.me), v.read(v.me + 2)], outputs, v.group)
    for rank, output in enumerate(outputs):
        v.expect(output, v.of(rank + 2 * v.me))


@call("into", "from", from_=0, into=1, named="send/recv")
def package__send_and_recv(v: Visit) -> None:
    import torch_sagellm

    if v.me == 0:
        torch_sagellm.send(v.read(), 1, v.group)
        torch_sagellm.isend(v.read(2), 1, v.group, tag=1).wait()
        return
    tensor, other = v.write(), v.write()
    assert torch_sagellm.recv(tensor, 0, v.group) is tensor
    torch_sagellm.irecv(other, 0, v.group, tag=1).wait()
    v.expect(tensor, v.of(0))
    v.expect(other, v.of(2))


@call("from")
def package__assert_same(v: Visit) -> None:
    import torch_sagellm

    torch_sagellm.assert_same([v.read(3)], v.group)
    if v.kind.shape and v.kind.shape[0] == 0:
        return
    try:
        torch_sagellm.assert_same({"its": v.read()}, v.group)
    except AssertionError as error:
        assert "its" in str(error), error
    else:
        raise RuntimeError("a difference was not found")


@call("in place", reduces=True)
def comm__all_reduce(v: Visit) -> None:
    tensor = v.update()
    assert v.comm.all_reduce(tensor) is tensor
    v.expect(tensor, v.total())


@call("in place", reduces=True, named="all_reduce")
def comm__all_reduce_async(v: Visit) -> None:
    tensor = v.update()
    assert v.comm.all_reduce(tensor, async_op=True).wait() is tensor
    v.expect(tensor, v.total())


@call("in place", reduces=True, named="all_reduce")
def comm__fused_all_reduce(v: Visit) -> None:
    tensors = [v.update(), v.update(v.me + 2)]
    v.comm.fused_all_reduce(tensors)
    v.expect(tensors[0], v.total())
    v.expect(tensors[1], v.total(2, 3))


@call("in place", reduces=True)
def comm__reduce(v: Visit) -> None:
    tensor = v.update()
    v.comm.reduce(tensor, 1)
    if v.me == 1:
        v.expect(tensor, v.total())


@call("into", "from", reduces=True)
def comm__reduce_scatter(v: Visit) -> None:
    tensor = v.read(rows=2)
    output = v.write() if v.role == "into" and v.kind.shape else None
    found = v.comm.reduce_scatter(tensor, output=output)
    wanted = v.summed(rows=2).reshape(2, *v.of(0).shape)[v.me]
    if output is None:
        returned(found.reshape(wanted.shape), wanted)
    else:
        v.expect(output, wanted)


@call("into", "from")
def comm__all_gather(v: Visit) -> None:
    output = v.write(2) if v.role == "into" else None
    found = v.comm.all_gather(v.read(), output)
    wanted = torch.stack([v.of(0), v.of(1)])
    if output is None:
        returned(found, wanted.flatten(0, 1) if v.kind.shape else wanted)
    else:
        v.expect(output, wanted)


@call("in place")
def comm__broadcast(v: Visit) -> None:
    tensor = v.update()
    v.comm.broadcast(tensor, 1)
    v.expect(tensor, v.of(1))


@call("from")
def comm__gather(v: Visit) -> None:
    found = v.comm.gather(v.read(), 1)
    if v.me == 1:
        wanted = torch.stack([v.of(0), v.of(1)])
        returned(found, wanted.flatten(0, 1) if v.kind.shape else wanted)


@call("into", "from", from_=1)
def comm__scatter(v: Visit) -> None:
    output = v.write()
    v.comm.scatter(v.read(rows=2) if v.me == 1 else None, output, 1)
    v.expect(output, v.of(1, 2).reshape(2, *output.shape)[v.me])


@call("into", "from")
def comm__all_to_all(v: Visit) -> None:
    output = v.write(2) if v.role == "into" else None
    found = v.comm.all_to_all(v.read(rows=2), output)
    halves = [v.of(rank, 2).reshape(2, *v.of(0).shape)[v.me] for rank in range(2)]
    wanted = torch.stack(halves).reshape(v.of(0, 2).shape)
    if output is None:
        returned(found, wanted)
    else:
        v.expect(output, wanted)


@call("into", "from", from_=0, into=1, named="send/recv")
def comm__send_and_recv(v: Visit) -> None:
    if v.me == 0:
        v.comm.send(v.read(), 1)
        return
    tensor = v.write()
    v.comm.recv(tensor, 0)
    v.expect(tensor, v.of(0))


@call("into", "from", from_=0, into=1, named="send/recv")
def comm__isend_and_irecv(v: Visit) -> None:
    if v.me == 0:
        v.comm.isend(v.read(), 1).wait()
        return
    tensor = v.write()
    v.comm.irecv(tensor, None if v.anyone else 0).wait()
    v.expect(tensor, v.of(0))


@call("in place", reduces=True, named="all_reduce")
def layers__OverlapScheduler(v: Visit) -> None:
    import torch_sagellm

    tensor = v.update()
    torch_sagellm.OverlapScheduler(v.comm).schedule(tensor).wait()
    v.expect(tensor, v.total())


@call("from")
def layers__ring_exchange(v: Visit) -> None:
    import torch_sagellm

    for source, (block,) in torch_sagellm.ring_exchange([v.read()], group=v.group):
        returned(block, v.of(source))


@call("from")
def layers__exchange_tokens(v: Visit) -> None:
    import torch_sagellm

    found = torch_sagellm.exchange_tokens(v.read(rows=2), 0, 0, group=v.group)
    halves = [v.of(rank, 2).reshape(2, *v.of(0).shape)[v.me] for rank in range(2)]
    returned(found, torch.stack(halves).reshape(v.of(0, 2).shape))


@call("from", reduces=True, named="all_reduce")
def layers__autograd(v: Visit) -> None:
    """The functions with gradients of which TensorParallelLinear consists."""
    from torch_sagellm.parallel import autograd

    tensor = v.read()
    returned(autograd.copy_to_all(tensor, v.group), v.of(v.me))
    returned(autograd.reduce_from_all(tensor, v.group), v.summed())
    returned(autograd.gather_from_all(tensor, v.group), torch.cat([v.of(0), v.of(1)], -1))
    returned(autograd.slice_of_all(tensor, v.group), v.of(v.me).chunk(2, -1)[v.me])


@call("from")
def layers__MoEDispatcher(v: Visit) -> None:
    import torch_sagellm

    moe = torch_sagellm.MoEDispatcher(2, group=v.group)
    tokens = v.read()
    chosen = torch.arange(v.kind.shape[0] if v.kind.shape else 1) % 2
    rows, routing = moe.dispatch(tokens, chosen.to(v.device))
    wanted = torch.cat([v.of(rank)[chosen == v.me] for rank in range(2)])
    returned(rows, wanted)
    returned(moe.combine(rows, routing), v.of(v.me))


# ------------------------------------------------------------------------------------------------- ranks of one process


@dataclass(frozen=True)
class RingCall:
    """A call of all ranks of one process: `run` gets the communicators and, in the same order, their visits."""

    run: Callable[[list[Any], list[Visit]], None]
    role: str
    reduces: bool = False


def _ring_all_reduce(comms: list[Any], visits: list[Visit]) -> None:
    tensors = [v.update() for v in visits]
    for comm, tensor in zip(comms, tensors, strict=True):
        comm.all_reduce(tensor)
    for v, tensor in zip(visits, tensors, strict=True):
        v.expect(tensor, v.total())


def _ring_broadcast(comms: list[Any], visits: list[Visit]) -> None:
    tensors = [v.update() for v in visits]
    for comm, tensor in zip(comms, tensors, strict=True):
        comm.broadcast(tensor, 1)
    for v, tensor in zip(visits, tensors, strict=True):
        v.expect(tensor, v.of(1))


def _ring_all_gather(comms: list[Any], visits: list[Visit]) -> None:
    found = [comm.all_gather(v.read()) for comm, v in zip(comms, visits, strict=True)]
    for v, each in zip(visits, found, strict=True):
        wanted = torch.stack([v.of(0), v.of(1)])
        returned(each, wanted.flatten(0, 1) if v.kind.shape else wanted)


def _ring_reduce_scatter(comms: list[Any], visits: list[Visit]) -> None:
    found = [comm.reduce_scatter(v.read(rows=2)) for comm, v in zip(comms, visits, strict=True)]
    for v, each in zip(visits, found, strict=True):
        wanted = v.total(rows=2).reshape(2, *v.of(0).shape)[v.me]
        returned(each.reshape(wanted.shape), wanted)


def _ring_send(comms: list[Any], visits: list[Visit]) -> None:
    for comm, v in zip(comms, visits, strict=True):
        comm.send(v.read(), 1 - v.me)
    for comm, v in zip(comms, visits, strict=True):
        tensor = v.write()
        comm.recv(tensor, 1 - v.me)
        v.expect(tensor, v.of(1 - v.me))


def _ring_recv(comms: list[Any], visits: list[Visit]) -> None:
    for comm, v in zip(comms, visits, strict=True):
        tensor = v.write()
        comm.recv(tensor, 1 - v.me)
        v.expect(tensor, v.of(1 - v.me))
    for comm, v in zip(comms, visits, strict=True):
        comm.send(v.read(), 1 - v.me)


RING = {
    "all_reduce": RingCall(_ring_all_reduce, "in place", reduces=True),
    "broadcast": RingCall(_ring_broadcast, "in place"),
    "all_gather": RingCall(_ring_all_gather, "from"),
    "reduce_scatter": RingCall(_ring_reduce_scatter, "from", reduces=True),
    "send": RingCall(_ring_send, "from"),
    "recv": RingCall(_ring_recv, "into"),
}
