"""How one rank calls each vendor's library. Functions that differ only by name have one method here, so that tests of
common behaviour are written once. All methods return the vendor's own numbers."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np
from ranks import Library, Rank, address

DEVICE_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class UniqueId(ctypes.Structure):
    """The id, for interfaces that pass it by value."""

    _fields_ = (("data", ctypes.c_ubyte * 128),)


def out() -> ctypes.c_uint64:
    return ctypes.c_uint64(0)


def ref(value: Any) -> Any:
    return ctypes.byref(value)


def ok(code: int) -> None:
    assert code == 0, f"the call returned {code}"


class Vendor:
    """The runtime and the collective library of one vendor, on one rank."""

    name: str
    runtime: str
    id_bytes: int
    #: The types that the library can add: from numpy's type to the vendor's number.
    types: ClassVar[dict[str, int]]
    #: The vendor's numbers of sum, product, max and min.
    ops = (0, 1, 2, 3)

    def __init__(self, rank: Rank, form: str | None = None) -> None:
        self.rank = rank
        self.run: Library = rank.library(self.runtime)
        self.lib: Library = rank.library(form or self.name)
        self.kept: list[Any] = []
        self.start()
        self.stream = self.new_stream()
        self.comm = 0

    def start(self) -> None:
        """Chooses the device."""
        self.set_device(self.rank.rank)

    def made(self, function: str, *arguments: int) -> int:
        handle = out()
        ok(getattr(self.run, function)(ref(handle), *arguments))
        return handle.value

    def connect(self, name: str = "id") -> None:
        """Creates a communicator of all ranks."""
        comm = out()
        ok(self.init(comm, self.rank.size, self.id(name), self.rank.rank))
        self.comm = comm.value

    def id(self, name: str = "id") -> bytes:
        return self.rank.share(name, self.make_id)

    def make_id(self) -> bytes:
        # The memory is one byte longer, so that the id can be at an unaligned address.
        memory = (ctypes.c_ubyte * (self.id_bytes + 1))()
        ok(getattr(self.lib, self.getter)(ctypes.c_void_p(ctypes.addressof(memory) + 1)))
        assert memory[0] == 0
        return bytes(memory[1:])

    def host_function(self, body: Any, stream: int | None = None) -> None:
        function = DEVICE_FUNCTION(body)
        self.kept.append(function)
        ok(self.launch(self.stream if stream is None else stream, function))

    getter: str

    def init(self, comm: Any, size: int, data: bytes, rank: int) -> int:
        raise NotImplementedError

    def set_device(self, device: int) -> None:
        raise NotImplementedError

    def new_stream(self) -> int:
        raise NotImplementedError

    def new_event(self) -> int:
        raise NotImplementedError

    def launch(self, stream: int, function: Any) -> int:
        raise NotImplementedError


class Nccl(Vendor):
    name, runtime, id_bytes, getter = "nccl", "cuda", 128, "ncclGetUniqueId"
    types: ClassVar = {"i1": 0, "u1": 1, "i4": 2, "u4": 3, "i8": 4, "u8": 5, "f2": 6, "f4": 7, "f8": 8}
    AVG = 4

    def start(self) -> None:
        ok(self.run.cuInit(0))
        super().start()

    def set_device(self, device: int) -> None:
        ok(self.run.cuCtxSetCurrent(self.made("cuDevicePrimaryCtxRetain", device)))

    def init(self, comm: Any, size: int, data: bytes, rank: int) -> int:
        return self.lib.ncclCommInitRank(ref(comm), size, UniqueId.from_buffer_copy(data), rank)

    def new_stream(self) -> int:
        return self.made("cuStreamCreate", 1)

    def new_event(self) -> int:
        return self.made("cuEventCreate", 0)

    def record(self, event: int, stream: int) -> int:
        return self.run.cuEventRecord(event, stream)

    def wait(self, event: int, stream: int) -> int:
        return self.run.cuStreamWaitEvent(stream, event, 0)

    def is_done(self, event: int) -> bool:
        code = self.run.cuEventQuery(event)
        assert code in (0, 600)
        return code == 0

    def is_idle(self, stream: int) -> bool:
        code = self.run.cuStreamQuery(stream)
        assert code in (0, 600)
        return code == 0

    def launch(self, stream: int, function: Any) -> int:
        return self.run.cuLaunchHostFunc(stream, function, 0)

    def sync(self, stream: int | None = None) -> int:
        return self.run.cuStreamSynchronize(stream or self.stream)

    def sum(self, a: Any, b: Any, n: int, dtype: int, op: int = 0, stream: int | None = None) -> int:
        return self.lib.ncclAllReduce(address(a), address(b), n, dtype, op, self.comm, stream or self.stream)

    def broadcast(self, a: Any, b: Any, n: int, dtype: int, root: int) -> int:
        return self.lib.ncclBroadcast(address(a), address(b), n, dtype, root, self.comm, self.stream)

    def reduce(self, a: Any, b: Any, n: int, dtype: int, op: int, root: int) -> int:
        return self.lib.ncclReduce(address(a), address(b), n, dtype, op, root, self.comm, self.stream)

    def all_gather(self, a: int, b: int, n: int, dtype: int) -> int:
        return self.lib.ncclAllGather(a, b, n, dtype, self.comm, self.stream)

    def reduce_scatter(self, a: int, b: int, n: int, dtype: int, op: int) -> int:
        return self.lib.ncclReduceScatter(a, b, n, dtype, op, self.comm, self.stream)

    def all_to_all(self, a: Any, b: Any, n: int, dtype: int) -> int:
        return self.lib.ncclAlltoAll(address(a), address(b), n, dtype, self.comm, self.stream)

    def send(self, a: Any, n: int, dtype: int, peer: int) -> int:
        return self.lib.ncclSend(address(a), n, dtype, peer, self.comm, self.stream)

    def recv(self, a: Any, n: int, dtype: int, peer: int) -> int:
        return self.lib.ncclRecv(address(a), n, dtype, peer, self.comm, self.stream)

    def group_start(self) -> int:
        return self.lib.ncclGroupStart()

    def group_end(self) -> int:
        return self.lib.ncclGroupEnd()

    def state(self) -> int:
        """Returns the asynchronous error."""
        found = ctypes.c_int32(-1)
        ok(self.lib.ncclCommGetAsyncError(self.comm, ref(found)))
        return found.value

    FAILED, BUSY = 6, ()

    def abort(self) -> int:
        return self.lib.ncclCommAbort(self.comm)

    def destroy(self) -> int:
        return self.lib.ncclCommDestroy(self.comm)


class Cncl(Vendor):
    name, runtime, id_bytes, getter = "cncl", "cnrt", 136, "cnclGetCliqueId"
    types: ClassVar = {"f2": 0x10, "f4": 0x12, "i1": 0x20, "i2": 0x21, "i4": 0x22, "i8": 0x23}
    types |= {"u1": 0x30, "u2": 0x31, "u4": 0x32, "u8": 0x33}

    def set_device(self, device: int) -> None:
        ok(self.run.cnrtSetDevice(device))

    def init(self, comm: Any, size: int, data: bytes, rank: int) -> int:
        devices, ranks = (ctypes.c_int32 * 1)(rank), (ctypes.c_int32 * 1)(rank)
        return self.lib.cnclInitComms(ref(comm), 1, devices, ranks, size, ctypes.c_char_p(data))

    def new_stream(self) -> int:
        return self.made("cnrtQueueCreate")

    def new_event(self) -> int:
        return self.made("cnrtNotifierCreate")

    def record(self, event: int, stream: int) -> int:
        return self.run.cnrtPlaceNotifier(event, stream)

    def wait(self, event: int, stream: int) -> int:
        return self.run.cnrtQueueWaitNotifier(event, stream, 0)

    def is_done(self, event: int) -> bool:
        code = self.run.cnrtQueryNotifier(event)
        assert code in (0, 1, 632014)
        return code == 0

    def is_idle(self, stream: int) -> bool:
        code = self.run.cnrtQueueQuery(stream)
        assert code in (0, 1, 632014)
        return code == 0

    def launch(self, stream: int, function: Any) -> int:
        return self.run.cnrtInvokeHostFunc(stream, function, 0)

    def sync(self, stream: int | None = None) -> int:
        return self.run.cnrtQueueSync(stream or self.stream)

    def sum(self, a: Any, b: Any, n: int, dtype: int, op: int = 0, stream: int | None = None) -> int:
        return self.lib.cnclAllReduce(address(a), address(b), n, dtype, op, self.comm, stream or self.stream)

    def broadcast(self, a: Any, b: Any, n: int, dtype: int, root: int) -> int:
        return self.lib.cnclBroadcast(address(a), address(b), n, dtype, root, self.comm, self.stream)

    def reduce(self, a: Any, b: Any, n: int, dtype: int, op: int, root: int) -> int:
        return self.lib.cnclReduce(address(a), address(b), n, dtype, op, root, self.comm, self.stream)

    def all_gather(self, a: int, b: int, n: int, dtype: int) -> int:
        return self.lib.cnclAllGather(a, b, n, dtype, self.comm, self.stream)

    def reduce_scatter(self, a: int, b: int, n: int, dtype: int, op: int) -> int:
        return self.lib.cnclReduceScatter(a, b, n, dtype, op, self.comm, self.stream)

    def all_to_all(self, a: Any, b: Any, n: int, dtype: int) -> int:
        return self.lib.cnclAlltoAll(address(a), address(b), n, dtype, self.comm, self.stream)

    def send(self, a: Any, n: int, dtype: int, peer: int) -> int:
        return self.lib.cnclSend(address(a), n, dtype, peer, self.comm, self.stream)

    def recv(self, a: Any, n: int, dtype: int, peer: int) -> int:
        return self.lib.cnclRecv(address(a), n, dtype, peer, self.comm, self.stream)

    def group_start(self) -> int:
        return self.lib.cnclGroupStart()

    def group_end(self) -> int:
        return self.lib.cnclGroupEnd()

    def state(self) -> int:
        return self.lib.cnclGetCommAsyncError(self.comm)

    FAILED, BUSY = 0x16, (0x06,)

    def abort(self) -> int:
        return self.lib.cnclAbortComm(self.comm)

    def destroy(self) -> int:
        return self.lib.cnclFreeComm(self.comm)


class Hccl(Vendor):
    name, runtime, id_bytes, getter = "hccl", "acl", 4108, "HcclGetRootInfo"
    types: ClassVar = {"i1": 0, "i2": 1, "i4": 2, "f2": 3, "f4": 4, "i8": 5}

    def start(self) -> None:
        ok(self.run.aclInit(0))
        super().start()

    def set_device(self, device: int) -> None:
        ok(self.run.aclrtSetDevice(device))

    def init(self, comm: Any, size: int, data: bytes, rank: int) -> int:
        return self.lib.HcclCommInitRootInfo(size, ctypes.c_char_p(data), rank, ref(comm))

    def new_stream(self) -> int:
        return self.made("aclrtCreateStreamWithConfig", 0, 3)

    def new_event(self) -> int:
        return self.made("aclrtCreateEventExWithFlag", 9)

    def record(self, event: int, stream: int) -> int:
        return self.run.aclrtRecordEvent(event, stream)

    def wait(self, event: int, stream: int) -> int:
        return self.run.aclrtStreamWaitEvent(stream, event)

    def is_done(self, event: int) -> bool:
        status = ctypes.c_int32(-1)
        ok(self.run.aclrtQueryEventStatus(event, ref(status)))
        assert status.value in (0, 1)
        return status.value == 1

    def is_idle(self, stream: int) -> bool:
        status = ctypes.c_int32(-1)
        ok(self.run.aclrtStreamQuery(stream, ref(status)))
        assert status.value in (0, 1)
        return status.value == 0

    def launch(self, stream: int, function: Any) -> int:
        return self.run.aclrtLaunchHostFunc(stream, function, 0)

    def sync(self, stream: int | None = None) -> int:
        return self.run.aclrtSynchronizeStream(stream or self.stream)

    def sum(self, a: Any, b: Any, n: int, dtype: int, op: int = 0, stream: int | None = None) -> int:
        return self.lib.HcclAllReduce(address(a), address(b), n, dtype, op, self.comm, stream or self.stream)

    def broadcast(self, a: Any, b: Any, n: int, dtype: int, root: int) -> int:
        if self.rank.rank == root:
            b[:] = a
        return self.lib.HcclBroadcast(address(b), n, dtype, root, self.comm, self.stream)

    def reduce(self, a: Any, b: Any, n: int, dtype: int, op: int, root: int) -> int:
        return self.lib.HcclReduce(address(a), address(b), n, dtype, op, root, self.comm, self.stream)

    def all_gather(self, a: int, b: int, n: int, dtype: int) -> int:
        return self.lib.HcclAllGather(a, b, n, dtype, self.comm, self.stream)

    def reduce_scatter(self, a: int, b: int, n: int, dtype: int, op: int) -> int:
        return self.lib.HcclReduceScatter(a, b, n, dtype, op, self.comm, self.stream)

    def all_to_all(self, a: Any, b: Any, n: int, dtype: int) -> int:
        return self.lib.HcclAlltoAll(address(a), n, dtype, address(b), n, dtype, self.comm, self.stream)

    def send(self, a: Any, n: int, dtype: int, peer: int) -> int:
        return self.lib.HcclSend(address(a), n, dtype, peer, self.comm, self.stream)

    def recv(self, a: Any, n: int, dtype: int, peer: int) -> int:
        return self.lib.HcclRecv(address(a), n, dtype, peer, self.comm, self.stream)

    def group_start(self) -> int:
        return self.lib.HcclGroupStart()

    def group_end(self) -> int:
        return self.lib.HcclGroupEnd()

    def state(self) -> int:
        found = ctypes.c_int32(-1)
        ok(self.lib.HcclGetCommAsyncError(self.comm, ref(found)))
        return found.value

    FAILED, BUSY = 21, ()

    def destroy(self) -> int:
        return self.lib.HcclCommDestroy(self.comm)


VENDORS: dict[str, type[Vendor]] = {"nccl": Nccl, "hccl": Hccl, "cncl": Cncl}


def connected(rank: Rank, vendor: str, form: str | None = None) -> Any:
    """Returns the vendor with a device, a stream and a communicator of all ranks."""
    speaker = VENDORS[vendor](rank, form)
    speaker.connect()
    return speaker


def numbers(rank: int, count: int, kind: str, seed: int = 1) -> np.ndarray[Any, Any]:
    """Returns repeatable numbers whose sums and products over three ranks stay within the type's range."""
    drawn = np.random.default_rng(1000 * seed + rank).integers(0 if kind[0] == "u" else -4, 5, count)
    return (drawn * 0.37).astype(kind) if kind[0] == "f" else drawn.astype(kind)


def combine(inputs: list[np.ndarray[Any, Any]], op: int) -> np.ndarray[Any, Any]:
    """The reference: combines in rank order; float16 is combined in float32 and rounded once, at the end."""
    kind = inputs[0].dtype
    wide = [part.astype("f4") if kind == np.float16 else part for part in inputs]
    result = wide[0].copy()
    for part in wide[1:]:
        result = (result + part, result * part, np.maximum(result, part), np.minimum(result, part))[op]
    return result.astype(kind)
