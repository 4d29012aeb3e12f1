"""What engines accept: no trainer is imported, nothing of the plan is left out in silence."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.conventions import averages_by_ddp, conventions_of
from tonnage.catalog.devices import parse_cluster
from tonnage.job import Job
from tonnage.options import is_accepted, options
from tonnage.plans import Plan
from tonnage.techniques import qlora
from tonnage.trainers import ENGINES, engine, engine_of, names
from tonnage.trainers.axolotl import run as axolotl
from tonnage.trainers.cases import request
from tonnage.trainers.engine import Engine
from tonnage.trainers.hf_trainer import run as hf_trainer
from tonnage.trainers.megatron import network as megatron_network
from tonnage.trainers.megatron import run as megatron
from tonnage.trainers.not_run import find_not_run

TRAINERS = [engine for engine in ENGINES if engine.name != "tonnage"]
ONE = parse_cluster("a100-80gb")


def plan_for(trainer: Engine, **fields: str) -> Plan:
    return Plan(engine=trainer.name, **{**trainer.own_defaults(tiny_job()), **fields})


@pytest.fixture(params=TRAINERS, ids=lambda trainer: trainer.name)
def trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Every engine, with all packages installed."""
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    found: Engine = request.param
    return found


def refused(trainer: Engine, plan: Plan, job: Job | None = None, gpus: str = "a100-80gb") -> str:
    return " ".join(map(str, trainer.refusals(Case(job or tiny_job(), plan, parse_cluster(gpus)))))


def test_an_engine_is_an_option_of_the_plan() -> None:
    assert engine_of(Plan()).name == "tonnage"
    assert [engine_of(Plan(engine=found.name)) for found in ENGINES] == list(ENGINES)


def test_defaults_are_accepted(trainer: Engine) -> None:
    assert refused(trainer, plan_for(trainer)) == ""


def test_nobody_need_say_what_a_trainer_cannot_do_without(trainer: Engine) -> None:
    for method in trainer.expresses["method"] if trainer.expresses and "method" in trainer.expresses else ("full",):
        job, plan = request("llama-3.2-1b", offline=True, engine=trainer.name, method=method)
        assert not any(
            "precision" in said or "loss" in said for said in map(str, trainer.refusals(Case(job, plan, ONE)))
        )
    asked = request("llama-3.2-1b", offline=True, engine="axolotl", precision="bf16-mixed")[1]
    assert asked.precision == "bf16-mixed", "who says so is told that it cannot be"


def test_it_lists_options_and_values_that_there_are(trainer: Engine) -> None:
    possible = {item.name: option.possible for kind in (Job, Plan) for item, option in options(kind)}
    assert trainer.expresses is not None
    for option, values in trainer.expresses.items():
        assert option in possible
        assert values == engine.ANY or set(values) <= set(possible[option]), option


def test_whatever_it_does_not_list_is_refused(trainer: Engine) -> None:
    """Every other value of every option, one at a time."""
    assert trainer.expresses is not None
    tried = 0
    for item, option in options(Plan):
        known = trainer.expresses.get(item.name, (item.default,))
        for value in option.possible:
            if known == engine.ANY or value in known or not is_accepted(value, option.possible):  # a pattern
                continue
            said = refused(trainer, dataclasses.replace(plan_for(trainer), **{item.name: value}))
            setting = find_not_run(trainer.name, item.name, value)
            why = f"tonnage does not run that ({setting})" if setting else f"the engine {trainer.name} has no setting"
            assert f"{item.name.replace('_', '-')}={value}: {why}" in said
            tried += 1
    assert tried > 5


def test_a_refusal_lists_what_there_is(trainer: Engine) -> None:
    said = refused(trainer, plan_for(trainer, optimizer="muon"))
    assert "choose optimizer adamw or " in said
    assert said.endswith("or engine tonnage.")


def test_a_refusal_lists_who_else_can_be_told() -> None:
    plan = Plan(engine="torchtitan")
    said = refused(engine_of(plan), plan, tiny_job(images=2))
    assert "; leave images out, or engine tonnage or hf-trainer or accelerate or deepspeed or axolotl." in said


