"""Runs random programs by hand; see the docstring of the package."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

from random_programs import run
from random_programs.generate import Taste, generate
from random_programs.places import PLACES, ranks_at
from random_programs.program import Program
from random_programs.run import SECONDS, Ranks, Verdict

TASTES = [each.name for each in fields(Taste) if each.default is True]


def shortened(program: Program, first: Verdict, ranks: Ranks) -> int:
    program, verdict = run.shortest(program, first, ranks)
    print(program.to_json())
    print(verdict)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m random_programs", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many programs")
    parser.add_argument("--file", type=Path, help="a program as JSON, instead of seeds")
    parser.add_argument("--times", type=int, default=1, help="how often each")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the groups' timeout")
    parser.add_argument("--no", default="", help="draw none of these: " + ", ".join(TASTES) + " (with commas between)")
    parser.add_argument("--at", default="cpu", choices=PLACES, help="where; hosts are network namespaces, made as root")
    parser.add_argument("--unchanged", action="store_true", help="elsewhere: the programs of one host's CPU")
    parser.add_argument("--shrink", action="store_true", help="make the first program that fails short, and end")
    parser.add_argument("--print", action="store_true", help="print the program and end")
    arguments = parser.parse_args()
    taste = PLACES["cpu" if arguments.unchanged else arguments.at]
    taste = replace(taste, **{name: False for name in arguments.no.split(",") if name})
    with ranks_at(arguments.at) as ranks:
        return play(ranks, taste, arguments)


def play(ranks: Ranks, taste: Taste, arguments: argparse.Namespace) -> int:
    failed, begun = 0, time.monotonic()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    for seed in [None] if arguments.file else seeds:
        program = generate(seed, taste) if seed is not None else Program.from_json(arguments.file.read_text())
        if arguments.print:
            print(program.to_json())
            continue
        if arguments.count >= 1000 and (seed - arguments.seed) % 500 == 499:
            done, took = seed - arguments.seed + 1, time.monotonic() - begun
            print(f"{done} of {arguments.count} after {took:.0f} s, {failed} failed", flush=True)
        for _ in range(arguments.times):
            verdict = ranks.run(program, arguments.seconds)
            if verdict.problems and arguments.shrink:
                return shortened(program, verdict, ranks)
            if verdict.problems:
                failed += 1
                if arguments.count == 1:
                    print(program.to_json())
                    print(verdict)
                else:
                    print(f"seed {program.seed}: {verdict.seconds:.1f} s", flush=True)
                    if verdict.kinds & {"hang", "died"}:
                        print(verdict.report, flush=True)
                    for each in sorted(verdict.problems, key=lambda each: each["at"])[:3]:
                        print(
                            f"    rank {each['rank']} step {each['at']} {each['kind']}: {each['short'][:300]}",
                            flush=True,
                        )
    count = arguments.count * arguments.times
    print(f"{failed} of {count} failed at {arguments.at} in {time.monotonic() - begun:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
