"""Builds the extension module ``torch_sagellm._C``: the C++ of ``cpp/`` linked with the Rust core as a static library.

cargo runs first and leaves two things: ``libsagellm.a`` and, through cxx, the headers that ``cpp/`` includes. ninja
then compiles the C++, so that an edit of the Rust core costs cargo and one link. torch's headers are read once, into a
precompiled header: they are nearly all that the compiler reads for a file of ``cpp/``. On a machine without cargo the
variable SAGELLM_PREBUILT names a folder that has both already (``make prebuilt`` writes one).
Everything about the package that is not code to build stands in ``pyproject.toml``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

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
#: What ninja is told. The flags stand in a file of their own, so that the command of a failed step is one that a person
#: can read; ninja runs in the root, so that the compiler's messages name ``cpp/...``. Every file reads the precompiled
#: header first; where the compiler does not want it, the header beside it gives the same.
RULES = """\
# Written by setup.py.
builddir = {folder}

rule precompile
  command = {compiler} @{folder}/flags -MD -MF $out.d -x c++-header -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = torch's headers

rule compile
  command = {compiler} @{folder}/flags -MD -MF $out.d -Winvalid-pch -include {folder}/torch.hpp -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $in

build {folder}/torch.hpp.gch: precompile {folder}/torch.hpp | {folder}/flags
"""
STEP = "build {target}: compile {source} | {folder}/flags {folder}/torch.hpp.gch\n"


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


def cargo_profile() -> str:
    """`edit` (Cargo.toml) builds in seconds after an edit; what it builds is slower."""
    return "edit" if os.environ.get("SAGELLM_EDIT") else "release"


def core_places() -> tuple[Path, Path]:
    """Where the static library and the generated headers are, or will be."""
    given = os.environ.get(PREBUILT)
    if given:
        return Path(given).resolve() / CORE, Path(given).resolve() / HEADERS
    return cargo_target() / cargo_profile() / CORE, cargo_target() / HEADERS


def core_digest() -> str:
    """Changes with every source of the Rust core."""
    digest = hashlib.sha256()
    ours = [ROOT / "Cargo.toml", ROOT / "Cargo.lock", ROOT / "build.rs", ROOT / "cpp" / "host" / "host.hpp"]
    for path in [*ours, *sorted((ROOT / "src").rglob("*.rs")), *sorted((ROOT / "nccl-sys" / "src").rglob("*.rs"))]:
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
    command = [cargo, "build", "--profile", cargo_profile(), "--features", "torch", "--lib"]
    if os.environ.get("MAX_JOBS"):
        command += ["-j", os.environ["MAX_JOBS"]]
    print("sagellm:", " ".join(command), flush=True)
    # Quiet: what cargo says of warnings and errors, and nothing else.
    command.append("--quiet")
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        fail("the Rust core did not build; cargo's message is above")


def extension() -> Extension:
    """What torch's builder needs, except the paths of torch, which are added once torch is imported."""
    library, headers = core_places()
    exports = ROOT / "src" / "engine" / "device" / "exports.map"
    plugins = [name for name in re.findall(r"^ +(\w+);", exports.read_text(), re.M) if not name.startswith("PyInit")]
    # Compiled for speed; with SAGELLM_SYMBOLS for tools that name functions and lines.
    symbols = (["-O1", "-g1"], []) if os.environ.get("SAGELLM_SYMBOLS") else (["-O2", "-g0"], ["-Wl,--strip-all"])
    # module.cpp takes longest to compile: those of cpp/ itself come first.
    files = [path for pattern in ("*.cpp", "*/*.cpp") for path in sorted((ROOT / "cpp").glob(pattern))]
    return Extension(
        "torch_sagellm._C",
        sources=[str(path.relative_to(ROOT)) for path in files],
        # The generated headers first (`rust/cxx.h`, `sagellm/src/ffi/bridge.rs.h`), then ours.
        include_dirs=[str(headers), str(ROOT / "cpp")],
        extra_objects=[str(library)],
        # The language is the one torch's headers ask for.
        extra_compile_args=[
            *symbols[0],
            f"-std={'c++17' if torch_minor() == '2.11' else 'c++20'}",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            "-DTORCH_EXTENSION_NAME=_C",
        ],
        libraries=["c10", "torch", "torch_cpu", "torch_python"],
        # The plugins are kept in the link although nothing here calls them.
        extra_link_args=[
            f"-Wl,--version-script={exports}",
            *(f"-Wl,-u,{name}" for name in plugins),
            *symbols[1],
        ],
        language="c++",
    )