def test_several_gpus_are_never_alone(trainer: Engine) -> None:
    assert "always divides or replicates" in refused(trainer, plan_for(trainer), gpus="8xa100-80gb")
    assert refused(trainer, plan_for(trainer, shard="ddp"), gpus="8xa100-80gb") == ""


def test_what_no_package_would_help_is_said_first(trainer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: None)
    plan = dataclasses.replace(plan_for(trainer), optimizer_in_backward=True)
    first, *_ = trainer.refusals(Case(tiny_job(), plan, ONE))
    assert first.technique == "optimizer-in-backward=on"


def test_a_missing_package_is_said(trainer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: None)
    assert f"engine={trainer.name}: the package {trainer.packages[0]} is not installed" in refused(
        trainer, plan_for(trainer)
    )


def test_no_trainer_is_imported_to_ask() -> None:
    program = """
import sys
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.trainers import ENGINES
job = Job(model=ModelRef(name="tiny", kind="config", config={"model_type": "llama"}))
for engine in ENGINES:
    engine.refusals(Case(job, Plan(engine=engine.name), parse_cluster("t4")))
print({"torch", "transformers", "accelerate", "deepspeed", "trl"} & set(sys.modules))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "paged-adamw", "lion", "adafactor"])
@pytest.mark.parametrize("name", ["hf-trainer", "trl", "axolotl"])
def test_optimizers_that_know_no_dtensors_are_refused_under_fsdp(
    name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    monkeypatch.setattr(hf_trainer, "find_version", lambda package: "1.0")
    trainer = engine_of(Plan(engine=name))
    divided = refused(trainer, plan_for(trainer, optimizer=optimizer, shard="zero3"), gpus="8xa100-80gb")
    assert divided.startswith(f"optimizer={optimizer}: it fails on parameters that FSDP2 divides")
    assert refused(trainer, plan_for(trainer, optimizer=optimizer, shard="ddp"), gpus="8xa100-80gb") == ""


@pytest.mark.parametrize(
    ("name", "plan", "place", "said"),
    [
        ("hf-trainer", {"shard": "zero3"}, "gpu", "the Trainer has states brought to the CPU; choose resume cpu."),
        ("accelerate", {"shard": "ddp"}, "cpu", "the Accelerator has states brought to the GPU; choose resume gpu."),
        ("accelerate", {"shard": "zero3", "precision": "fp16-mixed"}, "cpu", ""),
        ("hf-trainer", {"shard": "zero3", "precision": "fp16-mixed"}, "cpu", "mixed, or engine accelerate."),
        ("deepspeed", {"shard": "zero2"}, "gpu", "DeepSpeed has states brought to the CPU; choose resume cpu."),
        (
            "deepspeed",
            {"shard": "zero3", "param_offload": "nvme"},
            "cpu",
            "not written; choose param-offload cpu.",
        ),
        ("deepspeed", {"shard": "zero2", "optimizer_offload": "cpu"}, "cpu", ""),
    ],
)
def test_where_states_are_brought_is_the_trainers_choice(
    name: str, plan: dict[str, str], place: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    trainer = engine_of(Plan(engine=name))
    found = refused(trainer, plan_for(trainer, **plan), tiny_job(resume=place), gpus="8xa100-80gb")
    assert found.endswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize("name", ["hf-trainer", "trl", "accelerate"])
def test_parts_are_those_of_fsdp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    trainer, job = engine_of(Plan(engine=name)), tiny_job(save_checkpoint="sharded")
    assert refused(trainer, plan_for(trainer, shard="zero3"), job, "8xa100-80gb") == ""
    said = refused(trainer, plan_for(trainer, shard="ddp"), job, "8xa100-80gb")
    assert said.endswith("is whole on each rank; choose save-checkpoint full, or shard zero3.")


@pytest.mark.parametrize(("gpus", "shard"), [("a100-80gb", "none"), ("a100-80gb", "zero2"), ("8xa100-80gb", "ddp")])
def test_what_deepspeed_does_not_divide_is_saved_whole(
    gpus: str, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    trainer, job = engine_of(Plan(engine="deepspeed")), tiny_job(save_checkpoint="full")
    assert refused(trainer, plan_for(trainer, shard=shard), job, gpus) == ""
    said = refused(trainer, plan_for(trainer, shard="zero2"), job, "8xa100-80gb")
    assert said.endswith("DeepSpeed saves each rank's part; choose save-checkpoint sharded.")


@pytest.mark.parametrize(
    ("plan", "job", "said"),
    [
        ({"shard": "ddp", "loss": "chunked"}, {}, "the network's forward returns no logits; choose loss plain."),
        ({"shard": "zero3"}, {"method": "lora"}, "choose engine hf-trainer, or shard ddp."),
        ({"shard": "ddp"}, {"method": "lora"}, ""),
        ({"shard": "zero3"}, {}, ""),
    ],
)
def test_accelerates_networks_generate_where_they_can(
    plan: dict[str, str], job: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    trainer = engine_of(Plan(engine="accelerate"))
    found = refused(trainer, plan_for(trainer, **plan), tiny_job(generate=4, **job), "8xa100-80gb")
    assert found.endswith(said)
    assert bool(found) == bool(said)


def test_ligers_package_is_wanted_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_trainer, "find_version", lambda package: None)
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    said = refused(hf_trainer.HF_TRAINER_ENGINE, Plan(engine="hf-trainer", loss="liger"))
    assert (
        said
        == "loss=liger: the package liger-kernel is not installed; pip install liger-kernel, or choose loss plain."
    )
    assert hf_trainer.arguments(tiny_job(), Plan(loss="liger"), "")["use_liger_kernel"]
    assert "use_liger_kernel" not in hf_trainer.arguments(tiny_job(), Plan(), "")


def test_sft_refuses_other_networks_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no other loss that could be chosen."""
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    job = tiny_job("t5")
    assert refused(engine_of(Plan(engine="trl")), Plan(engine="trl", loss="chunked"), job) == (
        "engine=trl: t5 is an encoder-decoder; choose engine hf-trainer."
    )


