"""The file in the format of NCCL Inspector: its metrics, its labels, and its values, which equal the statistics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, run_ranks

from torch_sagellm.observe.inspector import size_range

pytestmark = [pytest.mark.quick, beyond_gloo("keeps no statistics")]


def written(ctx: Context, folder: str) -> None:
    import torch_sagellm

    torch_sagellm.reset_stats()
    # 1024 and 1200 bytes are in one range of the file, but in two size classes of the statistics.
    for count in (256, 300, 1 << 18):
        dist.all_reduce(torch.ones(count))
    if ctx.rank == 0:
        dist.send(torch.ones(256), 1)
    else:
        dist.recv(torch.ones(256), 0)
    path = Path(torch_sagellm.write_inspector(folder, dist.group.WORLD))
    assert re.fullmatch(r"nccl_inspector_metrics_.+\.prom", path.name)
    samples: dict[tuple[str, str, str], float] = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        name, text, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()  # type: ignore[union-attr]
        labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
        assert {"version", "slurm_job_id", "node", "gpu", "comm_name", "n_nodes", "nranks"} <= set(labels)
        assert labels["nranks"] == "2" and labels["n_nodes"] == "1" and labels["gpu"] == f"rank{ctx.rank}"
        key = (name, labels.get("collective") or labels["p2p_operation"], labels["message_size"])
        assert key not in samples or "algo_proto" in labels, key
        samples[key] = float(value)
    rows = {key[1:] for key in samples}
    assert rows == {("AllReduce", "1-2KB"), ("AllReduce", "1-2MB"), ("Send" if ctx.rank == 0 else "Recv", "1-2KB")}
    op = next(
        row for row in torch_sagellm.get_stats()["sizes"] if row["op"] == "all_reduce" and row["up_to"] == 1 << 20
    )
    micros = samples["nccl_collective_exec_time_microseconds", "AllReduce", "1-2MB"]
    assert micros == pytest.approx(op["latency"]["avg_ms"] * 1e3)
    assert samples["nccl_bus_bandwidth_gbs", "AllReduce", "1-2MB"] == pytest.approx(op["busbw_gbs"])


def test_metrics_labels_and_values(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    run_ranks(written, 2, str(tmp_path))


def test_ranges_of_sizes() -> None:
    found = [size_range(nbytes) for nbytes in (0, 1, 1023, 1024, 1536, 4 << 20, 5 << 30, 3 << 50)]
    assert found == ["0B", "1-2B", "1023-1024B", "1-2KB", "1-2KB", "4-5MB", "5-6GB", "3072-3073TB"]
