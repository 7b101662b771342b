"""Merged traces of many ranks: every format is read, rows do not overlap, clocks are aligned, other files are
refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import torch_sagellm
from torch_sagellm.cli.main import main
from torch_sagellm.observe import timeline

pytestmark = pytest.mark.quick
SECOND = 10**9


def record(number: int, issued: int, ended: int, kind: str = "all_reduce") -> dict[str, Any]:
    """Returns a group's record of an operation, with only the fields that a trace needs."""
    state = "done" if ended else "pending"
    times = {"issued": issued, "ended": ended, "waiting": 500, "copying": 0, "reducing": 0}
    return {"number": number, "kind": kind, "state": state, "read": 8, **times}


def dump(folder: Path, rank: int, records: list[dict[str, Any]], skew: int = 0) -> Path:
    """Writes the file that a failed group leaves. The group's ranks are the global ranks 4 and 7."""
    path = folder / f"sagellm-{rank}.json"
    facts = {"group": "tp", "rank": rank, "members": [4, 7], "fault": "why", "now": 1000, "wall": SECOND + skew}
    path.write_text(json.dumps({**facts, "records": records}))
    return path


def of_phase(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


def test_files_of_failed_groups_become_one_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dumps").mkdir()
    # On rank 4, operations 1 and 2 overlap, and operation 3 is pending when the group fails.
    dump(tmp_path / "dumps", 0, [record(1, 100, 300), record(2, 200, 400), record(3, 900, 0)])
    dump(tmp_path / "dumps", 1, [record(1, 150, 300), record(2, 250, 400), record(5, 10, 20, "send")])
    into = tmp_path / "job.json"
    assert main(["trace", str(tmp_path / "dumps"), "-o", str(into)]) == 0
    assert "6 operations of ranks 4, 7" in capsys.readouterr().out
    events = json.loads(into.read_text())["traceEvents"]
    drawn = of_phase(events, "X")
    assert {(event["pid"], event["args"].get("number"), event["tid"]) for event in drawn} == {
        (4, 1, 0),
        (4, 2, 1),
        (4, 3, 0),
        (7, 5, 0),
        (7, 1, 0),
        (7, 2, 1),
    }
    pending = next(event for event in drawn if event["args"]["number"] == 3)
    assert pending["dur"] == pytest.approx(0.1) and pending["args"]["state"] == "pending"
    first = next(event for event in drawn if event["pid"] == 4 and event["args"]["number"] == 1)
    assert first["ts"] == pytest.approx((SECOND - 900) / 1e3) and first["dur"] == pytest.approx(0.2)
    # Arrows join operations 1 and 2 of both ranks. Only one rank has operation 3, and a message has no arrow.
    arrows = [event for event in events if event["ph"] in "stf"]
    assert sorted((event["id"], event["ph"], event["pid"]) for event in arrows) == [
        ("tp/all_reduce/1", "f", 7),
        ("tp/all_reduce/1", "s", 4),
        ("tp/all_reduce/2", "f", 7),
        ("tp/all_reduce/2", "s", 4),
    ]
    names = {event["args"]["name"] for event in of_phase(events, "M") if event["name"] == "process_name"}
    assert names == {"rank 4", "rank 7"}


def test_clocks_that_differ_are_aligned_by_the_ends_of_collectives(tmp_path: Path) -> None:
    paths = [dump(tmp_path, 0, [record(1, 100, 300)]), dump(tmp_path, 1, [record(1, 150, 310)], skew=5000)]
    merged = torch_sagellm.merge_traces(paths, tmp_path / "out.json", align=True)
    assert merged.shifts == {4: 0, 7: -5010} and merged.operations == 2 and merged.ranks == [4, 7]
    drawn = of_phase(json.loads((tmp_path / "out.json").read_text())["traceEvents"], "X")
    ends = [event["ts"] + event["dur"] for event in drawn]
    assert ends[0] == pytest.approx(ends[1], abs=1e-3)


def test_a_trace_is_read_again_and_the_same_operation_counts_once(tmp_path: Path) -> None:
    early, late = dump(tmp_path, 0, [record(1, 100, 0)]), tmp_path / "late.json"
    whole = timeline.from_records(4, "tp", [record(1, 100, 300)], 1000, SECOND)
    late.write_text(json.dumps({"traceEvents": timeline.events(whole)}))
    (again,) = timeline.read_file(late)
    assert (again.rank, again.group, again.kind, again.number) == (4, "tp", "all_reduce", 1)
    merged = torch_sagellm.merge_traces([early, late], tmp_path / "out.json")
    drawn = of_phase(json.loads((tmp_path / "out.json").read_text())["traceEvents"], "X")
    assert merged.operations == 1 and drawn[0]["args"]["state"] == "done"


def test_a_trace_in_microseconds_and_a_record_in_nanoseconds_are_one_operation(tmp_path: Path) -> None:
    """A float holds today's time in microseconds only to a quarter of a microsecond, and the files were written at two
    different times."""
    wall = 1_795_000_000 * SECOND + 333
    records = [record(at + 1, 100_000 * at + 7, 100_000 * at + 500) for at in range(4)]
    facts = {"group": "tp", "rank": 0, "members": [4, 7], "fault": "why", "now": 1000, "wall": wall + 90}
    (tmp_path / "dump.json").write_text(json.dumps({**facts, "records": records}))
    trace = timeline.events(timeline.from_records(4, "tp", records, 1000, wall))
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": trace}))
    merged = torch_sagellm.merge_traces([tmp_path / "dump.json", tmp_path / "trace.json"], tmp_path / "out")
    assert merged.operations == 4


def test_files_without_operations_leave_the_trace_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.json").write_text(json.dumps({"traceEvents": []}))
    into = tmp_path / "trace.json"
    into.write_text("an earlier one")
    assert main(["trace", str(tmp_path / "none.json"), "-o", str(into)]) == 1
    said = capsys.readouterr()
    assert "nothing was written" in said.err and not said.out and into.read_text() == "an earlier one"


def test_flight_records_are_read_without_running_what_a_pickle_names(tmp_path: Path) -> None:
    entry = {"profiling_name": "nccl:all_reduce", "process_group": ("0", "default"), "collective_seq_id": 3}
    entry |= {"time_created_ns": 100, "time_discovered_completed_ns": 400, "duration_ms": None, "state": "completed"}
    path = tmp_path / "nccl_trace_rank_12"
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": [entry]}))
    (found,) = timeline.read_file(path)
    assert (found.rank, found.kind, found.number, found.start, found.end) == (12, "all_reduce", 3, 100, 400)

    bad = tmp_path / "bad_1"
    bad.write_bytes(pickle.dumps(Path("x")))
    with pytest.raises(ValueError, match="which no flight record does"):
        timeline.read_file(bad)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{not json", '{"traceEvents": [{"ph": "X", "cat": "sagellm"}]}'])
def test_a_file_that_is_nothing_of_the_kind_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notes_1"
    path.write_text(text)
    with pytest.raises(ValueError, match="notes_1 is no trace of write_trace"):
        timeline.read_file(path)


def test_nothing_to_merge_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2 and "the folders are empty" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "no")]) == 2 and "there is no file or folder" in capsys.readouterr().err
