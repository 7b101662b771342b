"""Rules of a group reach the vendor's library: NCCL's by its tuner plug-in, HCCL's by the configuration of the
communicator.

The simulators load plug-ins and read configurations like the libraries do; see tests/simulators/README.md.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, run_fresh
from on_device import holds, total
from simulated import environment, start

import torch_sagellm
from torch_sagellm._private import load

#: The first test builds the simulators, which takes minutes on a busy machine; every job has its own deadline.
pytestmark = pytest.mark.timeout(900)

PLUGINS = {"NCCL_TUNER_PLUGIN": "ncclTunerPlugin", "NCCL_PROFILER_PLUGIN": "ncclProfiler"}
#: Element counts of an all_reduce. Without rules the simulated NCCL chooses a tree for the small one and a ring for the
#: large one.
SMALL, LARGE = 1000, 3 << 20
UNSTEERED = {SMALL: "TREE", LARGE: "RING"}


def trace_lines() -> list[str]:
    """Returns the lines that the simulator has written for this process so far."""
    path = Path(f"{os.environ['SAGELLM_SIM_TRACE']}.{os.getpid()}")
    return path.read_text().splitlines() if path.exists() else []


def told(variable: str) -> str | None:
    """Returns a variable of the environment as C code sees it. Python keeps its own copy, so this asks the C
    library."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(variable.encode())
    return None if value is None else value.decode()


def loaded() -> list[str]:
    """Returns the plug-ins that the simulator has found, by their symbols without the version."""
    found = [re.fullmatch(r"plugin (\w+)_v\d found=true", line) for line in trace_lines()]
    return [each[1] for each in found if each]


def begin(ctx: Context, vendor: str, rules: str) -> str:
    """Creates a group with rules. Returns torch's name of its device.

    The simulators' core is built from the project's crate and exports plug-ins with the same names. This core is loaded
    first, with global symbols, and must not take the place of the extension's plug-ins.
    """
    return start(ctx, vendor, rules=rules)[1]


def all_reduced(name: str, count: int, group: dist.ProcessGroup | None = None) -> tuple[str, str, bool, str]:
    """Runs one all_reduce. Returns the number of its communicator, "ALGORITHM, protocol WORD", whether the library
    asked a tuner, and the choice that `explain` reports."""
    before = len(trace_lines())
    value = torch.empty(count, device=name).fill_(dist.get_rank() + 1)
    work = dist.all_reduce(value, group=group, async_op=True)
    assert work is not None
    work.wait()
    holds(value, total(dist.get_world_size()))
    pattern = re.compile(rf"chose id=(\w+) func=4 bytes={4 * count} channels=\d+ tuned=(\w+) algo=(\w+) proto=(\w+)")
    (chosen,) = [each for each in map(pattern.fullmatch, trace_lines()[before:]) if each]
    found = torch_sagellm.explain(work)
    assert found.reason == "vendor" and found.choice in str(found), found
    return chosen[1], f"{chosen[3]}, protocol {chosen[4]}", chosen[2] == "true", found.choice


def steered(ctx: Context, rules: str, expected: dict[int, str]) -> None:
    name = begin(ctx, "nccl", rules)
    for variable in PLUGINS:
        assert variable not in os.environ and told(variable) is None, "no code has set it before"
    numbers = set()
    for count, algorithm in expected.items():
        number, ran, asked, choice = all_reduced(name, count)
        numbers.add(number)
        assert asked and ran.startswith(f"{algorithm}, "), (count, ran, choice)
        assert f": {ran}, " in choice, (ran, choice)
    assert len(numbers) == 1, numbers
    # Both variables name this very extension, whose plug-ins were found.
    own = load.extension().__file__
    for variable, symbol in PLUGINS.items():
        path = told(variable)
        assert path is not None and Path(path).samefile(own), (variable, path)
        assert loaded().count(symbol) == 1, trace_lines()
    # Another group in the process has the same ranks and no rules.
    free = dist.new_group(pg_options=torch_sagellm.Options(vendor="nccl"))
    for count, algorithm in UNSTEERED.items():
        number, ran, asked, choice = all_reduced(name, count, free)
        assert asked and number not in numbers, number
        assert ran.startswith(f"{algorithm}, ") and f": {ran}, " in choice, (count, ran, choice)
    # The first group still follows its rules.
    for count, algorithm in expected.items():
        number, ran, _, _ = all_reduced(name, count)
        assert number in numbers and ran.startswith(f"{algorithm}, "), (count, ran)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "rules,expected",
    [
        ("all_reduce:0-=double_tree", {SMALL: "TREE", LARGE: "TREE"}),
        ("all_reduce:0-=ring", {SMALL: "RING", LARGE: "RING"}),
        ("*:1MiB-=binomial_tree", {SMALL: "TREE", LARGE: "TREE"}),
        ("all_reduce:0-1MiB=ring;all_reduce:1MiB-=double_tree", {SMALL: "RING", LARGE: "TREE"}),
        ("reduce:0-=double_tree", UNSTEERED),
    ],
    ids=["double_tree", "ring", "from_1MiB", "crossed", "another_operation"],
)
def test_rules_choose_nccls_algorithm_in_their_own_group(
    rules: str, expected: dict[int, str], libraries: dict[str, Path], tmp_path: Path
) -> None:
    """NCCL loads our plug-ins and is tuned only by the rules of its group. `explain` reports NCCL's choice."""
    run_fresh(
        steered, 2, rules, expected, env=environment("nccl", libraries, SAGELLM_SIM_TRACE=str(tmp_path / "trace"))
    )


