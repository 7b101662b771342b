"""Fixtures for tests of devices: the simulators, built once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simdevice
import simulated


@pytest.fixture(scope="session")
def libraries() -> dict[str, Path]:
    """Paths of the simulators, built with the device before the first deadline runs. Empty if a card is used."""
    if simulated.CARD:
        return defaultdict(Path)
    simdevice.library_path()
    built: dict[str, Path] = simulated.builder().build()
    return built


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """On a card a test that controls the simulated device is skipped."""
    report: Any = yield
    if simulated.CARD and report.failed and simulated.NeedsSimulatorError.__name__ in report.longreprtext:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "Skipped: controls the simulated device")
    return report
