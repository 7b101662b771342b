"""Builds the extension module ``torch_sagellm._C``: the C++ of ``cpp/`` linked with the Rust core as a static library.

cargo runs first and leaves two things: ``libsagellm.a`` and, through cxx, the headers that ``cpp/`` includes. ninja
then compiles the C++, so an edit of the Rust core costs only a run of cargo and one link. Nearly all of the compiler's
time goes into torch's headers. So the compiler gets at most four files, and no more than one for each processor; each
of these files includes a part of ``cpp/``. With SAGELLM_EDIT, for trying edits, each file of ``cpp/`` is compiled by
itself, after a precompiled header that has torch's headers. On a machine without cargo the variable SAGELLM_PREBUILT
names a folder that has cargo's results (``make prebuilt`` writes one). A usual build has one extension, for the
installed torch. ``make wheels`` (.ci/build-wheels) names a folder of several unpacked torches instead, and the package
gets an extension for each. Everything about the package that is not code to build is in ``pyproject.toml``.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import setuptools
from setuptools import Command, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
SOURCE = "torch_ext"
#: Commands that need to know which torch is installed. The others work without torch: a source distribution is for all
#: versions.
COMPILING = {"bdist_wheel", "build", "build_ext", "develop", "dist_info", "editable_wheel", "install"}
#: The oldest and the newest minor version of torch that the sources are for.
OLDEST, NEWEST = (2, 11), (2, 15)
MINIMUM_RUST = (1, 89)
#: The variable that names a folder with what cargo would build: the library, and the folder of the generated headers.
PREBUILT = "SAGELLM_PREBUILT"
#: The variable that names a folder of folders, each with one unpacked torch: the package gets an extension for each.
TORCHES = "SAGELLM_TORCHES"
#: The variable that has the command of a linker for an older C library. If it is set, the extension itself defines the
#: symbols that the older library lacks.
LINKER = "SAGELLM_LINKER"
CORE = "libsagellm.a"
HEADERS = "cxxbridge"
DIGEST = "sources.sha256"
#: The file of a source distribution that has the commit.
COMMIT = "commit.txt"
#: The first version of setuptools that reads the licence as pyproject.toml writes it.
MINIMUM_SETUPTOOLS = 77
#: The rules for ninja. The flags are in a separate file, so that a person can read the command of a failed step. ninja
#: runs in the root, so that the compiler's messages name ``cpp/...``.
RULES = """\
# Written by setup.py.
builddir = {folder}

rule compile
  command = {compiler} @{folder}/flags -MD -MF $out.d $first -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $in

"""
STEP = "build {target}: compile {source} | {folder}/flags\n"
#: Further rules, for a precompiled header that every file reads first. If the compiler rejects the precompiled header,
#: it reads the plain header beside that one, with the same result.
PRECOMPILED_RULES = """\
rule precompile
  command = {compiler} @{folder}/flags -MD -MF $out.d -x c++-header -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = torch's headers

build {folder}/torch.hpp.gch: precompile {folder}/torch.hpp | {folder}/flags
"""
PRECOMPILED_STEP = """\
build {target}: compile {source} | {folder}/flags {folder}/torch.hpp.gch
  first = -Winvalid-pch -include {folder}/torch.hpp