@pytest.mark.parametrize(
    ("method", "plan", "said"),
    [
        ("qlora", {"precision": "fp16-mixed"}, "fp16's scaler cannot unscale"),
        ("lora", {"precision": "fp16-mixed"}, ""),
        ("lora", {"weights_dtype": "bf16"}, "leave weights-dtype out"),
        ("full", {"weights_dtype": "bf16"}, ""),
    ],
)
def test_adapters_of_trl_have_its_own_dtype(method, plan, said, monkeypatch) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    plan = Plan(engine="trl", loss="chunked", **plan)
    found = refused(engine_of(plan), plan, tiny_job(method=method))
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("method", "plan", "said"),
    [
        ("full", {"precision": "bf16-mixed"}, "choose precision bf16-true or fp32"),
        ("full", {"precision": "fp16-mixed"}, "choose precision fp32, or method lora"),
        ("lora", {"precision": "bf16-true"}, "choose precision bf16-mixed, fp16-mixed or fp32"),
        ("lora", {"precision": "fp16-mixed"}, ""),
        ("lora", {}, ""),
        ("full", {"precision": "fp32"}, ""),
    ],
)
def test_what_axolotl_loads_is_what_it_computes_in(method: str, plan: dict[str, str], said: str) -> None:
    found = refused(axolotl.AXOLOTL_ENGINE, Plan(engine="axolotl", **plan), tiny_job(method=method))
    assert said in found
    assert bool(found) == bool(said)


def test_what_a_trainer_does_unless_it_is_told_otherwise() -> None:
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    usual = TrainingArguments("nowhere", use_cpu=True)
    assert conventions_of("hf-trainer").clips == (usual.max_grad_norm == 1.0)
    assert conventions_of("hf-trainer").fuses_adamw == (usual.optim == "adamw_torch_fused")


def test_torchs_ddp_is_that_of_engines_that_have_no_other() -> None:
    by_torch = {found.name for found in ENGINES if averages_by_ddp(Plan(engine=found.name, shard="ddp"))}
    assert by_torch == {"tonnage", "hf-trainer", "trl", "accelerate", "axolotl"}
    assert averages_by_ddp(Plan(shard="zero1"))
    assert not averages_by_ddp(Plan(shard="zero1", precision="megatron-bf16"))
    assert not averages_by_ddp(Plan(shard="zero2"))


