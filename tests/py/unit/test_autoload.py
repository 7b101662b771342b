"""No state of the package or of its variables breaks `import torch` or groups of other backends, and groups of ours
report the reason.

Each test installs the package in a new folder, as a wheel would, damages it, and runs programs with this folder first
on the path. The programs run under ``python -S``, so that Python does not also find the editable installation of the
tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import IS_GLOO, run_script

import torch_sagellm
from torch_sagellm._private import load
from torch_sagellm.cli import checks

pytestmark = pytest.mark.skipif(IS_GLOO, reason="gloo: these are tests of the installed package")

PACKAGE = Path(torch_sagellm.__file__).parent
AUTOLOAD = PACKAGE.parent / "_torch_sagellm_autoload.py"
TORCH = Path(torch.__file__).parent.parent
ENTRY_POINTS = """
[torch.backends]
sagellm = _torch_sagellm_autoload:register

[torch.distributed.backends]
sagellm = _torch_sagellm_autoload:register
"""

#: A program that prints JSON: what a program that uses another backend sees, and the error of a group of ours. For each
#: argument it also runs our command of that name in a fork that has imported torch, and prints exit code and output.
PROGRAM = """
import json, os, sys, warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import torch
import torch.distributed as dist
touched = sorted(name for name in sys.modules if name.partition(".")[0] == "torch_sagellm")

def group(backend):
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        numbers = torch.ones(3)
        dist.all_reduce(numbers)
        dist.destroy_process_group()
        return "works" if numbers.tolist() == [1.0] * 3 else str(numbers)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def command(word):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        sys.argv = ["torch-sagellm", word]
        import _torch_sagellm_autoload as it
        code = it.main()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(write)
    with open(read) as pipe:
        printed = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed

if __name__ == "__main__":
    commands = {word: command(word) for word in sys.argv[1:]}  # before there are threads
    gloo, ours = group("gloo"), group("sagellm")
    print(json.dumps({
        "commands": commands, "touched": touched, "gloo": gloo, "ours": ours, "again": group("sagellm") == ours,
        "told": [str(each.message) for each in told if "sagellm" in str(each.message)],
    }))
