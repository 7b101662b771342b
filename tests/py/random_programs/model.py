"""Executes a program in one process: what every rank's memory must hold, and whether the program is legal.

In the model, an operation happens when all its ranks have issued it and two sorts of earlier operations have happened:
every collective of its group (for a message, every message of the same ranks and tag), and every operation that uses
the same memory on one of its ranks. Each rank's memory then holds exactly what the order of issue says. No backend may
choose a later moment, so a program that ends here ends on every backend. A program is illegal if torch's rules define
no result: a rank waits for an operation that cannot happen yet, two groups use memory at the same time, or the program
itself writes memory that an operation still needs.

A rank knows that an operation has ended if the call was synchronous, or if the rank has waited for the operation. It
also knows this if a later operation that had to follow on the same memory has ended (but not for a send, which may
continue from a copy). After a barrier a rank knows that these have ended: the collectives of the barrier's group
that it issued before, and the messages that it sent and whose receiver had received them before the barrier.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from random_programs.program import COLLECTIVES, Program, Step, View, involved, numel, overlap


class Illegal(Exception):
    """The program breaks a rule of torch.distributed. The text says which."""


def initial(dtype: str, count: int, rank: int, buffer: int, base: int = 0) -> torch.Tensor:
    """Returns the contents of a buffer at the beginning, or after a `fill` with this `base`: small whole numbers."""
    period = [(5 * i + rank * 3 + buffer + base) % 7 + rank + 1 for i in range(7)]
    return torch.tensor(period, dtype=getattr(torch, dtype)).repeat(count // 7 + 1)[:count]


#: The largest number that `initial` returns.
LARGEST = 6 + 4


def fold(red: str, parts: list[torch.Tensor]) -> torch.Tensor:
    dtype = parts[0].dtype
    wide = torch.float64 if dtype.is_floating_point else dtype
    total = parts[0].to(wide).clone()
    for part in parts[1:]:
        part = part.to(wide)
        if red in ("SUM", "AVG"):
            total += part
        elif red == "PRODUCT":
            total *= part
        elif red == "MIN":
            total = torch.minimum(total, part)
        elif red == "MAX":
            total = torch.maximum(total, part)
        else:
            total = {"BAND": total.__and__, "BOR": total.__or__, "BXOR": total.__xor__}[red](part)
    total = total / len(parts) if red == "AVG" else total
    if wide != dtype and not torch.equal(total.to(dtype).to(wide), total):
        raise Illegal(f"{dtype} does not hold the numbers of this {red} exactly")
    return total.to(dtype)


@dataclass(eq=False)
class Node:
    """One operation: its members, those of them that have not issued it yet, and the operations that it must follow."""

    key: Any
    step: Step
    group: int
    members: list[int]
    collective: bool
    missing: set[Any]
    after: set[Node] = field(default_factory=set)
    #: For each rank: earlier operations on the same memory. They have ended on that rank if this one has.
    same_memory: dict[int, set[Node]] = field(default_factory=dict)
    touched: dict[int, list[tuple[View, bool]]] = field(default_factory=dict)
    #: For a message: rank and memory of its "send" and of its "recv" half.
    halves: dict[str, tuple[int, View]] = field(default_factory=dict)
    #: For a barrier: the messages that its members had received when they issued it.
    received: set[Node] = field(default_factory=set)
    done: bool = False


Check = tuple[View, Any]


class Model:
    """The state of a program while it is executed. With `values` the model computes the memory of every rank. Without
    `values`, it only decides whether the program is legal."""

    def __init__(self, program: Program, values: bool, own: int = -1, ordered: bool = True) -> None:
        self.program, self.values, self.own, self.ordered = program, values, own, ordered
        ranks = range(program.ranks)
        self.memory: list[list[torch.Tensor]] = []
        if values:
            self.memory = [
                [initial(dtype, count, rank, b) for b, (dtype, count) in enumerate(program.buffers)] for rank in ranks
            ]
        self.nodes: dict[Any, Node] = {}
        self.waiting: list[Node] = []
        self.last: dict[int, Node] = {}  # by group
        #: The latest message by group, sender, receiver and tag. Messages with the same four do not overtake each
        #: other.
        self.last_message: dict[tuple[int, int, int, int], Node] = {}
        self.in_use: list[list[Node]] = [[] for _ in ranks]  # issued, and not known to have ended
        self.works: list[dict[int, list[Node]]] = [{} for _ in ranks]
        self.issued: list[dict[int, list[Node]]] = [{} for _ in ranks]  # collectives by group, not known to have ended
        self.received: list[set[Node]] = [set() for _ in ranks]
        self.before_barrier: dict[tuple[int, Node], list[Node]] = {}
        self.queues: list[deque[tuple[int, Step]]] = [deque() for _ in ranks]
        self.blocked: list[tuple[list[Node], int] | None] = [None for _ in ranks]
        self.gone: set[int] = set()
        #: For each step: what the memory of the rank `own` must hold right after the step.
        self.checks: dict[int, list[Check]] = {}
        #: For each step and sender: the contents of the sender's messages to a rank that receives from any rank.
        self.parcels: dict[int, dict[int, list[torch.Tensor]]] = {}
        self.count = 0

    # ---------------------------------------------------------------------------------------------- the course

    def append(self, step: Step) -> None:
        """Adds a step, and executes as much as possible."""
        ranks = involved(step, self.program)
        if self.gone & set(ranks) and step["do"] != "fill":
            raise Illegal(f"rank {self.gone & set(ranks)} has left")
        for rank in ranks:
            if rank not in self.gone:
                self.queues[rank].append((self.count, step))
        self.count += 1
        self.run()

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(self.program.ranks):
                while self._one(rank):
                    moved = True
            for node in list(self.waiting):
                if not node.missing and all(earlier.done for earlier in node.after):
                    self._happen(node)
                    self.waiting.remove(node)
                    moved = True

    def finish(self) -> None:
        """Call it after the last step: raises `Illegal` unless every rank has reached the end."""
        for rank, queue in enumerate(self.queues):
            if queue or self.blocked[rank]:
                raise Illegal(f"rank {rank} waits for ever")
        for rank, works in enumerate(self.in_use):
            for node in works:
                if rank not in self.gone:
                    raise Illegal(f"rank {rank} ends without knowing that {node.key} has")

    def stuck(self) -> bool:
        return any(self.blocked) or any(self.queues)

    def _one(self, rank: int) -> bool:
        """Executes the next step of a rank, or ends the step in which it is blocked. False if neither is possible."""
        blocked = self.blocked[rank]
        if blocked is not None:
            nodes, at = blocked
            if not all(node.done for node in nodes):
                return False
            self.blocked[rank] = None
            self._known(rank, nodes, at)
            return True
        if not self.queues[rank]:
            return False
        at, step = self.queues[rank].popleft()
        wait = self._do(rank, at, step)
        if wait:
            self.blocked[rank] = (wait, at)
        return True

    def _do(self, rank: int, at: int, step: Step) -> list[Node]:
        """Executes one step of one rank. Returns the operations for which the rank then waits."""
        kind = step["do"]
        if kind == "object":
            return [self._collective(rank, step)]
        if kind == "anyone":
            return [self._anyone(rank, at, step)]
        if kind in COLLECTIVES:
            node, how = self._collective(rank, step), step["how"][self._member(rank, step)]
            return self._filed(rank, step, [node], how)
        if kind == "region":
            nodes = [self._collective(rank, call) for call in step["calls"] + step["tail"]]
            return self._filed(rank, step, nodes, step["how"][self._member(rank, step)])
        if kind == "abandon":
            for call in step["calls"][: step["runs"]]:
                self._collective(rank, call)
            return []
        if kind in ("send", "recv"):
            return self._filed(rank, step, [self._half(rank, step, kind, step["v"], step["m"])], step["how"])
        if kind == "batch":
            nodes = []
            for move in step["moves"]:
                for who, what, view in ((move["src"], "send", "sv"), (move["dst"], "recv", "dv")):
                    if who == rank:
                        nodes.append(self._half(rank, step | move, what, move[view], move["m"]))
            return self._filed(rank, step, nodes, "sync" if "struck" in step else "keep")
        if kind == "wait":
            nodes = self.works[rank].pop(step["id"], None)
            if nodes is None:
                raise Illegal(f"rank {rank} has no Work {step['id']}")
            if step["via"] == "thread":
                self.works[rank][-step["id"] - 1] = nodes
                return []
            return nodes
        if kind == "join":
            nodes = self.works[rank].pop(-step["id"] - 1, None)
            if nodes is None:
                raise Illegal(f"rank {rank} has no thread that waits for {step['id']}")
            return nodes
        self._local(rank, at, step)
        return []

    def _local(self, rank: int, at: int, step: Step) -> None:
        kind, program = step["do"], self.program
        if kind == "fill":
            b = step["b"]
            dtype, count = program.buffers[b]
            self._free(rank, [b, 0, [count], [1]])
            if self.values:
                self.memory[rank][b].copy_(initial(dtype, count, rank, b, step["base"]))
        elif kind == "leave":
            if self.in_use[rank] or self.works[rank]:
                raise Illegal(f"rank {rank} leaves before its operations have ended")
            self.gone.add(rank)
            self._snapshot_all(rank, at)
        elif kind == "fork" and step.get("id") is not None and step["id"] not in self.works[rank]:
            raise Illegal(f"rank {rank} forks with a Work {step['id']} that it has not")
        elif kind == "disagree":
            member = program.groups[step["step"]["g"]].index(rank)
            own = step["other"] if member == step["odd"] else step["step"]
            for view, _ in accesses(own, member):
                self._free(rank, view)
            self._disagreement(rank, at, step)
        elif kind == "twice":
            for view in step["views"]:
                self._free(rank, view)
            self._twice(rank, at, step)

    def end_checks(self, rank: int) -> None:
        """Records what all memory of a rank must hold at the end, under the number of the step after the last."""
        if rank not in self.gone:
            self._snapshot_all(rank, self.count)

    # ---------------------------------------------------------------------------------------------- operations

    def _member(self, rank: int, step: Step) -> int:
        return self.program.groups[step["g"]].index(rank)

    def _collective(self, rank: int, step: Step) -> Node:
        node = self.nodes.get(step["id"])
        if node is None:
            members = self.program.groups[step["g"]]
            node = Node(step["id"], step, step["g"], members, True, set(members))
            self.nodes[step["id"]] = node
            self.waiting.append(node)
            if step["g"] in self.last:
                node.after.add(self.last[step["g"]])
            self.last[step["g"]] = node
        if step["do"] == "barrier":
            self.before_barrier[rank, node] = list(self.issued[rank].get(step["g"], []))
            node.received |= self.received[rank]
        self._issue(rank, node, accesses(step, self._member(rank, step)))
        self.issued[rank].setdefault(step["g"], []).append(node)
        return node

    def _anyone(self, rank: int, at: int, step: Step) -> Node:
        """Every rank stays in the step until the last message was received. The receiver uses separate memory for the
        messages."""
        node = self.nodes.get(step["id"])
        if node is None:
            members = involved(step, self.program)
            node = Node(step["id"], step, step["g"], members, False, set(members))
            self.nodes[step["id"]] = node
            self.waiting.append(node)
        self._issue(rank, node, [(view, False) for view in step["views"].get(str(rank), [])])
        if self.values and rank in step["senders"]:
            # The sender's memory is final here, because the sender has waited for every earlier operation on this
            # memory.
            parcel = [self.read(rank, view) for view in step["views"][str(rank)]]
            self.parcels.setdefault(at, {})[rank] = parcel
        return node

    def _half(self, rank: int, step: Step, what: str, view: View, message: int) -> Node:
        node = self.nodes.get(("m", message))
        if node is None:
            members = [rank, step["peer"]] if "peer" in step else [step["src"], step["dst"]]
            node = Node(("m", message), step, step["g"], members, False, {"send", "recv"})
            self.nodes["m", message] = node
            self.waiting.append(node)
            other = next(each for each in members if each != rank)
            channel = (step["g"], *((rank, other) if what == "send" else (other, rank)), step["tag"])
            if channel in self.last_message:
                node.after.add(self.last_message[channel])
            self.last_message[channel] = node
        node.halves[what] = (rank, view)
        node.missing.discard(what)
        self._issue(rank, node, [(view, what == "recv")])
        return node

    def _issue(self, rank: int, node: Node, touched: list[tuple[View, bool]]) -> None:
        node.missing.discard(rank)
        for earlier in self.conflicts(rank, touched):
            if earlier is node:
                continue
            if earlier.group != node.group or not self.ordered:
                raise Illegal(f"rank {rank} uses memory of {earlier.key} in {node.key} without having waited")
            node.after.add(earlier)
            if "send" not in earlier.halves or earlier.halves["send"][0] != rank:
                node.same_memory.setdefault(rank, set()).add(earlier)
        node.touched[rank] = node.touched.get(rank, []) + touched
        self.in_use[rank].append(node)

    def conflicts(self, rank: int, touched: list[tuple[View, bool]]) -> list[Node]:
        """Operations in flight on a rank for which a use of this memory must wait."""
        return [
            node
            for node in self.in_use[rank]
            if any(
                (writes or wrote) and overlap(view, other)
                for view, writes in touched
                for other, wrote in node.touched[rank]
            )
        ]

    def _filed(self, rank: int, step: Step, nodes: list[Node], how: str) -> list[Node]:
        if how == "sync":
            return nodes
        if how == "keep":
            self.works[rank][step["id"]] = nodes
        return []

    def _free(self, rank: int, view: View) -> None:
        for node in self.conflicts(rank, [(view, True)]):
            raise Illegal(f"rank {rank} writes memory that {node.key} is using")

    def _known(self, rank: int, nodes: list[Node], at: int) -> None:
        """Records that the rank knows the end of these operations, so their results can be compared."""
        todo, known = list(nodes), set()
        while todo:
            node = todo.pop()
            if node in known:
                continue
            known.add(node)
            todo += node.same_memory.get(rank, ())
            todo += self.before_barrier.pop((rank, node), ())
            todo += [message for message in node.received if rank == message.halves["send"][0]]
            if "recv" in node.halves and rank == node.halves["recv"][0]:
                self.received[rank].add(node)
        self.in_use[rank] = [node for node in self.in_use[rank] if node not in known]
        for issued in self.issued[rank].values():
            issued[:] = [node for node in issued if node not in known]
        if self.values and rank == self.own:
            for node in known:
                for view, wrote in node.touched[rank]:
                    if wrote and numel(view) and not self.conflicts(rank, [(view, False)]):
                        self.checks.setdefault(at, []).append((view, self.tensor(rank, view).clone()))

    # ---------------------------------------------------------------------------------------------- numbers

    def tensor(self, rank: int, view: View) -> torch.Tensor:
        return self.memory[rank][view[0]].as_strided(view[2], view[3], view[1])

    def read(self, rank: int, view: View) -> torch.Tensor:
        """Returns a copy of the elements in their logical order."""
        return self.tensor(rank, view).reshape(-1).clone()

    def write(self, rank: int, view: View, numbers: torch.Tensor) -> None:
        target = self.tensor(rank, view)
        target.copy_(numbers.reshape(target.shape))

    def _happen(self, node: Node) -> None:
        node.done = True
        if not self.values:
            return
        if node.step["do"] == "anyone":
            return
        if node.collective:
            results = collective(node.step, [self._inputs(node.step, member) for member in range(len(node.members))])
            for member, rank in enumerate(node.members):
                for view, numbers in zip(node.step["outs"][member], results[member], strict=True):
                    if numbers is not None:
                        self.write(rank, view, numbers)
        else:
            numbers = self.read(*node.halves["send"])
            self.write(*node.halves["recv"], numbers)

    def _inputs(self, step: Step, member: int) -> list[torch.Tensor]:
        rank = self.program.groups[step["g"]][member]
        return [self.read(rank, view) for view in step["ins"][member] or step["outs"][member]]

    def _snapshot_all(self, rank: int, at: int) -> None:
        if self.values and rank == self.own:
            for b, (_, count) in enumerate(self.program.buffers):
                self.checks.setdefault(at, []).append(([b, 0, [count], [1]], self.memory[rank][b].clone()))

    def _disagreement(self, rank: int, at: int, step: Step) -> None:
        """Records what a rank that got no error must hold: the agreed result or, on the odd rank, its earlier
        memory."""
        if not self.values or rank != self.own:
            return
        agreed, members = step["step"], self.program.groups[step["step"]["g"]]
        member = members.index(rank)
        if member == step["odd"]:
            other = step["other"]
            found = [(view, self.tensor(rank, view).clone()) for view in other["outs"][member]]
            if other["do"] == "scatter" and other["root"] == member:
                view = other["outs"][member][0]
                own = self.read(rank, other["ins"][member][member])
                found = [(view, own.reshape(self.tensor(rank, view).shape))]
            elif other["do"] == agreed["do"] and other["do"].startswith("all_to_all"):
                # The odd rank may differ only in what it sends, and then it still receives what it expects.
                calls = [other if each == member else agreed for each in range(len(members))]
                rows = [parts(call, each, self._inputs(call, each)) for each, call in enumerate(calls)]
                given = [row[member] for row in rows]
                given = [torch.cat(given)] if "splits" in other else given
                if [len(each) for each in given] == [numel(view) for view, _ in found]:
                    found = [
                        (view, numbers.reshape(old.shape)) for (view, old), numbers in zip(found, given, strict=True)
                    ]
        else:
            inputs = [self._inputs(agreed, each) for each in range(len(members))]
            odd, other = step["odd"], step["other"]
            if other["do"] == agreed["do"]:
                # The ranks with which the odd rank agrees receive its data from the memory of its own call.
                before, after = parts(agreed, odd, inputs[odd]), parts(other, odd, self._inputs(other, odd))
                if [each.dtype for each in before] == [each.dtype for each in after]:
                    given = [new if len(new) == len(old) else old for old, new in zip(before, after, strict=True)]
                    inputs[odd] = [torch.cat(given)] if "splits" in agreed else given
            results = collective(agreed, inputs)[member]
            found = []
            for view, numbers in zip(agreed["outs"][member], results, strict=True):
                before = self.tensor(rank, view).clone()
                found.append((view, before if numbers is None else numbers.reshape(before.shape)))
        self.checks[at] = found

    def _twice(self, rank: int, at: int, step: Step) -> None:
        """Records the result of the list's calls one after the other, each over the whole group."""
        if not self.values or rank != self.own:
            return
        members = self.program.groups[step["g"]]
        copies = [[each.clone() for each in memory] for memory in self.memory]
        for view in step["views"]:
            total = fold(step["red"], [self.read(each, view) for each in members])
            for each in members:
                self.write(each, view, total)
        self.checks[at] = [(view, self.tensor(rank, view).clone()) for view in step["views"]]
        self.memory = copies


