"""Ranks of one process: the results of their operators and messages, when a result is available, and how calls fail.

Every result is compared, bit for bit, with what one plain thread computes from the inputs in the order of the ranks
(`tests/py/dist/reference.py`). `tests/py/dist/test_collective_ops.py` tests the same classes with a process for each
rank.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent / "py" / "dist"))
from reference import FLOATS, MOVABLE, REDUCIBLE, bits, fold, make, ops_of, same_bits

import torch_sagellm
from torch_sagellm.collective_ops import (
    AllGatherOperator,
    AllReduceOperator,
    BenchmarkResult,
    BroadcastOperator,
    DistributedCommunicator,
    ReduceScatterOperator,
    create_ring_topology,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Lets torch use one thread. With several, a copy of 100 kB takes ten times as long if other programs use the
    cores, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: The names of the reduce ops here and in the reference.
OPS = {"sum": "SUM", "avg": "AVG", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}
SIZES = [1, 2, 3, 8]
Comms = list[DistributedCommunicator]


def on_threads(comms: Comms, body: Callable[[DistributedCommunicator], Any], seconds: float = 60) -> list[Any]:
    """Returns what ``body`` returns or raises on each rank, each on a separate thread."""
    found: list[Any] = [None] * len(comms)

    def run(comm: DistributedCommunicator) -> None:
        try:
            found[comm.rank] = body(comm)
        except Exception as error:
            found[comm.rank] = error

    threads = [threading.Thread(target=run, args=(comm,), daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found


def results_on_threads(comms: Comms, body: Callable[[DistributedCommunicator], Any]) -> list[Any]:
    found = on_threads(comms, body)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def inputs_of(
    count: int, dtype: torch.dtype = torch.float32, shape: Sequence[int] = (6,), seed: int = 0
) -> list[torch.Tensor]:
    size = torch.Size(shape).numel()
    return [make(dtype, size, 100 * seed + rank).reshape(shape) for rank in range(count)]


def consistent(operator: Any, results: list[BenchmarkResult], shapes: list[tuple[int, ...]], trials: int) -> None:
    """Checks that the figures of a benchmark fit together and are positive. Their size is not tested."""
    assert [each.shape for each in results] == shapes
    ranks = operator.comm.world_size
    for each in results:
        assert (each.op, each.world_size, each.num_trials) == (operator.kind, ranks, trials)
        assert len(each.seconds) == trials and all(second > 0 for second in each.seconds)
        assert 0 < each.min_seconds <= each.median_seconds <= each.max_seconds
        assert each.min_seconds <= each.mean_seconds <= each.max_seconds
        assert each.nbytes == 4 * torch.Size(each.shape).numel() * (ranks if each.op == "all_gather" else 1)
        assert each.algbw_gbs == pytest.approx(each.nbytes / each.median_seconds / 1e9)
        factor = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1}.get(each.op, (ranks - 1) / ranks)
        assert each.busbw_gbs == pytest.approx(factor * each.algbw_gbs)
        assert each.op in str(each) and "GB/s" in str(each)


SHAPES = [(16,), (64, 64)]


def repeats_and_measures(operators: Sequence[Any], call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Checks that ``call`` on the operators of all ranks gives the same bits every time, and that their benchmark's
    figures fit together."""
    repeats(
        lambda: [
            call(operator, each)
            for operator, each in zip(operators, inputs_of(len(operators), shape=(1000,)), strict=True)
        ]
    )
    consistent(operators[0], operators[0].benchmark(SHAPES, num_trials=3), SHAPES, 3)


def repeats(make_results: Callable[[], list[torch.Tensor]], times: int = 5) -> None:
    """Checks that the same inputs give the same bits every time."""
    first = [bits(each) for each in make_results()]
    for _ in range(times - 1):
        assert all(torch.equal(one, bits(other)) for one, other in zip(first, make_results(), strict=True))


