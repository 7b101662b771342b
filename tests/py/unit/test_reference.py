"""Every public name is in the API reference that `make docs` builds and in docs/api.md, and has a docstring."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torch_sagellm

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    """The script of `make docs`. It imports the tools that build the site only when it needs them."""
    path = str(ROOT / ".ci" / "docs")
    loader = importlib.machinery.SourceFileLoader("sagellm_docs", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("sagellm_docs", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference_once(docs: ModuleType) -> None:
    page = docs.reference()
    asked = re.findall(r"^::: torch_sagellm\.([\w.]+)$", page, re.M)
    assert sorted(name.rpartition(".")[2] for name in asked) == sorted(set(torch_sagellm.__all__) - {"__version__"})
    assert "version" in page
    for name in asked:
        home, _, last = name.rpartition(".")
        assert getattr(importlib.import_module(f"torch_sagellm.{home}"), last) is getattr(torch_sagellm, last), name


def test_every_public_name_stands_on_the_page_that_introduces_the_api() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in torch_sagellm.__all__ if not re.search(rf"\b{name}\b", page) and name != "__version__"]
    assert not missing, f"docs/api.md does not name {', '.join(missing)}"


def undocumented(name: str, found: Any) -> list[str]:
    """Returns the name if it has no docstring, and those public members of a class that have none."""
    missing = [] if inspect.getdoc(found) else [name]
    if inspect.isclass(found) and found.__module__.startswith("torch_sagellm"):
        for each, member in vars(found).items():
            function = inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)
            if function and not each.startswith("_") and not inspect.getdoc(getattr(found, each)):
                missing.append(f"{name}.{each}")
    return missing


def test_every_public_name_has_a_docstring() -> None:
    names = [name for name in torch_sagellm.__all__ if name not in ("Options", "__version__")]
    missing = [each for name in names for each in undocumented(name, getattr(torch_sagellm, name))]
    assert not missing, f"without a docstring: {', '.join(missing)}"


#: Names without an example: a string, and a class of the extension whose docstring is one line (docs/api.md has its
#: example).
WITHOUT_EXAMPLE = {"__version__", "Options"}


def test_every_function_and_class_that_a_program_calls_shows_an_example() -> None:
    """`tests/py/dist/test_docs.py` runs these examples, except those that it lists with a reason."""
    asked = [name for name in torch_sagellm.__all__ if name not in WITHOUT_EXAMPLE]
    missing = [
        name for name in asked if "Example::\n\n    " not in (inspect.getdoc(getattr(torch_sagellm, name)) or "")
    ]
    assert not missing, f"without an example: {', '.join(missing)}"
