"""All techniques: the values they implement, their refusals and settings, without torch."""

import subprocess
import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from networks import tiny, tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import find_device, host_device
from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.job import METHODS, Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.techniques import TECHNIQUES, environment, refusals, select_techniques
from tonnage.techniques.technique import Technique

H100 = Cluster(device=find_device("h100-80gb"), gpus_per_node=8, nodes=2)
T4 = Cluster(device=find_device("t4"))


def asking_for(technique: Technique, value: str) -> tuple[Job, Plan]:
    """Return a job and a plan that choose this value and everything it needs."""
    value = value.replace("-N", "-3").replace("=SIZE", "=1GiB").replace("=FRACTION", "=0.5")
    if technique.option == "method":
        return tiny_job("gpt2", method=value), Plan()
    if value == "N":
        return tiny_job("mixtral", grad_accum=2), Plan(shard="zero3", **{technique.option: 2})  # type: ignore[arg-type]
    plan = Plan(**{technique.option: True if value == "on" else value})
    if technique.option == "param_offload" and value == "nvme":
        plan = replace(plan, engine="deepspeed")
    divided = technique.option in ("param_offload", "reduce_dtype")
    return tiny_job("gpt2"), replace(plan, shard="zero3") if divided else plan


@pytest.mark.parametrize(("technique", "value"), [(t, value) for t in TECHNIQUES for value in t.values])
def test_every_value_has_one_technique_that_accepts_a_plain_job(technique: Technique, value: str) -> None:
    job, plan = asking_for(technique, value)
    assert [t for t in select_techniques(job, plan) if t.option == technique.option] == [technique]
    refusal = technique.accepts(Case(job, plan, H100))
    needed = [name for name in technique.libraries if name != "triton"]  # which comes with a ghost's torch
    missing = [name for name in needed if find_spec(name.split(".")[0]) is None]
    assert refusal is None if not missing else "pip install" in (refusal.instead if refusal else "")
    assert technique.__doc__


def test_the_values_of_an_option_are_those_of_its_techniques() -> None:
    neutral = {
        "attention": "auto",
        "loss": "plain",
        "allocator": "default",
        "outputs": "freed",
        "optimizer_in_backward": False,
        **dict.fromkeys(("weights_dtype", "reduce_dtype")),
    }
    for option in {t.option for t in TECHNIQUES if t.values != ("N",)} - {"method"}:
        values = [value for t in TECHNIQUES if t.option == option for value in t.values]
        assert len(values) == len(set(values))
        default = {field.name: field.default for field in fields(Plan)}[option]
        assert default in (*values, neutral.get(option, "none"))
    assert {value for t in TECHNIQUES if t.option == "method" for value in t.values} < set(METHODS)


