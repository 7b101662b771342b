"""Shortens a failing program: fewer steps, simpler ones, smaller tensors, fewer ranks.

A candidate must be legal and fail like the first program. Failures that come by chance are tried several times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from random_programs.model import Illegal, judge
from random_programs.program import COLLECTIVES, Program, Step, flat, involved, numel, span

#: Tells whether a program fails like the first one.
Fails = Callable[[Program], bool]


def units(program: Program) -> list[list[int]]:
    """Returns groups of steps that belong together: an operation, the other half of its message, and its waits."""
    by_key: dict[Any, list[int]] = {}
    of_id: dict[int, Any] = {}
    for step in program.steps:
        if step["do"] in ("send", "recv"):
            of_id[step["id"]] = ("m", step["m"])
        elif "id" in step and step["do"] not in ("wait", "join", "fork"):
            of_id[step["id"]] = step["id"]
    for at, step in enumerate(program.steps):
        key = of_id.get(step["id"], ("alone", at)) if "id" in step else ("alone", at)
        if step["do"] == "fork":
            key = ("alone", at)
        by_key.setdefault(key, []).append(at)
    return list(by_key.values())


def without(program: Program, gone: set[int]) -> Program:
    ids = {program.steps[at].get("id") for at in gone if program.steps[at]["do"] not in ("wait", "join", "fork")} - {
        None
    }
    steps = [
        step
        for at, step in enumerate(program.steps)
        if at not in gone and not (step["do"] == "fork" and step.get("id") in ids)
    ]
    return Program(program.ranks, program.buffers, program.groups, steps, program.seed)


def fewer_steps(program: Program, fails: Fails) -> Program:
    """Removes steps by delta debugging over the units, first large parts, then single units."""
    size = max(1, len(units(program)) // 2)
    while True:
        found, at, changed = units(program), 0, False
        while at < len(found):
            candidate = without(program, {i for unit in found[at : at + size] for i in unit})
            if fails(candidate):
                program, found, changed = candidate, units(candidate), True
            else:
                at += size
        if size > 1:
            size //= 2
        elif not changed:
            return program


def plainer(program: Program) -> Iterator[Program]:
    """Yields programs in which one thing is simpler."""
    for at, step in enumerate(program.steps):
        changes: list[Step] = []
        kind = step["do"]
        if kind == "wait" and step["via"] not in ("wait", "thread"):
            changes.append(step | {"via": "wait"})
        if kind in ("all_reduce", "broadcast", "reduce"):
            views = step["outs"]
            for less in sorted({1, numel(views[0][0]) // 2} - {0, numel(views[0][0])}):
                changes.append(step | {"outs": [[flat(each[0][0], each[0][1], less)] for each in views]})
            if any(len(each[0][2]) != 1 or each[0][3] != [1] for each in views):
                changes.append(step | {"outs": [[flat(each[0][0], each[0][1], numel(each[0]))] for each in views]})
        if kind == "sleep" and step["ms"] > 1:
            changes.append(step | {"ms": 1})
        if kind in ("region", "abandon", "batch", "wait"):
            changes += [{k: v for k, v in step.items() if k != name} for name in ("broken", "struck") if name in step]
        if kind in ("region", "abandon"):
            calls = step["calls"]
            changes += [
                step | {"calls": calls[:i] + calls[i + 1 :]} for i in range(len(calls)) if calls[1:] or step["tail"]
            ]
            changes += [step | {"tail": []}] if step["tail"] and calls else []
        for change in changes:
            steps = list(program.steps)
            steps[at] = change
            yield Program(program.ranks, program.buffers, program.groups, steps, program.seed)
        if kind in COLLECTIVES and "keep" in step["how"]:
            # A synchronous call in place of a Work that is waited for.
            steps = [
                each for each in program.steps if each.get("id") != step["id"] or each["do"] not in ("wait", "join")
            ]
            steps = [each for each in steps if each["do"] != "fork" or each.get("id") != step["id"]]
            steps[steps.index(step)] = step | {"how": ["sync"] * len(step["how"])}
            yield Program(program.ranks, program.buffers, program.groups, steps, program.seed)
        if kind in ("wait",) and step["via"] == "thread":
            joined = [each for each in program.steps if each["do"] == "join" and each["id"] == step["id"]]
            steps = [each for each in program.steps if each is not step]
            for each in joined:
                if each["rank"] == step["rank"]:
                    steps[steps.index(each)] = step | {"via": "wait"}
            yield Program(program.ranks, program.buffers, program.groups, steps, program.seed)
        if kind == "send" and step["id"] is not None:
            for less in (1, numel(step["v"]) // 2):
                if 0 < less < numel(step["v"]):
                    steps = [
                        each | {"v": flat(each["v"][0], each["v"][1], less)} if each.get("m") == step["m"] else each
                        for each in program.steps
                    ]
                    yield Program(program.ranks, program.buffers, program.groups, steps, program.seed)


def smaller(program: Program) -> Iterator[Program]:
    """Yields programs with buffers as short as their use allows, without unused groups, or without a rank."""
    used = [1 for _ in program.buffers]

    def look(thing: Any) -> None:
        if isinstance(thing, list) and len(thing) == 4 and isinstance(thing[0], int) and isinstance(thing[2], list):
            used[thing[0]] = max(used[thing[0]], span(thing)[1])
        elif isinstance(thing, (list, dict)):
            for each in thing.values() if isinstance(thing, dict) else thing:
                look(each)

    look(program.steps)
    buffers = [[dtype, min(count, used[b])] for b, (dtype, count) in enumerate(program.buffers)]
    if buffers != program.buffers:
        yield Program(program.ranks, buffers, program.groups, program.steps, program.seed)
    for g in range(len(program.groups) - 1, 0, -1):
        numbers = {each for step in program.steps for each in (step.get("g"), step.get("step", {}).get("g"))}
        if g not in numbers:
            steps = deepcopy(program.steps)
            for step in steps:
                inner = [*step.get("calls", []), *step.get("tail", [])]
                for each in (step, step.get("step", {}), step.get("other", {}), *inner):
                    if each.get("g", 0) > g:
                        each["g"] -= 1
            groups = program.groups[:g] + program.groups[g + 1 :]
            yield Program(program.ranks, program.buffers, groups, steps, program.seed)
    if program.ranks > 2:
        last = program.ranks - 1
        for rank in range(last, -1, -1):
            candidate = without_rank(program, rank)
            if candidate is not None:
                yield candidate


def without_rank(program: Program, rank: int) -> Program | None:
    """Returns the program without one rank. None if the rank is a root, the only member of a group, or in a step of a
    kind that this function does not change."""
    groups = [[each for each in ranks if each != rank] for ranks in program.groups]
    if not all(groups):
        return None
    steps: list[Step] = []
    for step in program.steps:
        kind = step["do"]
        if kind in ("fill", "sleep", "wait", "join", "fork", "leave"):
            if step.get("rank") != rank:
                steps.append(step)
        elif kind in ("all_reduce", "broadcast", "reduce", "barrier", "reduce_list", "object"):
            members = program.groups[step["g"]]
            if rank not in members:
                steps.append(step)
                continue
            at = members.index(rank)
            new = dict(step)
            if step.get("root") == at:
                return None
            if step.get("root", 0) > at:
                new["root"] -= 1
            for name in ("how", "ins", "outs"):
                if name in new:
                    new[name] = new[name][:at] + new[name][at + 1 :]
            steps.append(new)
        elif rank in involved(step, program):
            return None
        else:
            steps.append(step)
    number = {old: new for new, old in enumerate(each for each in range(program.ranks) if each != rank)}
    groups = [[number[each] for each in ranks] for ranks in groups]
    renamed = []
    for step in steps:
        new = dict(step)
        for name in ("rank", "peer", "dst"):
            if name in new:
                new[name] = number[new[name]]
        if "senders" in new:
            new["senders"] = [number[each] for each in new["senders"]]
            new["views"] = {str(number[int(each)]): views for each, views in new["views"].items()}
        if "moves" in new:
            new["moves"] = [m | {"src": number[m["src"]], "dst": number[m["dst"]]} for m in new["moves"]]
        renamed.append(new)
    return Program(program.ranks - 1, program.buffers, groups, renamed, program.seed)


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 120.0) -> Program:
    """Returns a short program that fails like the given one. At the time limit it stops with the best one so far."""
    end = time.monotonic() + seconds

    def legal(candidate: Program) -> bool:
        if time.monotonic() > end:
            return False
        try:
            judge(candidate)
        except (Illegal, KeyError, IndexError, ValueError):
            return False
        return fails(candidate)

    while True:
        before = program.to_json()
        program = fewer_steps(program, legal)
        for ways in (smaller, plainer):
            changed = True
            while changed:
                changed = False
                for candidate in ways(program):
                    if legal(candidate):
                        program, changed = candidate, True
                        break
        if program.to_json() == before or time.monotonic() > end:
            return program
