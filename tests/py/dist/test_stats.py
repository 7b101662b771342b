"""Statistics: whether counts match the calls on every rank, which ranks the others waited for, and the formats of other
programs."""

from __future__ import annotations

import json
import pickle
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, launch, run_fresh, run_ranks, run_script

pytestmark = beyond_gloo("keeps no statistics")
ROOT = Path(__file__).resolve().parents[3]


def issued(n: int, rank: int) -> tuple[dict[str, int], int]:
    """Makes one call of every kind, with messages around the ring. Returns the counts by kind and this rank's payload
    in bytes."""
    import torch_sagellm

    torch_sagellm.reset_stats()
    counts: dict[str, int] = {}
    total = 0

    def call(kind: str, size: int, body: Any) -> None:
        nonlocal total
        work = body()
        if work is not None:
            work.wait()
        counts[kind] = counts.get(kind, 0) + 1
        total += size
        stats = torch_sagellm.get_stats()
        assert stats[f"{kind}_count"] == counts[kind], (kind, stats["ops"][kind])
        assert stats["total_bytes"] == total, (kind, stats["total_bytes"], total)

    one, many = torch.ones(5), torch.ones(5 * n)
    for big in (torch.ones(5), torch.ones(100_000)):
        size = big.numel() * 4
        call("all_reduce", size, lambda big=big: dist.all_reduce(big))
        call("all_reduce", size, lambda big=big: dist.all_reduce(big, async_op=True))
        call("broadcast", size, lambda big=big: dist.broadcast(big, 0))
    call("reduce", 20, lambda: dist.reduce(one, n - 1))
    call("all_gather", 20 * n, lambda: dist.all_gather_into_tensor(many, one))
    call("all_gather", 20 * n, lambda: dist.all_gather([torch.empty(5) for _ in range(n)], one, async_op=True))
    call("reduce_scatter", 20 * n, lambda: dist.reduce_scatter_tensor(one, many))
    call("all_to_all", 20 * n, lambda: dist.all_to_all_single(torch.empty(5 * n), many))
    call("barrier", 0, lambda: dist.barrier())
    lists = [torch.empty(5) for _ in range(n)]
    call("gather", 20 * n if rank == 0 else 20, lambda: dist.gather(one, lists if rank == 0 else None, 0))
    call("scatter", 20 * n if rank == 0 else 20, lambda: dist.scatter(one, lists if rank == 0 else None, 0))
    if n > 1:
        call("send", 20, lambda: dist.isend(one, (rank + 1) % n))
        call("recv", 20, lambda: dist.irecv(torch.empty(5), (rank - 1) % n))
    # A list is one call with several tensors, even if their dtypes make several operations of it.
    mixed = [torch.ones(3), torch.ones(4), torch.ones(2, dtype=torch.int64)]
    before = torch_sagellm.get_stats()
    call("all_reduce", 12 + 16 + 16, lambda: dist.group.WORLD.allreduce_coalesced(mixed))
    after = torch_sagellm.get_stats()
    assert after["ops"]["all_reduce"]["tensors"] - before["ops"]["all_reduce"]["tensors"] == 3
    assert after["fused_batches"] > before["fused_batches"] and after["fused_ops"] >= before["fused_ops"] + 2
    return counts, total


