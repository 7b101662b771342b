"""The arithmetic, the checks and the reports of the benchmark programs. No test here measures speed."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import warm_python

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "benchmarks")]

import busy  # noqa: E402
import collectives  # noqa: E402
import features  # noqa: E402
import gpu  # noqa: E402
import hosts  # noqa: E402
import overlap  # noqa: E402
import update_docs  # noqa: E402
import wide  # noqa: E402
from measure import clock as clocks  # noqa: E402
from measure import report  # noqa: E402
from measure.cases import DTYPES, FIXED_SIZE, OPS, Case, pattern, total  # noqa: E402
from measure.machine import describe, slug  # noqa: E402
from measure.stats import (  # noqa: E402
    BUS_FACTORS,
    algbw,
    busbw,
    by_pairs,
    format_bandwidth,
    format_ratio,
    format_time,
    percentile,
    slowest_rank,
    summarize,
)

from torch_sagellm.demos import train_gpt  # noqa: E402

# ------------------------------------------------------------------------------------------------ statistics


def test_percentile_is_linear_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.25) == 1.25
    assert percentile([7.0], 0.99) == 7.0
    assert percentile(list(range(101)), 0.1) == pytest.approx(10)
    assert (percentile([5, 1, 9], 0), percentile([5, 1, 9], 1)) == (1, 9)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_percentile_refuses_what_has_no_answer(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"percentile of no values|between 0 and 1"):
        percentile(values, share)


def test_ranks_that_wait_in_turn_wait_half_of_the_time() -> None:
    one, other = [2.0, 0.0, 2.0, 0.0, 7.0], [0.0, 2.0, 0.0, 2.0, 7.0]
    assert slowest_rank([by_pairs(one), by_pairs(other)]) == [1.0, 1.0]


def test_an_operation_lasts_as_long_as_its_slowest_rank() -> None:
    assert slowest_rank([[1.0, 9.0], [2.0, 3.0]]) == [2.0, 9.0]
    with pytest.raises(ValueError, match="different numbers"):
        slowest_rank([[1.0], [1.0, 2.0]])


def test_summary_takes_all_rounds_together_and_keeps_their_drift() -> None:
    summary = summarize([[1.0] * 10, [3.0] * 10])
    assert (summary.samples, summary.median, summary.least) == (20, 2.0, 1.0)
    assert (summary.p10, summary.p99) == (1.0, 3.0)
    assert summary.round_p10 == (1.0, 3.0)


def test_bandwidth_follows_nccl_tests() -> None:
    assert algbw(1_000_000, 1000.0) == pytest.approx(1.0)  # 1 MB in 1 ms is 1 GB/s
    assert busbw("all_reduce", 1_000_000, 1000.0, 2) == pytest.approx(1.0)
    assert busbw("all_reduce", 1_000_000, 1000.0, 4) == pytest.approx(1.5)
    assert busbw("all_gather_into_tensor", 1_000_000, 1000.0, 4) == pytest.approx(0.75)
    assert busbw("broadcast", 1_000_000, 1000.0, 8) == pytest.approx(1.0)
    assert busbw("barrier", 0, 3.0, 2) is None


def test_every_operation_that_moves_data_has_a_bandwidth() -> None:
    assert set(OPS) - set(BUS_FACTORS) == {"barrier"}


# ----------------------------------------------------------------------------------------------------- text


def test_numbers_are_written_with_three_digits() -> None:
    times = [3.456, 12.34, 999.4, 999.9, 12_345.0, 2.5e6]
    assert [format_time(t) for t in times] == ["3.46 us", "12.3 us", "999 us", "1.00 ms", "12.3 ms", "2.50 s"]
    assert [format_bandwidth(b) for b in (0.01234, 1.234, 12.34)] == ["0.012", "1.23", "12.3"]


def test_a_lost_case_is_marked() -> None:
    assert format_ratio(31.26) == "31.3x"
    assert format_ratio(0.5) == "0.50x (lost)"


# -------------------------------------------------------------------------------------------------- reports


def result(op: str, size: int, ours: float, gloo: float) -> report.Result:
    times = {
        "sagellm": summarize([[ours] * 3]).as_dict(),
        "gloo": summarize([[gloo] * 3]).as_dict(),
        "gloo #2": summarize([[gloo / 2] * 3]).as_dict(),
    }
    return {"op": op, "size": size, "times": times}


@pytest.fixture
def run() -> report.Result:
    results = [
        result("all_reduce", 8, 4.0, 160.0),
        result("all_reduce", 1024, 400.0, 200.0),
        result("barrier", 0, 4, 100),
    ]
    return {
        "date": "2026-01-02",
        "machine": describe(),
        "ranks": 2,
        "dtype": "float32",
        "labels": ["sagellm", "gloo", "gloo #2"],
        "rounds": 4,
        "buffers": 4,
        "others": 0.25,
        "command": "benchmarks/collectives.py",
        "results": results,
    }


def test_the_table_shows_won_and_lost_rows(run: report.Result) -> None:
    lines = report.markdown(run).splitlines()
    assert "other processes kept 25 % of the cores busy" in lines[2]
    won = next(line for line in lines if line.startswith("| 8 B"))
    lost = next(line for line in lines if line.startswith("| 1 KiB"))
    assert "40.0x, 40.0x" in won
    assert won.endswith("| 2.00 |")  # the control is a plain number, marked neither as won nor as lost
    assert "0.50x (lost)" in lost
    heads = [line for line in lines if line.startswith("| size")]
    assert ["busbw" in head for head in heads] == [True, False]  # a barrier moves no data
    assert all(line.count("|") == heads[0].count("|") for line in (won, lost))


def test_a_run_on_a_device_compares_with_its_own_reference(run: report.Result) -> None:
    names = {"sagellm": "sagellm", "gloo": "nccl", "gloo #2": "nccl #2"}
    for row in run["results"]:
        row["times"] = {names[label]: timed for label, timed in row["times"].items()}
    run |= {"labels": list(names.values()), "reference": "nccl", "clock": "issue", "device": "1 x Some Card"}
    lines = report.markdown(run).splitlines()
    assert any("On 1 x Some Card" in line and "from the call to its return" in line for line in lines)
    head = next(line for line in lines if line.startswith("| size"))
    assert "nccl p10 / sagellm" in head and "A/A" in head and "busbw" not in head
    assert "40.0x, 40.0x" in next(line for line in lines if line.startswith("| 8 B"))
    assert gpu.verdict(run["results"]).startswith("At most the host time of nccl: 2 of 3 cases")


def test_without_a_device_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 1
    printed = capsys.readouterr().err
    assert printed.startswith("no CUDA device") and printed.count("\n") == 1
    with pytest.raises(SystemExit, match="no npu device for rank 0"):
        collectives.use_device(argparse.Namespace(device="npu"))


def test_a_failed_backend_is_shown_and_does_not_hide_the_others(run: report.Result) -> None:
    run["results"][0]["times"]["sagellm"] = {"error": "RuntimeError: rank 1 | gone\nmore"}
    line = next(line for line in report.markdown(run).splitlines() if line.startswith("| 8 B"))
    assert "rank 1 / gone" in line
    assert "160 us" in line
    assert "sagellm" not in report.speedups(run["results"][0])


def test_files_are_written(run: report.Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    told = report.write(run, tmp_path / "runs", "x")
    assert [line.rpartition("/")[2] for line in told] == ["x.json", "x.png"]
    assert json.loads((tmp_path / "runs/x.json").read_text())["results"][0]["op"] == "all_reduce"
    assert (tmp_path / "runs/x.png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_named_without_its_host() -> None:
    assert slug({"cpu": "Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz", "cores": 8}) == "intel-xeon-platinum-8480-8c"
    assert os.uname().nodename not in json.dumps({k: v for k, v in describe().items() if k != "kernel"})


def test_the_command_in_a_report_can_be_repeated_anywhere() -> None:
    words = ["--ops", "barrier", "--out", "/somewhere", "--quick", "--name=x"]
    assert collectives.command_line(words) == "benchmarks/collectives.py --ops barrier --quick"


def test_the_table_of_goals_hides_no_goal_and_no_miss(run: report.Result) -> None:
    head, *rows = update_docs.goals([run])
    assert head[:2] == ["what", "goal"] and len(head) == 3
    assert len(rows) == len(update_docs.GOALS)
    found = {what: (goal, cell) for what, goal, cell in rows}
    assert found["2 ranks, all_reduce, 8 B"] == ("30x gloo", "40.0x (A/A 2.00)")
    assert found["2 ranks, barrier"] == ("20x gloo", "25.0x (A/A 2.00)")
    assert found["4 ranks, all_reduce, 8 B"] == ("20x gloo", "-")
    run["results"][0] = result("all_reduce", 8, 20.0, 160.0)
    assert update_docs.goals([run])[1][2] == "**8.00x (A/A 2.00) missed**"


def test_a_layout_is_said_in_words() -> None:
    layouts = ["2", "0,1", "0,0,1,1", "0,1,0,1"]
    words = ["2 ranks", "2 hosts x 1 rank", "2 hosts x 2 ranks", "2 hosts x 2 ranks, alternating"]
    assert [update_docs.ranks_of(layout) for layout in layouts] == words


def test_the_page_holds_what_the_raw_results_say() -> None:
    """The page's tables equal what update_docs.py would write now, and its pictures exist."""
    page = update_docs.PAGE.read_text()
    assert update_docs.filled(page) == page, "run benchmarks/update_docs.py"
    for path, draw in update_docs.PICTURES.items():
        assert draw() == path.read_text(), "run benchmarks/update_docs.py"
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page)
    assert pictures and all((update_docs.PAGE.parent / picture).is_file() for picture in pictures)
    with pytest.raises(ValueError, match="expected one table <!-- table: goals -->"):
        update_docs.filled(page.replace("<!-- table: goals -->", ""))


