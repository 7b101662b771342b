"""The module paths of older code, for programs that keep their imports.

Import ``torch_sagellm.compat`` once, before the older imports. These module names then lead to modules of this package:

- ``sage.llm.engines.sagellm.comm_backend`` and every module below it, such as ``collective_ops`` or ``topology``: our
  module with that last name if there is one, else a module with all public names;
- ``core.protocols.comm_backend``: ``torch_sagellm.protocols.comm_backend``; ``core.protocols`` has all public names;
- ``scaletorch.parallel.pg_manager``: ``ProcessGroupManager``, ``setup_process_group_manager`` and, as
  ``process_group_manager``, the manager that this function created.

They are aliases in ``sys.modules``. If a module is installed under such a name, Python finds the installed module
first. That module is not replaced; only modules that are missing below these paths are added.

Example::

    import torch_sagellm.compat

    from sage.llm.engines.sagellm.comm_backend.collective_ops import create_comm_backend
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch_sagellm

__all__ = ["install"]

#: The prefix of older code below which every module name leads to a module of ours.
COMM_BACKEND = "sage.llm.engines.sagellm.comm_backend"
#: Older module names and the module of ours for each; packages above them are empty.
MODULES = {
    COMM_BACKEND: "torch_sagellm.compat",
    f"{COMM_BACKEND}.collective_ops": "torch_sagellm.collective_ops",
    f"{COMM_BACKEND}.topology": "torch_sagellm.topology",
    "core.protocols.comm_backend": "torch_sagellm.protocols.comm_backend",
    "scaletorch.parallel.pg_manager": "torch_sagellm.parallel.pg_manager",
}
PACKAGES = {name[:at] for name in MODULES for at, letter in enumerate(name) if letter == "."}
#: The packages that have all public names; the others are empty.
WITH_NAMES = (COMM_BACKEND, "core.protocols")


class _Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder in ``sys.meta_path``: Python asks it for modules that no other finder has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        below, _, last = fullname.rpartition(".")
        if fullname in MODULES or fullname in PACKAGES or (below == COMM_BACKEND and last.isidentifier()):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname in PACKAGES)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None  # None: Python creates an empty module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        name = module.__spec__.name
        if name in PACKAGES and name not in WITH_NAMES:
            module.__doc__ = "Made by torch_sagellm.compat."
            return
        ours = MODULES.get(name, "torch_sagellm.compat")
        if ours == "torch_sagellm.compat":  # an alias without a counterpart; it serves all public names

            def public(wanted: str) -> Any:
                return torch_sagellm._public(name, wanted)

            module.__doc__ = "The public names of torch_sagellm, by torch_sagellm.compat."
            module.__getattr__ = public  # type: ignore[method-assign]
            module.__dict__["__all__"] = [each for each in torch_sagellm.__all__ if not each.startswith("_")]
            return
        sys.modules[name] = importlib.import_module(ours)


_ALIASES = _Aliases()


def install() -> None:
    """Installs the aliases; importing this module does it too. Modules that are installed under these names stay."""
    if _ALIASES not in sys.meta_path:
        sys.meta_path.append(_ALIASES)
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError:  # an installed parent module is not a package, or cannot be imported
            continue


install()
