"""Two and four real processes (gloo) against one process that sees all their batches."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from networks import one_thread, tiny_job  # noqa: F401
from real_ranks import run_ranks
from tonnage.plans import Plan
from tonnage.step import model
from tonnage.step.main_weights import MainOptimizer
from tonnage.step.step import ReadyStep
from tonnage.techniques import build

STEPS, MICRO_BATCHES = 2, 2
Weights = dict[str, torch.Tensor]


def cases(world: int) -> dict[str, tuple[Plan, str, str]]:
    """Return plan, method and network of every case, by name."""
    plain = {
        shard: (Plan(precision="fp32", shard=shard), "full", "llama")
        for shard in ("ddp", "zero1", "zero2", "zero3", "hsdp")
    }
    if world == 4:
        return plain
    del plain["hsdp"]
    chunked = Plan(precision="fp32", shard="zero3", loss="chunked", checkpointing="selective")
    return {
        **plain,
        "tied": (Plan(precision="fp32", shard="zero3"), "full", "qwen3"),
        "muon zero1": (Plan(precision="fp32", shard="zero1", optimizer="muon"), "full", "llama"),
        "adafactor zero1": (Plan(precision="fp32", shard="zero1", optimizer="adafactor"), "full", "llama"),
        "muon": (Plan(precision="fp32", shard="zero3", optimizer="muon"), "full", "llama"),
        "lora": (Plan(precision="fp32", shard="zero3", checkpointing="full"), "lora", "llama"),
        "chunked": (chunked, "full", "llama"),
        "offload": (Plan(precision="fp32", shard="zero3", param_offload="cpu"), "full", "llama"),
        "megatron": (Plan(precision="megatron-bf16", shard="ddp"), "full", "llama"),
        "megatron zero1": (Plan(precision="megatron-bf16", shard="zero1", clip_grad_norm=1), "full", "llama"),
        "experts": (Plan(precision="fp32", shard="zero2"), "full", "mixtral"),
    }


def batches(world: int) -> list[dict[str, torch.Tensor]]:
    """Return every micro-batch of the run: step by step, and within a step those of rank 0, then of rank 1, ..."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 61, (2, 24), generator=generator) for _ in range(STEPS * world * MICRO_BATCHES)]
    return [{"input_ids": one, "labels": one} for one in ids]


def trained(plan: Plan, method: str, network: str, world: int, rank: int, mine: list[Any]) -> Weights:
    """Return the weights after training on this rank's batches."""
    job = tiny_job(network, method=method, grad_accum=len(mine) // STEPS or 1)
    ready = build(
        job, plan, device="cpu", initialise=True, world_size=world, rank=rank, gpus_per_node=max(1, world // 2)
    )
    same_start(ready)
    handed = iter(mine)
    original, model.batch = model.batch, lambda *arguments: next(handed)  # type: ignore[assignment]
    try:
        ready.run(STEPS if mine else 0)
    finally:
        model.batch = original
    return {
        name.removeprefix("module."): getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
        for name, p in ready.model.named_parameters()
    }


def same_start(ready: ReadyStep) -> None:
    """Fill parameters with values that do not depend on how they are divided."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ready.model.parameters():
            full = torch.randn(parameter.shape, generator=generator) / 10
            if isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
            parameter.copy_(full)
    for optimizer in ready.optimizers:
        if isinstance(optimizer, MainOptimizer):
            optimizer.reload()


def rank_main(rank: int, world: int, folder: str) -> None:
    everything = batches(world)
    found: dict[str, Any] = {}
    for name, case in cases(world).items():
        mine = [
            everything[(step * world + rank) * MICRO_BATCHES + index]
            for step in range(STEPS)
            for index in range(MICRO_BATCHES)
        ]
        found[name] = trained(*case, world, rank, mine)
    if rank == world - 1:
        torch.save(found, Path(folder) / "weights")


_RUNS: dict[int, dict[str, Weights]] = {}


def in_processes(world: int) -> dict[str, Weights]:
    """Return what the last rank has at the end of every case."""
    if world not in _RUNS:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(rank_main, world, folder)
            _RUNS[world] = torch.load(Path(folder) / "weights")
    return _RUNS[world]


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in (2, 4) for name in cases(world)])
def test_agrees_with_one_process(world: int, name: str) -> None:
    plan, method, network = cases(world)[name]
    if method == "lora":
        pytest.importorskip("peft")
    alone = Plan(precision=plan.precision, optimizer=plan.optimizer, clip_grad_norm=plan.clip_grad_norm)
    expected = trained(alone, method, network, 1, 0, batches(world))
    start = trained(alone, method, network, 1, 0, [])
    ours = in_processes(world)[name]
    assert ours.keys() == expected.keys()
    assert any(not torch.equal(start[key], expected[key]) for key in expected)
    # Muon's Newton-Schulz iterations run in bf16, so the order of a sum shows in the third digit of an update of 1e-3
    tolerance = 2e-4 if plan.optimizer == "muon" else 1e-6
    if plan.precision == "megatron-bf16":
        tolerance = 2**-9  # one step of bf16 near 0.3, where fp32 sums in another order round apart
    for key, weights in expected.items():
        torch.testing.assert_close(ours[key], weights, rtol=0, atol=tolerance, msg=key)


def test_mixed_precision_is_fsdps_own() -> None:
    ready = build(
        tiny_job(), Plan(precision="bf16-mixed", shard="zero3"), device="cpu", world_size=2, initialise=True
    )
    try:
        inside: set[torch.dtype] = set()
        layer: Any = model.layers(ready.model)[0]
        layer.register_forward_pre_hook(lambda module, arguments: inside.add(module.mlp.up_proj.weight.dtype))
        ready.micro_batch(ready.next_batch())
        assert ready.step.autocast_dtype is None
        assert {p.dtype for p in ready.model.parameters()} == {torch.float32}
        assert inside == {torch.bfloat16}
        assert {p.grad.dtype for p in ready.model.parameters() if p.grad is not None} == {torch.float32}
    finally:
        ready.close()


def test_sharded_adapters_start_as_peft_starts_them() -> None:
    pytest.importorskip("peft")
    plan = Plan(precision="fp32", shard="zero3")
    ready = build(tiny_job(method="lora"), plan, device="cpu", world_size=2, initialise=True)
    try:
        local = {name: p.to_local() for name, p in ready.model.named_parameters() if "lora_" in name}  # type: ignore
        assert all((values == 0).all() == ("lora_B" in name) for name, values in local.items() if values.numel())
        assert local
    finally:
        ready.close()


@pytest.mark.parametrize(("shard", "kept"), [("zero2", True), ("zero3", False)])
def test_zero2_keeps_layers_gathered(shard: str, kept: bool) -> None:
    ready = build(tiny_job(), Plan(precision="fp32", shard=shard), device="cpu", world_size=2, initialise=True)
    try:
        loss = model.loss_of(ready.model(**ready.next_batch()))
        weight = model.layers(ready.model)[0].mlp.up_proj.weight  # type: ignore[union-attr]
        assert (type(weight) is torch.nn.Parameter) == kept  # sharded parameters are DTensors
        loss.backward()
    finally:
        ready.close()