"""


def fail(message: str) -> NoReturn:
    """Ends the build with one line that says what is missing and how to repair it."""
    raise SystemExit(f"sagellm: {message}")


def package_version() -> str:
    """Cargo.toml holds the one version number; the first ``version`` line in it is the package's."""
    found = re.search(r'^version = "([^"]+)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        fail("Cargo.toml has no version line")
    return found.group(1)


class Torch(NamedTuple):
    """A torch to build for, because the layout of c10d's classes differs between minor versions."""

    folder: Path  # of its package
    version: str
    module: str  # of the extension

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


def torch_in(folder: Path, among_others: bool) -> Torch:
    found = re.search(r"^__version__ = '(\d+\.(\d+)\.[^'+]+)", (folder / "version.py").read_text(), re.MULTILINE)
    if found is None:
        fail(f"{folder / 'version.py'} has no version")
    # The name assumes that torch's major version is 2, because no torch 3 is in sight.
    return Torch(folder, found.group(1), f"_C_t2{found.group(2)}" if among_others else "_C")


def torches() -> list[Torch]:
    """The torches to build for, oldest first. torch is not imported, because that would import its installed
    backends."""
    if TORCHES in os.environ:
        folders = sorted(path.parent for path in Path(os.environ[TORCHES]).glob("*/torch/version.py"))
        if not folders:
            fail(f"{TORCHES}={os.environ[TORCHES]} holds no torch; expected FOLDER/NAME/torch/version.py")
        found = [torch_in(folder.resolve(), among_others=True) for folder in folders]
        return sorted(found, key=lambda each: int(each.minor.split(".")[1]))
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        fail(
            "the build needs the torch it shall work with, and pip's isolated build environment hides it; install "
            "torch, then run: pip install --no-build-isolation ."
        )
    return [torch_in(Path(spec.origin).parent, among_others=False)]


def requirement(built: list[Torch]) -> str:
    """The version requirement of the package for torch."""
    minors = [tuple(map(int, each.minor.split("."))) for each in built] or [OLDEST, NEWEST]
    (first, low), (last, high) = minors[0], minors[-1]
    return f"torch=={first}.{low}.*" if len(minors) == 1 else f"torch>={first}.{low},<{last}.{high + 1}"


def commit() -> str:
    """The commit of the sources: git knows it, and a source distribution has it in a file."""
    if (ROOT / COMMIT).is_file():
        return (ROOT / COMMIT).read_text(encoding="utf-8").strip()
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, text=True, capture_output=True, check=False).stdout.strip()


def cargo_target() -> Path:
    """The folder in which cargo builds; a build for another processor (CARGO_BUILD_TARGET) has a separate folder."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
    return folder / os.environ.get("CARGO_BUILD_TARGET", "")


def for_edits() -> bool:
    """Whether the build must be fast after edits, although its result is slower."""
    return bool(os.environ.get("SAGELLM_EDIT"))


def cargo_profile() -> str:
    """Cargo's profile. `edit` (Cargo.toml) builds in seconds after an edit, but its result is slower."""
    return "edit" if for_edits() else "release"


def core_places() -> tuple[Path, Path]:
    """The places of the static library and of the generated headers, which may not exist yet."""
    given = os.environ.get(PREBUILT)
    if given:
        return Path(given).resolve() / CORE, Path(given).resolve() / HEADERS
    # cxx writes its headers into the folder that cargo builds in. If CARGO_TARGET_DIR names a folder, cxx writes there,
    # even in a build for another processor.
    named = os.environ.get("CARGO_TARGET_DIR")
    return cargo_target() / cargo_profile() / CORE, (Path(named).resolve() if named else cargo_target()) / HEADERS


