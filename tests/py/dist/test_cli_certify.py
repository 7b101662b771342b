"""`torch-sagellm certify`: all of its stages on CPU tensors, its report, and the report of a failed stage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import beyond_gloo, run_script

from torch_sagellm.cli import certify
from torch_sagellm.cli.main import main

pytestmark = beyond_gloo("the command compares with it")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(400)
def test_every_stage_passes_and_the_report_begins_with_rows_of_the_status_page(tmp_path: Path) -> None:
    words = ["--quick", "--ranks", "3", "--device", "cpu", "--json", "figures.json", "--report", "report.md", "--yes"]
    done = run_script(["-m", "torch_sagellm", "certify", *words], timeout=300, cwd=tmp_path, warm=True)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "figures.json").read_text())
    stages = found["stages"]
    assert list(stages) == list(certify.STAGES) and not any(stage["failure"] for stage in stages.values()), stages
    assert stages["values"]["calls"] > 100 and stages["values"]["wrong"] == 0
    assert set(stages["overlap"]["hidden"]) == {"sagellm", "gloo"} and stages["bandwidth"]["copy"] > 0
    text = (tmp_path / "report.md").read_text()
    # The tables of the report have the headings of the pages into which they are copied.
    for head, page in {
        "| what | state |": "docs/status.md",
        "| target | measured | machine |": "docs/internals/goals.md",
    }.items():
        assert head in text and head in (ROOT / page).read_text(), head
    assert re.search(r"\| cpu tensors, 3 ranks of one host \| values passed; late passed; killed passed;", text), text
    assert re.search(r"rank 2 \(pid \d+\) has not entered it, .*demos/hang\.py:\d+ in load_batch", text), text
    assert re.search(r"rank 2 \(pid \d+, host <name>\) of group '0' ended \(killed", text), text
    assert str(ROOT) not in text.split("```")[0] + text.split("```")[-1], "no folder of this machine"


def test_stages_that_the_time_does_not_suffice_for_have_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--device", "cpu", "--limit", "0.5", "--report", "-"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED: not run: the time of --limit was over") == 2 * len(certify.STAGES) + len(
        certify.STAGES
    ), printed


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "mlu"], "--device mlu: torch sees "),
        (["--report", "/no/such/file.md"], "there is no folder /no/such"),
        (["--ranks", "0"], "'0' is no number of ranks"),
        (["--limit", "-1"], "'-1' is no number of seconds"),
    ],
)
def test_wrong_arguments_start_nothing(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["certify", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2 and says in capsys.readouterr().err
