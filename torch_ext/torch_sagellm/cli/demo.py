"""``torch-sagellm demo``: the programs of ``torch_sagellm.demos``, with ranks of this host."""

from __future__ import annotations

import argparse
import sys

from torch_sagellm.cli import arguments, ranks, show

HELP = "shows a training beside gloo, or a hang and what is said about it"
DESCRIPTION = """`demo train` trains a small GPT on the source code of Python's library with DistributedDataParallel,
in turn over sagellm and gloo, compares the losses to the last bit, and prints what each spent on communication: some
minutes with 2 ranks on 2 cores. `demo hang` keeps one rank away from a collective and prints what gloo tells the
others about it, and what sagellm tells them: about half a minute.

Exits with 1 when the losses differ, or when the missing rank is not named."""
EXAMPLES = """examples:
  torch-sagellm demo                       trains with 2 ranks
  torch-sagellm demo --ranks 4 --steps 40  a short one with 4
  torch-sagellm demo --shared              the same without copies on the way
  torch-sagellm demo hang                  the last of 3 ranks is busy in its own code
  torch-sagellm demo hang --kind stop      its process is stopped; skip: it leaves a call out
"""
TRAIN, HANG = "train", "hang"
#: Seconds after which ranks are killed, so that a hanging training ends.
LIMIT = 6 * 3600.0
#: Seconds. The timeout of a group also limits the time in which its ranks meet.
LEAST_TIMEOUT = 1.0
RANKS = {TRAIN: 2, HANG: 3}
MODULES = {TRAIN: "torch_sagellm.demos.train_gpt", HANG: "torch_sagellm.demos.hang"}


def _timeout(text: str) -> float:
    found = arguments.seconds(text)
    if found < LEAST_TIMEOUT:
        raise argparse.ArgumentTypeError(f"{text!r} is too short: the ranks need {LEAST_TIMEOUT:g} s to meet")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=list(MODULES), default=TRAIN, help="train (the default) or hang")
    parser.add_argument("--ranks", type=arguments.ranks(least=2), help="processes on this host (train: 2, hang: 3)")
    train = parser.add_argument_group("demo train")
    train.add_argument("--steps", type=arguments.whole(1, 1_000_000), help="optimiser steps of each backend (300)")
    train.add_argument(
        "--shared", action="store_true", default=None, help="gradients travel in tensors that the ranks can reach"
    )
    train.add_argument("--save", type=arguments.path, metavar="FILE", help="where the weights go (nowhere)")
    hang = parser.add_argument_group("demo hang")
    hang.add_argument("--kind", choices=("python", "stop", "skip"), help="why the last rank does not come (python)")
    hang.add_argument("--timeout", type=_timeout, help="seconds that the others wait (5)")
    arguments.add_yes(parser)


def command(parsed: argparse.Namespace) -> list[str]:
    """The command-line words of the program that every rank runs."""
    own: tuple[str, ...] = ("steps", "save", "shared")
    other: tuple[str, ...] = ("kind", "timeout")
    if parsed.what == HANG:
        own, other = other, own
    for name in other:
        if getattr(parsed, name) is not None:
            wanted = HANG if parsed.what == TRAIN else TRAIN
            raise ValueError(f"--{name} belongs to `torch-sagellm demo {wanted}`")
    words = ["--backend", "sagellm"] if parsed.what == TRAIN else []
    given = {name: getattr(parsed, name) for name in own}
    if parsed.what == TRAIN:
        given["save"] = given["save"] or "none"
        if given["steps"] is not None and given["steps"] < 12:
            words += ["--rounds", "1", "--profile-steps", "1"]
    for name, value in given.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    return [MODULES[parsed.what], *words]


def run(parsed: argparse.Namespace) -> int:
    module, *words = command(parsed)
    if parsed.save:
        arguments.check_output("--save", parsed.save)
    count = parsed.ranks or RANKS[parsed.what]
    arguments.agree(count, parsed.yes)
    sys.stdout.flush()
    ended = ranks.run_program(module, words, count, LIMIT)
    failed = [f"rank {rank} {one.failure}" for rank, one in enumerate(ended) if one.failure]
    if failed:
        show.complain(f"torch-sagellm demo: {', '.join(failed)}")
    return 1 if failed else 0