#: A number of elements that makes more than 1,000,000 bytes. For this size the start rules say "ring", while the
#: simulated NCCL chooses a tree.
BETWEEN = 300_000


def steered_by_a_topology(ctx: Context, rules: str, expected: dict[int, str]) -> None:
    name = begin(ctx, "nccl", "")
    manager = torch_sagellm.TopologyManager.from_json('{"hosts": 1, "full_nvlink": true}')
    comm = torch_sagellm.create_comm_backend("nccl", topology_manager=manager, algorithm=rules)
    assert comm.group is not dist.group.WORLD
    numbers = set()
    for count, algorithm in expected.items():
        number, ran, asked, choice = all_reduced(name, count, comm.group)
        numbers.add(number)
        assert asked and ran.startswith(f"{algorithm}, ") and f": {ran}, " in choice, (count, ran, choice)
        work = dist.all_reduce(torch.ones(count, device=name), group=comm.group, async_op=True)
        assert work is not None
        work.wait()
        decided = torch_sagellm.explain(work).decided
        if rules:
            assert "a rule or line names hierarchical" in decided, decided
        else:
            assert decided.endswith("because a topology was given: hosts=1,full_nvlink=true"), decided
    # Another group in the process has the same ranks and no topology.
    for count, algorithm in (UNSTEERED | {BETWEEN: "TREE"}).items():
        number, ran, _, _ = all_reduced(name, count)
        assert number not in numbers and ran.startswith(f"{algorithm}, "), (count, ran)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "rules,expected",
    [
        ("", {SMALL: "TREE", BETWEEN: "RING", LARGE: "RING"}),
        ("all_reduce:0-=hierarchical", {SMALL: "TREE", LARGE: "TREE"}),
    ],
    ids=["topology", "rule"],
)
def test_a_topology_manager_steers_nccl_by_the_start_rules(
    rules: str, expected: dict[int, str], libraries: dict[str, Path], tmp_path: Path
) -> None:
    """The start rules select a ring where the simulated NCCL would choose a tree. A rule has priority over the
    topology."""
    env = environment("nccl", libraries, SAGELLM_SIM_TRACE=str(tmp_path / "trace"), SAGELLM_VENDOR="nccl")
    run_fresh(steered_by_a_topology, 2, rules, expected, env=env)


def plugins_of_the_user(ctx: Context, left: list[str]) -> None:
    """Runs with plug-ins switched off. `left` are the variables that the user has not set to "none"."""
    name = begin(ctx, "nccl", "all_reduce:0-1MiB=ring;all_reduce:1MiB-=double_tree")
    for count, algorithm in UNSTEERED.items():
        _, ran, asked, choice = all_reduced(name, count)
        # Without the profiler plug-in, the tuner cannot match NCCL's communicator to a group.
        assert ran.startswith(f"{algorithm}, "), (count, ran)
        assert asked == ("NCCL_TUNER_PLUGIN" in left), trace_lines()
        assert (f": {ran}, " in choice) == ("NCCL_PROFILER_PLUGIN" in left), choice
    for variable, symbol in PLUGINS.items():
        path = told(variable)
        assert path is not None and (path == "none") == (variable not in left), (variable, path)
        assert loaded().count(symbol) == (variable in left), trace_lines()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "left", [[], ["NCCL_TUNER_PLUGIN"], ["NCCL_PROFILER_PLUGIN"]], ids=["none", "tuner", "profiler"]
)
def test_plugins_that_the_user_has_switched_off_stay_off(
    left: list[str], libraries: dict[str, Path], tmp_path: Path
) -> None:
    """With "none" NCCL makes its own choice. `explain` reports it as long as our profiler is loaded."""
    off = {variable: "none" for variable in PLUGINS if variable not in left}
    env = environment("nccl", libraries, SAGELLM_SIM_TRACE=str(tmp_path / "trace"), **off)
    run_fresh(plugins_of_the_user, 2, left, env=env)


def configured(ctx: Context, rules: str, word: str) -> None:
    name = begin(ctx, "hccl", rules)

    def words() -> list[str]:
        return [line.split(" algo=")[1] for line in trace_lines() if line.startswith("HcclCommConfig size=")]

    value = torch.ones(100, device=name)
    dist.all_reduce(value)
    holds(value, ctx.world_size)
    first = words()
    assert first and set(first) == {word}, trace_lines()
    # A group without rules has a separate communicator, whose configuration names no algorithm.
    free = dist.new_group(pg_options=torch_sagellm.Options(vendor="auto"))
    dist.all_reduce(value, group=free)
    holds(value, ctx.world_size**2)
    second = words()[len(first) :]
    assert second and set(second) == {""}, trace_lines()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "rules,word",
    [
        ("*:0-=ring", "level0:NA;level1:ring"),
        ("*:0-=halving_doubling", "level0:NA;level1:H-D_R"),
        ("all_reduce:0-=ring", ""),
        ("*:0-1MiB=ring", ""),
        ("", ""),
    ],
    ids=["ring", "halving_doubling", "one_operation", "some_sizes", "no_rules"],
)
def test_a_rule_for_everything_is_in_hccls_configuration(
    rules: str, word: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """HCCL has one algorithm for the whole communicator. Rules for single kinds do not change it, and neither does
    another group."""
    run_fresh(configured, 2, rules, word, env=environment("hccl", libraries, SAGELLM_SIM_TRACE=str(tmp_path / "trace")))
