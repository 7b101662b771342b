"""How torch finds the package, and the global state that the package must not change. Starts no ranks."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
import torch
from harness import in_new_process

import _torch_sagellm_autoload
from torch_sagellm._private import delegate, load, options, register, variables

pytestmark = pytest.mark.quick


LOOK = """
import json, os, sys, threading
import torch
print(json.dumps({
    "tasks": len(os.listdir("/proc/self/task")),
    "files": len(os.listdir("/proc/self/fd")),
    "threads": threading.active_count(),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
    "package": "torch_sagellm" in sys.modules,
    "extension": "torch_sagellm._C" in sys.modules,
    "known": "SAGELLM" in torch.distributed.Backend._plugins,
}))
"""


def test_import_torch_registers_the_name_and_starts_and_opens_nothing() -> None:
    with_us = in_new_process(LOOK, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    without = in_new_process(LOOK, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert with_us["known"] and not without["known"]
    assert not with_us["package"] and not without["package"] and not with_us["extension"]
    for name in ("tasks", "files", "threads", "children"):
        assert with_us[name] == without[name], name


def test_import_sagellm_registers_where_torch_does_not_autoload() -> None:
    found = in_new_process(
        LOOK.replace("import torch", "import torch_sagellm, torch", 1), TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert found["known"] and not found["extension"]


def test_import_sagellm_before_torch_with_autoloading_registers_once() -> None:
    found = in_new_process(
        LOOK.replace("import torch", "import torch_sagellm, torch", 1), TORCH_DEVICE_BACKEND_AUTOLOAD="1"
    )
    assert found["known"] and not found["extension"]


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_both_entry_points_lead_to_the_registration(group: str) -> None:
    points = [point for point in metadata.entry_points(group=group) if point.name == "sagellm"]
    assert len(points) == 1
    points[0].load()()
    plugin = torch.distributed.Backend._plugins["SAGELLM"]
    assert plugin.creator_fn is _torch_sagellm_autoload.create and plugin.extended_api
    points[0].load()()
    assert torch.distributed.Backend._plugins["SAGELLM"] is plugin


def test_defaults_of_torch_stay() -> None:
    defaults = torch.distributed.Backend.default_device_backend_map
    assert defaults["cpu"] == "gloo" and defaults["cuda"] == "nccl"
    assert list(torch.distributed.Backend.backend_capability["sagellm"]) == ["cpu"]


def test_unknown_attributes_are_refused() -> None:
    import torch_sagellm

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torch_sagellm.nothing  # noqa: B018


def test_the_delegate_is_checked_before_anybody_meets() -> None:
    assert delegate.check("") == "gloo" and delegate.check("GLOO") == "gloo"
    with pytest.raises(ValueError, match=r"delegate='nccl' cannot serve CPU tensors; expected one of gloo, mpi, ucc"):
        delegate.check("nccl")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("engine", "fast", "expected one of auto, delegate"),
        ("vendor", "acme", "expected one of auto, host, nccl, hccl, cncl"),
        ("on_device_failure", "explode", "expected one of raise, exit, none"),
        ("delegate", "nccl", "expected one of gloo, mpi, ucc"),
        ("soft_timeout", -0.5, "expected 0 (none) or more"),
        ("soft_timeout", float("nan"), "expected 0 (none) or more"),
        ("soft_timeout", 1e9, "expected 0 (none) or more"),
        ("verify", "some", "expected one of off, sampled, all, sampled:warn, all:warn"),
        ("threads", -1, "expected 0 (as torch) to 4096"),
        ("threads", 4097, "expected 0 (as torch) to 4096"),
        ("links", 0, "expected 1 to 16"),
        ("links", 17, "expected 1 to 16"),
        ("algorithm", "foo", "there is no ':'"),
        ("topology", "foo", "the option topology is"),
    ],
)
def test_an_option_is_judged_where_it_is_given_and_where_it_is_used(option: str, value: object, expected: str) -> None:
    import torch_sagellm

    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        torch_sagellm.Options(**{option: value})
    assert option in str(raised.value)
    later = torch_sagellm.Options()
    setattr(later, option, value)
    with pytest.raises(ValueError) as again:
        register._settings(load.extension(), later)
    assert str(again.value) == str(raised.value)


def test_a_group_has_the_words_of_its_options_as_the_core_reads_them() -> None:
    import torch_sagellm

    given = torch_sagellm.Options(engine="Delegate", delegate="GLOO", verify="All:Warn", on_device_failure="EXIT")
    given.vendor = "Host"
    ours = register._settings(load.extension(), given)
    words = (ours.engine, ours.delegate, ours.verify, ours.on_device_failure, ours.vendor)
    assert words == ("delegate", "gloo", "all:warn", "exit", "host") and given.engine == "Delegate"
    given.vendor = ""
    assert register._settings(load.extension(), given).vendor == "auto"


def test_every_variable_of_an_option_overrides_it() -> None:
    values = {
        "SAGELLM_BLOCKING_WAIT": ("Yes", True, "1 or 0 (on or off)"),
        "SAGELLM_FUSION": ("off", False, "1 or 0 (on or off)"),
        "SAGELLM_LINKS": (" 3 ", 3, "a whole number from 1 to 16"),
        "SAGELLM_MEASURE_LINK": ("0", False, "1 or 0 (on or off)"),
        "SAGELLM_NUMA": ("1", True, "1 or 0 (on or off)"),
        "SAGELLM_ON_DEVICE_FAILURE": ("Exit", "Exit", "one of raise, exit, none"),
        "SAGELLM_STRICT": ("ON", True, "1 or 0 (on or off)"),
        "SAGELLM_THREADS": ("7", 7, "a whole number from 0 (as torch) to 4096"),
        "SAGELLM_VENDOR": ("nccl:/lib/N", "nccl:/lib/N", "one of auto, host, nccl, hccl, cncl"),
        "SAGELLM_VERIFY": ("all:warn", "all:warn", "one of off, sampled, all, sampled:warn, all:warn"),
        "TORCH_NCCL_BLOCKING_WAIT": ("1", True, "1 or 0 (on or off)"),
    }
    assert set(values) == set(variables.OVERRIDES)
    assert options.overridden(dict.fromkeys(values, " ")) == {}
    for name, (text, value, expected) in values.items():
        assert options.overridden({name: text}) == {variables.OVERRIDES[name][0]: value}
        with pytest.raises(ValueError, match=f"^sagellm: {name}='Maybe', expected {re.escape(expected)}$"):
            options.overridden({name: "Maybe"})
    both = {"SAGELLM_BLOCKING_WAIT": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    assert options.overridden(both) == {"blocking_wait": False}


def test_the_variable_of_the_link_has_two_values() -> None:
    assert [variables.link({variables.LINK: text}) for text in ("", " UCX ", "tcp")] == ["tcp", "ucx", "tcp"]
    assert variables.link({}) == "tcp"
    with pytest.raises(ValueError, match=r"^sagellm: SAGELLM_LINK='rdma', expected one of tcp, ucx$"):
        variables.link({variables.LINK: "rdma"})
    assert [found.is_refused for found in variables.wrong({variables.LINK: "rdma"})] == [True]


def test_a_mistyped_name_is_answered_with_the_nearest_one() -> None:
    import torch_sagellm
    from torch_sagellm import topology

    with pytest.raises(AttributeError, match="no attribute 'fused_allreduce'; did you mean 'fused_all_reduce'"):
        torch_sagellm.fused_allreduce  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"torch_sagellm.topology' has no .* 'TopologyInf'; did you mean 'TopologyInfo'"
    ):
        topology.TopologyInf  # noqa: B018
    assert not hasattr(torch_sagellm, "_fused_all_reduc")


def test_the_list_of_names_is_that_of_the_package() -> None:
    """`__init__.pyi` has each name once, with the module that `__init__.py` loads, so that a type checker sees the
    objects that run."""
    import importlib
    import re
    from pathlib import Path

    import torch_sagellm

    stub = Path(torch_sagellm.__file__).with_name("__init__.pyi").read_text()
    listed = re.findall(r"^from torch_sagellm\.(\S+) import (\w+) as (\w+)$", stub, re.M)
    assert len(listed) == stub.count(" import ") and sorted(listed) == listed
    assert {name: home for home, name, _ in listed} == torch_sagellm._HOMES
    assert sorted(torch_sagellm.__all__) == sorted({"__version__", *(name for _, name, _ in listed)})
    assert len(torch_sagellm.__all__) == len(listed) + 1
    for home, name, known in listed:
        found = getattr(importlib.import_module(f"torch_sagellm.{home}"), name)
        assert name == known and getattr(torch_sagellm, name) is found, name
        assert getattr(found, "__module__", None) in (f"torch_sagellm.{home}", "torch_sagellm", None, "typing"), found


def test_a_wrong_option_is_refused_where_it_is_written() -> None:
    import inspect
    import re
    from pathlib import Path

    from torch_sagellm import Options

    for given, said in (
        ({"fuson": True}, "there is no option 'fuson'; did you mean 'fusion'?"),
        ({"nothing_like_it": 1}, "the options are engine, delegate, fusion"),
        ({"fusion": "yes"}, "fusion is 'yes', expected True or False"),
        ({"soft_timeout": "5"}, "soft_timeout is '5', expected seconds, or None"),
        ({"vendor": None}, "vendor is None, expected a text"),
    ):
        with pytest.raises(TypeError, match=f"^sagellm Options: .*{re.escape(said)}"):
            Options(**given)  # type: ignore[arg-type]
    for given, said in (
        ({"algorithm": "foo"}, "the option algorithm: rule \"foo\": there is no ':'"),
        ({"topology": "foo"}, 'the option topology is "foo"'),
        ({"engine": "foo"}, "the option engine is 'foo'"),
        ({"soft_timeout": -1}, "the option soft_timeout is -1 s"),
    ):
        with pytest.raises(ValueError, match=f"^sagellm: {re.escape(said)}"):
            Options(**given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'gloo' has no name"):
        Options("gloo")  # type: ignore[call-arg]
    made = Options(fusion=0, soft_timeout=5, algorithm="*:0-=ring")  # type: ignore[arg-type]
    assert (
        repr(made) == "Options(fusion=False, algorithm='*:0-=ring', soft_timeout=5.0)"
        and repr(Options()) == "Options()"
    )
    # The stub lists the same options with the same defaults.
    stub = (Path(inspect.getfile(options)).parent.parent / "_C.pyi").read_text()
    body = stub.partition("class Options:")[2].partition("-> None")[0]
    defaults = dict(re.findall(r"^        (\w+): [\w| ]+ = (.+),$", body, re.M))
    assert list(defaults) == list(options.OPTIONS)
    assert {name: eval(text) for name, text in defaults.items()} == {
        name: getattr(Options(), name) for name in defaults
    }
