"""`tonnage.apply`: what it changes, what it refuses, and that nothing of it is left after `unapply`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers import AutoModelForCausalLM

import tonnage
from networks import one_thread  # noqa: F401
from real_text import batches, network, pairs
from tonnage import Job, Plan, TonnageError
from tonnage.errors import UsageError
from tonnage.train import checks
from tonnage.train.states import leaves

RATE = {"lr": 0.01}
PROMPT = torch.tensor([[70, 111, 114]])

CHANGED: dict[str, dict[str, Any]] = {
    "checkpointing": {"checkpointing": "selective", "loss": "chunked"},
    "budget": {"checkpointing": "budget=300KiB", "loss": "fused"},
    "attention-module": {"checkpointing": "attention-module", "activation_offload": "cpu"},
    "sqrt": {"checkpointing": "sqrt", "attention": "eager"},
    "offload": {"activation_offload": "cpu-streamed", "optimizer_offload": "cpu=0.5"},
    "in backward": {"optimizer_in_backward": True},
    "ddp": {"shard": "ddp"},
    "zero1": {"shard": "zero1"},
    "zero2": {"shard": "zero2", "checkpointing": "full"},
    "zero3": {"shard": "zero3", "loss": "chunked"},
    "parameters on the host": {"shard": "zero3", "param_offload": "cpu"},
}


@pytest.fixture(autouse=True)
def alone() -> Any:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def group(plan: Plan) -> None:
    """Give plans that shard a group of one process."""
    if plan.shard != "none" and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def apply(model: Any = None, updates: Any = RATE, job: Job | None = None, **choices: Any) -> Any:
    plan = Plan(**{"precision": "fp32", **choices})
    group(plan)
    return tonnage.apply(plan, network() if model is None else model, updates, job=job)


def generated(model: Any) -> torch.Tensor:
    return model.generate(PROMPT, max_new_tokens=8, do_sample=False, pad_token_id=0)


def attributes(model: nn.Module) -> list[Any]:
    """Return what every module holds besides the values of its weights."""
    inner = ("_parameters", "_buffers", "_modules")
    return [
        (type(module), {n: v for n, v in vars(module).items() if n not in inner}, list(module._parameters))
        for module in model.modules()
    ]


@pytest.mark.parametrize("name", CHANGED)
def test_nothing_is_left_after_unapply(name: str) -> None:
    model = network(tie_word_embeddings=True)
    model.train(False)
    before, parameters, configuration = attributes(model), list(model.parameters()), model.config.to_dict()
    trainable = apply(model, **CHANGED[name])
    assert all(effect.took_effect for effect in trainable.took_effect()), trainable.took_effect()
    [step] = batches(1)
    trainable.step(step)
    assert trainable.unapply() is model
    assert attributes(model) == before
    assert model.config.to_dict() == configuration
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(not p._post_accumulate_grad_hooks and p.grad is None for p in parameters)  # type: ignore[attr-defined]
    again = network(tie_word_embeddings=True)
    again.load_state_dict(model.state_dict())
    assert torch.equal(generated(model), generated(again.eval()))
    with pytest.raises(UsageError, match="no longer applied"):
        trainable.step(step)
    trainable = apply(model, **CHANGED[name])  # a second time
    assert trainable.step(step).loss < 10


@pytest.mark.parametrize("checkpointing", ["sqrt", "budget=1MiB"])
def test_decoders_with_a_configuration_of_their_own_keep_no_cache(checkpointing: str) -> None:
    """T5's decoder has one; layers that run again would find a filled cache."""
    model, rows = pairs()
    trainable = apply(model, checkpointing=checkpointing)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    for _ in range(2):
        assert not trainable.step([batch]).skipped
    assert not trainable.model.decoder.config.use_cache
    assert trainable.unapply().decoder.config.use_cache