def counts_what_was_issued(ctx: Context) -> None:
    import torch_sagellm
    from torch_sagellm._private import load

    kinds = load.extension().KINDS
    counts, total = issued(ctx.world_size, ctx.rank)
    stats = torch_sagellm.get_stats()
    assert {kind: stats[f"{kind}_count"] for kind in kinds} == {kind: counts.get(kind, 0) for kind in kinds}
    assert (stats["total_count"], stats["total_bytes"], stats["failed_count"]) == (sum(counts.values()), total, 0)
    assert (stats["rank"], stats["size"]) == (ctx.rank, ctx.world_size)
    assert sum(row["count"] for row in stats["sizes"]) == sum(counts.values())
    paths = {row["path"] for row in stats["sizes"]}
    assert paths == ({"local"} if ctx.world_size == 1 else {"slots", "rounds", "message"}), paths
    for kind, count in counts.items():
        op = stats["ops"][kind]
        latency = op["latency"]
        assert op["count"] == count and op["failed"] == 0
        assert 0 < latency["p50_ms"] <= latency["p90_ms"] <= latency["p99_ms"] <= latency["max_ms"]
        assert 0 < latency["avg_ms"] <= latency["max_ms"] and stats["avg_latency_ms"] > 0
    for row in stats["sizes"]:
        assert row["bytes"] <= row["up_to"] * max(row["tensors"], 1), row
        # The small blocks of an all_to_all travel with its table.
        if row["path"] == "rounds" and row["op"] != "all_to_all":
            assert row["copying_ms"] > 0, row
            assert (row["reducing_ms"] > 0) == (row["op"] == "all_reduce"), row
    reduced = stats["ops"]["all_reduce"]
    factor = 2 * (ctx.world_size - 1) / ctx.world_size
    assert reduced["algbw_gbs"] > 0
    assert reduced["busbw_gbs"] == pytest.approx(reduced["algbw_gbs"] * factor)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    totals = backend._totals()
    sums = {one["kind"]: (one["count"], one["bytes"]) for one in totals["kinds"]}
    assert sums == {kind: (count, stats["ops"][kind]["bytes"]) for kind, count in counts.items()}
    for one in totals["kinds"]:
        cells = [cell for cell in backend._stats()["cells"] if cell["kind"] == one["kind"]]
        assert one["waiting"] == sum(cell["waiting"] for cell in cells)
    torch_sagellm.reset_stats()
    assert backend._totals()["since"] > totals["since"] and backend._totals()["kinds"] == []
    stats = torch_sagellm.get_stats()
    assert stats["total_count"] == 0 and stats["total_bytes"] == 0 and stats["avg_latency_ms"] == 0
    assert stats["fused_batches"] == 0 and stats["fused_ops"] == 0 and stats["sizes"] == []
    assert all(wait["count"] == 0 for wait in stats["waits"].values())
    dist.barrier()


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_counts_and_bytes_are_those_of_the_calls(world_size: int) -> None:
    """The counts are right after each call, whatever its kind, size and form. After a reset they are zero."""
    run_ranks(counts_what_was_issued, world_size)


def late_three_times(ctx: Context, late: int, size: int) -> tuple[dict[str, Any], list[float], float]:
    """Makes three calls; before each, rank `late` sleeps 150 ms. Returns the statistics; for each rank, how many
    milliseconds it called before rank `late`; and the milliseconds from the first rank's start to the last rank's
    end."""
    import torch_sagellm

    tensor = torch.ones(size)
    dist.barrier()
    torch_sagellm.reset_stats()
    dist.barrier()
    times = [time.monotonic()]
    for _ in range(3):
        if ctx.rank == late:
            time.sleep(0.15)
        times.append(time.monotonic())
        dist.all_reduce(tensor)
    times.append(time.monotonic())
    gathered = torch_sagellm.gather_stats()
    every: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(every, times)
    early = [1000 * sum(max(0.0, a - b) for a, b in zip(every[late][1:4], own[1:4], strict=True)) for own in every]
    return gathered, early, 1000 * (max(own[-1] for own in every) - min(own[0] for own in every))


def late_rank(ctx: Context, late: int) -> dict[str, Any]:
    import torch_sagellm

    others = [rank for rank in range(ctx.world_size) if rank != late]
    for size in (4, 300_000):  # 4 bytes use slots, 300,000 elements use rounds
        for _ in range(20):
            gathered, early, took = late_three_times(ctx, late, size)
            # On a busy machine another rank may be late as well, or be waited for in the middle of a call. Such calls
            # are repeated, because they do not show who was waited for longest.
            if min(early[rank] for rank in others) > 350 and took < 700:
                break
        assert gathered["straggler"] == late, (size, gathered["summary"])
        assert f"rank {late} was waited for longest" in gathered["summary"]
        # Each other rank waited three times for about 150 ms. The bound is 50 ms lower, because sleeps and polls are
        # coarse.
        least = [each - 150 for each in early]
        assert gathered["waited_for_ms"][late] > sum(least[rank] for rank in others), (size, gathered["waited_for_ms"])
        for stats in gathered["ranks"]:
            if stats["rank"] != late:
                waiting = stats["ops"]["all_reduce"]["waiting_ms"]
                assert waiting > least[stats["rank"]], (size, early, stats["ops"]["all_reduce"])
                assert max(stats["waits"], key=lambda peer: stats["waits"][peer]["total_ms"]) == late
        assert [stats["rank"] for stats in gathered["ranks"]] == list(range(ctx.world_size))
    return torch_sagellm.get_stats()


