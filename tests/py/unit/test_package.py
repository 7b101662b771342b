"""How torch finds the package, and the state that it must not change. No ranks."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from harness import in_new_process

import _torch_sagellm_autoload
from torch_sagellm import _delegate

pytestmark = pytest.mark.quick


LOOK = """
import json, os, sys, threading
import torch
print(json.dumps({
    "tasks": len(os.listdir("/proc/self/task")),
    "files": len(os.listdir("/proc/self/fd")),
    "threads": threading.active_count(),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
    "package": "torch_sagellm" in sys.modules,
    "extension": "torch_sagellm._C" in sys.modules,
    "known": "SAGELLM" in torch.distributed.Backend._plugins,
}))
"""


def test_import_torch_registers_the_name_and_starts_and_opens_nothing() -> None:
    with_us = in_new_process(LOOK, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    without = in_new_process(LOOK, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert with_us["known"] and not without["known"]
    assert not with_us["package"] and not without["package"] and not with_us["extension"]
    for name in ("tasks", "files", "threads", "children"):
        assert with_us[name] == without[name], name


def test_import_sagellm_registers_where_torch_does_not_autoload() -> None:
    found = in_new_process(
        LOOK.replace("import torch", "import torch_sagellm, torch", 1), TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert found["known"] and not found["extension"]


def test_import_sagellm_before_torch_with_autoloading_registers_once() -> None:
    found = in_new_process(
        LOOK.replace("import torch", "import torch_sagellm, torch", 1), TORCH_DEVICE_BACKEND_AUTOLOAD="1"
    )
    assert found["known"] and not found["extension"]


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_both_entry_points_lead_to_the_registration(group: str) -> None:
    points = [point for point in metadata.entry_points(group=group) if point.name == "sagellm"]
    assert len(points) == 1
    points[0].load()()
    plugin = torch.distributed.Backend._plugins["SAGELLM"]
    assert plugin.creator_fn is _torch_sagellm_autoload.create and plugin.extended_api
    points[0].load()()
    assert torch.distributed.Backend._plugins["SAGELLM"] is plugin


def test_defaults_of_torch_stay() -> None:
    defaults = torch.distributed.Backend.default_device_backend_map
    assert defaults["cpu"] == "gloo" and defaults["cuda"] == "nccl"
    assert list(torch.distributed.Backend.backend_capability["sagellm"]) == ["cpu"]


def test_unknown_attributes_are_refused() -> None:
    import torch_sagellm

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torch_sagellm.nothing  # noqa: B018


def test_the_delegate_is_checked_before_anybody_meets() -> None:
    assert _delegate.check("") == "gloo" and _delegate.check("GLOO") == "gloo"
    with pytest.raises(ValueError, match=r"delegate='nccl' cannot serve CPU tensors; expected one of gloo, mpi, ucc"):
        _delegate.check("nccl")
