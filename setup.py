"""Builds the extension module ``sagellm._C``: the C++ of ``cpp/`` linked with the Rust core as a static library.

cargo runs first and leaves two things: ``libsagellm.a`` and, through cxx, the headers that ``cpp/`` includes. torch's
own extension builder then compiles the C++ with ninja, so that an edit of the Rust core costs cargo and one link. On a
machine without cargo the variable SAGELLM_PREBUILT names a folder that has both already (``make prebuilt`` writes one).
Everything about the package that is not code to build stands in ``pyproject.toml``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Command, Extension, setup

ROOT = Path(__file__).resolve().parent
SOURCE = "torch_ext"
#: Commands that compile. The others (metadata of the package) must not pay for the import of torch.
COMPILING = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}
MINIMUM_RUST = (1, 89)
#: Names a folder with what cargo would build: the library, and the folder of the generated headers.
PREBUILT = "SAGELLM_PREBUILT"
CORE = "libsagellm.a"
HEADERS = "cxxbridge"
DIGEST = "sources.sha256"
#: The first that reads the licence as pyproject.toml writes it.
MINIMUM_SETUPTOOLS = 77


def fail(message: str) -> None:
    """Ends the build with one line that names what is missing and what mends it."""
    raise SystemExit(f"sagellm: {message}")


def package_version() -> str:
    """Cargo.toml holds the one version number; the first ``version`` line in it is the package's."""
    found = re.search(r'^version = "([^"]+)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        fail("Cargo.toml has no version line")
        raise AssertionError("unreachable")
    return found.group(1)


def torch_minor() -> str:
    """The torch to build for, as ``2.15``: the c10d classes have another layout in every minor version."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        fail(
            "the build needs the torch it shall work with, and pip's isolated build environment hides it; install "
            "torch, then run: pip install --no-build-isolation ."
        )
        raise
    return ".".join(version.split("+")[0].split(".")[:2])


def cargo_target() -> Path:
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()


def core_places() -> tuple[Path, Path]:
    """Where the static library and the generated headers are, or will be."""
    given = os.environ.get(PREBUILT)
    if given:
        return Path(given).resolve() / CORE, Path(given).resolve() / HEADERS
    return cargo_target() / "release" / CORE, cargo_target() / HEADERS


def core_digest() -> str:
    """Changes with every source of the Rust core."""
    digest = hashlib.sha256()
    ours = [ROOT / "Cargo.toml", ROOT / "Cargo.lock", ROOT / "build.rs", ROOT / "cpp" / "host" / "host.hpp"]
    for path in [*ours, *sorted((ROOT / "src").rglob("*.rs"))]:
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_prebuilt(folder: Path) -> None:
    """Puts what cargo has built, and a digest of its sources, into a folder that may be carried elsewhere."""
    if os.environ.get(PREBUILT):
        fail(f"{PREBUILT} is set, so there is nothing to write; unset it")
    run_cargo()
    library, headers = core_places()
    if folder.exists() and any(folder.iterdir()) and not (folder / DIGEST).is_file():
        fail(f"{folder} holds something else than a prebuilt core; name an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    # cargo leaves the first header as a link into its own cache, which another machine lacks: links are followed.
    shutil.copytree(headers, folder / HEADERS)
    shutil.copy2(library, folder / CORE)
    (folder / DIGEST).write_text(core_digest() + "\n", encoding="utf-8")
    print(f"sagellm: {folder} is for {PREBUILT}, on a machine of this kind whose sources are these", flush=True)


def check_prebuilt() -> None:
    """Ends the build where the folder lacks something, or was made from other sources."""
    library, headers = core_places()
    digest = library.parent / DIGEST
    needed = [library, headers / "rust" / "cxx.h", headers / "sagellm" / "src" / "ffi" / "bridge.rs.h", digest]
    missing = [str(path) for path in needed if not path.is_file()]
    mend = "write it on a machine that has cargo, with: make prebuilt"
    if missing:
        fail(f"{PREBUILT}={os.environ[PREBUILT]} lacks {', '.join(missing)}; {mend}")
    if digest.read_text(encoding="utf-8").strip() != core_digest():
        fail(f"{PREBUILT}={os.environ[PREBUILT]} was made from other sources than those in {ROOT / 'src'}; {mend}")
    print(f"sagellm: the Rust core is {library}; cargo is not used", flush=True)


def run_cargo() -> None:
    """Builds the Rust core. Cargo itself decides what is out of date."""
    cargo = shutil.which("cargo")
    if cargo is None:
        home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo")) / "bin" / "cargo"
        cargo = str(home) if home.is_file() else None
    if cargo is None:
        fail("cargo is missing; install Rust with: curl https://sh.rustup.rs -sSf | sh -s -- -y")
        raise AssertionError("unreachable")
    found = re.search(r"(\d+)\.(\d+)", subprocess.run([cargo, "--version"], text=True, capture_output=True).stdout)
    if found is None or (int(found.group(1)), int(found.group(2))) < MINIMUM_RUST:
        wanted = ".".join(map(str, MINIMUM_RUST))
        fail(f"{cargo} is older than {wanted} or does not run; update Rust with: rustup update stable")
    command = [cargo, "build", "--release", "--features", "torch", "--lib"]
    if os.environ.get("MAX_JOBS"):
        command += ["-j", os.environ["MAX_JOBS"]]
    print("sagellm:", " ".join(command), flush=True)
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        fail("the Rust core did not build; cargo's message is above")


def extension() -> Extension:
    """What torch's builder needs, except the paths of torch, which are added once torch is imported."""
    library, headers = core_places()
    exports = ROOT / "src" / "engine" / "device" / "exports.map"
    plugins = [name for name in re.findall(r"^ +(\w+);", exports.read_text(), re.M) if not name.startswith("PyInit")]
    # Compiled for speed; with SAGELLM_SYMBOLS for tools that name functions and lines.
    symbols = (["-O1", "-g1"], []) if os.environ.get("SAGELLM_SYMBOLS") else (["-O2", "-g0"], ["-Wl,--strip-all"])
    return Extension(
        "sagellm._C",
        sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "cpp").rglob("*.cpp")),
        # The generated headers first (`rust/cxx.h`, `sagellm/src/ffi/bridge.rs.h`), then ours.
        include_dirs=[str(headers), str(ROOT / "cpp")],
        extra_objects=[str(library)],
        # No -std: torch adds the one its headers ask for (c++17 in 2.11, c++20 in 2.15).
        extra_compile_args={"cxx": [*symbols[0], "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]},
        # The plugins are kept in the link although nothing here calls them.
        extra_link_args=[
            f"-Wl,--version-script={exports}",
            *(f"-Wl,-u,{name}" for name in plugins),
            *symbols[1],
        ],
        language="c++",
    )


def builder() -> type[Any]:
    """torch's BuildExtension with cargo in front and the record of what was built behind."""
    # The environment may run without being activated: then its ninja is not on the path.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    from torch import __version__ as torch_version
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class Build(BuildExtension):  # type: ignore[misc]
        def finalize_options(self) -> None:
            super().finalize_options()
            # pip hands an editable install a fresh folder every time; one of our own keeps ninja's objects. torch's
            # version is in its name because objects of two versions must never meet.
            python = f"cp{sys.version_info.major}{sys.version_info.minor}"
            self.build_temp = str(ROOT / "build" / f"torch{torch_minor()}-{python}-{sysconfig.get_platform()}")

        def build_extensions(self) -> None:
            if os.environ.get(PREBUILT):
                check_prebuilt()
            else:
                run_cargo()
            for ext in self.extensions:
                probe = CppExtension(ext.name, [], extra_compile_args=[])
                ext.include_dirs += probe.include_dirs
                ext.library_dirs += probe.library_dirs
                ext.libraries += probe.libraries
                # setuptools asks only sources and `depends` whether anything is new; ninja knows the rest.
                self.force = True
            self._drop_foreign_paths()
            super().build_extensions()

        def _drop_foreign_paths(self) -> None:
            """A Python with libraries of its own (pyenv, conda) would write its folder into our library."""
            for name in ("linker_so", "linker_so_cxx"):
                words = getattr(self.compiler, name, None)
                if words:
                    kept = [word for word in words if not word.startswith(("-Wl,-rpath", "-Wl,-R"))]
                    setattr(self.compiler, name, kept)

        def run(self) -> None:
            super().run()
            self._write_record(Path(self.build_lib) / "sagellm")
            if self.inplace:
                self._write_record(ROOT / SOURCE / "sagellm")

        def _write_record(self, folder: Path) -> None:
            """`_load.extension` reads it before it loads the extension, whose symbols alone would give no clear no."""
            folder.mkdir(parents=True, exist_ok=True)
            text = (
                '"""Written by setup.py beside the extension it describes."""\n\n'
                f"VERSION = {package_version()!r}\n"
                f"TORCH_VERSION = {torch_version.split('+')[0]!r}\n"
                f"SOURCE = {str(ROOT)!r}\n"
            )
            (folder / "_build.py").write_text(text, encoding="utf-8")

    return Build


class Prebuilt(Command):
    """``python setup.py prebuilt``: the Rust core for a machine without cargo."""

    description = f"build the Rust core and copy it to a folder for {PREBUILT}"
    user_options = [("folder=", None, "default: build/prebuilt")]  # noqa: RUF012 (setuptools wants a list)

    def initialize_options(self) -> None:
        self.folder = str(ROOT / "build" / "prebuilt")

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        write_prebuilt(Path(self.folder))


def main() -> None:
    if int(setuptools.__version__.split(".")[0]) < MINIMUM_SETUPTOOLS:
        fail(
            f"setuptools {setuptools.__version__} is too old; run: pip install 'setuptools>={MINIMUM_SETUPTOOLS}' wheel"
        )
    compiling = COMPILING.intersection(sys.argv)
    setup(
        version=package_version(),
        install_requires=[f"torch=={torch_minor()}.*"],
        ext_modules=[extension()],
        cmdclass={"prebuilt": Prebuilt, **({"build_ext": builder()} if compiling else {})},
    )


main()