@pytest.mark.parametrize(
    ("job", "plan", "cluster", "reason"),
    [
        ({}, {"attention": "flash", "precision": "fp32"}, H100, "precision is fp32"),
        ({}, {"attention": "flash"}, T4, "needs compute capability 8.0, and t4 has 7.5"),
        ({}, {"attention": "cudnn"}, T4, "needs compute capability 8.0, and t4 has 7.5"),
        ({"name": "llama", "grad_accum": 2}, {"pp": 2, "outputs": "loop"}, H100, "the pipeline's schedule decides"),
        ({"name": "t5"}, {"loss": "chunked"}, H100, "t5 is an encoder-decoder"),
        ({"name": "bert"}, {"loss": "chunked"}, H100, "BertForMaskedLM is not a causal language model"),
        ({"model": tiny("mixtral", output_router_logits=True)}, {"loss": "fused"}, H100, "adds to its loss"),
        ({"model": tiny("bert", architectures=["BertLMHeadModel"])}, {"loss": "chunked"}, H100, "a layer stands"),
        ({}, {"optimizer": "adafactor", "shard": "zero3"}, H100, "Adafactor fails on FSDP2"),
        ({}, {"param_offload": "cpu"}, H100, "shard is none"),
        ({}, {"param_offload": "nvme", "shard": "zero3"}, H100, "not in files"),
        ({"method": "lora"}, {"checkpointing": "full-reentrant"}, H100, "frozen embeddings"),
        ({}, {"checkpointing": "sqrt", "shard": "zero3"}, H100, "one layer at a time"),
        ({"name": "t5"}, {"loss": "fused"}, H100, "t5 is an encoder-decoder"),
        ({"name": "gemma2"}, {"loss": "torch"}, H100, "gemma2 changes its logits (final_logit_softcapping)"),
        ({"grad_accum": 2}, {"optimizer_in_backward": True}, H100, "a step has 2 micro-batches"),
        ({}, {"optimizer_in_backward": True, "precision": "fp16-mixed"}, H100, "loss scaling"),
        ({}, {"optimizer_in_backward": True, "shard": "ddp"}, H100, "DDP averages gradients"),
        ({}, {"optimizer_in_backward": True, "checkpointing": "full-reentrant"}, H100, "that layers share"),
        (
            {},
            {"optimizer_in_backward": True, "optimizer_offload": "cpu"},
            H100,
            "updates all parameters on the host at the end",
        ),
        ({}, {"optimizer_offload": "cpu=0.5", "shard": "zero3"}, H100, "divides parameters or states"),
        ({}, {"shard": "hsdp"}, T4, "there are 1 x 1"),
        ({}, {"base_dtype": "fp16"}, H100, "nothing is frozen"),
        ({"method": "lora"}, {"base_dtype": "bf16", "precision": "fp32"}, H100, "precision is fp32"),
        ({"name": "llama"}, {"tp": 4}, H100, "llama has 2 key and value heads, which 4 does not divide"),
        ({"name": "llama", "seq_len": 25}, {"tp": 2}, H100, "25 tokens cannot be cut into 2 parts"),
        ({"name": "mixtral", "method": "lora"}, {"tp": 2}, H100, "adapters on experts are not divided"),
        ({"name": "llama"}, {"tp": 2, "loss": "fused"}, H100, "takes a whole head"),
        ({"model": tiny("mixtral", output_router_logits=True), "grad_accum": 2}, {"pp": 2}, H100, "cannot balance"),
        ({"name": "llama", "grad_accum": 4}, {"pp": 4}, H100, "3 layers cannot be cut into 4 stages"),
        ({"name": "llama"}, {"pp": 2}, H100, "a step has 1 micro-batch, fewer than stages"),
        (
            {"model": tiny("llama", num_hidden_layers=4), "grad_accum": 5},
            {"pp": 2, "pp_schedule": "interleaved"},
            H100,
            "5 micro-batches cannot be divided into 2 equal rounds",
        ),
        ({"name": "llama", "seq_len": 26}, {"cp": 2, "shard": "ddp"}, H100, "26 tokens cannot be cut into 4 pieces"),
        ({"name": "llama"}, {"cp": 2}, H100, "average gradients, and shard is none"),
        ({"name": "llama"}, {"cp": 2, "shard": "ddp", "attention": "eager"}, H100, "no ring for attention eager"),
        ({"name": "llama"}, {"cp": 2, "shard": "ddp", "precision": "fp32"}, H100, "plain attention: no ring"),
        (
            {"model": tiny("gemma2", sliding_window=16)},
            {"cp": 2, "shard": "ddp"},
            H100,
            "no sliding window, and gemma2 has one of 16 tokens",
        ),
        ({"name": "llama"}, {"tp": 2, "optimizer": "muon"}, H100, "muon needs whole matrices"),
        ({"name": "llama", "packing": 2}, {"cp": 2, "shard": "ddp"}, H100, "not built for packing"),
        ({"name": "mixtral"}, {"ep": 8, "shard": "zero3"}, H100, "mixtral has 4 experts, which 8 does not divide"),
        ({"name": "mixtral"}, {"ep": 2, "shard": "ddp"}, H100, "experts are divided under FSDP2"),
        (
            {"name": "llama"},
            {"checkpointing": "budget=1GiB", "activation_offload": "cpu"},
            H100,
            "sends all that is kept",
        ),
        ({"name": "llama", "grad_accum": 2, "generate": 4}, {"pp": 2}, H100, "not built for generate 4"),
        (
            {"name": "llama"},
            {"tp": 2, "activation_offload": "cpu"},
            H100,
            "does not support tensors that are divided",
        ),
        *(
            (
                {"name": "llama", "seq_len": 64},
                {"cp": 2, "shard": "zero3", "activation_offload": "cpu", "checkpointing": checkpointing},
                H100,
                "divided among the ranks of cp",
            )
            for checkpointing in ("none", "every-2")
        ),
        ({"name": "llama"}, {"cp": 2, "shard": "zero3", "attention": "efficient"}, H100, "on pieces of 6 tokens"),
        (
            {"name": "gpt2"},
            {"cp": 2, "shard": "zero3", "precision": "fp16-mixed"},
            Cluster(device=find_device("t4"), gpus_per_node=2),
            "fails on pieces of 6 tokens",
        ),
        ({"name": "llama"}, {"compile": "layers", "tp": 2}, H100, "divided along tp, pp, cp or ep"),
        ({}, {"compile": "layers", "checkpointing": "selective"}, H100, "chooses among operations"),
        ({}, {"compile": "model", "checkpointing": "budget=1GiB"}, H100, "chooses among operations"),
        ({}, {"compile": "layers", "activation_offload": "cpu"}, H100, "another layout"),
        ({}, {"allocator": "expandable"}, Cluster(device=host_device(2**34)), "the CPU has none"),
    ],
)
def test_refusals_say_why_and_what_instead(
    job: dict[str, Any], plan: dict[str, Any], cluster: Cluster, reason: str
) -> None:
    (refusal,) = refusals(Case(tiny_job(**{"name": "gpt2", **job}), Plan(**plan), cluster))
    assert reason in refusal.reason
    assert refusal.instead
    assert "\n" not in str(refusal)


