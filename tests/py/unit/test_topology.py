"""Topologies: read from NVIDIA's library and the kernel, or passed by a user, and the start rules' choice for them."""

from __future__ import annotations

import ctypes
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from harness import IS_GLOO

import torch_sagellm
from torch_sagellm import topology
from torch_sagellm._private import load
from torch_sagellm.topology import TopologyInfo, TopologyManager

pytestmark = pytest.mark.quick

own_choice = pytest.mark.skipif(IS_GLOO, reason="gloo: this is about the package's own choice")


@own_choice
@pytest.mark.parametrize(
    ("size", "devices", "given", "expected"),
    [
        (999_999, 8, None, "recursive_doubling"),
        (1000, 8, None, "recursive_doubling"),
        (65_535, 6, None, "recursive_doubling"),
        (65_536, 6, None, "ring"),
        (999_999, 6, None, "ring"),
        (999_999, 6, TopologyInfo(full_nvlink=True), "ring"),
        (1000, 6, TopologyInfo(full_nvlink=True), "tree"),
        (999_999, 8, TopologyInfo(full_nvlink=True), "tree"),
        (1_000_000, 8, None, "ring"),
        (1_000_000, 8, TopologyInfo(full_nvlink=True), "ring"),
        (8, 16, TopologyInfo(hosts=2), "hierarchical"),
        (1 << 30, 16, TopologyManager(TopologyInfo(hosts=2, full_nvlink=True)), "hierarchical"),
        (8, 2, TopologyInfo(hosts=2), "recursive_doubling"),
        (0, 1, None, "recursive_doubling"),
        (1 << 40, 100_000, None, "ring"),
    ],
)
def test_the_start_rules(size: int, devices: int, given: Any, expected: str) -> None:
    assert torch_sagellm.select_all_reduce_algorithm(size, devices, given) == expected
    if isinstance(given, TopologyManager):
        assert given.select_all_reduce_algorithm(size, devices) == expected


@own_choice
def test_the_core_decides_and_says_why() -> None:
    found = load.extension().start_rule("all_reduce", 8, 4, TopologyInfo(hosts=2, full_nvlink=True).option())
    assert (found["choice"], found["reason"], found["hosts"]) == ("hierarchical", "full_nvlink", 2)
    assert found["decided"].startswith("start rule hierarchical (tree between the hosts)")
    assert found["decided"].endswith("the topology that was given says hosts=2,full_nvlink=true")


@own_choice
def test_the_start_rules_refuse_nonsense() -> None:
    for size, devices, expected in (
        (-1, 2, "data_size is -1, expected a whole number from 0 on"),
        ("1MiB", 2, "data_size is '1MiB', expected a whole number"),
        (8, 0, "num_devices is 0, expected a whole number from 1 on"),
    ):
        with pytest.raises(ValueError, match=expected):
            torch_sagellm.select_all_reduce_algorithm(size, devices)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"topology is \{'hosts': 2\}, expected a TopologyManager or a TopologyInfo"):
        torch_sagellm.select_all_reduce_algorithm(8, 2, {"hosts": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 devices cannot be on the 3 hosts"):
        torch_sagellm.select_all_reduce_algorithm(8, 2, TopologyInfo(hosts=3))
    ask = load.extension().start_rule
    with pytest.raises(ValueError, match="start rules name algorithms of all_reduce, and were asked about broadcast"):
        ask("broadcast", 8, 2, "hosts=1")
    with pytest.raises(ValueError, match='the field hosts: expected a whole number from 1 on, got "none"'):
        ask("all_reduce", 8, 2, "hosts=none")


def test_a_topology_is_read_from_json_and_written_back(tmp_path: Path) -> None:
    text = '{"hosts": 2, "full_nvlink": true, "devices": ["a card", "a card"], "numa_nodes": null}'
    found = TopologyManager.from_json(text)
    assert found.topology == TopologyInfo(hosts=2, full_nvlink=True, devices=("a card", "a card"))
    assert found.is_fully_connected_nvlink() and "given as JSON" in repr(found)
    assert TopologyManager.from_json(found.to_json()).topology == found.topology
    assert found.topology.option() == "hosts=2,full_nvlink=true"
    file = tmp_path / "topology.json"
    file.write_text(text)
    same = TopologyManager.from_file(file)
    assert same.topology == found.topology and str(file) in repr(same)
    assert TopologyManager.from_json(b"{}").topology == TopologyInfo()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hosts": "2"}, "the field hosts: expected a whole number from 1 on, got '2'"),
        ({"hosts": 0}, "the field hosts: expected a whole number from 1 on, got 0"),
        ({"hosts": True}, "the field hosts: expected a whole number from 1 on, got True"),
        ({"hosts": None}, "the field hosts: expected a whole number from 1 on, got None"),
        ({"hosts": 1.5}, "the field hosts: expected a whole number from 1 on, got 1.5"),
        ({"full_nvlink": 1}, "the field full_nvlink: expected true or false, got 1"),
        ({"devices": "a card"}, "the field devices: expected a list of names, got 'a card'"),
        ({"devices": [1]}, "the field devices: expected a list of names, got [1]"),
        ({"cores": -1}, "the field cores: expected a whole number from 1 on, or null, got -1"),
        ({"numa_nodes": "2"}, "the field numa_nodes: expected a whole number from 1 on, or null, got '2'"),
        ({"host": 2}, "'host' is no field; expected some of hosts, full_nvlink, devices, cores, numa_nodes"),
        ([2], "expected a JSON object of fields, got [2]"),
    ],
)
def test_a_wrong_topology_is_refused_by_the_field(fields: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"sagellm topology: {expected}")):
        TopologyManager.from_json(json.dumps(fields))
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=re.escape(f"{expected} (in the file {file})")):
        TopologyManager.from_file(file)


