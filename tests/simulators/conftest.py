"""Deadlines, and the simulators built once before the first test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

DEADLINE = 180  # seconds for a test; the jobs inside have shorter deadlines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(DEADLINE))


@pytest.fixture(scope="session", autouse=True)
def simulators() -> None:
    import build

    build.build()
