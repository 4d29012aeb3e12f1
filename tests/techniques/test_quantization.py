"""QLoRA beside plain transformers, bitsandbytes and PEFT; float8 layers."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from networks import TINY, one_thread, tiny_job  # noqa: F401
from tonnage.case import Case
from tonnage.catalog.devices import find_device
from tonnage.cluster import Cluster
from tonnage.plans import Plan
from tonnage.step import model
from tonnage.step.step import ReadyStep
from tonnage.techniques import build, refusals

H100 = Cluster(device=find_device("h100-80gb"), gpus_per_node=8)
T4 = Cluster(device=find_device("t4"))
bitsandbytes = pytest.mark.skipif(
    not all(map(find_spec, ("bitsandbytes", "accelerate", "peft"))),
    reason="bitsandbytes, accelerate or peft is missing",
)
torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def ready(method: str, plan: Plan, name: str = "llama") -> ReadyStep:
    torch.manual_seed(0)
    return build(tiny_job(name, method=method), plan, device="cpu", initialise=True)


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.arange(48).reshape(2, 24)
    return {"input_ids": ids, "labels": ids}


def mlp(made: ReadyStep) -> Any:
    """Return the up projection of the first layer, 32 -> 48, without its adapter."""
    layer: Any = model.layers(made.model)[0]
    return layer.mlp.up_proj.base_layer


@bitsandbytes
class TestQlora:
    """transformers' loader, bitsandbytes' layers, PEFT's adapters, on the CPU."""

    @pytest.mark.parametrize("quant", ["nf4", "fp4-double", "int8"])
    @pytest.mark.parametrize("name", ["llama", "qwen3"])
    def test_is_what_a_script_does(self, quant: str, name: str, tmp_path: Path) -> None:
        made = ready("qlora", Plan(precision="bf16-true", quant=quant), name)
        theirs = scripted(quant, name, tmp_path)
        ours = {key: (p.dtype, p.shape, p.requires_grad) for key, p in made.model.named_parameters()}
        assert ours == {key: (p.dtype, p.shape, p.requires_grad) for key, p in theirs.named_parameters()}
        torch.testing.assert_close(model.loss_of(made.model(**tokens())), model.loss_of(theirs(**tokens())))

    def test_bytes_of_a_layer(self) -> None:
        elements, blocks = 32 * 48, 32 * 48 // 64
        plain = mlp(ready("qlora", Plan(quant="nf4"))).weight
        assert plain.nbytes == elements // 2
        assert plain.quant_state.absmax.nbytes == 4 * blocks
        double = mlp(ready("qlora", Plan(quant="nf4-double"))).weight
        assert double.nbytes == elements // 2
        assert double.quant_state.absmax.nbytes == blocks
        assert double.quant_state.state2.absmax.nbytes == 4  # one block of 256
        eight = mlp(ready("qlora", Plan(quant="int8"))).weight
        assert (eight.nbytes, eight.SCB.nbytes) == (elements, 4 * 48)

    @pytest.mark.parametrize(
        ("plan", "rest", "adapters"),
        [
            (Plan(precision="bf16-mixed"), torch.float32, torch.float32),
            (Plan(precision="bf16-true"), torch.float32, torch.float32),
            (Plan(precision="bf16-mixed", unquantized_dtype="compute"), torch.bfloat16, torch.float32),
            (Plan(precision="bf16-true", unquantized_dtype="compute"), torch.bfloat16, torch.bfloat16),
        ],
    )
    def test_dtypes_of_the_rest(self, plan: Plan, rest: torch.dtype, adapters: torch.dtype) -> None:
        made = ready("qlora", plan)
        made.run(1)
        frozen = [p for p in made.model.parameters() if not p.requires_grad]
        assert {p.dtype for p in frozen} == {torch.uint8, rest}
        assert {p.dtype for p in made.model.parameters() if p.requires_grad} == {adapters}

    def test_only_adapters_are_trained_and_packed_weights_count_in_full(self) -> None:
        made, lora = ready("qlora", Plan()), ready("lora", Plan())
        assert (made.parameters, made.trainable_parameters) == (lora.parameters, lora.trainable_parameters)

    def test_checkpointing_changes_no_gradient(self) -> None:
        found = []
        for checkpointing in ("none", "full"):
            made = ready("qlora", Plan(precision="fp32", checkpointing=checkpointing))
            made.micro_batch(tokens())
            found.append([p.grad for p in made.model.parameters() if p.grad is not None])
        torch.testing.assert_close(found[0], found[1])

    @pytest.mark.parametrize("quant", ["nf4", "fp4-double"])
    def test_divided_weights_give_the_same_gradients(self, quant: str) -> None:
        found = []
        for shard in ("none", "zero3"):
            made = ready("qlora", Plan(precision="fp32", quant=quant, shard=shard))
            made.micro_batch(tokens())
            gradients = (p.grad for p in made.model.parameters() if p.grad is not None)
            found.append([getattr(gradient, "_local_tensor", gradient) for gradient in gradients])
            made.close()
        assert len(found[0]) == 2 * 7 * 3
        torch.testing.assert_close(found[0], found[1])


