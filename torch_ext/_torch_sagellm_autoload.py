"""The only module of ours that torch loads in every process that imports torch; entry points of pyproject.toml name it.

It must therefore do no harm. It is outside the package and needs only the standard library. It executes nothing of the
package before a group of ours is created, unless ``SAGELLM_AS`` is set. A defect of the package or its variables does
not break ``import torch``. The defect's error is raised only when a group is created whose backend is this package, or
the one that ``SAGELLM_AS`` names. If the error is known earlier, one warning reports it.
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
#: The variable that names a backend of torch whose groups this package serves, and its valid values; see
#: docs/programs.md.
AS = "SAGELLM_AS"
SERVED = ("gloo",)
#: Name of torch's coalescing manager, a function in torch.distributed and distributed_c10d.
MANAGER = "_coalescing_manager"

#: The process that imported torch. In a child that it forked, ``os.getpid()`` differs.
PROCESS = os.getpid()

_problem: Exception | None = None


class Unusable(ImportError):
    """The package, or its extension, cannot be used. The text says what is wrong and how to repair it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}. {fix[0].upper()}{fix[1:]}")
        self.what, self.fix = what, fix


class Devices(list[str]):
    """The types of device that ``init_process_group("sagellm")`` serves: the CPU, and this process's accelerator.

    torch asks for them when a group is created, and each time they are computed anew. A vendor's package that is
    imported after torch may register its device only after this backend was registered.
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

    Only the first call has an effect. This function raises an error only if torch is not installed, which cannot happen
    if torch itself calls it.
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
    """Creates the backend of one group. torch calls it; the package's `register.create` does the work."""
    if _problem is not None:
        raise _problem.with_traceback(None)
    try:
        return package("_private.register").create(options, pg_options)
    except (ImportError, SyntaxError) as error:
        raise _explained(error) from error


def package(module: str) -> Any:
    """Imports a module of the package; ``Unusable`` says why it cannot be imported."""
    import importlib

    try:
        _look_at_package()
        return importlib.import_module(f"{PACKAGE}.{module}")
    # A package that is not ours may raise anything while it is imported.
    except (Exception, SystemExit) as error:
        raise _explained(error) from error


def look() -> None:
    """For ``info`` and ``doctor``: raises the error of the package, if it is known before a group is created."""
    if _problem is not None:
        raise _problem.with_traceback(None)
    package("_private.register")
    missing = _missing()
    if missing:
        raise Unusable(f"sagellm: the package {PACKAGE} is not whole{missing}", _remedy())


def main() -> int:
    """The command ``torch-sagellm``: runs the package's command, or prints why the package cannot be used."""
    try:
        run = package("cli.main").main
    except Unusable as error:
        print(error, file=sys.stderr)
        print(f"python {sys.version.split()[0]} ({sys.executable}), torch {_version('torch')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # Ctrl-C while Python loads the program
        return 130
    code: int = run()
    return code


def _register() -> None:
    # Imported here and not above, because this may run in the middle of `import torch`.
    from torch import distributed

    if not distributed.is_available():
        return
    backend: Any = distributed.Backend
    if NAME.upper() in backend._plugins:
        return
    # Registered for the CPU only, so that sagellm never becomes the default of an accelerator without a backend ...
    backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    # ... but a group that names sagellm is also served on accelerators.
    backend.backend_capability[NAME] = Devices()
    # Done as early as possible, before a program imports torch's own function by name.
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
    """Makes groups of the backend ``name`` raise the error of the package.

    Other ranks may have created such a group with our backend, and a group of torch's own would wait for them in vain.
    Before torch 2.15 the table of creators has no entry for torch's own backends, so there the groups are torch's own.
    """
    if hasattr(backend, "_ensure_backend_registered"):
        backend._ensure_backend_registered(name)
    if name.upper() in backend._plugins:
        backend._plugins[name.upper()] = backend._BackendPlugin(create, True)


def _replace_manager() -> None:
    """Replaces torch's coalescing manager by one in which an exception ends the region; see ``_private.regions``."""
    from functools import wraps

    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    theirs: Any = getattr(c10d, MANAGER, None)
    if theirs is None or hasattr(theirs, "_sagellm"):
        return

    @wraps(theirs)
    def manager(*args: Any, **named: Any) -> Any:
        # If this module is not loaded, no group of ours exists.
        regions: Any = sys.modules.get(f"{PACKAGE}._private.regions")
        return theirs(*args, **named) if regions is None else regions.manager(theirs, *args, **named)

    manager._sagellm = True  # type: ignore[attr-defined]
    for module in (c10d, distributed):
        if getattr(module, MANAGER, None) is theirs:
            setattr(module, MANAGER, manager)


def _look_at_package() -> None:
    """Raises an ImportError if the package is not ours, before anything of it is executed."""
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
    """The other distribution that has overwritten our package's file, as text; "" if none is found."""
    from importlib import metadata

    for each in metadata.distributions():
        name = each.metadata["Name"]
        if name != DISTRIBUTION and any(str(file) == f"{PACKAGE}/__init__.py" for file in each.files or []):
            return f", which {name} {each.version} has installed"
    return ""


def _explained(error: BaseException) -> Unusable:
    """Converts an error to one whose text adds what is known of the package, and the remedy."""
    if isinstance(error, Unusable):
        return error
    what = str(error) if type(error) is ImportError else f"{type(error).__name__}: {error}"
    return Unusable(f"sagellm: the package {PACKAGE} cannot be used: {what}{_missing()}", _remedy())


def _missing() -> str:
    """A text with the number of missing files of the installed package; "" if none is missing."""
    from importlib import metadata

    try:
        found = metadata.distribution(DISTRIBUTION)
        if found.read_text("RECORD") is None:  # the metadata of a checkout list its sources, not installed files
            return ""
        files = found.files or []
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
    except RuntimeWarning:  # `python -W error` makes the warning raise, but the program's own code did not cause it
        if sys.stderr is not None:
            print(text, file=sys.stderr)
