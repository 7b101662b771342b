"""The libraries themselves: their names, their forms, and the functions that they lack."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import build
import pytest
from ranks import Library

#: The vendors' file names, which a simulator must never have.
REAL = {"libnccl.so.2", "libcuda.so.1", "libhccl.so", "libhcomm.so", "libascendcl.so", "libcncl.so.1", "libcnrt.so"}


def exported(path: Path) -> set[str]:
    table = subprocess.run(["nm", "-D", "--defined-only", str(path)], check=True, capture_output=True, text=True)
    return {line.split()[-1] for line in table.stdout.splitlines()}


def test_no_library_has_a_real_name() -> None:
    for name, path in build.build().items():
        assert path.name.startswith("libsagellm_sim_") and path.name not in REAL, name
        if name == "core":
            # The core contains the project's crate, and with it the plugins that the crate offers to NCCL.
            plugins = {f"nccl{kind}_v{version}" for kind in ("TunerPlugin", "Profiler") for version in (5, 6)}
            assert all(symbol.startswith("sim_") for symbol in exported(path) - plugins)
            continue
        dynamic = subprocess.run(["readelf", "-d", str(path)], check=True, capture_output=True, text=True).stdout
        assert f"soname: [{path.name}]" in dynamic
        assert exported(path) and not any(symbol.startswith("sim_") for symbol in exported(path))


def test_the_operators_are_linked_to_the_library_of_communicators() -> None:
    libraries = build.build()
    operators, management = exported(libraries["hccl_two"]), exported(libraries["hcomm"])
    assert operators | management == exported(libraries["hccl"]) and not operators & management
    assert {"HcclAllReduce", "HcclBatchSendRecv"} < operators
    assert {"HcclGroupStart", "HcclGroupEnd", "HcclCommDestroy"} < management
    # The handle of the first library also finds names of the second.
    script = f"import ctypes; ctypes.CDLL({str(libraries['hccl_two'])!r}).HcclCommDestroy; print('found')"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert found.stdout == "found\n", found.stderr


@pytest.mark.parametrize(
    ("form", "missing", "there"),
    [
        ("nccl_bare", ["ncclCommSplit", "ncclCommShrink", "ncclCommAbort", "ncclAlltoAll"], "ncclReduceScatter"),
        (
            "hccl_bare",
            ["HcclAllGatherV", "HcclReduceScatterV", "HcclGroupStart", "HcclCreateSubCommConfig"],
            "HcclSend",
        ),
        ("hccl_bare", ["HcclGetCommConfigCapability", "HcclCommInitRootInfoConfig"], "HcclCommInitRootInfo"),
        ("cncl_bare", ["cnclAbortComm", "cnclAlltoAllv", "cnclGetCommAsyncError"], "cnclBcast"),
        ("acl_bare", ["aclrtCreateEventExWithFlag", "aclrtLaunchHostFunc"], "aclrtCreateEvent"),
    ],
)
def test_what_a_bare_form_lacks_is_missing(form: str, missing: list[str], there: str) -> None:
    library = Library(build.build()[form])
    assert library.has(there)
    assert not any(library.has(name) for name in missing)


def test_any_name_can_be_left_out() -> None:
    library = Library(build.without("cncl", "^cnclSend$|Group"))
    assert library.has("cnclRecv") and library.has("cnclAllReduce")
    assert not library.has("cnclSend") and not library.has("cnclGroupStart")


def test_a_second_build_does_nothing() -> None:
    before = {path: path.stat().st_mtime_ns for path in build.build().values()}
    time.sleep(0.01)
    command = [sys.executable, build.__file__]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [process.communicate(timeout=120)[0].splitlines() for process in both]
    assert lines[0] == lines[1] == [f"{name}\t{path}" for name, path in build.build().items()]
    assert before == {path: path.stat().st_mtime_ns for path in before}