@pytest.mark.quick
@pytest.mark.parametrize(("world_size", "late"), [(2, 0), (2, 1), (3, 1), (3, 2)])
def test_the_straggler_is_named(world_size: int, late: int) -> None:
    """If a rank sleeps before its calls, its peers report that time as waiting, for small and large tensors."""
    run_ranks(late_rank, world_size, late)


def groups_apart(ctx: Context) -> None:
    import torch_sagellm

    other = dist.new_group(list(range(ctx.world_size)))
    torch_sagellm.reset_stats("all")
    dist.all_reduce(torch.ones(2), group=other)
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))
    every = torch_sagellm.get_stats("all")
    assert (
        torch_sagellm.get_stats(other)["all_reduce_count"] == 1 and torch_sagellm.get_stats(other)["total_bytes"] == 8
    )
    assert torch_sagellm.get_stats()["all_reduce_count"] == 2 and torch_sagellm.get_stats()["total_bytes"] == 24
    assert sorted(each["all_reduce_count"] for each in every.values()) == [1, 2]
    assert set(every) == {other.group_name, dist.group.WORLD.group_name}
    torch_sagellm.reset_stats(other)
    assert (
        torch_sagellm.get_stats()["all_reduce_count"] == 2 and torch_sagellm.get_stats(other)["all_reduce_count"] == 0
    )
    foreign = dist.new_group(list(range(ctx.world_size)), backend="gloo")
    assert "another backend" in expect_raises(ValueError, lambda: torch_sagellm.get_stats(foreign))
    assert foreign.group_name not in torch_sagellm.get_stats("all")
    dist.destroy_process_group(other)
    dist.destroy_process_group(foreign)


@pytest.mark.quick
def test_every_group_counts_for_itself() -> None:
    """Each group has its own counts, and "all" returns them by group. Groups of another backend do not count."""
    run_ranks(groups_apart, 2)


def no_group(ctx: Context) -> None:
    import torch_sagellm

    text = expect_raises(ValueError, lambda: torch_sagellm.get_stats())
    assert "init_process_group" in text


def test_without_a_group_the_error_says_what_to_do() -> None:
    """No group has been created yet."""
    run_fresh(no_group, 1)


def delegated(ctx: Context) -> None:
    import torch_sagellm

    ctx.init(pg_options=torch_sagellm.Options(engine="delegate"))
    one, many = torch.ones(5), torch.ones(5 * ctx.world_size)
    for count in (1, 2):
        dist.all_reduce(one)
        assert (
            torch_sagellm.get_stats()["all_reduce_count"] == count
            and torch_sagellm.get_stats()["total_bytes"] == 20 * count
        )
    work = dist.all_reduce(one, async_op=True)
    assert work is not None
    work.wait()
    dist.all_gather_into_tensor(many, one)
    dist.broadcast(one, 1)
    dist.barrier()
    peer = 1 - ctx.rank
    sending = dist.isend(one, peer)
    dist.recv(torch.empty(5), peer)
    assert sending is not None
    sending.wait()
    stats = torch_sagellm.get_stats()
    expected = {"all_reduce": 3, "all_gather": 1, "broadcast": 1, "barrier": 1, "send": 1, "recv": 1}
    assert {kind: op["count"] for kind, op in stats["ops"].items() if op["count"]} == expected
    assert stats["total_bytes"] == 3 * 20 + 20 * ctx.world_size + 20 + 20 + 20
    assert {row["path"] for row in stats["sizes"]} == {"delegate"}
    assert stats["ops"]["all_reduce"]["latency"]["avg_ms"] > 0
    assert stats["ops"]["send"]["latency"]["avg_ms"] == 0, "gloo does not tell when a message has ended"
    expect_raises(RuntimeError, lambda: dist.all_reduce(one, op=dist.ReduceOp.BAND))
    assert torch_sagellm.get_stats()["failed_count"] == 1
    dist.destroy_process_group()


