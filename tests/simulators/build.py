#!/usr/bin/env python3
"""Builds the ABI simulators once and says where they are: one line ``name<TAB>path`` for each library.

Python tests call :func:`build`, Rust tests run this file (``tests/it/common/simulators.rs``). Several tests may call it
at the same time: the first one builds, and the others wait. If no source has changed, the call takes milliseconds.

Cargo builds the core, ``libsagellm_sim_core.so``, which exports ``sim_<vendor's name>``. Every library that a test
opens is a list of jumps to the core, made by the assembler, so a form with fewer names needs no compilation. All
libraries share the core next to them, so each knows the streams of the others.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CORE = "libsagellm_sim_core.so"
#: By processor: how a name jumps to the core. Registers and stack keep the arguments unchanged.
JUMPS = {
    "x86_64": "jmp *sim_{name}@GOTPCREL(%rip)",
    "aarch64": "adrp x16, :got:sim_{name}\n    ldr x16, [x16, :got_lo12:sim_{name}]\n    br x16",
}


@dataclass(frozen=True)
class Form:
    """One library: the names in ``sources`` except those that match ``without``, with ``needs`` linked to it."""

    library: str
    sources: tuple[str, ...]
    without: str = "$^"
    needs: tuple[str, ...] = ()


HCCL = ("hccl/operators.rs", "hccl/management.rs")
#: The forms by name, which is also the name of the form's folder below the output.
FORMS = {
    "cuda": Form("libsagellm_sim_cuda.so", ("cuda.rs", "extra.rs")),
    "nccl": Form("libsagellm_sim_nccl.so", ("nccl.rs", "nccl/collectives.rs")),
    # Like an NCCL that is older than split, shrink, configurations and the newer collectives.
    "nccl_bare": Form(
        "libsagellm_sim_nccl.so",
        ("nccl.rs", "nccl/collectives.rs"),
        "Split|Shrink|Config|Finalize|Gather$|Scatter$|AlltoAll|PreMulSum|RedOpDestroy|Register|Mem|LastError|Abort|Async",
    ),
    "acl": Form("libsagellm_sim_ascendcl.so", ("acl.rs", "extra.rs")),
    # Like an AscendCL without reusable events and without host functions.
    "acl_bare": Form(
        "libsagellm_sim_ascendcl.so",
        ("acl.rs", "extra.rs"),
        "EventEx|WithConfig|LaunchHostFunc|WithTimeout|Abort|Capture",
    ),
    "hccl": Form("libsagellm_sim_hccl.so", HCCL),
    "hcomm": Form("libsagellm_sim_hcomm.so", HCCL[1:]),
    # The form of CANN 9: operators are in this library, everything else is in the library that it is linked to.
    "hccl_two": Form("libsagellm_sim_hccl.so", HCCL[:1], needs=("hcomm",)),
    "hccl_bare": Form(
        "libsagellm_sim_hccl.so",
        HCCL,
        "ScatterV|GatherV|AlltoAllVC|Group|Capability|SubComm|Config|CommName|AsyncError|BatchSendRecv|Barrier",
    ),
    "cncl": Form("libsagellm_sim_cncl.so", ("cncl.rs",)),
    "cncl_bare": Form("libsagellm_sim_cncl.so", ("cncl.rs",), "Abort|AlltoAll|Async|CommConfig|Broadcast"),
    "cnrt": Form("libsagellm_sim_cnrt.so", ("cnrt.rs", "extra.rs")),
}
#: The gathers and scatters that every version of NCCL has; the pattern of a form must not remove them.
ALWAYS = {"ncclAllGather", "ncclReduceScatter"}


def target() -> Path:
    """The folder of everything that is built here."""
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute() / "simulators"


def names(sources: Iterable[str]) -> list[str]:
    """The vendor's names of the functions that these files export."""
    found: list[str] = []
    for source in sources:
        found += re.findall(r'extern "C" fn sim_(\w+)', (HERE / "src" / source).read_text())
    return found


