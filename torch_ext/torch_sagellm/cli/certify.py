"""``torch-sagellm certify``: tests whether and how well this machine's processors or cards work with the package.

It has five stages, each in new rank processes (which run `demos/certified.py`): values, a late rank, a killed rank,
bandwidth, and communication behind computation. All except the two failure stages also run torch's own backend for the
tensors. The report begins with rows for docs/status.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from torch_sagellm._private.units import show_size, show_time
from torch_sagellm.cli import arguments, bench, info
from torch_sagellm.cli import ranks as processes
from torch_sagellm.cli.show import fact, paint

HELP = "correctness, hang, bandwidth and overlap on this machine, as a report for the project"
DESCRIPTION = """For owners of cards and of large machines, on which this package was never tried: starts ranks on this
host, a card each or on its cores, and tries every collective with known values, a rank that does not come, a rank that
is killed, bandwidths and communication behind computation beside torch's own backend (nccl, hccl, cncl or gloo). Writes
a report whose first rows fill docs/status.md. Nothing leaves the machine. Takes some minutes, never more than --limit.

Exits with 1 when a stage failed."""
EXAMPLES = """examples:
  torch-sagellm certify                        CPU tensors, or those of the accelerator that torch sees
  torch-sagellm certify --device cpu --ranks 32
  torch-sagellm certify --quick --report -     small sizes, two minutes; the report is printed
"""
LIMIT = 900.0
#: torch's own backend for each type of device.
RIVALS = {bench.CPU: "gloo", "cuda": "nccl", "npu": "hccl", "mlu": "cncl"}
SIZES = [8, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 27]
QUICK = [8, 1 << 16, 1 << 20]
OPS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
STAGES = {
    "values": "known values through every collective, type and reduction",
    "late": "a rank does not come: the others name it and the line that it is at",
    "killed": "a rank is killed: the others name it and go on without it",
    "bandwidth": "collectives beside torch's own backend",
    "overlap": "communication behind computation",
}


@dataclass
class Stage:
    """The result of a stage: the reason if it failed, and its figures and texts for the report, by name."""

    name: str
    failure: str = ""
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        return f"FAILED: {self.failure}" if self.failure else "passed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, or the accelerator as torch names it (the one that torch sees, or cpu)")
    parser.add_argument(
        "--ranks", type=arguments.ranks(), help="ranks on this host (a card each; 4 on the CPU, or its cores)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--limit", type=arguments.seconds, default=LIMIT, help="seconds for all of it (900)")
    parser.add_argument("--report", metavar="FILE", help="where it goes, - for here (certify-DEVICE-DATE.md)")
    arguments.add_json_file(parser)
    arguments.add_yes(parser)


def run(parsed: argparse.Namespace) -> int:
    device = parsed.device or _accelerator() or bench.CPU
    _check_device(device)
    count = parsed.ranks or _usual_ranks(device)
    target = parsed.report or f"certify-{device}-{date.today()}.md"
    for option, path in (("--report", Path(target)), ("--json", parsed.json)):
        if path and path != arguments.HERE:
            arguments.check_output(option, path)
    with arguments.text_beside(parsed.json == arguments.HERE):
        found, failed = _run(parsed, device, count, target)
    if parsed.json:
        text = json.dumps(found, indent=1)
        print(text) if parsed.json == arguments.HERE else parsed.json.write_text(text)
    return 1 if failed else 0


def _run(parsed: argparse.Namespace, device: str, count: int, target: str) -> tuple[dict[str, Any], bool]:
    """Runs all stages and writes the report. Returns the figures, and whether a stage failed."""
    arguments.agree(count, parsed.yes)
    rival, facts = _rival(device), machine(device)
    began = time.monotonic()
    fact("certify", f"{device} tensors, {count} rank{'s' * (count > 1)}, beside {rival or 'no other backend'}")
    stages = []
    for name, what in STAGES.items():
        if count < 2 and name in ("late", "killed"):
            continue
        print(f"{name}: {what}", flush=True)
        left = parsed.limit - (time.monotonic() - began)
        stage = _run_stage(name, device, rival, count, left, parsed.quick)
        stages.append(stage)
        print(f"{name}: " + paint(stage.outcome, "red" if stage.failure else "green"), flush=True)
    text = report(stages, facts, (device, rival, count), time.monotonic() - began)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text)
        fact("report", f'{target}; please send it with the issue form "It ran on a real card or a real network"')
    found = {stage.name: {"failure": stage.failure, **stage.found} for stage in stages}
    return {"machine": facts, "ranks": count, "stages": found}, any(stage.failure for stage in stages)


def _accelerator() -> str | None:
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def _check_device(device: str) -> None:
    sees = _accelerator()
    if device not in (bench.CPU, sees):
        raise ValueError(
            f"--device {device}: torch sees {sees or 'no accelerator'} here; expected cpu, or what it sees"
        )


def _usual_ranks(device: str) -> int:
    import torch

    if device != bench.CPU:
        return min(arguments.MOST_RANKS, int(torch.accelerator.device_count()))
    return max(2, min(4, len(os.sched_getaffinity(0))))


def _rival(device: str) -> str:
    """torch's own backend for these tensors, or "" if this torch has none."""
    import torch.distributed as dist

    name = RIVALS.get(device, "")
    there = getattr(dist, f"is_{name}_available", lambda: name in dist.Backend.backend_list)
    return name if name and there() else ""