def parts(step: Step, member: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns a member's inputs, split as the call splits them."""
    return list(inputs[0].split(step["splits"][member])) if "splits" in step else inputs


def accesses(step: Step, member: int) -> list[tuple[View, bool]]:
    """Returns the views that a member's call uses, and whether it writes each of them."""
    kind = step["do"]
    writes = kind != "broadcast" or member != step["root"]
    if kind == "reduce":
        writes = member == step["root"]
    touched = [(view, writes) for view in step["outs"][member]]
    return touched + [(view, False) for view in step["ins"][member]]


def collective(step: Step, inputs: list[list[torch.Tensor]]) -> list[list[torch.Tensor | None]]:
    """Returns the results of every member, for each of its outputs. None: the output keeps its contents."""
    kind, n = step["do"], len(inputs)
    every = range(n)
    if kind in ("barrier", "object"):
        return [[] for _ in every]
    if kind == "all_reduce":
        return [[fold(step["red"], [each[0] for each in inputs])]] * n
    if kind == "reduce":
        total = fold(step["red"], [each[0] for each in inputs])
        return [[total if member == step["root"] else None] for member in every]
    if kind == "reduce_list":
        lists = [fold(step["red"], [each[i] for each in inputs]) for i in range(len(inputs[0]))]
        return [list(lists) for _ in every]
    if kind == "broadcast":
        return [[None if member == step["root"] else inputs[step["root"]][0]] for member in every]
    if kind == "all_gather":
        return [[each[0] for each in inputs] for _ in every]
    if kind == "all_gather_into":
        return [[torch.cat([each[0] for each in inputs])] for _ in every]
    if kind == "gather_list":
        return [[torch.cat([each[i] for each in inputs]) for i in range(len(inputs[0]))] for _ in every]
    if kind == "gather":
        return [[each[0] for each in inputs] if member == step["root"] else [] for member in every]
    if kind == "scatter":
        return [[inputs[step["root"]][member]] for member in every]
    if kind == "reduce_scatter":
        return [[fold(step["red"], [each[member] for each in inputs])] for member in every]
    if kind in ("reduce_scatter_into", "scatter_list"):
        lists = [fold(step["red"], [each[i] for each in inputs]) for i in range(len(inputs[0]))]
        return [[total.chunk(n)[member] if total.numel() else total for total in lists] for member in every]
    if kind == "all_to_all":
        return [[each[member] for each in inputs] for member in every]
    if kind == "all_to_all_single":
        blocks = [inputs[member][0].split(step["splits"][member]) for member in every]
        return [[torch.cat([blocks[each][member] for each in every])] for member in every]
    raise ValueError(kind)


def judge(program: Program, ordered: bool = True) -> None:
    """Raises `Illegal` for a program that torch's rules do not allow."""
    follow(program, Model(program, values=False, ordered=ordered))


def follow(program: Program, model: Model) -> Model:
    for step in program.steps:
        model.append(step)
    model.finish()
    return model


def expected(program: Program, rank: int) -> Model:
    """Returns the model after the whole program, with everything that one rank must find after each step."""
    model = follow(program, Model(program, values=True, own=rank))
    model.end_checks(rank)
    return model
