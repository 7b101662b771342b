"""The behaviour that all simulated libraries share: numbers, order, faults; each vendor with 1 to 3 processes."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from ranks import SOON, Job, Rank, address, run, until
from speak import Vendor, combine, connected, numbers, ok

ALL = ("nccl", "hccl", "cncl")
EVERY = pytest.mark.parametrize("vendor", ALL)
COUNT = 1003
#: Connects ranks when a communicator is made. So calls wait for peers on their stream, and not on the host.
CONNECTED = {"SAGELLM_SIM_CONNECT": "eager"}


def together(rank: Rank, vendor: str) -> Any:
    """Like `connected`, for short limits: no rank waits for a rank that is still starting, and all launch together."""
    rank.barrier("started")
    v = connected(rank, vendor)
    rank.barrier("connected")
    return v


# ------------------------------------------------------------------------------------------------------ numbers


def every_collective(rank: Rank, vendor: str) -> None:
    v: Any = connected(rank, vendor)
    me, size = rank.rank, rank.size
    for kind, dtype in v.types.items():
        for op in v.ops:
            if vendor == "hccl" and op == 1 and kind == "i2":
                continue
            inputs = [numbers(r, COUNT, kind) for r in range(size)]
            mine, result = inputs[me].copy(), np.zeros(COUNT, kind)
            ok(v.sum(mine, result, COUNT, dtype, op))
            ok(v.sync())
            assert result.tobytes() == combine(inputs, op).tobytes(), (kind, op)
            ok(v.sum(mine, mine, COUNT, dtype, op))  # in place
            ok(v.sync())
            assert mine.tobytes() == result.tobytes(), (kind, op)
            root = op % size
            mine, result = inputs[me].copy(), np.zeros(COUNT, kind)
            ok(v.reduce(mine, result, COUNT, dtype, op, root))
            ok(v.sync())
            assert result.tobytes() == (combine(inputs, op) if me == root else np.zeros(COUNT, kind)).tobytes()
            wide = [numbers(r, COUNT * size, kind, 2) for r in range(size)]
            mine, result = wide[me].copy(), np.zeros(COUNT, kind)
            expected = combine(wide, op)[me * COUNT : (me + 1) * COUNT]
            ok(v.reduce_scatter(address(mine), address(result), COUNT, dtype, op))
            ok(v.sync())
            assert result.tobytes() == expected.tobytes(), (kind, op)
            own = address(mine) + me * mine.itemsize * COUNT
            ok(v.reduce_scatter(address(mine), own, COUNT, dtype, op))  # in place
            ok(v.sync())
            assert mine[me * COUNT : (me + 1) * COUNT].tobytes() == expected.tobytes(), (kind, op)
        every_movement(v, kind, dtype)
    ok(v.destroy())


def every_movement(v: Any, kind: str, dtype: int) -> None:
    me, size = v.rank.rank, v.rank.size
    inputs = [numbers(r, COUNT, kind, 3) for r in range(size)]
    for root in range(size):
        mine, result = inputs[me].copy(), np.zeros(COUNT, kind)
        ok(v.broadcast(mine, result, COUNT, dtype, root))
        ok(v.sync())
        assert result.tobytes() == inputs[root].tobytes()
    whole = np.concatenate(inputs)
    mine, result = inputs[me].copy(), np.zeros(COUNT * size, kind)
    ok(v.all_gather(address(mine), address(result), COUNT, dtype))
    ok(v.sync())
    assert result.tobytes() == whole.tobytes()
    result[:] = 0
    result[me * COUNT : (me + 1) * COUNT] = mine
    ok(v.all_gather(address(result) + me * mine.itemsize * COUNT, address(result), COUNT, dtype))  # in place
    ok(v.sync())
    assert result.tobytes() == whole.tobytes()
    wide = [numbers(r, COUNT * size, kind, 4) for r in range(size)]
    mine, result = wide[me].copy(), np.zeros(COUNT * size, kind)
    ok(v.all_to_all(mine, result, COUNT, dtype))
    ok(v.sync())
    assert result.tobytes() == np.concatenate([w[me * COUNT : (me + 1) * COUNT] for w in wide]).tobytes()


@EVERY
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_gives_the_bits_of_the_reference(vendor: str, size: int) -> None:
    run(every_collective, size, vendor=vendor)


def around_a_ring(rank: Rank, vendor: str, count: int) -> None:
    v: Any = connected(rank, vendor)
    right, left = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    for turn in range(3):
        mine, result = numbers(rank.rank, count, "i4", turn), np.zeros(count, "i4")
        ok(v.group_start())
        ok(v.send(mine, count, v.types["i4"], right))
        ok(v.recv(result, count, v.types["i4"], left))
        ok(v.group_end())
        ok(v.sync())
        assert result.tobytes() == numbers(left, count, "i4", turn).tobytes()
    # Without a group, one of the two ranks must receive first.
    mine, result = numbers(rank.rank, count, "i4", 9), np.zeros(count, "i4")
    if rank.rank == 0:
        ok(v.send(mine, count, v.types["i4"], 1))
    elif rank.rank == 1:
        ok(v.recv(result, count, v.types["i4"], 0))
        ok(v.sync())
        assert result.tobytes() == numbers(0, count, "i4", 9).tobytes()
    ok(v.sync())
    ok(v.destroy())


@EVERY
@pytest.mark.parametrize("count", [1, 100_000])
def test_messages_in_a_group_exchange(vendor: str, count: int) -> None:
    run(around_a_ring, 3, vendor=vendor, count=count)


def two_streams_and_groups(rank: Rank, vendor: str) -> None:
    v: Any = connected(rank, vendor)
    other = v.new_stream()
    a = [numbers(rank.rank, COUNT, "f4", seed) for seed in range(4)]
    b = [np.zeros(COUNT, "f4") for _ in a]
    ok(v.group_start())
    for at, (mine, result) in enumerate(zip(a, b, strict=True)):
        ok(v.sum(mine, result, COUNT, v.types["f4"], stream=(v.stream, other)[at % 2]))
    time.sleep(0.02)
    assert all((result == 0).all() for result in b), "nothing runs before the end of the group"
    ok(v.group_end())
    ok(v.sync())
    ok(v.sync(other))
    for seed, result in enumerate(b):
        expected = combine([numbers(r, COUNT, "f4", seed) for r in range(rank.size)], 0)
        assert result.tobytes() == expected.tobytes()
    ok(v.destroy())


@EVERY
def test_a_group_of_collectives_on_two_streams(vendor: str) -> None:
    run(two_streams_and_groups, 2, vendor=vendor)


def narrow(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Converts float32 to bfloat16, rounded to nearest even. Returns the bits."""
    bits = values.view("u4").astype("u8")
    rounded: np.ndarray[Any, Any] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return rounded.astype("u2")


