"""The time of a step of these programs under torch's gloo and under ours, for docs/internals/programs.md.

    python tests/py/ecosystem/speed.py vllm_tokens.py tensor --starts 9

Run it in the environment that has the program, on a machine that does nothing else. The rivals are started in turns,
so that they all suffer if the machine becomes slower. gloo runs twice. If two rivals differ by no more than gloo's
two rows do, the difference means nothing. For vLLM there is a further rival: vLLM's own path over shared memory, next
to groups of sagellm.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from test_ecosystem import PROGRAMS, Program, run

#: By name of a rival: whether sagellm serves its groups, and the environment variables that it needs.
RIVALS = {"gloo": (False, {}), "sagellm": (True, {}), "gloo again": (False, {})}
PRIVATE = {"its own path": (True, {"ECOSYSTEM_PRIVATE_PATH": "1"})}


def start(program: Program, rival: tuple[bool, dict[str, str]]) -> float:
    """Returns the milliseconds of a step on the slowest rank."""
    served, variables = rival
    with tempfile.TemporaryDirectory() as folder:
        times = [rank["ms"] for rank in run(program, Path(folder) / "run", served, **variables)]
    if None in times:
        raise SystemExit(f"{program.script} has too few steps to be timed")
    return max(times)


def main() -> None:
    """Runs the program under each rival in turn, `--starts` times. Prints the time of each run, and a summary last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=sorted({program.script for program in PROGRAMS}))
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--starts", type=int, default=3, help="of each rival")
    given = parser.parse_args()
    program = next(p for p in PROGRAMS if (p.script, list(p.arguments)) == (given.script, given.arguments))
    rivals = {**RIVALS, **(PRIVATE if program.needs == "vllm" else {})}
    found: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(given.starts):
        for name, rival in rivals.items():
            found[name].append(start(program, rival))
            print(f"start {number + 1}, {name}: {found[name][-1]:.3f} ms", flush=True)
    for name, times in found.items():
        listed = " ".join(f"{time:.3f}" for time in sorted(times))
        print(f"{program.name}, {name}: median {statistics.median(times):.3f} ms, best {min(times):.3f} ms of {listed}")


if __name__ == "__main__":
    main()
