"""`torch-sagellm certify` on the simulated devices of each vendor. Its report says that they are simulators."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_script
from simulated import VENDORS, environment, on_simulator_alone

pytestmark = [pytest.mark.timeout(900), on_simulator_alone]
#: Installs the device in every process that the command starts, as the import of a vendor's package does.
INSTALL = """
import os, sys
sys.path[:0] = [{tests!r}, {here!r}]
import simdevice
simdevice.install({name!r}).use_library(os.environ["SAGELLM_TEST_RUNTIME"], {flavour!r})
"""


#: Each run takes a minute, and the command treats all vendors alike, so every run tests only NCCL.
EACH = [pytest.param(vendor, marks=[] if vendor == "nccl" else pytest.mark.long) for vendor in VENDORS]


@pytest.mark.parametrize("vendor", EACH)
def test_all_stages_pass_on_a_simulator_and_the_report_says_what_it_was(
    vendor: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    name, flavour, _ = VENDORS[vendor]
    here = Path(__file__).parent
    text = INSTALL.format(tests=str(here.parent), here=str(here), name=name, flavour=flavour)
    (tmp_path / "sitecustomize.py").write_text(text)
    env = environment(vendor, libraries, SAGELLM_VENDOR=vendor, PYTHONPATH=str(tmp_path))
    words = ["--quick", "--ranks", "2", "--report", "report.md", "--yes"]
    done = run_script(["-m", "torch_sagellm", "certify", *words], timeout=400, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout
    report = (tmp_path / "report.md").read_text()
    assert f"# torch-sagellm on {name} tensors: " in report and "By a SIMULATOR of the library" in report
    assert f"| {name} tensors, 2 ranks of one host | values passed; late passed; killed passed;" in report
    assert "| **simulator** |" in report, report
