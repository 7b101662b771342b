"""``torch-sagellm doctor``: facts of this machine, problems with their fixes, and a self-test of two ranks."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import _torch_sagellm_autoload
from torch_sagellm.cli import arguments, checks, peer, ranks
from torch_sagellm.cli.show import fact, fit, paint

HELP = "facts about this machine, what to mend, and a self-test of two ranks"
DESCRIPTION = """Prints versions, usable cores, memory limits and kernel features, judges settings that often go
wrong, each with its fix, and then lets two ranks on this host communicate for two seconds.

Exits with 1 when a finding is an error or the self-test fails; warnings alone leave it at 0."""
EXAMPLES = """examples:
  torch-sagellm doctor                 facts, findings, then a short self-test
  torch-sagellm doctor --no-self-test  without the self-test
  torch-sagellm doctor --group-timeout 600 --rdzv-conf join_timeout=300 --stall 120
  torchrun --nproc-per-node=1 -m torch_sagellm doctor --no-self-test   judges what torchrun passes
  torch-sagellm doctor --listen        on one host, and on another: torch-sagellm doctor --peer FIRST_HOST
  SAGELLM_LOG=debug torch-sagellm doctor
"""
RANKS = 2
#: Duration of the self-test's measurement; starting two interpreters with torch takes longer than this.
MEASURE_SECONDS = 2.0
START_SECONDS = 60.0
SMALL, LARGE = 2, 1 << 20  # numbers of 4-byte elements: 8 B and 4 MiB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-self-test", action="store_true", help="print the facts and findings, and end")
    arguments.add_json(parser, "facts, findings and the outcome")
    hosts = parser.add_argument_group(
        "between two hosts, instead of all that",
        "run `torch-sagellm doctor --listen` on one host and `torch-sagellm doctor --peer THAT_HOST` on the other, in "
        "the environment of the job: each tells the other its addresses and connects to them, so both directions are "
        "tried, at ports as in a job. For more hosts, try each against the one of rank 0.",
    ).add_mutually_exclusive_group()
    hosts.add_argument("--peer", type=_peer, metavar="HOST[:PORT]", help="ask the host that listens")
    hosts.add_argument(
        "--listen",
        type=arguments.whole(1, 65535, "port"),
        nargs="?",
        const=peer.PORT,
        metavar="PORT",
        help=f"wait for one peer ({peer.PORT})",
    )
    judged = parser.add_argument_group("timeouts to judge, in seconds")
    judged.add_argument(
        "--group-timeout",
        type=arguments.seconds,
        help="of init_process_group (1800, torch's)",
    )
    judged.add_argument("--rdzv-conf", type=_rendezvous, metavar="KEY=VALUE,...", help="what torchrun is given")
    judged.add_argument("--stall", type=arguments.seconds, help="what `torch-sagellm health --stall` is given")


def _peer(text: str) -> tuple[str, int]:
    try:
        return peer.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rendezvous(text: str) -> dict[str, float]:
    try:
        return checks.parse_rendezvous(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(parsed: argparse.Namespace) -> int:
    with arguments.text_beside(parsed.json):
        code, found = _examine(parsed)
    if parsed.json:
        print(json.dumps(found, indent=2))
    return code


def _examine(parsed: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Returns the exit code, and the content of the JSON document."""
    if parsed.peer or parsed.listen is not None:
        beside = "--peer" if parsed.peer else "--listen"
        arguments.refuse(parsed, beside, ("no_self_test", "group_timeout", "rdzv_conf", "stall"))
        found = peer.connect(*parsed.peer) if parsed.peer else peer.listen(parsed.listen)
        _show(found)
        failed = any(each.level == checks.ERROR for each in found)
        return int(failed), {"passed": not failed, "findings": [vars(each) for each in found]}
    extension, unusable = _extension()
    named = _facts(extension)
    for name, value in named.items():
        fact(name, value)
    times = checks.Timeouts(parsed.group_timeout or checks.GROUP_TIMEOUT, parsed.rdzv_conf or {}, parsed.stall)
    facts = checks.gather({} if extension is None else extension.doctor(), times)
    named["address for other hosts"] = facts.addresses.problem or " or ".join(facts.addresses.chosen("")) or "none"
    fact("address for other hosts", named["address for other hosts"])
    found = unusable + checks.findings(facts)
    _show(found)
    if unusable and not parsed.no_self_test:
        fact("self-test", "not run: no group can be made")
    runs = not parsed.no_self_test and not unusable
    tested = 0
    if runs:
        try:
            tested = self_test()
        except ValueError:  # a variable, which is among the findings
            runs = False
            fact("self-test", "not run: no group can be made")
    failed = bool(tested) or any(each.level == checks.ERROR for each in found)
    test = ("failed" if tested else "passed") if runs else "not run"
    document = {"passed": not failed, "facts": named, "findings": [vars(each) for each in found], "self_test": test}
    return int(failed), document


