"""Explanations of past operations by number. For every operation of a run, the recomputed explanation equals the
record, on one host and over several. Statistics and records use the same name for the algorithm.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch, run_fresh, run_ranks
from net import enter

pytestmark = beyond_gloo("this is about the package's own choice")


def mixed(context: Context, group: Any) -> None:
    """Makes calls of every kind, with messages between them: one by one, several in flight, lists, uneven blocks,
    sparse tensors."""
    ranks, me = context.world_size, context.rank
    for count in (0, 1, 1000, 5000, 300_000):
        own, many = torch.ones(count), [torch.ones(count) for _ in range(ranks)]
        dist.all_reduce(own, group=group)
        dist.all_reduce(own.to(torch.bfloat16), op=dist.ReduceOp.MAX, group=group)
        dist.broadcast(own, src=0, group=group)
        dist.reduce(own, dst=0, group=group)
        dist.all_gather([torch.empty(count + rank) for rank in range(ranks)], torch.ones(count + me), group=group)
        dist.reduce_scatter(torch.empty(count), many, group=group)
        dist.all_to_all_single(torch.empty(count * ranks), torch.ones(count * ranks), group=group)
        dist.gather(own, many if me == 0 else None, dst=0, group=group)
        dist.scatter(own, many if me == 0 else None, src=0, group=group)
        dist.barrier(group=group)
    works = [dist.all_reduce(torch.ones(30), group=group, async_op=True) for _ in range(100)]
    peer, source = (me + 1) % ranks, (me - 1) % ranks
    works += [dist.isend(torch.ones(9), peer, group=group), dist.irecv(torch.empty(9), source, group=group)]
    works += [
        dist.all_gather_into_tensor(torch.empty(9 * ranks), torch.ones(9), group=group, async_op=True)
        for _ in range(100)
    ]
    for work in works:
        work.wait()
    with dist._coalescing_manager(group=group):
        for number in (3, 4, 5):
            dist.all_reduce(torch.ones(number), group=group)
    dist.all_reduce(torch.eye(4).to_sparse(), group=group)


def explained(group: Any) -> list[tuple[str, str, int, tuple[int, int, int] | None]]:
    """Returns the explanation of each collective of a group, which must agree with its record."""
    import torch_sagellm
    from torch_sagellm.observe import explain

    records = explain.backend_of(group)._records()
    # A call that is composed of several operations has no number.
    own = [each for each in records if each["path"] != "composed"]
    of = {each["number"]: each for each in own if each["kind"] not in ("send", "recv")}
    last = max(of)
    assert sorted(of) == list(range(1, last + 1)), "every number has a record"
    said = []
    for number in range(1, last + 1):
        found, record = torch_sagellm.explain(sequence=number, group=group), of[number]
        text = f"{found}\n{record}"
        assert found.recorded == found.code, text
        assert (found.sequence, found.op, found.reason) == (number, record["kind"], record["reason"]), text
        assert found.choice.startswith(record["path"]) and record["path"] not in ("none", "unknown"), text
        batch = found.batch
        assert batch is not None and batch.operations == record["together"] >= 1, text
        assert (batch.first, batch.last) == (record["first"], record["last"]), text
        assert batch.first <= number <= batch.last and str(batch) in str(found), text
        took = record["ended"] - record["issued"]
        assert found.took is not None and round(found.took * 1e9) == took and "  took  " in str(found), text
        together = None if batch.nbytes is None else (batch.first, batch.last, batch.nbytes)
        said.append((found.op, found.choice, found.code, together))
    for record in (each for each in records if each["path"] == "composed"):
        assert record["reason"] == "composed"
    return said


def one_host(context: Context) -> list[tuple[str, str, int, tuple[int, int, int] | None]]:
    import torch_sagellm

    group = dist.new_group(list(range(context.world_size)))
    mixed(context, group)
    said = explained(group)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    work.wait()
    found = torch_sagellm.explain(work)
    assert torch_sagellm.explain(sequence=len(said) + 1, group=group) == found
    assert found.took is not None and 0 < found.took < 10
    paths = {row["path"] for row in torch_sagellm.get_stats(group)["sizes"]}
    assert paths == {"slots", "rounds", "message", "composed"}
    dist.destroy_process_group(group)
    return said


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operation_of_a_run_is_explained_by_its_number(ranks: int) -> None:
    values = run_ranks(one_host, ranks)
    assert all(value == values[0] for value in values), "every rank took the same ways"
    assert all(together is None for _, _, _, together in values[0])


def two_hosts(
    context: Context, names: list[str], place: list[int], options: dict[str, Any]
) -> list[tuple[str, str, int, tuple[int, int, int] | None]]:
    import torch_sagellm

    enter(names[place[context.rank]])
    options = {"pg_options": torch_sagellm.Options(**options)}
    context.init(store=dist.FileStore(f"{context.tmp}/store", len(place)), timeout=timedelta(seconds=60), **options)
    mixed(context, None)
    said = explained(None)
    paths = {row["path"] for row in torch_sagellm.get_stats()["sizes"]}
    assert {choice.split("(")[0] for _, choice, _, _ in said} == paths - {"message", "composed"}
    asked = expect_raises(ValueError, lambda: torch_sagellm.explain(sequence=len(said) + 1))
    assert f"has issued {len(said)} collectives" in asked
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize(
    ("place", "options"),
    [([0, 1], {}), ([0, 0, 1], {"algorithm": "*:0-=ring"}), ([0, 1, 1], {"strict": True})],
)
def test_over_two_hosts_by_the_batches_they_were_in(
    hosts: list[str], place: list[int], options: dict[str, Any]
) -> None:
    with launch(two_hosts, len(place), hosts, place, options, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        values = job.values(120)
    assert all(value == values[0] for value in values), "every rank took the same ways, in the same batches"
    batches = {together for _, _, _, together in values[0] if together is not None}
    assert batches, "of 200 at once none travelled together"
    for first, last, nbytes in batches:
        members = values[0][first - 1 : last]
        assert len({member[1:] for member in members}) == 1 and nbytes > 0
        each = {"all_reduce": {120, 12, 16, 20}, "all_gather": {36}}[members[0][0]]
        assert nbytes >= len(members) * min(each)
        if "strict" in options:
            assert members[0][1].startswith("direct")
        elif "algorithm" in options and members[0][0] == "all_reduce":
            assert not members[0][1].startswith("ring"), "the bits of a sum must not depend on its neighbours"


def forgotten(context: Context) -> list[str]:
    """Uses a group that keeps the records of eight operations."""
    import torch_sagellm

    os.environ["SAGELLM_RING"] = "8"
    context.init()
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    assert torch_sagellm.explain(sequence=13).sequence == 13 and torch_sagellm.explain(sequence=20).choice == "slots"
    texts = [expect_raises(ValueError, lambda n=n: torch_sagellm.explain(sequence=n)) for n in (12, 21, 0)]
    texts.append(expect_raises(ValueError, lambda: torch_sagellm.explain("all_reduce", 8, sequence=3)))
    dist.destroy_process_group()
    return texts


def test_what_is_forgotten_or_never_was_is_said_so() -> None:
    for gone, never, zero, both in run_fresh(forgotten, 2):
        assert "collective 12 of group" in gone and "is forgotten" in gone
        assert "the last 8 operations are kept, collectives from 13 on" in gone and "SAGELLM_RING" in gone
        assert "has issued 20 collectives on this rank, and none has number 21" in never
        assert "sequence is 0" in zero
        assert "only group= goes with it" in both


def delegated(context: Context) -> None:
    import torch_sagellm

    context.init(pg_options=torch_sagellm.Options(engine="delegate"))
    for _ in range(3):
        dist.all_reduce(torch.ones(5))
    found = torch_sagellm.explain(sequence=2)
    assert (found.choice, found.op, found.nbytes, found.sequence) == ("gloo", "all_reduce", 20, 2)
    assert found.recorded == found.code and found.reason == "delegated"
    assert "none has number 4" in expect_raises(ValueError, lambda: torch_sagellm.explain(sequence=4))
    dist.destroy_process_group()


def test_a_delegates_operations_have_numbers_too() -> None:
    run_fresh(delegated, 2)


def lived(ctx: Context) -> None:
    """`explain` shows the measured times of a group's own operations next to the prediction."""
    import torch_sagellm

    group = dist.new_group()
    for kind, nbytes in (("all_reduce", 1 << 16), ("barrier", 0), ("all_gather", 1000), ("all_reduce", 1)):
        assert torch_sagellm.explain(kind, nbytes, group=group).seen is None, "nothing has run"
    for _ in range(9):
        dist.all_reduce(torch.ones(1 << 14), group=group)
        dist.all_gather([torch.empty(250) for _ in range(ctx.world_size)], torch.ones(250), group=group)
    dist.barrier(group=group)
    found = torch_sagellm.explain("all_reduce", "64KiB", group=group)
    own = torch_sagellm.get_stats(group)["ops"]["all_reduce"]["latency"]
    assert found.seen is not None and found.seen[0] == 9 and found.seen[1] == pytest.approx(own["p50_ms"] / 1e3)
    text = str(found)
    assert "median of 9 calls of this size" in text and ", by the calls of this group (about " in text
    assert found.predicted == pytest.approx(found.seen[1], rel=0.25), "the model is scaled to the group's calls"
    assert found.by_model is not None and found.by_model != found.predicted
    alone = torch_sagellm.explain("all_reduce", 1 << 16, ranks=ctx.world_size)
    assert alone.predicted == alone.by_model == pytest.approx(found.by_model), "no group, no calls"
    assert torch_sagellm.explain("all_reduce", (1 << 16) + 4, group=group).seen is None, "another size class"
    assert torch_sagellm.explain("all_gather", 1000, group=group).seen[0] == 9  # type: ignore[index]
    assert torch_sagellm.explain("barrier", group=group).seen[0] >= 1  # type: ignore[index]
    assert torch_sagellm.explain("all_reduce", 1 << 16, ranks=2).seen is None
    dist.destroy_process_group(group)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_live_group_shows_what_it_measured_beside_what_was_predicted(world_size: int) -> None:
    run_ranks(lived, world_size)
