"""Tests random programs against the backend, the model against gloo, and the generator, model and shrinker alone."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import net
import pytest
from harness import IS_GLOO, beyond_gloo

from random_programs.generate import GLOO, STRUCK, Taste, generate
from random_programs.model import Illegal, Model, expected, follow, judge
from random_programs.places import PLACES, ranks_at
from random_programs.program import COLLECTIVES, Program, overlap
from random_programs.run import Ranks, Verdict, shortest
from random_programs.shrink import shrink

FIRST = int(os.environ.get("SAGELLM_TEST_RANDOM_SEED", "1"))
BLOCK = 25
SMALL = Taste(large=False)


def told(program: Program, verdict: Verdict, ranks: Ranks, place: str) -> str:
    """Returns the message of a failing test: how the program failed, and the shortest failing program that was
    found."""
    short, last = shortest(program, verdict, ranks)
    return (
        f"the program of seed {program.seed} failed after {verdict.seconds:.1f} s; again by\n"
        f"  PYTHONPATH=torch_ext:tests/py python -m random_programs --at {place} --seed {program.seed}\n{verdict}\n"
        f"a short one, for --file:\n{short.to_json()}\n{last}"
    )


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def play(
    ranks: Ranks, seeds: range, place: str = "cpu", say: Callable[[str], None] | None = None, taste: Taste | None = None
) -> None:
    """Runs the programs of these seeds. Draws each program while the one before runs."""
    taste = taste or PLACES[place]
    illegal, begun, program = 0, time.monotonic(), generate(seeds[0], taste)
    for seed in seeds:
        ranks.begin(program)
        following = generate(seed + 1, taste)
        verdict = ranks.end()
        if "illegal" in verdict.kinds:
            illegal += 1
        elif verdict.problems:
            pytest.fail(told(program, verdict, ranks, place))
        program = following
        if say is not None and (seed + 1 - seeds[0]) % 500 == 0:
            say(f"{seed + 1 - seeds[0]} programs of {len(seeds)} after {time.monotonic() - begun:.0f} s")
    assert illegal <= 1 + len(seeds) // 100, f"{illegal} of {len(seeds)} programs had numbers that are not exact"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(int(os.environ.get("SAGELLM_TEST_RANDOM_PROGRAMS", "200")) // BLOCK))
def test_random_programs(ranks: Ranks, block: int) -> None:
    """Every rank of every program finds exactly what the model says, or the error that must come."""
    first = FIRST + block * BLOCK
    play(ranks, range(first, first + BLOCK))


@pytest.mark.long
@pytest.mark.timeout(3500)
def test_many_random_programs(ranks: Ranks, say: Callable[[str], None]) -> None:
    """Runs such programs for hours, if requested. Variables set the seed and the number of programs."""
    first = FIRST + 1_000_000
    count = int(os.environ.get("SAGELLM_TEST_RANDOM_PROGRAMS", "20000"))
    play(ranks, range(first, first + count), say=say)


@pytest.mark.timeout(300)
@pytest.mark.skipif(IS_GLOO, reason="gloo: the tests above are that")
def test_the_model_agrees_with_gloo() -> None:
    """The model's numbers equal those of an independent implementation."""
    gloo = Ranks("gloo")
    try:
        play(gloo, range(FIRST, FIRST + 30), taste=GLOO)
    finally:
        gloo.close()


# ------------------------------------------------------------------------------------------------ elsewhere

Say = Callable[[str], None]


def elsewhere(place: str, seeds: range, say: Say | None) -> None:
    try:
        with ranks_at(place) as ranks:
            play(ranks, seeds, place, say)
    except net.Unavailable as reason:
        pytest.skip(f"network namespaces may not be made here: {reason}")


def struck(number: int, seeds: range, say: Say | None) -> None:
    """Sends a signal to one rank at some moment. The other ranks end normally, or with an error that names it."""
    with closing(Ranks()) as ranks:
        for seed in seeds:
            rng, program = random.Random(f"strike {seed}"), generate(seed, STRUCK)
            before = set(os.listdir("/dev/shm"))
            ranks.begin(program)
            pids = [str(each.pid) for each in ranks.members()]
            victim = rng.randrange(program.ranks)
            ranks.strike(victim, number, rng.choice([0.0, 0.01, 0.05, 0.2]) * rng.random())
            verdict = ranks.end()
            assert not verdict.problems, f"seed {seed}, rank {victim} struck\n{program.to_json()}\n{verdict}"
            left = set(os.listdir("/dev/shm")) - before
            assert not [name for name in left if "sagellm" in name or any(pid in name for pid in pids)], left
            if say is not None and (seed + 1 - seeds[0]) % 100 == 0:
                say(f"{seed + 1 - seeds[0]} of {len(seeds)}")


