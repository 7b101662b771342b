"""The CPythons and torches that wheels are for, and the CPythons that this machine has."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MINORS = ("2.11", "2.12", "2.13", "2.14", "2.15")
#: For each CPython that the newest torch has no wheel for: the last torch that has one.
LAST = {"3.10": "2.11"}
#: Prints the version and the path of an interpreter whose headers are installed.
SHOW = """
import os, sys, sysconfig
if os.path.exists(sysconfig.get_path("include") + "/Python.h"):
    print("%d.%d" % sys.version_info[:2], os.path.realpath(sys.executable))
"""


def minors_for(python: str) -> list[str]:
    """Returns the versions of torch that a CPython's wheel serves."""
    return list(MINORS[: MINORS.index(LAST.get(python, MINORS[-1])) + 1])


def interpreters(asked: Sequence[str] = ()) -> dict[str, str]:
    """Returns the paths of interpreters by version: of those asked for, or of all that are on the path or that pyenv
    has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    names = list(asked) or [f"python{version}" for version in PYTHONS]
    if not asked:
        names += [str(path) for version in PYTHONS for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    found: dict[str, str] = {}
    for name in names:
        try:
            done = subprocess.run([name, "-c", SHOW], text=True, capture_output=True, check=False)
        except OSError:
            continue
        version, _, path = done.stdout.strip().partition(" ")
        if version in PYTHONS:
            found.setdefault(version, path)
    if asked and len(found) != len(asked):
        raise SystemExit(f"wheels: of {', '.join(asked)} these work and have their headers: {found or 'none'}")
    return dict(sorted(found.items(), key=lambda each: PYTHONS.index(each[0])))
