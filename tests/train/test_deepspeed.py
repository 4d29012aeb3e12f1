"""Five steps by DeepSpeed's engine on one and two real processes (gloo) against plain PyTorch; saved and resumed.

DeepSpeed keeps its groups of ranks for the life of a process: its steps run in processes of their own.
"""

import dataclasses
import importlib.util
import json
import os
import pickle
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

import tonnage
from networks import one_thread  # noqa: F401
from real_ranks import run_ranks
from real_text import IGNORED, ROW, batches, network
from tonnage import Job, Plan
from tonnage.errors import OutOfDeviceMemory, UnreadableFile, UsageError
from tonnage.trainers import engine

pytest.importorskip("deepspeed")

STEPS, MICRO_BATCHES = 5, 4
SUMMED = 1e-6
"""fp32: gradients are summed in buckets, and over ranks, in another order."""

ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "zero2, states on the host": {"shard": "zero2", "optimizer_offload": "cpu", "clip_grad_norm": 0.3},
        "zero3, parameters on the host": {"shard": "zero3", "param_offload": "cpu", "clip_grad_norm": 0.3},
    },
    2: {
        "ddp": {"shard": "ddp"},
        "zero1": {"shard": "zero1"},
        "zero2": {"shard": "zero2", "clip_grad_norm": 0.3},
        "zero3": {"shard": "zero3", "clip_grad_norm": 0.3, "checkpointing": "full"},
        "zero3, parameters on the host": {"shard": "zero3", "param_offload": "cpu"},
    },
}


def steps() -> list[list[dict[str, torch.Tensor]]]:
    """Return the micro-batches of each step, first those of rank 0, with different numbers of labels."""
    made = batches(STEPS, MICRO_BATCHES)
    for step in made:
        step[0]["labels"][:, : ROW - 4] = IGNORED
        step[-1]["labels"].fill_(IGNORED)
    return made


def plain(choices: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of the same training, written as people write it."""
    model, losses = network(tie_word_embeddings=True), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in steps():
        counts = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in step]
        parts = []
        for batch, count in zip(step, counts, strict=True):
            if count:
                parts.append(model(**batch).loss / (sum(counts) / count))
                parts[-1].backward()
        if "clip_grad_norm" in choices:
            torch.nn.utils.clip_grad_norm_(model.parameters(), choices["clip_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses, model.state_dict()


def trained(choices: dict[str, Any], world: int, rank: int, folder: Path) -> tuple[list[float], Any, Any]:
    """Return losses, the weights of save_pretrained and those after `unapply`; all else is asserted."""
    given = network(tie_word_embeddings=True)
    before = {name: (value.dtype, value.shape) for name, value in given.state_dict().items()}
    each = MICRO_BATCHES // world
    plan, job = Plan(engine="deepspeed", precision="fp32", **choices), Job(grad_accum=each)
    trainable = tonnage.apply(plan, given, ADAMW, job=job)
    assert "DS_ACCELERATOR" not in os.environ, "processes that are started later get it"
    if world == 1 and "param_offload" in choices:
        fail_with_divided_weights(plan, job)
    mine = [step[rank * each :][:each] for step in steps()]
    results = [trainable.step(step) for step in mine[:3]]
    assert all(effect.took_effect for effect in trainable.took_effect()), trainable.took_effect()
    assert (results[0].gradient_norm is not None) == ("clip_grad_norm" in choices)
    saved = folder / "checkpoint"
    trainable.save(saved, {"step": 3})
    exchanging = {getattr(parameter, "ds_process_group", None) for parameter in given.parameters()} - {None}
    assert trainable.ready.group in (exchanging or {trainable.model.data_parallel_group}), "each takes NCCL's memory"
    refused = trainable.step(mine[0], lambda loss, norm: False)
    assert refused.skipped
    last = [trainable.step(step) for step in mine[3:]]
    trainable.forward_backward(mine[0][0], 0.5, last=False)
    trainable.forward_backward(mine[0][1], 0.5)
    assert trainable.optimizer_step()
    assert trainable.resume(saved) == {"step": 3}
    assert [trainable.step(step) for step in mine[3:]] == last
    assert trainable.evaluate(mine[0]).tokens == results[0].tokens
    if world == 1 and "param_offload" in choices:
        refuse_other_checkpoints(trainable, saved)
    trainable.save_pretrained(folder / "trained")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "trained").state_dict() if rank == 0 else {}
    assert trainable.unapply() is given
    assert "LOCAL_RANK" not in os.environ
    state = {name: value.clone() for name, value in given.state_dict().items()}
    assert {name: (value.dtype, value.shape) for name, value in state.items()} == before
    assert given(**mine[0][0]).logits.shape[-1] == 256
    return [result.loss for result in (*results, *last)], loaded, state


def fail_with_divided_weights(plan: Plan, job: Job) -> None:
    """Assert that memory that runs out in DeepSpeed's engine is said, with what became of the network."""
    given, shortage = network(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    said = r"\(CUDA out of memory. Tried to allocate 2.00 GiB\); load the network again"
    with (
        patch("tonnage.trainers.deepspeed.step.make", side_effect=shortage),
        pytest.raises(OutOfDeviceMemory, match=said),
    ):
        tonnage.apply(plan, given, job=job)
    with pytest.raises(UsageError, match="DeepSpeed has divided the network's weights"):
        tonnage.apply(plan, given, job=job)


def refuse_other_checkpoints(trainable: Any, saved: Path) -> None:
    """Assert that checkpoints of other ranks, damaged ones and such as would execute code are refused."""
    manifest = saved / "checkpoint.json"
    text = manifest.read_text()
    manifest.write_text(json.dumps({**json.loads(text), "ranks": 2}))
    with pytest.raises(UsageError, match="saved by 2 ranks, and here are 1: DeepSpeed resumes on as many"):
        trainable.resume(saved)
    file = sorted((saved / "states").glob("*.pt"))[0]
    torch.save({"module": print}, file)
    manifest.write_text(text)
    with pytest.raises(UnreadableFile, match="bytes, and"):
        trainable.resume(saved)
    parts = {name: part for name, part in json.loads(text)["files"].items() if not name.endswith(file.name)}
    manifest.write_text(json.dumps({**json.loads(text), "files": parts}))
    torch.save({"module": Executed()}, file)
    with pytest.raises(UnreadableFile, match="not executed"):
        trainable.resume(saved)


class Executed:
    """An object whose pickle calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (pickle.dumps(None),)


def adapters_added(folder: Path) -> tuple[list[float], list[float]]:
    """Return losses under adapters that the plan adds, and that of the network without them."""
    given, [[batch]] = network(), batches(1)
    alone = given(**batch).loss.item()
    job, plan = Job(method="lora", lora_rank=4), Plan(engine="deepspeed", precision="fp32", shard="zero3")
    trainable = tonnage.apply(dataclasses.replace(plan, optimizer_offload="cpu"), given, {"lr": 1e-2}, job=job)
    losses = [trainable.step([batch]).loss for _ in range(3)]
    for group in trainable.optimizers[0].param_groups:
        group["lr"] = 0.0
    assert trainable.step([batch]) == trainable.step([batch])
    with pytest.raises(UsageError, match="DeepSpeed has divided the network's weights"):
        tonnage.apply(plan, trainable.model)
    trainable.save_pretrained(folder / "adapters")
    assert (folder / "adapters" / "adapter_config.json").is_file()
    assert trainable.unapply()(**batch).loss.item() == pytest.approx(alone, rel=SUMMED)
    return losses, [alone]


def rank_main(rank: int, world: int, folder: str) -> None:
    found = {}
    for number, (name, choices) in enumerate(CASES[world].items()):
        shared = Path(folder) / str(number)
        shared.mkdir(exist_ok=True)
        found[name] = trained(choices, world, rank, shared)
    if world == 1 and importlib.util.find_spec("peft"):
        found["adapters"] = adapters_added(Path(folder))
    torch.save(found, Path(folder) / f"rank{rank}")


@cache
def in_processes(world: int) -> list[Any]:
    """Return what each rank has at the end of every case."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(rank_main, world, folder)
        return [torch.load(Path(folder) / f"rank{rank}", weights_only=False) for rank in range(world)]


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in CASES.items() for name in cases])
def test_deepspeed_trains_as_plain_pytorch(world: int, name: str) -> None:
    losses, expected = plain(CASES[world][name])
    (found, loaded, state), *others = (rank[name] for rank in in_processes(world))
    assert all(of_rank == found for of_rank, _, _ in others)
    assert found == pytest.approx(losses, rel=SUMMED)
    assert loaded.keys() == state.keys() == expected.keys()
    for key, weights in expected.items():
        assert torch.equal(loaded[key], state[key])
        torch.testing.assert_close(state[key], weights, rtol=0, atol=SUMMED, msg=key)