ELSEWHERE: dict[str, Callable[[range, Say | None], None]] = {
    **{place: partial(elsewhere, place) for place in PLACES if place not in ("cpu", "card")},  # the card by hand
    "kill-9": partial(struck, signal.SIGKILL),
    "ctrl-c": partial(struck, signal.SIGINT),
}


@beyond_gloo("the programs hold what it does not do")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ELSEWHERE)
def test_random_programs_elsewhere(where: str) -> None:
    """Runs random programs over two and three hosts, on every simulated device, and while a signal is sent to a
    rank."""
    count = int(os.environ.get("SAGELLM_TEST_RANDOM_ELSEWHERE", "20"))
    ELSEWHERE[where](range(FIRST, FIRST + count), None)


@beyond_gloo("the programs hold what it does not do")
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("where", ELSEWHERE)
def test_many_random_programs_elsewhere(where: str, say: Say) -> None:
    count = int(os.environ.get("SAGELLM_TEST_RANDOM_ELSEWHERE", "300"))
    ELSEWHERE[where](range(FIRST + 1_000_000, FIRST + 1_000_000 + count), say)


# ------------------------------------------------------------------------------------------------ generator and model


def test_a_seed_is_one_program() -> None:
    for seed in range(20):
        text = generate(seed).to_json()
        assert text == generate(seed).to_json()
        assert Program.from_json(text).to_json() == text
    assert len({generate(seed).to_json() for seed in range(20)}) == 20


@pytest.mark.timeout(400)
def test_programs_are_legal_and_hold_every_kind_of_step() -> None:
    seen: set[str] = set()
    for seed in range(120):
        program = generate(seed, SMALL)
        judge(program)
        if seed % 6 == 0:
            expected(program, 0)
        for step in program.steps:
            seen |= {step["do"], *(how for how in step.get("how", []) if isinstance(step.get("how"), list))}
            seen |= {step["via"]} if "via" in step else set()
            seen |= {f"{step['do']} {how}" for how in ("broken", "struck") if how in step}
            seen |= {"dropped receive"} if step["do"] == "recv" and step["how"] == "drop" else set()
    kinds = COLLECTIVES | {
        "send",
        "recv",
        "batch",
        "anyone",
        "wait",
        "join",
        "fill",
        "sleep",
        "fork",
        "object",
        "leave",
        "region",
        "abandon",
    }
    kinds |= {"disagree", "twice", "sync", "keep", "drop", "thread", "poll", "dropped receive"}
    kinds |= {"region broken", "region struck", "batch broken", "batch struck", "wait struck"}
    assert kinds <= seen, kinds - seen


def made(*steps: dict[str, object], ranks: int = 2) -> Program:
    return Program(ranks, [["int64", 10], ["int64", 10]], [list(range(ranks)), list(range(ranks))], list(steps))


def reduced(identity: int, *how: str, g: int = 0, b: int = 0) -> dict[str, object]:
    views = [[[b, 0, [4], [1]]] for _ in how]
    return {
        "do": "all_reduce",
        "id": identity,
        "g": g,
        "red": "SUM",
        "ins": [[] for _ in how],
        "outs": views,
        "how": how,
    }


def wait(rank: int, identity: int) -> dict[str, object]:
    return {"do": "wait", "rank": rank, "id": identity, "via": "wait"}


def barrier(g: int = 0) -> dict[str, object]:
    return {"do": "barrier", "id": 90, "g": g, "ins": [[], []], "outs": [[], []], "how": ["sync", "sync"]}


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([reduced(1, "keep", "keep")], "ends without knowing"),
        ([reduced(1, "drop", "drop")], "ends without knowing"),
        ([reduced(1, "drop", "drop"), barrier(1)], "ends without knowing"),
        ([reduced(1, "keep", "sync"), reduced(2, "sync", "sync", g=1), wait(0, 1)], "without having waited"),
        ([reduced(1, "keep", "sync"), {"do": "fill", "b": 0, "base": 1}, wait(0, 1)], "is using"),
        ([reduced(1, "keep", "sync"), {"do": "leave", "rank": 0}], "leaves before"),
        ([wait(0, 1)], "has no Work"),
        (
            [
                {
                    "do": "recv",
                    "id": 1,
                    "m": 1,
                    "g": 0,
                    "rank": 0,
                    "peer": 1,
                    "tag": 0,
                    "how": "sync",
                    "v": [0, 0, [1], [1]],
                }
            ],
            "waits for ever",
        ),
    ],
)
def test_the_model_refuses_what_torch_does_not_define(steps: list[dict[str, object]], why: str) -> None:
    with pytest.raises(Illegal, match=why):
        judge(made(*steps))


