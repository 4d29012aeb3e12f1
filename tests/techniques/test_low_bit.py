"""States of low-bit optimizers, counted; main weights in fp32; clipping."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from networks import one_thread, tiny_job  # noqa: F401
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.optimizers import find_optimizer
from tonnage.plans import Plan
from tonnage.step.main_weights import MainOptimizer
from tonnage.step.step import ReadyStep
from tonnage.techniques import build, optimizers
from tonnage.trainers import engine_of
from tonnage.trainers.hf_trainer import run as hf_trainer

BIG, SMALL = 64 * 128, 32  # elements: at least 4096 and whole blocks, and too few
MAPS = 2 * 256 * 4  # bitsandbytes' two tables of 256 fp32, shared by all parameters


def ready(plan: Plan) -> ReadyStep:
    torch.manual_seed(0)
    return build(tiny_job(), plan, device="cpu", initialise=True)


@pytest.fixture
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's update as it is written: the states are the same, and nothing waits for a compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def state_bytes(value: str, dtype: torch.dtype) -> int:
    """Bytes of all distinct state tensors of a matrix and a vector, without counters of steps."""
    row = find_optimizer(value)
    pytest.importorskip(row.library)
    parameters = [nn.Parameter(torch.ones(64, 128, dtype=dtype)), nn.Parameter(torch.ones(SMALL, dtype=dtype))]
    optimizer = optimizers.make(row, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = {id(t): t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)}
    return sum(plain_bytes(tensor) for tensor in found.values() if tensor.ndim)


def plain_bytes(tensor: Any) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(plain_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "big", "maps"),
    [
        ("adamw-8bit", 2 * (BIG + 4 * BIG // 256), MAPS),
        ("paged-adamw-8bit", 2 * (BIG + 4 * BIG // 256), MAPS),
        ("paged-adamw", 2 * 4 * BIG, 0),
        ("lion", 4 * BIG, 0),
        ("lion-8bit", BIG + 4 * BIG // 256, MAPS // 2),
    ],
)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_states_of_bitsandbytes(value: str, big: int, maps: int, dtype: torch.dtype) -> None:
    row = find_optimizer(value)
    assert row.state_bytes(BIG, dtype.itemsize) == big
    small = row.moments * 4 * SMALL  # few elements stay fp32 whatever the dtype
    assert state_bytes(value, dtype) == big + maps + small


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "big", "tables"),
    [
        ("adamw-8bit-ao", 2 * (BIG + 4 * BIG // 256), 2 * 256 * 4),
        ("adamw-4bit", 2 * (BIG // 2 + 4 * BIG // 128), 2 * 16 * 4),
        ("adamw-fp8-ao", 2 * (BIG + 4 * BIG // 256), 0),
    ],
)
def test_states_of_torchao(value: str, big: int, tables: int, dtype: torch.dtype) -> None:
    """Each compressed state has a table of its own; what is not compressed has the parameter's dtype."""
    row = find_optimizer(value)
    assert row.state_bytes(BIG, dtype.itemsize) == big
    assert state_bytes(value, dtype) == big + tables + row.moments * dtype.itemsize * SMALL


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "lion"])
def test_a_step_changes_the_weights(optimizer: str) -> None:
    pytest.importorskip("bitsandbytes")
    made = ready(Plan(precision="fp32", optimizer=optimizer))
    before = [p.detach().clone() for p in made.model.parameters()]
    made.run(2)
    assert all(not torch.equal(p, old) for p, old in zip(made.model.parameters(), before, strict=True))


def test_megatron_takes_18_bytes_a_parameter() -> None:
    made = ready(Plan(precision="megatron-bf16"))
    made.run(1)
    main = made.optimizer
    assert isinstance(main, MainOptimizer)
    count = sum(p.numel() for p in made.model.parameters())
    kept = [*made.model.parameters(), *main.param_groups[0]["params"], main._gradients]
    states = [t for state in main.state.values() for name, t in state.items() if name != "step"]
    assert sum(tensor.nbytes for tensor in [*kept, *states]) == 18 * count
    assert all(p.grad is None for p in made.model.parameters())


def test_megatron_steps_as_adamw_does_on_fp32_copies() -> None:
    made, plain = ready(Plan(precision="megatron-bf16")), ready(Plan(precision="bf16-true"))
    copies = [nn.Parameter(p.detach().float()) for p in plain.model.parameters()]
    by_hand = torch.optim.AdamW(copies, lr=1e-4)
    for _ in range(2):
        batch = plain.next_batch()
        plain.micro_batch(batch)
        for p, copy in zip(plain.model.parameters(), copies, strict=True):
            copy.grad, p.grad = p.grad.float(), None  # type: ignore[union-attr]
        by_hand.step()
        for p, copy in zip(plain.model.parameters(), copies, strict=True):
            p.data.copy_(copy.data)
        made.micro_batch(batch)
        made.optimizer.step()
        made.optimizer.zero_grad()
    for ours, theirs in zip(made.optimizer.param_groups[0]["params"], copies, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for ours, theirs in zip(made.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "megatron-bf16"])
def test_gradients_are_clipped_before_the_step(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ready(Plan(precision=precision, clip_grad_norm=1))
    made.micro_batch(made.next_batch())
    parameters = [p for group in made.optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.fill_(1000.0)
    made._clip_gradients()
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    assert 0.9 < norm.item() < 1.0001


@pytest.mark.parametrize("engine", ["tonnage", "accelerate", "hf-trainer", "trl"])
def test_what_no_package_mends_is_said_first(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export is for another machine, where the package may be."""
    for module in (optimizers, hf_trainer):
        for name in ("find_spec", "find_version"):
            monkeypatch.setattr(module, name, lambda package: None, raising=False)
    plan = Plan(engine=engine, optimizer="adamw-8bit", shard="zero3")
    job, cluster = tiny_job("llama"), parse_cluster("8xh100-80gb")
    refusal = engine_of(plan).accepts(Case(job, plan, cluster))
    assert refusal is not None
    assert not refusal.is_of_here
    assert refusal.technique == "optimizer=adamw-8bit"
    missing = engine_of(plan).accepts(Case(job, replace(plan, shard="ddp"), cluster))
    assert missing is not None
    assert missing.instead == "pip install bitsandbytes"
