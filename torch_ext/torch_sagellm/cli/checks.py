"""The checks of ``torch-sagellm doctor``: settings that are often wrong, each with its fix.

Every check depends only on ``Facts``, so that tests can describe any machine.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _torch_sagellm_autoload import Unusable
from torch_sagellm._private import address as _address
from torch_sagellm._private import nearest
from torch_sagellm._private import variables as _variables
from torch_sagellm.cli import libraries

ERROR, WARNING = "error", "warning"
#: Every variable that the package reads; a test compares this list with the sources.
VARIABLES = (
    "SAGELLM_ACL_LIBRARY",
    "SAGELLM_ALGORITHM",
    "SAGELLM_AS",
    "SAGELLM_BLOCKING_WAIT",
    "SAGELLM_CACHE_DIR",
    "SAGELLM_CALL_SITES",
    "SAGELLM_CNCL_LIBRARY",
    "SAGELLM_CNRT_LIBRARY",
    "SAGELLM_CUDA_LIBRARY",
    "SAGELLM_DOUBLE_AS_FLOAT",
    "SAGELLM_DUMP_DIR",
    "SAGELLM_EXPLAIN",
    "SAGELLM_FUSION",
    "SAGELLM_HCCL_LIBRARY",
    "SAGELLM_HCOMM_LIBRARY",
    "SAGELLM_KEEP_TIMES",
    "SAGELLM_KERNELS",
    "SAGELLM_LINK",
    "SAGELLM_LINKS",
    "SAGELLM_LOG",
    "SAGELLM_MEASURE_LINK",
    "SAGELLM_NUMA",
    "SAGELLM_NCCL_LIBRARY",
    "SAGELLM_ON_DEVICE_FAILURE",
    "SAGELLM_RING",
    "SAGELLM_SHARED_BYTES",
    "SAGELLM_SHARED_TENSORS",
    "SAGELLM_SOCKET_IFNAMES",
    "SAGELLM_SOFT_TIMEOUT",
    "SAGELLM_STATUS_DIR",
    "SAGELLM_STRICT",
    "SAGELLM_THREADS",
    "SAGELLM_UCX_LIBRARY",
    "SAGELLM_VENDOR",
    "SAGELLM_VENDOR_DIR",
    "SAGELLM_VERIFY",
)
#: Variables of builds and of the package's own tests, or prefixes of them.
OTHERS = (
    "SAGELLM_EDIT",
    "SAGELLM_LINKER",
    "SAGELLM_PREBUILT",
    "SAGELLM_SIM_",
    "SAGELLM_SYMBOLS",
    "SAGELLM_TEST_",
    "SAGELLM_TORCHES",
    "SAGELLM_UPDATE_GOLDEN",
    "SAGELLM_WRITE_DOCS",
)
INTERFACE = "GLOO_SOCKET_IFNAME"
#: In seconds. A name look-up that is slower delays every start of a job; one with an unreachable name server takes 5 s.
SLOW_NAME, NAME_LIMIT = 1.0, 10.0
#: Defaults of torch and torchrun, in seconds.
GROUP_TIMEOUT, JOIN, LAST_CALL, SHUTDOWN = 1800.0, 600.0, 30.0, 30.0
KEEP_ALIVE, ATTEMPTS = 5.0, 3.0
#: In seconds: how much longer some ranks may take than others to start the interpreter and import torch.
LEAST_GROUP_TIMEOUT = 60.0
#: Files that a process with torch has open before it creates a group, plus a group's files other than connections.
SPARE_FILES = 64
#: In seconds: the time that a rank needs to write the records of a failed group and to exit.
LEAST_SHUTDOWN = 5.0


@dataclass(frozen=True)
class Finding:
    """A problem with its fix."""

    level: str
    what: str
    fix: str


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds: those that the user of ``doctor`` passes, otherwise the defaults of torch and torchrun."""

    group: float = GROUP_TIMEOUT
    #: Parameters of ``torchrun --rdzv-conf``, by name.
    rendezvous: Mapping[str, float] = field(default_factory=dict)
    stall: float | None = None


