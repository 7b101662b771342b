"""One torch.distributed backend over shared memory, NCCL, HCCL and CNCL, with fusion, algorithm choice and statistics.

``init_process_group("sagellm")`` is all that a program needs.

torch finds the name by way of the module `_torch_sagellm_autoload`, which imports this package when a group is made.
Here too nothing is loaded before it is used: no extension, no thread, no file.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import _torch_sagellm_autoload


def _listed() -> dict[str, str]:
    """The public names and the module of this package where each lives: those of `__init__.pyi`."""
    stub = __spec__.loader.get_data(str(Path(__file__).with_name("__init__.pyi"))).decode()
    return {name: home for home, name in re.findall(r"^from torch_sagellm\.(\S+) import (\w+)", stub, re.MULTILINE)}


_HOMES = _listed()
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Loads the module of a name when it is first used."""
    if name == "__version__":
        from torch_sagellm._private import load

        return load.version()
    if name == "Options":  # of the extension, which is looked at before it is loaded
        from torch_sagellm._private import load

        return load.extension().Options
    if name in _HOMES:
        return getattr(importlib.import_module(f"torch_sagellm.{_HOMES[name]}"), name)
    raise _unknown("torch_sagellm", name)


def _unknown(module: str, name: str) -> AttributeError:
    """Python asks for a private module as an attribute, too, before it imports it: no name is meant then."""
    text = f"module {module!r} has no attribute {name!r}"
    if not name.startswith("_"):
        text += importlib.import_module("torch_sagellm._private.nearest").meant(name, __all__)
    return AttributeError(text)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _public(module: str, name: str) -> Any:
    """A public name that older code imports from ``module``, whichever module of this package it lives in."""
    if name in __all__ and _HOMES.get(name) != module.removeprefix("torch_sagellm."):
        return __getattr__(name)
    raise _unknown(module, name)


def _is_command_line() -> bool:
    """This process is a command of ours, which registers the backend itself if it uses torch."""
    import os
    import sys

    if sys.argv[:1] == ["-m"]:  # while Python looks for the module that it is to run
        return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["torch_sagellm"]
    return os.path.basename(sys.argv[0] if sys.argv else "") == "torch-sagellm"


# `import torch_sagellm` registers the backend where torch's autoloading is off. It may import torch, and torch then
# calls the same function in the middle of this line, so it must be the last one. The command line does not wait for
# torch's import where it needs no torch, as in a probe that is run every few seconds.
if not _is_command_line():
    _torch_sagellm_autoload.register()