def fingerprint() -> str:
    """A hash that changes if a source changes."""
    files = [*HERE.glob("src/**/*.rs"), *ROOT.glob("src/**/*.rs"), HERE / "Cargo.toml", HERE / "Cargo.lock"]
    files += [ROOT / "Cargo.toml", Path(__file__).resolve()]
    states = ((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(files))
    return hashlib.sha256(repr(list(states)).encode()).hexdigest()


def run(command: list[str], what: str) -> None:
    """Runs a compiler; its output is shown only if it fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if result.returncode != 0:
        raise RuntimeError(f"{what} failed:\n{' '.join(command)}\n{result.stdout[-8000:]}")


def build_core(output: Path) -> None:
    """Builds the core with Cargo. Replaces the library as a whole, because another process may have the old one
    open."""
    cargo = shutil.which("cargo") or str(Path.home() / ".cargo" / "bin" / "cargo")
    folder = target() / "cargo"
    command = [cargo, "build", "--quiet", "--locked", "--manifest-path", str(HERE / "Cargo.toml")]
    run([*command, "--target-dir", str(folder)], "building the core of the simulators")
    shutil.copy2(folder / "debug" / CORE, output / (CORE + ".new"))
    os.replace(output / (CORE + ".new"), output / CORE)


def link(output: Path, name: str, form: Form, built: dict[str, Path]) -> Path:
    """Makes one library of jumps, in its own folder below ``output``."""
    machine = platform.machine()
    if machine not in JUMPS:
        raise RuntimeError(f"simulators are built for {', '.join(JUMPS)}, not for {machine}")
    kept = [entry for entry in names(form.sources) if entry in ALWAYS or not re.search(form.without, entry)]
    text = "".join(
        f"    .globl {entry}\n    .type {entry}, %function\n{entry}:\n    {JUMPS[machine].format(name=entry)}\n"
        f"    .size {entry}, .-{entry}\n"
        for entry in kept
    )
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "names.s", folder / form.library
    source.write_text('    .section .note.GNU-stack,"",%progbits\n    .text\n' + text)
    needs = [option for need in form.needs for option in (f"-L{built[need].parent}", f"-l:{built[need].name}")]
    paths = ":".join(["$ORIGIN/..", *(f"$ORIGIN/../{need}" for need in form.needs)])
    command = [os.environ.get("CC", "cc"), "-shared", "-nostdlib", "-o", f"{library}.new", str(source)]
    command += [f"-L{output}", "-Wl,--no-as-needed", *needs, f"-l:{CORE}"]
    run([*command, f"-Wl,-soname,{form.library}", f"-Wl,-rpath,{paths}"], f"linking {library}")
    os.replace(f"{library}.new", library)
    return library


def build(output: Path | None = None) -> dict[str, Path]:
    """Builds what has changed.

    :param output: folder of the libraries; a folder below cargo's target directory if it is not given.
    :return: path of each library by the names of :data:`FORMS`, and ``core``.
    :raises RuntimeError: with the compiler's output, if something cannot be built.
    """
    output = (output or target() / "libraries").absolute()
    output.mkdir(parents=True, exist_ok=True)
    stamp = output / "built.json"
    with open(output / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        now = fingerprint()
        if stamp.is_file():
            last = json.loads(stamp.read_text())
            if last["fingerprint"] == now and all(Path(path).is_file() for path in last["libraries"].values()):
                return {name: Path(path) for name, path in last["libraries"].items()}
        build_core(output)
        built = {"core": output / CORE}
        for name, form in FORMS.items():
            built[name] = link(output, name, form, built)
        stamp.write_text(
            json.dumps({"fingerprint": now, "libraries": {name: str(path) for name, path in built.items()}})
        )
        return built


def without(form: str, missing: str, output: Path | None = None) -> Path:
    """Makes a library like ``form``, without the names in which the expression ``missing`` matches; anew every time.

    :return: its path, in a folder that is named after what is missing.
    """
    built = build(output)
    whole = FORMS[form]
    name = f"{form}-{hashlib.sha256(missing.encode()).hexdigest()[:12]}"
    folder = built["core"].parent
    return link(folder, name, Form(whole.library, whole.sources, f"{whole.without}|{missing}", whole.needs), built)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder of the libraries")
    parser.add_argument("--without", nargs=2, metavar=("FORM", "REGEX"), help="one more library, with fewer names")
    arguments = parser.parse_args()
    try:
        built = build(arguments.output)
        if arguments.without:
            form, missing = arguments.without
            built["without"] = without(form, missing, arguments.output)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    for name, path in built.items():
        print(f"{name}\t{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