def bfloat16(rank: Rank, vendor: str) -> None:
    v: Any = connected(rank, vendor)
    dtype = {"nccl": 9, "hccl": 11, "cncl": 0x11}[vendor]
    inputs = [narrow(numbers(r, COUNT, "f4")) for r in range(rank.size)]
    wide = [(part.astype("u4") << 16).view("f4") for part in inputs]
    mine, result = inputs[rank.rank].copy(), np.zeros(COUNT, "u2")
    for op in (0, 2, 3):
        ok(v.sum(mine, result, COUNT, dtype, op))
        ok(v.sync())
        assert result.tobytes() == narrow(combine(wide, op)).tobytes(), op
    ok(v.destroy())


@EVERY
def test_bfloat16_is_rounded_once(vendor: str) -> None:
    run(bfloat16, 3, vendor=vendor)


# ------------------------------------------------------------------------------------------------ asynchronous


def blocked_stream(rank: Rank, vendor: str) -> None:
    v: Any = connected(rank, vendor)
    gate, order = threading.Event(), list[Any]()
    mine, result = np.ones(8, "f4"), np.zeros(8, "f4")
    v.host_function(lambda _: order.append("gate" if gate.wait(SOON) else "too late"))
    v.host_function(lambda _: mine.__setitem__(slice(None), 5))  # a late kernel
    ok(v.sum(mine, result, 8, v.types["f4"]))
    event = v.new_event()
    ok(v.record(event, v.stream))
    other = v.new_stream()
    ok(v.wait(event, other))
    v.host_function(lambda _: order.append(float(result[0])), other)
    third = v.new_stream()
    v.host_function(lambda _: order.append("third"), third)
    ok(v.sync(third))
    time.sleep(0.05)
    assert order == ["third"], "what was issued behind the gate ran"
    assert (result == 0).all()
    assert not v.is_done(event) and not v.is_idle(v.stream) and not v.is_idle(other)
    gate.set()
    ok(v.sync(other))
    assert order == ["third", "gate", 5.0 * rank.size]
    assert v.is_done(event)
    until(lambda: v.is_idle(v.stream) and v.is_idle(other), "idle streams")
    ok(v.destroy())


@EVERY
def test_streams_are_asynchronous_and_in_order(vendor: str) -> None:
    run(blocked_stream, 2, vendor=vendor)


