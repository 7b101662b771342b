"""One rank of a program: makes the calls of its steps, and compares its memory with what the model computed."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from random_programs.generate import KEEPS_ORDER
from random_programs.interrupt import Interrupts
from random_programs.model import Check, Illegal, Model, expected, initial
from random_programs.program import COLLECTIVES, Program, Step, View, involved

#: A problem that a rank found. `kind` is "illegal" (the model rejects the program), "wrong" (a number), "error" (an
#: unexpected one), "quiet" (a missing error), "late" (an error that came only at the deadline) or "child" (a forked
#: child).
Problem = dict[str, Any]
CHILD_SECONDS = 20
OWN = "the program's own"


class Over(Exception):
    """The group has failed legally: a signal arrived during a call that cannot be undone. The program ends here."""


class Rank:
    """One rank that runs a program. `seconds` is the timeout of the groups. `apart`: the ranks are on several hosts.
    `reachable`: "all" or "some" buffers are in memory that peers can reach; with "some", different ones on each rank.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        backend: str,
        store: Any,
        seconds: float,
        device: str = "cpu",
        vendor: str = "",
        begun: Callable[[], None] = lambda: None,
        apart: bool = False,
        reachable: str = "",
    ) -> None:
        self.program, self.rank, self.backend, self.store = program, rank, backend, store
        self.seconds, self.device, self.vendor, self.begun, self.apart = seconds, device, vendor, begun, apart
        self.reachable = reachable
        self.problems: list[Problem] = []
        self.works: dict[int, list[Any]] = {}
        self.threads: dict[int, tuple[threading.Thread, list[BaseException]]] = {}
        self.groups: list[Any] = []
        self.memory: list[torch.Tensor] = []
        self.model: Model | None = None
        self.at = -1
        self.interrupts: Interrupts | None = None
        self.over = False

    def run(self) -> list[Problem]:
        """Makes the groups, runs the program and ends the groups. Raises nothing except for Ctrl-C."""
        try:
            self.model = expected(self.program, self.rank)
        except Illegal as reason:
            self._problem("illegal", str(reason))
            return self.problems
        self.memory = [
            initial(dtype, count, self.rank, b).to(self.device) for b, (dtype, count) in enumerate(self.program.buffers)
        ]
        if self.reachable:
            import torch_sagellm

            for b, tensor in enumerate(self.memory):
                if self.reachable == "all" or (7 * self.rank + 3 * b + len(self.program.steps)) % 4:
                    self.memory[b] = torch_sagellm.shared(tensor)
        try:
            self._begin()
            if any(step["do"] == "abandon" or "broken" in step or "struck" in step for step in self.program.steps):
                self.interrupts = Interrupts()
            self._steps()
        except Over:
            self.over = True
        except Exception as error:
            self._problem("error", "".join(traceback.format_exception(error))[-3000:], str(error))
        finally:
            self._end()
            if self.interrupts is not None:
                self.interrupts.close()
        return self.problems

    def _begin(self) -> None:
        timeout = timedelta(seconds=self.seconds)
        options: dict[str, Any] = {"timeout": timeout}
        if self.vendor:
            import torch_sagellm

            options["pg_options"] = torch_sagellm.Options(vendor=self.vendor)
        ranks = {"rank": self.rank, "world_size": self.program.ranks}
        dist.init_process_group(self.backend, store=self.store, **ranks, **options)
        self.groups = [dist.group.WORLD]
        for ranks in self.program.groups[1:]:
            unsorted = {"sort_ranks": False} if KEEPS_ORDER else {}
            self.groups.append(dist.new_group(ranks, **unsorted, **options))
        self.begun()

    def _steps(self) -> None:
        assert self.model is not None
        for at, step in enumerate(self.program.steps):
            if self.rank not in involved(step, self.program):
                continue
            self.at = at
            self._do(step)
            if step["do"] not in ("disagree", "twice"):
                self._compare(self.model.checks.get(at, []))
            if step["do"] == "leave":
                return
        self.at = len(self.program.steps)
        checks = self.model.checks.get(self.at, [])
        if self.program.steps and self.program.steps[-1]["do"] in ("disagree", "twice"):
            self._forget_outputs(self.program.steps[-1], checks)
        self._compare(checks)

    def _forget_outputs(self, step: Step, checks: list[Check]) -> None:
        """Ignores the outputs of a call that may have failed, because they may hold anything. All other memory is
        compared."""
        if self.rank not in involved(step, self.program):
            return
        written = step.get("views", [])
        if step["do"] == "disagree":
            member = self.program.groups[step["step"]["g"]].index(self.rank)
            written = step["step"]["outs"][member] + step["other"]["outs"][member]
        for (buffer, *_), numbers in checks:
            for view in written:
                if view[0] == buffer:
                    self.tensor(view).copy_(numbers.as_strided(view[2], view[3], view[1]))

    def _end(self) -> None:
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception as error:
            if not self.over:
                self._problem("error", f"destroy_process_group: {error}", str(error))

    def _problem(self, kind: str, text: str, short: str = "") -> None:
        self.problems.append({"kind": kind, "rank": self.rank, "at": self.at, "text": text, "short": short or text})

    def _compare(self, checks: list[Check]) -> bool:
        for view, numbers in checks:
            found = self.tensor(view).cpu()
            if not torch.equal(found, numbers):
                different = (found != numbers).reshape(-1).nonzero().reshape(-1)
                first = int(different[0])
                text = f"view {view}: {len(different)} of {found.numel()} elements are wrong, the first "
                text += f"at {first}: {found.reshape(-1)[first].item()} instead of {numbers.reshape(-1)[first].item()}"
                self._problem("wrong", text)
                return False
        return True

    def tensor(self, view: View) -> torch.Tensor:
        return self.memory[view[0]].as_strided(view[2], view[3], view[1])

    # ---------------------------------------------------------------------------------------------- steps

    def _do(self, step: Step) -> None:
        kind = step["do"]
        if kind in COLLECTIVES:
            how = step["how"][self.program.groups[step["g"]].index(self.rank)]
            works = self.collective(step, how != "sync")
            if how == "keep":
                self.works[step["id"]] = works
        elif kind in ("send", "recv"):
            self._message(step)
        else:
            getattr(self, f"_{kind}")(step)

    def collective(self, step: Step, a: bool) -> list[Any]:
        """Makes the call of a collective, and returns its Works."""
        kind, group = step["do"], self.groups[step["g"]]
        members = self.program.groups[step["g"]]
        me = members.index(self.rank)
        ins, outs = ([self.tensor(view) for view in step[name][me]] for name in ("ins", "outs"))
        root = members[step["root"]] if "root" in step else -1
        mine = root == self.rank
        op = getattr(dist.ReduceOp, step["red"]) if "red" in step else None
        if kind in ("reduce_list", "gather_list", "scatter_list"):
            return self._list(step, ins, outs, op, a)
        if kind == "all_to_all_single":
            table = step["splits"]
            splits = [row[me] for row in table], table[me]
            work: Any = dist.all_to_all_single(outs[0], ins[0], *splits, group=group, async_op=a)
            return [work]
        call = {
            "barrier": lambda: dist.barrier(group=group, async_op=a),
            "all_reduce": lambda: dist.all_reduce(outs[0], op, group=group, async_op=a),
            "broadcast": lambda: dist.broadcast(outs[0], root, group=group, async_op=a),
            "reduce": lambda: dist.reduce(outs[0], root, op, group=group, async_op=a),
            "all_gather": lambda: dist.all_gather(outs, ins[0], group=group, async_op=a),
            "all_gather_into": lambda: dist.all_gather_into_tensor(outs[0], ins[0], group=group, async_op=a),
            "reduce_scatter": lambda: dist.reduce_scatter(outs[0], ins, op, group=group, async_op=a),
            "reduce_scatter_into": lambda: dist.reduce_scatter_tensor(outs[0], ins[0], op, group=group, async_op=a),
            "gather": lambda: dist.gather(ins[0], outs if mine else None, root, group=group, async_op=a),
            "scatter": lambda: dist.scatter(outs[0], ins if mine else None, root, group=group, async_op=a),
            "all_to_all": lambda: dist.all_to_all(outs, ins, group=group, async_op=a),
        }[kind]
        return [call()]

    def _list(self, step: Step, ins: list[Any], outs: list[Any], op: Any, a: bool) -> list[Any]:
        group = self.groups[step["g"]]
        if step["do"] == "reduce_list" and step["form"] == "coalesced":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return [dist.all_reduce_coalesced(outs, op, group=group, async_op=a)]
        with dist._coalescing_manager(group, async_ops=a) as manager:
            for i, out in enumerate(outs):
                self._listed(step["do"], group, ins[i] if ins else None, out, op)
        return [manager] if a else []

    def _listed(self, kind: str, group: Any, given: Any, out: Any, op: Any) -> None:
        """Makes the call for one tensor of a list, inside a region."""
        if kind == "reduce_list":
            dist.all_reduce(out, op, group=group)
        elif kind == "gather_list":
            dist.all_gather_into_tensor(out, given, group=group)
        else:
            dist.reduce_scatter_tensor(out, given, op, group=group)

    def _message(self, step: Step) -> None:
        group, tensor, peer = self.groups[step["g"]], self.tensor(step["v"]), step["peer"]
        tag, how = step["tag"], step["how"]
        work: Any = None
        if step["do"] == "send":
            if how == "sync":
                dist.send(tensor, peer, group=group, tag=tag)
            else:
                work = dist.isend(tensor, peer, group=group, tag=tag)
        else:
            source = None if step["any"] else peer
            if how == "sync":
                found = dist.recv(tensor, source, group=group, tag=tag)
                if found != peer:
                    self._problem("wrong", f"the message of rank {peer} is said to come from rank {found}")
            else:
                work = dist.irecv(tensor, source, group=group, tag=tag)
        if how == "keep":
            self.works[step["id"]] = [work]

    def _batch(self, step: Step) -> None:
        if "struck" in step:
            self._struck(step, lambda first: [work.wait() for work in self._exchange(step, first, [])])
            return
        works: list[Any] = []
        broken = step.get("broken", {}).get(str(self.rank))
        if broken is not None:
            self._breaks(step, broken[1], lambda fail: self._exchange(step, 0, works, broken[0], fail))
        self.works[step["id"]] = works + self._exchange(step, len(works), [])

    def _exchange(
        self, step: Step, first: int, kept: list[Any], at: int = -1, fail: Callable[..., Any] | None = None
    ) -> list[Any]:
        """Issues the messages of a batch from index `first` on; if `fail` is given, it is called in place of message
        `at`. Appends the Works to `kept` as they are made, because a batch that ends by an exception returns none."""
        group, ops = self.groups[step["g"]], []
        for move in step["moves"]:
            for who, peer, call, view in (
                (move["src"], move["dst"], dist.isend, "sv"),
                (move["dst"], move["src"], dist.irecv, "dv"),
            ):
                if who == self.rank:
                    ops.append(dist.P2POp(call, self.tensor(move[view]), peer, group, move["tag"]))
        if fail is not None:
            ops.insert(at, dist.P2POp(dist.isend, torch.ones(1, device=self.device), ops[0].peer, group))
            for i, each in enumerate(ops):
                each.op = fail if i == at else partial(self._keep, each.op, kept)
        return dist.batch_isend_irecv(ops[first:]) if ops[first:] else []

    def _keep(self, call: Callable[..., Any], kept: list[Any], *given: Any, **named: Any) -> Any:
        # The parameter by which the peer is named depends on torch's function.
        peer = named.pop("group_dst", None)
        peer = named.pop("group_src", peer)
        work = call(*given, **named, **{"group_dst" if call is dist.isend else "group_src": peer})
        if work is not None:
            kept.append(work)
        return work

    # ---------------------------------------------------------------------------------------------- regions

    def _region(self, step: Step) -> None:
        how = step["how"][self.program.groups[step["g"]].index(self.rank)]
        if "struck" in step:
            self._struck(step, lambda first: self._coalesced(step, first, []))
            return
        broken = step.get("broken", {}).get(str(self.rank))
        works: list[Any] = []
        if broken is not None:
            self._breaks(step, broken[1], lambda fail: self._coalesced(step, 0, works, broken[0], fail))
        works += self._coalesced(step, len(works), [])
        if how == "keep":
            self.works[step["id"]] = works
            return
        for work in works:
            work.wait()

    def _abandon(self, step: Step) -> None:
        why = step["why"][self.program.groups[step["g"]].index(self.rank)]
        self._breaks(step, why, lambda fail: self._coalesced(step, 0, [], step["at"], fail))

    def _coalesced(
        self, step: Step, first: int, kept: list[Any], at: int = 0, fail: Callable[[], Any] | None = None
    ) -> list[Any]:
        """Makes the calls of a region from index `first` on; if `fail` is given, it is called before call `at`. Appends
        the Works to `kept` as they are made, because a region that ends by an exception returns none."""
        group, members = self.groups[step["g"]], self.program.groups[step["g"]]
        me = members.index(self.rank)
        calls = [partial(self._keep_all, call, kept, fail is not None) for call in step["calls"]]
        for call in step["tail"]:
            ins, outs = ([self.tensor(view) for view in call[name][me]] for name in ("ins", "outs"))
            op = getattr(dist.ReduceOp, call["red"]) if "red" in call else None
            for i in range(len(outs)):
                calls.append(partial(self._listed, call["do"], group, ins[i] if ins else None, outs[i], op))
        device = torch.device(self.device) if step["form"] == "region" else None
        if first > len(step["calls"]):
            return []  # the list of `tail`, which is issued last and by one call, was issued too
        with dist._coalescing_manager(group, device, async_ops=step["async"]) as manager:
            for i, each in enumerate(calls[first:]):
                if i == at and fail is not None:
                    fail()
                each()
            if at >= len(calls) and fail is not None:
                fail()
        return [manager] if step["async"] and manager.works[0] is not None else []

    def _keep_all(self, call: Step, kept: list[Any], a: bool) -> None:
        kept += [work for work in self.collective(call, a) if work is not None]

    def _breaks(self, step: Step, why: str, call: Callable[[Callable[..., Any]], Any]) -> None:
        """Runs `call`, which must end by the exception that its argument `fail` raises."""
        assert self.interrupts is not None

        def fail(*given: Any, **named: Any) -> None:
            assert self.interrupts is not None
            if why == "refused":
                into_itself = torch.ones(1, device=self.device).expand(4)
                other = next(rank for rank in self.program.groups[step["g"]] if rank != self.rank)
                dist.irecv(into_itself, other, group=self.groups[step["g"]])
            elif why == "own":
                raise KeyError(OWN)
            elif why == "raised":
                raise KeyboardInterrupt
            else:
                self.interrupts.now()

        refusal = (ValueError, RuntimeError)
        try:
            call(fail)
        except {"refused": refusal, "own": KeyError}.get(why, KeyboardInterrupt):
            return
        self._problem("quiet", f"no exception came out of the region or batch that was {why}")

    def _struck(self, step: Step, make: Callable[[int], Any]) -> None:
        """Runs a region or batch into which a signal may come, then the calls that were not issued. Returns after all
        ranks know that the step has ended everywhere."""
        # A synchronous call on the CPU, or a call that is connecting on a device, cannot be undone, so the group fails.
        may_fail = bool(self.vendor) or (step["do"] == "region" and not step["async"])
        try:
            self._struck_by(step, make, may_fail)
        except (RuntimeError, ValueError) as error:
            # The failure of a call on a device may be raised at any place in the program.
            if not may_fail or "interrupted" not in str(error):
                raise
            self.store.set(f"{step['id']} ended {self.rank}", str(error))
            raise Over from error

    def _struck_by(self, step: Step, make: Callable[[int], Any], may_fail: bool) -> None:
        assert self.model is not None and self.interrupts is not None
        group = self.groups[step["g"]]
        backend: Any = group._get_backend(torch.device(self.device))
        if may_fail:
            self._agree(f"{step['id']} begun", step, "")  # a rank in an earlier call would get the error there
        before, moment, told = backend._stats()["issued"], step["struck"].get(str(self.rank)), ""

        def rest() -> None:
            issued = backend._stats()["issued"] - before
            if not self.vendor:
                make(issued)
            elif issued == 0:
                make(0)

        try:
            if moment is None:
                make(0)
            elif self.interrupts.at_some_moment(moment, partial(make, 0), rest):
                # The call may have failed the group, while this rank got only the KeyboardInterrupt (rule 16). Then the
                # outputs here are undefined, and other ranks may have ended the call successfully without knowing of
                # the failure yet.
                told = str(getattr(backend, "fault", ""))
        except (RuntimeError, ValueError) as error:
            told = str(error)
        said = self._agree(f"{step['id']} ended", step, told)
        if not any(said):
            if step["do"] == "region":
                dist.barrier(group=group)
            self._wait_for_numbers()
            self._agree(f"{step['id']} compared", step, "")
            return
        if not may_fail or not any("interrupted" in each for each in said):
            self._problem("error", f"after a signal in {step['do']}: {said}", told or str(said))
        raise Over

    def _agree(self, about: str, step: Step, text: str) -> list[str]:
        """Exchanges a text between all ranks of a step, and returns the texts. No rank goes on before all have written
        theirs."""
        self.store.set(f"{about} {self.rank}", text)
        return [self.store.get(f"{about} {rank}").decode() for rank in involved(step, self.program)]

    def _wait_for_numbers(self) -> None:
        """Waits until the outputs are complete. Works that were lost by an exception cannot be waited for, but their
        operations still complete."""
        assert self.model is not None
        if self.vendor:
            getattr(torch, self.device).synchronize()
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            found = [
                torch.equal(self.tensor(view).cpu(), numbers) for view, numbers in self.model.checks.get(self.at, [])
            ]
            if all(found):
                return
            time.sleep(0.001)

    def _anyone(self, step: Step) -> None:
        assert self.model is not None
        group, tag = self.groups[step["g"]], step["tag"]
        if self.rank != step["dst"]:
            works: list[Any] = []
            for view in step["views"][str(self.rank)]:
                works.append(dist.isend(self.tensor(view), step["dst"], group=group, tag=tag))
            for work in works:
                work.wait()
            return
        parcels = {rank: list(found) for rank, found in self.model.parcels[self.at].items()}
        count = sum(len(found) for found in parcels.values())
        tensors = [
            torch.full((step["count"],), 9, dtype=getattr(torch, step["dtype"])).to(self.device) for _ in range(count)
        ]
        works = []
        if step["how"] == "keep":
            works = [dist.irecv(tensor, None, group=group, tag=tag) for tensor in tensors]
        for i, tensor in enumerate(tensors):
            if works:
                works[i].wait()
                source = dist.get_global_rank(group, works[i]._source_rank())
            else:
                source = dist.recv(tensor, None, group=group, tag=tag)
            if not parcels.get(source):
                self._problem("wrong", f"a message from rank {source}, which has sent no more")
            elif not torch.equal(tensor.cpu(), parcels[source].pop(0)):
                self._problem("wrong", f"the message of rank {source} holds wrong numbers")

    # ---------------------------------------------------------------------------------------------- waiting

    def _wait(self, step: Step) -> None:
        works, via = self.works.pop(step["id"]), step["via"]
        if "struck" in step:
            assert self.interrupts is not None
            wait = partial(self._wait_for, works, step)
            self.interrupts.at_some_moment(step["struck"][str(self.rank)], wait, wait)
            return
        if via == "thread":
            errors: list[BaseException] = []

            def body() -> None:
                try:
                    for work in works:
                        work.wait()
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=body, daemon=True)
            thread.start()
            self.threads[step["id"]] = thread, errors
            return
        self._wait_for(works, step)

    def _wait_for(self, works: list[Any], step: Step) -> None:
        via = step["via"]
        for work in works:
            end = time.monotonic() + self.seconds
            if via == "poll" and hasattr(work, "is_completed"):
                while not work.is_completed():
                    if time.monotonic() > end:
                        raise TimeoutError(f"Work {step['id']} did not complete within {self.seconds} s")
                    time.sleep(0.0002)
            if via == "timeout" and isinstance(work, dist.Work):
                work.wait(timedelta(seconds=self.seconds))
            elif via == "future" and isinstance(work, dist.Work) and self.backend != "gloo":
                work.get_future().wait()
            else:
                work.wait()

    def _join(self, step: Step) -> None:
        thread, errors = self.threads.pop(step["id"])
        thread.join(self.seconds + 5)
        if thread.is_alive():
            raise TimeoutError(f"the thread that waits for Work {step['id']} does not end")
        if errors:
            raise errors[0]

    # ---------------------------------------------------------------------------------------------- others

    def _fill(self, step: Step) -> None:
        b = step["b"]
        dtype, count = self.program.buffers[b]
        self.memory[b].copy_(initial(dtype, count, self.rank, b, step["base"]))

    def _sleep(self, step: Step) -> None:
        time.sleep(step["ms"] / 1e3)

    def _leave(self, step: Step) -> None:
        # Compare before the rank leaves; `_steps` compares again afterwards.
        assert self.model is not None
        self._compare(self.model.checks.get(self.at, []))
        dist.destroy_process_group()

    def _object(self, step: Step) -> None:
        group, members, form = self.groups[step["g"]], self.program.groups[step["g"]], step["form"]
        root = members[step["root"]]

        def thing(rank: int) -> Any:
            return {"rank": rank, "at": self.at, "text": "x" * (self.at * 37 % 300)}

        every = [thing(rank) for rank in members]
        found: list[Any] = [None] * len(members)
        wanted: list[Any] = every
        if form == "all_gather":
            dist.all_gather_object(found, thing(self.rank), group=group)
        elif form == "gather":
            dist.gather_object(thing(self.rank), found if self.rank == root else None, dst=root, group=group)
            wanted = every if self.rank == root else found
        elif form == "broadcast":
            found = [thing(self.rank)]
            dist.broadcast_object_list(found, src=root, group=group)
            wanted = [thing(root)]
        else:
            found = [None]
            dist.scatter_object_list(found, every if self.rank == root else None, src=root, group=group)
            wanted = [thing(self.rank)]
        if found != wanted:
            self._problem("wrong", f"{form} of objects: {found} instead of {wanted}")

    def _fork(self, step: Step) -> None:
        """Forks a child that uses inherited groups or Works. Its calls must be rejected, except for a destroy or an
        abort."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            text = "the call returned"
            try:
                signal.alarm(CHILD_SECONDS - 5)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                self._child(step)
            except (RuntimeError, ValueError) as error:
                text = f"refused: {error}"
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            finally:
                os.write(write, text.encode()[:3000])
                os._exit(0)
        os.close(write)
        ready, _, _ = select.select([read], [], [], CHILD_SECONDS)
        text = os.read(read, 4000).decode() if ready else ""
        os.close(read)
        if not text:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        fine = text == "the call returned" if step["child"] in ("destroy", "abort") else text.startswith("refused")
        if step["child"] == "wait" and text == "the call returned":
            # The child may wait for a Work that had ended before the fork, but not for one that was still pending.
            fine = all(work.is_completed() for work in self.works[step["id"]] if hasattr(work, "is_completed"))
        if not fine:
            self._problem("child", f"a forked child that did {step['child']!r}: {text or 'nothing came back'}")

    def _child(self, step: Step) -> None:
        what = step["child"]
        if what == "call":
            dist.all_reduce(torch.ones(3))
        elif what == "wait":
            for work in self.works[step["id"]]:
                # A future that was taken before the fork is completed only by the parent's threads.
                if hasattr(work, "is_completed"):
                    work.wait()
        elif what == "send":
            dist.isend(torch.ones(3), (self.rank + 1) % self.program.ranks)
        elif what == "new":
            dist.new_group([self.rank])
        elif what == "abort":
            with suppress(RuntimeError, ValueError):
                dist.distributed_c10d._abort_process_group()
        else:
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group()

    # ---------------------------------------------------------------------------------------------- endings

    def _disagree(self, step: Step) -> None:
        """Makes a call in which one member disagrees. An error must come: in this call or, on a rank whose part was
        legal, in the next one."""
        assert self.model is not None
        agreed = step["step"]
        group = self.groups[agreed["g"]]
        # Wait for all ranks: a rank that is still in an earlier call would get the error of this step there.
        self.store.set(f"came {self.rank}", b"")
        self.store.wait([f"came {rank}" for rank in involved(step, self.program)], timedelta(seconds=self.seconds))
        odd = self.program.groups[agreed["g"]].index(self.rank) == step["odd"]
        begun = time.monotonic()
        try:
            for work in self.collective(step["other"] if odd else agreed, self.at % 2 == 0):
                if work is not None:
                    work.wait()
        except (RuntimeError, ValueError) as error:
            self._told(step, begun, str(error))
            return
        self._compare(self.model.checks.get(self.at, []))
        begun = time.monotonic()
        try:
            dist.barrier(group=group)
        except (RuntimeError, ValueError) as error:
            self._told(step, begun, str(error))
            return
        call = "another call" if odd else "a call"
        self._problem("quiet", f"no error came to rank {self.rank} for {call} that differs in {step['about']}")

    def _told(self, step: Step, begun: float, text: str) -> None:
        # Between hosts, ranks that disagree about the sender may wait for each other until the deadline (rule 5).
        allowed = self.apart and step["about"] in ("root", "kind")
        if time.monotonic() - begun > 0.8 * self.seconds and not allowed:
            self._problem("late", f"the error came only when the time was over: {text}")

    def _twice(self, step: Step) -> None:
        """Passes a list that contains one tensor twice. The result is that of the calls one after the other, or an
        error."""
        assert self.model is not None
        outs = [step["views"] for _ in self.program.groups[step["g"]]]
        call = {"do": "reduce_list", "g": step["g"], "ins": [[] for _ in outs], "outs": outs}
        try:
            self.collective(call | {"red": step["red"], "form": step["form"]}, False)
        except (RuntimeError, ValueError) as error:
            if "rank" not in str(error) and not any(
                word in str(error) for word in ("twice", "overlap", "share", "same")
            ):
                raise
            return
        self._compare(self.model.checks.get(self.at, []))


def member(
    context: Any, backend: str, hosts: list[str] | None = None, vendor: str | None = None, reachable: str = ""
) -> None:
    """The main loop of a rank process: runs the programs that the test sends, one after the other.

    `hosts` are network namespaces among which the ranks are distributed. With `vendor`, tensors are on a device. "card"
    means a real card. Any other value means a simulated device, with the simulated library of that vendor or, for "",
    without a library. `reachable` is passed to `Rank`.
    """
    device, who = "cpu", ""
    if hosts:
        from net import enter

        enter(hosts[context.rank % len(hosts)])
    if vendor is not None:
        device, who = a_device(vendor)
    client: Any = None
    context.tell("ready")
    while True:
        order = context.conn.recv()
        if order is None:
            return
        key, text, seconds = order
        program = Program.from_json(text)
        if hosts:
            store: Any = dist.FileStore(f"{context.tmp}/{key}", program.ranks)
        else:
            client = client or dist.TCPStore("127.0.0.1", context.store_port, timeout=timedelta(seconds=30))
            store = dist.PrefixStore(key, client)
        tell = partial(context.tell, (key, None, False))
        rank = Rank(program, context.rank, backend, store, seconds, device, who, tell, bool(hosts), reachable)
        problems = rank.run()
        context.tell((key, problems, rank.over))


def a_device(vendor: str) -> tuple[str, str]:
    """Installs a simulated device in this process, or takes the card. Returns its name, and the value of the option
    `vendor`."""
    if vendor == "card":
        torch.cuda.set_device(0)
        return "cuda", "nccl"
    import simdevice

    if not vendor:
        simdevice.install("npu").kernel_delay(0.0002)
        return "npu", ""
    from simulated import VENDORS

    name, flavour, _ = VENDORS[vendor]
    device = simdevice.install(name)
    device.use_library(os.environ["SAGELLM_TEST_RUNTIME"], flavour)
    device.native_handles(True)
    device.kernel_delay(0.0002)
    return name, vendor if vendor == "nccl" else "auto"
