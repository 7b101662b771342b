"""Behaviour of the simulated NCCL and CUDA driver alone: configurations, splitting, plug-ins, capture."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import SOON, Rank, address, run, until
from speak import Nccl, UniqueId, combine, connected, numbers, ok, out, ref

IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE = 7, 4, 5
F4 = 7
UNSET = -(2**31)


def config(version: int = 22800, size: int = 80, magic: int = 0xCAFEBEEF, **fields: int) -> Any:
    """``ncclConfig_t`` of a version. All fields are unset, except those that are passed by their offset, such as
    ``at20=3``."""
    data = bytearray(
        struct.pack("<QIIiiiiQiiQiiiiii", size, magic, version, *[UNSET] * 4, 0, *[UNSET] * 2, 0, *[UNSET] * 6)
    )
    data += struct.pack("<4i", *[UNSET] * 4)
    for name, value in fields.items():
        struct.pack_into("<i", data, int(name[2:]), value)
    return ctypes.create_string_buffer(bytes(data[:size]), size)


def state(v: Nccl, comm: int) -> int:
    v.comm = comm
    return v.state()


def not_blocking(rank: Rank) -> None:
    v = Nccl(rank)
    comm = out()
    data = UniqueId.from_buffer_copy(v.id())
    code = v.lib.ncclCommInitRankConfig(ref(comm), rank.size, data, rank.rank, config(at16=0))
    assert code == IN_PROGRESS and comm.value != 0
    v.comm = comm.value
    mine, result = numbers(rank.rank, 8, "f4"), np.zeros(8, "f4")
    assert v.sum(mine, result, 8, F4) == INVALID_ARGUMENT, "not ready"
    assert v.state() == IN_PROGRESS
    until(lambda: v.state() == 0, "the communicator")
    assert v.sum(mine, result, 8, F4) == IN_PROGRESS
    assert v.sum(mine, result, 8, F4) == INVALID_ARGUMENT, "the last call is in progress"
    until(lambda: v.state() == 0, "the call")
    ok(v.sync())
    assert result.tobytes() == combine([numbers(r, 8, "f4") for r in range(rank.size)], 0).tobytes()
    # A part of this communicator inherits the setting.
    part = out()
    assert v.lib.ncclCommSplit(v.comm, 0, -rank.rank, ref(part), 0) == IN_PROGRESS
    until(lambda: state(v, part.value) == 0, "the part")
    own = ctypes.c_int32(-1)
    ok(v.lib.ncclCommUserRank(part.value, ref(own)))
    assert own.value == rank.size - 1 - rank.rank
    ok(v.destroy())
    v.comm = comm.value
    ok(v.abort())


def test_a_communicator_that_does_not_block_is_in_progress() -> None:
    run(not_blocking, 2, {"SAGELLM_SIM_NCCL_DELAY_US": "700000"})


def abort_while_meeting(rank: Rank) -> None:
    v = Nccl(rank)
    comm = out()
    data = UniqueId.from_buffer_copy(v.id())
    assert v.lib.ncclCommInitRankConfig(ref(comm), 2, data, 0, config(at16=0)) == IN_PROGRESS
    v.comm = comm.value
    time.sleep(0.2)
    assert v.state() == IN_PROGRESS, "no other rank comes"
    ok(v.abort())


def test_abort_ends_a_set_up() -> None:
    run(abort_while_meeting, 1)


def configurations(rank: Rank) -> list[int]:
    v = Nccl(rank)
    found = []
    for data in (
        config(magic=1),
        config(size=16),
        config(at20=9),
        config(at24=0),
        config(version=22700, at76=5),  # not read, because the field is newer than the version
        config(version=23005, size=96, at92=7),
        config(version=23004, size=96, at92=7),
        config(version=22700, size=72),
    ):
        comm = out()
        found.append(v.lib.ncclCommInitRankConfig(ref(comm), 1, UniqueId.from_buffer_copy(v.make_id()), 0, data))
    return found


def test_configurations_are_read_by_version() -> None:
    bad = INVALID_ARGUMENT
    assert run(configurations, 1) == [[bad, bad, bad, bad, 0, bad, 0, 0]]


def split_and_shrink(rank: Rank) -> None:
    v = connected(rank, "nccl")
    world, me = v.comm, rank.rank
    part = out()
    ok(v.lib.ncclCommSplit(world, me % 2, -me, ref(part), 0))
    v.comm = part.value
    members = [r for r in (2, 1, 0) if r % 2 == me % 2]
    mine, result = numbers(me, 16, "f4"), np.zeros(16, "f4")
    ok(v.sum(mine, result, 16, F4))
    ok(v.sync())
    assert result.tobytes() == combine([numbers(r, 16, "f4") for r in members], 0).tobytes(), "ordered by the keys"
    ok(v.destroy())
    ok(v.lib.ncclCommSplit(world, -1 if me == 1 else 3, me, ref(part), 0))
    assert (part.value == 0) == (me == 1)
    rank.barrier("split")
    v.comm = world
    if me == 2:
        os._exit(0)  # exits without leaving the communicator
    ok(v.sum(mine, result, 16, F4))
    until(lambda: v.state() == v.FAILED, "the death of rank 2")
    excluded = (ctypes.c_int32 * 1)(2)
    assert v.lib.ncclCommShrink(world, excluded, 1, ref(part), 0, 0) == INVALID_USAGE, "it has failed: abort it"
    ok(v.lib.ncclCommShrink(world, excluded, 1, ref(part), 0, 1))
    ok(v.sync())
    v.comm = part.value
    ok(v.sum(mine, result, 16, F4))
    ok(v.sync())
    assert result.tobytes() == combine([numbers(r, 16, "f4") for r in range(2)], 0).tobytes()
    ok(v.destroy())


def test_split_by_color_and_key_and_shrink_after_a_death() -> None:
    from ranks import Job

    with Job(split_and_shrink, 3, {"SAGELLM_SIM_CONNECT": "eager"}) as job:
        job.result(0)
        job.result(1)


def factors(rank: Rank) -> None:
    v = connected(rank, "nccl")
    me, size = rank.rank, rank.size
    handles = []
    for value in (0.5, 3.0):
        op, scalar = ctypes.c_int32(-1), np.array([value + me], "f4")
        ok(v.lib.ncclRedOpCreatePreMulSum(ref(op), address(scalar), F4, 1, v.comm))
        scalar[:] = 99  # the factor has already been read
        handles.append(op.value)
    assert handles == [5, 6]
    mine, result = numbers(me, 33, "f4"), np.zeros(33, "f4")
    ok(v.sum(mine, result, 33, F4, handles[0]))
    ok(v.sync())
    scaled = [numbers(r, 33, "f4") * np.float32(0.5 + r) for r in range(size)]
    assert result.tobytes() == combine(scaled, 0).tobytes()
    # A factor on the device is read when the operation runs.
    op, scalar, gate = ctypes.c_int32(-1), np.array([1.0], "f4"), threading.Event()
    ok(v.lib.ncclRedOpCreatePreMulSum(ref(op), address(scalar), F4, 0, v.comm))
    v.host_function(lambda _: gate.wait(SOON))
    ok(v.sum(mine, result, 33, F4, op.value))
    scalar[:] = 2.0
    gate.set()
    ok(v.sync())
    assert result.tobytes() == combine([numbers(r, 33, "f4") * np.float32(2) for r in range(size)], 0).tobytes()
    ok(v.lib.ncclRedOpDestroy(handles[0], v.comm))
    assert v.sum(mine, result, 33, F4, handles[0]) == INVALID_ARGUMENT
    assert v.sum(mine, result, 33, 8, handles[1]) == INVALID_ARGUMENT, "another type"
    assert v.lib.ncclRedOpDestroy(handles[0], v.comm) == INVALID_ARGUMENT
    ok(v.sum(mine, result, 33, F4, Nccl.AVG))
    ok(v.sync())
    assert result.tobytes() == (combine([numbers(r, 33, "f4") for r in range(size)], 0) / np.float32(size)).tobytes()
    ok(v.destroy())


def test_factors_and_averages() -> None:
    run(factors, 3)


def rooted(rank: Rank) -> None:
    v = connected(rank, "nccl")
    me, size = rank.rank, rank.size
    for root in range(size):
        mine, everything = numbers(me, 9, "f8", root), np.zeros(9 * size)
        ok(v.lib.ncclGather(address(mine), address(everything), 9, 8, root, v.comm, v.stream))
        ok(v.sync())
        whole = np.concatenate([numbers(r, 9, "f8", root) for r in range(size)])
        assert everything.tobytes() == (whole if me == root else np.zeros(9 * size)).tobytes()
        part = np.zeros(9)
        ok(v.lib.ncclScatter(address(everything), address(part), 9, 8, root, v.comm, v.stream))
        ok(v.sync())
        assert part.tobytes() == mine.tobytes()
    # Messages to the rank itself, in a group.
    got = np.zeros(9)
    ok(v.group_start())
    ok(v.send(mine, 9, 8, me))
    ok(v.recv(got, 9, 8, me))
    ok(v.group_end())
    ok(v.sync())
    assert got.tobytes() == mine.tobytes()
    ok(v.destroy())


def test_gather_scatter_and_messages_to_oneself() -> None:
    run(rooted, 3)


def groups(rank: Rank) -> None:
    v = connected(rank, "nccl")
    mine, result = np.ones(4, "f4"), np.zeros(4, "f4")
    assert v.group_end() == INVALID_USAGE, "none is open"
    ok(v.group_start())
    ok(v.sum(mine, result, 4, F4))
    assert v.sum(mine, result, 4, 99) == INVALID_ARGUMENT
    assert v.group_end() == INVALID_ARGUMENT, "an error spoils the whole group"
    ok(v.sync())
    assert (result == 0).all()
    # One process has all ranks.
    comms = (ctypes.c_uint64 * 2)()
    ok(v.lib.ncclCommInitAll(comms, 2, (ctypes.c_int32 * 2)(4, 5)))
    streams = []
    for device in (4, 5):
        v.set_device(device)
        streams.append(v.new_stream())
    parts = [np.full(4, at + 1, "f4") for at in range(2)]
    ok(v.group_start())
    for at in range(2):
        v.comm = comms[at]
        v.set_device(4 + at)
        ok(v.sum(parts[at], parts[at], 4, F4, stream=streams[at]))
    ok(v.group_end())
    for at in range(2):
        ok(v.sync(streams[at]))
        assert (parts[at] == 3).all()


def test_groups_fail_as_a_whole_and_may_hold_several_communicators() -> None:
    run(groups, 1)


def one_device(rank: Rank) -> int:
    v = Nccl(rank)
    v.set_device(0)
    return v.init(out(), rank.size, v.id(), rank.rank)


def test_two_ranks_on_one_device() -> None:
    assert run(one_device, 2) == [INVALID_USAGE] * 2
    assert run(one_device, 2, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}) == [0] * 2
    old = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "SAGELLM_SIM_NCCL_VERSION": "22907"}
    assert run(one_device, 2, old) == [INVALID_USAGE] * 2, "before 2.30.3 there was no such switch"


# ------------------------------------------------------------------------------------------------------ plug-ins


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The plug-ins of the tests, by version."""
    folder = tmp_path_factory.mktemp("plugins")
    built = {}
    for version in (5, 6):
        built[version] = folder / f"libplugin{version}.so"
        source = Path(__file__).with_name("plugin.c")
        command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-DPLUGIN_VERSION={version}"]
        subprocess.run([*command, "-o", str(built[version]), str(source)], check=True, timeout=60)
    return built