@pytest.mark.quick
def test_a_delegates_operations_are_counted_too() -> None:
    """Counts, bytes and, if the delegate reports it, time, under the path "delegate"."""
    run_fresh(delegated, 2)


def sparse(ctx: Context) -> None:
    import torch_sagellm

    torch_sagellm.reset_stats()
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (4,))
    dist.all_reduce(tensor)
    stats = torch_sagellm.get_stats()
    assert {kind: op["count"] for kind, op in stats["ops"].items() if op["count"]} == {"all_reduce": 1}
    assert stats["total_bytes"] == 2 * 8 + 2 * 4 and stats["sizes"][0]["path"] == "composed"


def test_a_sparse_all_reduce_is_one_call() -> None:
    """The messages and the exchange of sizes inside the call do not count."""
    run_ranks(sparse, 2)


def failing(ctx: Context) -> None:
    import torch_sagellm

    ctx.init()
    dist.all_reduce(torch.ones(2))
    expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(2 + ctx.rank)))
    stats = torch_sagellm.get_stats()
    assert stats["all_reduce_count"] == 1 and stats["total_bytes"] == 8
    assert stats["failed_count"] == 1 and stats["ops"]["all_reduce"]["failed"] == 1


@pytest.mark.quick
def test_what_fails_is_counted_apart() -> None:
    """A mismatch counts only in failed_count."""
    run_fresh(failing, 2)


SAMPLE = re.compile(
    r'^([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} ([-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|Inf|NaN))$'
)


