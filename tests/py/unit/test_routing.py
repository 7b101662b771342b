"""`torch_sagellm.parallel.routing`: the core finds the same rows as torch, which routes tensors on a device."""

from __future__ import annotations

import pytest
import torch

from torch_sagellm.parallel.routing import Router

pytestmark = pytest.mark.quick


def router(experts: int, ranks: int, rank: int) -> Router:
    """Returns a router without a group, which it needs only for the counts of other ranks."""
    made = Router.__new__(Router)
    made.group, made.num_experts, made.ranks, made.rank = None, experts, ranks, rank
    made.local_experts, made.capacity_factor, made.pad = experts // ranks, None, False
    return made


@pytest.mark.parametrize(("ranks", "each", "assignments"), [(1, 4, 9), (2, 3, 40), (4, 1, 17), (3, 2, 0), (2, 8, 500)])
def test_the_core_routes_as_torch_does(ranks: int, each: int, assignments: int) -> None:
    experts = ranks * each
    for seed in range(5):
        torch.manual_seed(seed)
        every = [torch.randint(0, max(experts - seed, 1), (assignments,)) for _ in range(ranks)]
        table = torch.stack([torch.bincount(flat, minlength=experts) for flat in every])
        for taken in (table, table.clamp(max=2), torch.full_like(table, 3)):
            for rank, flat in enumerate(every):
                one, choices = router(experts, ranks, rank), seed % 3 + 1
                wanted, order = one._sort(flat)
                assert torch.equal(wanted, table[rank]) and torch.equal(order, torch.argsort(flat, stable=True))
                by_core = one._by_core(flat, order, wanted, taken.reshape(-1), choices)
                by_torch = one._by_torch(flat, order, wanted, taken.reshape(-1), choices)
                for name, found, expected in zip(by_core._fields, by_core, by_torch, strict=True):
                    same = torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
                    assert same, (seed, rank, name, found, expected)


def test_an_expert_that_does_not_exist_is_refused() -> None:
    for chosen in ([0, 4], [-1, 2]):
        with pytest.raises(ValueError, match=f"experts from {min(chosen)} to {max(chosen)}, expected 0 to 3"):
            router(4, 2, 0)._sort(torch.tensor(chosen))
