"""Five steps on real text under each plan against the same loop in plain PyTorch, on one process."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tonnage
from networks import one_thread  # noqa: F401
from real_text import batches, network
from tonnage import Job, Plan
from tonnage.errors import UsageError
from tonnage.techniques import activation_offload, chunked_loss, disk, fused_loss
from tonnage.train.trainable import StepResult, Trainable

STEPS = 5
EXACT = 0.0
SUMMED = 1e-6
"""fp32: the loss is summed slice by slice, in another order than by one kernel."""

CAST = 2e-3
"""bf16: one product for each slice rounds apart from one product for all; a weight moves by 5e-3 in five steps."""

PLANS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, EXACT),
    "fp32, clipped": ({"clip_grad_norm": 0.5}, EXACT),
    "bf16-mixed": ({"precision": "bf16-mixed"}, EXACT),
    "fp16-mixed, clipped": ({"precision": "fp16-mixed", "clip_grad_norm": 0.5}, EXACT),
    "bf16-true": ({"precision": "bf16-true"}, EXACT),
    "fp8": ({"precision": "fp8"}, EXACT),
    **{
        f"checkpointing {kind}": ({"checkpointing": kind}, EXACT)
        for kind in (
            *("full", "full-reentrant", "every-2", "sqrt", "selective", "attention", "attention-module"),
            "budget=300KiB",
        )
    },
    **{f"activations {place}": ({"activation_offload": place}, EXACT) for place in ("cpu", "cpu-streamed", "nvme")},
    **{
        f"{precision}, loss {kind}": ({"precision": precision, "loss": kind}, tolerance)
        for precision, tolerance in (("bf16-mixed", CAST), ("bf16-true", CAST))
        for kind in ("chunked", "fused")
    },
    "activations cpu-streamed, checkpointing full": (
        {"activation_offload": "cpu-streamed", "checkpointing": "full"},
        EXACT,
    ),
    **{f"attention {kind}": ({"attention": kind}, SUMMED) for kind in ("eager", "math")},
    **{f"loss {kind}": ({"loss": kind}, SUMMED) for kind in ("chunked", "fused", "torch")},
    **{f"outputs {kind}": ({"outputs": kind}, EXACT) for kind in ("step", "loop")},
    **{
        f"optimizer {name}": ({"optimizer": name}, EXACT)
        for name in ("adamw-loop", "adamw-foreach", "adamw-fused", "sgd", "sgd-plain", "adafactor", "muon")
    },
    **{
        f"optimizer states {place}": ({"optimizer_offload": place}, EXACT)
        for place in ("cpu", "cpu=0.5", "nvme", "nvme=0.5")
    },
    "optimizer in backward": ({"optimizer_in_backward": True}, EXACT),
    **{
        f"optimizer in backward, clipped, {name}": (
            {"optimizer_in_backward": True, "clip_grad_norm": 0.5, **choices},
            EXACT,
        )
        for name, choices in {
            "plain": {},
            "checkpointing": {"checkpointing": "selective", "activation_offload": "cpu-streamed"},
            "zero3": {"shard": "zero3"},
            "muon": {"optimizer": "muon"},
        }.items()
    },
    **{f"shard {name}": ({"shard": name}, EXACT) for name in ("ddp", "zero1", "zero2", "zero3")},
    "shard zero3, parameters cpu": ({"shard": "zero3", "param_offload": "cpu"}, EXACT),
}

RATES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "sgd-plain": {"lr": 0.1},
    "adafactor": {"lr": 0.01},
}
USUAL = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}


@pytest.fixture(autouse=True)
def alone() -> Any:
    """Give plans that shard a group of one process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tensors of a tiny network large enough to be sent to the host, and its tokens several slices."""
    for module in (activation_offload, disk):
        monkeypatch.setattr(module, "SMALL_BYTES", 1)
    for module in (chunked_loss, fused_loss):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 10)


def hyperparameters(plan: Plan) -> dict[str, Any]:
    return RATES.get(plan.optimizer, USUAL)


def applied(plan: Plan, micro_batches: int) -> tuple[list[StepResult], Trainable]:
    if plan.shard != "none" and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = network(torch.bfloat16 if plan.precision == "bf16-true" else torch.float32)
    trainable = tonnage.apply(plan, model, hyperparameters(plan))
    return [trainable.step(step) for step in batches(STEPS, micro_batches)], trainable


def optimizers_of(plan: Plan, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    given = hyperparameters(plan)
    if plan.optimizer == "muon":
        matrices = [p for layer in model.model.layers for p in layer.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
        muon = {name: value for name, value in given.items() if name != "betas"}
        return [torch.optim.Muon(matrices, **muon), torch.optim.AdamW(rest, **given)]
    made: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, momentum=0.9, **given),
        "sgd-plain": lambda p: torch.optim.SGD(p, **given),
        "adafactor": lambda p: torch.optim.Adafactor(p, **given),
        "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True, **given),
        "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True, **given),
    }
    return [made.get(plan.optimizer, lambda p: torch.optim.AdamW(p, **given))(model.parameters())]


def by_hand(plan: Plan, micro_batches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of the same training, written as people write it."""
    model = network(torch.bfloat16 if plan.precision == "bf16-true" else torch.float32)
    model.config.use_cache = False
    if plan.precision == "fp8":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model.model)
    optimizers = optimizers_of(plan, model)
    dtype = {"bf16-mixed": torch.bfloat16, "fp8": torch.bfloat16, "fp16-mixed": torch.float16}.get(plan.precision)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    for step in batches(STEPS, micro_batches):
        total = 0.0
        for batch in step:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = model(**batch).loss / micro_batches
            scaler.scale(loss).backward()
            total += loss.item()
        if plan.clip_grad_norm is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip_grad_norm)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        losses.append(total)
    return losses, model.state_dict()