def test_what_is_no_json_or_no_topology_is_refused(tmp_path: Path) -> None:
    for text in ('{"hosts": 2', b"\xff\xfe\x00"):
        with pytest.raises(ValueError, match="this is no JSON: "):
            TopologyManager.from_json(text)
    with pytest.raises(FileNotFoundError):
        TopologyManager.from_file(tmp_path / "missing.json")
    with pytest.raises(TypeError, match="topology is 'hosts=2', expected a TopologyInfo"):
        TopologyManager("hosts=2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got \[1\], expected a dict of fields by name"):
        TopologyInfo.from_dict([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="topology_manager is 2, expected a TopologyManager or a TopologyInfo"):
        topology.option_of(2)  # type: ignore[arg-type]


def test_the_machine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    found = TopologyManager()
    facts = load.extension().doctor()
    assert found.source == "read from this machine" and found.topology.hosts == 1
    assert found.topology.cores == int(facts["cores"]) <= len(os.sched_getaffinity(0))
    nodes = Path("/sys/devices/system/node")
    known = list(nodes.glob("node[0-9]*")) if nodes.is_dir() else []
    assert found.topology.numa_nodes == (len(known) or None)
    # torchrun's variables for 7 ranks on hosts with up to 4 ranks each.
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert TopologyInfo.detect().hosts == 2
    assert TopologyInfo.detect(hosts=3).hosts == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "four")
    assert TopologyInfo.detect().hosts == 1


class Nvml:
    """A replacement for NVIDIA's library with `devices` GPUs, of which all pairs or none are joined by NVLink."""

    def __init__(self, devices: int, joined: bool) -> None:
        self.devices, self.joined = devices, joined

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = self.devices
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, at: Any, device: Any) -> int:
        return 0

    def nvmlDeviceGetName(self, device: Any, name: Any, size: Any) -> int:
        name.value = b"a card"
        return 0

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: Any, status: Any) -> int:
        ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = 0 if self.joined else 1
        return 0


def test_nvlink_is_found_only_where_every_pair_has_it() -> None:
    assert topology.ask(Nvml(4, True)) == (["a card"] * 4, True)
    assert topology.ask(Nvml(4, False)) == (["a card"] * 4, False)
    assert topology.ask(Nvml(1, True)) == (["a card"], False)
    assert topology.ask(Nvml(0, True)) == ([], False)


def test_topology_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "LIBRARY", "libno-such-library.so.9")
    found = TopologyInfo.detect(hosts=1)
    assert (found.hosts, found.full_nvlink) == (1, False) and not found.is_fully_connected_nvlink()


def test_nvlink_of_one_host_does_not_join_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "nvlink", lambda: (["a card"] * 2, True))
    assert TopologyInfo.detect(hosts=1).full_nvlink and not TopologyInfo.detect(hosts=2).full_nvlink
    assert TopologyInfo.detect(hosts=2).devices == ("a card", "a card")
