"""Arguments of the functions that create tensors which peers can map; `tests/py/dist` tests these tensors."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch
from harness import run_script

import torch_sagellm

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("size", [(), (0,), (3,), (2, 3), ([2, 3],), (torch.Size([4, 0, 2]),), (numpy.int64(3), 2)])
def test_shapes_and_strides_are_those_of_torch(size: tuple[Any, ...]) -> None:
    if size == ():
        size = ([],)
    for dtype in (None, torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        wanted, got = torch.empty(*size, dtype=dtype), torch_sagellm.empty(*size, dtype=dtype)
        assert (got.shape, got.stride(), got.dtype, got.device) == (
            wanted.shape,
            wanted.stride(),
            wanted.dtype,
            wanted.device,
        )
        assert torch_sagellm.is_reachable(got) == (got.numel() > 0) and not got.requires_grad
    assert torch_sagellm.zeros(*size).count_nonzero() == 0


def test_layouts_of_memory() -> None:
    last = torch_sagellm.empty(2, 3, 4, 5, memory_format=torch.channels_last)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch_sagellm.empty_like(last).stride() == last.stride()
    assert torch_sagellm.empty_like(last, memory_format=torch.contiguous_format).is_contiguous()
    matrix = torch.arange(12.0).reshape(3, 4).t()
    copy = torch_sagellm.shared(matrix)
    assert copy.stride() == matrix.stride() and torch.equal(copy, matrix)
    gaps = torch.arange(12.0)[::3]
    assert torch_sagellm.shared(gaps).is_contiguous() and torch.equal(torch_sagellm.shared(gaps), gaps)
    lazy = torch.tensor([1 + 2j]).conj()
    assert torch_sagellm.shared(lazy).resolve_conj().item() == 1 - 2j
    assert torch_sagellm.empty_like(torch.empty(3, device="meta"), dtype=torch.int8).dtype == torch.int8
    with torch.device("meta"):
        assert torch_sagellm.zeros(3).device.type == "cpu"


def test_gradients_are_asked_for_as_of_torch() -> None:
    assert torch_sagellm.empty(3, requires_grad=True).requires_grad
    assert torch_sagellm.empty_like(torch.ones(3), requires_grad=True).is_leaf
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    copy = torch_sagellm.shared(parameter)
    assert isinstance(copy, torch.nn.Parameter) and not copy.requires_grad
    inner = torch.ones(3, requires_grad=True) * 2
    copy = torch_sagellm.shared(inner)
    assert copy.is_leaf and copy.requires_grad and copy.grad_fn is None and torch.equal(copy, inner)


REFUSED: list[tuple[str, Any]] = [
    ("empty: the size is (-1,)", lambda: torch_sagellm.empty(-1)),
    ("zeros: the size is [2, -3]", lambda: torch_sagellm.zeros([2, -3])),
    ("empty: the size is 2.5,", lambda: torch_sagellm.empty(2.5)),  # type: ignore[arg-type]
    ("empty: the size is 'x'", lambda: torch_sagellm.empty("x")),  # type: ignore[arg-type]
    ("empty: the size is (True,)", lambda: torch_sagellm.empty(True)),
    ("empty: the size is ([2], 3)", lambda: torch_sagellm.empty([2], 3)),
    ("empty: the device is 'cuda'", lambda: torch_sagellm.empty(3, device="cuda")),
    ("zeros: the device is 'meta'", lambda: torch_sagellm.zeros(3, device=torch.device("meta"))),
    ("empty: the layout is torch.sparse_coo", lambda: torch_sagellm.empty(3, layout=torch.sparse_coo)),
    ("empty: dtype is 'float'", lambda: torch_sagellm.empty(3, dtype="float")),  # type: ignore[arg-type]
    ("zeros: only Tensors of floating", lambda: torch_sagellm.zeros(3, dtype=torch.int8, requires_grad=True)),
    ("empty: required rank 4", lambda: torch_sagellm.empty(3, memory_format=torch.channels_last)),
    ("empty: ", lambda: torch_sagellm.empty(2**62, 2**62)),
    (
        "shared: got a tensor of layout torch.strided on meta",
        lambda: torch_sagellm.shared(torch.empty(3, device="meta")),
    ),
    ("shared: got a tensor of layout torch.sparse_coo", lambda: torch_sagellm.shared(torch.ones(3).to_sparse())),
    ("empty_like: got a tensor of layout", lambda: torch_sagellm.empty_like(torch.ones(3).to_sparse())),
]


@pytest.mark.parametrize(("text", "call"), REFUSED, ids=[text for text, _ in REFUSED])
def test_what_cannot_be_made_is_refused_with_the_reason(text: str, call: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"sagellm {text}")):
        call()


def test_what_is_no_tensor_and_what_wraps_one_are_refused() -> None:
    for call in (torch_sagellm.shared, torch_sagellm.empty_like, torch_sagellm.is_reachable):
        with pytest.raises(TypeError, match="got a int, expected a tensor"):
            call(3)  # type: ignore[arg-type]

    class Wrapper(torch.Tensor):
        pass

    with pytest.raises(ValueError, match="got a Wrapper, expected a plain tensor"):
        torch_sagellm.shared(torch.ones(3).as_subclass(Wrapper))


def test_tensors_without_memory_are_not_reachable() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(1 << 20)
    for tensor in (fake, torch.empty(9, device="meta"), torch.ones(3).to_sparse(), torch.empty(0)):
        assert not torch_sagellm.is_reachable(tensor)


PROGRAM = """
import os, torch, torch_sagellm
torch_sagellm.shared_tensors, torch_sagellm.empty
def mappings():
    return [line for line in open("/proc/self/maps") if "memfd" in line]
torch.ones(1 << 20)
print(len(mappings()), "torch_sagellm._C" in __import__("sys").modules)
torch_sagellm.empty(3)
print(len(mappings()))
"""


def test_nothing_is_made_before_the_first_tensor() -> None:
    """Invariant 7: neither the import nor the variable allocates anything before a group or a tensor is created."""
    done = run_script(["-c", PROGRAM], env={"SAGELLM_SHARED_TENSORS": "1", "SAGELLM_SHARED_BYTES": str(1 << 24)})
    assert done.stdout.split() == ["0", "False", "1"], done.stdout + done.stderr
