"""Loads the extension module, after checking that it was built for the installed torch."""

from __future__ import annotations

import struct
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

from _torch_sagellm_autoload import Unusable

_PACKAGE = Path(__file__).resolve().parent
#: Once it has been loaded.
_loaded: ModuleType | None = None


def version() -> str:
    """The version of the package, even where the extension was never built."""
    try:
        from torch_sagellm._build import VERSION
    except Exception:  # there is none, or it cannot be read
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
    folder = Path(source) if source else _PACKAGE.parent.parent
    editable = "-e " if folder in _PACKAGE.parents else ""
    where = f"cd {folder}" if (folder / "setup.py").is_file() else "cd <the source folder of sagellm>"
    return f"{where} && {sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps {editable}."


def check(built_for: str, running: str, source: str) -> None:
    """Refuses a build for another minor version of torch.

    The layout of c10d's classes changes with every minor version. A build that is loaded under another one may fail at
    once with an unknown symbol, or load and call the wrong methods; so this is checked before it is loaded.
    """
    if _minor(built_for) != _minor(running):
        raise Unusable(
            f"sagellm was built for torch {_minor(built_for)} and this is torch {running}; a build serves one minor "
            "version",
            f"build it for this one: {_mend(source)}",
        )


def extension() -> ModuleType:
    """The module ``torch_sagellm._C``; an ImportError says what to do."""
    global _loaded
    if _loaded is None:
        _loaded = _load()
    return _loaded


def _load() -> ModuleType:
    import torch

    try:
        from torch_sagellm import _build

        built_for, source = str(_build.TORCH_VERSION), str(_build.SOURCE)
    except ImportError as error:
        raise Unusable(
            "sagellm is not built: its extension needs cargo (curl https://sh.rustup.rs -sSf | sh) and g++ 11 or newer",
            f"build it: {_mend('')}",
        ) from error
    except Exception as error:
        raise Unusable(
            f"the record of sagellm's build, {_PACKAGE / '_build.py'}, cannot be read: {_shown(error)}",
            f"build it anew: {_mend('')}",
        ) from error
    check(built_for, torch.__version__, source)
    try:
        _look_at_file()
        from torch_sagellm import _C

        made_for = getattr(_C, "torch_version_built", "unknown")
        if made_for != built_for:
            raise ImportError(f"{_C.__file__} is not the one of this package: it is for torch {made_for}")
    # pybind11 raises other errors than ImportError where an extension belongs to another torch.
    except Exception as error:
        raise Unusable(
            f"sagellm's extension does not load under Python {sys.version.split()[0]} with torch "
            f"{torch.__version__}: {_shown(error)}",
            f"build it anew: {_mend(source)}",
        ) from error
    return _C


def _look_at_file() -> None:
    """Refuses a file that was cut off: the system would end the process while it loads one."""
    if not _PACKAGE.is_dir():
        raise ImportError(f"Python loads no extension out of {_PACKAGE.parent}; install the package unpacked")
    for suffix in EXTENSION_SUFFIXES:
        path = _PACKAGE / f"_C{suffix}"
        if not path.is_file():
            continue
        with path.open("rb") as file:
            head = file.read(64)
        # An ELF file of 64 bits ends with the table of its sections, whose place, row size and rows the head has.
        if len(head) == 64 and head[:5] == b"\x7fELF\x02":
            (begin,), (size, number) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
            if path.stat().st_size < begin + size * number:
                raise ImportError(f"{path} was cut off")
        return


def _shown(error: Exception) -> str:
    return str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
