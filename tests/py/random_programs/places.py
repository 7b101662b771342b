"""Places in which programs run: ranks on one host or on several; tensors in ordinary memory, in memory that peers can
reach, or on a simulated device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import net
import ucx
from harness import IS_GLOO
from on_device import SHARED_CARD

from random_programs.generate import DEVICE, GLOO, HOSTS, VENDOR, Taste
from random_programs.run import Ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))
import simdevice
import simulated

#: What programs may contain at each place. "staged" is a device without a vendor's library. A vendor's name means its
#: simulator; "ucx" is the link between the hosts; "card" is an NVIDIA card that all ranks share.
PLACES = {
    "cpu": GLOO if IS_GLOO else Taste(),
    "reachable": Taste(),
    "partly-reachable": Taste(),
    "two-hosts": HOSTS,
    "three-hosts": HOSTS,
    "two-hosts-ucx": HOSTS,
    "staged": DEVICE,
    **dict.fromkeys(simulated.VENDORS, VENDOR),
    "card": VENDOR,
}
#: Which buffers are in memory that peers can reach.
REACHABLE = {"reachable": "all", "partly-reachable": "some"}
HOSTS_OF = {"two-hosts": 2, "three-hosts": 3, "two-hosts-ucx": 2}


@contextmanager
def ranks_at(place: str) -> Iterator[Ranks]:
    """Rank processes at a place. Raises `net.Unavailable` if the place needs namespaces that this process cannot
    make."""
    if place in HOSTS_OF:
        env = {"GLOO_SOCKET_IFNAME": net.INTERFACE, **(ucx.BY_UCX if place.endswith("ucx") else {})}
        if place.endswith("ucx") and (why := ucx.missing()):
            raise net.Unavailable(why)
        with net.Network(HOSTS_OF[place]) as network, closing(Ranks(env=env, hosts=network.names)) as ranks:
            yield ranks
        return
    env, settings = {}, {}
    if place in REACHABLE:
        settings["reachable"] = REACHABLE[place]
    elif place == "card":
        env, settings["vendor"] = SHARED_CARD, "card"
    elif place != "cpu":
        simdevice.library_path()
        settings["vendor"] = "" if place == "staged" else place
    if settings.get("vendor") in simulated.VENDORS:
        env = simulated.environment(place, simulated.builder().build())
    with closing(Ranks(env=env, **settings)) as ranks:
        yield ranks