def scripted(quant: str, name: str, folder: Path) -> nn.Module:
    """Return the same network from files, quantized and adapted as in a user's script."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.manual_seed(0)
    plain = build(tiny_job(name), Plan(precision="bf16-true"), device="cpu", initialise=True).model
    plain.save_pretrained(folder)  # type: ignore[operator]
    kind, _, double = quant.partition("-")
    bits = BitsAndBytesConfig(
        load_in_8bit=kind == "int8",
        load_in_4bit=kind != "int8",
        bnb_4bit_quant_type="nf4" if kind == "int8" else kind,
        bnb_4bit_use_double_quant=double == "double",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=bits, device_map={"": "cpu"}
    )
    prepared = prepare_model_for_kbit_training(loaded, use_gradient_checkpointing=False)
    return get_peft_model(prepared, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).train()


@pytest.mark.parametrize(
    ("job", "plan", "reason"),
    [
        ({"method": "qlora"}, {"shard": "zero3", "quant": "int8"}, "that zero3 does not divide"),
        ({"method": "qlora"}, {"base_dtype": "bf16"}, "quantized (nf4)"),
        ({"method": "qlora"}, {"precision": "megatron-bf16"}, "no use for precision megatron-bf16"),
        ({}, {"precision": "fp8"}, "compute capability 8.9, and t4 has 7.5; choose precision fp16-mixed"),
        ({}, {"optimizer": "adamw-fp8-ao"}, "t4 has no fp8"),
        ({}, {"optimizer": "adamw-8bit", "shard": "zero3"}, "divided by zero3"),
        ({}, {"precision": "megatron-bf16", "optimizer": "muon"}, "cuts matrices"),
        ({}, {"precision": "megatron-bf16", "shard": "zero3"}, "needs all weights on every rank"),
        ({"method": "lora"}, {"precision": "megatron-bf16"}, "the method is lora"),
        ({}, {"precision": "megatron-bf16", "optimizer_offload": "cpu"}, "steps once, on the GPU"),
    ],
)
def test_refusals(job: dict[str, Any], plan: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qlora", "lora", "fp8", "optimizers"):
        monkeypatch.setattr(f"tonnage.techniques.{name}.find_spec", lambda package: package)
    found = refusals(Case(tiny_job("gpt2", **job), Plan(**plan), T4))
    assert any(reason in str(refusal) for refusal in found), found
    assert all(refusal.instead and "\n" not in str(refusal) for refusal in found)


@pytest.mark.parametrize(
    ("job", "plan", "instead"),
    [
        ({"method": "qlora"}, {}, "pip install bitsandbytes accelerate peft"),
        ({}, {"optimizer": "lion"}, "pip install bitsandbytes"),
        ({}, {"optimizer": "adamw-4bit"}, "pip install torchao"),
        ({}, {"precision": "fp8"}, "pip install torchao"),
    ],
)
def test_what_to_install(job: Any, plan: Any, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qlora", "fp8", "optimizers"):
        monkeypatch.setattr(f"tonnage.techniques.{name}.find_spec", lambda package: None)
    (refusal,) = refusals(Case(tiny_job(**job), Plan(**plan), H100))
    assert refusal.instead == instead


@torchao
def test_linear_layers_but_the_head_are_float8() -> None:
    made = ready("full", Plan(precision="fp8"))
    converted = {name.split(".")[-1] for name, m in made.model.named_modules() if type(m).__name__ == "Float8Linear"}
    assert converted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    made.run(1)
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    assert TINY["llama"]["vocab_size"] % 16  # which would stop the head anyway; the filter says so by identity