# ----------------------------------------------------------------------------------------------- the checks


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_sums_of_the_pattern_are_exact(dtype: torch.dtype) -> None:
    parts = [pattern(40, rank, 3, dtype) for rank in range(8)]
    exact = torch.stack([part.long() for part in parts]).sum(0)
    assert torch.equal(total(parts).long(), exact)
    assert not torch.equal(parts[0], parts[1])


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.mark.parametrize("op", [op for op in OPS if op != "ping_pong"])
def test_a_right_result_passes_and_leaves_zeros(op: str, world_of_one: dist.ProcessGroup) -> None:
    case = Case(op, FIXED_SIZE.get(op, 400), torch.float32, 2)
    assert [case.check(world_of_one, turn) for turn in range(3)] == [None] * 3
    assert not any(tensor.any() for tensor in case.inputs + case.outputs)
    assert len(case.calls(world_of_one)) == 2


def test_a_wrong_result_is_named(world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        tensor[7] = -1

    monkeypatch.setattr(dist, "all_reduce", forgetful)
    wrong = Case("all_reduce", 400, torch.float32, 1).check(world_of_one, 0)
    assert wrong == "rank 0: element 7 is -1.0, expected 8.0"


# ---------------------------------------------------------------------------------- the example's own arithmetic


def test_intervals_are_united_and_subtracted() -> None:
    united = train_gpt.union([(5, 6), (0, 2), (1, 3)])
    assert united == [(0, 3), (5, 6)]
    assert train_gpt.subtract(united, [(1, 2), (2.5, 5.5)]) == [(0, 1), (2, 2.5), (5.5, 6)]
    assert train_gpt.subtract(united, []) == united
    assert train_gpt.subtract(united, [(-1, 10)]) == []
    assert train_gpt.length_within(united, (2, 5.25)) == 1.25


class Event:
    """The attributes of a profiler event that the example reads."""

    def __init__(self, name: str, start: float, end: float, thread: int = 1) -> None:
        self.name, self.thread = name, thread
        self.time_range = type("Range", (), {"start": start, "end": end})
        # A tensor with six elements, a scalar tensor, and an argument that is no tensor.
        self.input_shapes, self.input_dtypes = [[2, 3], [], []], ["float", "c10::Half", "Scalar"]


def test_only_time_without_computing_counts_as_waiting() -> None:
    cost = train_gpt.Communication()
    cost.add(
        [
            Event("train_step", 0, 100),
            Event("autograd::engine::evaluate_function: AccumulateGrad", 10, 30),
            Event("c10d::allreduce_", 18, 22),  # issued inside autograd, so it counts as communication
            Event("x:all_reduce", 20, 70, thread=2),
            Event("aten::mul", 60, 65),
            Event("aten::mul", 30, 60, thread=3),  # work of another thread does not make this thread busy
            Event("y:all_reduce", 80, 90, thread=2),  # a record of another backend
        ],
        "x",
    )
    assert cost.in_flight == [50]
    assert cost.waited == [4 + 30 + 5]  # 18 to 22, 30 to 60, 65 to 70
    assert cost.operations == {("all_reduce", 26): [50]}


# ------------------------------------------------------------------------------------------- the whole program


def test_two_ranks_over_gloo_write_a_checked_result(tmp_path: Path) -> None:
    command = [
        warm_python(),
        str(ROOT / "benchmarks/collectives.py"),
        "--backends=gloo",
        "--control",
        "--floor",
        "--ops=all_reduce,ping_pong,barrier",
        "--sizes=8,1KiB",
        "--rounds=2",
        "--budget=0.01",
        f"--out={tmp_path}",
        "--name=x",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(next(tmp_path.glob("*/x.json")).read_text())
    assert written["labels"] == ["gloo", "gloo #2", "no-op"]
    assert [(r["op"], r["size"]) for r in written["results"]] == [
        ("all_reduce", 8), ("all_reduce", 1024), ("ping_pong", 8), ("ping_pong", 1024), ("barrier", 0),
    ]  # fmt: skip
    assert all(t["median"] > 0 for r in written["results"] for t in r["times"].values())
    assert "## all_reduce" in done.stdout


def test_messages_are_compared_and_their_times_written(tmp_path: Path) -> None:
    command = [warm_python(), str(ROOT / "benchmarks/messages.py"), "--sizes=8,64KiB", "--samples=10", "--starts=1"]
    done = subprocess.run(
        [*command, f"--out={tmp_path}"], env=dict(os.environ), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (start,) = json.loads(next(tmp_path.glob("*/messages.json")).read_text())["starts"]
    cases = [(row["size"], row["direction"]) for row in start]
    assert cases == [(size, direction) for size in (8, 65536) for direction in ("one", "both")]
    assert all(set(row["times"]) == {"reachable", "ordinary", "ordinary again", "gloo"} for row in start)
    assert all(times["median"] > 0 for row in start for times in row["times"].values())


@pytest.mark.parametrize(
    ("args", "said"), [(["--ops=all_redcue"], "known: all_reduce"), (["--sizes=8KB"], "such as 64KiB")]
)
def test_wrong_arguments_are_explained_before_anything_starts(
    args: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["collectives.py", *args])
    with pytest.raises(SystemExit, match="2"):
        collectives.parse_args()
    assert said in capsys.readouterr().err


def test_a_backend_may_have_a_variant_or_a_rule() -> None:
    """A rule may contain commas in brackets."""
    rule = "*:1MiB-=ring(leaders=2,segment=1MiB)"
    assert collectives.names_of(f"sagellm,sagellm:{rule},gloo") == ["sagellm", f"sagellm:{rule}", "gloo"]
    assert collectives.variant_options("sagellm", "") == {}
    assert collectives.variant_options("sagellm", "unfused")["pg_options"].fusion is False
    assert collectives.variant_options("sagellm", rule)["pg_options"].algorithm == rule
    for backend, variant in (("gloo", "unfused"), ("gloo", rule), ("sagellm", "faster")):
        with pytest.raises(ValueError, match="the variants are"):
            collectives.variant_options(backend, variant)


def test_a_series_is_one_sample_of_calls_one_after_the_other() -> None:
    """`finish` runs before and after each series. The last series may be shorter."""
    made: list[str] = []
    calls = [lambda: made.append("call")]
    taken = clocks.series(calls, clocks.TOGETHER + 3, 0, lambda: made.append("finish"))
    assert len(taken) == 2 and all(each > 0 for each in taken)
    whole = ["finish", *["call"] * clocks.TOGETHER, "finish"]
    assert made == [*whole, "finish", *["call"] * 3, "finish"]


def test_the_picture_of_overlap_is_to_scale_and_operations_at_once_have_lanes_of_their_own() -> None:
    from xml.etree import ElementTree

    spans = [("compute", 0.0, 4.0), ("all_reduce", 4.0, 8.0), ("all_reduce", 5.0, 9.0), ("all_reduce", 8.0, 10.0)]
    assert overlap.in_lanes(spans[1:]) == [0, 1, 0]
    picture = ElementTree.fromstring(overlap.picture((20.0, spans[:2]), (10.0, spans), "a machine"))
    bars = [each for each in picture.iter() if each.tag.endswith("rect") and len(each)]
    widths = [round(float(each.get("width", "0"))) for each in bars]
    assert widths == [128, 128, 128, 128, 128, 64], "640 points for the 20 ms of the longer way"
    heights = [each.get("height") for each in bars]
    assert heights == ["30.0", "30.0", "30.0", "15.0", "15.0", "15.0"]
    texts = [each.text for each in picture.iter() if each.tag.endswith("text")]
    assert "one after the other: 20.0 ms" in texts and "OverlapScheduler: 10.0 ms" in texts and "a machine" in texts


# ------------------------------------------------------------------------------------------------ features


def test_a_row_of_the_features_is_never_hidden() -> None:
    names = {row.name for row in features.ROWS}
    assert {row.name for row in features.by_name("moe, transfer")} == {"moe", "transfer"} <= names
    assert features.by_name("") == features.ROWS
    with pytest.raises(ValueError, match=r"no such feature, expected one of .*moe"):
        features.by_name("mo")
    row = next(row for row in features.ROWS if row.goal == 2.0)
    for ours, verdict in ((15.0, "met"), (25.0, "lost")):
        found = features.result(row, {"ours": [ours] * 9, "theirs": [10.0] * 9})
        assert (found["ratio"], found["verdict"]) == (ours / 10, verdict)
        assert f"| {ours:.1f} us |" in features.line(found) and features.line(found).endswith(f"| {verdict} |")
        assert features.line(found).count("|") == features.head().splitlines()[0].count("|")


def hosts_run() -> dict[str, Any]:
    """Returns a result of `hosts.py`: one operation at two sizes. We win the first and lose the second."""

    def timed(us: float) -> dict[str, float]:
        return {"p10": us, "median": 2 * us, "p99": 3 * us, "processor": us}

    rows = [
        {"op": "broadcast", "size": size, "times": {"sagellm": timed(ours), "gloo": timed(4), "gloo #2": timed(4)}}
        for size, ours in ((8, 2), (1024, 8))
    ]
    return {"layout": "2x1", "link": "none", "others": 0.5, "results": rows}


def test_a_table_of_hosts_names_the_cells_that_were_lost() -> None:
    whole = {"date": "2000-01-01", "machine": {"cpu": "a processor", "cores": 2}, "runs": [hosts_run()]}
    text = hosts.markdown(whole)
    assert "| broadcast | 8 B | 2.00 (2.00); 2.00 | 1.00 (1.00); 1.00 |" in text
    assert "2 cells, 1 lost by p10" in text
    assert text.count("- lost:") == 1
    assert "- lost: 2x1, none: broadcast 1 KiB 0.50 (0.50)" in text


@pytest.mark.parametrize(
    ("words", "plan"),
    [
        ([], list(hosts.DEFAULT)),
        (["--layouts=4x1"], [("4x1", "none")]),
        (["--layouts=2x1,3x2", "--links=1ms"], [("2x1", "1ms"), ("3x2", "1ms")]),
    ],
)
def test_hosts_runs_each_layout_over_each_link(
    words: list[str], plan: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hosts.py", *words])
    assert hosts.planned(hosts.parse_args()) == plan
    assert [hosts.link_of(name) for name in ("none", "0.2ms", "10gbit")] == [("", 0), ("", 0.2), ("10gbit", 0)]


def test_hosts_says_in_one_line_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["hosts.py"])
    assert hosts.spawn(hosts.parse_args(), []) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in ("root", "`ip`", "`tc`"))


def test_a_table_beside_computing_processes_shows_the_median_and_the_worst_start() -> None:
    def start(ours: float) -> list[dict[str, Any]]:
        times = {label: {"p10": us, "median": 2 * us} for label, us in (("sagellm", ours), ("gloo", 4.0))}
        return [{"op": "reduce", "size": 64, "times": times}]

    machine = {"cpu": "a processor", "cores": 2}
    runs = {"2": [start(ours) for ours in (1.0, 2.0, 8.0)]}
    text = busy.markdown({"date": "2000-01-01", "machine": machine, "ranks": 2, "runs": runs})
    assert "## Beside 2 computing processes, 3 starts" in text
    assert "| reduce | 64 B | 2.00 (0.50), 2.00 (0.50) | 4.00 us | 8.00 us |" in text
    assert "Lost by p10 or median: reduce 64 B in 1 of 3." in text


def test_wide_shares_the_cores_and_refuses_what_is_no_layout() -> None:
    assert wide.layouts("", 16) == [(2, 8), (2, 4), (4, 4), (16, 1)]
    assert wide.layouts("", 2) == [(2, 1)]
    assert wide.layouts("2x8,4x4", 2) == [(2, 8), (4, 4)]
    for wrong in ("2", "2x", "0x4", "2x8x2", "ax1"):
        with pytest.raises(ValueError, match="expected ranks x threads"):
            wide.layouts(wrong, 16)


def test_wide_reads_the_kernels_lists_of_cpus_and_counts_cores() -> None:
    assert wide.cpus_of("0-2,8\n") == {0, 1, 2, 8} and wide.cpus_of("\n") == set()
    assert 1 <= wide.cores() <= len(os.sched_getaffinity(0))


def test_wide_measures_with_several_threads_and_writes_one_file(tmp_path: Path) -> None:
    words = ["--layouts=2x2", "--dtypes=bfloat16", "--sizes=8,512KiB", "--rounds=2", "--budget=0.02"]
    command = [sys.executable, str(ROOT / "benchmarks/wide.py"), *words, f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(next(tmp_path.glob("*/wide.json")).read_text())["runs"]
    assert (run["ranks"], run["threads"], [row["size"] for row in run["results"]]) == (2, 2, [8, 512 << 10])
    by_threads = [f"{way}, {count}" for count in ("2 threads", "1 thread") for way in ("reachable", "ordinary")]
    ways = ["limit", *by_threads[:2], "asynchronous, 2 threads", "asynchronous, 1 thread", *by_threads[2:], "gloo"]
    assert "shared memory" in run["groups"]["all"]
    assert all(list(row["times"]) == ways for row in run["results"])
    assert all(one["p10"] > 0 for row in run["results"] for one in row["times"].values())
    assert "## 2 ranks x 2 threads, p10, share of the limit" in done.stdout


def test_busy_measures_beside_a_process_that_computes_and_ends_it(tmp_path: Path) -> None:
    words = ["--beside=1", "--starts=1", "--ops=all_reduce", "--sizes=8", "--backends=gloo,gloo", "--rounds=2"]
    command = [warm_python(), str(ROOT / "benchmarks/busy.py"), *words, "--budget=0.01", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(next(tmp_path.glob("*/busy.json")).read_text())
    assert [row["op"] for row in written["runs"]["1"][0]] == ["all_reduce"]
    assert "Beside 1 computing processes, 1 starts" in next(tmp_path.glob("*/busy.md")).read_text()
    with busy.computing(2) as children:
        assert all(child.poll() is None for child in children)
    assert all(child.poll() is not None for child in children)


def test_hosts_measures_two_hosts_and_writes_all_of_it(tmp_path: Path) -> None:
    if lacking := hosts.missing():
        pytest.skip(f"no network namespaces here: {lacking}")
    words = ["--layouts=2x2", "--links=none", "--ops=all_reduce,ping_pong", "--sizes=8", "--backends=gloo,gloo"]
    words += ["--rounds=2", "--budget=0.01", "--limit=20", f"--out={tmp_path}"]
    command = [warm_python(), str(ROOT / "benchmarks/hosts.py"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if "hosts cannot be simulated here" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    written = json.loads(next(tmp_path.glob("*/hosts.json")).read_text())
    rows = written["runs"][0]["results"]
    assert [(row["op"], row["size"], list(row["times"])) for row in rows] == [
        ("all_reduce", 8, ["gloo", "gloo #2"]), ("ping_pong", 8, ["gloo", "gloo #2"])
    ]  # fmt: skip
    assert all(timed["median"] > 0 for row in rows for timed in row["times"].values())
    assert "| all_reduce | 8 B |" in next(tmp_path.glob("*/hosts.md")).read_text()
