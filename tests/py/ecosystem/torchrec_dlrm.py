"""TorchRec: a small DLRM whose embedding tables are split over 2 ranks: whole tables, rows and columns."""

from __future__ import annotations

import torch
import torch.distributed as dist
from report import digest, report, step
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

STEPS = 40
BATCH = 32
DENSE = 8
ROWS = 512
KERNEL = EmbeddingComputeKernel.DENSE.value
#: How each table is split: whole ones and columns are exchanged by all_to_all, rows by reduce_scatter.
TABLES = {
    "user": table_wise(rank=0, compute_kernel=KERNEL),
    "item": table_wise(rank=1, compute_kernel=KERNEL),
    "word": row_wise(compute_kernel=KERNEL),
    "shop": column_wise(ranks=[0, 1], compute_kernel=KERNEL),
}


def sharded() -> DistributedModelParallel:
    """Returns the model, its tables split, the rest copied to each rank."""
    tables = [
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=ROWS, embedding_dim=16) for name in TABLES
    ]
    embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    dlrm = DLRM(embeddings, dense_in_features=DENSE, dense_arch_layer_sizes=[32, 16], over_arch_layer_sizes=[32, 1])
    sharder = EmbeddingBagCollectionSharder()
    ranks = dist.get_world_size()
    split = construct_module_sharding_plan(
        embeddings, TABLES, sharder=sharder, local_size=ranks, world_size=ranks, device_type="cpu"
    )
    group = dist.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        module=DLRMTrain(dlrm),
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"model.sparse_arch.embedding_bag_collection": split}),
        sharders=[sharder],
    )


def batch(number: int) -> Batch:
    """Returns this rank's inputs of one step: dense numbers, the words that belong to them, and the labels."""
    source = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    lengths = torch.randint(0, 4, (len(TABLES) * BATCH,), generator=source)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=source)
    dense = torch.randn(BATCH, DENSE, generator=source)
    labels = torch.randint(0, 2, (BATCH,), generator=source)
    return Batch(dense, KeyedJaggedTensor(keys=list(TABLES), values=values, lengths=lengths), labels)


def main() -> None:
    """Trains and reports."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss, _ = model(batch(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        step()
    report(losses=losses, weights=digest(model.parameters()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
