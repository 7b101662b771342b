"""OverlapScheduler: a step of layers, compared with the same step that waits for each all_reduce right away."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import torch_sagellm
from feature_rows.row import HERE, SLOW, Made, Row, nothing

LAYERS = 4


def steps(size: int, compute: Callable[[], object], scheduled: bool) -> Callable[[], Made]:
    """The scheduler after its calibration. With ``scheduled`` False the scheduler gets no ``step()``, so it always
    overlaps."""

    def make() -> Made:
        torch.manual_seed(dist.get_rank())
        given = [torch.randn(size // 4) for _ in range(LAYERS)]
        comm = torch_sagellm.create_comm_backend()
        scheduler = torch_sagellm.OverlapScheduler(comm)

        def serial() -> list[torch.Tensor]:
            done = []
            for each in given:
                compute()
                done.append(comm.all_reduce(each.clone()))
            return done

        def pass_over() -> list[torch.Tensor]:
            handles = []
            for each in given:
                compute()
                handles.append(scheduler.schedule(each.clone()))
            return [handle.wait() for handle in handles]

        def overlapped() -> list[torch.Tensor]:
            if not scheduled:
                return pass_over()
            with scheduler.step():
                return pass_over()

        for _ in range(2 * scheduler.calibrate + 1):
            for one, other in zip(overlapped(), serial(), strict=True):
                assert torch.equal(one, other)
        if dist.get_rank() == 0 and scheduled:
            print(f"# OverlapScheduler: {scheduler.report()}", flush=True)
        return overlapped, serial, nothing

    return make


def idle() -> None:
    """A computation that leaves the cores free, as on an accelerator."""
    time.sleep(0.01)


def matmuls() -> None:
    for _ in range(4):
        torch.mm(SQUARE, SQUARE)


SQUARE = torch.full((256, 256), 0.01)
TURN = "waiting for each at once"
ROWS = [
    Row("overlap", "4 x 4 MiB, cores idle, step()", TURN, HERE, 1.0, steps(4 << 20, idle, True)),
    Row("overlap", "4 x 16 MiB, cores idle, step()", TURN, HERE, 0.95, steps(16 << 20, idle, True)),
    Row("overlap", "4 x 4 MiB, all cores compute, step()", TURN, HERE, 1.02, steps(4 << 20, matmuls, True)),
    Row("overlap", "4 x 4 MiB, all cores compute, without step()", TURN, HERE, 1.02, steps(4 << 20, matmuls, False)),
    Row("overlap", "4 x 1 MiB, cores idle, step()", TURN, SLOW, 0.8, steps(1 << 20, idle, True)),
]