def tuned(rank: Rank) -> list[int]:
    v = connected(rank, "nccl")
    a, b = np.ones(96, "f4"), np.zeros(96, "f4")
    found = [v.sum(a, b, 64, F4), v.broadcast(a, b, 64, F4, 1)]
    found.append(v.all_gather(address(a), address(b), 32, F4))
    ok(v.sync())
    ok(v.destroy())
    return found


@pytest.mark.parametrize("version", [5, 6])
def test_plugins_are_loaded_and_told(plugins: dict[int, Path], tmp_path: Path, version: int) -> None:
    log = tmp_path / "log"
    order = {
        "PLUGIN_LOG": str(log),
        "NCCL_TUNER_PLUGIN": str(plugins[version]),
        "PLUGIN_ALGO": "1",
        "PLUGIN_PROTO": "2",
    }
    order |= {"NCCL_PROFILER_PLUGIN": str(plugins[version]), "SAGELLM_SIM_TRACE": str(tmp_path / "trace")}
    assert run(tuned, 2, order) == [[0, 0, 0]] * 2
    lines = log.read_text().splitlines()
    assert lines.count("tuner init ranks=2 nodes=1 most=2 ok") == 2
    assert lines.count("tuner get function=4 bytes=256 operations=1 ok") == 2
    assert lines.count("tuner get function=0 bytes=256 operations=1 ok") == 2
    assert lines.count("tuner get function=2 bytes=256 operations=1 ok") == 2
    assert lines.count("tuner chunk algorithm=1 protocol=2 channels=3") == (6 if version == 6 else 0)
    assert lines.count("finalize") == 4
    assert sorted(line for line in lines if line.startswith("profiler init")) == [
        f"profiler init nodes=1 ranks=2 rank={rank} ok" for rank in range(2)
    ]
    for number, (func, count, root) in enumerate([("AllReduce", 64, 0), ("Broadcast", 64, 1), ("AllGather", 32, 0)]):
        for rank in range(2):
            what = f"number={number} func={func} type=ncclFloat32 count={count} root={root} RING SIMPLE"
            assert f"profiler start type=2 rank={rank} {what}" in lines
    assert lines.count("profiler stop 1") == 6
    traces = "".join(file.read_text() for file in tmp_path.glob("trace.*"))
    assert traces.count("tuned=true algo=RING proto=SIMPLE") == 6
    assert "plugin-log level=3 the plug-in logs" in traces