class TestAllReduceOperator:
    @pytest.mark.parametrize("world_size", SIZES)
    @pytest.mark.parametrize("op", OPS)
    def test_a_loop_over_the_ranks(self, world_size: int, op: str) -> None:
        comms, tensors = create_ring_topology(world_size), inputs_of(world_size)
        expected = fold(OPS[op], [tensor.clone() for tensor in tensors])
        for comm, tensor in zip(comms, tensors, strict=True):
            assert AllReduceOperator(comm).all_reduce(tensor, op=op) is tensor
        for tensor in tensors:
            same_bits(tensor, expected)

    def test_mean_is_avg(self) -> None:
        comms, tensors = create_ring_topology(2), [torch.tensor([1.0]), torch.tensor([2.0])]
        AllReduceOperator(comms[0]).all_reduce(tensors[0], "mean")
        AllReduceOperator(comms[1]).all_reduce(tensors[1], "avg")
        assert [each.item() for each in tensors] == [1.5, 1.5]

    def test_results_are_nan_until_the_last_rank_has_called(self) -> None:
        comms, tensors = create_ring_topology(3), [torch.ones(2), torch.ones(2), torch.ones(2)]
        for comm, tensor in zip(comms[:2], tensors[:2], strict=True):
            AllReduceOperator(comm).all_reduce(tensor)
            assert tensor.isnan().all()
        AllReduceOperator(comms[2]).all_reduce(tensors[2])
        assert all(tensor.tolist() == [3.0, 3.0] for tensor in tensors)

    def test_integers_hold_what_they_held_until_then(self) -> None:
        comms, tensors = create_ring_topology(2), [torch.tensor([5]), torch.tensor([7])]
        AllReduceOperator(comms[0]).all_reduce(tensors[0])
        assert tensors[0].item() == 5
        AllReduceOperator(comms[1]).all_reduce(tensors[1])
        assert [each.item() for each in tensors] == [12, 12]

    @pytest.mark.parametrize("dtype", REDUCIBLE, ids=str)
    def test_every_dtype_that_can_be_combined(self, dtype: torch.dtype) -> None:
        comms = create_ring_topology(3)
        for op, name in OPS.items():
            if name not in ops_of(dtype):
                with pytest.raises(ValueError, match="not defined for"):
                    AllReduceOperator(comms[0]).all_reduce(make(dtype, 3, 0), op)
                continue
            tensors = inputs_of(3, dtype, (31,))
            expected = fold(name, [tensor.clone() for tensor in tensors])
            for comm, tensor in zip(comms, tensors, strict=True):
                AllReduceOperator(comm).all_reduce(tensor, op)
            for tensor in tensors:
                same_bits(tensor, expected, f"{dtype} {op}")

    def test_columns_of_one_matrix_are_apart(self) -> None:
        """The columns are interleaved in memory, and no byte belongs to two columns."""
        comms, whole = create_ring_topology(3), torch.arange(12.0).reshape(4, 3)
        expected = whole.sum(1)
        for comm in comms:
            AllReduceOperator(comm).all_reduce(whole[:, comm.rank])
        assert all(torch.equal(whole[:, rank], expected) for rank in range(3))

    def test_a_tensor_that_requires_gradients(self) -> None:
        comms, tensors = create_ring_topology(2), [torch.ones(2, requires_grad=True) for _ in range(2)]
        for comm, tensor in zip(comms, tensors, strict=True):
            AllReduceOperator(comm).all_reduce(tensor)
        assert all(tensor.tolist() == [2.0, 2.0] and tensor.requires_grad for tensor in tensors)

    def test_threads_block_until_all_have_called(self) -> None:
        comms = create_ring_topology(4)
        arrived: list[int] = []

        def body(comm: DistributedCommunicator) -> tuple[int, list[float]]:
            time.sleep(0.02 * comm.rank)
            arrived.append(comm.rank)
            tensor = AllReduceOperator(comm).all_reduce(torch.full((3,), float(comm.rank)))
            return len(arrived), tensor.tolist()

        assert results_on_threads(comms, body) == [(4, [6.0, 6.0, 6.0])] * 4

    @pytest.mark.parametrize("count", [1, 1000, 50_000])
    def test_it_is_reduce_scatter_and_all_gather(self, count: int) -> None:
        """Bit for bit, also where rounding depends on the order: both add in the order of the ranks."""
        comms, tensors = create_ring_topology(4), inputs_of(4, torch.bfloat16, (4 * count,))
        slices = [
            ReduceScatterOperator(comm).reduce_scatter(tensor) for comm, tensor in zip(comms, tensors, strict=True)
        ]
        gathered = [AllGatherOperator(comm).all_gather(part) for comm, part in zip(comms, slices, strict=True)]
        for comm, tensor in zip(comms, tensors, strict=True):
            AllReduceOperator(comm).all_reduce(tensor)
        for whole, tensor in zip(gathered, tensors, strict=True):
            same_bits(whole, tensor)

    def test_arguments_that_are_refused_count_as_not_made(self) -> None:
        comms = create_ring_topology(2)
        operator = AllReduceOperator(comms[0])
        with pytest.raises(ValueError, match="expected one of sum, avg"):
            operator.all_reduce(torch.ones(2), "median")
        with pytest.raises(TypeError, match="expected a tensor"):
            operator.all_reduce([1.0])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="only moved"):
            operator.all_reduce(torch.ones(2).to(torch.float8_e5m2))
        with pytest.raises(ValueError, match="between its elements"):
            operator.all_reduce(torch.ones(1).expand(3))
        with pytest.raises(ValueError, match="on the CPU"):
            operator.all_reduce(torch.ones(2, device="meta"))
        with pytest.raises(ValueError, match="on the CPU"):
            operator.all_reduce(torch.eye(2).to_sparse())
        with pytest.raises(TypeError, match="expected a DistributedCommunicator"):
            AllReduceOperator("rank 0")  # type: ignore[arg-type]
        total = [AllReduceOperator(comm).all_reduce(torch.ones(1)) for comm in comms]
        assert [each.item() for each in total] == [2.0, 2.0]

    def test_tensors_of_inference_mode(self) -> None:
        with torch.inference_mode():
            given = [torch.ones(3) for _ in range(2)]
        comms = create_ring_topology(2)
        for comm, tensor in zip(comms, given, strict=True):
            AllReduceOperator(comm).all_reduce(tensor)
            assert tensor.isnan().all() or comm.rank == 1
        assert all(tensor.tolist() == [2.0] * 3 for tensor in given)

    def test_a_tensor_that_cannot_be_copied_counts_as_not_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rank's next call is still its first collective, and the next message the first of its pair."""
        from torch_sagellm.api.calls import Call

        def fails(self: Call) -> None:
            raise MemoryError("no room")

        left, right = create_ring_topology(2)
        with monkeypatch.context() as patched:
            patched.setattr(Call, "take", fails)
            for comm in (left, right):
                with pytest.raises(MemoryError):
                    AllReduceOperator(comm).all_reduce(torch.ones(3))
            with pytest.raises(MemoryError):
                left.send(torch.ones(3), 1)
        left.send(torch.full((2,), 7.0), 1)
        assert right.recv(0, (2,), torch.float32).tolist() == [7.0, 7.0]
        total = [AllReduceOperator(comm).all_reduce(torch.ones(1)) for comm in (left, right)]
        assert [each.item() for each in total] == [2.0, 2.0]

    def test_one_tensor_for_two_ranks_is_refused(self) -> None:
        comms, shared = create_ring_topology(2), torch.ones(4)
        AllReduceOperator(comms[0]).all_reduce(shared[:3])
        with pytest.raises(ValueError, match=r"rank 1 shares memory with .* of rank 0 will write"):
            AllReduceOperator(comms[1]).all_reduce(shared[1:])
        AllReduceOperator(comms[1]).all_reduce(torch.ones(3))
        assert shared.tolist() == [2.0, 2.0, 2.0, 1.0]

    @pytest.mark.parametrize("world_size", [1, 4])
    def test_performance_consistency(self, world_size: int) -> None:
        comms = create_ring_topology(world_size)

        def once() -> list[torch.Tensor]:
            tensors = inputs_of(world_size, shape=(1000,))
            return [AllReduceOperator(comm).all_reduce(each) for comm, each in zip(comms, tensors, strict=True)]

        repeats(once)
        operator = AllReduceOperator(comms[-1])
        consistent(operator, operator.benchmark([16, (64, 64)], num_trials=3), [(16,), (64, 64)], 3)
        assert all(len(each.seconds) == 10 for each in operator.benchmark([(8,)]))