@dataclass(frozen=True)
class Facts:
    """The facts that the checks examine."""

    environment: Mapping[str, str]
    #: The core's facts about this machine.
    machine: Mapping[str, str]
    #: Network interfaces, and whether each is up.
    interfaces: Mapping[str, bool]
    #: The address that this host's name resolves to, or "".
    own_address: str
    #: The address of MASTER_ADDR, or "" if it is not set or does not resolve; and the seconds of the look-up.
    master_address: str
    look_up_seconds: float
    timeouts: Timeouts = Timeouts()
    #: The addresses at which groups over several hosts would listen.
    addresses: _address.Addresses = field(default_factory=_address.Addresses)
    #: The limit of open files of a process; 0 if there is none.
    descriptors: int = 0
    #: Problems of the vendors' libraries that variables name, by variable.
    libraries: Mapping[str, str] = field(default_factory=dict)
    #: TCP's congestion control in this network namespace, or "" if it is unknown.
    congestion: str = ""

    def number(self, name: str) -> int | None:
        """The value of a variable that is a whole number, otherwise None."""
        text = self.environment.get(name, "").strip()
        return int(text) if text.isdecimal() else None


def gather(machine: Mapping[str, str], timeouts: Timeouts) -> Facts:
    """The facts of this machine and process."""
    master = os.environ.get("MASTER_ADDR", "")
    began = time.monotonic()
    master_address = address_of(master) if master else ""
    seconds = time.monotonic() - began
    own = address_of(socket.gethostname())
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
        dict(os.environ),
        machine,
        _interfaces(),
        own,
        master_address,
        seconds,
        timeouts,
        _address.towards(master_address),
        0 if limit == resource.RLIM_INFINITY else limit,
        libraries.problems(os.environ),
        _congestion(),
    )


