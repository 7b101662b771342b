"""The usual times of a group's calls are kept for the predictions of later groups on the same machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, run_fresh

pytestmark = beyond_gloo("this is about the package's own predictions")

EARLIER, OWN = "earlier groups on this machine", "this group"


def calls(ctx: Context, count: int) -> None:
    """Makes this many all_reduces of 64 KiB and barriers, and three broadcasts, which are too few to be kept."""
    ctx.init()
    value = torch.zeros(1 << 14)
    for _ in range(count):
        dist.all_reduce(value)
        dist.barrier()
    for _ in range(3):
        dist.broadcast(value, src=0)
    dist.destroy_process_group()


def predictions(ctx: Context) -> tuple[dict[str, tuple[str, float | None]], str]:
    """Returns predictions for 64 KiB: for each, whose calls it is based on, and its seconds. Also returns the text of
    one explanation.

    Predictions with the name of an operation are made before this group has made calls, `after` is made afterwards, and
    `alone` is made without a group.
    """
    import torch_sagellm

    ctx.init()
    explain = torch_sagellm.explain
    found = {op: explain(op, "64KiB") for op in ("all_reduce", "barrier", "broadcast", "all_gather")}
    found["alone"] = explain("all_reduce", "64KiB", ranks=ctx.world_size)
    text = str(found["all_reduce"])
    with dist._time_estimator() as estimate:
        dist.all_reduce(torch.zeros(1 << 14))
    model = found["all_reduce"].by_model
    assert estimate.estimated_time / 1e6 == pytest.approx(model, rel=0.01), "estimates are equal on all ranks"
    for _ in range(9):
        dist.all_reduce(torch.zeros(1 << 14))
    found["after"] = explain("all_reduce", "64KiB")
    assert found["after"].choice == found["all_reduce"].choice
    return {name: (each.scaled_by, each.predicted) for name, each in found.items()}, text


def kept(tmp: Path) -> dict[str, str]:
    return {"SAGELLM_CACHE_DIR": str(tmp), "SAGELLM_KEEP_TIMES": "1"}


def test_a_later_group_predicts_by_the_calls_of_an_earlier_one(tmp_path: Path) -> None:
    run_fresh(calls, 2, 150, env=kept(tmp_path))
    (file,) = tmp_path.iterdir()
    lines = dict(re.findall(r"^(\w+) \d+ bytes (\d+) ns 150 calls$", file.read_text(), re.MULTILINE))
    assert set(lines) == {"all_reduce", "barrier"}, file.read_text()
    for found, text in run_fresh(predictions, 2, env=kept(tmp_path)):
        own = found.pop("after")
        assert own[0] == OWN and own[1]
        assert [name for name, each in found.items() if each[0] == EARLIER] == ["all_reduce", "barrier", "alone"]
        assert found["broadcast"][0] == found["all_gather"][0] == "", "too few calls, and none"
        for name in ("all_reduce", "alone", "barrier"):
            measured = int(lines.get(name, lines["all_reduce"])) / 1e9
            assert found[name][1] == pytest.approx(measured, rel=0.01), name
        assert f"by the calls of {EARLIER} (about " in text, text


def sealed(body: str) -> str:
    """Returns ``body``, followed by the checksum that the core expects."""
    total = 0xCBF29CE484222325
    for byte in body.encode():
        total = (total ^ byte) * 0x100000001B3 % (1 << 64)
    return f"{body}sum {total:016x}\n"


@pytest.mark.parametrize("change", ["none", "damaged", "cut", "another machine", "another number of ranks", "a rule"])
def test_times_that_do_not_fit_are_not_used(change: str, tmp_path: Path) -> None:
    run_fresh(calls, 2, 150, env=kept(tmp_path))
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    body = text[: text.rindex("sum ")]
    assert sealed(body) == text
    other = {
        "damaged": text.replace(" ns ", " us ", 1),
        "cut": text[: len(text) // 2],
        "another machine": sealed(re.sub(r"(?m)^machine .*", "machine other", body)),
        "another number of ranks": sealed(body.replace("ranks 2;", "ranks 3;")),
    }
    file.write_text(other.get(change, text))
    rule = {"SAGELLM_ALGORITHM": "all_reduce:8KiB-=rounds(16KiB)"} if change == "a rule" else {}
    for found, _ in run_fresh(predictions, 2, env=kept(tmp_path) | rule):
        assert found.pop("after")[0] == OWN
        assert {each[0] for each in found.values()} == ({"", EARLIER} if change == "none" else {""}), found


@pytest.mark.parametrize("why", ["off", "few calls", "failed"])
def test_nothing_is_kept_that_should_not_be(why: str, tmp_path: Path) -> None:
    env = kept(tmp_path) | ({"SAGELLM_KEEP_TIMES": "Off"} if why == "off" else {})
    run_fresh(fails if why == "failed" else calls, 2, 90 if why == "few calls" else 150, env=env)
    assert list(tmp_path.iterdir()) == []


def test_no_kept_times_are_used_if_the_user_wants_none(tmp_path: Path) -> None:
    run_fresh(calls, 2, 150, env=kept(tmp_path))
    for found, _ in run_fresh(predictions, 2, env=kept(tmp_path) | {"SAGELLM_KEEP_TIMES": "0"}):
        assert found.pop("after")[0] == OWN
        assert {each[0] for each in found.values()} == {""}, found


def fails(ctx: Context, count: int) -> None:
    ctx.init()
    for _ in range(count):
        dist.barrier()
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    dist.destroy_process_group()


def test_a_folder_that_cannot_be_made_costs_nothing_but_the_times(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    run_fresh(calls, 2, 150, env=kept(file / "folder"))
    assert file.read_text() == ""
