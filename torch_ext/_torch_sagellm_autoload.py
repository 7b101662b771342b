"""What torch loads of this package in every process that imports torch: the entry points of pyproject.toml name it.

So it must do no harm. It lies outside the package, needs the standard library only, and executes nothing of the
package until a group of ours is asked for, or ``SAGELLM_AS`` asks for it. What is wrong with the package or its
variables breaks no ``import torch`` and no group of another backend: a group of ours raises it, and what is known
before is told once, as a warning.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "sagellm"
PACKAGE = "torch_sagellm"
DISTRIBUTION = "torch-sagellm"
#: Names a backend of torch whose groups this package shall serve, and the names that it may name; see docs/programs.md.
AS = "SAGELLM_AS"
SERVED = ("gloo",)
#: Of torch, in torch.distributed and distributed_c10d.
MANAGER = "_coalescing_manager"

_problem: Exception | None = None


class Unusable(ImportError):
    """The package, or its extension, cannot be used: what is wrong, and what to do."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}. {fix[0].upper()}{fix[1:]}")
        self.what, self.fix = what, fix


class Devices(list[str]):
    """The kinds of device that ``init_process_group("sagellm")`` serves: the CPU, and this process's accelerator.

    Computed each time torch asks, when a group is made, because a vendor's package that is imported after torch
    may register its device after this backend was registered.
    """

    def __iter__(self) -> Iterator[str]:
        import torch

        yield "cpu"
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            yield accelerator.type

    def __contains__(self, device: object) -> bool:
        return any(device == each for each in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(list(self))


def register() -> None:
    """Registers the name with torch. Both entry points and ``import torch_sagellm`` call it.

    Only the first call has an effect. It raises nothing, except where there is no torch, which torch never meets.
    """
    global _problem
    try:
        _register()
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise
        _problem = error
        _warn(f"{error}. Until then groups of this backend are refused; nothing else of torch is affected")


def create(options: Any, pg_options: Any = None) -> Any:
    """Makes the backend of one group. torch calls it; the package does the work, see ``create`` of its `register`."""
    if _problem is not None:
        raise _problem.with_traceback(None)
    try:
        return package("_private.register").create(options, pg_options)
    except (ImportError, SyntaxError) as error:
        raise _explained(error) from error


def package(module: str) -> Any:
    """A module of the package; ``Unusable`` says why there is none."""
    import importlib

    try:
        _look_at_package()
        return importlib.import_module(f"{PACKAGE}.{module}")
    # A package that is not ours may do anything while it is imported.
    except (Exception, SystemExit) as error:
        raise _explained(error) from error


def look() -> None:
    """Raises what is wrong, as far as it can be known before a group is made: for ``info`` and ``doctor``."""
    if _problem is not None:
        raise _problem.with_traceback(None)
    package("_private.register")
    missing = _missing()
    if missing:
        raise Unusable(f"sagellm: the package {PACKAGE} is not whole{missing}", _remedy())


def main() -> int:
    """The command ``torch-sagellm``: that of the package, or what is wrong with the package."""
    try:
        run = package("cli.main").main
    except Unusable as error:
        print(error, file=sys.stderr)
        print(f"python {sys.version.split()[0]} ({sys.executable}), torch {_version('torch')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while Python reads the program
        return 130
    code: int = run()
    return code


def _register() -> None:
    # Imported here: this may run in the middle of `import torch`, and `import torch_sagellm` may be what imports torch.
    from torch import distributed

    if not distributed.is_available():
        return
    backend: Any = distributed.Backend
    if NAME.upper() in backend._plugins:
        return
    # For the CPU alone, so that sagellm never becomes the default of an accelerator without a backend ...
    backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    # ... but a group that names sagellm is served on accelerators, too.
    backend.backend_capability[NAME] = Devices()
    # Before a program can have taken the name of torch's own.
    _replace_manager()
    asked = os.environ.get(AS, "").strip().lower()
    if not asked:
        return
    if asked not in SERVED:
        raise ValueError(f"sagellm: {AS}={asked!r}, expected one of {', '.join(SERVED)}, or unset")
    try:
        package("api.serve_as").serve_as(asked)
    except Exception:
        _refuse(backend, asked)
        raise


def _refuse(backend: Any, name: str) -> None:
    """Lets groups of another name raise what is wrong: those of other ranks may be ours, and torch's own would wait for
    them in vain. Before torch 2.15, which has no such table, they are torch's own.
    """
    if hasattr(backend, "_ensure_backend_registered"):
        backend._ensure_backend_registered(name)
    if name.upper() in backend._plugins:
        backend._plugins[name.upper()] = backend._BackendPlugin(create, True)


def _replace_manager() -> None:
    """Replaces torch's coalescing manager by one whose region an exception ends, see ``_private.regions``."""
    from functools import wraps

    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    theirs: Any = getattr(c10d, MANAGER, None)
    if theirs is None or hasattr(theirs, "_sagellm"):
        return

    @wraps(theirs)
    def manager(*args: Any, **named: Any) -> Any:
        # Without it there is no group of ours.
        regions: Any = sys.modules.get(f"{PACKAGE}._private.regions")
        return theirs(*args, **named) if regions is None else regions.manager(theirs, *args, **named)

    manager._sagellm = True  # type: ignore[attr-defined]
    for module in (c10d, distributed):
        if getattr(module, MANAGER, None) is theirs:
            setattr(module, MANAGER, manager)


def _look_at_package() -> None:
    """Raises an ImportError where the package is not ours, before anything of it is executed."""
    from importlib.util import find_spec

    found = sys.modules.get(PACKAGE)
    spec = find_spec(PACKAGE) if found is None else getattr(found, "__spec__", None)
    if spec is None:
        raise ImportError(f"the package {PACKAGE} is gone")
    if spec.origin is None:
        raise ImportError(f"{', '.join(spec.submodule_search_locations or [])} has lost its __init__.py")
    source = getattr(spec.loader, "get_source", lambda _: None)(PACKAGE)
    if source is not None and __name__ not in source:
        raise ImportError(f"{spec.origin} belongs to something else{_owner()}")


def _owner() -> str:
    """The other distribution that has installed a file in the place of our package's."""
    from importlib import metadata

    for each in metadata.distributions():
        name = each.metadata["Name"]
        if name != DISTRIBUTION and any(str(file) == f"{PACKAGE}/__init__.py" for file in each.files or []):
            return f", which {name} {each.version} has installed"
    return ""


def _explained(error: BaseException) -> Unusable:
    """The error with what is known of the package, and the remedy."""
    if isinstance(error, Unusable):
        return error
    what = str(error) if type(error) is ImportError else f"{type(error).__name__}: {error}"
    return Unusable(f"sagellm: the package {PACKAGE} cannot be used: {what}{_missing()}", _remedy())


def _missing() -> str:
    """How many files of the installed package are missing."""
    from importlib import metadata

    try:
        files = metadata.distribution(DISTRIBUTION).files or []
        gone = [str(file) for file in files if not file.name.endswith(".pyc") and not Path(str(file.locate())).exists()]
    except Exception:  # there is no record, or it cannot be read
        return ""
    return f" (of its {len(files)} files {len(gone)} are missing, such as {gone[0]})" if gone else ""


def _remedy() -> str:
    source = Path(__file__).resolve().parent.parent
    pip = f"{sys.executable} -m pip"
    if (source / "setup.py").is_file():
        return f"build it anew: cd {source} && {pip} install --no-build-isolation --force-reinstall --no-deps -e ."
    return (
        f"install it anew: {pip} install --force-reinstall --no-deps {DISTRIBUTION}, or remove what is left of it: "
        f"{pip} uninstall {DISTRIBUTION}"
    )


def _version(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "is not installed"


def _warn(text: str) -> None:
    import warnings

    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # `python -W error`: this is not about the program's own code
        if sys.stderr is not None:
            print(text, file=sys.stderr)
