"""torch's own distributed suite against the backend, on 2 and 3 ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from expected import CHOSEN, EXPECTED
from harness import BACKEND, run_script

DRIVER = Path(__file__).with_name("driver.py")


def run_suite(world_size: int, names: list[str], timeout: float) -> dict[str, dict[str, str]]:
    """Returns the results by test. Fails if the driver did not run to its end."""
    done = run_script([str(DRIVER), BACKEND, str(world_size), *names], timeout, warm=True)
    results = {}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result = json.loads(line.removeprefix("RESULT "))
            results[result["test"]] = result
    assert done.returncode == 0, f"the driver ended with {done.returncode}\n{done.stdout[-4000:]}"
    return results


def judge(results: dict[str, dict[str, str]], least: int) -> None:
    """Checks that no unexpected test fails, that no test passes that is expected to fail, and that at least `least`
    tests pass."""
    failed = {name: each for name, each in results.items() if each["status"] == "failed"}
    passed = [name for name, each in results.items() if each["status"] == "passed"]
    surprises = [f"{name}:\n{each['text']}" for name, each in failed.items() if name not in EXPECTED]
    assert not surprises, "\n\n".join(surprises)
    cured = [name for name in passed if name in EXPECTED]
    assert not cured, f"these are listed as impossible and pass: {cured}"
    assert len(passed) >= least, f"only {len(passed)} tests ran: {sorted(passed)}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 3])
def test_chosen_tests_of_torch(world_size: int) -> None:
    """About thirty tests. Those that need accelerators or more ranks skip themselves."""
    results = run_suite(world_size, [name for name in CHOSEN if name not in EXPECTED], 280)
    judge(results, 25)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_tests_of_torch(world_size: int) -> None:
    """The whole suite."""
    judge(run_suite(world_size, [], 1700), 80)
