"""Draws a legal program from a seed.

The steps are drawn one after the other. A `Model` without numbers follows and knows which operations are under way, so
each step is legal when it is drawn. A step does not wait for an operation that cannot have ended, and does not use
memory that another group uses. Numbers stay so small that every type holds them exactly; `Sizes` tracks that.
"""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from random_programs.model import LARGEST, Illegal, Model, Node, accesses
from random_programs.program import (
    COLLECTIVES,
    DTYPES,
    REDUCING,
    Program,
    Step,
    View,
    contiguous,
    flat,
    numel,
    overlap,
    span,
)

#: Whether a group can have its ranks in the order in which they are named; older torch sorts them.
KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters

#: Scales of programs: the weight with which each is drawn, and the bytes of its largest tensor.
SCALES = {"tiny": (30, 200), "border": (45, 4400), "medium": (18, 90_000), "large": (6, 3 << 20)}
BORDERS = [0, 1, 4, 8, 60, 512, 4095, 4096, 4097, 8192, 65_536, 65_540, 1 << 20, (1 << 20) + 8, 3 << 20]
#: Calls that a rank may make instead of the agreed one, because the core detects the difference. Different forms of one
#: collective, such as all_gather and all_gather_into, may have equal signatures, so only one of them is listed.
UNLIKE = ["all_reduce", "broadcast", "reduce", "all_gather_into", "reduce_scatter_into", "gather", "scatter", "barrier"]
#: Calls in a region. A list may follow them; torch itself collects the calls of the list.
IN_REGIONS = [
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
]
LISTS = ["reduce_list", "gather_list", "scatter_list"]
#: Causes that end a region early: a call that is rejected, the program's own exception, KeyboardInterrupt, a signal.
CAUSES = ["refused", "own", "raised", "signal"]
#: Microseconds after which a signal comes. A region takes some hundred microseconds.
MOMENTS = [50, 200, 500, 1500, 5000]
ONE_PIECE = {"all_gather_into", "reduce_scatter_into", "all_to_all_single", "gather_list", "scatter_list"}


@dataclass(frozen=True)
class Taste:
    """What programs may contain. The default is everything that the backend under test must support."""

    ranks: tuple[int, ...] = (2, 2, 3, 3, 4)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    #: Operations in flight may use the same memory; not with gloo, which runs them in any order.
    ordered: bool = True
    #: Like `ordered`, for two operations of which one is a message.
    mixed: bool = True
    strided: bool = True
    #: Strided tensors may interleave with tensors of operations in flight.
    interleaved: bool = True
    average: bool = True
    scattered: bool = True  # reduce_scatter may be asynchronous; gloo's ends only in its own wait, not by a barrier
    drop_messages: bool = True
    leave: bool = True
    forks: bool = True
    endings: bool = True  # programs whose last step is a rank that disagrees
    lists: bool = True
    large: bool = True
    reduce: bool = True  # gloo's reduce overwrites memory of ranks that are not the root
    uneven: bool = True  # lists whose parts differ in size
    anyone: bool = True  # receives from any rank
    apart: bool = True  # other calls between the two halves of a message
    regions: bool = True
    #: Exceptions end regions and batches early, and a SIGINT comes in regions, batches and waits.
    interrupts: bool = True
    #: A region is launched at its end; none of its calls is issued before.
    collects: bool = False
    #: gloo carries the messages: tensors are contiguous, and every Work must be waited for.
    delegated: bool = False


#: For programs in which a rank is killed: they contain only calls that succeed without the kill.
STRUCK = Taste(forks=False, endings=False, leave=False, large=False, interrupts=False)
#: Over several hosts.
HOSTS = Taste(large=False)
DEVICE = Taste(forks=False, large=False)
#: On a device under a vendor's library. The library has no receive with an unspecified sender and does not compare
#: calls. Calls that are not waited for are ordered by streams, not by memory. The first message between two ranks waits
#: for its other half.
VENDOR = Taste(
    dtypes=("float32", "float16", "int8", "int32", "int64"),
    ordered=False,
    forks=False,
    endings=False,
    anyone=False,
    apart=False,
    large=False,
    collects=True,
)
GLOO = Taste(
    dtypes=("float32", "float64", "int8", "uint8", "int32", "int64"),
    ordered=False,
    strided=False,
    average=False,
    drop_messages=False,
    leave=False,
    forks=False,
    endings=False,
    lists=False,
    scattered=False,
    uneven=False,
    reduce=False,
    delegated=True,
    regions=False,
    interrupts=False,
)