def _extension() -> tuple[ModuleType | None, list[checks.Finding]]:
    """Returns the extension or None, and the problems because of which no group can be created."""
    from torch_sagellm._private import load
    from torch_sagellm.api import serve_as

    found = []
    try:
        _torch_sagellm_autoload.look()
    except Exception as error:
        fix = getattr(error, "fix", f"correct {serve_as.VARIABLE}, or unset it")
        found.append(checks.Finding(checks.ERROR, getattr(error, "what", str(error)), fix))
    try:
        return load.extension(), found
    except _torch_sagellm_autoload.Unusable as error:
        return None, [*found, checks.Finding(checks.ERROR, error.what, error.fix)]


def _show(found: list[checks.Finding]) -> None:
    for each in found:
        colour = "red" if each.level == checks.ERROR else "yellow"
        print(paint(each.level, colour) + fit(f"{each.level}: {each.what}", 2).removeprefix(each.level))
        print(fit(f"  fix: {each.fix}", 7), flush=True)
    if not found:
        fact("findings", paint("none", "green"))


def _facts(extension: Any) -> dict[str, str]:
    """Versions, then the core's facts about this machine."""
    import torch

    from torch_sagellm._private import load
    from torch_sagellm.api import serve_as, shared

    place = getattr(extension, "__file__", None) or Path(load.__file__).parent
    found = {
        "sagellm": f"{load.version()} ({place})",
        "torch": torch.__version__ + (f", built for {extension.torch_version_built}" if extension else ""),
        "python": f"{platform.python_version()} ({sys.executable})",
        **({name: str(value) for name, value in extension.doctor().items()} if extension else {}),
    }
    if extension:
        found["shared tensors"] = shared.outlook()
    if serve_as.serves():
        found["groups called gloo"] = f"are served by sagellm ({serve_as.VARIABLE})"
    return found | {name: os.environ[name] for name in sorted(os.environ) if name.startswith("SAGELLM_")}


def self_test() -> int:
    """Lets two ranks of this program meet on the loopback interface; 0 if both report success."""
    # torch's threads spin while they wait for work. They would occupy the core on which the other rank is measured.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    ended, _ = ranks.run("doctor", RANKS, seconds=START_SECONDS + MEASURE_SECONDS, environment=environment)
    for rank, one in enumerate(ended):
        if one.failure:
            fact(f"self-test, rank {rank}", f"FAILED, {one.failure}")
        if one.output.strip():
            print(one.output.rstrip(), flush=True)
    failed = any(one.failure for one in ended)
    fact("self-test", "FAILED" if failed else f"{RANKS} ranks: passed")
    return 1 if failed else 0


def run_rank(rank: int, count: int, port: int) -> int:
    """One rank of the self-test: checks sums, and measures their time. Rank 0 prints."""
    import torch
    import torch.distributed as dist

    ranks.join("sagellm", rank, count, port, 20.0)
    for numbers, name in ((SMALL, "8 B"), (LARGE, "4 MiB")):
        tensor = torch.full((numbers,), float(rank + 1))
        dist.all_reduce(tensor)
        wanted = float(sum(range(1, RANKS + 1)))
        if not bool((tensor == wanted).all()):
            print(f"all_reduce of {name}: expected {wanted}, got {tensor.unique().tolist()}")
            return 1
        times = _times(tensor)
        if rank == 0:
            fact(f"all_reduce of {name}", f"median {times[len(times) // 2] * 1e6:.1f} us of {len(times)}")
    dist.destroy_process_group()
    return 0


def _times(tensor: Any) -> list[float]:
    """Sorted seconds of repeated calls. Only rank 0's clock decides when to stop; rank 0 broadcasts the decision."""
    import torch
    import torch.distributed as dist

    times: list[float] = []
    until = time.monotonic() + MEASURE_SECONDS / 2
    again = torch.ones(1)
    while again.item() > 0:
        for _ in range(20):
            tensor.zero_()  # sums in place would grow from call to call
            started = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - started)
        again.fill_(float(time.monotonic() < until))
        dist.broadcast(again, src=0)
    return sorted(times)
