"""Checkpoints: saving reads everything, and a resumed run has the states that a step would have made."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from networks import one_thread, tiny_job  # noqa: F401
from on_cpu import alone, ready  # noqa: F401
from tonnage.errors import CannotEstimate
from tonnage.step import checkpoints, events
from tonnage.step.step import ReadyStep


@pytest.mark.parametrize("how", ["full", "sharded"])
def test_saving_reads_every_parameter_and_state(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ready(tiny_job(save_checkpoint=how))
    made.run(1)
    moved = 0
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal moved
        moved += self.numel() if args == ("cpu",) else 0
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    checkpoints.save(made)
    buffers = sum(value.numel() for value in made.model.state_dict().values()) - made.parameters
    steps_counted = len(list(made.model.parameters()))
    assert moved == 3 * made.parameters + buffers + steps_counted


@pytest.mark.parametrize("how", ["full", "sharded"])
def test_optimizers_in_backward_of_a_divided_network_are_saved(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ready(tiny_job(save_checkpoint=how), shard="zero3", optimizer_in_backward=True)
    saved = 0
    leaves = checkpoints.tree_leaves

    def counted(tree: Any) -> Any:
        nonlocal saved
        found = leaves(tree)
        saved += sum(leaf.numel() for leaf in found if isinstance(leaf, torch.Tensor) and leaf.ndim)
        return found

    monkeypatch.setattr(checkpoints, "tree_leaves", counted)
    made.run(1)
    assert saved == 3 * made.parameters, "weights and both moments"


def test_of_states_that_are_divided_by_parameter_a_rank_saves_its_own() -> None:
    made = ready(tiny_job(save_checkpoint="sharded"), shard="zero1")
    for parameter in made.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.optimizer.step()
    saved = checkpoints._states_to_save(made.optimizer, whole=False)
    assert len(saved["state"]) == len(list(made.model.parameters()))
    with pytest.raises(CannotEstimate, match="choose save-checkpoint sharded"):
        checkpoints._states_to_save(made.optimizer, whole=True)


def shapes(made: ReadyStep) -> list[tuple[Any, ...]]:
    """Return class, shape, dtype and device of every tensor of the optimizers' states."""
    leaves = torch.utils._pytree.tree_leaves([one.state_dict() for one in made.optimizers])
    tensors = [getattr(leaf, "_local_tensor", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [(type(tensor), tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


_PLANS: tuple[dict[str, Any], ...] = (
    {"optimizer": "adamw"},
    {"optimizer": "adamw-fused"},
    {"optimizer": "sgd"},
    {"optimizer": "muon"},
    {"optimizer": "adafactor"},
    {"optimizer_in_backward": True},
    {"optimizer_offload": "cpu"},
    {"optimizer_offload": "cpu=0.5"},
    {"precision": "megatron-bf16"},
    {"precision": "megatron-bf16", "shard": "zero1"},
    {"shard": "zero3"},
    {"shard": "zero3", "optimizer": "muon"},
    {"shard": "zero3", "optimizer_in_backward": True},
)


@pytest.mark.parametrize("place", ["cpu", "gpu"])
@pytest.mark.parametrize("plan", _PLANS, ids=lambda plan: "-".join(map(str, plan.values())))
def test_resuming_brings_the_states_that_a_step_makes(plan: dict[str, Any], place: str) -> None:
    stepped = ready(tiny_job(), **plan)
    stepped.run(1)
    resumed = ready(tiny_job(resume=place), **plan)
    events.before_steps(resumed)
    assert shapes(resumed) == shapes(stepped)
    resumed.run(1)


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_states_in_fewer_bits_are_brought_as_they_are(package: str) -> None:
    pytest.importorskip(package)
    values = {"bitsandbytes": ("adamw-8bit", "lion"), "torchao": ("adamw-8bit-ao", "adamw-4bit")}[package]
    job = tiny_job()
    job = replace(job, model=replace(job.model, config={**job.model.config, "vocab_size": 4096}))
    for optimizer in values:
        resumed = ready(replace(job, resume="gpu"), optimizer=optimizer)
        events.before_steps(resumed)
        coded = [kind for kind, _, dtype, _ in shapes(resumed) if dtype == torch.uint8 or kind is not torch.Tensor]
        assert bool(coded) == (optimizer != "lion"), optimizer


@pytest.mark.parametrize("shard", ["none", "zero3"])
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_of_adapters_what_is_trained_is_in_the_checkpoint(
    place: str, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    resumed = ready(tiny_job(method="lora", resume=place), shard=shard)
    made, original = [0], checkpoints._empty_copy

    def counted(values: Any, place: torch.device, **options: Any) -> Any:
        found = original(values, place, **options)
        leaves = torch.utils._pytree.tree_leaves(found)
        made[0] += sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim)
        return found

    monkeypatch.setattr(checkpoints, "_empty_copy", counted)
    events.before_steps(resumed)
    assert made == [3 * resumed.trainable_parameters], "adapters and both moments"


def test_main_weights_are_in_the_checkpoint() -> None:
    saved = ready(tiny_job(), precision="megatron-bf16")
    saved.run(1)
    loaded = ready(tiny_job(), precision="megatron-bf16")
    loaded.optimizer.load_state_dict(deepcopy(saved.optimizer.state_dict()))
    pairs = zip(loaded.optimizer.param_groups[0]["params"], saved.optimizer.param_groups[0]["params"], strict=True)
    assert all(torch.equal(one, other) and one is not other for one, other in pairs)
    for one in (saved, loaded):
        one.optimizer.zero_grad()
        one.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), saved.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ({"optimizer_offload": "nvme"}, "optimizer-offload nvme has states in files"),
        ({"optimizer": "adamw-8bit", "shard": "zero1"}, "ZeroRedundancyOptimizer hands on the states"),
        ({"optimizer": "adamw-8bit-ao", "shard": "zero3"}, "torchao's adamw-8bit-ao cannot cut whole states"),
    ],
)
def test_what_stands_in_the_way_of_resuming_is_named(plan: dict[str, Any], named: str) -> None:
    package = {"adamw-8bit": "bitsandbytes", "adamw-8bit-ao": "torchao"}.get(plan.get("optimizer", ""))
    if package is not None:
        pytest.importorskip(package)
    with pytest.raises(CannotEstimate, match=f"not known here: .*{named}.*; leave resume out, or that"):
        events.before_steps(ready(tiny_job(resume="gpu"), **plan))