def parse(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Parses a text in Prometheus' format 0.0.4 into samples by name. Fails on a line that is not in this format."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    types: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types and kind in ("counter", "gauge", "histogram"), line
            types[name] = kind
            continue
        match = SAMPLE.match(line)
        assert match, line
        base = re.sub(r"_(bucket|sum|count)$", "", match[1])
        assert types.get(match[1]) == "counter" or types.get(base) == "histogram", line
        samples.setdefault(match[1], []).append((dict(re.findall(r'([a-z]+)="([^"]*)"', match[2])), float(match[3])))
    return samples


def exports(ctx: Context, folder: str) -> None:
    import torch_sagellm

    torch_sagellm.reset_stats("all")
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    dist.all_reduce(torch.ones(100_000))
    dist.barrier()
    path = Path(folder) / f"metrics{ctx.rank}.prom"
    torch_sagellm.write_prometheus(path)
    assert [each.name for each in Path(folder).glob(f".metrics{ctx.rank}*")] == [], "a temporary file is left"
    for text in (torch_sagellm.prometheus_text(), path.read_text(), served(), torch_sagellm.prometheus_text(None)):
        check_metrics(parse(text), ctx.rank)
    check_trace(ctx, Path(folder) / f"trace{ctx.rank}.json")


def served() -> str:
    import torch_sagellm

    with torch_sagellm.serve_prometheus() as endpoint, pytest.raises(OSError, match=f"127.0.0.1 port {endpoint.port}"):
        torch_sagellm.serve_prometheus(endpoint.port)
    with pytest.raises(ValueError, match="port is 70000, expected 0"):
        torch_sagellm.serve_prometheus(70000)
    with pytest.raises(FileNotFoundError, match="/nope/x cannot be written"):
        torch_sagellm.write_prometheus("/nope/x")
    with torch_sagellm.serve_prometheus() as endpoint:
        assert endpoint.url == f"http://127.0.0.1:{endpoint.port}/metrics" and endpoint.port > 0
        with urllib.request.urlopen(endpoint.url, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text: str = answer.read().decode()
        expect_raises(urllib.error.HTTPError, lambda: urllib.request.urlopen(endpoint.url[:-7] + "other", timeout=10))
    expect_raises(urllib.error.URLError, lambda: urllib.request.urlopen(endpoint.url, timeout=10))
    return text


def check_metrics(samples: dict[str, list[tuple[dict[str, str], float]]], rank: int) -> None:
    counts = {(labels["op"], labels["path"]): value for labels, value in samples["sagellm_operations_total"]}
    assert counts[("all_reduce", "slots")] == 3 and counts[("all_reduce", "rounds")] == 1
    sizes = {(labels["op"], labels["path"]): value for labels, value in samples["sagellm_bytes_total"]}
    assert sizes[("all_reduce", "slots")] == 120 and sizes[("all_reduce", "rounds")] == 400_000
    assert all(labels["rank"] == str(rank) for every in samples.values() for labels, _ in every)
    slots = [each for each in samples["sagellm_operation_seconds_bucket"] if each[0]["path"] == "slots"]
    slots = [each for each in slots if each[0]["op"] == "all_reduce"]
    values = [value for _, value in slots]
    assert slots[-1][0]["le"] == "+Inf" and values == sorted(values) and values[-1] == 3
    bounds = [float(labels["le"]) for labels, _ in slots]
    assert bounds == sorted(bounds)


def check_trace(ctx: Context, path: Path) -> None:
    import torch_sagellm

    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(4)]
    for work in works:
        assert work is not None
        work.wait()
    torch_sagellm.write_trace(path)
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    last = [event for event in events if event["name"] == "sagellm:all_reduce"][-4:]
    assert [event["args"]["number"] for event in last] == list(
        range(last[0]["args"]["number"], last[0]["args"]["number"] + 4)
    )
    for event in events:
        assert event["pid"] == ctx.rank and event["dur"] >= 0 and abs(event["ts"] / 1e6 - time.time()) < 3600, event
    assert {event["args"]["state"] for event in last} == {"done"} and last[0]["args"]["read"] == 16
    # On one row operations must not overlap, because a viewer would show one nested in the other.
    by_row: dict[int, float] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        assert event["ts"] >= by_row.get(event["tid"], 0) - 0.01, event
        by_row[event["tid"]] = event["ts"] + event["dur"]
    named = {event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert set(by_row) <= named


@pytest.mark.quick
def test_prometheus_and_trace_files(tmp_path: Path) -> None:
    """Both formats parse and match the calls. While the endpoint is open, it answers on the loopback address."""
    run_ranks(exports, 2, str(tmp_path))


class Scalars:
    """Records the values that a SummaryWriter would draw."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[float, int]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Same interface as TensorBoard's."""
        self.values[name] = (float(value), step)


def scalars(ctx: Context, folder: str) -> bool:
    import torch_sagellm

    torch_sagellm.reset_stats()
    dist.all_reduce(torch.ones(10))
    writer = Scalars()
    torch_sagellm.log_to_tensorboard(writer, 7, dist.group.WORLD)
    top = f"sagellm/{dist.group.WORLD.group_name}"
    assert writer.values[f"{top}/all_reduce/count"] == (1.0, 7)
    assert writer.values[f"{top}/total_bytes"] == (40.0, 7)
    assert not any("broadcast" in name for name in writer.values)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return False
    with SummaryWriter(folder) as real:
        torch_sagellm.log_to_tensorboard(real, 7)
    return any(Path(folder).iterdir())


def test_tensorboard_scalars(tmp_path: Path) -> None:
    """With a writer that has only the method that is used, and with TensorBoard's writer if it is installed."""
    run_ranks(scalars, 2, str(tmp_path))


def recorded(ctx: Context, folder: str, mismatch: bool) -> None:
    import torch_sagellm

    ctx.init()
    dist.all_reduce(torch.ones(8))
    dist.broadcast(torch.ones(3), 1)
    dist.all_gather_into_tensor(torch.empty(4 * ctx.world_size), torch.ones(4))
    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * ctx.world_size))
    dist.all_to_all_single(torch.empty(2 * ctx.world_size), torch.ones(2 * ctx.world_size))
    lists = [torch.empty(4) for _ in range(ctx.world_size)]
    dist.gather(torch.ones(4), lists if ctx.rank == 0 else None, 0)
    dist.scatter(torch.empty(4), lists if ctx.rank == 0 else None, 0)
    dist.barrier()
    if mismatch:
        expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(8 if ctx.rank == 0 else 9)))
    path = torch_sagellm.dump_flight_record(folder)
    assert Path(path).name == f"sagellm_{ctx.rank}"
    if ctx.rank == 0 and not mismatch:
        dist.send(torch.ones(2), 1)
    elif not mismatch:
        dist.recv(torch.ones(2), 0)


