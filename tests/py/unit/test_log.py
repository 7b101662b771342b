"""The log: its variable, Python's levels, and the core's levels."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from torch_sagellm.observe import log

pytestmark = pytest.mark.quick


class Extension(SimpleNamespace):
    """Takes the place of the extension module and keeps the level that was set."""

    def set_log_level(self, level: int) -> None:
        self.level = level


@pytest.fixture
def clean_log(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    monkeypatch.delenv(log.VARIABLE, raising=False)
    monkeypatch.setattr(log.logger, "level", logging.NOTSET)
    log.logger.manager._clear_cache()  # type: ignore[attr-defined]
    return log.logger


@pytest.mark.parametrize(
    ("text", "core", "python"),
    [("off", 0, 51), ("error", 1, 40), ("warn", 2, 30), ("WARNING", 2, 30), ("info", 3, 20), ("debug", 4, 10)],
)
def test_the_variable_sets_both_levels(
    text: str, core: int, python: int, clean_log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(log.VARIABLE, text)
    extension = Extension()
    log.configure(extension)  # type: ignore[arg-type]
    assert extension.level == core and clean_log.level == python


def test_trace_goes_below_debug(clean_log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.VARIABLE, "trace")
    extension = Extension()
    log.configure(extension)  # type: ignore[arg-type]
    assert extension.level == 5 and clean_log.level == 5 and logging.getLevelName(5) == "TRACE"


def test_without_the_variable_the_levels_of_logging_decide(clean_log: logging.Logger) -> None:
    extension = Extension()
    for level, core in ((logging.WARNING, 2), (logging.INFO, 3), (logging.DEBUG, 4), (1, 5), (logging.CRITICAL, 0)):
        clean_log.setLevel(level)
        log.configure(extension)  # type: ignore[arg-type]
        assert extension.level == core, level


def test_a_wrong_level_is_told_and_changes_nothing(
    clean_log: logging.Logger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(log.VARIABLE, "loud")
    extension = Extension()
    log.configure(extension)  # type: ignore[arg-type]
    assert extension.level == log.core_level(clean_log.getEffectiveLevel())
    assert "SAGELLM_LOG=loud is not a level" in caplog.text
