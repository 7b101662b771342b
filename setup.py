"""Builds the extension module ``sagellm._C``: the C++ of ``cpp/`` linked with the Rust core as a static library.

cargo runs first and leaves two things: ``libsagellm.a`` and, through cxx, the headers that ``cpp/`` includes. torch's
own extension builder then compiles the C++ with ninja, so that an edit of the Rust core costs cargo and one link.
Everything about the package that is not code to build stands in ``pyproject.toml``.
"""

from __future__ import annotations

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
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
SOURCE = "torch_ext"
#: Commands that compile. The others (metadata of the package) must not pay for the import of torch.
COMPILING = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}
MINIMUM_RUST = (1, 89)
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
    target = cargo_target()
    return Extension(
        "sagellm._C",
        sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "cpp").glob("*.cpp")),
        # The generated headers first (`rust/cxx.h`, `sagellm/src/bridge.rs.h`), then ours.
        include_dirs=[str(target / "cxxbridge"), str(ROOT / "cpp")],
        extra_objects=[str(target / "release" / "libsagellm.a")],
        # No -std: torch adds the one its headers ask for (c++17 in 2.11, c++20 in 2.15).
        extra_compile_args={"cxx": ["-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]},
        # The second keeps the plugins, which nothing here calls, in the link.
        extra_link_args=[
            f"-Wl,--version-script={ROOT / 'src' / 'engine' / 'vendor' / 'exports.map'}",
            "-Wl,-u,ncclTunerPlugin_v6,-u,ncclProfiler_v6",
            "-Wl,--strip-all",
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
            """`_register.load` reads it before it loads the extension, whose symbols alone would give no clear no."""
            folder.mkdir(parents=True, exist_ok=True)
            text = (
                '"""Written by setup.py beside the extension it describes."""\n\n'
                f"VERSION = {package_version()!r}\n"
                f"TORCH_VERSION = {torch_version.split('+')[0]!r}\n"
                f"SOURCE = {str(ROOT)!r}\n"
            )
            (folder / "_build.py").write_text(text, encoding="utf-8")

    return Build


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
        cmdclass={"build_ext": builder()} if compiling else {},
    )


main()
