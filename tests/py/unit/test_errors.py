"""Which error texts of the core report a deadline, and which ranks they name as missing."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from torch.distributed import DistBackendError

import torch_sagellm
from torch_sagellm.api.errors import translated

pytestmark = pytest.mark.quick
GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def told(name: str) -> str:
    """Returns a golden text with numbers for its placeholders."""
    text = (GOLDEN / f"{name}.txt").read_text()
    return text.replace("<time>", "3.0").replace("<rank>", "0").replace("<name>", "dp_1")


@pytest.mark.parametrize("name", [path.stem for path in sorted(GOLDEN.glob("*.txt"))])
def test_every_report_of_a_deadline_is_a_timeout_and_no_other_text_is(name: str) -> None:
    error = translated(DistBackendError(told(name)))
    is_late = " Timed out after " in told(name)
    assert isinstance(error, torch_sagellm.CommTimeoutError) == is_late
    if isinstance(error, torch_sagellm.CommTimeoutError):
        stopped = name in ("hang_over_hosts_stopped", "hang_message_over_hosts_stopped")
        assert error.missing_ranks == [3 if stopped else 1] and str(error) == told(name)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.missing_ranks, again.args) == (str(error), error.missing_ranks, error.args)


@pytest.mark.parametrize(
    "text",
    [
        "sagellm: the group was aborted: rank 1 (pid 4) says: Timed out after 5 s in the loader",
        "sagellm: rank 0 of group '0' failed after 3.0 s in all_reduce number 2\n  the library: Timed out after 600 s",
        "sagellm: rank 1 (pid 4) of group '0' ended\n  rank 0 Timed out after 3.0 s in barrier",
        "Timed out after 5 s",
    ],
)
def test_words_that_a_report_of_another_failure_quotes_make_no_timeout(text: str) -> None:
    error = DistBackendError(text)
    assert translated(error) is error


def test_other_reports_of_a_deadline() -> None:
    for text in (
        "sagellm: rank 0 Timed out waiting for rank 2 on another host: Timed out after 900 ms\n  To go on: recover()",
        "sagellm: rank 0 of group '0' Timed out after 3.0 s in its first message with rank 1 on cuda: rank 1 has not",
        "sagellm: rank 2 of group '0' Timed out after 3.0 s in barrier number 2 (reported by rank 2)\n  "
        "rank 1 (pid 4) has not entered it\n  rank 0 (pid 5) has not entered it\n  gloo: rank 7 (pid 3) is lost",
    ):
        error = translated(DistBackendError(text))
        assert isinstance(error, torch_sagellm.CommTimeoutError)
        assert error.missing_ranks == ([0, 1] if "barrier" in text else [])
