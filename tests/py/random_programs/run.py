"""The processes that run programs. They are kept from program to program, and replaced if one of them fails or
hangs."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from harness import BACKEND, Job

from random_programs.execute import Problem, member
from random_programs.program import Program
from random_programs.shrink import shrink

#: Timeout of the groups, in seconds. A program counts as hanging if it takes more than twice that plus 10 s. The
#: machines are shared, so a stall of some seconds is not an error of ours.
SECONDS = float(os.environ.get("SAGELLM_TEST_PROGRAM_SECONDS", "15"))
MOST_RANKS = 4


@dataclass
class Verdict:
    """How a program ended."""

    problems: list[Problem] = field(default_factory=list)
    report: str = ""
    seconds: float = 0.0

    @property
    def kinds(self) -> set[str]:
        return {each["kind"] for each in self.problems}

    def __str__(self) -> str:
        lines = [f"rank {each['rank']}, step {each['at']}: {each['kind']}: {each['text']}" for each in self.problems]
        return "\n".join([*lines, self.report])


class Ranks:
    """Rank processes, for programs of up to `MOST_RANKS` ranks."""

    def __init__(self, backend: str = BACKEND, env: dict[str, str] | None = None, **settings: Any) -> None:
        self.backend, self.env, self.settings = backend, env or {}, settings
        self.job: Job | None = None
        self.count = 0
        self.struck: int | None = None

    def _job(self) -> Job:
        if self.job is None:
            self.job = Job(member, MOST_RANKS, (self.backend,), self.settings, self.env)
            for rank in range(MOST_RANKS):
                assert self.job.hear(rank, 120) == "ready"
        return self.job

    def begin(self, program: Program, seconds: float = SECONDS) -> None:
        job, self.count = self._job(), self.count + 1
        self.key, self.ranks, self.limit = f"{job.key}p{self.count}", program.ranks, 2 * seconds + 10
        self.anyone = any(step["do"] == "anyone" or step.get("any") for step in program.steps)
        text = program.to_json()
        for rank in range(program.ranks):
            job.say(rank, (self.key, text, seconds))
        self.started = time.monotonic()
        self.struck = None

    def members(self) -> list[Any]:
        return self._job().ranks[: self.ranks]

    def strike(self, rank: int, number: int, after: float) -> None:
        """Sends a signal to a rank of the running program, `after` seconds after the rank has made its groups."""
        job = self._job()
        each, end = job.ranks[rank], time.monotonic() + self.limit
        while not each.words and time.monotonic() < end:
            each.pump()
            each.rest(0.01)
        time.sleep(after)
        job.signal(rank, number)
        self.struck = rank

    def end(self) -> Verdict:
        """Waits for the program that was begun. Ends the processes if anything went wrong.

        A struck rank need only end, and the other ranks may raise errors that name it.
        """
        job = self._job()
        verdict, left, failed = Verdict(), set(range(self.ranks)), False
        end = self.started + self.limit
        while left:
            for rank in list(left):
                each = job.ranks[rank]
                each.pump()
                while each.words:
                    key, problems, over = each.words.pop(0)
                    assert key == self.key, (key, self.key)
                    if problems is not None:
                        verdict.problems += problems
                        failed = failed or over
                        left.discard(rank)
                if rank == self.struck and (each.conn is None or each.outcome.error):
                    left.discard(rank)
                if rank in left and (each.conn is None or each.outcome.error):
                    verdict.problems.append(self._lost(rank, "died", "the process ended"))
                    left.discard(rank)
                    end = min(end, time.monotonic() + 5)
            if left and time.monotonic() > end:
                job._dump_stacks()
                for rank in left:
                    verdict.problems.append(self._lost(rank, "hang", "nothing came back"))
                break
            if left:
                job.ranks[min(left)].rest(0.02)
        verdict.seconds = time.monotonic() - self.started
        if self.struck is not None:
            verdict.problems = self._unfair(verdict.problems)
        if verdict.problems or self.struck is not None:
            job.kill()
            verdict.report = job.report()
            self.close()
        elif failed and self.settings.get("vendor") == "hccl":
            # HCCL has no abort: a failed call leaves an error on its streams for ever, and torch would use these
            # streams for the groups of later programs.
            self.close()
        return verdict

    def _unfair(self, problems: list[Problem]) -> list[Problem]:
        """Returns the problems that a struck rank cannot have caused. It may cause its own errors, errors that name it,
        and errors that name a rank with such an error. A rank's number differs between groups, so process ids are
        compared. A receive from any rank may end by its deadline, because it is pending as long as some rank can
        still send."""
        fallen, left = {self.struck}, [each for each in problems if each["kind"] in ("error", "died")]
        pids = [str(each.pid) for each in self._job().ranks]

        def names(text: str) -> bool:
            return any(pids.index(pid) in fallen for pid in re.findall(r"\(pid (\d+)", text) if pid in pids)

        def late(text: str) -> bool:
            return self.anyone and "Timed out" in text

        while True:
            fair = [each for each in left if each["rank"] in fallen or names(each["short"]) or late(each["short"])]
            if not fair:
                return [each for each in problems if each["kind"] not in ("error", "died")] + left
            fallen |= {each["rank"] for each in fair}
            left = [each for each in left if each not in fair]

    def _lost(self, rank: int, kind: str, text: str) -> Problem:
        return {"kind": kind, "rank": rank, "at": -1, "text": text, "short": text}

    def run(self, program: Program, seconds: float = SECONDS) -> Verdict:
        self.begin(program, seconds)
        return self.end()

    def close(self) -> None:
        job, self.job = self.job, None
        if job is None:
            return
        for each in job.ranks:
            if each.conn is not None:
                with suppress(OSError):
                    each.conn.send(None)
        with suppress(AssertionError):
            job.wait(3)
        job.kill()
        for each in job.ranks:
            if each.conn is not None:
                each.conn.close()


def shortest(
    program: Program, first: Verdict, ranks: Ranks, seconds: float = 120.0, tries: int = 4
) -> tuple[Program, Verdict]:
    """Finds a short program that fails with the worst kind of `first`. Returns it with its verdict."""
    last = [first]
    kinds = first.kinds - {"illegal"}
    worst = next((kind for kind in ("wrong", "hang", "died", "quiet", "child", "late") if kind in kinds), "error")

    def fails(candidate: Program) -> bool:
        for _ in range(tries):
            verdict = ranks.run(candidate, 4.0 if worst == "hang" else 8.0)
            if worst in verdict.kinds and "illegal" not in verdict.kinds:
                last[0] = verdict
                return True
        return False

    found = shrink(program, fails, seconds)
    return found, last[0]
