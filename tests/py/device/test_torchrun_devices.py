"""A whole program under torchrun with its tensors on the devices of simulated vendors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import torchrun
from simulated import VENDORS, environment, on_simulator_alone
from training_script import STEPS

#: The first test builds the simulators, which takes minutes on a busy machine; every run has its own deadline.
pytestmark = [pytest.mark.timeout(900), on_simulator_alone]

SCRIPT = Path(__file__).with_name("training_script.py")
RANKS = 2


def lines(output: str, word: str) -> dict[int, str]:
    """Returns for each rank the text after this word in the rank's line of output."""
    return {int(each[1]): each[2] for each in re.finditer(rf"(?m)^rank (\d+) {word} (.*)$", output)}


@pytest.fixture(scope="module")
def losses_of_the_cpu() -> dict[int, str]:
    """The losses on the CPU, by rank, as the program prints them."""
    output = torchrun(SCRIPT, RANKS, "--device", "cpu")
    found = lines(output, "losses")
    assert sorted(found) == list(range(RANKS)), output
    values = [[float.fromhex(each) for each in found[rank].split()] for rank in found]
    assert all(len(each) == STEPS and each[-1] < each[0] for each in values), values
    assert values[0] != values[1], "each rank has different numbers"
    return found


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_training_under_torchrun_gives_the_losses_of_the_cpu(
    vendor: str, libraries: dict[str, Path], losses_of_the_cpu: dict[int, str]
) -> None:
    """The same script on the vendor's device, carried by its library and not through host memory, has the same bits."""
    name, flavour, _ = VENDORS[vendor]
    env = environment(vendor, libraries, SAGELLM_VENDOR=vendor)
    output = torchrun(SCRIPT, RANKS, "--device", name, "--streams", flavour, env=env)
    assert lines(output, "losses") == losses_of_the_cpu, output
    told = lines(output, "staged")
    for rank in range(RANKS):
        staged, path = told[rank].split(" by ", 1)
        assert staged == "0" and vendor in path.lower(), told
        assert str(libraries[vendor]) in path, told
