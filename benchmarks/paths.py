#!/usr/bin/env python3
"""Measures several connections between two hosts over several cables: their rate, and how long a failed cable delays.

Two network namespaces, with one rank each, are connected by four cables of 1 Gbit/s. Each start first measures the rate
of an all_reduce and of messages in one direction. Then, in the same processes, it measures the rate at which plain TCP
connections, one per cable, send the same bytes. Then the ranks all_reduce 1 MiB again and again while three cables are
taken down, one every second. The delay is the longest call after a cable went down, less the median of the calls before
it. Starts with one connection and with four take turns. TCP uses `cubic` between the hosts.

    python benchmarks/paths.py
    python benchmarks/paths.py --starts 10 --rate 500mbit

It needs root and the programs `ip` and `tc`. Rates are those of one direction. The exit code is 1 if a result was
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import machine
from measure import ranks as processes
from measure.stats import percentile

CABLES = 4
BYTES = 64 << 20
CALLS = 8
#: Seconds before each cut of a cable, in which calls are measured.
PAUSE = 1.0
#: The goal: seconds within which other cables must take over.
GOAL = 0.2
FIRST_PORT = 29600


def timed(tensor: torch.Tensor, call: Callable[[], Any]) -> list[float]:
    """The seconds of each call; both ranks write the tensor, and begin together."""
    taken = []
    for _ in range(CALLS):
        tensor.fill_(1)
        dist.barrier()
        begin = time.monotonic()
        call()
        taken.append(time.monotonic() - begin)
    return taken


def one_way(tensor: torch.Tensor) -> None:
    """Rank 0 sends the tensor. Rank 1 answers with one element, so that both know when it has arrived."""
    answer = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
        dist.recv(answer, 1)
    else:
        dist.recv(tensor, 0)
        dist.send(answer, 0)


def connect() -> list[socket.socket]:
    """One plain TCP connection per cable."""
    if dist.get_rank() == 0:
        doors = [socket.create_server((f"10.233.{cable}.1", FIRST_PORT + cable)) for cable in range(CABLES)]
        dist.barrier()
        return [door.accept()[0] for door in doors]
    dist.barrier()
    return [socket.create_connection((f"10.233.{cable}.1", FIRST_PORT + cable)) for cable in range(CABLES)]


def plain(connections: list[socket.socket], memory: memoryview, both: bool) -> None:
    """Each connection carries its part of the memory, from rank 0 to rank 1 or in both directions."""
    share = len(memory) // CABLES

    def receive(connection: socket.socket) -> None:
        view, got = memoryview(bytearray(share)), 0
        while got < share:
            got += connection.recv_into(view[got:])

    first = dist.get_rank() == 0
    work = [
        threading.Thread(target=connection.sendall, args=(memory[number * share : (number + 1) * share],))
        for number, connection in enumerate(connections)
        if both or first
    ]
    work += [threading.Thread(target=receive, args=(each,)) for each in connections if both or not first]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    if not both:  # as `one_way`
        if first:
            connections[0].recv(1)
        else:
            connections[0].sendall(b"\0")


def delays(names: list[str]) -> list[float]:
    """Cuts three cables. For each: the longest call after the cut, minus the median call before it, in seconds."""
    import net

    downs: list[float] = []

    def cut() -> None:
        for cable in range(1, CABLES):
            time.sleep(PAUSE)
            downs.append(time.monotonic())
            net.cut(names[0], f"eth{cable}")

    tensor, going = torch.ones(1 << 18), torch.ones(1)
    cutting = threading.Thread(target=cut)
    calls: list[tuple[float, float]] = []
    if dist.get_rank() == 0:
        cutting.start()
    until = time.monotonic() + CABLES * PAUSE
    while going.item() == 1:
        begin = time.monotonic()
        dist.all_reduce(tensor.fill_(1))
        calls.append((begin, time.monotonic()))
        if not bool((tensor == 2).all()):
            raise SystemExit("paths: an all_reduce is wrong")
        if len(calls) % 20 == 0:
            going.fill_(float(time.monotonic() < until))
            dist.broadcast(going, 0)
    if dist.get_rank() != 0:
        return []
    cutting.join()
    found = []
    for down in downs:
        usual = percentile([end - begin for begin, end in calls if down - PAUSE < end < down], 0.5)
        longest = max(end - begin for begin, end in calls if down < end and begin < down + PAUSE / 2)
        found.append(longest - usual)
    return found


def rank(names: list[str], folder: Path) -> None:
    """Runs one rank of a start; rank 0 writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("sagellm", timeout=timedelta(seconds=60))
    tensor = torch.ones(BYTES // 4)
    times = {"all_reduce": timed(tensor, lambda: dist.all_reduce(tensor))}
    right = bool((tensor == 2).all())
    times["message"] = timed(tensor, lambda: one_way(tensor))
    connections = connect()
    memory = memoryview(tensor.numpy()).cast("B")
    times["plain, both directions"] = timed(tensor, lambda: plain(connections, memory, both=True))
    times["plain, one direction"] = timed(tensor, lambda: plain(connections, memory, both=False))
    found = delays(names) if os.environ.get("SAGELLM_LINKS") == str(CABLES) else []
    if dist.get_rank() == 0:
        (folder / "part.json").write_text(json.dumps({"times": times, "delays": found, "right": right}))
    dist.barrier()
    dist.destroy_process_group()


def start(links: int, rate: str) -> dict[str, Any]:
    import net

    with net.Cables([rate] * CABLES, congestion="cubic") as cables, tempfile.TemporaryDirectory() as name:
        place = {
            "MASTER_ADDR": "10.233.0.1", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1, "SAGELLM_LINKS": links,
            "SAGELLM_SOCKET_IFNAMES": ",".join(cables.interfaces[:links]),
            "PATHS_INTO": name, "PATHS_NAMES": ",".join(cables.names),
        }  # fmt: skip
        inside = [["ip", "netns", "exec", name] for name in cables.names]
        if processes.run(2, place, inside) != 0:
            raise SystemExit("paths: a rank failed")
        found: dict[str, Any] = json.loads((Path(name) / "part.json").read_text())
    if not found["right"]:
        raise SystemExit("paths: a result is wrong")
    return found


def gigabits(starts: list[dict[str, Any]], what: str) -> str:
    """The rate of the median call in Gbit/s: in the slowest and in the fastest start."""
    rates = sorted(BYTES * 8 / percentile(each["times"][what], 0.5) / 1e9 for each in starts)
    return f"{rates[len(rates) // 2]:.2f} ({rates[0]:.2f} to {rates[-1]:.2f})"


def main() -> int:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/py"))
    if processes.is_rank():
        rank(os.environ["PATHS_NAMES"].split(","), Path(os.environ["PATHS_INTO"]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="with each number of connections (default: 5)")
    parser.add_argument("--rate", default="1gbit", help="of each cable, as tc writes it (default: 1gbit)")
    arguments = parser.parse_args()
    import net

    facts = machine.describe()
    print(f"# {facts['cpu']}, {facts['cores']} cores, {date.today()}, load before {os.getloadavg()[0]:.1f}")
    found: dict[int, list[dict[str, Any]]] = {1: [], CABLES: []}
    try:
        for number in range(arguments.starts):
            for links in found:
                found[links].append(start(links, arguments.rate))
            print(f"# start {number + 1} of {arguments.starts}", file=sys.stderr)
    except net.Unavailable as reason:
        print(f"paths: not measured, {reason}", file=sys.stderr)
        return 1
    whats = list(found[1][0]["times"])
    print("| connections | " + " | ".join(f"{what}, Gbit/s" for what in whats) + " |\n|" + " --- |" * (len(whats) + 1))
    for links, starts in found.items():
        print(f"| {links} | " + " | ".join(gigabits(starts, what) for what in whats) + " |")
    late = sorted(delay for each in found[CABLES] for delay in each["delays"])
    middle, least, most = (round(1e3 * each) for each in (percentile(late, 0.5), late[0], late[-1]))
    verdict = "met" if late[-1] <= GOAL else "missed"
    print(f"a cable that fails delays calls by {middle} ms (median of {len(late)}; {least} to {most} ms); goal "
          f"{GOAL * 1e3:.0f} ms: {verdict}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
