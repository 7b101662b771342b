"""The return types that public functions and methods declare."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_sagellm
from torch_sagellm.api.arguments import Seconds

pytestmark = pytest.mark.quick

#: Names in annotations that modules import only for type checkers.
NAMES = {
    "torch": torch,
    "dist": torch.distributed,
    "Seconds": Seconds,
    "AllReduceOperator": torch_sagellm.AllReduceOperator,
    "CommBackend": torch_sagellm.CommBackend,
    "CommListFuture": torch_sagellm.CommListFuture,
    "CommBackendProtocol": torch_sagellm.CommBackendProtocol,
    "DeviceMesh": torch.distributed.device_mesh.DeviceMesh,
}
#: Functions that may return anything, and why.
ANYTHING = {"monitor_communication.__call__": "returns what the decorated function returns"}


def public_calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields every exported function, and every public method and property of the exported classes."""
    for name in torch_sagellm.__all__:
        found = getattr(torch_sagellm, name)
        if inspect.isfunction(found):
            yield name, found
        if not inspect.isclass(found):
            continue
        for owner in (each for each in found.__mro__ if each.__module__.startswith("torch_sagellm.")):
            for member, value in vars(owner).items():
                if member.startswith("_") and member not in ("__call__", "__enter__"):
                    continue
                if isinstance(value, property):
                    value = value.fget
                elif isinstance(value, functools.cached_property):
                    value = value.func
                elif isinstance(value, classmethod | staticmethod):
                    value = value.__func__
                if inspect.isfunction(value):
                    yield f"{owner.__name__}.{member}", value


def returned(function: Callable[..., Any]) -> Any:
    return typing.get_type_hints(function, localns=NAMES)["return"]


def test_every_public_function_says_what_it_returns() -> None:
    found = {name: returned(function) for name, function in public_calls()}
    assert len(found) > 120 and "CommBackend.all_reduce" in found and "ProcessGroupManager.mesh" in found
    assert {name for name, result in found.items() if result is Any} == set(ANYTHING)


def classes(annotation: Any) -> Iterator[type]:
    """Yields the classes of this package that an annotation contains."""
    if inspect.isclass(annotation) and annotation.__module__.startswith("torch_sagellm."):
        yield annotation
    for part in typing.get_args(annotation):
        yield from classes(part)


def test_the_classes_of_what_a_program_is_given_are_exported() -> None:
    """Checks the return types of public calls and the fields of exported classes."""
    given = [(name, returned(function)) for name, function in public_calls()]
    for name in torch_sagellm.__all__:
        found = getattr(torch_sagellm, name)
        if (
            inspect.isclass(found)
            and found.__module__.startswith("torch_sagellm.")
            and found is not torch_sagellm.Options
        ):
            given += [(f"{name}.{field}", hint) for field, hint in typing.get_type_hints(found, localns=NAMES).items()]
    exported = {id(getattr(torch_sagellm, name)) for name in torch_sagellm.__all__}
    hidden = [(name, each.__name__) for name, hint in given for each in classes(hint) if id(each) not in exported]
    assert not hidden


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads came with Python 3.11")
def test_a_call_that_may_be_asynchronous_returns_a_tensor_or_a_future_by_its_argument() -> None:
    seen = set()
    for name, function in vars(torch_sagellm.CommBackend).items():
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        if "async_op" not in inspect.signature(function).parameters:
            continue
        seen.add(name)
        hints = [typing.get_type_hints(each) for each in typing.get_overloads(function)]
        by_argument = {each["async_op"]: each["return"] for each in hints}
        result, future = (
            (list[torch.Tensor], torch_sagellm.CommListFuture)
            if name == "fused_all_reduce"
            else (torch.Tensor, torch_sagellm.CommFuture)
        )
        assert by_argument == {
            typing.Literal[False]: result,
            typing.Literal[True]: future,
            bool: result | future,
        }, name
    collectives = {"all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "scatter", "all_to_all"}
    assert seen == {*collectives, "fused_all_reduce"}