class TestBroadcastOperator:
    @pytest.mark.parametrize("world_size", SIZES)
    def test_every_root_and_dtype(self, world_size: int) -> None:
        comms = create_ring_topology(world_size)
        for turn, dtype in enumerate(MOVABLE):
            root = turn % world_size
            tensors = inputs_of(world_size, dtype, (2, 5), turn)
            expected = tensors[root].clone()
            for comm, tensor in zip(comms, tensors, strict=True):
                assert BroadcastOperator(comm).broadcast(tensor, root_rank=root) is tensor
            for tensor in tensors:
                same_bits(tensor, expected, f"{dtype} root {root}")

    def test_the_root_keeps_its_numbers_and_the_others_wait(self) -> None:
        comms, tensors = create_ring_topology(3), [torch.full((2,), float(rank)) for rank in range(3)]
        for comm, tensor in zip(comms[:2], tensors[:2], strict=True):
            BroadcastOperator(comm).broadcast(tensor, 1)
        assert tensors[0].isnan().all() and tensors[1].tolist() == [1.0, 1.0]
        BroadcastOperator(comms[2]).broadcast(tensors[2], 1)
        assert all(tensor.tolist() == [1.0, 1.0] for tensor in tensors)

    def test_two_roots_are_an_error_that_shows_both(self) -> None:
        comms = create_ring_topology(2)
        BroadcastOperator(comms[0]).broadcast(torch.ones(2), 0)
        with pytest.raises(dist.DistBackendError, match=r"rank 1 called .*root_rank 1.* rank 0 called .*root_rank 0"):
            BroadcastOperator(comms[1]).broadcast(torch.ones(2), 1)

    def test_a_root_that_is_no_rank(self) -> None:
        with pytest.raises(ValueError, match="root_rank is 2, expected 0 to 1"):
            BroadcastOperator(create_ring_topology(2)[0]).broadcast(torch.ones(2), 2)

    def test_performance_consistency(self) -> None:
        operators = [BroadcastOperator(comm) for comm in create_ring_topology(4)]
        repeats_and_measures(operators, lambda operator, each: operator.broadcast(each, 2))


class TestAllGatherOperator:
    @pytest.mark.parametrize("world_size", SIZES)
    def test_every_dtype(self, world_size: int) -> None:
        comms = create_ring_topology(world_size)
        for turn, dtype in enumerate(MOVABLE):
            tensors = inputs_of(world_size, dtype, (2, 3), turn)
            gathered = [AllGatherOperator(comm).all_gather(each) for comm, each in zip(comms, tensors, strict=True)]
            for each in gathered:
                expected = torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(dtype)
                same_bits(each, expected, str(dtype))

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0), (1, 2, 3)])
    def test_scalars_and_empty_tensors(self, shape: tuple[int, ...]) -> None:
        comms = create_ring_topology(3)
        gathered = [AllGatherOperator(comm).all_gather(torch.full(shape, float(comm.rank))) for comm in comms]
        parts = [torch.full(shape, float(rank)) for rank in range(3)]
        for each in gathered:
            same_bits(each, torch.cat(parts) if shape else torch.stack(parts))

    def test_what_is_given_may_be_strided_expanded_shared_or_change_afterwards(self) -> None:
        comms = create_ring_topology(2)
        given = torch.arange(3.0)
        found = [AllGatherOperator(comms[0]).all_gather(given)]
        given.zero_()
        found.append(AllGatherOperator(comms[1]).all_gather(given.expand(1, 3)[0]))
        assert all(each.tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 0.0] for each in found)
        both = torch.arange(4.0).reshape(2, 2).t()
        assert all(
            torch.equal(each, torch.cat([both, both]))
            for each in [AllGatherOperator(comm).all_gather(both) for comm in comms]
        )
        turned = torch.tensor([1 + 2j]).conj()
        for each in [AllGatherOperator(comm).all_gather(turned) for comm in comms]:
            assert each.tolist() == [1 - 2j, 1 - 2j]

    def test_performance_consistency(self) -> None:
        operators = [AllGatherOperator(comm) for comm in create_ring_topology(4)]
        repeats_and_measures(operators, lambda operator, each: operator.all_gather(each))


class TestReduceScatterOperator:
    @pytest.mark.parametrize("world_size", SIZES)
    @pytest.mark.parametrize("op", OPS)
    def test_each_rank_gets_its_slice(self, world_size: int, op: str) -> None:
        comms, tensors = create_ring_topology(world_size), inputs_of(world_size, shape=(2 * world_size, 3))
        kept = [tensor.clone() for tensor in tensors]
        slices = [
            ReduceScatterOperator(comm).reduce_scatter(each, op) for comm, each in zip(comms, tensors, strict=True)
        ]
        whole = fold(OPS[op], kept)
        for rank, part in enumerate(slices):
            same_bits(part, whole[2 * rank : 2 * rank + 2])
            same_bits(tensors[rank], kept[rank], "what was given is unchanged")

    def test_rows_that_cannot_be_divided(self) -> None:
        operator = ReduceScatterOperator(create_ring_topology(2)[0])
        for shape in ((), (3,), (5, 2)):
            with pytest.raises(ValueError, match="multiple of the 2 ranks"):
                operator.reduce_scatter(torch.ones(shape))
        with pytest.raises(ValueError, match="not defined for bool"):
            operator.reduce_scatter(torch.ones(2, dtype=torch.bool), "avg")

    def test_performance_consistency(self) -> None:
        operators = [ReduceScatterOperator(comm) for comm in create_ring_topology(4)]
        repeats_and_measures(operators, lambda operator, each: operator.reduce_scatter(each))


class TestBenchmark:
    def test_threads_measure_together(self) -> None:
        comms = create_ring_topology(3)
        found = results_on_threads(
            comms, lambda comm: AllReduceOperator(comm).benchmark([(9,)], num_trials=2, dtype=torch.float64)
        )
        for comm, (result,) in zip(comms, found, strict=True):
            assert (result.nbytes, result.dtype, result.num_trials, comm.world_size) == (72, torch.float64, 2, 3)

    def test_it_follows_no_call_that_is_not_made_on_all_ranks(self) -> None:
        comms, tensor = create_ring_topology(2), torch.ones(2)
        AllReduceOperator(comms[0]).all_reduce(tensor)
        with pytest.raises(RuntimeError, match="rank 1 has called 0 collectives and rank 0 1"):
            AllReduceOperator(comms[1]).benchmark([(2,)])
        AllReduceOperator(comms[1]).all_reduce(torch.ones(2))
        assert tensor.tolist() == [2.0, 2.0]

    def test_arguments_that_are_refused(self) -> None:
        comms = create_ring_topology(2)
        with pytest.raises(ValueError, match="num_trials is 0"):
            AllReduceOperator(comms[0]).benchmark([(2,)], num_trials=0)
        with pytest.raises(ValueError, match="multiple of the 2 ranks"):
            ReduceScatterOperator(comms[0]).benchmark([(3,)])
        with pytest.raises(TypeError, match=r"shapes is 4, expected a list of shapes, such as \[\(4,\)\]"):
            AllReduceOperator(comms[0]).benchmark(4)  # type: ignore[arg-type]
        assert AllReduceOperator(comms[0]).benchmark([]) == []