def test_adapters_that_the_plan_adds_begin_without_effect_and_learn() -> None:
    pytest.importorskip("peft")
    [first, second, third], [alone] = in_processes(1)[0]["adapters"]
    assert first == pytest.approx(alone, rel=SUMMED)
    assert third < second < first


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "pipeline": ({"pp": 2}, None, r"pp=2: tonnage does not run that \(deepspeed.pipe"),
    "loss": ({"loss": "chunked"}, None, r"loss=chunked.*choose loss plain or liger, or engine tonnage"),
    "parameters": ({"param_offload": "cpu", "shard": "zero2", "optimizer_offload": "cpu"}, None, "stage 3 only"),
    "function": ({}, torch.optim.AdamW, "give hyperparameters by name"),
    "fp16": ({"precision": "fp16-mixed"}, None, "does not compute in fp16 on cpu here"),
    "ranks": ({"shard": "zero3"}, None, "started without torchrun"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_deepspeed_cannot_do_is_refused_before_anything_changes(name: str, monkeypatch: Any) -> None:
    from deepspeed.accelerator import get_accelerator

    choices, optimizer, message = REFUSED[name]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: False)
    model = network()
    with pytest.raises(UsageError, match=message):
        tonnage.apply(Plan(engine="deepspeed", **{"precision": "fp32", **choices}), model, optimizer)
    assert model(**steps()[0][0]).loss.requires_grad


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: None)
    with pytest.raises(UsageError, match="package deepspeed is not installed; pip install deepspeed"):
        tonnage.apply(Plan(engine="deepspeed", precision="fp32"), network())


def test_operations_that_cannot_be_compiled_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, verbose: bool = False) -> None:
        raise RuntimeError("Unable to JIT load the async_io op.")

    monkeypatch.setattr("deepspeed.ops.op_builder.builder.OpBuilder.load", fail)
    plan = Plan(engine="deepspeed", precision="fp32", shard="zero3", optimizer_offload="nvme")
    with pytest.raises(UsageError, match="nvme needs an operation that DeepSpeed compiles, which takes libaio"):
        tonnage.apply(plan, network())
