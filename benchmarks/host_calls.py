#!/usr/bin/env python3
"""Host cost of a call with a device tensor, counted on the simulators: allocations and formatted texts per call.

Counts do not depend on the load of the machine, and they need no device. There is one rank. The simulators' own
allocations are not counted, but those of torch and c10d are, so the difference between two builds is the relevant
figure.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
CALLS = 200
#: Prefixes of libraries whose allocations are not counted, because with a real device the host does not make these
#: allocations.
LEFT_OUT = ("libsagellm_sim_", "simdevice-")


def hook() -> Path:
    """The path of the counting library, which is built if needed."""
    source = HERE / "measure/counted.cpp"
    library = ROOT / "build/tests/counted.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        command = [os.environ.get("CXX", "g++"), "-O2", "-fPIC", "-shared", str(source), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True, timeout=300)
    return library


def count() -> dict[str, dict[str, float]]:
    """Runs in the process with the counting library; returns the counts by case."""
    sys.path += [str(ROOT / "tests/py"), str(ROOT / "tests/py/device")]
    import simdevice
    import torch
    import torch.distributed as dist

    import torch_sagellm

    device = simdevice.install("simcuda")
    device.use_library(os.environ["SAGELLM_TEST_RUNTIME"], "cuda")
    device.native_handles(True)
    device.kernel_delay(0.0)
    dist.init_process_group(
        "sagellm", store=dist.HashStore(), rank=0, world_size=1, pg_options=torch_sagellm.Options(vendor="nccl")
    )
    library = ctypes.CDLL(str(hook()))
    library.counted_leave_out.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5) if line.count("/") else (line.split()[0], "")
        if any(word in path for word in LEFT_OUT) and " r-x" in line:
            begin, end = (int(word, 16) for word in span.split("-"))
            library.counted_leave_out(begin, end)
    small = torch.zeros(2, device="simcuda")
    group = dist.group.WORLD
    assert group is not None

    def asynchronous() -> None:
        work = dist.all_reduce(small, async_op=True)
        assert work is not None
        work.wait()

    cases: dict[str, Callable[[], object]] = {
        "all_reduce of 8 bytes": lambda: dist.all_reduce(small),
        "the same, asynchronous, and its wait": asynchronous,
        "barrier": lambda: dist.barrier(device_ids=[0]),
    }
    found = (ctypes.c_int64 * 2)()
    result = {}
    for name, call in cases.items():
        for _ in range(20):
            call()
        torch.accelerator.synchronize("simcuda")
        library.counted_begin()
        for _ in range(CALLS):
            call()
        library.counted_end(found)
        torch.accelerator.synchronize("simcuda")
        result[name] = {"allocations": found[0] / CALLS, "texts": found[1] / CALLS}
    assert torch_sagellm.get_stats()["host_staged_count"] == 0, "the calls went through host memory"
    print(torch_sagellm._private.load.extension().__file__, file=sys.stderr)
    dist.destroy_process_group()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counting", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.counting:
        print(json.dumps(count()))
        return 0
    sys.path += [str(ROOT / "tests/py"), str(ROOT / "tests/py/device")]
    import simdevice
    import simulated

    simdevice.library_path()
    # Variables that the caller has set have priority: SAGELLM_NCCL_LIBRARY may name another build of the simulator.
    environment = simulated.environment("nccl", simulated.builder().build()) | dict(os.environ)
    environment["LD_PRELOAD"] = str(hook())
    words = [sys.executable, __file__, "--counting"]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=300)
    if done.returncode != 0:
        return done.returncode
    print("| call | allocations | texts |\n| --- | ---: | ---: |")
    for name, counts in json.loads(done.stdout.splitlines()[-1]).items():
        print(f"| {name} | {counts['allocations']:.1f} | {counts['texts']:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
