"""The extension is loaded into the torch that it was built for, and into no other."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from harness import in_new_process

from torch_sagellm._private import load

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("running", ["2.11.0+cu130", "2.16.0a0+git1234", "3.15.0"])
def test_a_build_for_another_minor_version_is_refused_with_the_command_that_mends_it(running: str) -> None:
    with pytest.raises(ImportError) as error:
        load.check(["2.15.0"], running, "/no/such/folder")
    text = str(error.value)
    assert "built for torch 2.15" in text and running in text
    assert f"{sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps" in text


@pytest.mark.parametrize("running", ["2.15.0", "2.15.1+cpu", "2.15.0+cu132"])
def test_a_build_for_the_same_minor_version_is_accepted(running: str) -> None:
    assert load.check(["2.15.0+cu132"], running, "") == "2.15.0+cu132"


@pytest.mark.parametrize(("running", "taken"), [("2.11.3", "2.11.0"), ("2.14.0+cpu", "2.14.1"), ("2.15.0", "2.15.0")])
def test_a_wheel_serves_each_minor_version_by_its_own_extension(running: str, taken: str) -> None:
    assert load.check(["2.11.0", "2.14.1", "2.15.0"], running, "") == taken


@pytest.mark.parametrize("running", ["2.10.0", "2.16.0.dev20261124+cu132", "3.0.0"])
def test_a_wheel_names_what_it_serves_and_the_command_that_builds_from_sources(running: str) -> None:
    with pytest.raises(ImportError) as error:
        load.check(["2.11.0", "2.14.1", "2.15.0"], running, "")
    text = str(error.value)
    assert f"this wheel of sagellm serves torch 2.11, 2.14, 2.15 and this is torch {running}. Build it" in text
    pip = f"{sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps"
    assert text.endswith(f"ninja && {pip} --no-binary torch-sagellm torch-sagellm=={load.version()}")


def test_the_mismatch_is_found_before_the_extension_is_loaded() -> None:
    code = """
import json, sys
import torch
from torch_sagellm import _build
_build.EXTENSIONS = {"2.3.0": "_C"}
try:
    torch.distributed.init_process_group("sagellm", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    text = ""
except ImportError as error:
    text = str(error)
print(json.dumps({"text": text, "extension": "torch_sagellm._C" in sys.modules}))
"""
    found = in_new_process(code)
    assert "built for torch 2.3" in found["text"] and not found["extension"]


def test_the_record_of_the_build_belongs_to_the_extension() -> None:
    from torch_sagellm import _build

    extension = load.extension()
    assert {extension.torch_version_built: "_C"} == _build.EXTENSIONS and load.minors() == [
        ".".join(torch.__version__.split(".")[:2])
    ]
    assert Path(_build.SOURCE).joinpath("setup.py").is_file()
    import torch_sagellm

    assert torch_sagellm.__version__ == _build.VERSION == metadata.version("torch-sagellm")
