"""What happens without memory that peers can map, in forked children, and at the end of a program."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Context, beyond_gloo, run_script
from reachable import MIB, PAGE, Lines, alone, usage

import torch_sagellm

pytestmark = beyond_gloo("has no such tensors")


# ------------------------------------------------------------------------------------------------ without such memory


def full(ctx: Context) -> None:
    log = Lines()
    fits = torch_sagellm.zeros(3 * MIB // 4)
    assert torch_sagellm.is_reachable(fits)
    for _ in range(3):
        assert torch_sagellm.zeros(MIB).sum() == 0
        with torch_sagellm.shared_tensors():
            assert not torch_sagellm.is_reachable(torch.ones(MIB))
    assert usage()["refused"] == 6
    (line,) = log.read()
    assert f"of {4 * MIB} bytes {3 * MIB} are in use" in line and "SAGELLM_SHARED_BYTES" in line, line
    del fits
    assert torch_sagellm.is_reachable(torch_sagellm.zeros(MIB)), "there is room again"


def test_past_the_limit_memory_is_ordinary_and_the_log_says_so_once() -> None:
    alone(full, {"SAGELLM_SHARED_BYTES": str(4 * MIB)})


def switched_off(ctx: Context) -> None:
    log = Lines()
    ordinary_instead(log, "SAGELLM_SHARED_BYTES is 0")


def ordinary_instead(log: Lines, why: str) -> None:
    for _ in range(2):
        tensor = torch_sagellm.zeros(MIB)
        assert tensor.sum() == 0 and not torch_sagellm.is_reachable(tensor)
        with torch_sagellm.shared_tensors():
            assert not torch_sagellm.is_reachable(torch.ones(MIB))
    (line,) = log.read()
    assert why in line and "ordinary memory" in line, line
    assert why in usage()["why_not"] and usage()["limit"] == usage()["used"] == 0


def test_a_limit_of_zero_switches_it_off() -> None:
    alone(switched_off, {"SAGELLM_SHARED_BYTES": "0"})


def little_address_space(ctx: Context) -> None:
    torch_sagellm.is_reachable(torch.ones(1))  # loads the extension
    size = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (size + 200 * MIB, resource.RLIM_INFINITY))
    ordinary_instead(Lines(), "cannot map")


def test_a_small_limit_of_address_space_leaves_ordinary_memory() -> None:
    alone(little_address_space, {"SAGELLM_SHARED_BYTES": str(1 << 30)})


def small_files(ctx: Context) -> None:
    log = Lines()
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    ordinary_instead(log, "ulimit -f")


def test_a_small_limit_of_files_leaves_ordinary_memory() -> None:
    """Writing a file beyond the limit would end the process by SIGXFSZ."""
    alone(small_files, {"SAGELLM_SHARED_BYTES": str(1 << 30)})


# ------------------------------------------------------------------------------------------------------------ forks


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of one tensor. A worker that reads a row also overwrites its own copy."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> torch.Tensor:
        found = self.rows[number].clone()
        assert os.getpid() != parent
        self.rows[number] = -1
        return found


parent = 0


def workers(ctx: Context) -> None:
    global parent
    parent = os.getpid()
    log = Lines()
    rows = torch_sagellm.shared(torch.arange(64 * 8192.0).reshape(64, 8192))
    loader = torch.utils.data.DataLoader(
        Rows(rows), batch_size=8, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    with torch_sagellm.shared_tensors():
        got = torch.cat(list(loader))
    wanted = torch.arange(64 * 8192.0).reshape(64, 8192)
    assert torch.equal(got, wanted) and torch.equal(rows, wanted), "a write of a worker came here"
    assert torch_sagellm.is_reachable(got) and torch_sagellm.is_reachable(rows) and log.read() == []


def test_data_loader_workers_read_them_and_their_writes_stay_there() -> None:
    alone(workers)


def in_child(body: Callable[[], bool]) -> bool:
    """Runs `body` in a forked child. Returns whether it returned True."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if body() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def forked(ctx: Context) -> None:
    log = Lines()
    kept = torch_sagellm.shared(torch.arange(float(MIB)))
    freed = [torch_sagellm.zeros(MIB)]

    def child() -> bool:
        freed.clear()
        kept[0] = 7
        new = torch_sagellm.zeros(MIB)
        with torch_sagellm.shared_tensors():
            other = torch.ones(MIB)
        own = in_child(lambda: bool(kept[0] == 7 and kept[1] == 1))
        plain = not torch_sagellm.is_reachable(new) and not torch_sagellm.is_reachable(other)
        return own and plain and bool(other.sum() == MIB) and new.count_nonzero() == 0 and log.read() == []

    assert in_child(child)
    assert kept[0] == 0 and usage()["extents"] == 2 and freed[0].count_nonzero() == 0
    again = torch_sagellm.zeros(MIB)
    assert again.data_ptr() not in (kept.data_ptr(), freed[0].data_ptr()) and usage()["extents"] == 3


def test_a_forked_child_frees_writes_and_allocates_without_a_trace_in_its_parent() -> None:
    alone(forked)


ENDS = """
import threading, torch, torch_sagellm
kept = torch_sagellm.zeros(1 << 20)
array = torch_sagellm.zeros(1 << 20).numpy()
torch_sagellm.shared_tensors().__enter__()
late = torch.ones(1 << 20, requires_grad=True)
threading.Thread(target=lambda: torch_sagellm.zeros(1 << 20).add_(1)).start()
(late * 2).sum().backward()
print(torch_sagellm.is_reachable(late.grad), kept.sum().item() + array.sum())
"""


def test_a_program_that_ends_with_such_tensors_ends_quietly() -> None:
    done = run_script(["-c", ENDS])
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True", "0.0"], ""), done
