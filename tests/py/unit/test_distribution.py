"""What pip installs: the wheel and the source distribution, and what they say about foreign code. Compiles nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from harness import IS_GLOO
from limits import patience

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(IS_GLOO, reason="gloo: these are tests of the package")


def run(*command: str, seconds: float = 60.0, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience(seconds),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.timeout(120)
def test_a_wheel_of_this_build_works_in_an_empty_environment_and_leaves_nothing() -> None:
    told = run(sys.executable, ".ci/wheels", "--of-build", seconds=110)
    assert "passed in" in told, told


def test_the_source_distribution_has_all_that_git_tracks(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout: git does not know its files")
    run(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path), "sdist", "-d", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {each.name.partition("/")[2] for each in file.getmembers() if each.isfile()}
        (record,) = (each for each in file.getmembers() if each.name.endswith("/commit.txt"))
        content = file.extractfile(record)
        assert content is not None
        commit = content.read().decode().strip()
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    tracked = {name for name in listed if (ROOT / name).is_file() and not name.startswith(".github/")}
    assert tracked - packed == set()
    # setuptools adds these files, and our build adds the commit.
    assert {name for name in packed - tracked if ".egg-info/" not in name} == {"PKG-INFO", "setup.cfg", "commit.txt"}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, capture_output=True, check=False)
    if head.returncode == 0:  # a copy of the tree without git has no commit
        assert commit and head.stdout.startswith(commit.removesuffix("-dirty"))


def test_the_crates_of_the_extension_are_listed_with_their_licences() -> None:
    run(sys.executable, ".ci/licences", "--check", CARGO_NET_OFFLINE="true")
    bom = json.loads((ROOT / "licences" / "sbom.cdx.json").read_text())
    named = {f"{each['name']} {each['version']}" for each in bom["components"]}
    texts = (ROOT / "licences" / "THIRD-PARTY.txt").read_text()
    listed = set(re.findall(r"^    (\S+ [\d.]+): ", texts, re.M))
    assert listed and listed < named and {name.split()[0] for name in named - listed} == {"sagellm", "nccl-sys"}
    assert all(each["hashes"][0]["alg"] == "SHA-256" for each in bom["components"] if each["name"] == "cxx")
