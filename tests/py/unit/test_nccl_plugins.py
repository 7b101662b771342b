"""NCCL finds its plugins in the extension module, and they work when called like NCCL calls them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

import torch_sagellm._C

MODULE = torch_sagellm._C.__file__


def pointer(symbol: str, index: int) -> int:
    """Returns the pointer at position ``index`` of the struct that the module exports as ``symbol``."""
    table = (ctypes.c_void_p * 6).in_dll(ctypes.CDLL(MODULE), symbol)
    return table[index] or 0


@pytest.mark.parametrize("symbol", ["ncclTunerPlugin_v5", "ncclTunerPlugin_v6", "ncclProfiler_v5", "ncclProfiler_v6"])
def test_the_plugins_are_exported_and_named(symbol: str) -> None:
    assert ctypes.string_at(pointer(symbol, 0)) == b"sagellm"


def test_nothing_else_is_exported() -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm of binutils is not installed")
    listed = subprocess.run(["nm", "-D", "--defined-only", MODULE], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    plugins = {"ncclTunerPlugin_v5", "ncclTunerPlugin_v6", "ncclProfiler_v5", "ncclProfiler_v6"}
    assert names == plugins | {"PyInit__C"}


def test_the_tuner_leaves_a_communicator_of_others_alone() -> None:
    void = ctypes.c_void_p
    init = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(void), ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t, void, void, void
    )(pointer("ncclTunerPlugin_v6", 1))
    ask = ctypes.CFUNCTYPE(
        ctypes.c_int, void, ctypes.c_int, ctypes.c_size_t, ctypes.c_int, void, ctypes.c_int, ctypes.c_int,
        ctypes.c_int, void,
    )(pointer("ncclTunerPlugin_v6", 2))  # fmt: skip
    finalize = ctypes.CFUNCTYPE(ctypes.c_int, void)(pointer("ncclTunerPlugin_v6", 3))
    context, channels = void(), ctypes.c_int(0)
    times = (ctypes.c_float * 21)(*range(21))
    assert init(ctypes.byref(context), 99, 8, 1, None, None, None) == 0
    assert ask(context, 4, 4096, 1, ctypes.addressof(times), 7, 3, 0, ctypes.addressof(channels)) == 0
    assert finalize(context) == 0
    assert list(times) == list(range(21)) and channels.value == 0
