#!/usr/bin/env python3
"""What each feature costs or saves compared with not using it: one table with a row for each case.

The feature and the compared calls take turns in the same ranks (A B, then B A), each after a barrier. A sample is the
time of the slowest rank, and each row checks once that both give the same numbers. The ratio is the feature's time
divided by the compared calls' time: below 1 the feature is faster. It is computed from the 10th percentiles, because
other work on the machine affects the medians first. Next to it is the ratio of the shortest times, which is more
reliable on a busy machine. The goal of a row is the largest ratio that is good enough. The verdict is "met" if the
ratio is at most the goal, "lost" if it is more than both the goal and 1, otherwise "missed". The table contains the
rows of every verdict.

    python benchmarks/features.py --only moe,transfer
    python benchmarks/features.py --json features.json

Rows between hosts need root, because hosts are network namespaces with a delay or a rate between them. Without root
the program prints why these rows are missing. The exit code is 1 if a result was wrong. It does not depend on the
verdicts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from feature_rows import ROWS, Place, Row, by_name
from measure import machine
from measure import ranks as processes
from measure.stats import percentile, slowest_rank
from measure.ticks import in_turns


def measure(rows: list[Row], seconds: float) -> list[dict[str, Any]]:
    """Measures rows of the same `Place` in the ranks of the default group; returns the same list on every rank."""
    results = []
    for row in rows:
        ours, theirs, done = row.make()
        times = in_turns({"ours": ours, "theirs": theirs}, row.least, seconds)
        done()
        taken: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(taken, times)
        slowest = {key: slowest_rank([rank[key] for rank in taken]) for key in times}
        results.append(result(row, slowest))
        if dist.get_rank() == 0:
            print(line(results[-1]), flush=True)
    return results


def result(row: Row, times: dict[str, list[float]]) -> dict[str, Any]:
    """One row of the table, with times in microseconds."""
    figures = {
        key: {"least": min(of), "p10": percentile(of, 0.1), "median": percentile(of, 0.5), "samples": len(of)}
        for key, of in times.items()
    }
    ratio = figures["ours"]["p10"] / figures["theirs"]["p10"]
    of_medians = figures["ours"]["median"] / figures["theirs"]["median"]
    verdict = "met" if ratio <= row.goal else "lost" if ratio > max(1.0, row.goal) else "missed"
    return {
        "feature": row.name,
        "case": row.case,
        "against": row.against,
        "place": row.place.words,
        "goal": row.goal,
        **figures,
        "ratio": ratio,
        "ratio_of_medians": of_medians,
        "ratio_of_least": figures["ours"]["least"] / figures["theirs"]["least"],
        "verdict": verdict,
    }


def head() -> str:
    titles = [
        "feature",
        "case",
        "where",
        "against",
        "p10",
        "median",
        "its p10",
        "its median",
        "ratio",
        "of least",
        "goal",
    ]
    titles += ["verdict"]
    return "\n".join(("| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)))


def line(row: dict[str, Any]) -> str:
    def shown(us: float) -> str:
        return f"{us:.1f} us" if us < 1e3 else f"{us / 1e3:.2f} ms"

    cells = [row["feature"], row["case"], row["place"], row["against"]]
    cells += [shown(row[side][key]) for side in ("ours", "theirs") for key in ("p10", "median")]
    cells += [f"{row['ratio']:.2f}x", f"{row['ratio_of_least']:.2f}x", f"{row['goal']:g}x", row["verdict"]]
    return "| " + " | ".join(cells) + " |"


def rank(arguments: argparse.Namespace, chosen: list[Row], place: str) -> None:
    """Runs one rank with the rows of its place.

    Rank 0 writes the results into the file that the parent process named.
    """
    torch.set_num_threads(1)
    dist.init_process_group("sagellm")
    results = measure([row for row in chosen if row.place.words == place], arguments.seconds)
    if dist.get_rank() == 0:
        Path(os.environ["FEATURES_INTO"]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def run_place(place: Place, into: Path) -> int:
    """Starts the ranks of a place, in network namespaces if it has several hosts."""
    common: dict[str, Any] = {"FEATURES_INTO": str(into), "FEATURES_PLACE": place.words, "OMP_NUM_THREADS": "1"}
    if place.hosts == 1:
        with processes.here() as where:
            return processes.run(place.ranks, {**where, **common})
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/py"))
    import net

    with net.Network(place.hosts, place.rate, place.delay_ms) as network:
        where = {"MASTER_ADDR": network.address(0), "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": net.INTERFACE}
        each = place.ranks // place.hosts
        prefixes = [["ip", "netns", "exec", network.names[number // each]] for number in range(place.ranks)]
        return processes.run(place.ranks, {**where, **common}, prefixes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="NAME,...", help=f"of {', '.join(sorted({r.name for r in ROWS}))}"
    )
    parser.add_argument("--where", default="", metavar="WORDS", help='only places with these words, such as "1 host"')
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row, about (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    arguments = parser.parse_args()
    try:
        chosen = [row for row in by_name(arguments.only) if arguments.where in row.place.words]
    except ValueError as error:
        parser.error(str(error))
    if processes.is_rank():
        rank(arguments, chosen, os.environ["FEATURES_PLACE"])
        return 0
    facts = machine.describe()
    print(f"# {facts['cpu']}, {facts['cores']} cores, {date.today()}, load before {os.getloadavg()[0]:.1f}")
    print(head(), flush=True)
    results: list[dict[str, Any]] = []
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        for place in dict.fromkeys(row.place for row in chosen):
            into = Path(folder) / "rows.json"
            into.unlink(missing_ok=True)
            try:
                code = run_place(place, into) or code
            except Exception as reason:
                if type(reason).__name__ != "Unavailable":
                    raise
                print(f"# {place.words}: not measured, {reason}", file=sys.stderr)
            if into.exists():
                results += json.loads(into.read_text())
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": facts, "date": str(date.today()), "rows": results}, indent=1))
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
