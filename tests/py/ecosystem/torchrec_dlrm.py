"""TorchRec: a small DLRM whose embedding tables are sharded over 2 ranks, one whole table a rank and one by its rows."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from report import digest, report
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

STEPS = 20
BATCH = 32
DENSE = 8
ROWS = 512
#: How each table is split: whole ones go through an all_to_all, rows through a reduce_scatter, columns through an
#: all_to_all of parts.
TABLES = {
    "user": ShardingType.TABLE_WISE,
    "item": ShardingType.TABLE_WISE,
    "word": ShardingType.ROW_WISE,
    "shop": ShardingType.COLUMN_WISE,
}


def sharded() -> DistributedModelParallel:
    """The model with its plan, which the ranks agree on."""
    tables = [
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=ROWS, embedding_dim=16) for name in TABLES
    ]
    embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    dlrm = DLRM(embeddings, dense_in_features=DENSE, dense_arch_layer_sizes=[32, 16], over_arch_layer_sizes=[32, 1])
    sharder = EmbeddingBagCollectionSharder()
    constraints = {
        name: ParameterConstraints(
            sharding_types=[kind.value], compute_kernels=[EmbeddingComputeKernel.DENSE.value], min_partition=8
        )
        for name, kind in TABLES.items()
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"), constraints=constraints
    )
    group = dist.group.WORLD
    assert group is not None
    model = DLRMTrain(dlrm)
    plan = planner.collective_plan(model, [sharder], group)
    return DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],
    )


def batch(step: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """This rank's numbers, which words they go with, and what is to be learned."""
    source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    lengths = torch.randint(0, 4, (len(TABLES) * BATCH,), generator=source)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=source)
    dense = torch.randn(BATCH, DENSE, generator=source)
    labels = torch.randint(0, 2, (BATCH,), generator=source)
    return dense, KeyedJaggedTensor(keys=list(TABLES), values=values, lengths=lengths), labels


def main() -> None:
    """Trains and reports."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, times = [], []
    for step in range(STEPS):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss, _ = model(Batch(*batch(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
    report(losses=losses, weights=digest(parameter for parameter in model.parameters()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
