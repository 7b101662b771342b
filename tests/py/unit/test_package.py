"""The Python package alone: how torch finds it, what an import costs, what it refuses, what it logs. No ranks."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sagellm import _delegate, _load, _register
from sagellm.observe import log

pytestmark = pytest.mark.quick


def in_new_process(code: str, **environment: str) -> dict[str, Any]:
    """Runs `code` in a fresh interpreter in an unrelated folder; its last line is JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


LOOK = """
import json, os, sys, threading
import torch
print(json.dumps({
    "tasks": len(os.listdir("/proc/self/task")),
    "files": len(os.listdir("/proc/self/fd")),
    "threads": threading.active_count(),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
    "package": "sagellm" in sys.modules,
    "extension": "sagellm._C" in sys.modules,
    "known": "SAGELLM" in torch.distributed.Backend._plugins,
}))
"""


def test_import_torch_registers_the_name_and_starts_and_opens_nothing() -> None:
    with_us = in_new_process(LOOK, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    without = in_new_process(LOOK, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert with_us["package"] and with_us["known"] and not with_us["extension"]
    assert not without["package"]
    for name in ("tasks", "files", "threads", "children"):
        assert with_us[name] == without[name], name


def test_import_sagellm_registers_where_torch_does_not_autoload() -> None:
    found = in_new_process(LOOK.replace("import torch", "import sagellm, torch", 1), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found["known"] and not found["extension"]


def test_import_sagellm_before_torch_with_autoloading_registers_once() -> None:
    found = in_new_process(LOOK.replace("import torch", "import sagellm, torch", 1), TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert found["known"] and not found["extension"]


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_both_entry_points_lead_to_the_registration(group: str) -> None:
    points = [point for point in metadata.entry_points(group=group) if point.name == "sagellm"]
    assert len(points) == 1
    points[0].load()()
    plugin = torch.distributed.Backend._plugins["SAGELLM"]
    assert plugin.creator_fn is _register.create and plugin.extended_api
    points[0].load()()
    assert torch.distributed.Backend._plugins["SAGELLM"] is plugin


def test_defaults_of_torch_stay() -> None:
    defaults = torch.distributed.Backend.default_device_backend_map
    assert defaults["cpu"] == "gloo" and defaults["cuda"] == "nccl"
    assert list(torch.distributed.Backend.backend_capability["sagellm"]) == ["cpu"]


@pytest.mark.parametrize("running", ["2.11.0+cu130", "2.16.0a0+git1234", "3.15.0"])
def test_a_build_for_another_minor_version_is_refused_with_the_command_that_mends_it(running: str) -> None:
    with pytest.raises(ImportError) as error:
        _load.check("2.15.0", running, "/no/such/folder")
    text = str(error.value)
    assert "built for torch 2.15" in text and running in text
    assert f"{sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps" in text


@pytest.mark.parametrize("running", ["2.15.0", "2.15.1+cpu", "2.15.0+cu132"])
def test_a_build_for_the_same_minor_version_is_accepted(running: str) -> None:
    _load.check("2.15.0+cu132", running, "")


def test_the_mismatch_is_found_before_the_extension_is_loaded() -> None:
    code = """
import json, sys
import torch
from sagellm import _build
_build.TORCH_VERSION = "2.3.0"
try:
    torch.distributed.init_process_group("sagellm", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    text = ""
except ImportError as error:
    text = str(error)
print(json.dumps({"text": text, "extension": "sagellm._C" in sys.modules}))
"""
    found = in_new_process(code)
    assert "built for torch 2.3" in found["text"] and not found["extension"]


def test_the_record_of_the_build_belongs_to_the_extension() -> None:
    from sagellm import _build

    extension = _load.extension()
    assert extension.torch_version_built == _build.TORCH_VERSION
    assert Path(_build.SOURCE).joinpath("setup.py").is_file()
    import sagellm

    assert sagellm.__version__ == _build.VERSION == metadata.version("sagellm")


def test_unknown_attributes_are_refused() -> None:
    import sagellm

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sagellm.nothing  # noqa: B018


def test_the_delegate_is_checked_before_anybody_meets() -> None:
    assert _delegate.check("") == "gloo" and _delegate.check("GLOO") == "gloo"
    with pytest.raises(ValueError, match=r"delegate='nccl' cannot serve CPU tensors; expected one of gloo, mpi, ucc"):
        _delegate.check("nccl")


class Extension(SimpleNamespace):
    """Stands in for the extension module: keeps the level it was told."""

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


def test_doctor_prints_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    from sagellm.cli.main import main

    assert main(["doctor", "--no-self-test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    for name in ("sagellm", "torch", "python", "cores", "memfd", "pidfd", "kernel"):
        assert name in names, lines


def test_doctor_lets_two_ranks_talk() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sagellm", "doctor"], cwd="/", capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks: passed" in done.stdout and "all_reduce of 8 B" in done.stdout


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    from sagellm.cli.main import main

    for arguments in (["--help"], ["doctor", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0 and "examples:" in capsys.readouterr().out