@pytest.mark.parametrize("name", PLANS)
def test_equals_plain_pytorch(name: str) -> None:
    choices, tolerance = PLANS[name]
    if choices.get("precision") == "fp8":
        pytest.importorskip("torchao")
    plan = Plan(**{"precision": "fp32", **choices})
    micro_batches = 1 if plan.optimizer_in_backward else 2
    losses, weights = by_hand(plan, micro_batches)
    results, trainable = applied(plan, micro_batches)
    assert all(effect.took_effect for effect in trainable.took_effect()), trainable.took_effect()
    assert [result.loss for result in results] == pytest.approx(losses, rel=tolerance, abs=0)
    ours = trainable.unapply().state_dict()
    assert ours.keys() == weights.keys()
    start = network().to(ours["lm_head.weight"].dtype).state_dict()
    assert sum(not torch.equal(ours[key], start[key]) for key in ours) > len(ours) / 2  # in bf16 the norms stay at 1
    for key, expected in weights.items():
        torch.testing.assert_close(ours[key], expected, rtol=0, atol=tolerance, msg=key)


def test_adapters_are_trained_as_peft_trains_them() -> None:
    peft = pytest.importorskip("peft")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    job = Job(method="lora", lora_rank=4)
    torch.manual_seed(5)
    base = network()
    torch.manual_seed(5)
    expected = peft.get_peft_model(base, peft.LoraConfig(**settings))
    optimizer = torch.optim.AdamW([p for p in expected.parameters() if p.requires_grad], **USUAL)
    for [batch] in batches(STEPS):
        expected(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = network()
    torch.manual_seed(5)
    trainable = tonnage.apply(Plan(precision="fp32", checkpointing="full"), ours, USUAL, job=job)
    for step in batches(STEPS):
        assert math.isfinite(trainable.step(step).loss)
    trained = dict(expected.named_parameters())
    for name, parameter in trainable.model.named_parameters():
        assert torch.equal(parameter, trained[name]), name


@pytest.mark.parametrize("quant", ["nf4", "nf4-double"])
def test_adapters_beside_quantized_layers_are_trained_as_peft_trains_them(quant: str, tmp_path: Path) -> None:
    peft, _ = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    network(torch.bfloat16, hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    base = quantized(tmp_path, quant)
    prepared = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    torch.manual_seed(5)
    expected = peft.get_peft_model(prepared, peft.LoraConfig(**settings)).train()
    optimizer = torch.optim.AdamW([p for p in expected.parameters() if p.requires_grad], **USUAL)
    for [batch] in batches(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = expected(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = quantized(tmp_path, quant)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    torch.manual_seed(5)
    plan = Plan(precision="bf16-mixed", quant=quant, checkpointing="full")
    trainable = tonnage.apply(plan, ours, USUAL, job=Job(method="qlora", lora_rank=4))
    for step in batches(STEPS):
        assert math.isfinite(trainable.step(step).loss)
    assert all(effect.took_effect for effect in trainable.took_effect()), trainable.took_effect()
    trained = dict(expected.named_parameters())
    for name, parameter in trainable.model.named_parameters():
        assert torch.equal(parameter, trained[name]), name
    trainable.save_pretrained(tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()
    after = trainable.unapply().state_dict()
    assert after.keys() == before.keys()
    assert all(
        after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in before.items()
    )


def quantized(folder: Path, quant: str) -> Any:
    """Return the saved network with bitsandbytes' linear layers."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    kind, _, double = quant.partition("-")
    options = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": bool(double)}
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **options)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
    )


@pytest.mark.parametrize(
    ("plan", "is_prepared", "is_narrow", "why"),
    [
        (Plan(precision="bf16-mixed"), True, False, ""),
        (
            Plan(precision="bf16-mixed"),
            False,
            False,
            "not quantized .* is bfloat16, .*call peft.prepare",
        ),
        (Plan(precision="bf16-mixed", unquantized_dtype="compute"), False, False, ""),
        (Plan(precision="bf16-mixed", unquantized_dtype="compute"), True, False, "is float32, .* leave out"),
        (Plan(precision="bf16-true", unquantized_dtype="compute"), False, True, ""),
        (Plan(precision="bf16-true", unquantized_dtype="compute"), False, False, "adapters are float32, .* bfloat16"),
    ],
)
def test_adapters_beside_quantized_layers_have_the_dtypes_of_the_plan(
    tmp_path: Path, plan: Plan, is_prepared: bool, is_narrow: bool, why: str
) -> None:
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    network(torch.bfloat16).save_pretrained(tmp_path)
    ours = quantized(tmp_path, "nf4")
    if is_prepared:
        ours = prepare_model_for_kbit_training(ours, use_gradient_checkpointing=False)
    ours = get_peft_model(ours, LoraConfig(r=4, target_modules="all-linear"), autocast_adapter_dtype=not is_narrow)
    with pytest.raises(UsageError, match=why) if why else nullcontext():
        tonnage.apply(plan, ours, USUAL, job=Job(method="qlora", lora_rank=4))


def test_a_users_adapters_in_another_dtype_than_the_plans_are_refused() -> None:
    from peft import LoraConfig, get_peft_model

    ours = get_peft_model(network(torch.bfloat16), LoraConfig(r=4, target_modules="all-linear"))
    job = Job(method="lora", lora_rank=4)
    with pytest.raises(UsageError, match=r"adapters are float32, and .* bfloat16; .* --weights-dtype fp32"):
        tonnage.apply(Plan(precision="bf16-true"), ours, USUAL, job=job)
    assert tonnage.apply(Plan(precision="bf16-true", weights_dtype="fp32"), ours, USUAL, job=job)


def test_layers_in_another_format_than_the_plans_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    network(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"21 in nf4 are quantized; load it with .*load_in_8bit=True"):
        tonnage.apply(Plan(precision="bf16-mixed", quant="int8"), quantized(tmp_path, "nf4"), USUAL)
    with pytest.raises(UsageError, match=r"none are quantized; load it with .*bnb_4bit_quant_type='nf4'"):
        tonnage.apply(Plan(precision="bf16-mixed"), network(torch.bfloat16), USUAL, job=Job(method="qlora"))