@pytest.mark.parametrize("choices", [{}, {"shard": "zero3", "checkpointing": "full"}, {"loss": "fused"}])
def test_saved_networks_load_as_they_were_made(choices: dict[str, Any], tmp_path: Path) -> None:
    model = network(tie_word_embeddings=True)
    assert model.config.use_cache
    trainable = apply(model, **choices)
    [step] = batches(1)
    trainable.step(step)
    trainable.save_pretrained(tmp_path)
    assert not model.config.use_cache  # it goes on training
    trainable.step(step)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = apply(**choices, model=network(tie_word_embeddings=True))
    expected.step(step)
    assert loaded.config.use_cache
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    for key, weights in expected.unapply().state_dict().items():
        assert torch.equal(loaded.state_dict()[key], weights), key


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = apply()

    def fail(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(trainable.model), "save_pretrained", fail)
    with pytest.raises(TonnageError, match="cannot be written: No space left on device"):
        trainable.save_pretrained(tmp_path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(TonnageError, match="file is a file; name a folder"):
        trainable.save_pretrained(tmp_path / "file")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_limit_that_no_norm_reaches_measures_it_and_changes_nothing(optimizer: str) -> None:
    trained, norms = [], []
    for limit in (None, 1e9):
        trainable = tonnage.apply(Plan(precision="fp32", optimizer=optimizer, clip_grad_norm=limit), network(), RATE)
        norms.append([trainable.step(step).gradient_norm for step in batches(3)])
        trained.append(trainable.unapply().state_dict())
    assert norms[0] == [None] * 3
    assert all(norm is not None and 0 < norm < 100 for norm in norms[1])
    assert all(torch.equal(trained[0][name], weights) for name, weights in trained[1].items())


@pytest.mark.parametrize("own", [None, "cuda"])
def test_a_save_does_not_let_deepspeed_look_for_cards(
    own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers imports it in each save, and it warns on stderr that it found none."""
    trainable, seen = apply(), []
    kind = type(trainable.model)
    monkeypatch.setattr(kind, "save_pretrained", lambda *_, **__: seen.append(os.environ.get("DS_ACCELERATOR")))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if own is not None:
        monkeypatch.setenv("DS_ACCELERATOR", own)
    trainable.save_pretrained(tmp_path)
    assert seen == [own or "cpu"]
    assert os.environ.get("DS_ACCELERATOR") == own


def test_adapters_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainable = apply(job=Job(method="lora", lora_rank=4), checkpointing="full")
    for step in batches(2):
        trainable.step(step)
    trainable.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").is_file()
    loaded = peft.PeftModel.from_pretrained(network(), tmp_path)
    trained = dict(trainable.model.named_parameters())
    assert any((p != 0).any() for name, p in trained.items() if "lora_B" in name)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[name]), name
    base = trainable.unapply()
    assert all(
        torch.equal(p, q) and p.requires_grad for p, q in zip(base.parameters(), network().parameters(), strict=True)
    )


@pytest.mark.parametrize("shard", ["none", "zero3"])
def test_a_users_adapters_keep_their_values_and_dtypes(shard: str) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(network(torch.bfloat16), settings)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = apply(model, {"lr": 0.0}, precision="bf16-mixed", shard=shard)
    [step] = batches(1)
    trainable.step(step)
    assert trainable.unapply() is model
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        assert torch.equal(parameter, start[name]), name


OPTIMIZERS: tuple[dict[str, Any], ...] = (
    *(
        {"optimizer": name}
        for name in ("adamw", "adamw-loop", "adamw-fused", "sgd", "sgd-plain", "adafactor", "muon")
    ),
    *({"optimizer_offload": place} for place in ("cpu", "cpu=0.5", "nvme")),
    *({"optimizer_in_backward": True, "shard": shard} for shard in ("none", "zero3")),
    {"optimizer_in_backward": True, "clip_grad_norm": 1.0},
    *({"shard": shard} for shard in ("zero1", "zero2", "zero3")),
    {"precision": "megatron-bf16"},
)


@pytest.mark.parametrize("choices", OPTIMIZERS, ids=lambda choices: " ".join(map(str, choices.values())))
def test_a_schedule_at_zero_moves_no_weight(choices: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if "precision" in choices else torch.float32
    trainable = apply(network(dtype), **choices)
    [first, second, third] = batches(3)
    assert trainable.step(first).learning_rate == RATE["lr"]
    schedules = [LambdaLR(optimizer, lambda step: 1.0 if step else 0.0) for optimizer in trainable.optimizers]
    before = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in trainable.model.parameters()]
    assert trainable.step(second).learning_rate == 0
    after = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in trainable.model.parameters()]
    assert all(map(torch.equal, before, after))
    for schedule in schedules:
        schedule.step()
    assert trainable.step(third).learning_rate == RATE["lr"]
    moved = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in trainable.model.parameters()]
    assert not all(map(torch.equal, after, moved))


@pytest.mark.parametrize(
    "choices",
    [choices for choices in OPTIMIZERS if choices.get("optimizer") != "adafactor"],  # which has no momentum
    ids=lambda choices: " ".join(map(str, choices.values())),
)
def test_a_schedule_of_momentum_reaches_the_optimizer(choices: dict[str, Any]) -> None:
    """OneCycleLR also looks for betas or momentum among an optimizer's defaults."""
    trainable = apply(network(torch.bfloat16 if "precision" in choices else torch.float32), **choices)
    schedules = [OneCycleLR(optimizer, max_lr=0.1, total_steps=9) for optimizer in trainable.optimizers]
    [step] = batches(1)
    trainable.step(step)
    for schedule in schedules:
        schedule.step()
    trainable.step(step)
    groups = [group for _, optimizer, _ in leaves(trainable.ready) for group in optimizer.param_groups]
    assert all((group["betas"][0] if "betas" in group else group["momentum"]) < 0.95 for group in groups)


def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices alone."""
    matrices, rest = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


@pytest.mark.parametrize(
    "choices", [{}, {"optimizer_in_backward": True}, {"optimizer_offload": "cpu=0.5"}, {"shard": "zero3"}], ids=str
)
def test_a_factory_makes_groups(choices: dict[str, Any]) -> None:
    expected = network()
    optimizer = grouped(list(expected.parameters()))
    trainable = apply(updates=grouped, **choices)
    for [batch] in batches(2):
        expected(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trainable.step([batch])
    assert {group["weight_decay"] for group in trainable.optimizers[0].param_groups} == {0.5, 0.0}
    for (name, ours), theirs in zip(trainable.unapply().named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=name)


def test_gradients_that_overflow_skip_the_step() -> None:
    trainable = apply(precision="fp16-mixed")
    [step] = batches(1)
    trainable.ready.scaler._growth_interval, trainable.ready.scaler._init_scale = 10**9, 2.0**60
    assert trainable.step(step).skipped
    assert trainable.ready.scaler.get_scale() == 2.0**59
    assert all(torch.equal(p, q) for p, q in zip(trainable.model.parameters(), network().parameters(), strict=True))


class Plain(nn.Module):
    """A module without repeated layers that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.embed(input_ids)).flatten(0, 1), labels.flatten())