def test_sft_leaves_what_is_not_quantized_unless_its_user_has_it_prepared() -> None:
    trainer, cluster, job = (
        engine_of(Plan(engine="trl")),
        parse_cluster("a100-40gb"),
        tiny_job("llama", method="qlora"),
    )
    assert trainer.own_defaults(job)["unquantized_dtype"] == "compute"
    assert "unquantized_dtype" not in trainer.own_defaults(tiny_job("llama"))
    for dtype in ("fp32", "compute"):
        answer = trainer.accepts(Case(job, Plan(engine="trl", loss="chunked", unquantized_dtype=dtype), cluster))
        assert answer is None or "bitsandbytes" in answer.reason


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "qwen3_moe", "gpt2"])
def test_megatron_takes_networks_that_it_has_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    assert refused(megatron.MEGATRON_ENGINE, Plan(engine="megatron"), tiny_job(kind)) == ""


@pytest.mark.parametrize(
    ("kind", "said", "reason"),
    [
        ("deepseek_v3", {}, "multi-latent, which Megatron-Core builds with Transformer Engine alone; choose a model"),
        ("gemma2", {}, "of gemma2 there is none here; choose a model of its own (llama, mistral, "),
        ("llama", {"mlp_bias": True}, "its own llama knows no mlp_bias"),
        ("qwen3", {"use_sliding_window": True}, "its own qwen3 knows no use_sliding_window"),
        ("qwen3", {"head_dim": None}, "the configuration does not say head_dim"),
        ("qwen3", {"hidden_act": "gelu"}, "its own qwen3 has silu as hidden_act, and this one gelu"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "its rotary positions know no scaling yarn"),
    ],
)
def test_megatron_says_what_it_has_no_layers_for(
    kind: str, said: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    job = tiny_job(kind)
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, config={**job.model.config, **said}))
    assert reason in refused(megatron.MEGATRON_ENGINE, Plan(engine="megatron"), job)


@pytest.mark.parametrize(
    ("kind", "plan", "reason"),
    [
        ("mixtral", {"tp": 2}, "with experts it wants sequence parallelism beside tp"),
        ("mixtral", {"ep": 8}, "4 experts are no multiple of 8"),
        ("llama", {"ep": 2}, "llama has no experts; choose ep 1"),
        ("llama", {"tp": 4}, "2 key and value heads are no multiple of 4"),
        ("mixtral", {"ep": 4}, ""),
    ],
)
def test_megatrons_degrees_divide_what_there_is(
    kind: str, plan: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    found = refused(
        megatron.MEGATRON_ENGINE, Plan(engine="megatron", shard="zero1", **plan), tiny_job(kind), "8xa100-80gb"
    )
    assert reason in found
    assert bool(found) == bool(reason)


def test_megatrons_learned_positions_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: "1.0")
    said = refused(megatron.MEGATRON_ENGINE, Plan(engine="megatron"), tiny_job("gpt2", seq_len=65))
    assert said.endswith("has a table of 64 positions; choose seq-len 64 or less.")


def test_megatron_is_told_rotary_positions_wherever_a_configuration_says_them() -> None:
    config = tiny_job().model.config
    for said in (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}},
    ):
        gpt = megatron_network.network_of({**config, **said}).gpt
        assert (gpt["rotary_base"], gpt["rope_scaling"], gpt["rope_scaling_factor"]) == (5e5, True, 8.0)


def test_the_default_install_has_what_full_lora_qlora_and_the_trainer_need() -> None:
    document = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    installed = {re.split("[^A-Za-z0-9_-]", line)[0] for line in document["project"]["dependencies"]}
    assert {"torch", "peft", *qlora.LIBRARIES, *engine_of(Plan(engine="hf-trainer")).packages} <= installed


@pytest.mark.parametrize("name", names())
def test_what_an_engine_lacks_is_named_with_its_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: None)
    packages = engine_of(Plan(engine=name)).packages
    refusals = [*engine_of(Plan(engine=name)).missing()]
    assert [refusal.instead for refusal in refusals] == [f"pip install {package}" for package in packages]
    assert all(refusal.is_of_here for refusal in refusals)
