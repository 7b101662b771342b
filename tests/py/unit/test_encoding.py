"""`torch_sagellm.api.encoding`: the core's results equal the same steps in torch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_sagellm._private import load
from torch_sagellm.api import encoding

pytestmark = pytest.mark.quick

RARE = (0.0, -0.0, 1e-45, -1e-45, 3e-43, 1e-38, -2.7e-43, 3.4e38, -3.4e38)
BEYOND = (float("nan"), float("inf"), -float("inf"))


def numbers(seed: int, size: int, beyond: bool) -> Tensor:
    """Returns numbers of all magnitudes, with some blocks of denormals only. With `beyond` also infinities and NaNs."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=random) * torch.pow(10.0, torch.rand(size, generator=random) * 80 - 44)
    values[size // 3 : size // 2] *= 1e-30
    for number in RARE + (BEYOND if beyond else ()):
        places = torch.rand(size, generator=random) < (0.002 if number in BEYOND or number != number else 0.02)
        values[places] = number
    return values


def by_torch(flat: Tensor, block: int, blocks: int) -> Tensor:
    into = torch.empty(blocks * (encoding.SCALE_BYTES + block), dtype=torch.uint8)
    encoding._pack(torch.nn.functional.pad(flat, (0, blocks * block - len(flat))).view(blocks, block), into)
    return into


def bits(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)


@pytest.mark.parametrize("block", [1, 3, 64, 256, 1000])
@pytest.mark.parametrize("size", [0, 1, 2, 63, 257, 4096, 10007])
def test_the_core_encodes_as_torch_does_bit_for_bit(size: int, block: int) -> None:
    for seed, beyond in ((1, False), (2, True)):
        ranks = 3
        blocks = -(-size // block // ranks) * ranks
        every = [numbers(10 * seed + rank, size, beyond) for rank in range(ranks)]
        encoded = [encoding.encoded(each, block, blocks) for each in every]
        for each, found in zip(every, encoded, strict=True):
            assert torch.equal(found, by_torch(each, block, blocks))
            back = torch.full((size,), 7.0)
            encoding.decode(found, block, back)
            whole, scales = encoding._unpacked(found, block)
            assert torch.equal(bits(back), bits((whole * scales).view(-1)[:size]))
            fine = back.isfinite()
            m = torch.nn.functional.pad(each, (0, blocks * block - size)).view(blocks, block).abs().amax(1)
            m = m.repeat_interleave(block)[:size].double()
            # The error is at most half a step of the scale. The scale itself is rounded, coarsely if it is a denormal.
            within = (back.double() - each.double()).abs() <= m / 254 * (1 + 1e-5) + 64 * 2.0**-149
            assert (within | ~fine).all() and (fine | ~m.isfinite()).all()
        for divisor in (1, ranks):
            addends = torch.cat(encoded)
            found = encoding.summed(addends, block, ranks, divisor)
            total = torch.zeros(blocks, block)
            for each in encoded:
                whole, scales = encoding._unpacked(each, block)
                total = total + whole * (scales / divisor)
            expected = torch.empty_like(found)
            encoding._pack(total, expected)
            assert torch.equal(found, expected), (seed, divisor)


@pytest.mark.parametrize("size", [1, 7, 1000, 50001])
def test_the_core_finds_the_largest(size: int) -> None:
    for seed in range(4):
        values = numbers(seed, size, beyond=False)
        if seed == 3:
            values = values.sign()  # many elements are equal
        for count in {0, 1, size // 100, size // 2, size}:
            places = encoding.largest(values, count)
            assert places.dtype is torch.int32 and len(places) == count
            assert torch.equal(places, places.sort().values.unique()), "ascending, each once"
            expected = torch.sort(values.abs(), descending=True, stable=True)
            assert torch.equal(places.sort().values.long(), expected.indices[:count].sort().values)
    assert encoding.largest(torch.tensor([1.0, float("nan"), float("inf")]), 1).tolist() == [1]
    wide = torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64)
    assert encoding.largest(wide, 1).tolist() == [1], "by torch, as other types"


def test_only_memory_that_lies_together_is_taken() -> None:
    core = load.extension()
    encoded = torch.empty(260, dtype=torch.uint8)
    for name, call in {
        "values": lambda: core._int8_encode(torch.ones(256, 2)[:, 0], 256, encoded),
        "encoded": lambda: core._int8_encode(torch.ones(256), 256, torch.ones(260)),
        "places": lambda: core._largest(torch.ones(4), torch.zeros(2, dtype=torch.int64)),
        "addends": lambda: core._int8_sum(torch.empty(260, device="meta", dtype=torch.uint8), 256, 1, encoded),
    }.items():
        with pytest.raises(ValueError, match=f"{name} is a tensor of .* expected contiguous"):
            call()
    odd = torch.frombuffer(bytearray(4 * 256 + 1), dtype=torch.float32, offset=1)
    with pytest.raises(ValueError, match="expected contiguous float32"):
        core._int8_encode(odd, 256, encoded)
    for call in (
        lambda: core._int8_encode(torch.ones(257), 256, encoded),
        lambda: core._int8_decode(encoded, 256, torch.ones(257)),
        lambda: core._int8_decode(encoded, 255, torch.ones(2)),
        lambda: core._int8_sum(torch.empty(261, dtype=torch.uint8), 256, 1, encoded),
        lambda: core._largest(torch.ones(1), torch.zeros(2, dtype=torch.int32)),
    ):
        with pytest.raises(RuntimeError, match=r"size|whole blocks"):
            call()


def test_autograd_knows_what_was_decoded() -> None:
    """decode increases the version counter, like any change in place."""
    values = torch.ones(256)
    before = values._version
    encoding.decode(encoding.encoded(torch.ones(256), 256, 1), 256, values)
    assert values._version > before
