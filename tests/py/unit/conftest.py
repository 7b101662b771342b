"""Fixtures for tests of the choice of algorithms."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, with no rules in the environment."""
    monkeypatch.setenv("SAGELLM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("SAGELLM_ALGORITHM", raising=False)
    return tmp_path
