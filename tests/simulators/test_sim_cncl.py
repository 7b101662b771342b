"""Behaviour of the simulated CNCL and CNRT alone."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
from ranks import SOON, Rank, address, run, until
from speak import Cncl, connected, numbers, ok, out, ref

F4 = 0x12
REINIT, NULL_POINTER, ARGUMENTS, IN_PROGRESS, NOT_INIT = 0x71, 0x21, 0x07, 0x06, 0x61


def one_id_twice(rank: Rank) -> None:
    v = Cncl(rank)
    data = v.id()
    comm = out()
    ok(v.init(comm, rank.size, data, rank.rank))
    assert v.init(out(), rank.size, data, rank.rank) == REINIT
    v.comm = comm.value
    ok(v.destroy())


def test_a_clique_id_serves_once() -> None:
    run(one_id_twice, 2)


def in_a_group(rank: Rank) -> None:
    v = Cncl(rank)
    comm = ctypes.c_uint64(4711)
    ok(v.group_start())
    ok(v.group_start())
    ok(v.init(comm, rank.size, v.id(), rank.rank))
    assert comm.value == 0, "null until the outermost end"
    ok(v.group_end())
    assert comm.value == 0
    v.comm = comm.value
    a = np.ones(4, "f4")
    ok(v.group_end())
    assert comm.value != 0
    v.comm = comm.value
    ok(v.sum(a, a, 4, F4))
    ok(v.sync())
    assert (a == rank.size).all()
    ok(v.destroy())


def test_communicators_made_in_a_group_are_null_until_its_end() -> None:
    run(in_a_group, 2)


def states(rank: Rank) -> None:
    v = connected(rank, "cncl")
    gate, a = threading.Event(), np.ones(4, "f4")
    assert v.state() == 0
    v.host_function(lambda _: gate.wait(SOON))
    ok(v.sum(a, a, 4, F4))
    assert v.state() == IN_PROGRESS, "healthy, and returned rather than written"
    gate.set()
    ok(v.sync())
    until(lambda: v.state() == 0, "the end of the work")
    found = ctypes.c_int32(-1)
    ok(v.lib.cnclGetCommCount(ref(found), v.comm))
    assert found.value == rank.size, "the result comes first"
    assert v.sum(a, a, 4, F4, 4) == ARGUMENTS, "there is no average"
    assert v.sum(a, a, 4, 0) == ARGUMENTS
    assert v.send(a, 4, F4, rank.rank) == ARGUMENTS
    assert v.lib.cnclGetCommAsyncError(4711) == NOT_INIT
    ok(v.lib.cnclSetCommConfig(v.comm, ctypes.byref(ctypes.c_int32(0x10))))
    assert v.lib.cnclSetCommConfig(v.comm, ctypes.byref(ctypes.c_int32(3))) == ARGUMENTS
    b = np.zeros(4, "f4")
    ok(v.lib.cnclReduce(address(b), 0 if rank.rank else address(a), 4, F4, 0, 0, v.comm, v.stream))
    ok(v.lib.cnclBcast(address(a), 4, F4, 0, v.comm, v.stream))
    ok(v.sync())
    assert (a == 0).all()
    ok(v.destroy())


def test_states_and_getters() -> None:
    run(states, 2)


def uneven(rank: Rank) -> None:
    v = connected(rank, "cncl")
    me, size = rank.rank, rank.size
    counts = [[(a + b) % 3 + 1 for b in range(size)] for a in range(size)]
    sent = [numbers(10 * me + r, counts[me][r], "f4") for r in range(size)]
    got = [np.zeros(counts[r][me], "f4") for r in range(size)]
    pointers, u32, types = ctypes.c_uint64 * size, ctypes.c_uint32 * size, (ctypes.c_int32 * size)(*[F4] * size)
    lists = (pointers(*map(address, sent)), u32(*counts[me]), types)
    into = (pointers(*map(address, got)), u32(*(counts[r][me] for r in range(size))), types)
    ok(v.lib.cnclAlltoAllv(*lists, *into, v.comm, v.stream))
    ok(v.sync())
    for r in range(size):
        assert got[r].tobytes() == numbers(10 * r + me, counts[r][me], "f4").tobytes()
    assert v.lib.cnclAlltoAllv(*lists, *lists, v.comm, v.stream) == ARGUMENTS, "not in place"
    assert v.lib.cnclAlltoAllv(0, *lists[1:], *into, v.comm, v.stream) == NULL_POINTER
    ok(v.destroy())


def test_uneven_exchange() -> None:
    run(uneven, 3)


def pending(rank: Rank) -> list[int]:
    v = Cncl(rank)
    gate, event = threading.Event(), v.new_event()
    v.host_function(lambda _: gate.wait(SOON))
    ok(v.record(event, v.stream))
    codes = [v.run.cnrtQueryNotifier(event), v.run.cnrtGetLastError(), v.run.cnrtGetLastError()]
    codes.append(v.run.cnrtQueueQuery(v.stream))
    gate.set()
    ok(v.run.cnrtWaitNotifier(event))
    ok(v.run.cnrtQueryNotifier(event))
    return codes


def test_work_that_runs_has_two_numbers() -> None:
    assert run(pending, 1) == [[632014, 632014, 0, 632014]]
    assert run(pending, 1, {"SAGELLM_SIM_CNRT_PENDING": "notready"}) == [[1, 1, 0, 1]]


def one_process(rank: Rank) -> None:
    v = Cncl(rank)
    comms, devices, ranks = (ctypes.c_uint64 * 2)(), (ctypes.c_int32 * 2)(2, 3), (ctypes.c_int32 * 2)(0, 1)
    assert v.lib.cnclInitComms(comms, 2, devices, ranks, 3, 0) == NULL_POINTER, "an id is missing"
    ok(v.lib.cnclInitComms(comms, 2, devices, ranks, 2, 0))
    ok(v.lib.cnclDestroyComms(comms, 2))
    event = out()
    assert v.run.cnrtNotifierCreateWithFlags(ref(event), 8) == 100006, "8 needs 4"
    ok(v.run.cnrtNotifierCreateWithFlags(ref(event), 12))
    a, b = np.arange(16, dtype="u1"), np.zeros(16, "u1")
    ok(v.run.cnrtMemcpyAsync_V3(address(b), address(a), 16, v.stream, 0))
    ok(v.run.cnrtSyncDevice())
    assert (a == b).all()


def test_a_clique_of_one_process() -> None:
    run(one_process, 1)