def test_an_error_of_the_tuner_fails_the_collective(plugins: dict[int, Path], tmp_path: Path) -> None:
    order = {"PLUGIN_LOG": str(tmp_path / "log"), "NCCL_TUNER_PLUGIN": str(plugins[6])}
    assert run(tuned, 2, {**order, "PLUGIN_RESULT": "3"}) == [[3, 3, 3]] * 2
    # NVLS is marked unusable: a plug-in that chooses it nevertheless is faulty.
    assert run(tuned, 2, {**order, "PLUGIN_ALGO": "4", "PLUGIN_FORCE": "1"}) == [[3, 3, 3]] * 2
    assert run(tuned, 2, {**order, "PLUGIN_ALGO": "4"}) == [[0, 0, 0]] * 2


def test_a_plugin_that_is_not_there_changes_nothing() -> None:
    assert run(tuned, 2, {"NCCL_TUNER_PLUGIN": "/nowhere/libtuner.so"}) == [[0, 0, 0]] * 2


# ------------------------------------------------------------------------------------------------------- capture


def captured(rank: Rank) -> None:
    v = connected(rank, "nccl")
    cu, stream, other = v.run, v.stream, v.new_stream()
    mine, result = np.full(4, rank.rank + 1, "f4"), np.zeros(4, "f4")
    before, after, graph, executable = v.new_event(), v.new_event(), out(), out()
    status = ctypes.c_int32(-1)
    ok(cu.cuStreamBeginCapture_v2(stream, 1))
    ok(v.record(before, stream))
    ok(v.wait(before, other))
    ok(cu.cuStreamIsCapturing(other, ref(status)))
    assert status.value == 1, "it joined"
    ok(v.sum(mine, result, 4, F4, stream=other))
    ok(v.record(after, other))
    ok(v.wait(after, stream))
    ok(cu.cuStreamEndCapture(stream, ref(graph)))
    ok(cu.cuStreamIsCapturing(other, ref(status)))
    assert status.value == 0 and (result == 0).all()
    ok(cu.cuGraphInstantiateWithFlags(ref(executable), graph.value, 0))
    for turn in range(1, 4):
        mine[:] = turn * (rank.rank + 1)
        ok(cu.cuGraphLaunch(executable.value, stream))
        ok(v.sync())
        assert (result == 3 * turn).all()
    ok(v.destroy())