def slow_stream(rank: Rank, vendor: str) -> None:
    v: Any = connected(rank, vendor)
    mine, result = np.ones(8, "f4"), np.zeros(8, "f4")
    ok(v.sum(mine, result, 8, v.types["f4"]))
    assert not v.is_idle(v.stream) and (result == 0).all()
    ok(v.sync())
    assert (result == rank.size).all()
    ok(v.destroy())


@EVERY
def test_streams_can_be_slow(vendor: str) -> None:
    run(slow_stream, 2, {"SAGELLM_SIM_SLOW_US": "1500000"}, vendor=vendor)


def late_record(rank: Rank, vendor: str) -> bool:
    """Returns whether a wait that is issued right after a record waits for that record."""
    v: Any = connected(rank, vendor)
    gate = threading.Event()
    other, event, ran = v.new_stream(), v.new_event(), threading.Event()
    v.host_function(lambda _: gate.wait(SOON))
    if os.environ.get("ONE_STREAM"):
        v.run.sagellm_sim_host_queue(v.stream, 2_000_000)
    ok(v.record(event, v.stream))
    if os.environ.get("DRAIN"):
        assert not v.is_idle(v.stream)  # the query empties the host queue
    ok(v.wait(event, other))
    v.host_function(lambda _: ran.set(), other)
    overtaken = ran.wait(0.3)
    gate.set()
    ok(v.sync(other))
    ok(v.sync())
    ok(v.destroy())
    return overtaken


@EVERY
def test_a_host_queue_delays_records_until_it_is_drained(vendor: str) -> None:
    assert run(late_record, 1, vendor=vendor) == [False]
    late = {"SAGELLM_SIM_HOST_QUEUE_US": "2000000"}
    assert run(late_record, 1, late, vendor=vendor) == [True], "the ordering bug is invisible"
    assert run(late_record, 1, {**late, "DRAIN": "1"}, vendor=vendor) == [False]
    assert run(late_record, 1, {"ONE_STREAM": "1"}, vendor=vendor) == [True], "a stream can have one of its own"


def own_device_on_every_thread(rank: Rank, vendor: str) -> list[int]:
    v: Any = connected(rank, vendor)
    found: list[int] = []
    stream, event = v.stream, v.new_event()

    def without() -> None:
        found.append(v.record(event, stream))
        found.append(v.sync())

    thread = threading.Thread(target=without)
    thread.start()
    thread.join(SOON)
    ok(v.destroy())
    return found


@EVERY
def test_a_thread_without_a_device_is_refused(vendor: str) -> None:
    code = {"nccl": 201, "hccl": 107002, "cncl": 632019}[vendor]
    assert run(own_device_on_every_thread, 1, vendor=vendor) == [[code, code]]


# ------------------------------------------------------------------------------------------------------- faults


def state_of(v: Any) -> int:
    return int(v.state())


def dead_peer(rank: Rank, vendor: str) -> float:
    v: Any = connected(rank, vendor)
    mine = np.ones(4, "f4")
    ok(v.sum(mine, mine, 4, v.types["f4"]))
    ok(v.sync())
    rank.publish(f"ready.{rank.rank}", b"")
    if rank.rank == 1:
        rank.fetch("ready.0")
        os._exit(9)
    rank.fetch("ready.1")
    ok(v.sum(mine, mine, 4, v.types["f4"]))
    start = time.monotonic()
    until(lambda: v.state() == v.FAILED, "the asynchronous error")
    seconds = time.monotonic() - start
    if vendor == "hccl":
        assert v.sync() == 507057, "the stream has an error"
        until(lambda: v.destroy() == 0, "the end of the communicator")
    else:
        assert not v.is_idle(v.stream), "the operation hangs until it is aborted"
        ok(v.abort())
        ok(v.sync())
    return seconds


@EVERY
def test_a_dead_peer_is_an_asynchronous_error_within_seconds(vendor: str) -> None:
    with Job(dead_peer, 2, vendor=vendor) as job:
        assert job.result(0) < 5.0


def aborted(rank: Rank, vendor: str) -> None:
    v: Any = connected(rank, vendor)
    mine = np.ones(4, "f4")
    rank.barrier("met")
    if rank.rank == 0:
        ok(v.sum(mine, mine, 4, v.types["f4"]))
        ok(v.sum(mine, mine, 4, v.types["f4"]))
        time.sleep(0.1)
        assert not v.is_idle(v.stream)
        assert v.state() in (0, *v.BUSY)
        ok(v.abort())
        ok(v.sync())
    rank.barrier("aborted")
    if rank.rank == 1:
        ok(v.sum(mine, mine, 4, v.types["f4"]))
        until(lambda: v.state() == v.FAILED, "the error of the other rank")
        ok(v.abort())
        ok(v.sync())
    assert (mine == 1).all()


