"""Whether the vendors' libraries that variables name can be used, for ``torch-sagellm doctor``."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

#: The variables that name a library file.
VARIABLES = tuple(f"SAGELLM_{key}_LIBRARY" for key in ("NCCL", "CUDA", "HCCL", "HCOMM", "ACL", "CNCL", "CNRT", "UCX"))
FOLDER = "SAGELLM_VENDOR_DIR"
#: The oldest supported NCCL (src/engine/device/libs/nccl/communicator.rs; a test compares the two).
OLDEST_NCCL = 21800
#: Limit for loading a library in a separate process, so that the library cannot end or block this one.
LOAD_SECONDS = 30.0


def problems(environment: Mapping[str, str]) -> dict[str, str]:
    """What is wrong, by variable. A variable without a problem is not listed."""
    found = {}
    for variable in VARIABLES:
        path = environment.get(variable, "")
        if path and (problem := _problem(path, variable == "SAGELLM_NCCL_LIBRARY")):
            found[variable] = problem
    folder = environment.get(FOLDER, "")
    if folder and not Path(folder).is_dir():
        found[FOLDER] = "there is no such folder"
    return found


def _problem(path: str, is_nccl: bool) -> str:
    if "/" in path and not Path(path).is_file():
        return "there is no such file"
    command = [sys.executable, __file__, path, "nccl" if is_nccl else ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it did not load within {LOAD_SECONDS:g} s"
    if done.returncode != 0:
        last = (done.stdout.strip() or f"loading it ended a process with {done.returncode}").splitlines()[-1]
        return f"it cannot be loaded ({last})"
    number = done.stdout.strip()
    if is_nccl and number.isdecimal() and int(number) < OLDEST_NCCL:
        return f"it is NCCL {version(int(number))}, expected {version(OLDEST_NCCL)} or newer"
    return ""


def version(number: int) -> str:
    """NCCL's version number as text, such as "2.18.1"; before 2.9 the number had fewer digits."""
    big, small = (10000, 100) if number >= 10000 else (1000, 100)
    return f"{number // big}.{number % big // small}.{number % small}"


def _load(path: str, kind: str) -> int:
    try:
        library = ctypes.CDLL(path)
        if kind == "nccl":
            number = ctypes.c_int()
            library.ncclGetVersion(ctypes.byref(number))
            print(number.value)
    except (OSError, AttributeError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_load(sys.argv[1], sys.argv[2]))
