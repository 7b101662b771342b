#!/usr/bin/env python3
"""Draws when layers compute and when their sums are in flight: in turn, and with ``torch_sagellm.OverlapScheduler``.

With `--rate` the two ranks are on two hosts, which are network namespaces with a link of that speed between them (needs
root). Without it both ranks are on this host. The two ways take turns, three times after a warm-up. The picture shows
each way's run with the median time, and says if the machine was busy. Communication times are from the trace that
``torch_sagellm.write_trace`` writes; computation is measured around the layers.

    python benchmarks/overlap.py --rate 50mbit --into docs/overlap.svg
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from measure import machine
from measure import ranks as processes
from measure.stats import percentile
from torch import nn

import torch_sagellm

LAYERS, WIDTH, ROWS, TURNS = 6, 512, 512, 3
#: What a rank did, and when it began and ended, in milliseconds since the start of the turn.
Span = tuple[str, float, float]


def turn(overlapped: bool, layers: list[nn.Sequential], inputs: torch.Tensor) -> tuple[list[Span], float, float]:
    """One pass over the layers.

    Returns the spans of computation, and when the pass began and ended, by the clock of the traces.
    """
    comm = torch_sagellm.create_comm_backend()
    scheduler = torch_sagellm.OverlapScheduler(comm)
    dist.barrier()
    spans: list[Span] = []
    handles = []
    began = time.time() * 1e3
    for layer in layers:
        before = time.time() * 1e3
        output = layer(inputs).detach()
        spans.append(("compute", before - began, time.time() * 1e3 - began))
        if overlapped:
            handles.append(scheduler.schedule(output))
        else:
            comm.all_reduce(output)
    for handle in handles:
        handle.wait()
    return spans, began, time.time() * 1e3


def communication(began: float, ended: float) -> list[Span]:
    """The all_reduces between the two times, from this rank's trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        torch_sagellm.write_trace(path)
        events = json.loads(path.read_text())["traceEvents"]
    found = [each for each in events if each["ph"] == "X" and each["name"] == "sagellm:all_reduce"]
    spans = [("all_reduce", each["ts"] / 1e3 - began, (each["ts"] + each["dur"]) / 1e3 - began) for each in found]
    return [span for span in spans if span[1] >= 0 and span[2] <= ended - began + 1]


def measure(into: Path, where: str) -> None:
    """Runs one rank; rank 0 draws its own spans."""
    torch.set_num_threads(1)
    busy = os.getloadavg()[0] > machine.usable_cores()
    dist.init_process_group("sagellm")
    torch.manual_seed(dist.get_rank())
    layers = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    inputs = torch.randn(ROWS, WIDTH)
    runs: dict[bool, list[tuple[float, list[Span]]]] = {False: [], True: []}
    for number in range(TURNS + 1):
        for overlapped in runs:
            spans, began, ended = turn(overlapped, layers, inputs)
            if number:  # the first turn is a warm-up
                runs[overlapped].append((ended - began, spans + communication(began, ended)))
    if dist.get_rank() == 0:
        drawn = {overlapped: sorted(of)[len(of) // 2] for overlapped, of in runs.items()}
        for overlapped, of in runs.items():
            each = [took for took, _ in of]
            print(
                f"{'overlapped' if overlapped else 'in turn'}: median {percentile(each, 0.5):.1f} ms of {TURNS}",
                flush=True,
            )
        size = f"{ROWS * WIDTH * 4 / 2**20:g} MiB"
        note = f"{LAYERS} layers, all_reduce of {size} each; rank 0 of 2, {where}; {machine.cpu_model()}, "
        note += f"{machine.usable_cores()} cores, {date.today()}" + (", beside other work" if busy else "")
        into.write_text(picture(drawn[False], drawn[True], note))
        print(f"# {into}")
    dist.destroy_process_group()


def in_lanes(spans: list[Span]) -> list[int]:
    """For each span, in the order of their starts: the first lane that is free at its start."""
    free: list[float] = []
    lanes = []
    for _, begin, end in spans:
        lane = next((lane for lane, until in enumerate(free) if until <= begin), len(free))
        free[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def picture(in_turn: tuple[float, list[Span]], overlapped: tuple[float, list[Span]], note: str) -> str:
    """An SVG with two rows for each way, on one scale of time."""
    left, width, row = 90, 640, 30
    colours = {"compute": "#4878a8", "all_reduce": "#d9822b"}
    scale = width / max(in_turn[0], overlapped[0])
    parts: list[str] = []

    def text(x: float, y: float, what: str, anchor: str = "start", size: int = 12) -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{what}</text>')

    top = 34
    for title, (took, spans) in (("one after the other", in_turn), ("OverlapScheduler", overlapped)):
        text(left, top - 8, f"{title}: {took:.1f} ms", size=13)
        for at, kind in enumerate(colours):
            y = top + at * (row + 6)
            text(left - 8, y + row - 8, kind, "end")
            parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="{row}" fill="#f0f0f0"/>')
            mine = sorted((span for span in spans if span[0] == kind), key=lambda span: span[1])
            # Operations that are in flight at the same time are drawn below each other.
            lanes = in_lanes(mine)
            thick = row / (max(lanes, default=0) + 1)
            for (_, begin, end), lane in zip(mine, lanes, strict=True):
                place = f'x="{left + begin * scale:.1f}" y="{y + lane * thick:.1f}"'
                size = f'width="{max((end - begin) * scale, 1):.1f}" height="{thick:.1f}"'
                parts.append(
                    f'<rect {place} {size} fill="{colours[kind]}" stroke="white" stroke-width="0.7">'
                    f"<title>{kind}: {begin:.2f} to {end:.2f} ms</title></rect>"
                )
        end_of = left + took * scale
        parts.append(
            f'<line x1="{end_of:.1f}" x2="{end_of:.1f}" y1="{top - 3}" y2="{top + 2 * row + 9}" stroke="#333"/>'
        )
        top += 2 * row + 48
    for line in textwrap.wrap(note, 105):  # the number of characters that fit between the margins
        text(left, top - 18, line, size=11)
        top += 14
    whole, high = left + width + 20, top
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{high}" viewBox="0 0 {whole} {high}" '
        f'font-family="sans-serif"><rect width="{whole}" height="{high}" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="", help="two hosts, with a link of so many bits a second, such as 1gbit")
    parser.add_argument("--into", type=Path, default=Path("overlap.svg"), help="the picture (default: overlap.svg)")
    arguments = parser.parse_args()
    where = f"on 2 hosts (namespaces), {arguments.rate} between them" if arguments.rate else "on 1 host"
    if processes.is_rank():
        measure(arguments.into, where)
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    if not arguments.rate:
        with processes.here() as place:
            return processes.run(2, place)
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/py"))
    import net

    try:
        with net.Network(2, arguments.rate) as network:
            place = {"MASTER_ADDR": network.address(0), "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": net.INTERFACE}
            return processes.run(2, place, [["ip", "netns", "exec", name] for name in network.names])
    except net.Unavailable as reason:
        print(f"hosts cannot be simulated here: {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