@pytest.mark.parametrize("vendor", ["nccl", "cncl"])
def test_abort_ends_what_hangs_here_and_fails_the_peer(vendor: str) -> None:
    run(aborted, 2, CONNECTED, vendor=vendor)


def third_operation(rank: Rank, vendor: str, error: bool) -> list[int]:
    v: Any = together(rank, vendor)
    mine = np.ones(4, "f4")
    for _ in range(2):
        ok(v.sum(mine, mine, 4, v.types["f4"]))
    ok(v.sync())
    assert (mine == rank.size**2).all()
    ok(v.sum(mine, mine, 4, v.types["f4"]))
    if error:
        until(lambda: v.state() == v.FAILED, "the error that was ordered")
    else:
        time.sleep(0.3)
        assert v.state() in (0, *v.BUSY) and not v.is_idle(v.stream)
    if vendor == "hccl":
        assert v.sync() == (507057 if error else 507048)
    else:
        ok(v.abort())
        ok(v.sync())
    return [int(n) for n in mine]


@EVERY
@pytest.mark.parametrize("error", [True, False])
def test_the_nth_operation_fails_or_hangs_when_ordered(vendor: str, error: bool) -> None:
    order = {"SAGELLM_SIM_ERROR_AT" if error else "SAGELLM_SIM_HANG_AT": "3"}
    if vendor == "hccl":
        order["HCCL_EXEC_TIMEOUT"] = "10" if error else "2"  # an operation that hangs ends at this limit
    assert run(third_operation, 2, order, vendor=vendor, error=error) == [[4] * 4] * 2


def hanging_init(rank: Rank, vendor: str) -> int:
    from speak import VENDORS, out

    v: Any = VENDORS[vendor](rank)
    code: int = v.init(out(), rank.size, v.id(), rank.rank)
    return code


@EVERY
def test_a_set_up_that_hangs_is_bounded(vendor: str) -> None:
    order = {"SAGELLM_SIM_INIT": "hang", "SAGELLM_SIM_TIMEOUT_MS": "500"}
    code = {"nccl": 2, "hccl": 9, "cncl": 0x22}[vendor]
    assert run(hanging_init, 1, order, vendor=vendor) == [code]
    # A rank that never arrives.
    assert run(hanging_init, 1, {"SAGELLM_SIM_TIMEOUT_MS": "500"}, vendor=vendor) == [0]


def deadlock(rank: Rank, vendor: str) -> int:
    v: Any = together(rank, vendor)
    mine, result = np.ones(1, "f4"), np.zeros(1, "f4")
    ok(v.send(mine, 1, v.types["f4"], 1 - rank.rank))
    ok(v.recv(result, 1, v.types["f4"], 1 - rank.rank))
    time.sleep(0.5)
    assert not v.is_idle(v.stream), "both send first and neither receives"
    code: int = v.sync()
    assert (result == 0).all()
    return code


@EVERY
def test_two_ranks_that_send_first_deadlock_until_the_limit(vendor: str) -> None:
    codes = run(deadlock, 2, {"SAGELLM_SIM_TIMEOUT_MS": "2000", **CONNECTED}, vendor=vendor)
    assert all((code != 0) == (vendor == "hccl") for code in codes), codes


def different_calls(rank: Rank, vendor: str) -> None:
    v: Any = connected(rank, vendor)
    count = 4 + rank.rank
    mine = np.ones(count, "f4")
    ok(v.sum(mine, mine, count, v.types["f4"]))
    if vendor == "hccl":
        assert v.sync() != 0 and v.state() == 0, "HCCL has no number for this error"
    else:
        until(lambda: v.state() not in (0, *v.BUSY), "the mismatch")
        ok(v.abort())
        ok(v.sync())
    assert (mine == 1).all()


@EVERY
def test_ranks_that_call_differently_fail(vendor: str) -> None:
    run(different_calls, 2, vendor=vendor)


# ------------------------------------------------------------------------------------------------------ arguments


def spoiled_ids(rank: Rank, vendor: str) -> list[int]:
    from speak import VENDORS, out

    v: Vendor = VENDORS[vendor](rank)
    data = v.make_id()
    assert len(data) == v.id_bytes and 0 not in data[32:128], "every byte is written"
    last = data[:-1] + bytes([data[-1] ^ 1])
    return [v.init(out(), 1, bad, 0) for bad in (last, bytes(v.id_bytes))] + [v.init(out(), 1, data, 0)]


