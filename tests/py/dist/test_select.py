"""Choosing algorithms in running groups: one table and one set of rules for all ranks, and explanations that match the
records."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import net
import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch, run_fresh, run_ranks, run_warm
from net import enter

pytestmark = beyond_gloo("this is about the package's own choice")

LINES = "all_reduce:4097-=rounds(64KiB) 9000 ns; start 12000 ns"


def every_operation(context: Context) -> list[tuple[str, int | None, int]]:
    """Runs all kinds of operations with many sizes. Returns for each what was recorded and what is recomputed."""
    import torch_sagellm

    ranks, works = context.world_size, []
    for count in (0, 1, 1000, 5000, 300_000):
        own, many = torch.ones(count), [torch.ones(count) for _ in range(ranks)]
        works += [
            dist.all_reduce(own, async_op=True),
            dist.all_reduce(own.to(torch.bfloat16), async_op=True),
            dist.broadcast(own.clone(), src=0, async_op=True),
            dist.reduce(own.clone(), dst=0, async_op=True),
            dist.all_gather([torch.empty(count) for _ in range(ranks)], own.clone(), async_op=True),
            dist.all_gather_into_tensor(torch.empty(count * ranks), own.clone(), async_op=True),
            dist.reduce_scatter(torch.empty(count), many, async_op=True),
            dist.all_to_all_single(torch.empty(count * ranks), torch.ones(count * ranks), async_op=True),
            dist.gather(own.clone(), many if context.rank == 0 else None, dst=0, async_op=True),
            dist.scatter(torch.empty(count), many if context.rank == 0 else None, src=0, async_op=True),
            dist.barrier(async_op=True),
        ]
        peer = (context.rank + 1) % ranks
        works += [dist.isend(own.clone(), peer), dist.irecv(torch.empty(count), (context.rank - 1) % ranks)]
    found = []
    for work in works:
        work.wait()
        explained = torch_sagellm.explain(work)
        found.append((str(explained), explained.recorded, explained.code))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_worked_out_again_is_what_was_recorded(ranks: int) -> None:
    values = run_ranks(every_operation, ranks)
    for text, recorded, code in (one for value in values for one in value):
        assert recorded == code and code != 0, text
    assert len({tuple(code for _, _, code in value) for value in values}) == 1, "every rank took the same ways"


def with_table(context: Context, rules: list[str], option: str = "") -> dict[str, Any]:
    """Creates a group with a table that only rank 0 can read and with rules that may differ between ranks."""
    import torch_sagellm
    from torch_sagellm._private import load

    os.environ["SAGELLM_CACHE_DIR"] = f"{context.tmp}/cache{context.rank}"
    os.environ["SAGELLM_ALGORITHM"] = rules[context.rank]
    if context.rank == 0:
        load.extension().save_table(context.world_size, "2026-11-21", LINES)
    context.init(pg_options=torch_sagellm.Options(algorithm=option))
    tensor = torch.ones(20_000)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    found = torch_sagellm.explain(work)
    assert found.recorded == found.code and tensor[-1] == context.world_size
    asked = torch_sagellm.explain("all_reduce", 80_000)
    assert (asked.choice, asked.code) == (found.choice, found.code)
    value = {"choice": found.choice, "reason": found.reason, "table": found.table, "decided": found.decided}
    dist.destroy_process_group()
    return value


def test_rank_0_decides_for_all_ranks() -> None:
    values = run_fresh(with_table, 3, ["", "", ""])
    assert {value["choice"] for value in values} == {"rounds(64KiB)"}
    assert {value["reason"] for value in values} == {"measured"}
    assert len({value["table"] for value in values}) == 1 and "cache0" in values[0]["table"]


def test_rules_come_before_the_table_and_the_option_before_the_environment() -> None:
    values = run_fresh(with_table, 2, ["*:0-=rounds(16KiB)"] * 2)
    assert {value["choice"] for value in values} == {"rounds(16KiB)"}
    values = run_fresh(with_table, 2, ["*:0-=rounds(16KiB)"] * 2, option="all_reduce:0-=rounds(8KiB)")
    assert {value["choice"] for value in values} == {"rounds(8KiB)"}
    assert "all_reduce:0-=rounds(8KiB)" in values[1]["decided"]


def warned(context: Context, rules: list[str]) -> tuple[str, list[str]]:
    """Runs `with_table` and also returns the lines that were logged."""
    import logging

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sagellm").addHandler(handler)
    return with_table(context, rules)["choice"], heard


def test_ranks_with_other_rules_follow_rank_0_and_say_so() -> None:
    values = run_fresh(warned, 2, ["", "*:0-=rounds(16KiB)"])
    assert [choice for choice, _ in values] == ["rounds(64KiB)"] * 2
    assert not values[0][1]
    (line,) = values[1][1]
    assert "rank 1" in line and "*:0-=rounds(16KiB)" in line and "rank 0's decide" in line


def refused(context: Context) -> str:
    """Wrong rules on every rank are refused before the ranks meet."""
    import torch_sagellm

    def init(algorithm: str) -> None:
        options = torch_sagellm.Options(algorithm=algorithm)
        context.init(pg_options=options, timeout=timedelta(seconds=20))

    text = expect_raises(ValueError, lambda: init("all_reduce:0-=teleport"))
    init("all_reduce:0-=start")
    dist.barrier()
    dist.destroy_process_group()
    return text


def test_wrong_rules_are_refused_before_anything_is_sent() -> None:
    for text in run_fresh(refused, 2):
        assert "the option algorithm" in text and "all_reduce:0-=teleport" in text and "rounds(CHUNK)" in text


TWO_HOSTS = '{"hosts": 2, "full_nvlink": false}'
#: Numbers of float32 elements: 4 KB, and 4 MB, for which src/select/start.rs chooses "ring".
SMALL, LARGE = 1000, 1_000_000


def over_hosts(context: Context, names: list[str], given: list[str]) -> dict[str, Any]:
    """Makes two all_reduces in a group over two hosts, created with this rank's topology. Returns how each was carried
    out."""
    import logging

    import torch_sagellm

    enter(names[context.rank * len(names) // context.world_size])
    store = dist.FileStore(f"{context.tmp}/store", context.world_size)
    context.init(store=store, timeout=timedelta(seconds=60))
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    logging.getLogger("sagellm").addHandler(handler)
    text = given[context.rank]
    manager = torch_sagellm.TopologyManager.from_json(text) if text else None
    comm = torch_sagellm.create_comm_backend(topology_manager=manager)
    value: dict[str, Any] = {"heard": heard}
    for name, count in (("small", SMALL), ("large", LARGE)):
        tensor = torch.full((count,), float(context.rank + 1))
        work = dist.all_reduce(tensor, group=comm.group, async_op=True)
        work.wait()
        assert tensor[-1] == sum(range(1, context.world_size + 1))
        found = torch_sagellm.explain(work)
        assert found.recorded == found.code
        assert comm.explain("all_reduce", 4 * count).choice == found.choice
        value[name] = (found.choice.partition("(")[0], found.reason, found.decided, found.overruled)
    value["counted"] = {each["path"]: each["count"] for each in comm.get_stats()["sizes"] if each["op"] == "all_reduce"}
    dist.destroy_process_group()
    return value


def test_a_topology_manager_changes_what_a_group_over_hosts_takes(hosts: list[str]) -> None:
    """Without a topology, the measured link and the fixed order of small sums decide; with one, the start rules. All
    ranks agree."""
    with launch(over_hosts, 4, hosts, [""] * 4, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        without = job.values(90)
    for value in without:
        # The model's algorithm for the large sum depends on the measured link.
        assert value["small"][:2] == ("direct", "one_order") and value["large"][1] == "model", value
        assert value["counted"] == {"direct": 1, value["large"][0]: 1} or value["counted"] == {"direct": 1}
    with launch(over_hosts, 4, hosts, [TWO_HOSTS] * 4, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        given = job.values(90)
    for value in given:
        assert value["small"][:2] == ("recursive_doubling", "few_steps"), value
        assert value["large"][:2] == ("ring", "few_bytes"), value
        assert value["counted"] == {"recursive_doubling": 1, "ring": 1}
        assert value["heard"] == []
        for name, between in (("small", "recursive_doubling"), ("large", "ring")):
            _, _, decided, (overruled,) = value[name]
            assert decided.startswith(f"start rule hierarchical ({between} between the hosts)")
            assert decided.endswith("the topology that was given says hosts=2,full_nvlink=false")
            assert overruled.endswith(", by the topology")
        assert "cost model" in value["large"][3][0] and "predicted" in value["large"][3][0]


def test_rank_0s_topology_holds_for_the_group_and_other_ranks_say_so(hosts: list[str]) -> None:
    """Rank 2's topology has NVLink, which would select a tree for the small sum. Rank 2 follows rank 0 and warns
    once."""
    given = [TWO_HOSTS, TWO_HOSTS, '{"hosts": 2, "full_nvlink": true}', TWO_HOSTS]
    with launch(over_hosts, 4, hosts, given, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        values = job.values(90)
    assert {value["small"][:2] for value in values} == {("recursive_doubling", "few_steps")}
    assert [len(value["heard"]) for value in values] == [0, 0, 1, 0]
    (line,) = values[2]["heard"]
    assert "rank 2" in line and "hosts=2,full_nvlink=true" in line and "rank 0's decides for the group" in line


def with_options(context: Context, names: list[str], given: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs the two all_reduces in a default group that is created with this rank's options."""
    import logging

    import torch_sagellm

    enter(names[context.rank * len(names) // context.world_size])
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    logging.getLogger("sagellm").addHandler(handler)
    store = dist.FileStore(f"{context.tmp}/store", context.world_size)
    options = torch_sagellm.Options(**given[context.rank])
    context.init(store=store, timeout=timedelta(seconds=60), pg_options=options)
    value: dict[str, Any] = {"heard": heard}
    for name, count in (("small", SMALL), ("large", LARGE)):
        tensor = torch.full((count,), float(context.rank + 1))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert tensor[-1] == sum(range(1, context.world_size + 1))
        found = torch_sagellm.explain(work)
        value[name] = (found.choice.partition("(")[0], found.reason, found.decided)
    dist.destroy_process_group()
    return value


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_link_that_is_not_measured_leaves_the_choice_to_the_start_rules(hosts: list[str], by_variable: bool) -> None:
    """The start rules choose on every rank of a group without a topology, and the explanation says so. The variable has
    priority over the option."""
    options: dict[str, Any] = {"measure_link": by_variable}
    env = {"GLOO_SOCKET_IFNAME": net.INTERFACE} | ({"SAGELLM_MEASURE_LINK": "off"} if by_variable else {})
    with launch(with_options, 4, hosts, [options] * 4, env=env) as job:
        values = job.values(90)
    for value in values:
        assert value["heard"] == []
        for name, way, reason in (("small", "recursive_doubling", "few_steps"), ("large", "ring", "few_bytes")):
            assert value[name][:2] == (way, reason), value
            decided = value[name][2]
            assert decided.startswith(f"start rule hierarchical ({way} between the hosts)"), decided
            assert decided.endswith("as the option measure_link or SAGELLM_MEASURE_LINK asks"), decided


def test_rank_0_says_for_all_whether_the_link_is_measured(hosts: list[str]) -> None:
    """Ranks with another setting follow rank 0 and warn once each."""
    given: list[dict[str, Any]] = [{"measure_link": False}, {"measure_link": False}, {}, {"measure_link": False}]
    with launch(with_options, 4, hosts, given, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        values = job.values(90)
    assert {value["small"][:2] for value in values} == {("recursive_doubling", "few_steps")}
    assert [len(value["heard"]) for value in values] == [0, 0, 1, 0]
    (line,) = values[2]["heard"]
    assert (
        "rank 2" in line and "measures the link between hosts" in line and "rank 0 leaves the link unmeasured" in line
    )


def test_a_rank_with_other_rules_over_hosts_warns_once_and_no_other_does(hosts: list[str]) -> None:
    """Rank 2 leads its host. Rank 3 is on that host and has rank 0's rules, which apply, so rank 3 must not warn."""
    rules = {"algorithm": "all_reduce:0-=ring"}
    given: list[dict[str, Any]] = [rules, rules, {"algorithm": "all_reduce:0-=double_tree"}, rules]
    with launch(with_options, 4, hosts, given, env={"GLOO_SOCKET_IFNAME": net.INTERFACE}) as job:
        values = job.values(90)
    assert {value["small"][:2] for value in values} == {("ring", "override")}
    assert [len(value["heard"]) for value in values] == [0, 0, 1, 0], [value["heard"] for value in values]
    assert "rank 2" in values[2]["heard"][0] and "lane" not in values[2]["heard"][0]


def wrong_topologies(context: Context) -> tuple[str, str]:
    """Wrong topologies are refused before the ranks meet. The group stays usable."""
    import torch_sagellm

    def make(text: str) -> None:
        dist.new_group(pg_options=torch_sagellm.Options(topology=text), use_local_synchronization=True)

    context.init()
    expect_raises(TypeError, lambda: torch_sagellm.create_comm_backend(topology_manager="ring"))
    texts = expect_raises(ValueError, lambda: make("hosts=0")), expect_raises(ValueError, lambda: make("racks=2"))
    dist.barrier()
    dist.destroy_process_group()
    return texts


def test_a_wrong_topology_is_refused_before_anything_is_sent() -> None:
    for field, unknown in run_fresh(wrong_topologies, 2):
        assert "the option topology" in field and "the field hosts: expected a whole number from 1 on" in field
        assert '"racks" is no field; expected hosts or full_nvlink' in unknown


def on_one_host(context: Context) -> tuple[str, str, bool]:
    """Within one host the CPU algorithms decide, because the start rules concern links between hosts and devices."""
    import torch_sagellm

    context.init()
    info = torch_sagellm.TopologyInfo(hosts=1, full_nvlink=True)
    comm = torch_sagellm.create_comm_backend(topology_manager=torch_sagellm.TopologyManager(info))
    assert comm is torch_sagellm.create_comm_backend(topology_manager=info), "equal topologies, one group"
    other = torch_sagellm.create_comm_backend(topology_manager=torch_sagellm.TopologyInfo(hosts=2))
    assert other is not comm and other.group is not comm.group and comm.group is not dist.group.WORLD
    found = comm.explain("all_reduce", 8)
    same = comm.group is torch_sagellm.CPUBackend(group=comm.group, topology_manager=info).group
    dist.destroy_process_group()
    return found.choice, found.reason, same


def test_a_topology_is_a_setting_of_the_group() -> None:
    assert run_fresh(on_one_host, 2) == [("slots", "fits_slot", True)] * 2


def delegated_with_a_topology(context: Context) -> list[str]:
    import logging

    import torch_sagellm

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sagellm").addHandler(handler)
    context.init(pg_options=torch_sagellm.Options(engine="delegate", topology="hosts=1,full_nvlink=true"))
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    return [line for line in heard if "topology" in line]


def test_a_delegated_group_does_not_use_a_topology_and_says_so() -> None:
    for lines in run_fresh(delegated_with_a_topology, 2):
        assert len(lines) == 1 and "the option topology is not used" in lines[0]


def explain_a_delegated_group(context: Context) -> tuple[str, str, str]:
    """If gloo serves a group, the explanation says so and has the reason."""
    import torch_sagellm

    context.init(pg_options=torch_sagellm.Options(engine="delegate"))
    found = torch_sagellm.explain("all_reduce", 1 << 20)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    text = expect_raises(ValueError, lambda: torch_sagellm.explain(work))
    work.wait()
    dist.destroy_process_group()
    return found.choice, found.rejected[0].why_not, text


def test_a_delegated_group_is_explained() -> None:
    for choice, why, text in run_fresh(explain_a_delegated_group, 2):
        assert choice == "gloo" and "engine" in why
        assert "gloo serves it" in text


def test_tune_measures_and_leaves_a_table(tmp_path: Path) -> None:
    words = ["-m", "torch_sagellm", "tune", "--budget", "4", "--max-size", "16KiB", "--force"]
    done = run_warm(*words, SAGELLM_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A/A spread" in done.stdout and "written to" in done.stdout
    (table,) = tmp_path.iterdir()
    assert "all_reduce:0-" in table.read_text()
    shown = run_warm("-m", "torch_sagellm", "table", SAGELLM_CACHE_DIR=str(tmp_path))
    assert str(table) in shown.stdout and "measured" in shown.stdout