def analyse(folder: Path) -> tuple[list[Any], str]:
    """Runs torch's analyser on a folder of dumps. Returns the collectives that it found, and its output."""
    found = folder.parent / f"{folder.name}.found"
    command = ["-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-o", str(found)]
    done = run_script(command, warm=True)
    assert done.returncode == 0, done.stdout
    _, db = pickle.loads(found.read_bytes())
    return db.collectives, done.stdout


@pytest.mark.parametrize("mismatch", [False, True])
def test_rule_29_torchs_analyser_reads_our_ring(tmp_path: Path, mismatch: bool) -> None:
    """Every collective matches between the ranks. A call of another size is reported with its number and rank."""
    run_fresh(recorded, 2, str(tmp_path), mismatch)
    collectives, said = analyse(tmp_path)
    kinds = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier"]
    good = [each for each in collectives if each.type_of_mismatch is None and each.mismatch_collectives is None]
    assert [each.collective_name for each in good[:8]] == [f"sagellm:{kind}" for kind in kinds]
    assert all(each.pass_check for each in good[:8])
    assert [each.collective_seq_id for each in good[:8]] == list(range(1, 9))
    if not mismatch:
        assert len(collectives) == 8
        return
    wrong = collectives[8]
    assert not wrong.pass_check and wrong.collective_seq_id == 9
    assert "Collective sequence number: 9 has errors" in said
    assert "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH" in said and "'[[8]]'" in said and "'[[9]]'" in said


def fails_alone(ctx: Context) -> None:
    from datetime import timedelta

    ctx.init()
    dist.all_reduce(torch.ones(8))
    ctx.set_timeout(timedelta(seconds=1))
    if ctx.rank == 0:
        expect_raises(RuntimeError, lambda: dist.all_reduce(torch.ones(8)))
        ctx.tell(dist.group.WORLD._get_backend(torch.device("cpu"))._records())
    else:
        ctx.listen()


def test_a_failed_group_leaves_its_record_where_asked(tmp_path: Path) -> None:
    """SAGELLM_DUMP_DIR names the folder. The file has the reason and can be converted for torch's analyser."""
    import torch_sagellm

    with launch(fails_alone, 2, env={"SAGELLM_DUMP_DIR": str(tmp_path)}) as job:
        told = job.hear(0)
        job.say(1, "go")
        job.wait()
    [left] = [path for path in tmp_path.glob("*.json") if path.name.endswith("-0.json")]
    dump = json.loads(left.read_text())
    assert "Timed out" in dump["fault"] and dump["rank"] == 0 and dump["members"] == [0, 1]
    assert [record["state"] for record in dump["records"]] == ["done", "failed"]
    assert dump["records"] == told, "the file has what the group tells"
    assert dump["records"][1]["late"] == 1, "the rank that is missing"
    into = tmp_path / "analyser"
    into.mkdir()
    paths = torch_sagellm.convert_dumps(tmp_path, into)
    assert Path(paths[0]).name == "sagellm_0"
    assert "SAGELLM_DUMP_DIR" in expect_raises(ValueError, lambda: torch_sagellm.convert_dumps(into, into))


def small_ring(ctx: Context) -> list[int]:
    import torch_sagellm

    ctx.init()
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(20)]
    for work in works:
        assert work is not None
        work.wait()
    assert torch_sagellm.get_stats()["all_reduce_count"] == 40 and torch_sagellm.get_stats()["total_bytes"] == 160
    records = dist.group.WORLD._get_backend(torch.device("cpu"))._records()
    return [record["number"] for record in records]