def core_digest() -> str:
    """A digest that changes with every source of the Rust core."""
    digest = hashlib.sha256()
    ours = [ROOT / "Cargo.toml", ROOT / "Cargo.lock", ROOT / "build.rs", ROOT / "cpp" / "host" / "host.hpp"]
    for path in [*ours, *sorted((ROOT / "src").rglob("*.rs")), *sorted((ROOT / "nccl-sys" / "src").rglob("*.rs"))]:
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_prebuilt(folder: Path) -> None:
    """Copies cargo's results, and a digest of their sources, into a folder that can be moved to another machine."""
    if os.environ.get(PREBUILT):
        fail(f"{PREBUILT} is set, so there is nothing to write; unset it")
    run_cargo()
    library, headers = core_places()
    if folder.exists() and any(folder.iterdir()) and not (folder / DIGEST).is_file():
        fail(f"{folder} holds something else than a prebuilt core; name an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    # The first header is a link into cargo's cache, which another machine lacks, so links are followed.
    shutil.copytree(headers, folder / HEADERS)
    shutil.copy2(library, folder / CORE)
    (folder / DIGEST).write_text(core_digest() + "\n", encoding="utf-8")
    print(f"sagellm: {folder} is for {PREBUILT}, on a machine of this kind whose sources are these", flush=True)


def check_prebuilt() -> None:
    """Ends the build if the folder lacks a part, or was made from different sources."""
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
    found = re.search(r"(\d+)\.(\d+)", subprocess.run([cargo, "--version"], text=True, capture_output=True).stdout)
    if found is None or (int(found.group(1)), int(found.group(2))) < MINIMUM_RUST:
        wanted = ".".join(map(str, MINIMUM_RUST))
        fail(f"{cargo} is older than {wanted} or does not run; update Rust with: rustup update stable")
    command = [cargo, "build", "--profile", cargo_profile(), "--features", "torch", "--lib"]
    if os.environ.get("MAX_JOBS"):
        command += ["-j", os.environ["MAX_JOBS"]]
    print("sagellm:", " ".join(command), flush=True)
    # Quiet: cargo prints only warnings and errors.
    command.append("--quiet")
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        fail("the Rust core did not build; cargo's message is above")


def cpp_files() -> list[Path]:
    """The files that the compiler compiles.

    On two processors, two files take 117 s of processor time; all files one by one, with a precompiled header, take
    430 s (2-core EPYC, 2026-11-25). Because several files become one, names in the unnamed namespaces of cpp/ must
    differ from file to file.
    """
    # Files with bindings take longest to compile, so they come first.
    files = sorted((ROOT / "cpp").rglob("*.cpp"), key=lambda path: (path.parent.name != "python", path))
    if for_edits():
        return files
    parts: list[list[Path]] = [[] for _ in range(max(1, min(jobs(), 4)))]
    for path in sorted(files, key=lambda path: -path.stat().st_size):
        min(parts, key=lambda part: sum(each.stat().st_size for each in part)).append(path)
    together = []
    for number, part in enumerate(parts, 1):
        whole = ROOT / "build" / f"cpp-{number}-of-{len(parts)}.cpp"
        write_changed(whole, "".join(f'#include "{path.relative_to(ROOT / "cpp")}"\n' for path in sorted(part)))
        together.append(whole)
    return together


def jobs() -> int:
    """The number of compilers that run at the same time: MAX_JOBS, as for torch's own extensions, or this process's
    processors."""
    return int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))


class Module(Extension):
    """An extension, and the torch for which it is built."""

    torch: Torch


def extension(torch: Torch) -> Module:
    library, headers = core_places()
    exports = ROOT / "src" / "engine" / "device" / "exports.map"
    plugins = [name for name in re.findall(r"^ +(\w+);", exports.read_text(), re.M) if not name.startswith("PyInit")]
    # Compiled for speed, or with SAGELLM_SYMBOLS for tools that name functions and lines.
    symbols = (["-O1", "-g1"], []) if os.environ.get("SAGELLM_SYMBOLS") else (["-O2", "-g0"], ["-Wl,--strip-all"])
    old = old_libraries() if os.environ.get(LINKER) else ([], [])
    made = Module(
        f"torch_sagellm.{torch.module}",
        sources=[str(path.relative_to(ROOT)) for path in cpp_files()],
        # The generated headers first (`rust/cxx.h`, `sagellm/src/ffi/bridge.rs.h`), then ours.
        include_dirs=[str(headers), str(ROOT / "cpp")],
        library_dirs=[str(torch.folder / "lib")],
        extra_objects=[str(library)],
        # The language version is the one that torch's headers require.
        extra_compile_args=[
            *symbols[0],
            f"-std={'c++17' if torch.minor == '2.11' else 'c++20'}",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            *openmp(),
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            # Python loads the extension under this name, whatever its file is called.
            "-DTORCH_EXTENSION_NAME=_C",
            *old[0],
        ],
        libraries=["c10", "torch", "torch_cpu", "torch_python"],
        # The linker must keep the plugins, although no code here calls them.
        extra_link_args=[
            f"-Wl,--version-script={exports}",
            *(f"-Wl,-u,{name}" for name in plugins),
            *old[1],
            *symbols[1],
        ],
        # In a usual build the C++ compiler links; a linker that SAGELLM_LINKER names is called directly.
        language="c" if os.environ.get(LINKER) else "c++",
    )
    made.torch = torch
    return made


