"""If hosts have several ranks, sends rows to other ranks in two steps: first between hosts, then inside each host.

With H hosts of L ranks each rank sends H - 1 messages between hosts instead of (H - 1) * L. Rows for a host are sent to
the rank of that host that has the sender's place (index within the host). That rank passes the rows on in shared
memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group: several hosts, of which at least one has two or more ranks.

    All lists of ranks are in the order of the groups that are created from them.
    """

    #: For each rank of the group: the ranks of its host, by their place on the host.
    host_of: list[list[int]]
    #: For each place that all hosts have: the ranks that have it, one on each host.
    columns: list[list[int]]
    #: This rank's place. `across` is the group of the ranks with this place, or of this rank alone if not all hosts
    #: have the place. `inside` is the group of this host's ranks, in the order of their places.
    place: int
    across: Any
    inside: Any
    #: Whether all hosts have the same number of ranks.
    even: bool

    @property
    def is_in_column(self) -> bool:
        """Whether all hosts have a rank with this rank's place."""
        return self.place < len(self.columns)


def names(group: Any) -> list[Any]:
    """Identifies the host of each rank of a group. Collective."""
    here = (Path("/proc/sys/kernel/random/boot_id").read_text().strip(), Path("/proc/self/ns/net").readlink().name)
    where: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(where, here, group=group)
    return where


def find(group: Any, where: list[Any] | None = None, even: bool = True) -> Hosts | None:
    """The hosts of a group.

    None if there is one host, if all hosts have one rank, or, with ``even``, if hosts have different numbers of ranks.
    Collective.

    ``where``: the result of ``names``, if the caller has it.
    """
    where = names(group) if where is None else where
    here = where[dist.get_rank(group)]
    members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    # torch sorts the ranks of a new group, so use that order.
    order = sorted(range(len(members)), key=lambda rank: members[rank])
    hosts = {name: [rank for rank in order if where[rank] == name] for name in where}
    here_too, sizes = hosts[here], {len(host) for host in hosts.values()}
    if len(hosts) < 2 or sizes == {1} or (even and len(sizes) > 1):
        return None
    host_of = [hosts[name] for name in where]
    columns = [[rank for rank in order if host_of[rank][place] == rank] for place in range(min(sizes))]
    place = here_too.index(dist.get_rank(group))

    def of(ranks: list[int]) -> Any:
        return dist.new_group([members[rank] for rank in ranks], use_local_synchronization=True)

    # torch numbers the groups that a process makes, and derives names from the number, so every rank makes two groups.
    across = of(columns[place] if place < len(columns) else [dist.get_rank(group)])
    return Hosts(host_of, columns, place, across=across, inside=of(here_too), even=len(sizes) == 1)


def exchange(rows: Tensor, sent: list[int], received: list[int], hosts: Hosts) -> Tensor:
    """Sends ``sent[r]`` rows to each rank r.

    Returns the rows received from all ranks (``received[r]``), in rank order.
    """
    column = hosts.columns[hosts.place]
    by_host = [rank for other in column for rank in hosts.host_of[other]]
    counts = torch.tensor([sent[rank] for rank in by_host], device=rows.device)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=hosts.across)
    # For each rank of `column` (the ranks with this place): the number of rows that it has for each place on this host.
    table = theirs.view(len(column), -1).tolist()
    parts = rows.split(sent)
    sizes = [sum(sent[rank] for rank in hosts.host_of[other]) for other in column]
    came = _swap([parts[rank] for rank in by_host], sizes, [sum(line) for line in table], hosts.across)
    parts = came.split([size for line in table for size in line])
    places = range(len(hosts.columns))
    by_place = [parts[line * len(places) + place] for place in places for line in range(len(table))]
    sizes = [sum(line[place] for line in table) for place in places]
    arriving = [sum(received[rank] for rank in each) for each in hosts.columns]
    sources = [rank for each in hosts.columns for rank in each]
    parts = _swap(by_place, sizes, arriving, hosts.inside).split([received[rank] for rank in sources])
    return torch.cat([parts[sources.index(rank)] for rank in range(len(received))])


def _swap(parts: list[Tensor], sent: list[int], received: list[int], group: Any) -> Tensor:
    rows = torch.cat(parts)
    came = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(came, rows, received, sent, group=group)
    return came