def test_a_captured_collective_runs_with_every_launch() -> None:
    run(captured, 2)


def broken_captures(rank: Rank) -> dict[str, int]:
    v = connected(rank, "nccl")
    cu, stream, other, event = v.run, v.stream, v.new_stream(), v.new_event()
    found = {}

    def capture(name: str, body: Any, mode: int = 0) -> None:
        graph = out()
        ok(cu.cuStreamBeginCapture_v2(stream, mode))
        body()
        found[name] = cu.cuStreamEndCapture(stream, ref(graph))

    ok(v.record(event, other))
    ok(v.sync(other))
    capture("stream query", lambda: cu.cuStreamQuery(stream))
    capture("stream query elsewhere", lambda: ok(cu.cuStreamQuery(other)))
    capture("event query", lambda: cu.cuEventQuery(event))

    def in_thread(body: Any) -> Any:
        def start() -> None:
            thread = threading.Thread(target=body)
            thread.start()
            thread.join(SOON)

        return start

    def watchdog(mode: int) -> int:
        v.set_device(0)
        exchanged = ctypes.c_uint32(mode)
        ok(cu.cuThreadExchangeStreamCaptureMode(ref(exchanged)))
        assert exchanged.value == 0
        code: int = cu.cuEventQuery(event)
        return code

    capture("global watchdog", in_thread(lambda: watchdog(0)))
    capture("relaxed watchdog", in_thread(lambda: watchdog(2)))
    capture("relaxed capture", lambda: ok(cu.cuEventQuery(event)), mode=2)
    capture("work from outside", lambda: v.wait(event, stream))

    def stray() -> None:
        fresh = v.new_event()
        ok(v.record(fresh, stream))
        ok(v.wait(fresh, other))
        v.host_function(lambda _: None, other)

    capture("not joined", stray)
    ok(v.sync(other))
    ok(v.destroy())
    return found


