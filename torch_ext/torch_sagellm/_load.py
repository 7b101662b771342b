"""Loads the extension module, after checking that it was built for the installed torch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def version() -> str:
    """The version of the package, even where the extension was never built."""
    try:
        from torch_sagellm._build import VERSION
    except ImportError:
        from importlib import metadata

        try:
            return metadata.version("torch-sagellm")
        except metadata.PackageNotFoundError:
            return "0+unbuilt"
    return VERSION


def _minor(torch_version: str) -> str:
    return ".".join(torch_version.split("+")[0].split(".")[:2])


def _mend(source: str) -> str:
    """The command that rebuilds the package for this torch and this Python."""
    package = Path(__file__).resolve().parent
    folder = Path(source) if source else package.parent.parent
    editable = "-e " if folder in package.parents else ""
    where = f"cd {folder}" if (folder / "setup.py").is_file() else "cd <the source folder of sagellm>"
    return f"{where} && {sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps {editable}."


def check(built_for: str, running: str, source: str) -> None:
    """Refuses a build for another minor version of torch.

    The layout of c10d's classes changes with every minor version. A build that is loaded under another one may fail at
    once with an unknown symbol, or load and call the wrong methods; so this is checked before it is loaded.
    """
    if _minor(built_for) != _minor(running):
        raise ImportError(
            f"sagellm was built for torch {_minor(built_for)} and this is torch {running}; a build serves one minor "
            f"version. Build it for this one: {_mend(source)}"
        )


def extension() -> ModuleType:
    """The module ``torch_sagellm._C``; an ImportError says what to do."""
    import torch

    try:
        from torch_sagellm import _build
    except ImportError as error:
        raise ImportError(
            "sagellm is not built: its extension needs cargo (curl https://sh.rustup.rs -sSf | sh) and g++ 11 or "
            f"newer, then: {_mend('')}"
        ) from error
    check(_build.TORCH_VERSION, torch.__version__, _build.SOURCE)
    try:
        from torch_sagellm import _C
    except ImportError as error:
        raise ImportError(
            f"sagellm's extension does not load under Python {sys.version.split()[0]} with torch "
            f"{torch.__version__}: {error}. Build it anew: {_mend(_build.SOURCE)}"
        ) from error
    return _C