@pytest.mark.parametrize("room", [0, 8])
def test_the_ring_keeps_as_many_as_asked(room: int) -> None:
    """SAGELLM_RING sets the number of records that are kept. The counts in the statistics do not depend on it."""
    for numbers in run_fresh(small_ring, 2, env={"SAGELLM_RING": str(room)}):
        assert numbers == list(range(41 - room, 41))


def sited(ctx: Context, folder: str) -> list[Any]:
    import torch_sagellm
    from torch_sagellm.observe import sites

    ctx.init()
    dist.all_reduce(torch.ones(1))
    records = dist.group.WORLD._get_backend(torch.device("cpu"))._records()
    site = sites.site_of(records[-1]["site"])
    torch_sagellm.dump_flight_record(folder)
    return [records[-1]["site"], *site]


def test_call_sites_are_looked_up_only_when_asked_for(tmp_path: Path) -> None:
    """With SAGELLM_CALL_SITES=1 the record names this file and the calling function. Without it no call site is looked
    up."""
    for number, file, line, function in run_fresh(sited, 2, str(tmp_path), env={"SAGELLM_CALL_SITES": "1"}):
        assert number > 0 and file == __file__ and function == "sited"
        assert "dist.all_reduce" in Path(file).read_text().splitlines()[line - 1]
    entries = pickle.loads((tmp_path / "sagellm_0").read_bytes())["entries"]
    assert entries[-1]["frames"][0]["filename"] == __file__
    assert run_fresh(sited, 1, str(tmp_path)) == [[0, "", 0, ""]]


SITED_PROGRAM = """
import torch, torch.distributed as dist
from torch_sagellm.observe import sites
dist.init_process_group("sagellm", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
records = dist.group.WORLD._get_backend(torch.device("cpu"))._records()
print(sites.site_of(records[-1]["site"])[0])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("folder", ["torch_sagellm", "torch"])
def test_a_program_may_lie_below_a_folder_with_the_name_of_a_package(folder: str, tmp_path: Path) -> None:
    """The program's files count as files of neither package, so its calls keep their call sites."""
    program = tmp_path / folder / "examples" / "program.py"
    program.parent.mkdir(parents=True)
    program.write_text(SITED_PROGRAM)
    done = run_script([str(program)], env={"SAGELLM_CALL_SITES": "1"}, warm=True)
    assert done.returncode == 0 and done.stdout.split() == [str(program)], done.stdout


