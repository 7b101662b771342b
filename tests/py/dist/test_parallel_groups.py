"""`ProcessGroupManager`: the grid of ranks, the members of each group, neighbours, the mesh, and refused arguments."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, expect_raises, run_fresh, run_ranks

pytestmark = beyond_gloo("groups of several dimensions")


def place(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """Returns the coordinates of a rank in all dimensions, computed by division."""
    found = {}
    for name in ("tp", "cp", "pp", "dp"):
        found[name] = rank % sizes[name]
        rank //= sizes[name]
    return found


def check(ctx: Context, sizes: dict[str, int], ep: int) -> None:
    import torch_sagellm

    if not dist.is_initialized():
        ctx.init()
    groups = torch_sagellm.ProcessGroupManager(**{f"{name}_size": size for name, size in sizes.items()}, ep_size=ep)
    places = {rank: place(rank, sizes) for rank in range(ctx.world_size)}
    mine = places[ctx.rank]
    for name in ("tp", "cp", "pp", "dp", "cp_dp", "pp_dp"):
        fixed = [each for each in sizes if each not in name.split("_")]
        members = [rank for rank, where in places.items() if all(where[each] == mine[each] for each in fixed)]
        assert groups.ranks(name) == members, (name, groups.ranks(name), members)
        group = getattr(groups, f"{name}_group")
        assert dist.get_process_group_ranks(group) == members
        total = torch.tensor([float(ctx.rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(members), (name, total, members)
        assert getattr(groups, f"{name}_size") == len(members)
        assert getattr(groups, f"{name}_rank") == members.index(ctx.rank)
    for name, at in mine.items():
        assert getattr(groups, f"{name}_rank") == at
    assert groups.group("cp_dp") is groups.cp_dp_group
    experts = groups.ranks("ep")
    assert len(experts) == ep and ctx.rank in experts and set(experts) <= set(groups.ranks("cp_dp"))
    assert dist.get_world_size(groups.ep_group) == ep and experts[groups.ep_rank] == ctx.rank
    stages = groups.ranks("pp")
    at = stages.index(ctx.rank)
    assert groups.pp_is_first_stage == (at == 0) and groups.pp_is_last_stage == (at == len(stages) - 1)
    assert groups.pp_prev_rank == (stages[at - 1] if at else None)
    assert groups.pp_next_rank == (stages[at + 1] if at + 1 < len(stages) else None)
    ring = groups.ranks("cp")
    assert groups.cp_next_rank == ring[(ring.index(ctx.rank) + 1) % len(ring)]
    assert groups.cp_prev_rank == ring[ring.index(ctx.rank) - 1]
    mesh = groups.mesh
    assert mesh.mesh_dim_names == ("dp", "pp", "cp", "tp")
    for name in sizes:
        assert mesh.get_group(name) is getattr(groups, f"{name}_group")
        assert mesh.get_local_rank(name) == mine[name]
    groups.destroy()
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("world_size", "tp", "cp", "pp", "dp", "ep"),
    [(1, 1, 1, 1, 1, 1), (4, 2, 1, 2, 1, 1), (4, 1, 2, 1, 2, 4), (4, 1, 1, 2, 2, 2), (8, 2, 2, 1, 2, 2)],
)
def test_groups_are_those_of_the_grid(world_size: int, tp: int, cp: int, pp: int, dp: int, ep: int) -> None:
    run = run_ranks if world_size <= 4 else run_fresh
    run(check, world_size, {"tp": tp, "cp": cp, "pp": pp, "dp": dp}, ep)


def refusals(ctx: Context) -> None:
    from torch_sagellm import ProcessGroupManager

    assert "tp 2 x cp 1 x pp 1 x dp 2 = 4, expected 2" in expect_raises(
        ValueError, lambda: ProcessGroupManager(2, 1, 1, 2)
    )
    assert "pp_size is 0" in expect_raises(ValueError, lambda: ProcessGroupManager(2, 1, 0, 1))
    assert "tp_size is '2'" in expect_raises(ValueError, lambda: ProcessGroupManager("2"))
    assert "divisor of cp 1 x dp 2" in expect_raises(ValueError, lambda: ProcessGroupManager(1, 1, 1, 2, 3))
    groups = ProcessGroupManager(2)
    for call in (groups.ranks, groups.group):
        text = expect_raises(ValueError, lambda call=call: call("xp"))
        assert "'xp' is no group, expected one of tp, cp, pp, dp, cp_dp, pp_dp, ep" in text


def test_sizes_that_do_not_multiply_are_refused_with_the_arithmetic() -> None:
    run_ranks(refusals, 2)


@pytest.mark.quick
def test_without_a_group_it_says_what_to_do() -> None:
    from torch_sagellm import ProcessGroupManager

    with pytest.raises(ValueError, match="init_process_group"):
        ProcessGroupManager()
