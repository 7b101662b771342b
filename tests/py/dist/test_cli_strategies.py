"""`torch-sagellm simulate --strategy`: its bytes equal the counts of real layers, and its times those of the cost
model."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, run_ranks

from torch_sagellm._private import load
from torch_sagellm.cli import strategies
from torch_sagellm.cli.main import main
from torch_sagellm.cli.predict import Link, Machine
from torch_sagellm.cli.strategies import Model, Traffic

pytestmark = beyond_gloo("counts nothing")
MODEL = Model(
    parameters=2 * 16 * 16,
    layers=2,
    hidden=16,
    kv_hidden=8,
    sequence=4,
    batch=2,
    item=4,
    microbatches=2,
    experts=4,
    experts_per_token=2,
    bucket=1 << 20,
)


def planned(strategy: str, ranks: int, keep: str = "") -> dict[str, tuple[int, int]]:
    """Returns the calls and bytes of one step by primitive. Only rows whose `when` contains `keep` count."""
    found: dict[str, tuple[int, int]] = {}
    for row in strategies.STRATEGIES[strategy](MODEL, ranks):
        if keep in row.when:
            calls, nbytes = found.get(row.primitive, (0, 0))
            found[row.primitive] = (calls + row.calls, nbytes + row.step_bytes)
    return found


def counted() -> dict[str, tuple[int, int]]:
    """Returns the calls and bytes that this rank's group has counted since the last reset. Receives do not count,
    because the plan counts each message at its sender."""
    import torch_sagellm

    ops = torch_sagellm.get_stats()["ops"]
    return {kind: (op["count"], op["bytes"]) for kind, op in ops.items() if op["count"] and kind != "recv"}


def tensor_parallel(ctx: Context) -> None:
    import torch_sagellm

    pairs = []
    for _ in range(2 * MODEL.layers):  # the attention and the MLP of each layer
        column = torch_sagellm.TensorParallelLinear(16, 16, ctx.world_size, "column", gather_output=False)
        pairs += [column, torch_sagellm.TensorParallelLinear(16, 16, ctx.world_size, "row", input_is_split=True)]
    tokens = torch.ones(MODEL.tokens, MODEL.hidden, requires_grad=True)
    torch_sagellm.reset_stats()
    torch.nn.Sequential(*pairs)(tokens).sum().backward()
    assert counted() == planned("tp", ctx.world_size), counted()


def context_parallel(ctx: Context) -> None:
    import torch_sagellm

    block = torch.ones(MODEL.batch, MODEL.sequence // ctx.world_size, MODEL.kv_hidden)
    torch_sagellm.reset_stats()
    for _ in range(MODEL.layers):
        assert len(list(torch_sagellm.ring_exchange([block, block.clone()]))) == ctx.world_size
    assert counted() == planned("cp", ctx.world_size, "forward"), counted()


def expert_parallel(ctx: Context) -> None:
    import torch_sagellm

    moe = torch_sagellm.MoEDispatcher(MODEL.experts)
    every = torch.arange(MODEL.tokens * MODEL.experts_per_token) % MODEL.experts
    tokens = torch.ones(MODEL.tokens, MODEL.hidden, requires_grad=True)
    # The first dispatch also exchanges the ranks' hosts.
    moe.dispatch(tokens, every.view(MODEL.tokens, MODEL.experts_per_token))
    torch_sagellm.reset_stats()
    there = tokens
    for _ in range(MODEL.layers):
        rows, routing = moe.dispatch(there, every.view(MODEL.tokens, MODEL.experts_per_token))
        there = moe.combine(rows, routing)
    there.sum().backward()
    assert counted() == planned("ep", ctx.world_size), counted()


def linears() -> Any:
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(MODEL.layers)))


def data_parallel(ctx: Context) -> None:
    import torch_sagellm

    model = torch.nn.parallel.DistributedDataParallel(linears())
    for _ in range(3):  # after the first step the ranks agree on the order of the buckets
        torch_sagellm.reset_stats()
        model(torch.ones(2, 16)).sum().backward()
    assert counted() == planned("dp", ctx.world_size), counted()


def fully_sharded(ctx: Context) -> None:
    from torch.distributed.fsdp import fully_shard

    import torch_sagellm

    mesh = dist.init_device_mesh("cpu", (ctx.world_size,))
    model = linears()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch_sagellm.reset_stats(mesh.get_group())
    model(torch.ones(2, 16)).sum().backward()
    ops = torch_sagellm.get_stats(mesh.get_group())["ops"]
    found = {kind: (op["count"], op["bytes"]) for kind, op in ops.items() if op["count"]}
    assert found == planned("fsdp", ctx.world_size), found


LAYERS = [tensor_parallel, context_parallel, expert_parallel, data_parallel, fully_sharded]


@pytest.mark.parametrize("layers", LAYERS, ids=lambda each: each.__name__)
def test_the_bytes_are_those_that_the_layers_count(layers: Any) -> None:
    run_ranks(layers, 2, fresh_group=True)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("strategy", "calls", "step", "sent"),
    [
        ("dp", 1, 2048, 2048 * 2 * 3 / 4),
        ("fsdp", 6, 3 * 2048, 3 * 2048 * 3 / 4),
        ("tp", 8, 8 * 512, 8 * 512 * 2 * 3 / 4),
        ("cp", 4 * 3 * 2 + 2 * 4 * 2, 40 * 2 * 1 * 8 * 4, 40 * 2 * 1 * 8 * 4),
        ("ep", 10, 8 * 1024 + 2 * 128, (8 * 1024 + 2 * 128) * 3 / 4),
    ],
)
def test_the_formulas_for_four_ranks(strategy: str, calls: int, step: int, sent: float) -> None:
    plan = strategies.STRATEGIES[strategy](MODEL, 4)
    assert sum(row.calls for row in plan) == calls
    assert sum(row.step_bytes for row in plan) == step
    assert sum(row.sent(4) for row in plan) == pytest.approx(sent)


@pytest.mark.quick
def test_a_stage_in_the_middle_passes_each_microbatch_both_ways() -> None:
    plan = strategies.pipeline_parallel(MODEL, 2)
    assert [(row.calls, row.nbytes) for row in plan] == [(2, 4 * 16 * 4)] * 2


@pytest.mark.quick
def test_buckets_are_whole_ones_and_a_rest() -> None:
    plan = strategies.data_parallel(replace(MODEL, bucket=1000), 2)
    assert [(row.calls, row.nbytes) for row in plan] == [(2, 1000), (1, 48)]


@pytest.mark.quick
def test_times_are_those_of_the_cost_model() -> None:
    core = load.extension()
    machine = Machine(Link(1e-6, 0.0, 1e-9), Link(1e-3, 0.0, 1e-8), 1e-10, ranks_per_host=4)
    message = Traffic("send", "", 3, 1000)
    assert strategies.seconds(core, message, 4, machine) == pytest.approx(3 * 2e-6)
    assert strategies.seconds(core, message, 5, machine) == pytest.approx(3 * 1.01e-3)
    one = strategies.seconds(core, Traffic("all_reduce", "", 1, 1 << 20), 4, machine)
    assert strategies.seconds(core, Traffic("all_reduce", "", 5, 1 << 20), 4, machine) == pytest.approx(5 * one) and one
    fastest = min(
        core.predict(
            "all_reduce", name, 4, [float(1 << 20)], machine.host.numbers(), machine.network.numbers(), 1e-10, 4
        )[0][0]
        for name in core.algorithms_of("all_reduce")
    )
    assert one == pytest.approx(fastest)


@pytest.mark.quick
def test_the_command_prints_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    for name in strategies.STRATEGIES:
        model = ["--params", "1.5M"] if name == "dp" else ["--layers", "8"]
        assert main(["simulate", "--strategy", name, "--ranks", "2,4", *model]) == 0
        text = capsys.readouterr().out
        assert text.count("each in one step") == 2 and text.count("\nall ") == 2, text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--strategy", "fspd"], "did you mean 'fsdp'?"),
        (["--strategy", "pp", "--ranks", "64"], "no more stages than the 32 layers"),
        (["--strategy", "pp", "--batch", "3"], "no multiple of the 8 microbatches"),
        (["--strategy", "ep", "--ranks", "7"], "--experts 64 is no multiple of the 7 ranks"),
        (["--strategy", "cp", "--ranks", "7"], "--sequence 4096 is no multiple"),
        (["--strategy", "dp", "--params", "many"], "'many' is no number of parameters"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["simulate", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2 and expected in capsys.readouterr().err


#: For each option of `simulate --strategy`, a value other than its default.
OTHER = {"params": "8B", "layers": "16", "hidden": "8192", "kv_hidden": "1024", "sequence": "8192", "batch": "16"}
OTHER |= {"item": "4", "microbatches": "4", "experts": "128", "experts_per_token": "4", "bucket": "1MiB"}


@pytest.mark.quick
@pytest.mark.parametrize("strategy", strategies.STRATEGIES)
def test_every_option_changes_the_figures_or_is_refused(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused option is refused even with its default value. With pp, --layers only limits the number of stages."""
    command = ["simulate", "--strategy", strategy, "--ranks", "4", "--json"]
    assert main(command) == 0 and set(OTHER) == set(strategies.DEFAULTS)
    usual = capsys.readouterr().out
    for name, value in OTHER.items():
        option = f"--{name.replace('_', '-')}"
        code = main([*command, option, value])
        said = capsys.readouterr()
        if name in strategies.USES[strategy]:
            assert code == 0 and (said.out != usual or (strategy, name) == ("pp", "layers")), (option, said)
            continue
        for given in (value, str(strategies.DEFAULTS[name] or value)):
            assert main([*command, option, given]) == 2, (option, given)
            said = capsys.readouterr()
            assert said.err == f"torch-sagellm simulate: {option} has no effect with --strategy {strategy}\n", said


@pytest.mark.quick
def test_the_features_of_keys_take_the_place_of_those_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--strategy", "cp", "--hidden", "8", "--kv-hidden", "4"]) == 2
    assert "--hidden has no effect with --strategy cp" in capsys.readouterr().err


@pytest.mark.quick
def test_counts_of_parameters() -> None:
    assert [strategies.parse_count(text) for text in ("1000", "350M", "1.5b", "7B")] == [
        1000,
        35 * 10**7,
        15 * 10**8,
        7 * 10**9,
    ]
    for text in ("", "0", "7X", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError):
            strategies.parse_count(text)