class Sizes:
    """For each buffer: the largest number that it may hold, and the number of bits after the binary point."""

    def __init__(self, program: Program) -> None:
        self.exact = [DTYPES[dtype][1] for dtype, _ in program.buffers]
        self.held = [(LARGEST, 0) for _ in program.buffers]

    def filled(self, buffer: int) -> None:
        self.held[buffer] = (LARGEST, 0)

    def after(self, buffers: list[int], red: str, n: int) -> tuple[int, int]:
        largest, bits = max(self.held[b][0] for b in buffers), max(self.held[b][1] for b in buffers)
        if red in ("SUM", "AVG"):
            return largest * n, bits + (n.bit_length() - 1 if red == "AVG" else 0)
        if red == "PRODUCT":
            return largest**n, bits * n
        return largest, bits

    def fits(self, buffers: list[int], red: str, n: int) -> bool:
        exact = self.exact[buffers[0]]
        if exact == 0:
            return red != "AVG"
        if red in ("BAND", "BOR", "BXOR") or (red == "AVG" and n & (n - 1)):
            return False
        largest, bits = self.after(buffers, red, n)
        return largest.bit_length() + bits <= exact

    def moved(self, sources: list[int], target: int, red: str = "MAX", n: int = 1) -> None:
        if self.exact[target]:
            one, other = self.held[target], self.after(sources, red, n)
            self.held[target] = (max(one[0], other[0]), max(one[1], other[1]))


@dataclass
class Message:
    """A message whose other half is still to be drawn."""

    m: int
    g: int
    src: int
    dst: int
    tag: int
    any: bool
    first: str
    count: int
    dtype: str


