"""The expected result of a reduction, bit for bit: one thread combines every rank's input in rank order.

Low precision is converted to float32, combined there and rounded once. Integers wrap. AVG divides the sum once and
truncates integers towards zero. PREMUL_SUM first multiplies each rank's numbers by that rank's factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
REDUCIBLE = [*FLOATS, *SIGNED, *UNSIGNED, torch.bool]
MOVABLE = [*REDUCIBLE, *COMPLEX, *FLOAT8]
GLOO_REDUCIBLE = [*FLOATS, torch.int8, torch.int32, torch.int64, torch.uint8]

FLOAT_OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
INT_OPS = [*FLOAT_OPS, "BAND", "BOR", "BXOR"]
BOOL_OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def ops_of(dtype: torch.dtype) -> list[str]:
    """Returns the reduce ops that are defined for a dtype, without PREMUL_SUM."""
    if dtype.is_complex:
        return ["SUM", "AVG"]
    if dtype.is_floating_point:
        return FLOAT_OPS
    return BOOL_OPS if dtype == torch.bool else INT_OPS


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor in logical order, so that a comparison also sees NaN and signed zero."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def same_bits(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Fails unless shape, dtype and every bit agree; the error names the first elements that differ."""
    assert found.dtype == expected.dtype, f"{what}: dtype {found.dtype}, expected {expected.dtype}"
    assert tuple(found.shape) == tuple(expected.shape), f"{what}: shape {found.shape}, expected {expected.shape}"
    left, right = bits(found), bits(expected)
    if not torch.equal(left, right):
        size = found.element_size()
        where = [int(i) // size for i in (left != right).nonzero().reshape(-1)[:5]]
        raise AssertionError(
            f"{what}: {int((left != right).sum())} bytes differ of {left.numel()}, first at elements {where}"
        )


def make(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Returns `count` elements that depend only on `seed`, over the dtype's range but without NaN or infinity."""
    rng = np.random.default_rng(seed + 1)
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, count).astype(bool))
    if dtype.is_complex:
        parts = make(torch.float32 if dtype == torch.complex64 else torch.float64, 2 * count, seed)
        return torch.view_as_complex(parts.reshape(count, 2))
    if dtype in FLOAT8:
        exact = torch.from_numpy(rng.integers(-8, 9, count).astype(np.float32))
        return exact.to(dtype)
    if dtype.is_floating_point:
        return torch.from_numpy(rng.standard_normal(count) * 3).to(dtype)
    info = torch.iinfo(dtype)
    plain = rng.integers(info.min, info.max, count, dtype=numpy_of(dtype), endpoint=True)
    return torch.from_numpy(plain)


def numpy_of(dtype: torch.dtype) -> type:
    """numpy's integer type of the same name."""
    return getattr(np, str(dtype).removeprefix("torch."))


def fold(op: str, inputs: Sequence[torch.Tensor], factors: Sequence[float] | None = None) -> torch.Tensor:
    """Reduces the inputs of all ranks in rank order."""
    first = inputs[0]
    if first.dtype.is_complex:
        parts = [torch.view_as_real(each) for each in inputs]
        return torch.view_as_complex(fold(op, parts, factors))
    if first.dtype.is_floating_point:
        return _fold_floats(op, inputs, factors)
    if first.dtype == torch.bool:
        return _fold_bools(op, inputs)
    return _fold_integers(op, [each.contiguous().numpy() for each in inputs], factors)


def _fold_floats(op: str, inputs: Sequence[torch.Tensor], factors: Sequence[float] | None) -> torch.Tensor:
    dtype = inputs[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = [each.to(wide).contiguous().numpy() for each in inputs]
    if op == "PREMUL_SUM":
        assert factors is not None
        numbers = [each * each.dtype.type(factor) for each, factor in zip(numbers, factors, strict=True)]
    total = numbers[0].copy()
    for each in numbers[1:]:
        if op in ("SUM", "AVG", "PREMUL_SUM"):
            total = total + each
        elif op == "PRODUCT":
            total = total * each
        else:
            total = np.minimum(total, each) if op == "MIN" else np.maximum(total, each)
    if op == "AVG":
        total = total / total.dtype.type(len(inputs))
    return torch.from_numpy(np.ascontiguousarray(total)).to(dtype).reshape(inputs[0].shape)


def _fold_bools(op: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    total = inputs[0].clone()
    for each in inputs[1:]:
        if op in ("SUM", "MAX", "BOR"):
            total |= each
        elif op == "BXOR":
            total ^= each
        else:
            total &= each
    return total


def _fold_integers(op: str, numbers: Sequence[np.ndarray], factors: Sequence[float] | None) -> torch.Tensor:
    if op == "PREMUL_SUM":
        assert factors is not None
        with np.errstate(over="ignore"):
            numbers = [each * each.dtype.type(factor) for each, factor in zip(numbers, factors, strict=True)]
    total = numbers[0].copy()
    with np.errstate(over="ignore"):
        for each in numbers[1:]:
            if op in ("SUM", "AVG", "PREMUL_SUM"):
                total = total + each
            elif op == "PRODUCT":
                total = total * each
            elif op == "MIN":
                total = np.minimum(total, each)
            elif op == "MAX":
                total = np.maximum(total, each)
            elif op == "BAND":
                total = total & each
            elif op == "BOR":
                total = total | each
            else:
                total = total ^ each
    if op == "AVG":
        ranks = len(numbers)
        whole, rest = np.divmod(total, total.dtype.type(ranks))
        total = np.where((rest != 0) & (total < 0), whole + 1, whole).astype(total.dtype)
    return torch.from_numpy(np.ascontiguousarray(total))