"""


def installed(folder: Path) -> Path:
    """Installs the package in a folder with a wheel's metadata. The extension is a symbolic link."""
    suffixes = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(PACKAGE, folder / "torch_sagellm", ignore=suffixes)
    for extension in PACKAGE.glob("*.so"):
        (folder / "torch_sagellm" / extension.name).symlink_to(extension)
    shutil.copy(AUTOLOAD, folder)
    record(folder, "torch-sagellm", load.version())
    (folder / f"torch_sagellm-{load.version()}.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def record(folder: Path, name: str, version: str) -> None:
    """Writes the metadata of a distribution that has installed the package in this folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".so")]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def run(
    place: Path,
    program: str | None = None,
    first: tuple[str, ...] = ("-S",),
    commands: tuple[str, ...] = (),
    **environment: str,
) -> dict[str, Any]:
    """Runs the program with `place` first on the path. Returns the JSON of its last line."""
    path = os.pathsep.join([str(place), str(TORCH)])
    words = [*first, "-c", program or PROGRAM, *commands]
    done = run_script(words, env={"PYTHONPATH": path, **environment}, cwd="/")
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def command(place: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as the console script ``torch-sagellm`` does."""
    code = "import sys, _torch_sagellm_autoload as it; sys.argv[0] = 'torch-sagellm'; sys.exit(it.main())"
    path = os.pathsep.join([str(place), str(TORCH)])
    return run_script(["-S", "-c", code, *words], env={"PYTHONPATH": path, **environment}, cwd="/")


def overlaid(folder: Path) -> None:
    """The package was overwritten by that of another distribution, which has the same name. pip installs such a package
    without a message."""
    (folder / "torch_sagellm" / "__init__.py").write_text("raise SystemExit('of another package')\n")
    record(folder, "other-package", "1.2")
    only = folder / "other_package-1.2.dist-info" / "RECORD"
    only.write_text("torch_sagellm/__init__.py,,\n")


def without_front(folder: Path) -> None:
    (folder / "torch_sagellm" / "__init__.py").unlink()


def without_package(folder: Path) -> None:
    shutil.rmtree(folder / "torch_sagellm")


def half_deleted(folder: Path) -> None:
    for name in ("_private/register.py", "_private/delegate.py"):
        (folder / "torch_sagellm" / name).unlink()


def half_written(folder: Path) -> None:
    path = folder / "torch_sagellm" / "_private" / "register.py"
    path.write_text(path.read_text()[:300] + "\n    (")


def without_extension(folder: Path) -> None:
    for path in (folder / "torch_sagellm").glob("*.so"):
        path.unlink()


def _extension(folder: Path) -> Path:
    path = next((folder / "torch_sagellm").glob("*.so"))
    target = path.resolve()
    path.unlink()
    shutil.copy(target, path)
    return path


def cut_off_extension(folder: Path) -> None:
    """Loading half a library would end the process with SIGBUS."""
    path = _extension(folder)
    os.truncate(path, path.stat().st_size // 2)


def no_library(folder: Path) -> None:
    _extension(folder).write_text("of something else")


def another_extension(folder: Path) -> None:
    """A module that can be imported but is not our extension."""
    (folder / "torch_sagellm" / "_build.py").write_text((PACKAGE / "_build.py").read_text())
    without_extension(folder)
    (folder / "torch_sagellm" / "_C.py").write_text("torch_version_built = '1.0'\n")


def another_torch(folder: Path) -> None:
    path = folder / "torch_sagellm" / "_build.py"
    path.write_text(path.read_text().replace(f"'{torch.__version__.split('+')[0]}'", "'2.3.0'"))


def wheel_for(folder: Path, *versions: str) -> None:
    """The state after `make wheels`: an extension for each torch version, and no source folder."""
    modules = {version: f"_C_t{''.join(version.split('.')[:2])}" for version in versions}
    path = folder / "torch_sagellm" / "_build.py"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("EXTENSIONS", "SOURCE"))]
    path.write_text("\n".join([*lines, f"EXTENSIONS = {modules!r}", "SOURCE = ''", ""]))
    extension = next((folder / "torch_sagellm").glob("*.so"))
    _, _, suffixes = extension.name.partition(".")
    for module in modules.values():
        (folder / "torch_sagellm" / f"{module}.{suffixes}").symlink_to(extension.resolve())
    extension.unlink()


def wheel_for_others(folder: Path) -> None:
    wheel_for(folder, "2.3.0", "2.4.1")


def wheel_with_another_extension(folder: Path) -> None:
    """The record lists an extension for this torch, but the file was built for another patch version."""
    wheel_for(folder, f"{'.'.join(torch.__version__.split('.')[:2])}.99")


def damaged_record(folder: Path) -> None:
    (folder / "torch_sagellm" / "_build.py").write_text("VERSION = \n")


#: For each damage: words of the error of a group, and whether the package can still start the command line.
STATES: list[tuple[Callable[[Path], None], tuple[str, ...], bool]] = [
    (overlaid, ("belongs to something else, which other-package 1.2 has installed", "pip uninstall"), False),
    (without_front, ("has lost its __init__.py", "such as torch_sagellm/__init__.py"), False),
    (without_package, ("the package torch_sagellm is gone", "--force-reinstall"), False),
    (half_deleted, ("of its", "2 are missing, such as torch_sagellm/_private/delegate.py"), True),
    (half_written, ("(register.py, line", "--force-reinstall"), True),
    (without_extension, ("does not load", "uild it anew"), True),
    (cut_off_extension, ("was cut off", "uild it anew"), True),
    (no_library, ("does not load", "uild it anew"), True),
    (another_extension, ("is not the one of this package", "uild it anew"), True),
    (another_torch, ("was built for torch 2.3", "uild it for this one"), True),
    (wheel_for_others, ("wheel of sagellm serves torch 2.3, 2.4 and this is torch", "uild it for this one"), True),
    (wheel_with_another_extension, ("is not the one of this package", "uild it anew"), True),
    (damaged_record, ("cannot be read: SyntaxError", "uild it anew"), True),
]