@dataclass
class Draw:
    """A program being drawn."""

    rng: random.Random
    taste: Taste
    program: Program
    largest: int
    model: Model = field(init=False)
    sizes: Sizes = field(init=False)
    open: list[Message] = field(default_factory=list)
    threads: list[tuple[int, int]] = field(default_factory=list)
    #: Groups in which all ranks have made a call that moves tensors.
    connected: set[int] = field(default_factory=set)
    next_id: int = 0
    leaver: int | None = None

    def __post_init__(self) -> None:
        self.model = Model(self.program, values=False, ordered=self.taste.ordered)
        self.sizes = Sizes(self.program)

    # ---------------------------------------------------------------------------------------------- small things

    def put(self, step: Step) -> None:
        self.model.append(step)
        self.program.steps.append(step)
        assert not self.model.stuck(), f"drew a step in which a rank waits for ever: {step}"

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def alive(self) -> list[int]:
        return [rank for rank in range(self.program.ranks) if rank not in self.model.gone]

    def groups(self, least: int = 1) -> list[int]:
        gone = self.model.gone
        return [g for g, ranks in enumerate(self.program.groups) if len(ranks) >= least and not gone & set(ranks)]

    def may_follow(self, node: Node, g: int, collective: bool) -> bool:
        """Returns whether an operation of group `g` may use memory of `node`, which is in flight."""
        taste = self.taste
        return node.group == g and taste.ordered and (taste.mixed or (node.collective and collective))

    def count(self, dtype: str, parts: int) -> int:
        """Returns a number of elements, so small that `parts` such parts fit into a buffer."""
        size = DTYPES[dtype][0]
        room = min(count for kind, count in self.program.buffers if kind == dtype) // (2 * parts + 1)
        most = min(self.largest // size, room)
        if self.rng.random() < 0.5:
            fitting = [b // size for b in BORDERS if b // size <= most]
            # Mostly the largest limits that fit, because a program's scale was drawn to reach these.
            return fitting[-1 - min(int(self.rng.expovariate(0.5)), len(fitting) - 1)]
        return self.rng.randint(0, most)

    def body(self, dtype: str, parts: int) -> int:
        """Returns the number of elements of a message. gloo has no empty messages."""
        return max(self.count(dtype, parts), 1 if self.taste.delegated else 0)

    def view(self, rank: int, dtype: str, count: int, taken: list[View], one_piece: bool) -> View | None:
        """Returns a view of `count` elements that shares no element with the views in `taken`; None if none was
        found."""
        rng, taste = self.rng, self.taste
        buffers = [b for b, (kind, _) in enumerate(self.program.buffers) if kind == dtype]
        for _ in range(8):
            b = rng.choice(buffers)
            sizes, strides = [count], [1]
            if taste.strided and not one_piece and 1 < count <= 40_000 and rng.random() < 0.3:
                sizes, strides = self.layout(count)
            view: View = [b, 0, sizes, strides]
            last = self.program.buffers[b][1] - span(view)[1]
            if last < 0:
                continue
            busy = [v for node in self.model.in_use[rank] for v, _ in node.touched[rank] if v[0] == b]
            draw = rng.random()
            if draw < 0.25:
                view[1] = 0
            elif draw < 0.5 and busy:
                view[1] = min(last, rng.choice(busy)[1] + rng.choice([0, 0, 1]))
            else:
                view[1] = rng.randint(0, last)
            if any(overlap(view, other) for other in taken):
                continue
            if taste.interleaved or not any(interleaved(view, other) for other in busy):
                return view
        return None

    def layout(self, count: int) -> tuple[list[int], list[int]]:
        """Returns the sizes and strides of every second element, or of a matrix that is transposed or a part of a wider
        one."""
        rows = next((r for r in (7, 5, 4, 3, 2) if count % r == 0), 1)
        columns, draw = count // rows, self.rng.random()
        if rows == 1 or draw < 0.4:
            return [count], [2]
        if draw < 0.7:
            return [rows, columns], [1, rows]
        return [rows, columns], [columns + 2, 1]

    # ---------------------------------------------------------------------------------------------- collectives

    def collective(self, kind: str, g: int, dtype: str, root: int, count: int | None = None) -> Step | None:
        """Returns a collective without `how`. None if no memory was found for it."""
        rng, members = self.rng, self.program.groups[g]
        n = len(members)
        step: Step = {"do": kind, "g": g, "ins": [[] for _ in members], "outs": [[] for _ in members]}
        if kind in ("broadcast", "reduce", "gather", "scatter"):
            step["root"] = root
        if kind == "barrier":
            return step
        parts = 1 if kind in ("all_reduce", "broadcast", "reduce") else n + 1
        size = self.count(dtype, parts) if count is None else count
        uneven = rng.random() < 0.4 and (self.taste.uneven or kind == "all_to_all_single")
        lengths = [rng.randint(0, size) if uneven else size for _ in members]
        table = [[rng.randint(0, size) if uneven else size for _ in members] for _ in members]
        length = rng.randint(1, 4)
        several = [rng.randint(0, size // length) for _ in range(length)]
        if kind == "all_to_all_single":
            step["splits"] = table
        if kind == "reduce_list":
            step["form"] = rng.choice(["coalesced", "manager"])
        in_place = rng.random() < 0.25
        for member, rank in enumerate(members):
            ins: list[int] = []
            outs: list[int] = []
            if kind in ("all_reduce", "broadcast", "reduce"):
                outs = [size]
            elif kind == "reduce_list":
                outs = several
            elif kind == "all_gather":
                ins, outs = [lengths[member]], lengths
            elif kind == "all_gather_into":
                ins, outs = [size], [size * n]
            elif kind == "gather_list":
                ins, outs = several, [each * n for each in several]
            elif kind == "scatter_list":
                ins, outs = [each * n for each in several], several
            elif kind == "reduce_scatter":
                ins, outs = lengths, [lengths[member]]
            elif kind == "reduce_scatter_into":
                ins, outs = [size * n], [size]
            elif kind == "gather":
                ins, outs = [size], [size] * n if member == root else []
            elif kind == "scatter":
                ins, outs = [size] * n if member == root else [], [size]
            elif kind == "all_to_all":
                ins, outs = table[member], [row[member] for row in table]
            elif kind == "all_to_all_single":
                ins, outs = [sum(table[member])], [sum(row[member] for row in table)]
            taken: list[View] = []
            for counts, name in ((outs, "outs"), (ins, "ins")):
                for each in counts:
                    view = self.view(rank, dtype, each, taken, kind in ONE_PIECE)
                    if view is None:
                        return None
                    taken.append(view)
                    step[name][member].append(view)
            if in_place and kind == "all_gather_into":
                b, offset, _, _ = step["outs"][member][0]
                step["ins"][member] = [flat(b, offset + member * size, size)]
            elif in_place and kind == "reduce_scatter_into":
                b, offset, _, _ = step["ins"][member][0]
                step["outs"][member] = [flat(b, offset + member * size, size)]
        if kind in REDUCING:
            return self.reduction(step, n)
        return step

    def reduction(self, step: Step, n: int) -> Step | None:
        buffers = buffers_of(step, "ins") or buffers_of(step, "outs")
        choices = ["SUM", "SUM", "SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]
        if self.taste.average:
            choices.append("AVG")
        choices = [red for red in choices if self.sizes.fits(buffers, red, n)]
        if not choices:
            return None
        step["red"] = self.rng.choice(choices)
        return step

    def issue_collective(self, kind: str, synchronous: bool = False) -> bool:
        rng = self.rng
        groups = self.groups()
        if not groups:
            return False
        g = rng.choice([groups[0], *groups])
        dtype = rng.choice(self.program.buffers)[0]
        members = self.program.groups[g]
        step = self.collective(kind, g, dtype, rng.randrange(len(members)))
        if step is None:
            return False
        conflicts = [self.model.conflicts(rank, accesses(step, member)) for member, rank in enumerate(members)]
        every = [node for nodes in conflicts for node in nodes]
        if any(not self.may_follow(node, g, True) for node in every):
            return False
        last = self.model.last.get(g)
        hangs = any(not node.done for node in every) or (last is not None and not last.done)
        synchronous |= kind.startswith("reduce_scatter") and not self.taste.scattered
        if hangs and synchronous:
            return False
        draw = rng.random()
        step["id"] = self.new_id()
        step["how"] = []
        for _ in members:
            how = "sync" if draw < 0.4 else "async" if draw < 0.85 else rng.choice(["sync", "async"])
            if synchronous:
                how = "sync"
            if hangs or how == "async":
                how = "drop" if rng.random() < 0.3 else "keep"
            step["how"].append(how)
        self.account(step, len(members))
        if kind != "barrier":
            self.connected.add(g)
        self.put(step)
        return True

    def account(self, step: Step, n: int) -> None:
        sources = buffers_of(step, "ins") or buffers_of(step, "outs")
        for target in buffers_of(step, "outs"):
            self.sizes.moved(sources, target, step.get("red", "MAX"), n)

    # ---------------------------------------------------------------------------------------------- regions

    def region(self) -> bool:
        """Draws calls inside a coalescing region. An exception or a signal may end the region early, or every member
        leaves it by an exception."""
        rng, groups = self.rng, self.groups()
        if not groups:
            return False
        g = rng.choice([groups[0], *groups])
        members = self.program.groups[g]
        form = rng.choice(["region", "region", "manager"])
        kinds = [rng.choice(IN_REGIONS) for _ in range(rng.randint(1, 4) if form == "region" else 0)]
        kinds += [rng.choice(LISTS)] if not kinds or rng.random() < 0.4 else []
        calls = self.several(g, kinds)
        if not calls:
            return False
        tail = [call for call in calls if call["do"] in LISTS]
        step: Step = {"do": "region", "g": g, "form": form, "async": rng.random() < 0.8, "tail": tail}
        step["calls"] = calls[: len(calls) - len(tail)]
        length = len(step["calls"]) + sum(len(call["outs"][0]) for call in tail)
        if self.interrupted(0.25):
            step |= {"do": "abandon", "at": rng.randint(0, length), "why": [self.cause(len(members)) for _ in members]}
            step["runs"] = 0 if self.taste.collects else min(step["at"], len(step["calls"]))
            for call in step["calls"][: step["runs"]]:
                self.account(call, len(members))
            self.put(step)
            return True
        for call in calls:
            self.account(call, len(members))
        step["id"] = self.new_id()
        hangs = self.hangs(calls, g)
        if self.interrupted(0.35):
            some = [rank for rank in members if rng.random() < 0.6]
            step["broken"] = {str(rank): [rng.randint(0, length), self.cause(len(members))] for rank in some}
        elif not hangs and (g == 0 or (step["async"] and not self.taste.collects)) and self.interrupted(0.5):
            # If the signal may fail the group, and so end the program on its ranks, all ranks must be in the group.
            step["struck"] = self.victims(members)
        kept = step["async"] and "struck" not in step
        if hangs and not kept:
            return False
        step["how"] = ["keep" if kept else "sync" for _ in members]
        self.connected.add(g)
        self.put(step)
        return True

    def several(self, g: int, kinds: list[str]) -> list[Step]:
        """Draws collectives of these kinds that may be in flight at the same time."""
        members, calls = self.program.groups[g], []
        taken: dict[int, list[tuple[View, bool]]] = {rank: [] for rank in members}
        for kind in kinds:
            step = self.collective(kind, g, self.rng.choice(self.program.buffers)[0], self.rng.randrange(len(members)))
            if step is None:
                continue
            touched = {rank: accesses(step, member) for member, rank in enumerate(members)}
            earlier = [node for rank in members for node in self.model.conflicts(rank, touched[rank])]
            shared = any(
                (writes or wrote) and overlap(view, other)
                for rank in members
                for view, writes in touched[rank]
                for other, wrote in taken[rank]
            )
            # Calls share no memory: each call on a memory makes its numbers larger, but `account` counts that only
            # after the region is drawn.
            if shared or any(not self.may_follow(node, g, True) for node in earlier):
                continue
            for rank in members:
                taken[rank] += touched[rank]
            calls.append(step | {"id": self.new_id()})
        return calls

    def hangs(self, calls: list[Step], g: int) -> bool:
        """Returns whether these calls wait for an operation that cannot have happened yet."""
        last = self.model.last.get(g)
        return (last is not None and not last.done) or any(
            not node.done
            for call in calls
            for member, rank in enumerate(self.program.groups[g])
            for node in self.model.conflicts(rank, accesses(call, member))
        )

    def interrupted(self, chance: float) -> bool:
        return self.taste.interrupts and self.rng.random() < chance

    def cause(self, members: int) -> str:
        """Draws what ends the region early. In a group of one rank no call is rejected."""
        return self.rng.choice(CAUSES if members > 1 else CAUSES[1:])

    def moment(self) -> int:
        return self.rng.randint(1, self.rng.choice(MOMENTS))

    def victims(self, ranks: list[int]) -> dict[str, int]:
        """Draws one rank or all ranks, each with the moment at which a signal comes."""
        some = ranks if self.rng.random() < 0.4 else [self.rng.choice(ranks)]
        return {str(rank): self.moment() for rank in some}

    # ---------------------------------------------------------------------------------------------- messages

    def message(self) -> bool:
        rng = self.rng
        if self.open and rng.random() < 0.5:
            return self.complete(rng.choice(self.open))
        pairs = [
            (g, src, dst)
            for g, ranks in enumerate(self.program.groups)
            for src in ranks
            for dst in ranks
            if src != dst and not self.model.gone & {src, dst}
        ]
        if not pairs:
            return False
        g, src, dst = rng.choice(pairs)
        dtype = rng.choice(self.program.buffers)[0]
        m = self.new_id()
        anyone = self.taste.anyone and rng.random() < 0.25
        tag = 100 + m if anyone else rng.randint(0, 2)
        first = rng.choice(["send", "recv"])
        channel = [each for each in self.open if (each.g, each.src, each.dst, each.tag) == (g, src, dst, tag)]
        if channel and channel[0].first != first:
            return self.complete(channel[0])
        message = Message(m, g, src, dst, tag, anyone, first, self.body(dtype, 1), dtype)
        if not self.half(message, first, True):
            return False
        self.open.append(message)
        return (self.taste.apart and rng.random() < 0.4) or self.complete(message)

    def complete(self, message: Message) -> bool:
        """Draws the other half of the oldest open message with the group, the ranks and the tag of this message."""
        key = (message.g, message.src, message.dst, message.tag)
        oldest = next(each for each in self.open if (each.g, each.src, each.dst, each.tag) == key)
        for _ in range(20):
            if self.half(oldest, "recv" if oldest.first == "send" else "send", False):
                self.open.remove(oldest)
                return True
        # Other groups use the memory, so wait for their results first.
        self.settle(oldest.dst if oldest.first == "send" else oldest.src)
        if self.half(oldest, "recv" if oldest.first == "send" else "send", False, last_resort=True):
            self.open.remove(oldest)
            return True
        raise Illegal("no memory for the other half of a message")

    def half(self, message: Message, what: str, first: bool, last_resort: bool = False) -> bool:
        rng = self.rng
        rank, peer = (message.src, message.dst) if what == "send" else (message.dst, message.src)
        tries = 50 if last_resort else 1
        for _ in range(tries):
            view = self.view(rank, message.dtype, message.count, [], self.taste.delegated)
            if view is None:
                continue
            conflicts = self.model.conflicts(rank, [(view, what == "recv")])
            node = self.model.nodes.get(("m", message.m))
            if node in conflicts or any(not self.may_follow(each, message.g, False) for each in conflicts):
                continue
            if node is not None and circular(node, conflicts):
                continue
            break
        else:
            return False
        hangs = first or any(not each.done for each in conflicts) or not all(each.done for each in node.after)  # type: ignore[union-attr]
        how = "keep" if hangs or rng.random() < 0.5 else "sync"
        # A later operation on the same memory shows that a dropped receive has ended (`claim`).
        may_drop = what == "send" or (self.taste.ordered and message.count > 0)
        may_drop &= self.taste.drop_messages and self.leaver is None
        if how == "keep" and may_drop and rng.random() < 0.2:
            how = "drop"
        step: Step = {"do": what, "id": self.new_id(), "m": message.m, "g": message.g, "rank": rank, "peer": peer}
        step |= {"tag": message.tag, "how": how, "v": view}
        if what == "recv":
            step["any"] = message.any
            # The sender's buffer is not known before the other half is drawn, so count all buffers of the type.
            sources = [b for b, (dtype, _) in enumerate(self.program.buffers) if dtype == message.dtype]
            self.sizes.moved(sources, view[0])
        self.put(step)
        return True

    def batch(self) -> bool:
        """Every rank sends to the next one, or messages are random. Each rank issues all of its messages together."""
        rng, groups = self.rng, self.groups(2)
        if not groups:
            return False
        g = rng.choice(groups)
        ranks = list(self.program.groups[g])
        if self.rng.random() < 0.6:
            pairs = list(zip(ranks, ranks[1:] + ranks[:1], strict=True))
        else:
            pairs = [tuple(rng.sample(ranks, 2)) for _ in range(rng.randint(1, 5))]  # type: ignore[misc]
        dtype = rng.choice(self.program.buffers)[0]
        moves, taken = [], {rank: [] for rank in ranks}  # type: ignore[var-annotated]
        for src, dst in pairs:
            count = self.body(dtype, len(pairs))
            m = self.new_id()
            move: Step = {"m": m, "src": src, "dst": dst, "tag": 50}
            for rank, name in ((src, "sv"), (dst, "dv")):
                view = self.view(rank, dtype, count, taken[rank], self.taste.delegated)
                if view is None or self.model.conflicts(rank, [(view, True)]):
                    return False
                taken[rank].append(view)
                move[name] = view
            moves.append(move)
        for move in moves:
            self.sizes.moved([move["sv"][0]], move["dv"][0])
        step: Step = {"do": "batch", "id": self.new_id(), "g": g, "moves": moves}
        if self.taste.collects and {rank for pair in pairs for rank in pair} != set(ranks) and g not in self.connected:
            return False  # torch: all ranks take part in the batch that is a group's first call
        self.connected.add(g)
        within = sorted({rank for pair in pairs for rank in pair})
        if self.taste.delegated:
            pass
        elif self.interrupted(0.3):
            some = [rank for rank in within if rng.random() < 0.6]
            step["broken"] = {
                str(rank): [rng.randint(0, sum(rank in pair for pair in pairs)), self.cause(2)] for rank in some
            }
        elif (len(within) == self.program.ranks or not self.taste.collects) and self.interrupted(0.4):
            step["struck"] = self.victims(within)
        self.put(step)
        return True

    def anyone(self) -> bool:
        """Several ranks send to one, which receives from any rank. No other message with this tag is in flight."""
        rng, groups = self.rng, list(range(len(self.program.groups)))
        g = rng.choice(groups)
        ranks = [rank for rank in self.program.groups[g] if rank not in self.model.gone]
        if len(ranks) < 2:
            return False
        dst = rng.choice(ranks)
        senders = [rank for rank in ranks if rank != dst and rng.random() < 0.8]
        dtype = rng.choice(self.program.buffers)[0]
        count = self.body(dtype, 1)
        views: dict[str, list[View]] = {}
        for sender in senders:
            for _ in range(rng.randint(1, 3)):
                view = self.view(sender, dtype, count, [], True)
                if view is None or self.model.conflicts(sender, [(view, False)]):
                    return False
                views.setdefault(str(sender), []).append(view)
        if not senders:
            return False
        me = self.new_id()
        how = rng.choice(["sync", "keep"])
        step: Step = {"do": "anyone", "id": me, "g": g, "dst": dst, "senders": senders, "tag": 1000 + me, "how": how}
        self.put(step | {"dtype": dtype, "count": count, "views": views})
        return True

    # ---------------------------------------------------------------------------------------------- waits and others

    def waitable(self, rank: int, hanging: bool = False) -> list[int]:
        works = self.model.works[rank]
        return [i for i, nodes in works.items() if i >= 0 and (hanging or all(node.done for node in nodes))]

    def wait(self, rank: int | None = None, via: str | None = None) -> bool:
        rng = self.rng
        if rank is None:
            rank = rng.choice(self.alive())
        via = via or rng.choices(["wait", "thread", "poll", "timeout", "future"], [60, 15, 10, 10, 5])[0]
        found = self.waitable(rank, hanging=via == "thread")
        if not found:
            return False
        work = rng.choice(found)
        if self.taste.delegated and via in ("poll", "future"):
            via = "wait"
        step: Step = {"do": "wait", "rank": rank, "id": work, "via": via}
        theirs = self.taste.delegated and any(not node.collective for node in self.model.works[rank][work])
        if via in ("wait", "poll") and not theirs and self.interrupted(0.15):
            step["struck"] = {str(rank): self.moment()}
        self.put(step)
        if via == "thread":
            self.threads.append((rank, work))
        return True

    def join(self, only: int | None = None) -> bool:
        ready = [
            (rank, work)
            for rank, work in self.threads
            if only in (None, rank) and all(node.done for node in self.model.works[rank][-work - 1])
        ]
        if not ready:
            return False
        rank, work = self.rng.choice(ready)
        self.threads.remove((rank, work))
        self.put({"do": "join", "rank": rank, "id": work})
        return True

    def settle(self, only: int | None = None) -> None:
        """Waits for every Work that has ended in the model."""
        ranks = self.alive() if only is None else [only]
        while True:
            left = [rank for rank in ranks if self.waitable(rank)]
            if not left:
                break
            self.wait(self.rng.choice(left))
        while self.join(only):
            pass

    def fill(self) -> bool:
        rng = self.rng
        b = rng.randrange(len(self.program.buffers))
        if any(v[0] == b for rank in self.alive() for node in self.model.in_use[rank] for v, _ in node.touched[rank]):
            return False
        self.sizes.filled(b)
        self.put({"do": "fill", "b": b, "base": rng.randrange(7)})
        return True

    def barriers(self, groups: list[int]) -> None:
        """Draws a barrier in each of these groups in which some rank dropped a Work."""
        for g in groups:
            sent = g == 0 and any(not node.collective for rank in self.alive() for node in self.model.in_use[rank])
            if sent or any(self.model.issued[rank].get(g) for rank in self.program.groups[g]):
                members = self.program.groups[g]
                step = self.collective("barrier", g, "", 0)
                assert step is not None
                keep = self.rng.random() < 0.2
                identity = self.new_id()
                self.put(step | {"id": identity, "how": ["keep" if keep else "sync" for _ in members]})
                if keep:
                    for rank in members:
                        self.put({"do": "wait", "rank": rank, "id": identity, "via": "wait"})

    def close(self) -> None:
        """Draws the missing half of each open message, and a call that shows the end of each dropped receive."""
        while self.open:
            self.complete(self.rng.choice(self.open))
        for rank in self.alive():
            for node in list(self.model.in_use[rank]):
                if node.halves.get("recv", (None,))[0] == rank and not self.kept(rank, node):
                    self.claim(rank, node)

    def kept(self, rank: int, node: Node) -> bool:
        return any(node in nodes for nodes in self.model.works[rank].values())

    def claim(self, rank: int, node: Node) -> None:
        """Broadcasts the memory of a dropped receive. The broadcast must follow the receive, so it shows the receive's
        end."""
        view, members = node.halves["recv"][1], self.program.groups[node.group]
        dtype, me = self.program.buffers[view[0]][0], members.index(rank)
        self.settle()
        outs: list[list[View]] = []
        for other in members:
            free = (self.view(other, dtype, numel(view), [], True) for _ in range(50))
            found = view if other == rank else next((v for v in free if v and not self.busy(other, v)), None)
            if found is None:
                raise Illegal("no memory for the broadcast")
            outs.append([found])
        step: Step = {"do": "broadcast", "id": self.new_id(), "g": node.group, "root": me, "outs": outs}
        step |= {"ins": [[] for _ in members], "how": ["sync" for _ in members]}
        self.account(step, len(members))
        self.put(step)

    def busy(self, rank: int, view: View) -> bool:
        return bool(self.model.conflicts(rank, [(view, True)]))

    def leave(self, rank: int) -> None:
        self.close()
        self.settle(rank)
        self.barriers([g for g in self.groups() if rank in self.program.groups[g]])
        self.put({"do": "leave", "rank": rank})

    def fork(self) -> bool:
        rng = self.rng
        rank = rng.choice(self.alive())
        child = rng.choice(["call", "wait", "send", "destroy", "abort", "new"])
        works = [i for i in self.model.works[rank] if i >= 0]
        if child == "wait" and not works:
            return False
        step: Step = {"do": "fork", "rank": rank, "child": child}
        self.put(step | ({"id": rng.choice(works)} if child == "wait" else {}))
        return True

    def object(self) -> bool:
        rng, groups = self.rng, self.groups()
        if not groups:
            return False
        g = rng.choice(groups)
        last = self.model.last.get(g)
        if last is not None and not last.done:
            return False
        members = self.program.groups[g]
        form = rng.choice(["all_gather", "broadcast", "gather", "scatter"])
        empty: list[list[View]] = [[] for _ in members]
        step: Step = {"do": "object", "id": self.new_id(), "g": g, "form": form, "root": rng.randrange(len(members))}
        self.put(step | {"ins": empty, "outs": [list(each) for each in empty]})
        return True

    # ---------------------------------------------------------------------------------------------- the last step

    def ending(self) -> None:
        groups = self.groups(2)
        if groups:
            g = self.rng.choice(groups)
            for _ in range(20):
                step = self.twice(g) if self.taste.lists and self.rng.random() < 0.15 else self.disagree(g)
                if step is not None:
                    self.put(step)
                    return

    def twice(self, g: int) -> Step | None:
        rng, members = self.rng, self.program.groups[g]
        dtype = rng.choice(self.program.buffers)[0]
        view = self.view(members[0], dtype, self.count(dtype, 1), [], True)
        if view is None:
            return None
        other = self.view(members[0], dtype, min(numel(view), 5), [view], True)
        views = [view, view] if other is None or rng.random() < 0.5 else [view, other, view]
        buffers = [each[0] for each in views]
        red = "SUM"
        if not self.sizes.fits(buffers, red, len(members) ** 2):
            red = "MAX"
        form = rng.choice(["coalesced", "manager"])
        return {"do": "twice", "g": g, "views": views, "red": red, "form": form}

    def disagree(self, g: int) -> Step | None:
        """One member makes another call. `about` names the difference between the two calls."""
        rng, members = self.rng, self.program.groups[g]
        n, odd = len(members), rng.randrange(len(members))
        dtypes = sorted({dtype for dtype, _ in self.program.buffers})
        dtype, root = rng.choice(dtypes), rng.randrange(n)
        about = rng.choice(["size", "kind", "dtype", "red", "root", "list", "list", "list"])
        kinds = [kind for kind in UNLIKE if kind != "barrier"]
        kind = {"dtype": "all_reduce", "red": "all_reduce"}.get(about) or rng.choice(kinds)
        if about == "root":
            kind = rng.choice(["broadcast", "reduce", "gather", "scatter"])
        if about == "list":
            kind = rng.choice(["all_gather", "reduce_scatter", "all_to_all_single", "all_to_all"])
        count = self.count(dtype, n + 1)
        if about == "list":
            return self.disagreeing_lists(kind, g, dtype, odd, count)
        step = self.collective(kind, g, dtype, root, count)
        other: Step | None = None
        if step is None:
            return None
        if about == "size":
            size = rng.choice([count + 1, count // 2, 0])
            if size != count:
                other = self.collective(kind, g, dtype, root, size)
        elif about == "kind":
            other = self.collective(rng.choice([each for each in UNLIKE if each != kind]), g, dtype, root)
        elif about == "dtype" and len(dtypes) > 1 and count:
            other = self.collective(kind, g, rng.choice([each for each in dtypes if each != dtype]), root, count)
        elif about == "red" and step["red"] != "MAX":
            other = step | {"red": "MAX"}
        elif about == "root":
            other = self.collective(kind, g, dtype, (root + rng.randint(1, n - 1)) % n, count)
        if other is None:
            return None
        if "red" in other and about != "red":
            other["red"] = step.get("red", other["red"])
        return self.disagreement(step, other, odd, about)

    def disagreeing_lists(self, kind: str, g: int, dtype: str, odd: int, count: int) -> Step | None:
        """Two calls whose lists have equal sums and different parts."""
        rng, members = self.rng, self.program.groups[g]
        n = len(members)
        if count < 2:
            return None
        lengths = [rng.randint(1, count) for _ in members]
        one, two = rng.sample(range(n), 2)
        shift = rng.randint(1, lengths[one])
        changed = list(lengths)
        changed[one], changed[two] = changed[one] - shift, changed[two] + shift
        step, other = (self.lists(kind, g, dtype, each) for each in (lengths, changed))
        if step is None or other is None:
            return None
        if "red" in step:
            other["red"] = step["red"]
        return self.disagreement(step, other, odd, "list")

    def lists(self, kind: str, g: int, dtype: str, lengths: list[int]) -> Step | None:
        """Returns a collective whose members' blocks have these lengths."""
        members = self.program.groups[g]
        step: Step = {"do": kind, "g": g, "ins": [[] for _ in members], "outs": [[] for _ in members]}
        if kind == "all_to_all_single":
            step["splits"] = [list(lengths) for _ in members]
        for member, rank in enumerate(members):
            own, n = lengths[member], len(members)
            ins, outs = {
                "all_gather": ([own], lengths),
                "reduce_scatter": (lengths, [own]),
                "all_to_all": (lengths, [own] * n),
                "all_to_all_single": ([sum(lengths)], [own * n]),
            }[kind]
            taken: list[View] = []
            for counts, name in ((outs, "outs"), (ins, "ins")):
                for each in counts:
                    view = self.view(rank, dtype, each, taken, kind in ONE_PIECE)
                    if view is None:
                        return None
                    taken.append(view)
                    step[name][member].append(view)
        return self.reduction(step, len(members)) if kind in REDUCING else step

    def disagreement(self, step: Step, other: Step, odd: int, about: str) -> Step | None:
        # Dropped sends may still read the memory.
        for member, rank in enumerate(self.program.groups[step["g"]]):
            call = other if member == odd else step
            if self.model.conflicts(rank, [(view, True) for view, _ in accesses(call, member)]):
                return None
        return {"do": "disagree", "step": step, "other": other, "odd": odd, "about": about}


def interleaved(one: View, other: View) -> bool:
    """Returns whether the two spans overlap and at least one of the views is not contiguous."""
    (low, high), (begin, end) = span(one), span(other)
    return low < end and begin < high and not (contiguous(one) and contiguous(other))


def circular(node: Node, conflicts: list[Node]) -> bool:
    """Returns whether one of these operations waits for `node`, which would then wait for itself."""
    todo, seen = list(conflicts), set()
    while todo:
        each = todo.pop()
        if each is node:
            return True
        if each not in seen and not each.done:
            seen.add(each)
            todo += each.after
    return False


def buffers_of(step: Step, name: str) -> list[int]:
    return sorted({view[0] for views in step[name] for view in views})


def generate(seed: Any, taste: Taste = Taste()) -> Program:
    """Returns the program of a seed. A seed always gives the same program."""
    for turn in range(20):
        try:
            return attempt(f"{seed}" if turn == 0 else f"{seed}/{turn}", str(seed), taste)
        except Illegal:
            continue  # the steps drawn so far allow no further step; this is rare
    raise AssertionError(f"no program for seed {seed}")


def attempt(entropy: str, seed: str, taste: Taste) -> Program:
    rng = random.Random(entropy)
    ranks = rng.choice(taste.ranks)
    scales = {name: each for name, each in SCALES.items() if taste.large or name != "large"}
    scale = rng.choices(list(scales), [weight for weight, _ in scales.values()])[0]
    largest = scales[scale][1]
    dtypes = rng.sample(taste.dtypes, rng.choice([1, 1, 2]))
    count = 2 if scale == "large" else rng.randint(2, 4)
    room = largest * (rng.choice({"large": [2, 3], "medium": [4, 8]}.get(scale, [4, 8, 14])))
    buffers = [[dtype, max(40, room // DTYPES[dtype][0])] for dtype in (rng.choice(dtypes) for _ in range(count))]
    groups = [list(range(ranks))]
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        members = rng.sample(range(ranks), rng.choice([ranks, max(1, ranks - 1), rng.randint(1, ranks)]))
        groups.append(members if KEEPS_ORDER else sorted(members))
    program = Program(ranks, buffers, groups, [], seed)
    draw = Draw(rng, taste, program, largest)
    if taste.leave and rng.random() < 0.3:
        draw.leaver = rng.randrange(ranks)
    body(draw, rng.randint(3, 10 if scale == "large" else 35))
    return program


def body(draw: Draw, length: int) -> None:
    rng, taste = draw.rng, draw.taste
    lacking = {"barrier"} | (set() if taste.reduce else {"reduce"})
    lacking |= set() if taste.lists else {"reduce_list", "gather_list", "scatter_list"}
    kinds = sorted(COLLECTIVES - lacking)
    weights = [4 if kind == "all_reduce" else 2 if kind == "broadcast" else 1 for kind in kinds]
    parting = rng.randint(length // 3, length) if draw.leaver is not None else None
    actions = {"collective": 55, "message": 16, "wait": 22, "join": 4, "fill": 5, "sleep": 4, "barrier": 5, "batch": 6}
    actions |= {"anyone": 3 if taste.anyone else 0, "object": 2, "region": 16 if taste.regions else 0} | (
        {"fork": 1} if taste.forks else {}
    )
    for turn in range(length):
        if turn == parting and draw.leaver is not None:
            draw.leave(draw.leaver)
        if draw.open and rng.random() < 0.15:
            draw.complete(rng.choice(draw.open))
        action = rng.choices(list(actions), list(actions.values()))[0]
        if action == "collective":
            kind = rng.choices(kinds, weights)[0]
            for _ in range(5):
                if draw.issue_collective(kind):
                    break
        elif action == "barrier":
            draw.issue_collective("barrier")
        elif action == "sleep":
            rank = rng.choice(draw.alive())
            draw.put({"do": "sleep", "rank": rank, "ms": rng.choice([0, 1, 1, 2, 5, 20])})
        else:
            getattr(draw, action)()
    draw.close()
    if rng.random() < 0.7:
        draw.settle()
    draw.barriers(draw.groups())
    draw.settle()
    draw.barriers(draw.groups())
    if taste.endings and rng.random() < 0.2:
        draw.ending()
