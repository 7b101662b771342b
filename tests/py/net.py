"""Several hosts on one machine: network namespaces, with a link whose bandwidth or latency is chosen.

Bandwidth is shaped by a token bucket (tbf) at each host's cable into a common switch. Latency comes from a relay in
user space, a separate process that passes packets from one host's tun device to the other's after a delay, because a
kernel without netem has nothing for that. Both need root and the programs `ip` and `tc`; `Network` raises `Unavailable`
with the reason where something is missing. Nothing leaves the namespaces, and they go with the `with` block.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from types import TracebackType
from typing import IO

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
#: The name of each host's way to the others, for GLOO_SOCKET_IFNAME.
INTERFACE = "eth0"
#: Large packets, so that a relay in Python is no bottleneck; within what TCP segments on a tun device.
TUN_MTU = 9000


class Unavailable(RuntimeError):
    """This machine lacks something that a network needs; the text says what."""


def run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(words)}: {error.stderr.strip()}") from error


def enter(name: str) -> None:
    """Moves this process (this thread, to be exact) into a namespace."""
    with open(f"/var/run/netns/{name}") as file:
        enter_file(file)


def enter_file(file: IO[str]) -> None:
    """The same by the open file of a namespace, such as that of /proc/self/ns/net before another was entered."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns into {file.name}")


class Network:
    """``hosts`` namespaces that reach each other as 10.231.77.1, .2 and so on.

    ``rate``: bits per second of each host's cable, each way, as tc writes it ("1gbit"). ``delay_ms``: one-way latency
    between any two hosts, in milliseconds. At most one of them.
    """

    def __init__(self, hosts: int, rate: str = "", delay_ms: float = 0) -> None:
        if rate and delay_ms:
            raise ValueError("a network has a rate or a delay, not both")
        self.names = [f"sage{os.getpid()}h{number}" for number in range(hosts)]
        self.switch = f"sage{os.getpid()}sw"
        self.rate, self.delay_ms = rate, delay_ms
        self.made: list[str] = []
        self.relay: subprocess.Popen[bytes] | None = None

    def address(self, host: int) -> str:
        return f"10.231.77.{host + 1}"

    def __enter__(self) -> Network:
        for program in ("ip", "tc"):
            if shutil.which(program) is None:
                raise Unavailable(f"the program `{program}` (package iproute2) is missing")
        try:
            for name in [*self.names, self.switch]:
                run("ip", "netns", "add", name)
                self.made.append(name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            if self.delay_ms:
                self._relayed()
            else:
                self._cabled()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self.relay is not None:
            self.relay.send_signal(signal.SIGTERM)
            self.relay.wait(10)
            self.relay = None
        while self.made:
            with contextlib.suppress(Unavailable):
                run("ip", "netns", "del", self.made.pop())

    def _cabled(self) -> None:
        run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for number, name in enumerate(self.names):
            inside, outside = f"v{os.getpid() % 100000}a{number}", f"v{os.getpid() % 100000}b{number}"
            run("ip", "link", "add", inside, "type", "veth", "peer", "name", outside)
            run("ip", "link", "set", inside, "netns", name)
            run("ip", "link", "set", outside, "netns", self.switch)
            run("ip", "-n", self.switch, "link", "set", outside, "master", "br0", "up")
            run("ip", "-n", name, "link", "set", inside, "name", INTERFACE)
            run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", INTERFACE)
            run("ip", "-n", name, "link", "set", INTERFACE, "up")
            if self.rate:
                bucket = ("tbf", "rate", self.rate, "burst", "64kb", "latency", "100ms")
                run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *bucket)

    def _relayed(self) -> None:
        command = [sys.executable, __file__, str(self.delay_ms), *self.names]
        self.relay = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.relay.stdout is not None
        if self.relay.stdout.readline().strip() != b"ready":
            raise Unavailable("the relay could not open its tun devices")
        for number, name in enumerate(self.names):
            run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", INTERFACE)
            run("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(TUN_MTU), "up")


def open_tun(name: str) -> int:
    """A tun device in the namespace ``name``; its descriptor works from any namespace."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    enter(name)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), IFF_TUN | IFF_NO_PI))
    ctypes.CDLL(None).setns(home, CLONE_NEWNET)
    os.close(home)
    return device


def relay(delay: float, names: list[str]) -> None:
    """Hands each packet to the host that its last address byte names, ``delay`` seconds after it came."""
    devices = [open_tun(name) for name in names]
    print("ready", flush=True)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError, OSError):
                os.write(device, packet)
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        # Not epoll, whose waits Python rounds up to whole milliseconds: a packet would be late whenever another came.
        for device in select.select(devices, [], [], left)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(device, 65536)
                    host = packet[19] - 1 if len(packet) >= 20 and packet[0] >> 4 == 4 else -1
                    if 0 <= host < len(devices):
                        count += 1
                        heapq.heappush(waiting, (time.monotonic() + delay, count, devices[host], packet))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        relay(float(sys.argv[1]) / 1e3, sys.argv[2:])