def openmp() -> list[str]:
    """The flag with which torch's ``at::parallel_for`` uses the intra-op threads of torch.

    The flag is for the compiler only: the functions of GNU's OpenMP come from the copy that torch has loaded. clang's
    code needs a different runtime, which torch may not have, so with clang only one thread of a rank copies and
    combines.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    said = subprocess.run([*compiler, "--version"], text=True, capture_output=True, check=False).stdout
    return [] if "clang" in said else ["-fopenmp"]


def old_libraries() -> tuple[list[str], list[str]]:
    """Further flags of the compiler and of the linker, if the result must load with older libraries.

    cpp/host/old_glibc.cpp defines the missing symbols. The C++ compiler's libraries are named as files, because the
    linker that SAGELLM_LINKER names would take its own libraries."""
    compiler = [*shlex.split(os.environ.get("CXX", "g++")), "-print-file-name="]
    libraries = []
    for name in ("libstdc++.so.6", "libgcc_s.so.1"):
        command = [*compiler[:-1], compiler[-1] + name]
        libraries.append(subprocess.run(command, text=True, capture_output=True, check=True).stdout.strip())
    wrapped = "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
    return ["-DSAGELLM_OLD_GLIBC"], [*libraries, f"-Wl,--wrap={wrapped}"]


def find_ninja() -> str:
    # The environment may be used without being activated. Then its ninja is not on the path.
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    found = shutil.which("ninja", path=search)
    if found is None:
        fail(f"ninja is missing; install it with: {sys.executable} -m pip install ninja")
    return found


def write_changed(path: Path, text: str) -> None:
    """Writes a file if its text has changed. An unchanged file keeps its time stamp, so that ninja rebuilds nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def compile_all(command: list[str], flags: list[str], sources: list[str], folder: Path) -> list[str]:
    """Compiles what is out of date with ninja and returns the objects."""
    ninja = find_ninja()
    # Neither compiler accepts a precompiled header that was made with different flags, so all steps use one file of
    # flags.
    write_changed(folder / "flags", "\n".join(map(shlex.quote, flags)) + "\n")
    place = folder.relative_to(ROOT)
    objects = {source: str(place / Path(source).with_suffix(".o")) for source in sources}
    rules, step = RULES, STEP
    if for_edits():
        write_changed(folder / "torch.hpp", '#include "torch_headers.hpp"\n')
        rules, step = RULES + PRECOMPILED_RULES, PRECOMPILED_STEP
    steps = [step.format(target=objects[source], source=source, folder=place) for source in sources]
    write_changed(folder / "build.ninja", rules.format(folder=place, compiler=shlex.join(command)) + "".join(steps))
    run = [ninja, "-f", str(place / "build.ninja")]
    if os.environ.get("MAX_JOBS"):
        run += ["-j", os.environ["MAX_JOBS"]]
    if not sys.stdout.isatty():
        run.append("--quiet")  # on a terminal ninja rewrites a single line
    # Without these two words ccache stores nothing that was compiled with a precompiled header. They are safe: no code
    # here uses the macros of time, and no macro is defined before the header is read.
    sloppy = ",".join(filter(None, [os.environ.get("CCACHE_SLOPPINESS"), "pch_defines,time_macros"]))
    print(f"sagellm: the C++ of {len(sources)} files, in {place}", flush=True)
    if subprocess.run(run, cwd=ROOT, env={**os.environ, "CCACHE_SLOPPINESS": sloppy}).returncode != 0:
        fail("the C++ did not compile; the compiler's message is above")
    return [str(ROOT / target) for target in objects.values()]


