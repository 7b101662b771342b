"""Behaviour of the simulated HCCL and AscendCL alone: the limits of the hardware, configurations, parts, two
libraries."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

import numpy as np
import pytest
from ranks import SOON, Rank, address, run, until
from speak import Hccl, combine, connected, numbers, ok, out, ref

PARA, PTR, NOT_SUPPORT, AGAIN = 1, 2, 5, 20
F4 = 4
SUM, PROD = 0, 1


def limits(rank: Rank) -> dict[str, int]:
    v = connected(rank, "hccl")
    a, b = np.ones(64, "f8"), np.ones(64, "f8")
    found = {f"sum {number}": v.sum(a, b, 4, number) for number in [*range(12), 12, 13, 14, 17, 255]}
    found |= {f"product {number}": v.sum(a, b, 4, number, PROD) for number in (0, 1, 2, 3, 4, 5, 11)}
    found |= {f"move {n}": v.lib.HcclBroadcast(address(a), 4, n, 0, v.comm, v.stream) for n in (6, 7, 8, 9, 10, 12)}
    found["average"] = v.sum(a, b, 4, F4, 4)
    found["no stream"] = v.lib.HcclAllReduce(address(a), address(b), 4, F4, SUM, v.comm, 0)
    ok(v.sync())
    return found


def test_what_the_hardware_does_not_add() -> None:
    [found] = run(limits, 1)
    adds = {0, 1, 2, 3, 4, 5, 11}
    unknown = {13, 255}
    for number in [*range(12), 12, 13, 14, 17, 255]:
        expected = 0 if number in adds else PARA if number in unknown else NOT_SUPPORT
        assert found[f"sum {number}"] == expected, number
    for number in (0, 1, 2, 3, 4, 5, 11):
        assert found[f"product {number}"] == (NOT_SUPPORT if number in (1, 11) else 0), number
    assert [found[f"move {n}"] for n in (6, 7, 8, 9, 10, 12)] == [0, 0, 0, 0, 0, NOT_SUPPORT]
    assert (found["average"], found["no stream"]) == (PARA, PTR)
    [newest] = run(limits, 1, {"SAGELLM_SIM_SOC": "Ascend950PR"})
    assert (newest["sum 6"], newest["sum 10"], newest["sum 7"], newest["move 12"]) == (0, 0, NOT_SUPPORT, 0)


def uneven(rank: Rank) -> None:
    v = connected(rank, "hccl")
    me, size = rank.rank, rank.size
    i64 = ctypes.c_uint64 * size
    counts = [3 + r for r in range(size)]
    # The blocks have gaps, so a displacement is not the sum of the counts before it.
    starts = [10 * r for r in range(size)]
    room = 10 * size
    mine, result = numbers(me, counts[me], "f4"), np.zeros(room, "f4")
    gathered = (address(mine), counts[me], address(result), i64(*counts), i64(*starts), F4, v.comm, v.stream)
    ok(v.lib.HcclAllGatherV(*gathered))
    ok(v.sync())
    for r in range(size):
        assert result[starts[r] : starts[r] + counts[r]].tobytes() == numbers(r, counts[r], "f4").tobytes()
        assert (result[starts[r] + counts[r] : starts[r] + 10] == 0).all()
    wide = [numbers(r, room, "f4", 2) for r in range(size)]
    mine, result = wide[me].copy(), np.zeros(counts[me], "f4")
    scattered = (address(mine), i64(*counts), i64(*starts), address(result), counts[me], F4)
    ok(v.lib.HcclReduceScatterV(*scattered, SUM, v.comm, v.stream))
    ok(v.sync())
    assert result.tobytes() == combine(wide, 0)[starts[me] : starts[me] + counts[me]].tobytes()
    assert v.lib.HcclReduceScatterV(*scattered, PROD, v.comm, v.stream) == NOT_SUPPORT
    matrix = [[(a + 2 * b) % 4 for b in range(size)] for a in range(size)]
    sends, receives = matrix[me], [matrix[r][me] for r in range(size)]
    result = np.zeros(room, "f4")
    lists = (address(mine), i64(*sends), i64(*starts), F4, address(result), i64(*receives), i64(*starts), F4)
    ok(v.lib.HcclAlltoAllV(*lists, v.comm, v.stream))
    ok(v.sync())
    for r in range(size):
        block = result[starts[r] : starts[r] + receives[r]]
        assert block.tobytes() == wide[r][10 * me : 10 * me + receives[r]].tobytes()
    flat = (ctypes.c_uint64 * size**2)(*(n for row in matrix for n in row))
    packed = np.zeros(room, "f4")
    ok(v.lib.HcclAlltoAllVC(address(mine), flat, F4, address(packed), F4, v.comm, v.stream))
    ok(v.sync())
    expected = []
    for r in range(size):
        start = sum(matrix[r][:me])
        expected.append(wide[r][start : start + matrix[r][me]])
    assert packed[: sum(receives)].tobytes() == np.concatenate(expected).tobytes()
    everything = (address(mine), i64(*sends), i64(*starts), F4, address(mine), i64(*receives), i64(*starts), F4)
    assert v.lib.HcclAlltoAllV(*everything, v.comm, v.stream) == PARA, "equal buffers"
    for root in range(size):
        part = np.zeros(7, "f4")
        all_of_root = numbers(root, 7 * size, "f4", 5)
        ok(v.lib.HcclScatter(address(all_of_root) if me == root else 0, address(part), 7, F4, root, v.comm, v.stream))
        ok(v.sync())
        assert part.tobytes() == numbers(root, 7 * size, "f4", 5)[7 * me : 7 * me + 7].tobytes()
    ok(v.lib.HcclBarrier(v.comm, v.stream))
    ok(v.sync())
    ok(v.destroy())


@pytest.mark.parametrize("size", [1, 3])
def test_uneven_collectives(size: int) -> None:
    run(uneven, size)


class Item(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("buffer", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("dtype", ctypes.c_int32),
        ("peer", ctypes.c_uint32),
    )


def batch(rank: Rank) -> None:
    v = connected(rank, "hccl")
    me, size = rank.rank, rank.size
    sent = [numbers(10 * me + r, 50, "f4") for r in range(size)]
    got = [np.zeros(50, "f4") for _ in range(size)]
    items = [Item(0, address(sent[r]), 50, F4, r) for r in range(size)]
    items += [Item(1, address(got[r]), 50, F4, r) for r in range(size)]
    ok(v.lib.HcclBatchSendRecv((Item * len(items))(*items), len(items), v.comm, v.stream))
    ok(v.sync())
    for r in range(size):
        assert got[r].tobytes() == numbers(10 * r + me, 50, "f4").tobytes()
    ok(v.group_start())
    assert v.lib.HcclBatchSendRecv((Item * len(items))(*items), len(items), v.comm, v.stream) == NOT_SUPPORT
    assert v.group_end() == NOT_SUPPORT
    ok(v.group_start())
    ok(v.send(sent[0], 50, F4, (me + 1) % size))
    assert v.sum(sent[0], got[0], 50, F4) == NOT_SUPPORT, "two sorts in one group"
    assert v.group_end() == NOT_SUPPORT
    assert v.send(sent[0], 50, F4, me) == PARA
    ok(v.sync())
    ok(v.destroy())


def test_batches_of_messages_exchange_what_single_ones_cannot() -> None:
    run(batch, 3)


def config(version: int, size: int, magic: int = 0xF0F0F0F0, **fields: Any) -> Any:
    data = bytearray(2600)
    struct.pack_into("<QIIQII", data, 0, size, magic, version, 0, 0xFFFFFFFF, 0xFFFFFFFF)
    for name, value in fields.items():
        if isinstance(value, str):
            data[int(name[2:]) : int(name[2:]) + len(value)] = value.encode()
        else:
            struct.pack_into("<I", data, int(name[2:]), value)
    return ctypes.create_string_buffer(bytes(data[: max(size, 32)]), max(size, 32))


def configurations(rank: Rank) -> list[int]:
    v = Hccl(rank)
    found = []
    for data in (
        config(1, 32),
        config(2, 160, at32="name of ours"),
        config(11, 2248, at320="level0:NA;level1:ring"),
        config(12, 2248),
        config(1, 32, magic=7),
        config(1, 31),
        config(11, 2249),
        config(1, 32, at24=0),
        config(1, 32, at28=3),
        config(2, 160, at32="x" * 128),
        config(4, 292, at288=7),
        config(3, 292, at288=7),  # not read, because the field is newer than the version
    ):
        root = ctypes.create_string_buffer(v.make_id(), 4108)
        comm = out()
        found.append(v.lib.HcclCommInitRootInfoConfig(1, root, 0, data, ref(comm)))
        if found == [0, 0]:
            name = ctypes.create_string_buffer(128)
            ok(v.lib.HcclGetCommName(comm.value, name))
            assert name.value == b"name of ours"
    return found


def test_configurations_are_checked_as_the_loader_does() -> None:
    assert run(configurations, 1) == [[0, 0, 0, 0, PARA, PARA, PARA, PARA, PARA, PARA, PARA, 0]]


def parts(rank: Rank) -> None:
    v = connected(rank, "hccl")
    world, me = v.comm, rank.rank
    handle, part = ctypes.c_uint64(world), out()
    make = v.lib.HcclCreateSubCommConfig
    members = (ctypes.c_uint32 * 2)(0, 2)
    if me == 1:
        ok(make(ref(handle), 0, 0, 0xFFFFFFFF, 0, 0, ref(part)))
        assert part.value == 0
    else:
        swapped = (ctypes.c_uint32 * 2)(2, 0)
        assert make(ref(handle), 2, swapped, 7, 0, config(1, 32), ref(part)) == PARA, "not in order"
        ok(make(ref(handle), 2, members, 7, me // 2, config(1, 32), ref(part)))
        v.comm = part.value
        mine, result = numbers(me, 16, "f4"), np.zeros(16, "f4")
        ok(v.sum(mine, result, 16, F4))
        ok(v.sync())
        assert result.tobytes() == combine([numbers(r, 16, "f4") for r in (0, 2)], 0).tobytes()
        nested = ctypes.c_uint64(part.value)
        assert make(ref(nested), 2, members, 9, me // 2, config(1, 32), ref(out())) == NOT_SUPPORT
        assert make(ref(handle), 2, members, 7, me // 2, config(1, 32), ref(out())) == PARA, "one id twice"
        ok(v.destroy())
    v.comm = world
    ok(v.destroy())


def test_parts_of_a_communicator() -> None:
    run(parts, 3)


def busy(rank: Rank) -> None:
    v = connected(rank, "hccl")
    gate, mine = threading.Event(), np.ones(4, "f4")
    v.host_function(lambda _: gate.wait(SOON))
    ok(v.sum(mine, mine, 4, F4))
    assert v.destroy() == AGAIN and v.state() == 0
    gate.set()
    ok(v.sync())
    until(lambda: v.destroy() == 0, "the end of the communicator")
    capability = v.lib.HcclGetCommConfigCapability()
    assert capability == 12
    value = ctypes.c_int32(-1)
    ok(v.lib.HcclSetConfig(0, 1))
    ok(v.lib.HcclGetConfig(0, ref(value)))
    assert value.value == 1 and v.lib.HcclSetConfig(3, 1) == PARA
    assert "simulated" in v.lib.text("HcclGetErrorString", 21)


def test_a_busy_communicator_is_not_destroyed() -> None:
    run(busy, 2)


def test_capabilities_and_chips_can_be_chosen() -> None:
    def answer(environment: dict[str, str]) -> Any:
        return run(asked, 1, environment)[0]

    assert answer({}) == [12, "Ascend910B2", 0, 0]
    assert answer({"SAGELLM_SIM_HCCL_CAPABILITY": "3"})[0] == 3
    assert answer({"SAGELLM_SIM_SOC": "Ascend910A"})[1:3] == ["Ascend910A", NOT_SUPPORT]
    assert answer({"SAGELLM_SIM_SOC": "Ascend950PR"})[3] == NOT_SUPPORT


def asked(rank: Rank) -> list[Any]:
    v = connected(rank, "hccl")
    group = v.group_start()
    found = ctypes.c_int32(-1)
    error = v.lib.HcclGetCommAsyncError(v.comm, ref(found))
    return [v.lib.HcclGetCommConfigCapability(), v.run.text("aclrtGetSocName"), group, error]


@pytest.mark.parametrize("form", ["hccl", "hccl_two"])
def test_the_two_library_form_speaks_the_same(form: str) -> None:
    run(in_form, 2, form=form)


def in_form(rank: Rank, form: str) -> None:
    v = connected(rank, "hccl", form)
    mine, result = numbers(rank.rank, 16, "f4"), np.zeros(16, "f4")
    ok(v.group_start())
    ok(v.sum(mine, result, 16, F4))
    ok(v.group_end())
    ok(v.sync())
    assert result.tobytes() == combine([numbers(r, 16, "f4") for r in range(2)], 0).tobytes()
    ok(v.destroy())


def runtime(rank: Rank) -> None:
    acl = rank.library("acl")
    assert acl.aclrtSetDevice(0) == 100001, "aclInit first"
    ok(acl.aclInit(0))
    assert acl.aclInit(0) == 100002
    assert acl.aclrtCreateStream(ref(out())) == 107002, "no device"
    ok(acl.aclrtSetDevice(1))
    version = ctypes.c_int32()
    ok(acl.aclsysGetVersionNum(ctypes.c_char_p(b"hcomm"), ref(version)))
    assert version.value == 90100000
    stream, other, event, ex = out(), out(), out(), out()
    ok(acl.aclrtCreateStreamWithConfig(ref(stream), 0, 3))
    ok(acl.aclrtCreateStream(ref(other)))
    ok(acl.aclrtCreateEventWithFlag(ref(event), 9))
    ok(acl.aclrtCreateEventExWithFlag(ref(ex), 9))
    status = ctypes.c_int32(-1)

    def asked(name: str, handle: int) -> int:
        code: int = getattr(acl, name)(handle, ref(status))
        return code or -1 - status.value

    # Nothing was recorded. "Not ready" is 0 in one query and 1 in the other.
    assert asked("aclrtQueryEventStatus", event.value) == -1
    assert asked("aclrtQueryEvent", event.value) == -2
    ok(acl.aclrtRecordEvent(event.value, stream.value))
    ok(acl.aclrtSynchronizeEvent(event.value))
    assert asked("aclrtQueryEventStatus", event.value) == -2
    assert asked("aclrtQueryEvent", event.value) == -1
    assert asked("aclrtQueryEventWaitStatus", event.value) == -1
    assert acl.aclrtRecordEvent(event.value, stream.value) == 107000, "a second record without a reset"
    ok(acl.aclrtResetEvent(event.value, stream.value))
    # Waits for the next record; a wait for an Ex event would not.
    ok(acl.aclrtStreamWaitEvent(other.value, event.value))
    ok(acl.aclrtStreamQuery(other.value, ref(status)))
    assert status.value == 1
    assert asked("aclrtQueryEventWaitStatus", event.value) == -2
    assert acl.aclrtDestroyEvent(event.value) == 107000, "somebody waits"
    ok(acl.aclrtRecordEvent(event.value, stream.value))
    ok(acl.aclrtSynchronizeStream(other.value))
    for _ in range(3):
        ok(acl.aclrtRecordEvent(ex.value, stream.value))
    ok(acl.aclrtSynchronizeStream(stream.value))
    assert asked("aclrtQueryEventStatus", ex.value) == -2
    assert acl.aclrtResetEvent(ex.value, stream.value) == 107000
    assert asked("aclrtQueryEvent", ex.value) == asked("aclrtQueryEventWaitStatus", ex.value) == 107000
    memory, back = out(), np.zeros(16, "u1")
    ok(acl.aclrtMalloc(ref(memory), 16, 0))
    ok(acl.aclrtMemsetAsync(memory.value, 16, 7, 16, stream.value))
    ok(acl.aclrtMemcpyAsync(address(back), 16, memory.value, 16, 2, stream.value))
    ok(acl.aclrtSynchronizeStreamWithTimeout(stream.value, 5000))
    assert (back == 7).all()
    assert acl.aclrtMemcpyAsync(address(back), 8, memory.value, 16, 2, stream.value) == 107000
    assert "simulated" in acl.text("aclGetRecentErrMsg")
    ok(acl.aclrtFree(memory.value))
    ok(acl.aclrtDestroyEvent(event.value))
    ok(acl.aclrtDestroyStream(stream.value))
    assert acl.aclrtStreamQuery(stream.value, ref(status)) == 107003


def test_the_runtime() -> None:
    run(runtime, 1)