@EVERY
def test_an_id_is_checked_to_its_last_byte(vendor: str) -> None:
    wrong = {"nccl": 4, "hccl": 1, "cncl": 7}[vendor]
    assert run(spoiled_ids, 1, vendor=vendor) == [[wrong, wrong, 0]]


def wrong_arguments(rank: Rank, vendor: str) -> dict[str, int]:
    v: Any = connected(rank, vendor)
    a, b = np.ones(64, "f4"), np.ones(64, "f4")
    f4 = v.types["f4"]

    class At:
        """A buffer at any address."""

        def __init__(self, where: int) -> None:
            self.ctypes = type("", (), {"data": where})()

    found = {
        "type": v.sum(a, b, 4, 77),
        "op": v.sum(a, b, 4, f4, 99),
        "root": v.reduce(a, b, 4, f4, 0, 5),
        "null": v.sum(At(0), b, 4, f4),
        "alignment": v.sum(At(address(a) + 2), b, 4, f4),
        "overlap": v.sum(a, At(address(a) + 4), 4, f4),
        "equal": v.all_to_all(a, a, 4, f4),
        "peer": v.send(a, 4, f4, 9),
        "stream": v.sum(a, b, 4, f4, stream=12345),
    }
    comm, v.comm = v.comm, 4711
    found["communicator"] = v.sum(a, b, 4, f4)
    v.comm = comm
    ok(v.sync())
    ok(v.destroy())
    assert v.destroy() != 0, "a communicator is destroyed once"
    return found


@EVERY
def test_wrong_arguments_are_refused(vendor: str) -> None:
    [found] = run(wrong_arguments, 1, vendor=vendor)
    expected = {
        "nccl": dict.fromkeys(found, 4) | {"overlap": 5, "equal": 5},
        "hccl": dict.fromkeys(found, 1) | {"null": 2},
        "cncl": dict.fromkeys(found, 7) | {"null": 0x21, "communicator": 0x61},
    }[vendor]
    assert found == expected


# ------------------------------------------------------------------------------------------------ first use


def comes_late(rank: Rank, vendor: str, eager: bool) -> None:
    v: Any = connected(rank, vendor)
    mine, result = numbers(rank.rank, COUNT, "f4"), np.zeros(COUNT, "f4")
    for first in (True, False):
        waits = first and not eager
        if rank.rank == 1 and waits:
            time.sleep(0.3)
            rank.publish("comes", b"now")
        elif rank.rank == 1:
            rank.fetch(f"returned{first}")
        ok(v.sum(mine, result, COUNT, v.types["f4"]))
        if rank.rank == 0 and waits:
            assert (rank.folder / "comes").exists(), "the first launch did not wait"
        elif rank.rank == 0:
            rank.publish(f"returned{first}", b"now")  # rank 1 waits for this key
        ok(v.sync())
        assert result.tobytes() == combine([numbers(r, COUNT, "f4") for r in range(2)], 0).tobytes()
        rank.barrier(f"done{first}")
    ok(v.destroy())


@EVERY
@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
def test_the_first_launch_waits_on_the_host(vendor: str, eager: bool) -> None:
    run(comes_late, 2, {"SAGELLM_SIM_CONNECT": "eager"} if eager else None, vendor=vendor, eager=eager)


def alone(rank: Rank, vendor: str, how: str) -> float:
    v: Any = together(rank, vendor)
    if rank.rank == 1:
        if how == "dies":
            os._exit(1)
        rank.fetch("done")
        return 0.0
    if how == "aborts":
        threading.Timer(0.5, v.abort).start()
    mine, result = numbers(rank.rank, COUNT, "f4"), np.zeros(COUNT, "f4")
    begin = time.monotonic()
    assert v.sum(mine, result, COUNT, v.types["f4"]) != 0
    took = time.monotonic() - begin
    rank.publish("done", b"yes")
    return took


@pytest.mark.parametrize("vendor,how", [("nccl", "aborts"), ("cncl", "aborts"), *((each, "never") for each in ALL)])
def test_a_first_launch_without_its_peer_ends_at_the_limit_or_by_an_abort(vendor: str, how: str) -> None:
    took = run(alone, 2, {"SAGELLM_SIM_TIMEOUT_MS": "60000" if how == "aborts" else "3000"}, vendor=vendor, how=how)[0]
    assert took < SOON if how == "aborts" else took >= 2.9, took


@pytest.mark.parametrize("vendor", ALL)
def test_a_first_launch_does_not_notice_a_dead_peer(vendor: str) -> None:
    with Job(alone, 2, {"SAGELLM_SIM_TIMEOUT_MS": "3000"}, vendor=vendor, how="dies") as job:
        assert job.result(0) >= 2.9