def builder() -> type[Any]:
    """setuptools' build_ext: cargo, then ninja and the linker for each extension, then the record of the build."""

    class Build(build_ext):
        def finalize_options(self) -> None:
            super().finalize_options()
            # setuptools checks only sources and `depends` for changes; cargo and ninja check all files.
            self.force = True

        def build_extensions(self) -> None:
            if os.environ.get(PREBUILT):
                check_prebuilt()
            else:
                find_ninja()  # ninja is needed minutes later, but if it is missing, the error comes now
                run_cargo()
            self._drop_foreign_paths()
            if os.environ.get(LINKER):
                self.compiler.linker_so = [*shlex.split(os.environ[LINKER]), "-shared"]
            self.compiler.compile = self._compile
            # One after the other, because ninja uses all processors.
            for ext in self.extensions:
                self._begin(ext)
                self.build_extension(ext)

        def _begin(self, ext: Module) -> None:
            # For an editable install pip passes a new folder every time; a folder of our own keeps ninja's objects. Its
            # name contains torch's version, because objects of two versions must never be linked together.
            python = f"cp{sys.version_info.major}{sys.version_info.minor}"
            kind = "-old-glibc" if os.environ.get(LINKER) else ""
            self.build_temp = str(ROOT / "build" / f"torch{ext.torch.minor}-{python}-{sysconfig.get_platform()}{kind}")
            include = ext.torch.folder / "include"
            self._includes = [str(include), str(include / "torch" / "csrc" / "api" / "include")]

        def _compile(self, sources: list[str], **given: Any) -> list[str]:
            """Replaces the compiler's `compile`, which runs no steps in parallel and tracks no headers."""
            command = list(getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so)
            # torch's folders count as system folders, so that warnings about torch's headers do not appear.
            system = [*self._includes, *self.compiler.include_dirs, sysconfig.get_path("include")]
            flags = [word for word in command[1:] if word != "-Wstrict-prototypes"]
            flags += [f"-I{folder}" for folder in given["include_dirs"] if folder not in system]
            for folder in dict.fromkeys(system):
                flags += ["-isystem", folder]
            # torch's headers put their own paths into errors. These flags shorten them to paths inside torch, without
            # the folders of the build machine.
            flags += [f"-fmacro-prefix-map={folder}/=" for folder in sorted([str(ROOT), self._includes[0]], key=len)]
            cache = shutil.which("ccache")
            compiler = [cache, command[0]] if cache else command[:1]
            return compile_all(compiler, [*flags, *given["extra_postargs"]], sources, Path(self.build_temp))

        def _drop_foreign_paths(self) -> None:
            """Removes search paths from the linker's words: a Python with its own libraries (pyenv, conda) passes their
            folder, and the linker would write it into the extension."""
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
            """Writes the build's record. `load.extension` checks it, because an extension that does not fit would fail
            with an unclear error."""
            folder.mkdir(parents=True, exist_ok=True)
            # A wheel is used on other machines, which lack the folder of its sources.
            source = "" if TORCHES in os.environ else str(ROOT)
            text = (
                '"""Written by setup.py beside the extensions it describes."""\n\n'
                f"VERSION = {package_version()!r}\n"
                f"COMMIT = {commit()!r}\n"
                f"EXTENSIONS = { ({ext.torch.version: ext.torch.module for ext in self.extensions})!r}\n"
                f"SOURCE = {source!r}\n"
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


class Sources(sdist):
    """The source distribution, which also contains the commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        (Path(base_dir) / COMMIT).write_text(commit() + "\n", encoding="utf-8")


class Wheel(bdist_wheel):
    """The wheel. It has the list of its crates at the place that PEP 770 defines."""

    def write_wheelfile(self, wheelfile_base: str, **named: Any) -> None:
        super().write_wheelfile(wheelfile_base, **named)
        folder = Path(wheelfile_base) / "sboms"
        folder.mkdir()
        shutil.copy(ROOT / "licences" / "sbom.cdx.json", folder)


def main() -> None:
    if int(setuptools.__version__.split(".")[0]) < MINIMUM_SETUPTOOLS:
        fail(
            f"setuptools {setuptools.__version__} is too old; run: pip install 'setuptools>={MINIMUM_SETUPTOOLS}' wheel"
        )
    compiling = COMPILING.intersection(sys.argv)
    built = torches() if compiling else []
    setup(
        version=package_version(),
        install_requires=[requirement(built)],
        # Extensions are named even if nothing is compiled, because the wheel of a package with extensions is for one
        # kind of machine.
        ext_modules=[extension(torch) for torch in built] or [Extension("torch_sagellm._C", sources=[])],
        cmdclass={
            "prebuilt": Prebuilt,
            "sdist": Sources,
            "bdist_wheel": Wheel,
            **({"build_ext": builder()} if compiling else {}),
        },
    )


main()