def test_what_breaks_a_capture() -> None:
    assert run(broken_captures, 1) == [
        {
            "stream query": 901,
            "stream query elsewhere": 0,
            "event query": 901,
            "global watchdog": 901,
            "relaxed watchdog": 0,
            "relaxed capture": 0,
            "work from outside": 901,
            "not joined": 904,
        }
    ]


def driver(rank: Rank) -> None:
    cu = rank.library("cuda")
    count = ctypes.c_int32()
    assert cu.cuDeviceGetCount(ref(count)) == 3, "not initialised"
    v = Nccl(rank)
    ok(cu.cuDeviceGetCount(ref(count)))
    assert count.value == 8
    memory, a = out(), np.arange(64, dtype="u1")
    ok(cu.cuMemAlloc_v2(ref(memory), 64))
    back = np.zeros(64, "u1")
    ok(cu.cuMemcpyHtoDAsync_v2(memory.value, address(a), 64, v.stream))
    ok(cu.cuMemcpyDtoHAsync_v2(address(back), memory.value, 64, v.stream))
    start, end, time_ms = v.new_event(), v.new_event(), ctypes.c_float(-1)
    ok(v.record(start, v.stream))
    v.host_function(lambda _: time.sleep(0.01))
    ok(v.record(end, v.stream))
    ok(v.sync())
    assert (back == a).all()
    ok(cu.cuEventElapsedTime(ref(time_ms), start, end))
    assert time_ms.value >= 10
    ok(cu.cuMemFree_v2(memory.value))
    assert cu.cuMemFree_v2(memory.value) == 1
    assert cu.cuEventQuery(4711) == 400 and cu.cuStreamQuery(4711) == 400
    ok(cu.cuCtxSetCurrent(0))
    assert cu.cuStreamCreate(ref(out()), 0) == 201
    assert cu.cuCtxSetCurrent(4711) == 201


def test_the_driver() -> None:
    run(driver, 1)