class TestDistributedCommunicator:
    def test_ranks_and_neighbours(self) -> None:
        comms = torch_sagellm.create_ring_topology(3)
        assert [(comm.rank, comm.world_size) for comm in comms] == [(0, 3), (1, 3), (2, 3)]
        assert [(comm.prev_rank, comm.next_rank) for comm in comms] == [(2, 1), (0, 2), (1, 0)]
        assert "rank 1 of 3" in repr(comms[1]) and isinstance(comms[0], torch_sagellm.DistributedCommunicator)

    @pytest.mark.parametrize("world_size", [0, -1, 257, 2.0, True, "2"])
    def test_sizes_that_are_refused(self, world_size: Any) -> None:
        with pytest.raises(ValueError, match="expected a number of ranks"):
            create_ring_topology(world_size)

    @pytest.mark.parametrize("world_size", [1, 2, 3, 10])
    def test_more_ranks_than_open_files_allow(self, world_size: int) -> None:
        """As many ranks as the limit allows can be created. With one more, the call fails before it opens a file."""
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + world_size * (world_size + 3), before[1]))
        try:
            comms = create_ring_topology(world_size)
            results = [AllReduceOperator(comm).all_reduce(torch.ones(1)) for comm in comms]
            del comms
            with pytest.raises(RuntimeError, match=rf"{world_size + 1} ranks of one process need .* \(ulimit -n\)"):
                create_ring_topology(world_size + 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert all(each.item() == world_size for each in results)

    def test_a_timeout_that_is_refused(self) -> None:
        with pytest.raises(ValueError, match="expected more than 0 seconds"):
            create_ring_topology(2, timeout=0)

    @pytest.mark.parametrize("dtype", MOVABLE, ids=str)
    def test_a_message_of_every_dtype(self, dtype: torch.dtype) -> None:
        first, second = create_ring_topology(2)
        data = make(dtype, 6, 1).reshape(2, 3)
        first.send(data, 1)
        same_bits(second.recv(0, (2, 3), dtype), data)

    def test_a_receive_before_its_message(self) -> None:
        first, second = create_ring_topology(2)
        floats, integers = second.recv(0, 3, torch.float32), second.recv(0, [2], torch.int64, tag=1)
        assert floats.isnan().all() and integers.tolist() == [0, 0]
        first.send(torch.tensor([4, 5]), 1, tag=1)
        first.send(torch.arange(3.0), 1)
        assert floats.tolist() == [0.0, 1.0, 2.0] and integers.tolist() == [4, 5]

    def test_messages_match_by_tag_and_in_order(self) -> None:
        first, second = create_ring_topology(2)
        for number in range(6):
            data = torch.tensor([float(number)])
            first.send(data, 1, tag=number % 2)
            data.zero_()  # it was copied
        found = [second.recv(0, (1,), torch.float32, tag=tag).item() for tag in (1, 1, 0, 0, 1, 0)]
        assert found == [1.0, 3.0, 0.0, 2.0, 5.0, 4.0]

    def test_messages_both_ways_with_one_tag(self) -> None:
        comms = create_ring_topology(2)
        for comm in comms:
            comm.send(torch.tensor([comm.rank]), 1 - comm.rank)
        assert [comm.recv(1 - comm.rank, (1,), torch.int64).item() for comm in comms] == [1, 0]

    def test_a_ring_of_threads(self) -> None:
        """Every rank sends first, which a copy makes possible for any size."""

        def body(comm: DistributedCommunicator) -> float:
            passed, total = torch.full((100_000,), float(comm.rank)), 0.0
            for _ in range(comm.world_size):
                total += passed[-1].item()
                comm.send(passed, comm.next_rank)
                passed = comm.recv(comm.prev_rank, passed.shape, passed.dtype)
            return total

        assert results_on_threads(create_ring_topology(4), body) == [6.0] * 4

    def test_arguments_of_messages_that_are_refused(self) -> None:
        comm = create_ring_topology(2)[0]
        with pytest.raises(ValueError, match="dst_rank is 2, expected 0 to 1"):
            comm.send(torch.ones(1), 2)
        with pytest.raises(ValueError, match="dst_rank is 0, which is this rank itself"):
            comm.send(torch.ones(1), 0)
        with pytest.raises(ValueError, match="src_rank is -1"):
            comm.recv(-1, (1,), torch.float32)
        with pytest.raises(ValueError, match="tag is -1"):
            comm.send(torch.ones(1), 1, tag=-1)
        with pytest.raises(TypeError, match="expected a tensor"):
            comm.send(1.0, 1)  # type: ignore[arg-type]

    def test_a_barrier_of_threads(self) -> None:
        comms, arrived = create_ring_topology(4), []

        def body(comm: DistributedCommunicator) -> int:
            time.sleep(0.02 * comm.rank)
            arrived.append(comm.rank)
            comm.barrier()
            return len(arrived)

        assert results_on_threads(comms, body) == [4] * 4

    def test_a_barrier_on_the_thread_that_made_the_ranks_returns_at_once(self) -> None:
        comms = create_ring_topology(3)
        for _ in range(2):
            for comm in comms:
                comm.barrier()
        comms[1].barrier()  # no other rank calls, and nothing hangs

    def test_the_same_over_one_rank_without_processes(self) -> None:
        (comm,) = create_ring_topology(1)
        comm.barrier()
        assert (comm.next_rank, comm.prev_rank) == (0, 0)
        assert AllReduceOperator(comm).all_reduce(torch.tensor([2.0]), "avg").item() == 2.0
        assert AllGatherOperator(comm).all_gather(torch.ones(2, 1)).shape == (2, 1)

    def test_ranks_of_a_real_group_need_one(self) -> None:
        with pytest.raises(RuntimeError, match="create_ring_topology"):
            DistributedCommunicator(1, 4)


class TestResultsThatAreGivenOn:
    """On the thread that made the ranks, a program may pass on the result of a call that has not ended."""

    def test_several_calls_in_one_loop(self) -> None:
        comms = create_ring_topology(3)
        found = []
        for comm in comms:
            tensor = torch.full((3,), float(comm.rank + 1))
            AllReduceOperator(comm).all_reduce(tensor)  # 6
            AllReduceOperator(comm).all_reduce(tensor, "prod")  # 216
            part = ReduceScatterOperator(comm).reduce_scatter(tensor)  # 648
            found.append((tensor, AllGatherOperator(comm).all_gather(part), AllGatherOperator(comm).all_gather(tensor)))
        for tensor, whole, every in found:
            assert tensor.tolist() == [216.0] * 3 and whole.tolist() == [648.0] * 3 and every.tolist() == [216.0] * 9

    def test_a_received_tensor_is_passed_on_and_reduced(self) -> None:
        first, second, third = create_ring_topology(3)
        last = third.recv(1, (2,), torch.float32)
        middle = second.recv(0, (2,), torch.float32)
        second.send(middle, 2)
        AllReduceOperator(second).all_reduce(middle)
        AllReduceOperator(third).all_reduce(last)
        mine = torch.ones(2)
        AllReduceOperator(first).all_reduce(mine)
        assert all(each.isnan().all() for each in (mine, middle, last))
        first.send(torch.full((2,), 5.0), 1)
        assert all(each.tolist() == [11.0, 11.0] for each in (mine, middle, last))

    def test_a_broadcast_over_a_pending_result(self) -> None:
        comms, tensors = create_ring_topology(2), [torch.ones(1), torch.ones(1)]
        for comm, tensor in zip(comms, tensors, strict=True):
            AllReduceOperator(comm).all_reduce(tensor)
            BroadcastOperator(comm).broadcast(tensor, 1)
        assert [each.item() for each in tensors] == [2.0, 2.0]

    def test_receives_that_wait_for_each_other_are_named(self) -> None:
        first, second = create_ring_topology(2, timeout=0.2)
        mine, theirs = first.recv(1, (1,), torch.float32), second.recv(0, (1,), torch.float32)
        first.send(mine, 1)
        second.send(theirs, 0)
        AllGatherOperator(second).all_gather(torch.ones(1))
        found = on_threads([first], lambda comm: AllGatherOperator(comm).all_gather(mine))
        assert isinstance(found[0], torch_sagellm.CommTimeoutError) and "wait for each other's results" in str(found[0])

    def test_a_deadline_looks_through_results_that_are_still_to_come(self) -> None:
        first, second = create_ring_topology(2, timeout=0.2)
        expected = second.recv(0, (1,), torch.float32)
        AllGatherOperator(second).all_gather(expected)
        found = on_threads([first], lambda comm: AllGatherOperator(comm).all_gather(torch.ones(1)))
        assert isinstance(found[0], torch_sagellm.CommTimeoutError)
        assert "waits for recv(float32 [1], from rank 0, tag 0) of rank 1" in str(found[0])
        assert found[0].missing_ranks == [0]


class TestDistributedIntegration:
    """The operators together."""

    def test_performance_consistency(self) -> None:
        """Every operator gives the same bits each time, and the figures of its benchmark fit together."""
        comms = create_ring_topology(4)
        repeats_and_measures([AllReduceOperator(comm) for comm in comms], lambda each, one: each.all_reduce(one))
        repeats_and_measures([BroadcastOperator(comm) for comm in comms], lambda each, one: each.broadcast(one, 1))
        repeats_and_measures([AllGatherOperator(comm) for comm in comms], lambda each, one: each.all_gather(one))
        repeats_and_measures(
            [ReduceScatterOperator(comm) for comm in comms], lambda each, one: each.reduce_scatter(one)
        )

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_lists_and_deadlines_take_an_operator(self, world_size: int) -> None:
        comms = create_ring_topology(world_size, timeout=30)
        lists = [[torch.ones(2), torch.full((3,), 2, dtype=torch.int64)] for _ in comms]
        for comm, tensors in zip(comms, lists, strict=True):
            assert torch_sagellm.batch_all_reduce(tensors, AllReduceOperator(comm))[0] is tensors[0]
        assert all(each[0].tolist() == [world_size] * 2 and each[1].tolist() == [2 * world_size] * 3 for each in lists)
        safe = [torch.ones(2) for _ in comms]
        for comm, tensor in zip(comms, safe, strict=True):
            assert torch_sagellm.safe_all_reduce(tensor, AllReduceOperator(comm), timeout=30) is tensor
        assert all(each.tolist() == [world_size] * 2 for each in safe)
        with pytest.raises(ValueError, match="an operator and a backend"):
            torch_sagellm.batch_all_reduce([safe[0]], AllReduceOperator(comms[0]), object())  # type: ignore[arg-type]

    def test_the_deadline_of_one_call(self) -> None:
        first, _ = create_ring_topology(2)
        (error,) = on_threads(
            [first], lambda comm: torch_sagellm.safe_all_reduce(torch.ones(1), AllReduceOperator(comm), timeout=0.1)
        )
        assert isinstance(error, torch_sagellm.CommTimeoutError) and error.missing_ranks == [1]
        assert "Timed out after 0.1 s" in str(error)


class Parallel(torch.nn.Module):
    """Each rank has its rows of the input and a part of the sum over the ranks' layers."""

    def __init__(self, comm: DistributedCommunicator) -> None:
        super().__init__()
        torch.manual_seed(comm.rank)
        self.comm, self.layer = comm, torch.nn.Linear(3, 4, dtype=torch.float64)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return AllGatherOperator(self.comm).all_gather(rows)

    def scatter(self, rows: torch.Tensor) -> torch.Tensor:
        return ReduceScatterOperator(self.comm).reduce_scatter(rows)


def plain_gradients(ranks: int, op: str = "sum") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the outputs and all gradients of the model above, computed without any operator."""
    rows, models = rows_of(ranks), [Parallel(_Named(rank)) for rank in range(ranks)]  # type: ignore[arg-type]
    whole = torch.cat(rows)
    total = sum(model.layer(whole).tanh() for model in models)
    parts = list((total / ranks if op == "avg" else total).chunk(ranks))
    sum(weighted(part, rank) for rank, part in enumerate(parts)).backward()
    return parts, [each.grad for each in [*rows, *(each for model in models for each in model.parameters())]]


@dataclass
class _Named:
    rank: int


def rows_of(ranks: int) -> list[torch.Tensor]:
    torch.manual_seed(100)
    return [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(ranks)]


def weighted(part: torch.Tensor, rank: int) -> torch.Tensor:
    return (part * torch.arange(part.numel(), dtype=part.dtype).view_as(part)).sum() * (rank + 1)


def compare_gradients(ranks: int, parts: list[torch.Tensor], found: list[torch.Tensor], op: str = "sum") -> None:
    outputs, gradients = plain_gradients(ranks, op)
    for one, other in zip([*parts, *found], [*outputs, *gradients], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class TestAutograd:
    """A model whose layers are joined by operators has the gradients of the same model without them."""

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    @pytest.mark.parametrize("together", [False, True], ids=["each rank", "one sum"])
    def test_a_model_in_a_loop(self, world_size: int, together: bool) -> None:
        rows, models = rows_of(world_size), [Parallel(comm) for comm in create_ring_topology(world_size)]
        gathered = [model.gather(each) for model, each in zip(models, rows, strict=True)]
        hidden = [model.layer(each).tanh() for model, each in zip(models, gathered, strict=True)]
        parts = [model.scatter(each) for model, each in zip(models, hidden, strict=True)]
        losses = [weighted(part, rank) for rank, part in enumerate(parts)]
        if together:
            torch.stack(losses).sum().backward()
        else:
            for loss in losses:
                assert world_size == 1 or rows[0].grad is None, "not before the last rank"
                loss.backward()
        leaves = [*rows, *(each for model in models for each in model.parameters())]
        compare_gradients(world_size, parts, [each.grad for each in leaves])

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_a_model_on_threads(self, world_size: int) -> None:
        rows, comms = rows_of(world_size), create_ring_topology(world_size)
        models = [Parallel(comm) for comm in comms]  # not on the threads: they share the seed of the process

        def body(comm: DistributedCommunicator) -> tuple[torch.Tensor, list[torch.Tensor]]:
            model = models[comm.rank]
            hidden = model.layer(model.gather(rows[comm.rank])).tanh()
            part = ReduceScatterOperator(comm).reduce_scatter(hidden, "avg")
            weighted(part, comm.rank).backward()
            return part, [each.grad for each in model.parameters()]

        found = results_on_threads(comms, body)
        leaves = [*(each.grad for each in rows), *(each for _, grads in found for each in grads)]
        compare_gradients(world_size, [part for part, _ in found], leaves, "avg")

    @pytest.mark.parametrize("op", ["sum", "avg"])
    def test_a_sum_in_place(self, op: str) -> None:
        comms = create_ring_topology(3)
        leaves = [torch.full((2,), float(comm.rank), requires_grad=True) for comm in comms]
        given = [leaf * 3 for leaf in leaves]
        totals = [AllReduceOperator(comm).all_reduce(each, op) for comm, each in zip(comms, given, strict=True)]
        share = 3 if op == "avg" else 1
        assert all(each.tolist() == [9.0 / share] * 2 for each in [*totals, *given]), "in place"
        for rank, total in enumerate(totals):
            (total * (rank + 1)).sum().backward()
        assert all(leaf.grad.tolist() == [3.0 * (1 + 2 + 3) / share] * 2 for leaf in leaves)

    def test_on_threads_the_tensor_itself_is_returned(self) -> None:
        def body(comm: DistributedCommunicator) -> list[float]:
            leaf = torch.ones(2, requires_grad=True)
            given = leaf * 2
            assert AllReduceOperator(comm).all_reduce(given) is given
            given.sum().backward()
            return leaf.grad.tolist()

        assert results_on_threads(create_ring_topology(3), body) == [[6.0, 6.0]] * 3

    def test_an_op_without_a_gradient_says_so_when_it_is_asked_for(self) -> None:
        comms = create_ring_topology(2)
        parts = [ReduceScatterOperator(comm).reduce_scatter(torch.ones(2, requires_grad=True), "max") for comm in comms]
        with pytest.raises(RuntimeError, match="no gradient of op MAX"):
            parts[0].sum().backward()

    def test_without_gradients_nothing_is_recorded(self) -> None:
        comms = create_ring_topology(2)
        with torch.no_grad():
            found = [AllGatherOperator(comm).all_gather(torch.ones(2, requires_grad=True)) for comm in comms]
        assert not any(each.requires_grad for each in found)

    def test_a_graph_that_is_deeper_than_torch_follows_on_one_thread(self) -> None:
        comms = create_ring_topology(2)
        leaves = [torch.ones(2, requires_grad=True) for _ in comms]
        found: list[torch.Tensor] = list(leaves)
        for _ in range(70):
            found = [
                ReduceScatterOperator(comm).reduce_scatter(AllGatherOperator(comm).all_gather(each), "avg")
                for comm, each in zip(comms, found, strict=True)
            ]
        for each in found:
            each.sum().backward()
        assert all(leaf.grad.tolist() == [1.0, 1.0] for leaf in leaves)


class TestAsynchronous:
    def test_in_a_loop(self) -> None:
        comms = create_ring_topology(3)
        sums = [AllReduceOperator(comm).all_reduce(torch.ones(2), async_op=True) for comm in comms]
        roots = [BroadcastOperator(comm).broadcast(torch.tensor([comm.rank]), 2, async_op=True) for comm in comms]
        rows = [AllGatherOperator(comm).all_gather(torch.tensor([comm.rank]), async_op=True) for comm in comms]
        parts = [ReduceScatterOperator(comm).reduce_scatter(torch.ones(3), async_op=True) for comm in comms]
        assert all(each.done() for each in [*sums, *roots, *rows, *parts])
        assert [each.wait().tolist() for each in sums] == [[3.0, 3.0]] * 3
        assert [each.wait().item() for each in roots] == [2] * 3
        assert [each.wait().tolist() for each in rows] == [[0, 1, 2]] * 3
        assert [each.value().tolist() for each in parts] == [[3.0]] * 3

    def test_messages_of_a_loop_both_ways_before_any_wait(self) -> None:
        comms = create_ring_topology(4)
        came = [comm.irecv(comm.prev_rank, (1,), torch.float32) for comm in comms]
        sent = [comm.isend(torch.tensor([float(comm.rank)]), comm.next_rank) for comm in comms]
        assert [each.wait().item() for each in came] == [3.0, 0.0, 1.0, 2.0]
        assert all(each.wait() is not None for each in sent)
        early = comms[0].irecv(1, (1,), torch.float32)
        assert not early.done() and early.wait().isnan().all(), "as every call on this thread it returns at once"
        comms[1].send(torch.tensor([5.0]), 0)
        assert early.done() and early.wait().item() == 5.0

    def test_threads_overlap_and_wait(self) -> None:
        def body(comm: DistributedCommunicator) -> tuple[float, float, list[float]]:
            came = comm.irecv(comm.prev_rank, (1,), torch.float32)
            total = AllReduceOperator(comm).all_reduce(torch.ones(1), async_op=True)
            seen: list[float] = []
            chained = total.then(lambda ended: seen.append(ended.value().item()))
            comm.isend(torch.tensor([float(comm.rank)]), comm.next_rank).wait()
            values = came.wait().item(), total.wait().item()
            chained.wait()
            return *values, seen

        assert results_on_threads(create_ring_topology(4), body) == [
            (float((rank - 1) % 4), 4.0, [4.0]) for rank in range(4)
        ]

    def test_a_rank_that_never_comes_ends_the_wait(self) -> None:
        first, _ = create_ring_topology(2, timeout=0.2)

        def body(comm: DistributedCommunicator) -> None:
            future = AllReduceOperator(comm).all_reduce(torch.ones(1), async_op=True)
            assert not future.done()
            future.wait()

        (error,) = on_threads([first], body)
        assert isinstance(error, torch_sagellm.CommTimeoutError) and error.missing_ranks == [1]

    def test_a_failure_ends_futures(self) -> None:
        comms = create_ring_topology(2)
        future = AllReduceOperator(comms[0]).all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(dist.DistBackendError):
            comms[1].barrier()
        with pytest.raises(dist.DistBackendError, match="have failed"):
            future.wait()


class TestMonitor:
    def test_ranks_of_this_process_are_counted(self, capsys: pytest.CaptureFixture[str]) -> None:
        comms = create_ring_topology(4)

        @torch_sagellm.monitor_communication
        def step() -> float:
            tensors = [torch.ones(1 << 18) for _ in comms]
            for comm, tensor in zip(comms, tensors, strict=True):
                AllReduceOperator(comm).all_reduce(tensor)
            return tensors[0][0].item()

        assert step() == 4.0 and step.report.operations == {"all_reduce": 4} and step.report.nbytes == 4 << 20
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and "4 all_reduce" in printed.err

    def test_ranks_that_are_gone_at_the_end_too(self, capsys: pytest.CaptureFixture[str]) -> None:
        with torch_sagellm.monitor_communication("short", printed=False) as report:
            for _ in range(3):
                for comm in create_ring_topology(2):
                    comm.barrier()
            failing = create_ring_topology(2)
            for comm in failing:
                comm.barrier()
            failing[0].barrier()
            with pytest.raises(dist.DistBackendError):
                AllReduceOperator(failing[1]).all_reduce(torch.ones(1))
        assert report.operations == {"barrier": 8} and capsys.readouterr().err == ""

    def test_asynchronous_functions(self) -> None:
        import asyncio

        comms = create_ring_topology(2)

        class Served:
            @torch_sagellm.monitor_communication
            async def step(self, value: int) -> int:
                for comm in comms:
                    comm.barrier()
                    await asyncio.sleep(0)
                return value

        assert asyncio.run(Served().step(3)) == 3
        assert Served.step.report.operations == {"barrier": 2}


class TestFailure:
    @pytest.mark.parametrize(
        ("one", "other", "named"),
        [
            (lambda c: c.barrier(), lambda c: AllGatherOperator(c).all_gather(torch.ones(2)), "barrier()"),
            (
                lambda c: AllReduceOperator(c).all_reduce(torch.ones(2, 3)),
                lambda c: AllReduceOperator(c).all_reduce(torch.ones(3, 2)),
                "all_reduce(float32 [2, 3], op SUM)",
            ),
            (
                lambda c: AllGatherOperator(c).all_gather(torch.ones(2)),
                lambda c: AllGatherOperator(c).all_gather(torch.ones(2, dtype=torch.int32)),
                "all_gather(float32 [2])",
            ),
            (
                lambda c: ReduceScatterOperator(c).reduce_scatter(torch.ones(2), "max"),
                lambda c: ReduceScatterOperator(c).reduce_scatter(torch.ones(2), "min"),
                "reduce_scatter(float32 [2], op MAX)",
            ),
            (
                lambda c: c.send(torch.ones(2), 1, tag=3),
                lambda c: c.recv(0, (2, 1), torch.float32, tag=3),
                "send(float32 [2], to rank 1, tag 3)",
            ),
        ],
        ids=["kinds", "shapes", "dtypes", "ops", "messages"],
    )
    def test_calls_that_do_not_fit_show_both(self, one: Any, other: Any, named: str) -> None:
        comms = create_ring_topology(2)
        one(comms[0])
        with pytest.raises(dist.DistBackendError) as raised:
            other(comms[1])
        text = str(raised.value)
        assert "rank 1 called " in text and f"rank 0 called {named}" in text
        for comm in comms:
            with pytest.raises(dist.DistBackendError, match=r"make new ones with create_ring_topology\(2\)"):
                comm.barrier()

    def test_tensors_hold_again_what_they_held(self) -> None:
        comms = create_ring_topology(3)
        mine, theirs = torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]])
        AllReduceOperator(comms[0]).all_reduce(mine)
        AllReduceOperator(comms[0]).all_reduce(mine)
        assert mine.isnan().all()
        with pytest.raises(dist.DistBackendError):
            AllReduceOperator(comms[1]).all_reduce(theirs)
        assert mine.tolist() == [1.0, 2.0] and theirs.tolist() == [[3.0, 4.0]]

    def test_a_failure_reaches_threads_that_wait(self) -> None:
        comms = create_ring_topology(3)

        def body(comm: DistributedCommunicator) -> Any:
            if comm.rank == 2:
                time.sleep(0.05)
                return AllGatherOperator(comm).all_gather(torch.ones(2))
            return AllReduceOperator(comm).all_reduce(torch.ones(2))

        found = on_threads(comms, body)
        assert all(type(each) is dist.DistBackendError for each in found), found
        assert all("all_gather" in str(each) and "all_reduce" in str(each) for each in found)

    def test_a_rank_that_never_comes_is_named(self) -> None:
        comms = create_ring_topology(4, timeout=0.3)

        def body(comm: DistributedCommunicator) -> Any:
            comm.barrier()
            return AllReduceOperator(comm).all_reduce(torch.ones(2)) if comm.rank in (0, 3) else None

        found = on_threads(comms, body)
        errors = [found[0], found[3]]
        assert all(
            isinstance(each, torch_sagellm.CommTimeoutError) and isinstance(each, TimeoutError) for each in errors
        )
        assert all(each.missing_ranks == [1, 2] for each in errors), errors
        assert "Timed out after 0.3 s" in str(errors[0]) and "only 1 collectives" in str(errors[0])

    def test_a_message_that_never_comes_names_its_sender(self) -> None:
        first, second, third = create_ring_topology(3, timeout=0.2)
        third.send(torch.ones(1), 0)
        (error,) = on_threads([first], lambda comm: comm.recv(1, (1,), torch.float32))
        assert isinstance(error, torch_sagellm.CommTimeoutError) and error.missing_ranks == [1]
        assert "in recv(float32 [1], from rank 1, tag 0): rank 1 (in this process) has not called its send" in str(
            error
        )
        assert second.rank == 1

    def test_an_error_in_the_middle_leaves_no_tensor_half_written(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch_sagellm.api import calls

        real = calls.ISSUE["all_reduce"]

        def broken(group: Any, call: calls.Call) -> Any:
            if call.rank == 1:
                raise KeyboardInterrupt
            return real(group, call)

        comms, tensors = create_ring_topology(2), [torch.tensor([1.0]), torch.tensor([2.0])]
        monkeypatch.setitem(calls.ISSUE, "all_reduce", broken)
        AllReduceOperator(comms[0]).all_reduce(tensors[0])
        with pytest.raises(KeyboardInterrupt):
            AllReduceOperator(comms[1]).all_reduce(tensors[1])
        assert [each.item() for each in tensors] == [1.0, 2.0]
        with pytest.raises(dist.DistBackendError, match="The failure was: KeyboardInterrupt"):
            comms[0].barrier()


class TestMemory:
    def test_ranks_that_are_dropped_with_calls_outstanding_leave_nothing(self) -> None:
        def one() -> weakref.ref[Any]:
            comms = create_ring_topology(4)
            for comm in comms[:3]:
                AllReduceOperator(comm).all_reduce(torch.ones(10))
            comms[0].send(torch.ones(10), 1)
            comms[3].recv(2, (10,), torch.float32)
            return weakref.ref(comms[0]._member.topology)

        def used() -> tuple[int, int]:
            maps = Path("/proc/self/maps").read_text().count("memfd:")
            return len(os.listdir("/proc/self/fd")), maps

        assert one()() is None
        gc.collect()
        before = used()
        for _ in range(10):
            assert one()() is None, "it is freed at once, not by the collector"
        after = used()
        assert after == before, (before, after)

    def test_a_thread_that_waits_keeps_its_ranks(self) -> None:
        comms = create_ring_topology(2)
        found: list[Any] = []
        thread = threading.Thread(
            target=lambda comm: found.append(AllReduceOperator(comm).all_reduce(torch.ones(1))), args=(comms[0],)
        )
        thread.start()
        other = comms[1]
        del comms
        gc.collect()
        AllReduceOperator(other).all_reduce(torch.ones(1))
        thread.join(60)
        assert found[0].item() == 2.0


@dataclass
class Planned:
    """One collective or message, with every rank's input and result."""

    kind: str
    #: The op, the root, or source, destination and tag.
    option: Any
    inputs: list[torch.Tensor]
    results: list[torch.Tensor]

    def __str__(self) -> str:
        return f"{self.kind} {self.option} of {self.inputs[0].dtype} {list(self.inputs[0].shape)}"


def random_call(rng: random.Random, ranks: int, seed: int) -> Planned:
    kinds = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"]
    kind = rng.choice([*kinds, "message"] if ranks > 1 else kinds)
    reduces = kind in ("all_reduce", "reduce_scatter")
    dtype = rng.choice([*FLOATS, *REDUCIBLE] if reduces else MOVABLE)
    shape = tuple(rng.choice([0, 1, 2, 3, 7]) for _ in range(rng.randrange(1, 4)))
    if rng.random() < 0.2:
        shape = (rng.choice([300, 2000, 10_000]),)
    if kind == "reduce_scatter":
        shape = (shape[0] * ranks, *shape[1:])
    inputs = inputs_of(ranks, dtype, shape, seed)
    if reduces:
        op = rng.choice([op for op, name in OPS.items() if name in ops_of(dtype)])
        whole = fold(OPS[op], inputs)
        if kind == "all_reduce":
            return Planned(kind, op, inputs, [whole] * ranks)
        return Planned(kind, op, inputs, list(whole.reshape(ranks, shape[0] // ranks, *shape[1:]).unbind(0)))
    source, tag = rng.randrange(ranks), rng.randrange(3)
    if kind == "message":
        option = (source, (source + rng.randrange(1, ranks)) % ranks, tag)
        return Planned(kind, option, inputs, [inputs[source]] * ranks)
    results = [torch.stack(inputs).flatten(0, 1) if kind == "all_gather" else inputs[source]] * ranks
    return Planned(kind, source, inputs, results)


def play(comm: DistributedCommunicator, call: Planned) -> Callable[[], None]:
    """Makes one call on one rank. Returns a function that compares the result after all ranks have made the call."""
    mine, rank = call.inputs[comm.rank].clone(), comm.rank
    found: torch.Tensor | None = None
    if call.kind == "all_reduce":
        found = AllReduceOperator(comm).all_reduce(mine, call.option)
    elif call.kind == "broadcast":
        found = BroadcastOperator(comm).broadcast(mine, call.option)
    elif call.kind == "all_gather":
        found = AllGatherOperator(comm).all_gather(mine)
    elif call.kind == "reduce_scatter":
        found = ReduceScatterOperator(comm).reduce_scatter(mine, call.option)
    elif call.kind == "barrier":
        comm.barrier()
    elif rank == call.option[0]:
        comm.send(mine, *call.option[1:])
    elif rank == call.option[1]:
        found = comm.recv(call.option[0], mine.shape, mine.dtype, call.option[2])

    def check() -> None:
        if found is not None:
            same_bits(found, call.results[rank], f"rank {rank} of {comm.world_size}: {call}")

    return check


#: The number of calls in a random program, and the seeds of the programs. `tests/py/dist/test_collective_ops.py` has
#: more programs, for `make test-long`.
CALLS = 25
SEEDS = range(2)


class TestRandomCalls:
    """Programs of random calls on 1 to 16 ranks, one for each seed: on threads with delays, or in a loop."""

    @pytest.mark.parametrize("seed", SEEDS)
    def test_on_threads(self, seed: int) -> None:
        rng = random.Random(seed)
        ranks = rng.randrange(1, 17)
        plan = [random_call(rng, ranks, number) for number in range(CALLS)]
        delays = [random.Random(f"{seed} {rank}") for rank in range(ranks)]

        def body(comm: DistributedCommunicator) -> None:
            for call in plan:
                if delays[comm.rank].random() < 0.1:
                    time.sleep(delays[comm.rank].random() * 0.01)
                play(comm, call)()

        results_on_threads(create_ring_topology(ranks), body)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_in_a_loop(self, seed: int) -> None:
        """The ranks take turns at random, so that one is many calls ahead of another."""
        rng = random.Random(1000 + seed)
        ranks = rng.randrange(1, 17)
        plan, comms = [random_call(rng, ranks, number) for number in range(CALLS)], create_ring_topology(ranks)
        done, checks = [0] * ranks, []
        while any(each < len(plan) for each in done):
            rank = rng.choice([rank for rank in range(ranks) if done[rank] < len(plan)])
            for _ in range(min(rng.randrange(1, 6), len(plan) - done[rank])):
                checks.append(play(comms[rank], plan[done[rank]]))
                done[rank] += 1
        for check in checks:
            check()