def test_lora_without_peft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.techniques.lora.find_spec", lambda name: None)
    (refusal,) = refusals(Case(tiny_job(method="lora"), Plan(), H100))
    assert refusal.instead == "pip install peft"


def test_expandable_segments_are_named_for_old_and_new_torch() -> None:
    assert environment(Plan()) == {}
    assert environment(Plan(allocator="expandable")) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("checkpointing", value) for value in ("every-0", "every-N", "every-x", "budget=SIZE", "budget=0")),
        *(("optimizer_offload", value) for value in ("cpu=FRACTION", "cpu=1.5", "cpu=0", "gpu=0.5")),
        ("shard", "zero9"),
    ],
)
def test_unknown_values_list_the_possible_ones(option: str, value: str) -> None:
    with pytest.raises(UsageError, match=r"possible: none, "):
        Plan(**{option: value})


def test_every_n() -> None:
    assert Plan(checkpointing="every-12").checkpoint_interval == 12
    assert Plan().checkpoint_interval is None


def test_every_value_has_its_line_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "techniques.md").read_text()
    missing = [value for t in TECHNIQUES for value in t.values if f"`{value}`" not in page]
    assert not missing
    assert all(f"`{t.option}`" in page for t in TECHNIQUES)


def test_plans_and_techniques_import_no_torch() -> None:
    program = "import sys, tonnage.plans, tonnage.techniques; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    program = "import sys, tonnage.step.step; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1


def test_every_family_whose_loss_goes_in_slices_writes_by_its_head_of_what_its_body_gives() -> None:
    import inspect

    import transformers
    from transformers.models.auto import modeling_auto as auto

    from tonnage.techniques.chunked_loss import accepts

    taken = 0
    for kind, name in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        config = {"model_type": kind, "architectures": [name], "vision_config": {}}
        job = Job(model=ModelRef(name=kind, kind="config", config=config))
        if accepts(Case(job, Plan(loss="chunked"), H100)) is not None:
            continue
        network = getattr(transformers, name)
        code = inspect.getsource(network.forward)
        assert network.base_model_prefix == "model", name
        assert "self.model(" in code, name
        assert "self.lm_head(" in code, name
        taken += 1
    assert taken > 30
