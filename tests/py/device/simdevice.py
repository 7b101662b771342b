"""A device for tests under any name: builds and loads `simulators/device/device.cpp`, and provides the module
`torch.<name>`.

`install("npu")` makes `torch.device("npu")` work in this process. Its streams are asynchronous, its kernels slow, and
its allocator reuses freed memory immediately; see the head of that file. The library is built once for each torch and
kept next to the project's other build outputs.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).resolve().parents[2] / "simulators" / "device"
KEPT = Path(__file__).resolve().parents[3] / "build" / "tests"
BUILD_SECONDS = 300


def build(name: str, source: Path, *more: Path, libraries: tuple[str, ...] = ("c10", "torch_cpu")) -> Path:
    """Compiles one file against the headers of torch, unless it is already built; `more` are files that it includes."""
    torch_home = Path(torch.__file__).parent
    standard = "c++20" if torch.__version__ >= "2.12" else "c++17"
    digest = hashlib.sha256(torch.__version__.encode() + sys.version.encode())
    for path in (source, *more):
        digest.update(path.read_bytes())
    library = KEPT / f"{name}-{digest.hexdigest()[:16]}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(KEPT / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(f".{os.getpid()}")
            command = [os.environ.get("CXX", "g++"), f"-std={standard}", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra"]
            command += ["-Wno-unused-parameter", f"-I{torch_home / 'include'}", str(source), "-o", str(unfinished)]
            command += [f"-L{torch_home / 'lib'}", *(f"-l{each}" for each in libraries)]
            done = subprocess.run(command, text=True, capture_output=True, timeout=BUILD_SECONDS)
            assert done.returncode == 0, f"{source} does not compile\n{done.stderr[-4000:]}"
            unfinished.rename(library)
    return library


def library_path() -> Path:
    """Returns the path of the device's library, which is built if necessary."""
    return build("simdevice", SOURCES / "device.cpp", SOURCES / "runtime.hpp")


class Device:
    """The controls of the device in this process."""

    def __init__(self, name: str, library: ctypes.CDLL) -> None:
        self.name = name
        self.library = library
        library.sim_use_library.restype = library.sim_synchronize.restype = ctypes.c_char_p
        library.sim_kernels.restype = ctypes.c_int64
        library.sim_blocks.restype = ctypes.c_int64
        for setter in (library.sim_set_kernel_delay, library.sim_set_host_delay, library.sim_limit_blocks):
            setter.argtypes = [ctypes.c_int64]

    def kernel_delay(self, seconds: float) -> None:
        """Sets the time that each kernel sleeps before it runs."""
        self.library.sim_set_kernel_delay(int(seconds * 1e6))

    def host_queue(self, seconds: float | None) -> None:
        """Puts a queue on the host in front of the streams; it delays each entry by `seconds`. None: no queue."""
        self.library.sim_set_host_delay(-1 if seconds is None else int(seconds * 1e6))

    def native_handles(self, on: bool) -> None:
        """Sets whether torch's streams return their raw handle."""
        self.library.sim_set_native_handles(int(on))

    def lazy_kernels(self, on: bool = True) -> None:
        """Makes the next launch of each of torch's kernels load the kernel. Loading waits until the device is idle."""
        self.library.sim_set_lazy_kernels(int(on))

    def use_library(self, path: str | Path, flavour: str) -> None:
        """Uses a simulated vendor's streams and events ("acl", "cnrt", "cuda"). Call it before the first use."""
        checked(self.library.sim_use_library(str(path).encode(), flavour.encode()))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block no kernel of torch starts. A library's call that is enqueued inside the block, on the stream
        that is current at its beginning, does not start either. A wait for such work never ends inside the block. Calls
        of a library that were enqueued before may run."""
        self.library.sim_hold(1)
        try:
            yield
        finally:
            self.library.sim_hold(0)

    @staticmethod
    def can_capture() -> bool:
        """Returns whether this version of torch asks the device whether a stream is being captured."""
        header = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
        return "isStreamCapturing" in header.read_text()

    @contextmanager
    def capturing(self, told: bool = True) -> Iterator[None]:
        """Within the block the streams are being captured into a graph. If `told`, torch's part of the device reports
        the capture; otherwise only the runtime does."""
        self.library.sim_set_capturing(1, int(told))
        try:
            yield
        finally:
            self.library.sim_set_capturing(0, 1)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Within the block the device has no memory left."""
        self.library.sim_limit_blocks(0)
        try:
            yield
        finally:
            self.library.sim_limit_blocks(2**62)

    def blocks(self) -> int:
        """Returns the number of allocations of device memory that are in use."""
        return int(self.library.sim_blocks())

    def kernels(self) -> int:
        """Returns the number of kernels launched so far."""
        return int(self.library.sim_kernels())


def checked(why: bytes | None) -> None:
    """Raises the error that a function of the library reports."""
    if why:
        raise RuntimeError(why.decode())


#: Whether `torch.accelerator.synchronize` waits for a device that is not torch's own; that of torch 2.11 returns
#: immediately.
WAITS = not torch.__version__.startswith("2.11.")
_installed: Device | None = None


def install(name: str = "simdev") -> Device:
    """Registers the device with torch under `name`; once per process."""
    global _installed
    if _installed is not None:
        assert _installed.name == name, f"this process has the device as {_installed.name}"
        return _installed
    library = ctypes.CDLL(str(library_path()))
    _installed = Device(name, library)
    torch.utils.rename_privateuse1_backend(name)
    module = _module(name, library)
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])
    if not WAITS:
        torch.accelerator.synchronize = module.synchronize
    return _installed


def _module(name: str, library: ctypes.CDLL) -> Any:
    """`torch.<name>`: the functions of a device's module that torch.distributed, DDP and autograd call."""
    module: Any = types.ModuleType(f"torch.{name}")

    def index(device: Any = None) -> int:
        if device is None:
            return int(library.sim_current_device())
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return int(library.sim_current_device()) if found is None else found

    class device:
        """A context manager that makes a device current."""

        def __init__(self, which: Any) -> None:
            self.index = index(which)

        def __enter__(self) -> None:
            self.before = index()
            library.sim_set_device(self.index)

        def __exit__(self, *error: object) -> None:
            library.sim_set_device(self.before)

    # Some code of torch checks for exactly its own classes, so these functions create objects of those classes.
    def stream(device: Any = None, **options: Any) -> torch.Stream:
        """Returns a stream of this device."""
        return torch.Stream(device=torch.device(name, index(device)), **options)

    def event(**options: Any) -> torch.Event:
        """Returns an event of this device."""
        return torch.Event(torch.device(name), **options)

    module.device = device
    module.Stream = stream
    module.Event = event
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: int(library.sim_device_count())
    module.current_device = index
    module.set_device = lambda which: library.sim_set_device(index(which))
    module.synchronize = lambda which=None: checked(library.sim_synchronize(index(which)))
    module.current_stream = lambda which=None: torch.accelerator.current_stream(index(which))
    module.set_stream = lambda stream: torch.accelerator.set_stream(stream)
    module.stream = lambda stream: stream
    module.manual_seed_all = lambda seed: None
    module.manual_seed = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