def test_any_module_that_returns_a_loss_is_trained() -> None:
    trainable = apply(Plain(), {"lr": 0.1})
    losses = [trainable.step(step).loss for step in batches(1, 2) * 5]
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(UsageError, match="state_dict"):
        trainable.save_pretrained("somewhere")


PLAN_FILE = """schema_version = 1
model = "elsewhere"
gpu = "{gpu}"
[job]
seq_len = 64
[plan]
precision = "fp32"
checkpointing = "full"
"""


def test_a_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN_FILE.format(gpu="cpu"))
    trainable = tonnage.apply(path, network(), RATE)
    assert [effect.planned for effect in trainable.took_effect() if effect.option == "checkpointing"] == ["full"]
    for gpu in ("h100-80gb", "t4"):
        path.write_text(PLAN_FILE.format(gpu=gpu))
        with pytest.warns(UserWarning, match=f"for {gpu}, and this machine has no GPU: its memory and seconds"):
            tonnage.apply(path, network(), RATE)
    path.write_text(PLAN_FILE.format(gpu="2xh100-80gb"))
    with pytest.raises(UsageError, match=r"for 2 GPUs, and this is a single process; start it with torchrun"):
        tonnage.apply(path, network(), RATE)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(UsageError, match=r"for 2 GPUs, and the process group has 1 rank"):
        tonnage.apply(path, network(), RATE)