def titles(ctx: Context, folder: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        dist.all_reduce(torch.ones(3, 5))
        dist.all_gather_into_tensor(torch.empty(7 * ctx.world_size), torch.ones(7))
    path = Path(folder) / f"profile{ctx.rank}.json"
    run.export_chrome_trace(str(path))
    events = {event["name"]: event for event in json.loads(path.read_text())["traceEvents"] if "args" in event}
    assert events["sagellm:all_reduce"]["args"]["Input Dims"] == [[3, 5]]
    assert events["sagellm:all_reduce"]["args"]["Input type"] == ["float"]
    assert events["sagellm:_all_gather_base"]["args"]["Input Dims"] == [[7]]


def test_a_profilers_trace_has_titles_and_shapes(tmp_path: Path) -> None:
    """Titles like those of gloo and nccl, "sagellm:all_reduce", with the shape and dtype of the input."""
    run_ranks(titles, 2, str(tmp_path))


def test_the_page_names_files_that_exist() -> None:
    """The page also names all files of src/stats."""
    text = (ROOT / "docs" / "internals" / "statistics.md").read_text()
    named = set(re.findall(r"`((?:src|cpp|torch_ext|tests|benchmarks)/[\w./]+\.\w+)`", text))
    assert all((ROOT / name).is_file() for name in named), [name for name in named if not (ROOT / name).is_file()]
    assert {f"src/stats/{path.name}" for path in (ROOT / "src" / "stats").glob("*.rs")} - {
        "src/stats/tests.rs"
    } <= named


def steps_wait(ctx: Context) -> None:
    import torch_sagellm

    step, store = torch_sagellm.step(), ctx.store()
    one = torch.ones(4)
    dist.barrier()
    for turn in range(20):
        step.reset()
        between = torch.zeros(1)
        for index in range(3):
            with step:
                if ctx.rank == 0:
                    begin = time.monotonic()
                    store.set(f"waits {turn} {index}", "")
                    between += time.monotonic() - begin
                else:
                    store.wait([f"waits {turn} {index}"])
                    time.sleep(0.15)
                dist.all_reduce(one)
                with step:  # part of the same step
                    dist.all_reduce(one)
        # If rank 0 does not run for a while between its message to rank 1 and its call, its wait is shorter, so the
        # steps are repeated.
        dist.broadcast(between, 0)
        if between.item() < 0.05:
            break
    with pytest.raises(KeyError), step:
        raise KeyError
    dist.all_reduce(one)
    own = torch_sagellm.get_stats()["step"]
    # Rank 1 sleeps 450 ms, and rank 0's steps begin before that.
    assert own["count"] == 3 and own["total_ms"] > 449, own
    assert own["exposed_ms"] > 250 if ctx.rank == 0 else own["exposed_ms"] < own["total_ms"] - 450, own
    report = step.report()
    assert report.steps == 3 and report.ranks == 2 and report.shares[0] > report.shares[1]
    # These are means over three steps and two ranks. They have no upper limits, because a busy machine may take any
    # time for the data.
    assert report.exposed > 0.04 and report.waiting > 0.02, report
    assert f"{report.share:.1%}" in str(report) and "3 steps on 2 ranks" in str(report)

    step.reset()
    dist.barrier()
    with step:
        if ctx.rank == 1:
            store.wait(["computed"])
            time.sleep(0.3)
            dist.all_reduce(one)
        else:
            work = dist.all_reduce(one, async_op=True)
            assert work is not None
            future, worked = work.get_future(), time.thread_time()
            while time.thread_time() - worked < 0.1:  # computes, which is no waiting
                pass
            begin = time.monotonic()
            store.set("computed", "")
            idle = 1000 * (time.monotonic() - begin)  # rank 1 may sleep already, but this rank does not wait yet
            future.wait()
    own = torch_sagellm.get_stats()["step"]
    if ctx.rank == 0:
        assert own["exposed_ms"] < own["total_ms"] - 99
        assert own["exposed_ms"] > 250 - idle, (own, idle)
    step.reset()
    assert torch_sagellm.get_stats()["step"] == {"count": 0, "total_ms": 0.0, "exposed_ms": 0.0, "share": 0.0}


@pytest.mark.quick
def test_a_step_counts_what_its_thread_waits_for() -> None:
    """Time counts while the thread is in a call or waits for a future, but not while it computes; failed steps do not
    count."""
    run_ranks(steps_wait, 2)


@pytest.mark.quick
def test_steps_of_all_ranks_are_combined() -> None:
    """In each step, the smallest wait of any rank counts as the time in which data moved. Ranks may have counted and
    kept different numbers of steps."""
    from torch_sagellm.observe.steps import combined

    def sums(took: int, *last: int) -> Any:
        count = len(last)
        return {"count": count, "took": took, "in_calls": sum(last), "in_futures": 0, "last": list(last)}

    report = combined([sums(2000, 100, 300), sums(2000, 500, 100)])
    assert (report.steps, report.ranks, report.shares) == (2, 2, (0.2, 0.3))
    assert report.seconds == pytest.approx(1e-6) and report.exposed == pytest.approx(250e-9)
    assert report.moving == pytest.approx(100e-9) and report.waiting == pytest.approx(150e-9)
    uneven = combined([sums(3000, 900, 100, 300), sums(2000, 500, 100)])
    assert uneven.steps == 2 and uneven.moving == pytest.approx(uneven.exposed * 400 / 1000)
    nothing = combined([sums(0), sums(0)])
    assert nothing.share == 0 and "no step was counted" in str(nothing)
