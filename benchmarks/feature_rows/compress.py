"""Sums in fewer bytes, compared with a plain all_reduce, on one host and over links of several rates."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import torch_sagellm
from feature_rows.row import HERE, Made, Place, Row, nothing
from torch_sagellm.api import encoding


def sums(how: str) -> Callable[[], Made]:
    def make() -> Made:
        torch.manual_seed(dist.get_rank())
        tensor = torch.randn(1 << 20)
        method: object = torch_sagellm.TopK(0.01) if how == "topk" else how

        def ours() -> None:
            torch_sagellm.compressed_all_reduce(tensor.clone(), method, key=0 if how == "topk" else None)

        def plain() -> None:
            dist.all_reduce(tensor.clone())

        return ours, plain, nothing

    return make


def encode_and_decode(how: str) -> Callable[[], Made]:
    """The cost of the format on one rank: encoding numbers to bytes and decoding them."""

    def make() -> Made:
        flat, back = torch.randn(1 << 20), torch.empty(1 << 20)
        dtype = torch.float16 if how == "fp16" else torch.bfloat16

        def ours() -> None:
            if how == "int8":
                encoding.decode(encoding.encoded(flat, 256, len(flat) // 256), 256, back)
            else:
                back.copy_(flat.to(dtype))

        def plain() -> None:
            back.copy_(flat)

        ours()
        assert float((flat - back).abs().max()) <= float(flat.abs().max()) / 127
        return ours, plain, nothing

    return make


RATES = ("", "10gbit", "5gbit", "2gbit", "1gbit", "300mbit", "100mbit")
PLACES = [HERE, Place(2, 2), *(Place(4, 2, rate=rate) for rate in RATES)]
#: "auto" should cost nothing anywhere; the formats should be faster than a plain all_reduce. On one host they cannot
#: be faster, so the rows below limit what the encoding costs there.
ROWS = [
    Row("compress", f"{how}, 4 MiB", "plain all_reduce", place, 1.05 if how == "auto" else 1.0, sums(how))
    for place in PLACES
    for how in ("auto", "fp16", "bf16", "int8", "topk")
]
ROWS += [
    Row("compress", f"{how}, encode and decode 4 MiB", "a copy of the tensor", HERE, 2.0, encode_and_decode(how))
    for how in ("fp16", "bf16", "int8")
]