def test_a_plan_for_another_network_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    config = network().config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 2 * config["hidden_size"]}))
    text = PLAN_FILE.format(gpu="cpu")
    model = next(line for line in text.splitlines() if line.startswith("model"))
    path.write_text(text.replace(model, f'model = "{tmp_path / "config.json"}"'))
    with pytest.raises(UsageError, match=r"the model is another: hidden_size is \d+ and not \d+"):
        tonnage.apply(path, network(), RATE)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(UsageError, match="plan is a dict; give a Plan or the path of a plan file"):
        tonnage.apply({"shard": "ddp"}, network(), RATE)  # type: ignore[arg-type]


def test_a_prediction_stands_beside_what_is_measured() -> None:
    predicted = tonnage.apply(Plan(precision="fp32"), network(), RATE).predicted()
    assert (predicted.allocated_bytes or 0) > 0
    with pytest.raises(UsageError, match="Plain has no configuration"):
        tonnage.apply(Plan(precision="fp32"), Plain(), RATE).predicted()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no torchrun": ({"shard": "zero3"}, "started without torchrun"),
    "fp16-true": ({"precision": "fp16-true"}, "fp16-true cannot train all weights"),
    "no layers": ({"checkpointing": "full", "model": Plain()}, "no ModuleList of equal layers"),
    "a loss for no head": ({"loss": "chunked", "model": Plain()}, "factory's network is not known"),
    "files": ({"shard": "zero3", "param_offload": "nvme"}, "FSDP2 keeps parameters on the host, not in files"),
    "stages of none": ({"pp": 2}, "started without torchrun; .* or choose pp 1"),
    "experts of none": ({"ep": 2, "shard": "zero3"}, "started without torchrun"),
    "one process of two": ({"tp": 2}, "started without torchrun; .* or choose tp 1"),
    "qlora": ({"job": Job(method="qlora")}, "none are quantized; load it with"),
    "engine": ({"engine": "hf-trainer"}, "a loop of its own"),
    "dtype": ({"precision": "bf16-true"}, "weights are float32, and under bf16-true .* bfloat16"),
    "meta": ({"model": network().to("meta")}, "meta device"),
    "a class": ({"model": "gpt2"}, "gpt2 does not exist; give a model's folder"),
    "nothing to train": ({"model": network().requires_grad_(False)}, "requires a gradient"),
    "unknown hyperparameter": ({"optimizer": {"rate": 1}}, "no hyperparameter 'rate'; possible: lr"),
    "momentum": ({"optimizer": {"momentum": 0.9}}, "adamw has no hyperparameter 'momentum'"),
    "negative": ({"optimizer": {"lr": -1}}, "must be a number of at least 0"),
    "betas": ({"optimizer": {"betas": 0.9}}, "needs two numbers"),
    "too large": ({"optimizer": {"betas": (0.9, 1.5)}}, "refuses its hyperparameters"),
    "another optimizer": ({"optimizer": lambda p: torch.optim.SGD(p, lr=1)}, "made a SGD, .* torch.optim.AdamW"),
    "left out": ({"optimizer": lambda p: torch.optim.AdamW(p[1:])}, "left out 1 of"),
    "no optimizer": ({"optimizer": 3}, "optimizer is a int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_leave_the_network_as_it_was(name: str) -> None:
    choices, message = REFUSED[name]
    model = choices.get("model", network())
    before = attributes(model) if isinstance(model, nn.Module) else []
    others = {name: value for name, value in choices.items() if name not in ("model", "optimizer", "job")}
    with pytest.raises(TonnageError, match=message) as caught:
        tonnage.apply(
            Plan(**{"precision": "fp32", **others}), model, choices.get("optimizer", RATE), job=choices.get("job")
        )
    assert "\n" not in str(caught.value)
    assert not isinstance(model, nn.Module) or attributes(model) == before


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"optimizer": "adafactor", "shard": "zero3"}, "Adafactor fails on FSDP2"),
        ({"checkpointing": "sqrt", "shard": "zero3"}, "FSDP2 gathers"),
        ({"shard": "ddp", "optimizer_in_backward": True}, "DDP averages gradients"),
        ({"attention": "efficient"}, "a kernel of GPUs, and the CPU has none like it"),
        ({"attention": "flash", "precision": "bf16-mixed"}, "a kernel of GPUs, and the CPU has none like it"),
    ],
)
def test_what_techniques_refuse(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        apply(**choices)


def test_a_failure_on_the_way_leaves_weights_and_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = network(), generated(network().eval())
    before = attributes(model)

    def fail(parameters: list[Any]) -> Any:
        raise RuntimeError("no memory for states")

    plan = Plan(precision="fp32", shard="zero3", checkpointing="full", loss="chunked")
    group(plan)
    with pytest.raises(RuntimeError, match="no memory"):
        tonnage.apply(plan, model, fail)
    assert attributes(model) == before
    assert torch.equal(generated(model.eval()), expected)


def test_settings_without_effect_are_seen() -> None:
    trainable = apply(checkpointing="full")
    trainable.model.gradient_checkpointing_disable()
    [effect] = [effect for effect in trainable.took_effect() if effect.option == "checkpointing"]
    assert (effect.found, effect.took_effect) == ("0 of 3 layers", False)


def test_torch_is_imported_when_it_is_needed() -> None:
    code = "import sys, tonnage; tonnage.apply; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_is_loaded_as_the_plan_wants_it(tmp_path: Path) -> None:
    network().save_pretrained(tmp_path)
    trainable = tonnage.apply(Plan(precision="bf16-true"), tmp_path, {"lr": 1e-3})
    assert {parameter.dtype for parameter in trainable.model.parameters()} == {torch.bfloat16}
    assert trainable.step(batches(1)[0]).tokens > 0


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    network().config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="has no weights"):
        tonnage.apply(Plan(precision="fp32"), tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        tonnage.apply(Plan(precision="fp32"), tmp_path / "nowhere")


def test_auto_without_a_card_is_refused() -> None:
    with pytest.raises(UsageError, match="this machine's GPUs, and it has none; give a Plan"):
        tonnage.apply("auto", network())


def test_auto_takes_the_fastest_plan_that_fits(worker: Any) -> None:
    from tonnage.catalog.devices import parse_cluster
    from tonnage.train import choosing

    job = Job(seq_len=32, micro_batch=2)
    assert choosing.choose(network(torch.bfloat16), job, parse_cluster("a100-40gb")).precision == "bf16-true"


TOKENS = torch.zeros(1, 8, dtype=torch.long)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
NOT_FOR_STAGES: dict[str, tuple[list[dict[str, torch.Tensor]], str]] = {
    "too few": ([BATCH], "1 micro-batch, fewer than stages; choose grad-accum 2"),
    "another length": ([BATCH, {"input_ids": TOKENS[:, 1:], "labels": TOKENS[:, 1:]}], "have one shape, and these"),
    "another input": ([BATCH, {**BATCH, "attention_mask": TOKENS}], "have one shape, and these"),
    "no labels": ([{"input_ids": TOKENS}] * 2, "the micro-batches have no labels"),
}


@pytest.mark.parametrize("name", NOT_FOR_STAGES)
def test_micro_batches_that_cannot_pass_through_stages_are_refused(name: str) -> None:
    given, message = NOT_FOR_STAGES[name]
    checks.check_micro_batches(Plan(pp=2), [BATCH, BATCH])
    with pytest.raises(UsageError, match=message):
        checks.check_micro_batches(Plan(pp=2), given)
