"""The simulators, built once."""

from __future__ import annotations

from pathlib import Path

import pytest
import simdevice
import simulated


@pytest.fixture(scope="session")
def libraries() -> dict[str, Path]:
    """Both the device and the simulators, built before the first deadline runs."""
    simdevice.library_path()
    built: dict[str, Path] = simulated.builder().build()
    return built
