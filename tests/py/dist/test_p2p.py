"""Point to point: tags, any source, order, sizes, dropped Works."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import IN_ORDER_GIVEN, needs_order_given
from harness import Context, beyond_gloo, expect_raises, monitored_barrier, run_fresh, run_ranks
from limits import patience
from reference import MOVABLE, make, same_bits

SIZES = [0, 1, 7, 512, 1023, 1024, 1025, 5000, 300_001]


def ping(ctx: Context, sizes: list[int]) -> None:
    n, me = ctx.world_size, ctx.rank
    right, left = (me + 1) % n, (me - 1) % n
    for count in sizes:
        mine, found = make(torch.float32, count, me), torch.empty(count)
        if me % 2 == 0:
            dist.send(mine, right)
            dist.recv(found, left)
        else:
            dist.recv(found, left)
            dist.send(mine, right)
        same_bits(found, make(torch.float32, count, left), f"{count} floats from {left}")


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 4])
def test_send_and_recv_of_every_size(world_size: int) -> None:
    """Empty, one element, just below and above 4 KiB, more than a megabyte."""
    run_ranks(ping, world_size, SIZES)


def test_send_and_recv_of_eight_megabytes() -> None:
    """Much larger than any staging buffer."""
    run_ranks(ping, 2, [2_097_152 + 1])


def every_dtype(ctx: Context) -> None:
    for dtype in MOVABLE:
        data = make(dtype, 300, 5)
        if ctx.rank == 0:
            dist.send(data, 1)
        else:
            found = torch.empty_like(data)
            dist.recv(found, 0)
            same_bits(found, data, str(dtype))


@beyond_gloo("refuses float8, int16 and wide unsigned")
def test_every_dtype() -> None:
    """Pitfall 13 for send and recv."""
    run_ranks(every_dtype, 2)


def tags_out_of_order(ctx: Context, count: int) -> None:
    tags = [5, 3, 9, 0, 7]
    if ctx.rank == 0:
        works = [dist.isend(torch.full((count,), float(tag)), 1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
    else:
        for tag in sorted(tags):
            found = torch.empty(count)
            dist.recv(found, 0, tag=tag)
            assert (found == tag).all(), (tag, found)


@pytest.mark.quick
@pytest.mark.parametrize("count", [1, 1000, 200_000])
def test_rule_20_tags_out_of_order(count: int) -> None:
    """Rule 20: tags are received in another order than they were sent, in small and large messages."""
    run_ranks(tags_out_of_order, 2, count)


def unposted_tag(ctx: Context) -> None:
    if ctx.rank == 0:
        big = dist.isend(torch.full((4_000_000,), 1.0), 1, tag=1)  # 16 MB without a receive
        small = dist.isend(torch.full((10,), 2.0), 1, tag=2)
        small.wait(timedelta(seconds=10))
        total = torch.ones(3)
        dist.all_reduce(total)
        big.wait(timedelta(seconds=20))
    else:
        found = torch.empty(10)
        dist.recv(found, 0, tag=2)
        assert (found == 2.0).all()
        total = torch.ones(3)
        dist.all_reduce(total)
        found = torch.empty(4_000_000)
        dist.recv(found, 0, tag=1)
        assert (found == 1.0).all()
    assert total.tolist() == [2.0] * 3


@pytest.mark.quick
def test_rule_20_a_tag_without_a_receive_blocks_no_other() -> None:
    """Rules 1 and 20: 16 MB with tag 1 wait at the sender, while tag 2 and a collective complete."""
    run_ranks(unposted_tag, 2)


def many_unposted(ctx: Context) -> None:
    count = 300
    if ctx.rank == 0:
        works = [dist.isend(torch.full((100,), float(tag)), 1, tag=tag) for tag in range(count)]
        dist.isend(torch.full((4,), -1.0), 1, tag=9999).wait()
        for work in works:
            work.wait()
    else:
        found = torch.empty(4)
        dist.recv(found, 0, tag=9999)
        assert (found == -1.0).all()
        for tag in reversed(range(count)):
            found = torch.empty(100)
            dist.recv(found, 0, tag=tag)
            assert (found == tag).all()


def test_rule_20_hundreds_of_unposted_messages() -> None:
    """Rule 20: without credits the bodies stay at the sender, but the headers are delivered."""
    run_ranks(many_unposted, 2)


def fifo(ctx: Context) -> None:
    count = 200
    sizes = [1 + 997 * (i % 4) for i in range(count)]
    if ctx.rank == 0:
        works = [dist.isend(torch.full((sizes[i],), float(i)), 1, tag=4) for i in range(count)]
        for work in works:
            work.wait()
    else:
        found = [torch.empty(size) for size in sizes]
        works = [dist.irecv(each, 0, tag=4) for each in found]
        for work in reversed(works):
            assert work is not None
            work.wait()
        for i, each in enumerate(found):
            assert (each == i).all(), (i, each)


@pytest.mark.quick
def test_rule_20_first_in_first_out_per_source_and_tag() -> None:
    """Small and large messages of one tag keep their order."""
    run_ranks(fifo, 2)


def issue_does_not_block(ctx: Context) -> None:
    if ctx.rank == 0:
        works = [dist.isend(torch.full((100_000,), float(i)), 1, tag=i) for i in range(20)]
        works.append(dist.irecv(torch.empty(5), 1, tag=77))
        ctx.store().set("issued", "")
        for work in works[:-1]:
            work.wait()
        works[-1].wait()
    else:
        # If rank 0 waited for a receive, it would never set the key, and this wait would raise an error.
        ctx.store().wait(["issued"])
        for i in range(20):
            found = torch.empty(100_000)
            dist.recv(found, 0, tag=i)
            assert (found == i).all()
        dist.send(torch.ones(5), 0, tag=77)


@pytest.mark.quick
def test_rule_03_issue_never_blocks_on_a_peer() -> None:
    """Rule 3 and pitfall 9: twenty isends return although the peer posts no receive before they have returned."""
    run_ranks(issue_does_not_block, 2)


def any_source(ctx: Context) -> None:
    n = ctx.world_size
    if ctx.rank == 0:
        seen = []
        for _ in range(3 * (n - 1)):
            found = torch.empty(50)
            source = dist.recv(found)
            assert source == int(found[0].item()), (source, found)
            seen.append(source)
        assert sorted(seen) == sorted(list(range(1, n)) * 3)
        for tag in (8, 6):
            for _ in range(n - 1):
                found = torch.empty(3000)
                work = dist.irecv(found, tag=tag)
                assert work is not None
                work.wait()
                assert (found == 100 * tag + work.source_rank()).all()
    else:
        for _ in range(3):
            dist.send(torch.full((50,), float(ctx.rank)), 0)
        works = [dist.isend(torch.full((3000,), 100.0 * tag + ctx.rank), 0, tag=tag) for tag in (6, 8)]
        for each in works:
            assert each is not None
            each.wait()


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rule_20_recv_from_anyone_reports_the_source(world_size: int) -> None:
    """recvAnysource and Work.sourceRank, with tags."""
    run_ranks(any_source, world_size)


def any_source_in_group(ctx: Context) -> None:
    group = dist.new_group([2, 0, 1], **IN_ORDER_GIVEN)
    if ctx.rank == 0:
        for _ in range(2):
            found = torch.empty(2)
            source = dist.recv(found, group=group)
            assert source == int(found[0].item()), (source, found)
    else:
        dist.send(torch.full((2,), float(ctx.rank)), 0, group=group)
    dist.barrier(group=group)
    dist.destroy_process_group(group)


@needs_order_given
def test_pitfall_08_recv_from_anyone_in_a_permuted_group() -> None:
    """Pitfall 8: the source is a group rank on the wire and a global rank for the caller."""
    run_ranks(any_source_in_group, 3)


def wildcard_order(ctx: Context) -> None:
    if ctx.rank == 0:
        any_one, one, any_two = torch.empty(4), torch.empty(4), torch.empty(4)
        works = [dist.irecv(any_one, tag=1), dist.irecv(one, 1, tag=1), dist.irecv(any_two, tag=1)]
        dist.barrier()
        for work in works:
            assert work is not None
            work.wait()
        assert [each[0].item() for each in (any_one, one, any_two)] == [1.0, 2.0, 3.0]
    else:
        dist.barrier()
        for i in range(3):
            dist.send(torch.full((4,), float(i + 1)), 0, tag=1)


@beyond_gloo("serves a specific receive before an earlier wildcard")
def test_rule_20_wildcard_and_specific_receives_match_in_post_order() -> None:
    """Rule 20: the first message goes to the receive that was posted first."""
    run_ranks(wildcard_order, 2)


def fire_and_forget(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    for i in range(50):
        for peer in range(n):
            if peer != me:
                dist.isend(torch.full((1 + 400 * (i % 9),), float(100 * me + i)), peer, tag=i)  # the Work is dropped
    for i in range(50):
        for peer in range(n):
            if peer != me:
                found = torch.empty(1 + 400 * (i % 9))
                dist.recv(found, peer, tag=i)
                assert (found == 100 * peer + i).all()
    dist.barrier()


@beyond_gloo("waits for the peer in the destructor of a dropped isend")
@pytest.mark.parametrize("world_size", [2, 3])
def test_rule_10_isend_dropped_at_once(world_size: int) -> None:
    """Rule 10: the caller holds neither the Work nor the tensor."""
    run_ranks(fire_and_forget, world_size)


def dropped_under_delegate(ctx: Context, ends: str) -> float:
    """Exchanges messages of three sizes and drops their Works immediately. Then ends the group as `ends` says, while a
    receive is pending. Returns the time of day at the end."""
    import torch_sagellm

    ctx.init()
    group: Any = dist.new_group(pg_options=torch_sagellm.Options(engine="delegate"))
    peer, sizes = 1 - ctx.rank, (1, 1000, 3_000_000)
    for turn in range(3):
        found = [torch.zeros(size) for size in sizes]
        unseen = torch.zeros(77_777)
        place = unseen.data_ptr()
        for tag, each in enumerate(found):
            dist.irecv(each, peer, group, tag)
        dist.irecv(unseen, peer, group, 9)
        del unseen
        others = [torch.zeros(77_777) for _ in range(50)]
        assert place not in [each.data_ptr() for each in others], "memory of a receive in progress was freed"
        dist.barrier()  # of the default group
        for tag, size in enumerate(sizes):
            dist.isend(torch.full((size,), 1.0 + turn), peer, group, tag)
        dist.isend(torch.ones(77_777), peer, group, 9)
        end = time.monotonic() + patience(10)
        while not all(bool((each == 1 + turn).all()) for each in found) and time.monotonic() < end:
            time.sleep(0.01)
        assert [float(each.sum()) for each in found] == [(1.0 + turn) * size for size in sizes]
        value = torch.ones(5)
        dist.all_reduce(value, group=group)
        assert value.tolist() == [2.0] * 5, "the group goes on"
    dist.irecv(torch.zeros(4), peer, group, 100)  # no message ever comes
    dist.barrier()
    begin = time.monotonic()
    if ends == "exit":
        return time.time()
    dist.destroy_process_group(group) if ends == "destroy" else group._get_backend(torch.device("cpu")).abort()
    took = time.monotonic() - begin
    assert took < patience(3), took
    return time.time()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ends", ["destroy", "abort", "exit"])
def test_rule_10_messages_dropped_at_once_arrive_under_a_delegate(ends: str) -> None:
    """Rule 10: gloo would cancel a receive whose Work is destroyed, and the message that then arrives would block its
    connection. A receive that is never matched delays neither the end of the group nor that of the process."""
    ended = run_fresh(dropped_under_delegate, 2, ends, timeout=120)
    assert time.time() - max(ended) < patience(4), "the processes end"


def batches(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    for count in (0, 1, 2000, 150_000):
        for turn in range(3):
            found = [torch.empty(count) for _ in range(n)]
            ops = []
            for peer in range(n):
                if peer != me:
                    ops.append(dist.P2POp(dist.irecv, found[peer], peer))
                    ops.append(dist.P2POp(dist.isend, torch.full((count,), float(10 * me + turn)), peer))
            if turn == 1:
                ops.reverse()
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            for peer in range(n):
                assert peer == me or (found[peer] == 10 * peer + turn).all()


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_batch_isend_irecv(world_size: int) -> None:
    """Pitfalls 7 and 9: rings and all pairs, with the sends first or the receives first."""
    run_ranks(batches, world_size)


def ring_of_tags(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    ops = []
    found = [torch.empty(64) for _ in range(5)]
    for tag in range(5):
        ops.append(dist.P2POp(dist.isend, torch.full((64,), float(10 * me + tag)), (me + 1) % n, tag=tag))
    for tag in reversed(range(5)):
        ops.append(dist.P2POp(dist.irecv, found[tag], (me - 1) % n, tag=tag))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert [int(each[0]) for each in found] == [10 * ((me - 1) % n) + tag for tag in range(5)]


def test_batch_with_tags() -> None:
    """Tags inside a batch."""
    run_ranks(ring_of_tags, 3)


def numbers_apart(ctx: Context) -> None:
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    if ctx.rank == 0:
        for _ in range(5):
            dist.send(torch.ones(3), 1)
    elif ctx.rank == 1:
        for _ in range(5):
            dist.recv(torch.ones(3), 0)
    assert backend._get_sequence_number_for_group() == before, "send and recv used the group's numbers"
    dist.all_reduce(torch.ones(2))
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
    assert backend._get_sequence_number_for_group() == before + 2
    monitored_barrier()
    assert backend._get_sequence_number_for_group() == before + 2


@beyond_gloo("counts sends and receives")
@pytest.mark.quick
def test_rule_01_send_and_recv_never_touch_the_groups_number() -> None:
    """Rule 1: a coalesced list counts as one operation. Messages and monitored_barrier do not count."""
    run_ranks(numbers_apart, 3)


def wrong_size(ctx: Context) -> None:
    if ctx.rank == 0:
        work = dist.isend(torch.ones(10), 1, tag=1)
        with __import__("contextlib").suppress(RuntimeError):
            work.wait(timedelta(seconds=5))
    else:
        text = expect_raises((RuntimeError, ValueError), lambda: dist.recv(torch.ones(4), 0, tag=1))
        assert "40" in text and "16" in text, text


@beyond_gloo("reports a socket's error")
def test_recv_of_another_size_names_both() -> None:
    """A send and its receive must have the same size; the error has both sizes."""
    run_ranks(wrong_size, 2, fresh_group=True)


def p2p_beside_collectives(ctx: Context) -> None:
    n, me = ctx.world_size, ctx.rank
    found = torch.empty(1000)
    pending: list[Any] = []
    for turn in range(20):
        total = torch.full((100 * turn + 1,), float(me))
        pending.append(dist.isend(torch.full((1000,), float(turn)), (me + 1) % n, tag=turn))
        dist.all_reduce(total)
        assert (total == sum(range(n))).all()
        dist.recv(found, (me - 1) % n, tag=turn)
        assert (found == turn).all()
    for work in pending:
        work.wait()


@pytest.mark.parametrize("world_size", [2, 3])
def test_point_to_point_between_collectives(world_size: int) -> None:
    """Messages and collectives are in flight on one group."""
    run_ranks(p2p_beside_collectives, world_size)


def strided_messages(ctx: Context) -> None:
    wide = torch.arange(20.0).reshape(4, 5)
    if ctx.rank == 0:
        dist.send(wide.t(), 1)
    else:
        found = torch.zeros(10, 8)[::2, ::2]
        dist.recv(found, 0)
        same_bits(found, wide.t().contiguous(), "strided to strided")


@beyond_gloo("wants contiguous tensors")
def test_strided_messages() -> None:
    """A transposed tensor is sent and received into a slice."""
    run_ranks(strided_messages, 2)
