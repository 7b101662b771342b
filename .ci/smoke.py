"""Every collective once, point to point, a subgroup and one DDP step, by name alone; run it under torchrun.

It is the same program for every torch from 2.11 on, so it uses the names that the oldest knows.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def expect(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.equal(found, wanted):
        raise SystemExit(f"{what}: expected {wanted.tolist()}, got {found.tolist()}")


def reductions(rank: int, size: int) -> None:
    total = sum(range(1, size + 1))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8):
        mine = torch.full((1000,), rank + 1, dtype=dtype)
        dist.all_reduce(mine)
        expect(f"all_reduce {dtype}", mine, torch.full((1000,), total, dtype=dtype))
    big = torch.full((1 << 20,), float(rank))
    dist.all_reduce(big, op=dist.ReduceOp.MAX, async_op=True).wait()
    expect("all_reduce MAX", big, torch.full((1 << 20,), float(size - 1)))
    mean = torch.full((4,), float(rank))
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    expect("all_reduce AVG", mean, torch.full((4,), (size - 1) / 2))
    mine = torch.tensor([float(rank + 1)])
    dist.reduce(mine, dst=0)
    if rank == 0:
        expect("reduce", mine, torch.tensor([float(total)]))
    parts = [torch.tensor([float(rank + 10 * peer)]) for peer in range(size)]
    out = torch.empty(1)
    dist.reduce_scatter(out, parts)
    expect("reduce_scatter", out, torch.tensor([float(sum(range(size)) + 10 * rank * size)]))
    dist.reduce_scatter_tensor(out, torch.cat(parts))
    expect("reduce_scatter_tensor", out, torch.tensor([float(sum(range(size)) + 10 * rank * size)]))


def movements(rank: int, size: int) -> None:
    mine = torch.arange(6).reshape(2, 3).t() + 100 * rank
    every = [torch.empty(3, 2, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(every, mine)
    for peer, block in enumerate(every):
        expect("all_gather", block, torch.arange(6).reshape(2, 3).t() + 100 * peer)
    flat = torch.empty(size * 2)
    dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)))
    expect("all_gather_into_tensor", flat, torch.arange(float(size)).repeat_interleave(2))
    root = torch.full((5,), float(rank))
    dist.broadcast(root, src=1)
    expect("broadcast", root, torch.ones(5))
    blocks = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), blocks, dst=0)
    if blocks is not None:
        expect("gather", torch.cat(blocks), torch.arange(float(size)))
    own = torch.empty(1)
    dist.scatter(own, [torch.tensor([float(peer)]) for peer in range(size)] if rank == 0 else None, src=0)
    expect("scatter", own, torch.tensor([float(rank)]))
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.arange(float(size)) + 10 * rank)
    expect("all_to_all_single", swapped, 10 * torch.arange(float(size)) + rank)
    lists = [torch.empty(1) for _ in range(size)]
    dist.all_to_all(lists, [torch.tensor([float(peer + 10 * rank)]) for peer in range(size)])
    expect("all_to_all", torch.cat(lists), 10 * torch.arange(float(size)) + rank)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    if objects != [{"rank": peer} for peer in range(size)]:
        raise SystemExit(f"all_gather_object: got {objects}")
    dist.barrier()


def point_to_point(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(3)
    work = dist.isend(torch.full((3,), float(rank)), dst=after, tag=7)
    dist.recv(got, src=before, tag=7)
    if work is not None:
        work.wait()
    expect("send and recv", got, torch.full((3,), float(before)))
    batch = [dist.P2POp(dist.isend, torch.tensor([float(rank)]), after), dist.P2POp(dist.irecv, got[:1], before)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    expect("batch_isend_irecv", got[:1], torch.tensor([float(before)]))


def training(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    )
    torch.manual_seed(rank)
    model(torch.randn(16, 64)).square().mean().backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    other = flat.clone()
    dist.broadcast(other, src=0)
    expect("gradients of DDP", flat, other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="sagellm")
    parser.add_argument("--import-package", action="store_true", help="the way in where torch does not autoload")
    arguments = parser.parse_args()
    if arguments.import_package:
        import torch_sagellm

        print("sagellm", torch_sagellm.__version__, flush=True)
    elif "torch_sagellm._C" in sys.modules:
        raise SystemExit("the extension was loaded at import, before any group was made")
    dist.init_process_group(arguments.backend, timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    reductions(rank, size)
    movements(rank, size)
    point_to_point(rank, size)
    training(rank)
    group = dist.new_group(list(reversed(range(size))), backend=arguments.backend)
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    expect("all_reduce of a subgroup", ones, torch.full((3,), float(size)))
    dist.destroy_process_group()
    print(f"rank {rank} of {size}: {arguments.backend} under torch {torch.__version__} passed", flush=True)


if __name__ == "__main__":
    main()