def test_the_model_keeps_the_order_of_issue() -> None:
    """By hand: a broadcast of memory that is being received, and a barrier after dropped Works."""
    view = [0, 0, [4], [1]]
    recv = {
        "do": "recv",
        "id": 1,
        "m": 1,
        "g": 0,
        "rank": 0,
        "peer": 1,
        "tag": 0,
        "how": "keep",
        "v": view,
        "any": False,
    }
    send = {"do": "send", "id": 2, "m": 1, "g": 0, "rank": 1, "peer": 0, "tag": 0, "how": "sync", "v": [1, 0, [4], [1]]}
    cast = {"do": "broadcast", "id": 3, "g": 0, "root": 0, "ins": [[], []], "outs": [[view], [view]]}
    program = made(recv, cast | {"how": ["drop", "drop"]}, send, barrier(), wait(0, 1))
    model = follow(program, Model(program, values=True, own=1))
    assert model.memory[1][0][:4].tolist() == model.memory[1][1][:4].tolist() == model.memory[0][0][:4].tolist()
    assert model.checks[3][0][1].tolist() == model.memory[1][1][:4].tolist()


def half(what: str, identity: int, message: int, view: list[object]) -> dict[str, object]:
    """Returns a message from rank 0 to rank 1."""
    rank = 0 if what == "send" else 1
    step = {"do": what, "id": identity, "m": message, "g": 0, "rank": rank, "peer": 1 - rank, "tag": 0, "how": "keep"}
    return step | {"v": view} | ({"any": False} if what == "recv" else {})


def test_messages_of_one_tag_do_not_overtake_each_other() -> None:
    """The first message waits for a collective on its memory. On the other rank that collective waits for the second
    message."""
    first, second = [0, 0, [4], [1]], [1, 0, [4], [1]]
    steps = [
        half("recv", 1, 1, first),
        half("recv", 2, 2, second),
        reduced(3, "keep", "keep") | {"outs": [[first], [second]]},
        half("send", 4, 1, first),
        half("send", 5, 2, second),
        *(wait(rank, identity) for rank, identity in ((0, 5), (0, 4), (0, 3), (1, 1), (1, 2), (1, 3))),
    ]
    with pytest.raises(Illegal, match="waits for ever"):
        judge(made(*steps))
    for step in steps:
        step |= {"tag": 1} if step.get("m") == 2 else {}
    judge(made(*steps))


def test_views_that_interleave_share_nothing() -> None:
    assert not overlap([0, 0, [5], [2]], [0, 1, [5], [2]])
    assert overlap([0, 0, [5], [2]], [0, 1, [5], [1]])
    assert not overlap([0, 0, [5], [1]], [1, 0, [5], [1]])
    assert not overlap([0, 0, [0], [1]], [0, 0, [5], [1]])


# ------------------------------------------------------------------------------------------------ shrinker


@pytest.mark.timeout(300)
def test_the_shrinker_keeps_what_a_defect_needs() -> None:
    """A planted failure: it occurs if a broadcast comes after an all_reduce whose Work a rank dropped."""

    def fails(program: Program) -> bool:
        dropped = [at for at, s in enumerate(program.steps) if s["do"] == "all_reduce" and "drop" in s["how"]]
        return any(s["do"] == "broadcast" and dropped and at > dropped[0] for at, s in enumerate(program.steps))

    tried = 0
    for seed in range(60):
        program = generate(seed, SMALL)
        if fails(program):
            tried += 1
            short = shrink(program, fails, 20)
            judge(short)
            assert fails(short)
            kinds = sorted(step["do"] for step in short.steps if step["do"] != "wait")
            # Another call must show that the call without a Work has ended: a barrier, or an operation on the same
            # memory.
            assert kinds.count("broadcast") == 1 and len(kinds) <= 3, kinds
            if tried == 6:
                break
    assert tried == 6