def find_ninja() -> str:
    # The environment may run without being activated: then its ninja is not on the path.
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    found = shutil.which("ninja", path=search)
    if found is None:
        fail(f"ninja is missing; install it with: {sys.executable} -m pip install ninja")
        raise AssertionError("unreachable")
    return found


def write_changed(path: Path, text: str) -> None:
    """An unchanged file keeps its time stamp, so that ninja rebuilds nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def compile_all(command: list[str], flags: list[str], sources: list[str], folder: Path) -> list[str]:
    """Compiles what is out of date with ninja and returns the objects."""
    ninja = find_ninja()
    # Neither compiler takes a precompiled header that was made with other flags: one file of flags serves all steps.
    write_changed(folder / "flags", "\n".join(map(shlex.quote, flags)) + "\n")
    write_changed(folder / "torch.hpp", '#include "torch_headers.hpp"\n')
    place = folder.relative_to(ROOT)
    objects = {source: str(place / Path(source).with_suffix(".o")) for source in sources}
    rules = RULES.format(folder=place, compiler=shlex.join(command))
    steps = [STEP.format(target=objects[source], source=source, folder=place) for source in sources]
    write_changed(folder / "build.ninja", rules + "".join(steps))
    run = [ninja, "-f", str(place / "build.ninja")]
    if os.environ.get("MAX_JOBS"):
        run += ["-j", os.environ["MAX_JOBS"]]
    if not sys.stdout.isatty():
        run.append("--quiet")  # on a terminal ninja has one line that it writes anew
    # Without these two words ccache keeps nothing that was compiled with a precompiled header. Nothing here uses the
    # macros of time, and no macro is defined before the header is read.
    sloppy = ",".join(filter(None, [os.environ.get("CCACHE_SLOPPINESS"), "pch_defines,time_macros"]))
    print(f"sagellm: the C++ of {len(sources)} files, for torch {torch_minor()}", flush=True)
    if subprocess.run(run, cwd=ROOT, env={**os.environ, "CCACHE_SLOPPINESS": sloppy}).returncode != 0:
        fail("the C++ did not compile; the compiler's message is above")
    return [str(ROOT / target) for target in objects.values()]


def builder() -> type[Any]:
    """setuptools' build_ext: runs cargo, then ninja, then writes the record of the build."""
    # Without the backends that are installed: one of them is what this build replaces, and it may be broken.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    from torch import __version__ as torch_version
    from torch.utils.cpp_extension import include_paths, library_paths

    class Build(build_ext):
        def finalize_options(self) -> None:
            super().finalize_options()
            # pip hands an editable install a fresh folder every time; one of our own keeps ninja's objects. torch's
            # version is in its name because objects of two versions must never meet.
            python = f"cp{sys.version_info.major}{sys.version_info.minor}"
            self.build_temp = str(ROOT / "build" / f"torch{torch_minor()}-{python}-{sysconfig.get_platform()}")
            # setuptools asks only sources and `depends` whether anything is new; cargo and ninja know the rest.
            self.force = True

        def build_extensions(self) -> None:
            if os.environ.get(PREBUILT):
                check_prebuilt()
            else:
                run_cargo()
            for ext in self.extensions:
                ext.library_dirs += library_paths()
            self._drop_foreign_paths()
            self.compiler.compile = self._compile
            super().build_extensions()

        def _compile(self, sources: list[str], **given: Any) -> list[str]:
            """Replaces the compiler's `compile`, which runs no steps in parallel and tracks no headers."""
            command = list(getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so)
            # torch's folders count as system folders, so that warnings about torch's headers do not appear.
            system = [*include_paths(), *self.compiler.include_dirs, sysconfig.get_path("include")]
            flags = [word for word in command[1:] if word != "-Wstrict-prototypes"]
            flags += [f"-I{folder}" for folder in given["include_dirs"] if folder not in system]
            for folder in dict.fromkeys(system):
                flags += ["-isystem", folder]
            cache = shutil.which("ccache")
            compiler = [cache, command[0]] if cache else command[:1]
            return compile_all(compiler, [*flags, *given["extra_postargs"]], sources, Path(self.build_temp))

        def _drop_foreign_paths(self) -> None:
            """A Python that brings its own libraries (pyenv, conda) would write their folder into our library."""
            for name in ("linker_so", "linker_so_cxx"):
                words = getattr(self.compiler, name, None)
                if words:
                    kept = [word for word in words if not word.startswith(("-Wl,-rpath", "-Wl,-R"))]
                    setattr(self.compiler, name, kept)

        def run(self) -> None:
            super().run()
            self._write_record(Path(self.build_lib) / "torch_sagellm")
            if self.inplace:
                self._write_record(ROOT / SOURCE / "torch_sagellm")

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