def _run_stage(name: str, device: str, rival: str, count: int, seconds: float, quick: bool) -> Stage:
    """Starts ranks for a stage; they put their results into the store."""
    if seconds < 1:
        return Stage(name, "not run: the time of --limit was over")
    sizes = QUICK if quick else SIZES
    words = json.dumps({"stage": name, "device": device, "rival": rival, "sizes": sizes, "ops": OPS})
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    ended, store = processes.run("certify", count, words, seconds=seconds, environment=environment)
    gone = {count - 1} if name == "killed" else set()
    failed = [f"rank {rank} {one.failure}" for rank, one in enumerate(ended) if one.failure and rank not in gone]
    if failed:
        output = "\n".join(one.output.rstrip() for one in ended if one.output.strip())
        if output:
            print(output, file=sys.stderr)
        return Stage(name, ", ".join(failed))
    found: dict[str, Any] = json.loads(store.get("found"))
    return Stage(name, found.pop("failure", ""), found)


def run_rank(rank: int, count: int, port: int, words: str) -> int:
    from torch_sagellm.demos import certified

    return certified.run_rank(rank, count, port, json.loads(words))


# --------------------------------------------------------------------------------------------------- the report


def machine(device: str) -> dict[str, str]:
    """The facts about the machine that a reader needs; neither the machine's name nor its user's."""
    import torch

    cpu = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    found = {
        "processor": f"{cpu or platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "torch": torch.__version__,
    }
    if device != bench.CPU:
        module = getattr(torch, device, None)
        name = getattr(module, "get_device_name", lambda _: device)(0)
        found["cards"] = f"{torch.accelerator.device_count()} x {name}"
    facts = info.facts()
    wanted = ("sagellm", "build", "system", f"{device} tensors")
    # Leave out the folders that follow the versions.
    short = {name: re.sub(r",? (?:in|from) /.*", "", facts[name]) for name in wanted if name in facts}
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    busy = (
        {"other work": f"yes, a load of {load:.1f} before it began; its times are worth little"}
        if load > cores / 2
        else {}
    )
    return {**found, **short, **busy}


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def report(stages: list[Stage], facts: dict[str, str], job: tuple[str, str, int], seconds: float) -> str:
    """The whole report as Markdown. ``job`` is the device, torch's own backend, and the number of ranks."""
    device, rival, count = job
    where = facts.get("cards", facts["processor"])
    simulated = bench.SIMULATOR in facts.get(f"{device} tensors", "")
    lines = [f"# torch-sagellm on {device} tensors: {where}", ""]
    if simulated:
        lines += [
            "By a SIMULATOR of the library: the times are those of this program, and nothing is said about a device.",
            "",
        ]
    lines += [f"{count} ranks on one host, {date.today()}, {seconds:.0f} s, `torch-sagellm certify`.", ""]
    lines += ['Rows for docs/status.md, "Proven":', "", "| what | state |"]
    state = "; ".join(f"{stage.name} {stage.outcome}" for stage in stages)
    proven = (
        "**simulator**"
        if simulated
        else f"{where}, torch {facts['torch']}, {date.today()}"
        + (", beside other work" if "other work" in facts else "")
    )
    lines += ["| --- | --- |", f"| {device} tensors, {count} ranks of one host | {state}; {proven} |", ""]
    lines += ["and for docs/internals/goals.md:", "", "| target | measured | machine |", "| --- | --- | --- |"]
    lines += [f"| {target} | {measured} | {proven} |" for target, measured in _measured(stages, rival)]
    for stage in stages:
        lines += ["", f"## {stage.name}: {STAGES[stage.name]}", "", stage.outcome, *_details(stage, rival)]
    lines += ["", "## machine", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    return "\n".join(lines)


def _measured(stages: list[Stage], rival: str) -> list[tuple[str, str]]:
    """Rows of figures: (what was measured, result)."""
    by_name = {stage.name: stage.found for stage in stages if not stage.failure}
    found = []
    rows = [bench.Row(**row) for row in by_name.get("bandwidth", {}).get("rows", [])]
    for own in (row for row in rows if row.backend == bench.OURS and row.op == "all_reduce"):
        other = [row for row in rows if row.backend == rival and (row.op, row.size) == (own.op, own.size)]
        beside = f", {other[0].seconds / own.seconds:.1f}x {rival}" if other else ""
        found.append((f"all_reduce of {show_size(own.size)}", f"{show_time(own.seconds)}{beside}"))
    copy = by_name.get("bandwidth", {}).get("copy")
    large = [row for row in rows if row.backend == bench.OURS and row.op == "all_reduce"][-1:]
    if copy and large:
        share = large[0].algbw / copy
        found.append(
            (
                f"all_reduce of {show_size(large[0].size)} beside plain copies of all ranks",
                f"{share:.0%} of {copy:.3g} GB/s",
            )
        )
    for name in ("late", "killed"):
        if name in by_name:
            found.append((f"a {name} rank is named after", f"{by_name[name]['seconds']:.1f} s"))
    for backend, hidden in by_name.get("overlap", {}).get("hidden", {}).items():
        found.append((f"communication hidden behind computation, {backend}", f"{hidden:.0%}"))
    return found


def _details(stage: Stage, rival: str) -> list[str]:
    found = stage.found
    lines = []
    if stage.name == "values" and found:
        lines += [
            "",
            f"{found['calls']} calls with known values, {found['wrong']} wrong; messages in a ring and a barrier.",
        ]
        lines += [f"- refused: {text}" for text in found["refused"]]
        if "difference" in found:
            lines.append(f"Random numbers: largest difference from {rival}'s sum {found['difference']:.3g}.")
    if stage.name in ("late", "killed") and "text" in found:
        lines += ["", "```text", re.sub(r"host [\w.-]+", "host <name>", found["text"]), "```"]
    if stage.name == "bandwidth" and "rows" in found:
        rows = [bench.Row(**row) for row in found["rows"]]
        lines += [
            "",
            "| operation | size | backend | us | GB/s, busbw | wrong |",
            "| --- | ---: | --- | ---: | ---: | ---: |",
        ]
        for row in rows:
            times = f"{row.seconds * 1e6:.2f} | {row.busbw:.3g} | {row.wrong}"
            lines.append(f"| {row.op} | {show_size(row.size)} | {row.backend} | {times} |")
    if stage.name == "overlap":
        lines += ["", *(f"- {name}: {text}" for name, text in found.get("times", {}).items())]
    return lines