def address_of(name: str) -> str:
    """The address of a name, or "" if it has none or the name server does not answer within ``NAME_LIMIT``."""
    found: list[str] = []

    def look_up() -> None:
        try:
            found.append(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError:
            pass  # the name does not resolve

    # getaddrinfo has no timeout; the thread ends when it returns.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(NAME_LIMIT)
    return found[0] if found else ""


def _interfaces() -> dict[str, bool]:
    found = {}
    for _, name in socket.if_nameindex():
        try:
            state = Path(f"/sys/class/net/{name}/operstate").read_text().strip()
        except OSError:
            state = "unknown"
        found[name] = state in ("up", "unknown")  # the loopback interface is "unknown"
    return found


def _congestion() -> str:
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return ""


def findings(facts: Facts) -> list[Finding]:
    """All findings, errors first."""
    found = [each for check in CHECKS for each in check(facts)]
    return sorted(found, key=lambda each: each.level != ERROR)


# ------------------------------------------------------------------------------------------------- the checks


def interface(facts: Facts) -> Iterator[Finding]:
    """Checks the interfaces that a variable names; without such a variable, whether other hosts can reach this host."""
    several = _has_several_hosts(facts)
    up = ", ".join(name for name, is_up in facts.interfaces.items() if is_up and name != "lo") or "lo"
    variable = _address.OURS if facts.environment.get(_address.OURS, "").strip(" ,") else INTERFACE
    named = [name.strip() for name in facts.environment.get(variable, "").split(",") if name.strip()]
    for name in named:
        if name not in facts.interfaces:
            near = nearest.meant(name, facts.interfaces)
            yield Finding(ERROR, f"{variable} names {name!r}, which this host does not have{near}", f"name one of {up}")
        elif not facts.interfaces[name]:
            yield Finding(ERROR, f"{variable} names {name!r}, which is down", f"name one that is up: {up}")
        elif name == "lo" and several:
            what = f"{variable} names the loopback interface, and MASTER_ADDR leads to another host's network"
            yield Finding(ERROR, what, f"name the interface that leads to the other hosts: {up}")
    if named and _address.V6 in facts.addresses.kinds and _address.V4 not in facts.addresses.kinds:
        what = f"{variable}={','.join(named)} has IPv6 addresses alone"
        yield Finding(
            WARNING, what, "give the interfaces of all other hosts IPv6 addresses, too, or this one an IPv4 address"
        )
    if named or not several:
        return
    name = facts.own_address or "no address"
    reachable = [found[0] for found in facts.addresses.kinds.values() if not _address.is_loopback(found[0])]
    if not reachable:
        what = f"this host has no address that other hosts reach (its name leads to {name})"
        yield Finding(ERROR, what, f"export {INTERFACE}={up.split(', ')[0]}, or connect it to the others' network")
    elif not facts.own_address or _is_loopback(facts.own_address):
        what = f"the name of this host leads to {name}: sagellm listens at {reachable[0]}, torch's own gloo at that"
        yield Finding(WARNING, what, f"export {INTERFACE}={up.split(', ')[0]}, or correct /etc/hosts")


def _has_several_hosts(facts: Facts) -> bool:
    """Whether the job's ranks may be on several hosts, by the launcher's variables."""
    alone = facts.number("WORLD_SIZE") is not None and facts.number("WORLD_SIZE") == facts.number("LOCAL_WORLD_SIZE")
    return bool(facts.master_address) and not _is_loopback(facts.master_address) and not alone


def congestion(facts: Facts) -> Iterator[Finding]:
    """Checks TCP's congestion control, if TCP connects several hosts."""
    by_tcp = facts.environment.get("SAGELLM_LINK", "").strip() != "ucx"
    if facts.congestion.startswith("bbr") and by_tcp and _has_several_hosts(facts):
        what = (
            f"TCP uses {facts.congestion}, which spaces its packets out: between network namespaces of one machine, "
            "calls of 256 KiB and more took 1.2 to 2.3 times as long as with cubic"
        )
        fix = "unless the hosts are far apart, try sysctl -w net.ipv4.tcp_congestion_control=cubic on all hosts"
        yield Finding(WARNING, what, fix)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def names(facts: Facts) -> Iterator[Finding]:
    """Checks that MASTER_ADDR resolves, and quickly."""
    master = facts.environment.get("MASTER_ADDR", "")
    if master and not facts.master_address:
        what = f"MASTER_ADDR={master} leads to no address"
        yield Finding(
            ERROR, what, "correct the name, or use an address; every rank waits for it until the group's timeout"
        )
    elif facts.look_up_seconds > SLOW_NAME:
        what = f"looking up MASTER_ADDR={master} took {facts.look_up_seconds:.1f} s"
        yield Finding(
            WARNING, what, "use an address, add the name to /etc/hosts, or set RES_OPTIONS='timeout:1 attempts:1'"
        )


def launcher(facts: Facts) -> Iterator[Finding]:
    """Checks that the numbers that a launcher passes are consistent."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS"):
        text = facts.environment.get(name)
        if text is not None and facts.number(name) is None:
            yield Finding(ERROR, f"{name}={text!r} is no whole number", f"set it, or unset it: unset {name}")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        one, other = facts.number(rank), facts.number(size)
        if one is not None and other is not None and one >= other:
            yield Finding(ERROR, f"{rank}={one} is not below {size}={other}", "ranks are counted from 0; start anew")


def affinity(facts: Facts) -> Iterator[Finding]:
    """Checks that there are enough cores for the ranks and their threads."""
    cores = int(facts.machine.get("cores", "0") or 0)
    ranks = facts.number("LOCAL_WORLD_SIZE") or 1
    threads = facts.number("OMP_NUM_THREADS")
    cpus = re.match(r"(\d+) CPUs", facts.machine.get("affinity", ""))
    quota = re.match(r"([\d.]+) cores", facts.machine.get("quota", ""))
    if cpus and int(cpus[1]) < ranks:
        what = f"{ranks} ranks of this host may run on {cpus[1]} CPUs ({facts.machine['affinity']})"
        yield Finding(WARNING, what, "widen the mask (taskset, cpuset of the container, numactl), or start fewer ranks")
    elif cores and cores < ranks:
        what = f"{ranks} ranks share {cores} cores: waiting ranks take time from working ones"
        yield Finding(WARNING, what, f"start {cores} ranks, or give the container more cores")
    elif threads and cores and threads * ranks > cores:
        what = f"OMP_NUM_THREADS={threads} on each of {ranks} ranks is more than {cores} cores"
        yield Finding(WARNING, what, f"export OMP_NUM_THREADS={max(1, cores // ranks)}")
    elif threads is None and ranks > 1:
        what = f"OMP_NUM_THREADS is not set: each of {ranks} ranks computes with {cores} threads on {cores} cores"
        yield Finding(WARNING, what, f"export OMP_NUM_THREADS={max(1, cores // ranks)}")
    if cpus and quota and float(quota[1]) < min(ranks, int(cpus[1])):
        what = f"the control group gives {quota[1]} cores to {ranks} ranks and stops them when these are used up"
        yield Finding(WARNING, what, "raise the quota (limits.cpu, --cpus) to a core for each rank")


def kernel(facts: Facts) -> Iterator[Finding]:
    """Checks kernel features whose absence causes a fallback."""
    if not facts.machine.get("memfd", "available").startswith("available"):
        what = f"memfd: {facts.machine['memfd']}"
        yield Finding(WARNING, what, "allow memfd_create in the container's seccomp profile; until then see /dev/shm")
    if not facts.machine.get("pidfd", "available").startswith("available"):
        what = f"pidfd: {facts.machine['pidfd']}; the end of a rank is noticed by its socket instead"
        yield Finding(WARNING, what, "allow pidfd_open in the container's seccomp profile, or use Linux 5.3 or newer")


def timeouts(facts: Facts) -> Iterator[Finding]:
    """Checks the timeouts of torchrun's rendezvous, of the group, of warnings about a stall, and of the job's end."""
    times = facts.timeouts
    conf = times.rendezvous
    join, last_call = conf.get("join_timeout", conf.get("timeout", JOIN)), conf.get("last_call_timeout", LAST_CALL)
    beats = conf.get("keep_alive_interval", KEEP_ALIVE) * conf.get("keep_alive_max_attempt", ATTEMPTS)
    if last_call >= join:
        what = f"torchrun's last_call_timeout of {last_call:g} s is not below its join_timeout of {join:g} s"
        yield Finding(
            ERROR, what, f"--rdzv-conf join_timeout={max(join, 2 * last_call):g},last_call_timeout={LAST_CALL:g}"
        )
    if beats >= join:
        what = f"torchrun gives up joining after {join:g} s, before it notices a dead agent after {beats:g} s"
        yield Finding(WARNING, what, f"--rdzv-conf join_timeout={4 * beats:g}, or a shorter keep_alive_interval")
    if times.group < LEAST_GROUP_TIMEOUT:
        what = f"a group's timeout of {times.group:g} s also limits its start, and importing torch takes seconds"
        yield Finding(
            WARNING, what, f"init_process_group(timeout=timedelta(seconds={LEAST_GROUP_TIMEOUT:g})) or more; "
            "single operations may have shorter ones"
        )  # fmt: skip
    for name, value in (("a probe's --stall", times.stall), ("SAGELLM_SOFT_TIMEOUT", _seconds(facts))):
        if value is not None and value >= times.group:
            what = f"{name} of {value:g} s is not below the group's timeout of {times.group:g} s: the group fails first"
            yield Finding(WARNING, what, f"take {times.group / 4:g} s, or a longer timeout of the group")
    shutdown = facts.number("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if shutdown is not None and shutdown < LEAST_SHUTDOWN:
        what = f"torchrun kills ranks {shutdown} s after it asked them to end (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)"
        yield Finding(WARNING, what, f"{SHUTDOWN:g} s, the default, leave time for the records of a failed group")


def _seconds(facts: Facts) -> float | None:
    try:
        return float(facts.environment.get("SAGELLM_SOFT_TIMEOUT", ""))
    except ValueError:
        return None


def variables(facts: Facts) -> Iterator[Finding]:
    """Reports variables of this package with wrong values or unknown names, and variables of torch that cost time."""
    for found in _variables.wrong(facts.environment):
        yield Finding(ERROR if found.is_refused else WARNING, found.what, found.fix)
    for name in sorted(facts.environment):
        if name.startswith("SAGELLM_") and name not in VARIABLES and not name.startswith(OTHERS):
            near = nearest.meant(name, VARIABLES)
            yield Finding(WARNING, f"{name} is read by nothing{near}", f"unset {name}, or correct its name")
    if facts.environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        what = (
            "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch compare every collective between ranks by further collectives"
        )
        yield Finding(WARNING, what, "unset it when you have found the fault: every call is checked without it, too")


def rules(facts: Facts) -> Iterator[Finding]:
    """Checks that the rules of SAGELLM_ALGORITHM can be parsed."""
    text = facts.environment.get("SAGELLM_ALGORITHM", "")
    if not text:
        return
    from torch_sagellm._private import load

    try:
        load.extension().table_without_group(2, text)
    except Unusable:
        return
    except ValueError as error:
        yield Finding(ERROR, f"SAGELLM_ALGORITHM={text}: {error}", "every group would refuse it: see docs/choosing.md")


def descriptors(facts: Facts) -> Iterator[Finding]:
    """Checks that a process may open as many files as its groups need."""
    ranks = facts.number("WORLD_SIZE")
    local = facts.number("LOCAL_WORLD_SIZE")
    if not ranks or not facts.descriptors:
        return
    # A process shares memory with the ranks of its host and watches their processes; other ranks take one connection
    # each.
    here = min(local or ranks, ranks)
    needed = SPARE_FILES + 3 * here + (ranks - here)
    if needed > facts.descriptors:
        what = (
            f"a process may open {facts.descriptors} files (ulimit -n); one group of {ranks} ranks needs about {needed}"
        )
        yield Finding(ERROR, what, f"ulimit -n {_rounded(needed + 4 * ranks)} before the launcher, on every host")
    elif needed + 4 * ranks > facts.descriptors:
        what = (
            f"a process may open {facts.descriptors} files (ulimit -n): enough for one or two groups of {ranks} ranks"
        )
        yield Finding(WARNING, what, f"ulimit -n {_rounded(needed + 16 * ranks)} before the launcher, on every host")


def _rounded(files: int) -> int:
    return 1 << (files - 1).bit_length()


def devices(facts: Facts) -> Iterator[Finding]:
    """Checks the vendors' libraries that variables name, and the variables of NCCL that affect how it is used."""
    for variable, problem in facts.libraries.items():
        yield Finding(
            ERROR, f"{variable}={facts.environment.get(variable, '')}: {problem}", f"correct it, or unset {variable}"
        )
    if facts.environment.get("NCCL_COMM_BLOCKING") == "0":
        what = "NCCL_COMM_BLOCKING=0 makes NCCL's calls return before they are done: each is asked until it is"
        yield Finding(
            WARNING, what, "unset NCCL_COMM_BLOCKING: sagellm has a deadline for making communicators without it"
        )
    if facts.environment.get("NCCL_RUNTIME_CONNECT") == "0":
        what = (
            "NCCL_RUNTIME_CONNECT=0 makes NCCL connect all algorithms when a communicator is made, which takes longer"
        )
        yield Finding(WARNING, what, "unset it, unless the first call of each kind has to be fast")
    plugin = facts.environment.get("NCCL_TUNER_PLUGIN", "")
    steers = facts.environment.get("SAGELLM_ALGORITHM") or facts.environment.get("SAGELLM_EXPLAIN") == "1"
    if plugin and steers and "sagellm" not in plugin:
        what = f"NCCL_TUNER_PLUGIN={plugin} is loaded instead of sagellm's, by which rules choose NCCL's algorithm"
        yield Finding(WARNING, what, "unset one of NCCL_TUNER_PLUGIN, SAGELLM_ALGORITHM and SAGELLM_EXPLAIN")


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    interface,
    names,
    congestion,
    launcher,
    affinity,
    kernel,
    timeouts,
    variables,
    rules,
    descriptors,
    devices,
)


#: The numeric parameters of torchrun's rendezvous.
TIMES = (
    "timeout",
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "read_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
)


def parse_rendezvous(text: str) -> dict[str, float]:
    """Parses the numbers of ``torchrun --rdzv-conf``; a ValueError for text that torchrun could not parse."""
    found: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} is no key=value, as torchrun's --rdzv-conf takes it")
        try:
            found[key.strip()] = float(value)
        except ValueError:
            if key.strip() in TIMES:
                raise ValueError(f"{pair!r}: {value!r} is no number") from None
            continue  # not a time, such as is_host=true
        if key.strip() in TIMES and not 0 < found[key.strip()] < 1e9:
            raise ValueError(f"{pair!r}: it must be over 0")
    return found
