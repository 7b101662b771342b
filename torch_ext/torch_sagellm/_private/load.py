"""Loads the extension module that was built for the installed torch.

A build from sources has one extension, ``_C``, for the torch that it was built with. A wheel has one for each minor
version of torch that it serves, such as ``_C_t211`` for torch 2.11.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from _torch_sagellm_autoload import DISTRIBUTION, Unusable

_PACKAGE = Path(__file__).resolve().parent.parent
#: The extension module; None until it is loaded.
_loaded: ModuleType | None = None


def version() -> str:
    """The version of the package, even if the extension was never built."""
    try:
        from torch_sagellm._build import VERSION
    except Exception:  # there is no build record, or it cannot be read
        from importlib import metadata

        try:
            return metadata.version("torch-sagellm")
        except metadata.PackageNotFoundError:
            return "0+unbuilt"
    return VERSION


def commit() -> str:
    """The commit that the package was built from; empty if it is not known."""
    try:
        from torch_sagellm._build import COMMIT
    except Exception:
        return ""
    return COMMIT


def _minor(torch_version: str) -> str:
    return ".".join(torch_version.split("+")[0].split(".")[:2])


def minors() -> list[str]:
    """The minor versions of torch that this build serves, the oldest first; an empty list if it was never built."""
    try:
        return list(map(_minor, _record()[0]))
    except Unusable:
        return []


def _mend(source: str, is_wheel: bool = False) -> str:
    """The command that rebuilds the package for this torch and this Python."""
    pip = f"{sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps"
    if is_wheel:
        tools = f"{sys.executable} -m pip install 'setuptools>=77' wheel ninja"
        return f"{tools} && {pip} --no-binary {DISTRIBUTION} {DISTRIBUTION}=={version()}"
    folder = Path(source) if source else _PACKAGE.parent.parent
    editable = "-e " if folder in _PACKAGE.parents else ""
    where = f"cd {folder}" if (folder / "setup.py").is_file() else "cd <the source folder of sagellm>"
    return f"{where} && {pip} {editable}."


def check(built_for: Iterable[str], running: str, source: str) -> str:
    """Returns the version in ``built_for`` that fits the torch ``running``; raises if none fits.

    The layout of c10d's classes changes with every minor version. An extension that is loaded under a different version
    may fail immediately with an unknown symbol, or load and call the wrong methods. Therefore the version is checked
    before the extension is loaded.
    """
    built = list(built_for)
    for version in built:
        if _minor(version) == _minor(running):
            return version
    if source:
        raise Unusable(
            f"sagellm was built for torch {', '.join(map(_minor, built))} and this is torch {running}; a build from "
            "sources serves one minor version",
            f"build it for this one: {_mend(source)}",
        )
    raise Unusable(
        f"this wheel of sagellm serves torch {', '.join(map(_minor, built))} and this is torch {running}",
        f"build it for this one from the source distribution, with cargo and g++: {_mend('', True)}",
    )


def extension() -> ModuleType:
    """The module ``torch_sagellm._C``; an ImportError that names the remedy if it cannot be loaded."""
    global _loaded
    if _loaded is None:
        _loaded = _load()
    return _loaded


def _record() -> tuple[dict[str, str], str]:
    """Reads the build record: the extension's name for each torch it was built with, and the source folder."""
    try:
        from torch_sagellm import _build

        extensions, source = dict(_build.EXTENSIONS), str(_build.SOURCE)
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
    return extensions, source


def _load() -> ModuleType:
    import torch

    extensions, source = _record()
    built_for = check(extensions, torch.__version__, source)
    try:
        found = _import(extensions[built_for])
        made_for = getattr(found, "torch_version_built", "unknown")
        if made_for != built_for:
            raise ImportError(f"{found.__file__} is not the one of this package: it is for torch {made_for}")
    # If an extension was built for a different torch, pybind11 raises errors that are not ImportErrors.
    except Exception as error:
        raise Unusable(
            f"sagellm's extension does not load under Python {sys.version.split()[0]} with torch "
            f"{torch.__version__}: {_shown(error)}",
            f"build it anew: {_mend(source, not source)}",
        ) from error
    return found


def _import(stem: str) -> ModuleType:
    """Imports a file as the module ``torch_sagellm._C``, whichever torch the file is for."""
    _look_at_file(stem)
    if stem != "_C":
        import torch_sagellm

        loader = ExtensionFileLoader(f"{_PACKAGE.name}._C", str(_file(stem)))
        spec = spec_from_file_location(loader.name, loader.path, loader=loader)
        if spec is None:
            raise ImportError(f"Python makes no module of {loader.path}")
        module = module_from_spec(spec)
        sys.modules[loader.name] = module
        try:
            loader.exec_module(module)
        except BaseException:
            sys.modules.pop(loader.name, None)
            raise
        torch_sagellm._C = module
    from torch_sagellm import _C

    return _C


def _file(stem: str) -> Path:
    """The file of an extension: the first that exists in Python's order of suffixes."""
    paths = [_PACKAGE / f"{stem}{suffix}" for suffix in EXTENSION_SUFFIXES]
    return next((path for path in paths if path.is_file()), paths[0])


def _look_at_file(stem: str) -> None:
    """Refuses a file that was cut off, because the system would kill the process that loads it."""
    if not _PACKAGE.is_dir():
        raise ImportError(f"Python loads no extension out of {_PACKAGE.parent}; install the package unpacked")
    path = _file(stem)
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = file.read(64)
    # A 64-bit ELF file ends with its section table; the header has the table's offset, row size and row count.
    if len(head) == 64 and head[:5] == b"\x7fELF\x02":
        (begin,), (size, number) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
        if path.stat().st_size < begin + size * number:
            raise ImportError(f"{path} was cut off")


def _shown(error: Exception) -> str:
    return str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