COMMANDS = ("info", "doctor")


@pytest.mark.parametrize(("damage", "said", "starts"), STATES, ids=lambda each: getattr(each, "__name__", ""))
def test_a_damaged_package_breaks_groups_of_ours_alone(
    damage: Callable[[Path], None], said: tuple[str, ...], starts: bool, tmp_path: Path
) -> None:
    place = installed(tmp_path)
    damage(place)
    # If the package can start the commands, these import torch, which takes seconds. So only one such state runs them
    # in new interpreters; in the other states they are forks of the program.
    fresh = not starts or damage is half_deleted
    found = run(place, commands=() if fresh else COMMANDS)
    assert found["gloo"] == "works" and not found["touched"] and not found["told"], found
    assert found["again"] and all(each in found["ours"] for each in said), found["ours"]
    for word in COMMANDS:
        if fresh:
            done = command(place, word)
            code, printed = done.returncode, done.stdout
        else:
            code, printed = found["commands"][word]
        assert "Traceback" not in printed, printed
        assert all(each in printed for each in said), printed
        assert "torch " in printed and "python " in printed, printed
        assert code == (0 if starts and word == "info" else 1), printed


def test_a_whole_package_works_in_any_interpreter(tmp_path: Path) -> None:
    place = installed(tmp_path)
    isolated = f"import sys; sys.path[:0] = [{str(place)!r}]\n" + PROGRAM
    for found in (run(place), run(place, first=("-W", "error")), run(place, isolated, first=("-I",))):
        assert found["ours"] == found["gloo"] == "works" and not found["touched"] and not found["told"], found


def test_the_metadata_of_a_checkout_list_no_missing_files(tmp_path: Path) -> None:
    """`make wheels` and a build with a prebuilt core leave an egg-info folder next to the sources, which lists the
    sources."""
    place = installed(tmp_path)
    shutil.rmtree(next(place.glob("*.dist-info")))
    info = place / "torch_sagellm.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: torch-sagellm\nVersion: {load.version()}\n")
    (info / "SOURCES.txt").write_text("Cargo.toml\nsrc/lib.rs\n")
    done = command(place, "info")
    assert done.returncode == 0 and "missing" not in done.stdout, done.stdout


def test_a_wheel_loads_the_extension_for_this_torch_under_the_one_name(tmp_path: Path) -> None:
    place = installed(tmp_path)
    version = torch.__version__.split("+")[0]
    wheel_for(place, "2.3.0", version, "2.99.0")
    assert run(place)["ours"] == "works"
    look = """
import json, pickle, torch, torch_sagellm
from torch_sagellm._private import load
extension = load.extension()
from torch_sagellm import _C
import torch_sagellm._C as again
assert extension is _C is again is load.extension() and torch_sagellm.Options.__module__ == "torch_sagellm._C"
print(json.dumps({"name": extension.__name__, "file": extension.__file__, "minors": load.minors()}))
"""
    found = run(place, look)
    assert found["name"] == "torch_sagellm._C" and found["minors"] == ["2.3", ".".join(version.split(".")[:2]), "2.99"]
    assert Path(found["file"]).name.startswith(f"_C_t{''.join(version.split('.')[:2])}."), found
    done = command(place, "info")
    assert f"for torch {version} and " in done.stdout and "from a wheel for torch 2.3, " in done.stdout, done.stdout


def test_a_package_in_a_zip_file_says_that_it_must_be_unpacked(tmp_path: Path) -> None:
    place = installed(tmp_path / "site")
    packed = tmp_path / "site.zip"
    with zipfile.ZipFile(packed, "w") as file:
        for path in place.rglob("*"):
            file.write(path, path.relative_to(place))
    found = run(packed)
    assert found["gloo"] == "works" and not found["touched"], found
    assert f"Python loads no extension out of {packed}; install the package unpacked" in found["ours"], found


