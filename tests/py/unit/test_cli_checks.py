"""What `torch-sagellm doctor` finds: each check on machines with the fault and on a machine without it."""

from __future__ import annotations

import re
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from harness import IS_GLOO

from torch_sagellm._private import variables
from torch_sagellm._private.address import Addresses
from torch_sagellm.cli import checks, libraries
from torch_sagellm.cli.checks import Facts, Timeouts
from torch_sagellm.cli.main import main

pytestmark = [pytest.mark.quick, pytest.mark.skipif(IS_GLOO, reason="gloo: this is about the package's own command")]
ROOT = Path(__file__).resolve().parents[3]
MACHINE = {"cores": "8", "affinity": "8 CPUs (0-7)", "quota": "none", "memfd": "available", "pidfd": "available"}
TWO_HOSTS = {"MASTER_ADDR": "10.0.0.1"}
WELL = Facts(
    environment={"MASTER_ADDR": "10.0.0.1", "RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    | {"OMP_NUM_THREADS": "2", "SAGELLM_LOG": "info", "GLOO_SOCKET_IFNAME": "eth0"},
    machine=MACHINE,
    interfaces={"lo": True, "eth0": True, "eth1": False},
    own_address="10.0.0.2",
    master_address="10.0.0.1",
    look_up_seconds=0.01,
    addresses=Addresses({4: ["10.0.0.2"], 14: ["127.0.0.1"]}),
    descriptors=1024,
)


def changed(**environment: str | None) -> Facts:
    """Returns the machine without faults, but with some variables changed. The value None removes a variable."""
    every = {**WELL.environment, **environment}
    return replace(WELL, environment={name: value for name, value in every.items() if value is not None})


def test_a_machine_without_faults_has_no_findings() -> None:
    assert checks.findings(WELL) == []
    # All ranks are on this host, so the address of its name does not matter.
    alone = changed(GLOO_SOCKET_IFNAME=None, WORLD_SIZE="4")
    assert checks.findings(replace(alone, own_address="127.0.1.1", master_address="10.0.0.2")) == []
    assert checks.findings(replace(alone, congestion="bbr")) == []
    assert checks.findings(replace(WELL, congestion="cubic")) == []
    assert checks.findings(replace(changed(SAGELLM_LINK="ucx"), congestion="bbr")) == []


CASES = [
    (changed(GLOO_SOCKET_IFNAME="eht0"), checks.ERROR, "does not have; did you mean 'eth0'?", "name one of eth0"),
    (changed(GLOO_SOCKET_IFNAME="eth1"), checks.ERROR, "which is down", "eth0"),
    (
        changed(SAGELLM_SOCKET_IFNAMES="eth0,eth1"),
        checks.ERROR,
        "SAGELLM_SOCKET_IFNAMES names 'eth1', which is down",
        "eth0",
    ),
    (changed(GLOO_SOCKET_IFNAME="lo"), checks.ERROR, "names the loopback interface", "eth0"),
    (
        replace(changed(GLOO_SOCKET_IFNAME=None), own_address="127.0.1.1"),
        checks.WARNING,
        "leads to 127.0.1.1: sagellm listens at 10.0.0.2",
        "=eth0",
    ),
    (replace(changed(GLOO_SOCKET_IFNAME=None), own_address=""), checks.WARNING, "leads to no address", "=eth0"),
    (
        replace(changed(GLOO_SOCKET_IFNAME=None), own_address="127.0.1.1", addresses=Addresses({14: ["127.0.0.1"]})),
        checks.ERROR,
        "has no address that other hosts reach",
        "=eth0",
    ),
    (replace(WELL, addresses=Addresses({6: ["fd77::1"]})), checks.WARNING, "IPv6 addresses alone", "IPv4"),
    (replace(WELL, descriptors=64), checks.ERROR, "may open 64 files", "ulimit -n 128"),
    (replace(WELL, descriptors=100), checks.WARNING, "one or two groups of 8 ranks", "ulimit -n 256"),
    (
        replace(changed(SAGELLM_NCCL_LIBRARY="/no"), libraries={"SAGELLM_NCCL_LIBRARY": "there is no such file"}),
        checks.ERROR,
        "SAGELLM_NCCL_LIBRARY=/no: there is no such file",
        "unset SAGELLM_NCCL_LIBRARY",
    ),
    (changed(NCCL_COMM_BLOCKING="0"), checks.WARNING, "NCCL_COMM_BLOCKING=0", "unset"),
    (changed(NCCL_RUNTIME_CONNECT="0"), checks.WARNING, "NCCL_RUNTIME_CONNECT=0", "unset"),
    (
        changed(NCCL_TUNER_PLUGIN="libmine.so", SAGELLM_EXPLAIN="1"),
        checks.WARNING,
        "NCCL_TUNER_PLUGIN=libmine.so is loaded instead",
        "SAGELLM_EXPLAIN",
    ),
    (replace(WELL, master_address=""), checks.ERROR, "MASTER_ADDR=10.0.0.1 leads to no address", "correct the name"),
    (replace(WELL, congestion="bbr"), checks.WARNING, "TCP uses bbr", "tcp_congestion_control=cubic"),
    (replace(WELL, look_up_seconds=5.0), checks.WARNING, "took 5.0 s", "RES_OPTIONS"),
    (changed(RANK="one"), checks.ERROR, "RANK='one' is no whole number", "unset RANK"),
    (changed(RANK="8"), checks.ERROR, "RANK=8 is not below WORLD_SIZE=8", "counted from 0"),
    (replace(WELL, machine=MACHINE | {"affinity": "1 CPUs (3)"}), checks.WARNING, "may run on 1 CPUs", "taskset"),
    (replace(WELL, machine=MACHINE | {"cores": "2"}), checks.WARNING, "4 ranks share 2 cores", "start 2 ranks"),
    (changed(OMP_NUM_THREADS="8"), checks.WARNING, "OMP_NUM_THREADS=8 on each of 4", "export OMP_NUM_THREADS=2"),
    (changed(OMP_NUM_THREADS=None), checks.WARNING, "OMP_NUM_THREADS is not set", "export OMP_NUM_THREADS=2"),
    (replace(WELL, machine=MACHINE | {"quota": "2.500 cores"}), checks.WARNING, "gives 2.500 cores", "--cpus"),
    (replace(WELL, machine=MACHINE | {"memfd": "denied"}), checks.WARNING, "memfd: denied", "seccomp"),
    (replace(WELL, machine=MACHINE | {"pidfd": "denied"}), checks.WARNING, "pidfd: denied", "seccomp"),
    (replace(WELL, timeouts=Timeouts(group=5)), checks.WARNING, "timeout of 5 s also limits its start", "seconds=60"),
    (replace(WELL, timeouts=Timeouts(group=300, stall=300)), checks.WARNING, "--stall of 300 s", "take 75 s"),
    (
        replace(WELL, timeouts=Timeouts(rendezvous={"join_timeout": 30, "last_call_timeout": 60})),
        checks.ERROR,
        "last_call_timeout of 60 s is not below",
        "join_timeout=120",
    ),
    (
        replace(WELL, timeouts=Timeouts(rendezvous={"timeout": 40, "keep_alive_interval": 20})),
        checks.WARNING,
        "before it notices a dead agent after 60 s",
        "join_timeout=240",
    ),
    (changed(SAGELLM_SOFT_TIMEOUT="3600"), checks.WARNING, "SAGELLM_SOFT_TIMEOUT of 3600 s", "take 450 s"),
    (changed(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1"), checks.WARNING, "kills ranks 1 s after", "30 s"),
    (changed(SAGELLM_ALGORITM="x"), checks.WARNING, "did you mean 'SAGELLM_ALGORITHM'?", "unset SAGELLM_ALGORITM"),
    (changed(SAGELLM_FOO="1"), checks.WARNING, "SAGELLM_FOO is read by nothing", "unset SAGELLM_FOO"),
    *(
        (changed(**{name: value}), level, f"{name}={value}: expected ", f"unset {name}")
        for name, value, level in (
            ("SAGELLM_SOFT_TIMEOUT", "abc", checks.WARNING),
            ("SAGELLM_SOFT_TIMEOUT", "-1", checks.WARNING),
            ("SAGELLM_RING", "abc", checks.WARNING),
            ("SAGELLM_SHARED_BYTES", "1GiB", checks.WARNING),
            ("SAGELLM_SHARED_TENSORS", "maybe", checks.WARNING),
            ("SAGELLM_RING", "-1", checks.WARNING),
            ("SAGELLM_CALL_SITES", "yes", checks.WARNING),
            ("SAGELLM_EXPLAIN", "maybe", checks.WARNING),
            ("SAGELLM_DOUBLE_AS_FLOAT", "yes", checks.WARNING),
            ("SAGELLM_DUMP_DIR", "/dev/null/nope", checks.WARNING),
            ("SAGELLM_STATUS_DIR", "/dev/null", checks.WARNING),
            ("SAGELLM_CACHE_DIR", "/dev/null/nope", checks.WARNING),
            ("SAGELLM_KERNELS", "avx1", checks.WARNING),
            ("SAGELLM_LOG", "loud", checks.WARNING),
            ("SAGELLM_FUSION", "maybe", checks.ERROR),
            ("SAGELLM_STRICT", "2", checks.ERROR),
            ("SAGELLM_MEASURE_LINK", "2", checks.ERROR),
            ("SAGELLM_THREADS", "many", checks.ERROR),
            ("SAGELLM_BLOCKING_WAIT", "2", checks.ERROR),
            ("SAGELLM_VENDOR", "garbage", checks.ERROR),
            ("SAGELLM_ON_DEVICE_FAILURE", "stop", checks.ERROR),
        )
    ),
    (changed(TORCH_DISTRIBUTED_DEBUG="DETAIL"), checks.WARNING, "TORCH_DISTRIBUTED_DEBUG=DETAIL", "unset it"),
    (changed(SAGELLM_ALGORITHM="all_reduce=fast"), checks.ERROR, "SAGELLM_ALGORITHM=all_reduce=fast", "choosing.md"),
]


@pytest.mark.parametrize(
    ("facts", "level", "what", "fix"), CASES, ids=lambda each: each if isinstance(each, str) else ""
)
def test_each_fault_is_found_with_its_fix(facts: Facts, level: str, what: str, fix: str) -> None:
    (found,) = checks.findings(facts)
    assert (found.level, what in found.what, fix in found.fix) == (level, True, True), found


def test_errors_come_first_and_decide_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAGELLM_ALGORITM", "x")
    assert main(["doctor", "--no-self-test"]) == 0
    assert "fix: unset SAGELLM_ALGORITM" in capsys.readouterr().out
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main(["doctor", "--no-self-test", "--rdzv-conf", "join_timeout=60,is_host=true"]) == 1
    text = capsys.readouterr().out
    assert text.index("error: GLOO_SOCKET_IFNAME") < text.index("warning: SAGELLM_ALGORITM")
    with pytest.raises(SystemExit):
        main(["doctor", "--rdzv-conf", "join_timeout"])


#: Variables whose values other code checks: rules, the served name, interfaces, and files of libraries.
OTHERWISE = re.compile("SAGELLM_(ALGORITHM|AS|SOCKET_IFNAMES|VENDOR_DIR|[A-Z]+_LIBRARY)$")


def test_the_value_of_every_variable_is_judged() -> None:
    """Every variable has a rule in `variables.RULES`. A valid value produces no message."""
    assert {name for name in checks.VARIABLES if not OTHERWISE.match(name)} == set(variables.RULES)
    well = {"SAGELLM_SOFT_TIMEOUT": "2.5", "SAGELLM_RING": "0", "SAGELLM_CALL_SITES": "1", "SAGELLM_STRICT": "on"}
    well |= {
        "SAGELLM_VENDOR": "nccl:/lib/libnccl.so",
        "SAGELLM_LOG": "Debug",
        "SAGELLM_FUSION": "",
        "SAGELLM_KERNELS": "avx2",
    }
    assert not list(variables.wrong(well))


def test_the_first_group_warns_of_values_and_makes_the_folder_of_dumps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(variables, "_told", threading.Lock())
    monkeypatch.setenv("SAGELLM_RING", "many")
    monkeypatch.setenv("SAGELLM_STRICT", "maybe")  # the group refuses this value itself
    monkeypatch.setenv("SAGELLM_DUMP_DIR", str(tmp_path / "new" / "folder"))
    variables.check()
    variables.check()
    assert [record.getMessage() for record in caplog.records] == [
        "SAGELLM_RING=many: expected a whole number from 0 on; a group remembers 1024 operations. correct it, or unset "
        "SAGELLM_RING"
    ]
    assert (tmp_path / "new" / "folder").is_dir()


def test_every_variable_that_the_sources_read_is_known() -> None:
    """`doctor` would call an unknown variable a typo, so `VARIABLES` must have each one."""
    read = set()
    for folder, ending in (("src", "rs"), ("cpp", "cpp"), ("torch_ext", "py")):
        for path in (ROOT / folder).rglob(f"*.{ending}"):
            # In C++ a name without quotes may be a macro. In Rust the unit tests follow the code.
            code = path.read_text().partition("#[cfg(test)]")[0]
            found = re.findall(r'"(SAGELLM_[A-Z_]+)"', code)
            # `SAGELLM_<KEY>_LIBRARY` names the library of a vendor.
            found += [f"SAGELLM_{key}_LIBRARY" for key in re.findall(r'^ +key: "([A-Z]+)",$', code, re.M)]
            read |= {name for name in found if not name.startswith(checks.OTHERS)}
    assert {"SAGELLM_RING", "SAGELLM_CNRT_LIBRARY"} <= read
    assert read == set(checks.VARIABLES), read ^ set(checks.VARIABLES)


def test_every_variable_that_the_build_reads_is_known() -> None:
    """`doctor` may run in a shell that sets such a variable for its builds."""
    read = set(re.findall(r'"(SAGELLM_[A-Z_]+)"', (ROOT / "setup.py").read_text()))
    assert "SAGELLM_PREBUILT" in read and not {name for name in read if not name.startswith(checks.OTHERS)}


def test_every_variable_stands_in_the_documentation() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert not [name for name in checks.VARIABLES if not re.search(f"`{name}[`=]", page)]


def test_libraries_that_variables_name(tmp_path: Path) -> None:
    """Each library is loaded in a separate process."""
    broken, old = tmp_path / "broken.so", tmp_path / "old.so"
    broken.write_text("no library")
    source = tmp_path / "old.c"
    source.write_text("int ncclGetVersion(int *version) { *version = 2708; return 0; }")
    subprocess.run(["cc", "-shared", "-o", str(old), str(source)], check=True, timeout=60)
    problems = libraries.problems(
        {
            "SAGELLM_NCCL_LIBRARY": str(old),
            "SAGELLM_CUDA_LIBRARY": str(tmp_path / "missing.so"),
            "SAGELLM_ACL_LIBRARY": str(broken),
            "SAGELLM_CNRT_LIBRARY": str(old),
            "SAGELLM_VENDOR_DIR": str(tmp_path / "none"),
        }
    )
    assert problems.pop("SAGELLM_ACL_LIBRARY").startswith("it cannot be loaded (")
    assert problems == {
        "SAGELLM_NCCL_LIBRARY": "it is NCCL 2.7.8, expected 2.18.0 or newer",
        "SAGELLM_CUDA_LIBRARY": "there is no such file",
        "SAGELLM_VENDOR_DIR": "there is no such folder",
    }


def test_the_oldest_nccl_is_that_of_the_core() -> None:
    source = (ROOT / "src/engine/device/libs/nccl/communicator.rs").read_text()
    assert f"const OLDEST: c_int = {libraries.OLDEST_NCCL};" in source
