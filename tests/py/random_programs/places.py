"""Where programs run: processes of one host or of several; tensors in its memory, where peers reach them, or on a
simulated device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import net
from harness import IS_GLOO

from random_programs.generate import DEVICE, GLOO, HOSTS, VENDOR, Taste
from random_programs.run import Ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))
import simdevice
import simulated

#: What each may hold. "staged" is a device without a vendor's library; the vendors' names stand for their simulators.
PLACES = {
    "cpu": GLOO if IS_GLOO else Taste(),
    "reachable": Taste(),
    "partly-reachable": Taste(),
    "two-hosts": HOSTS,
    "three-hosts": HOSTS,
    "staged": DEVICE,
    **dict.fromkeys(simulated.VENDORS, VENDOR),
}
#: Which buffers lie where peers can reach them.
REACHABLE = {"reachable": "all", "partly-reachable": "some"}
HOSTS_OF = {"two-hosts": 2, "three-hosts": 3}


@contextmanager
def ranks_at(place: str) -> Iterator[Ranks]:
    """Processes of a place; `net.Unavailable` where it takes namespaces that may not be made."""
    if place in HOSTS_OF:
        env = {"GLOO_SOCKET_IFNAME": net.INTERFACE}
        with net.Network(HOSTS_OF[place]) as network, closing(Ranks(env=env, hosts=network.names)) as ranks:
            yield ranks
        return
    env, settings = {}, {}
    if place in REACHABLE:
        settings["reachable"] = REACHABLE[place]
    elif place != "cpu":
        simdevice.library_path()
        settings["vendor"] = "" if place == "staged" else place
    if settings.get("vendor"):
        env = simulated.environment(place, simulated.builder().build())
    with closing(Ranks(env=env, **settings)) as ranks:
        yield ranks