FORK_SERVER = """
import json, multiprocessing, sys

def child(answers):
    import torch, torch.distributed as dist
    touched = [name for name in sys.modules if name.partition(".")[0] == "torch_sagellm"]
    dist.init_process_group("sagellm", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    answers.put(touched)

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    answers = context.SimpleQueue()
    children = [context.Process(target=child, args=(answers,)) for _ in range(2)]
    for each in children:
        each.start()
    found = [answers.get() for _ in children]
    for each in children:
        each.join(60)
    print(json.dumps({"touched": found, "codes": [each.exitcode for each in children]}))
"""


def test_children_of_a_fork_server_make_groups(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FORK_SERVER)
    done = run_script([str(program)], cwd="/")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == {"touched": [[], []], "codes": [0, 0]}, done.stdout


def test_nothing_need_be_writable(tmp_path: Path) -> None:
    place = installed(tmp_path)
    nowhere = "/proc/no/such/folder"
    found = run(place, HOME=nowhere, TMPDIR=nowhere, XDG_CACHE_HOME=nowhere, SAGELLM_CACHE_DIR=nowhere)
    assert found["ours"] == found["gloo"] == "works", found


def test_variables_full_of_garbage(tmp_path: Path) -> None:
    """torch's import reads one variable and warns about it once. Groups of ours refuse the others."""
    garbage = dict.fromkeys(checks.VARIABLES, "\N{SNOWMAN} garbage")
    found = run(installed(tmp_path), **garbage)
    assert found["gloo"] == "works" and not found["touched"] and len(found["told"]) == 1, found
    said = "SAGELLM_AS='\N{SNOWMAN} garbage', expected one of gloo, or unset"
    assert said in found["told"][0] and said in found["ours"], found
    for word in ("info", "doctor"):
        done = command(tmp_path, word, **garbage)
        assert said in done.stdout and "Traceback" not in done.stdout, done.stdout
    del garbage["SAGELLM_AS"]
    found = run(tmp_path, **garbage)
    assert found["gloo"] == "works" and not found["touched"] and not found["told"], found
    assert "sagellm: SAGELLM_" in found["ours"], found


def test_a_warning_as_an_error_stops_no_import(tmp_path: Path) -> None:
    code = "import torch; print('\"imported\"')"
    path = os.pathsep.join([str(installed(tmp_path)), str(TORCH)])
    done = run_script(["-S", "-W", "error", "-c", code], env={"PYTHONPATH": path, "SAGELLM_AS": "x"}, cwd="/")
    assert done.returncode == 0 and "SAGELLM_AS='x'" in done.stdout and "imported" in done.stdout, done.stdout


def test_the_name_gloo_is_refused_where_ours_was_asked_for_and_is_broken(tmp_path: Path) -> None:
    """Other ranks may have groups of ours, and torch's own gloo would wait for them until its timeout."""
    place = installed(tmp_path)
    half_deleted(place)
    (place / "torch_sagellm" / "api" / "serve_as.py").unlink()
    found = run(place, SAGELLM_AS="gloo")
    assert len(found["told"]) == 1 and "3 are missing" in found["told"][0] and "3 are missing" in found["gloo"], found


def test_without_torch_the_package_says_so_at_its_import(tmp_path: Path) -> None:
    done = run_script(["-S", "-c", "import torch_sagellm"], env={"PYTHONPATH": str(installed(tmp_path))}, cwd="/")
    assert done.returncode == 1 and "No module named 'torch'" in done.stdout.splitlines()[-1], done.stdout


def test_the_entry_points_of_the_metadata_are_those_of_the_tests() -> None:
    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    for line in ENTRY_POINTS.split():
        if ":" in line:
            assert text.count(f'sagellm = "{line}"') == 2
    assert sys.version_info >= (3, 10)
