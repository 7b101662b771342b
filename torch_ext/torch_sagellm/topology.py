"""The machines of a job: ``TopologyInfo`` holds the facts, ``TopologyManager`` reads or accepts them.

This module decides nothing. The core's start rules (src/select/start.rs) use a topology in two places: in
``select_all_reduce_algorithm``, and in groups that are created with a topology.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from numbers import Integral
from pathlib import Path
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
#: Constants of nvml.h: the query "connected by NVLink?", its positive answer, and the code of success.
P2P_NVLINK, P2P_OK, SUCCESS = 2, 0, 0
NAME_BYTES = 96


@dataclass(frozen=True)
class TopologyInfo:
    """Facts about the machines of a job.

    Only ``hosts`` and ``full_nvlink`` affect a decision; the other fields are informative. A wrong value is a
    ValueError that names the field, the expected value and the actual one.

    Example::

        pair = torch_sagellm.TopologyInfo(hosts=2, full_nvlink=True)
        assert pair.is_fully_connected_nvlink()
    """

    #: Number of hosts of the devices. A group that knows its own number of hosts uses that number instead.
    hosts: int = 1
    #: Whether every pair of devices is connected by NVLink, directly or through a switch.
    full_nvlink: bool = False
    #: Names of this host's devices.
    devices: tuple[str, ...] = ()
    #: Number of cores that this process may use; None if it is not known.
    cores: int | None = None
    #: Number of NUMA nodes of this host; None if it is not known.
    numa_nodes: int | None = None

    def __post_init__(self) -> None:
        for name in ("hosts", "cores", "numa_nodes"):
            value = getattr(self, name)
            if not (value is None and name != "hosts") and (type(value) is not int or value < 1):
                raise _wrong(name, "a whole number from 1 on" + ("" if name == "hosts" else ", or null"), value)
        if type(self.full_nvlink) is not bool:
            raise _wrong("full_nvlink", "true or false", self.full_nvlink)
        names = self.devices
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise _wrong("devices", "a list of names", names)
        object.__setattr__(self, "devices", tuple(names))

    def is_fully_connected_nvlink(self) -> bool:
        """Whether NVLink connects every pair of devices (``full_nvlink``)."""
        return self.full_nvlink

    def option(self) -> str:
        """The fields that affect decisions, in the form of the option ``topology``: "hosts=2,full_nvlink=false"."""
        return f"hosts={self.hosts},full_nvlink={str(self.full_nvlink).lower()}"

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TopologyInfo:
        """Creates a topology from fields by name; missing fields have their defaults, and an unknown field is a
        ValueError."""
        if not isinstance(fields, Mapping):
            raise TypeError(f"sagellm topology: got {fields!r}, expected a dict of fields by name")
        known = cls.__dataclass_fields__
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise ValueError(
                f"sagellm topology: {', '.join(map(repr, unknown))} is no field; expected some of {', '.join(known)}"
            )
        return cls(**fields)

    @classmethod
    def detect(cls, hosts: int | None = None) -> TopologyInfo:
        """Reads this machine: NVML for GPUs and NVLink, the kernel for cores and NUMA nodes.

        ``hosts`` is the number of hosts of the job; None reads it from torchrun's environment, and means 1 without
        torchrun. On several hosts NVLink counts as not full, because NVML sees only one host. Without NVML or a driver,
        no NVLink is assumed.
        """
        from torch_sagellm._private import load

        hosts = _hosts_of_the_job() if hosts is None else hosts
        facts = load.extension().doctor()
        devices, full = nvlink()
        if not devices and facts["accelerators"] != "none":
            devices = facts["accelerators"].split(", ")
        nodes = facts["NUMA nodes"].count("CPUs")
        return cls(
            hosts=hosts,
            full_nvlink=full and hosts == 1,
            devices=tuple(devices),
            cores=int(facts["cores"]),
            numa_nodes=nodes or None,
        )


class TopologyManager:
    """The topology of a job, read from this machine or given; ``create_comm_backend(topology_manager=...)`` uses it.

    A group that is created with a topology falls back on the start rules: they choose the algorithm of each operation
    for which neither a user's rule nor a table names one. This holds even if the link between hosts was measured. The
    start rules also steer the library of a device's vendor. Rank 0's topology applies to the whole group: a rank with a
    different one follows rank 0's and warns. See docs/choosing.md.

    Args:
        topology: the topology; None to read this machine's (``TopologyInfo.detect``).

    Example::

        manager = torch_sagellm.TopologyManager.from_json('{"hosts": 2, "full_nvlink": false}')
        comm = torch_sagellm.create_comm_backend(topology_manager=manager)
        print(comm.explain("all_reduce", 4 << 20).decided)
    """

    def __init__(self, topology: TopologyInfo | None = None) -> None:
        if topology is not None and not isinstance(topology, TopologyInfo):
            raise TypeError(f"sagellm TopologyManager: topology is {topology!r}, expected a TopologyInfo or None")
        #: The topology, and its source.
        self.topology: TopologyInfo = TopologyInfo.detect() if topology is None else topology
        self.source = "read from this machine" if topology is None else "given"

    @classmethod
    def from_json(cls, text: str | bytes) -> TopologyManager:
        """Creates it from a JSON object with fields of ``TopologyInfo``; a ValueError names the place or field that is
        wrong."""
        return cls._read(text, "given as JSON")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> TopologyManager:
        """Like ``from_json``, from a file. A file that cannot be read is an OSError."""
        try:
            return cls._read(Path(path).read_bytes(), f"from the file {os.fspath(path)}")
        except ValueError as error:
            raise ValueError(f"{error} (in the file {os.fspath(path)})") from None

    @classmethod
    def _read(cls, text: str | bytes, source: str) -> TopologyManager:
        try:
            fields = json.loads(text)
        except ValueError as error:  # also raised for bytes that are not text
            raise ValueError(f"sagellm topology: this is no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"sagellm topology: expected a JSON object of fields, got {json.dumps(fields)[:80]}")
        manager = cls(TopologyInfo.from_dict(fields))
        manager.source = source
        return manager

    def to_json(self) -> str:
        """The topology as JSON that ``from_json`` reads."""
        return json.dumps(asdict(self.topology))

    def is_fully_connected_nvlink(self) -> bool:
        """Whether NVLink connects every pair of devices (``full_nvlink`` of the topology)."""
        return self.topology.is_fully_connected_nvlink()

    def select_all_reduce_algorithm(self, data_size: int, num_devices: int) -> str:
        """Returns the result of ``torch_sagellm.select_all_reduce_algorithm`` with this topology."""
        return select_all_reduce_algorithm(data_size, num_devices, self.topology)

    def __repr__(self) -> str:
        return f"<TopologyManager {self.topology}, {self.source}>"


def select_all_reduce_algorithm(
    data_size: int, num_devices: int, topology: TopologyInfo | TopologyManager | None = None
) -> str:
    """The algorithm that the start rules name for an all_reduce of ``data_size`` bytes over ``num_devices`` devices.

    The result is "hierarchical" if there are several hosts with several devices each. Otherwise, below 1,000,000 bytes,
    it is "recursive_doubling", or "tree" if NVLink connects all devices; from 1,000,000 bytes on it is "ring". If the
    number of devices is no power of two, it is "ring" already from 65,536 bytes on. Without a topology: one host, no
    full NVLink. In a group, the user's rules and a measured table have priority over the start rules, and so has a
    measured link unless the group has a topology; ``explain`` says which source decided.

    Raises:
        ValueError: the size is below 0, or there is no device, or there are fewer devices than hosts.

    Example::

        assert torch_sagellm.select_all_reduce_algorithm(64 * 1024, 8) == "recursive_doubling"
        assert torch_sagellm.select_all_reduce_algorithm(64 << 20, 8, torch_sagellm.TopologyInfo()) == "ring"
    """
    from torch_sagellm._private import load

    for name, value, least in (("data_size", data_size, 0), ("num_devices", num_devices, 1)):
        if not isinstance(value, Integral) or value < least:
            raise ValueError(
                f"sagellm select_all_reduce_algorithm: {name} is {value!r}, expected a whole number from {least} on"
            )
    given = TopologyInfo() if topology is None else topology
    found = load.extension().start_rule("all_reduce", data_size, num_devices, option_of(given, "topology"))
    choice: str = found["choice"]
    return choice


def option_of(given: TopologyManager | TopologyInfo | None, name: str = "topology_manager") -> str:
    """The option ``topology`` of a group, from the argument called ``name``."""
    if given is None:
        return ""
    topology = given.topology if isinstance(given, TopologyManager) else given
    if not isinstance(topology, TopologyInfo):
        raise TypeError(f"sagellm: {name} is {given!r}, expected a TopologyManager or a TopologyInfo")
    return topology.option()


def _wrong(name: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"sagellm topology: the field {name}: expected {expected}, got {got!r}")


def _hosts_of_the_job() -> int:
    """The number of hosts, from torchrun's environment; 1 if torchrun did not start this process."""
    world, local = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not (world.isdigit() and local.isdigit() and int(world) and int(local)):
        return 1
    return -(-int(world) // int(local))


def nvlink() -> tuple[list[str], bool]:
    """Names of the GPUs, and whether NVLink connects every pair of at least two.

    Without NVML, a driver or GPUs the result is ``([], False)``; a pair that cannot be queried counts as not linked.
    """
    try:
        nvml: Any = ctypes.CDLL(LIBRARY)
    except OSError:
        return [], False
    try:
        if nvml.nvmlInit_v2() != SUCCESS:
            return [], False
        try:
            return ask(nvml)
        finally:
            nvml.nvmlShutdown()
    except AttributeError:  # the library is too old for a function
        return [], False


def ask(nvml: Any) -> tuple[list[str], bool]:
    """Like ``nvlink``, with an initialised library."""
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != SUCCESS:
        return [], False
    devices: list[Any] = []
    names: list[str] = []
    for at in range(count.value):
        device, name = ctypes.c_void_p(), ctypes.create_string_buffer(NAME_BYTES)
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(at), ctypes.byref(device)) != SUCCESS:
            return names, False
        devices.append(device)
        known = nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(NAME_BYTES)) == SUCCESS
        names.append(name.value.decode(errors="replace") if known else f"GPU {at}")
    pairs = [_joined(nvml, one, other) for one, other in combinations(devices, 2)]
    return names, bool(pairs) and all(pairs)


def _joined(nvml: Any, one: Any, other: Any) -> bool:
    status = ctypes.c_int(-1)
    found = nvml.nvmlDeviceGetP2PStatus(one, other, ctypes.c_int(P2P_NVLINK), ctypes.byref(status))
    return bool(found == SUCCESS and status.value == P2P_OK)


def __getattr__(name: str) -> Any:
    """Older code imports other public names from this module too."""
    import torch_sagellm

    return torch_sagellm._public(__name__, name)
