"""What a plan becomes in each target's words; no trainer is imported, nothing of the plan is left out in silence."""

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import UsageError
from tonnage.job import Job
from tonnage.options import is_accepted, options
from tonnage.plans import Plan
from tonnage.trainers import ENGINES, liger, table, targets
from tonnage.trainers.cases import request
from tonnage.trainers.engine import ANY
from tonnage.trainers.targets import TARGETS, Export, Target

LLAMAS = ("torchtitan", "megatron-bridge")
"""Targets with networks of their own."""

LLAMA, _ = request("llama-3.1-8b", seq_len=32)

SCRIPTED = [known for known in TARGETS if known.scripted]


@pytest.fixture(params=TARGETS, ids=lambda known: known.name)
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.param
    return found


def job_for(to: Target) -> Job:
    """A job that the target's networks can be."""
    return LLAMA if to.name in LLAMAS else tiny_job()


def exported(
    to: Target | str, plan: Plan | None = None, job: Job | None = None, gpus: str = "a100-80gb", model: str = "gpt2"
) -> Export:
    known = targets.find_target(to) if isinstance(to, str) else to
    return targets.export_plan(Case(job or job_for(known), plan or Plan(), parse_cluster(gpus)), model, known)


def possible_export(to: Target, plan: Plan, job: Job | None = None, gpus: str = "a100-80gb") -> Export | None:
    """None where it is refused."""
    try:
        return exported(to, plan, job, gpus)
    except UsageError:
        return None


def file(export: Export, name: str) -> Any:
    [found] = [item for item in export.files if item.name == name]
    return json.loads(found.text)


def test_what_is_listed_are_options_and_their_values(target: Target) -> None:
    possible = {item.name: option.possible for kind in (Job, Plan) for item, option in options(kind)}
    for option, values in target.expresses.items():
        assert option in possible
        assert values == ANY or set(values) <= set(possible[option]), option
    assert {key.partition("=")[0] for key in target.why} <= set(possible)
    assert target.engine in {None, *(engine.name for engine in ENGINES)}


def test_every_value_is_said_or_listed(target: Target) -> None:
    """Every value of every option, one at a time; what stands in its place can be said."""
    tried = 0
    for kind, fixed in ((Plan, Plan()), (Job, job_for(target))):
        for item, option in options(kind):
            for value in option.possible:
                if item.name == "engine" or not is_accepted(value, option.possible):  # a pattern
                    continue
                asked = dataclasses.replace(fixed, **{item.name: value})
                plan, job = (asked, job_for(target)) if kind is Plan else (Plan(), asked)
                known = target.has_setting(item.name, value, item.default) and item.name not in target.overrides(
                    job, plan
                )
                if item.name in targets.QUANTIZED:  # says nothing here
                    continue
                made = possible_export(target, plan, job)
                if made is None:  # another job, or a contradiction
                    continue
                left = {(left.option, left.value): left for left in made.unexpressed}
                found = left.get((item.name.replace("_", "-"), value))
                assert (found is None) == known, (item.name, value)
                if found is not None:
                    instead = None if found.instead == "none" and item.default is None else found.instead
                    assert target.has_setting(item.name, instead, item.default), found
                    assert found.why
                tried += 1
    assert tried > 35


def test_a_plan_that_changes_a_setting_changes_the_export(target: Target) -> None:
    """No option is listed as expressed and then forgotten."""
    plain = exported(target)
    for option, values in target.expresses.items():
        if values == ANY or option in targets.QUANTIZED or option not in {item.name for item, _ in options(Plan)}:
            continue
        for value in values:
            if not is_accepted(value, values):
                continue
            gpus = "2x8xa100-80gb" if option == "shard" else "a100-80gb"
            shard = "zero3" if option == "param_offload" else Plan().shard
            made = possible_export(target, dataclasses.replace(Plan(shard=shard), **{option: value}), gpus=gpus)
            if made is None:
                continue
            same = made.settings == plain.settings and made.command == plain.command
            assert not same or value == getattr(Plan(), option) or value in SAME.get((target.name, option), ()), value


SAME = {
    ("hf-trainer", "activation_offload"): ("cpu",),  # only with checkpointing
    ("accelerate", "activation_offload"): ("cpu",),
    ("trl", "activation_offload"): ("cpu",),
    ("trl", "loss"): ("chunked",),  # its only one
    ("torchtitan", "optimizer"): ("adamw-fused",),
    ("torchtitan", "attention"): ("flex",),
    ("torchtitan", "sequence_parallel"): ("on", "off"),
    ("torchtitan", "shard"): ("zero3",),  # on one rank
    ("megatron-bridge", "precision"): ("megatron-bf16",),
    ("axolotl", "precision"): ("bf16-true",),  # what it makes of bf16-mixed
    ("axolotl", "optimizer"): ("adamw-fused",),  # its default
}
"""Values that alone say what the defaults say."""


def test_another_job_is_refused(target: Target) -> None:
    if target.has_setting("ep", 2, 1):
        pytest.skip("it has expert parallelism")
    with pytest.raises(
        UsageError, match=f"{target.name} cannot do ep 2 .*: tonnage plan gpt2 --gpu 8xa100-80gb .* --without ep"
    ):
        exported(target, Plan(ep=2), gpus="8xa100-80gb")


def test_a_method_without_words_is_refused_with_those_that_have_them(target: Target) -> None:
    if target.has_setting("method", "qlora", "full"):
        pytest.skip("it has QLoRA")
    known = ",".join(target.expresses.get("method", ("full",)))
    with pytest.raises(UsageError, match=rf"cannot do method qlora.*: tonnage plan gpt2 .* --method {known}\.$"):
        exported(target, job=replace(job_for(target), method="qlora"))


def test_a_contradiction_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="param_offload=cpu: it is a part of FSDP2, and shard is ddp"):
        exported("torchrun", Plan(shard="ddp", param_offload="cpu"), gpus="8xa100-80gb")


def test_an_unknown_target_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="possible: hf-trainer, "):
        targets.find_target("jax")


def test_a_factory_has_no_name(target: Target) -> None:
    job = job_for(target)
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, kind="factory", config={}, factory="a:b"))
    with pytest.raises(UsageError, match="a:b is a factory"):
        exported(target, job=job, model="a:b")


@pytest.mark.parametrize("target", SCRIPTED, ids=lambda known: known.name)
def test_scripts_train_causal_language_models(target: Target) -> None:
    job = tiny_job()
    config = {**job.model.config, "architectures": ["ViTForImageClassification"]}
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, config=config))
    with pytest.raises(UsageError, match="is a ViTForImageClassification"):
        exported(target, job=job)


def named(name: str, architecture: str, **changes: Any) -> Job:
    """A job of a network that says, as configurations do, what it is."""
    job = tiny_job(name, **changes)
    config = {**job.model.config, "architectures": [architecture]}
    return dataclasses.replace(job, model=dataclasses.replace(job.model, config=config))


SEES = ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")


SEEING = [known for known in TARGETS if known.reads_images]


def test_images_are_not_dropped_without_a_word(target: Target) -> None:
    """What is written trains on rows of text, but for the scripts that see."""
    if target.reads_images:
        assert "made_up.json" in {item.name for item in exported(target, job=named(*SEES)).files}
        return
    said = "is a Qwen2_5_VL" if target in SCRIPTED else "plan it with --images 0, or export it to hf-trainer, "
    with pytest.raises(UsageError, match=said):
        exported(target, job=named(*SEES))


@pytest.mark.parametrize("name", ["axolotl", "llama-factory"])
def test_settings_for_text_are_for_networks_that_read_text(name: str) -> None:
    made = exported(name, job=named(*SEES, images=0))
    assert "images" not in {left.option for left in made.unexpressed}
    with pytest.raises(UsageError, match="are for text, and vit is a ViTForImageClassification"):
        exported(name, job=named("vit", "ViTForImageClassification"))


@pytest.mark.parametrize("target", SEEING, ids=lambda known: known.name)
def test_scripts_that_see_are_told_what_the_network_gets(target: Target) -> None:
    made = exported(target, job=named(*SEES))
    said = file(made, "job.json")
    assert said["auto_class"] == "AutoModelForImageTextToText"
    assert (said["image_token"], said["image_size"]) == (60, [32, 16])
    assert said["images_dtype"] == ("bfloat16" if target.name == "deepspeed" else "float32")  # it has no autocast
    assert file(made, "made_up.json")["values"] == {"image_grid_thw": [[1, 4, 8]]}
    [rows] = [item.text for item in made.files if item.name == "rows.py"]
    assert "AutoProcessor" in rows
    assert "1 image in each row; larger ones are shrunk to as many pixels as 32x16" in " ".join(made.notes)
    assert file(exported(target, Plan(), named(*SEES, method="lora")), "job.json")["lora"]["target_modules"]


@pytest.mark.parametrize("target", SEEING, ids=lambda known: known.name)
def test_networks_that_see_may_be_trained_on_text(target: Target) -> None:
    made = exported(target, job=named(*SEES, images=0))
    assert "made_up.json" not in {item.name for item in made.files}
    assert file(made, "job.json")["auto_class"] == "AutoModelForImageTextToText"
    assert "image_token" not in file(made, "job.json")
    assert made.unexpressed == ()
    assert "a text or on JSON lines with a field text" in " ".join(made.notes)


def test_the_trainer_leaves_the_columns_of_conversations() -> None:
    assert file(exported("hf-trainer", job=named(*SEES)), "training_args.json")["remove_unused_columns"] is False
    assert "remove_unused_columns" not in file(exported("hf-trainer"), "training_args.json")


def test_layers_of_towers_are_named_to_fsdp() -> None:
    job, wanted = named("gemma3", "Gemma3ForConditionalGeneration"), "SiglipEncoderLayer,Gemma3DecoderLayer"
    divided = Plan(shard="zero3")
    assert f"FSDP_TRANSFORMER_CLS_TO_WRAP={wanted} " in exported("hf-trainer", divided, job, "8xa100-80gb").command
    made = exported("accelerate", divided, job, "8xa100-80gb")
    assert made.settings["fsdp_config.fsdp_transformer_layer_cls_to_wrap"] == wanted
    assert "CLS_TO_WRAP" not in exported("hf-trainer", Plan(shard="ddp"), job, "8xa100-80gb").command
    assert "CLS_TO_WRAP" not in exported("hf-trainer", divided, named(*SEES), "8xa100-80gb").command


def test_without_autocast_images_have_the_dtype_of_weights() -> None:
    def images_dtype(gpus: str = "a100-80gb", **plan: Any) -> Any:
        job = named(*SEES, method="lora")
        return file(exported("torchrun", Plan(**plan), job, gpus), "job.json")["images_dtype"]

    assert images_dtype(precision="bf16-true") == "bfloat16"
    assert images_dtype(precision="bf16-mixed") == "float32"
    assert images_dtype("8xa100-80gb", precision="bf16-mixed", shard="zero3") == "bfloat16"


def test_a_catalog_name_becomes_the_hubs(target: Target) -> None:
    if target.name == "megatron-bridge":
        pytest.skip("its recipes name their models")
    assert "openai-community/gpt2" in "".join(item.text for item in exported(target, model="gpt2").files)


def test_the_global_batch_is_kept() -> None:
    job = dataclasses.replace(tiny_job(), global_batch_tokens=tiny_job().seq_len * 64, micro_batch=2)
    made = exported("hf-trainer", Plan(shard="zero3"), job, gpus="8xa100-80gb")
    assert file(made, "training_args.json")["gradient_accumulation_steps"] == 4


def test_variables_are_in_the_command() -> None:
    made = exported(
        "hf-trainer", Plan(allocator="expandable", shard="zero3", param_offload="cpu"), gpus="8xh100-80gb"
    )
    assert made.command.startswith("env PYTORCH_ALLOC_CONF=expandable_segments:True ")
    assert "FSDP_OFFLOAD_PARAMS=true" in made.command
    assert made.command.endswith("torchrun --nproc-per-node 8 train.py")


def test_several_machines_are_started_one_by_one() -> None:
    made = exported("torchrun", Plan(shard="hsdp"), gpus="2x8xh100-80gb")
    assert "--nnodes 2" in made.command
    assert "HOST" in made.notes[0]
    assert file(made, "job.json")["replicas"] == 2


@pytest.mark.parametrize(
    ("name", "shard", "instead"),
    [
        ("deepspeed", "hsdp", "zero3"),  # zero2 would keep whole weights
        ("megatron-bridge", "zero3", "zero1"),  # ddp would keep whole states
        ("megatron-bridge", "zero2", "zero1"),
        ("hf-trainer", "zero1", "zero2"),
    ],
)
def test_what_is_divided_instead_keeps_the_least_memory_that_can_be_said(name: str, shard: str, instead: str) -> None:
    made = exported(name, Plan(shard=shard), gpus="2x8xh100-80gb")
    assert [left.instead for left in made.unexpressed if left.option == "shard"] == [instead]


def test_checkpointing_is_called_what_the_installed_transformers_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.trainers.packages.fields", lambda *source: frozenset())
    made = exported("hf-trainer", Plan(checkpointing="every-2"))
    said = file(made, "training_args.json")
    assert said["gradient_checkpointing"] is True
    assert said["gradient_checkpointing_kwargs"] == {"use_reentrant": False}  # there torch's older way is its own
    assert [(left.value, left.instead) for left in made.unexpressed] == [("every-2", "full")]
    monkeypatch.setattr("tonnage.trainers.packages.fields", lambda *source: frozenset({"activation_checkpointing"}))
    newer = file(exported("hf-trainer", Plan(checkpointing="every-2")), "training_args.json")
    assert newer["activation_checkpointing_kwargs"] == {"every_n_layers": 2}


def test_accelerates_plugin_moves_the_inputs_of_layers_that_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Plan(shard="zero3", checkpointing="full", activation_offload="cpu")
    fields = {"activation_checkpointing", "activation_checkpointing_offload"}
    monkeypatch.setattr("tonnage.trainers.packages.fields", lambda *source: frozenset(fields))
    made = exported("accelerate", moved, gpus="8xa100-80gb")
    assert made.unexpressed == ()
    said = said_in_yaml(made)["fsdp_config"]
    assert (said["fsdp_activation_checkpointing"], said["fsdp_activation_checkpointing_offload"]) == (True, True)
    assert "checkpointing" not in file(made, "job.json"), "layers would run again twice"
    for other in ({"shard": "ddp"}, {"checkpointing": "selective"}):
        without = exported("accelerate", dataclasses.replace(moved, **other), gpus="8xa100-80gb")
        assert [(left.option, left.instead) for left in without.unexpressed] == [("activation-offload", "none")]
        assert "checkpointing" in file(without, "job.json")
    fields.remove("activation_checkpointing_offload")
    older = exported("accelerate", moved, gpus="8xa100-80gb")
    assert [left.why for left in older.unexpressed] == [
        "the installed accelerate keeps the inputs of layers on the card"
    ]
    assert "fsdp_activation_checkpointing" not in said_in_yaml(older)["fsdp_config"]


def test_torchtitan_has_networks_of_its_own() -> None:
    with pytest.raises(UsageError, match=r"of llama: debugmodel, 1B, .*is none of them"):
        exported("torchtitan", job=tiny_job())
    for name, family, flavor in (
        *((f"llama-{size}", "llama3", size.partition("-")[2].upper()) for size in ("3.2-1b", "3.2-3b", "3.1-405b")),
        *((f"qwen3-{size}", "qwen3", size.upper()) for size in ("0.6b", "8b", "32b", "30b-a3b", "235b-a22b")),
        *(("deepseek-v2-lite", "deepseek_v3", "16B"), ("deepseek-v3", "deepseek_v3", "671B")),
        *(("gpt-oss-20b", "gpt_oss", "20b"), ("gpt-oss-120b", "gpt_oss", "120b")),
    ):
        recipe = file(exported("torchtitan", job=request(name)[0]), "recipe.json")
        assert (recipe["family"], recipe["flavor"]) == (family, flavor)


def test_torchtitans_network_is_tied_as_the_configuration_is() -> None:
    job, _ = request("llama-3.2-1b")
    untied = replace(job, model=replace(job.model, config={**job.model.config, "tie_word_embeddings": False}))
    with pytest.raises(UsageError, match="none of them"):
        exported("torchtitan", job=untied)


def test_torchtitans_deepseek_is_shorter_than_its_configuration() -> None:
    job, _ = request("deepseek-v3", seq_len=32768)
    with pytest.raises(UsageError, match="671B stops at 16384 positions, and the plan has sequences of 32768"):
        exported("torchtitan", job=job)


def test_torchtitan_has_expert_parallelism_of_networks_with_experts() -> None:
    plan = Plan(shard="zero3", ep=4)
    made = exported("torchtitan", plan, request("qwen3-30b-a3b")[0], gpus="8xa100-80gb")
    assert made.settings["parallelism.expert_parallel_degree"] == 4
    with pytest.raises(UsageError, match=r"ep=4: llama-3\.1-8b has no experts"):
        exported("torchtitan", plan, gpus="8xa100-80gb")


@pytest.mark.parametrize(("target", "key"), [("axolotl", "torch_compile"), ("llama-factory", "torch_compile")])
def test_finetuners_compile_the_network_as_a_whole(target: str, key: str) -> None:
    plan = {"precision": "bf16-true"}
    assert said_in_yaml(exported(target, Plan(compile="model", **plan)))[key] is True
    assert key not in said_in_yaml(exported(target, Plan(**plan)))
    layers = exported(target, Plan(compile="layers", **plan))
    assert "compile" in {left.option for left in layers.unexpressed}


def test_torchtitan_runs_without_cuda_graphs_as_it_was_estimated() -> None:
    assert file(exported("torchtitan"), "recipe.json")["training"]["disable_cuda_graphs"] is True


def said_in_yaml(export: Export) -> Any:
    return yaml.safe_load(export.files[0].text)


def test_axolotls_own_kernels_are_off() -> None:
    """It turns them on where nothing is said, and they are not what was estimated."""
    made = exported("axolotl", job=dataclasses.replace(tiny_job(), method="lora"))
    said = said_in_yaml(made)
    assert {said[f"lora_{part}_kernel"] for part in ("mlp", "qkv", "o", "embedding")} == {False}
    assert "LoRA kernels are off" in made.notes[0]
    assert "lora_mlp_kernel" not in said_in_yaml(exported("axolotl"))


def test_what_axolotl_keeps_in_fp32_is_said() -> None:
    def kept(gpus: str = "a100-80gb", **plan: Any) -> bool:
        return any("in fp32" in note for note in exported("axolotl", Plan(**plan), gpus=gpus).notes)

    assert kept(precision="bf16-true")
    assert kept("8xa100-80gb", precision="bf16-true", shard="ddp")
    assert not kept(precision="fp32")
    assert not kept(precision="bf16-true", attention="flex")
    assert not kept("8xa100-80gb", precision="bf16-true", shard="zero3")


@pytest.mark.parametrize(("stored", "left"), [("float32", [("base-dtype", "fp32")]), ("bfloat16", []), (None, [])])
def test_llama_factory_loads_weights_as_they_are_stored(stored: str | None, left: list[tuple[str, str]]) -> None:
    job = tiny_job()
    model = dataclasses.replace(job.model, config={**job.model.config, "dtype": stored})
    made = exported("llama-factory", job=dataclasses.replace(job, model=model, method="lora"))
    assert [(item.option, item.instead) for item in made.unexpressed] == left
    assert any("dtype of the checkpoint" in note for note in made.notes) == (stored is None)


@pytest.mark.parametrize(
    ("name", "module"), [("axolotl", "axolotl.cli.train"), ("llama-factory", "llamafactory.launcher")]
)
def test_finetuners_are_started_on_every_gpu(name: str, module: str) -> None:
    made = exported(name, Plan(shard="ddp"), gpus="2x8xa100-80gb")
    assert f"torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 8 -m {module} " in (
        made.command
    )
    assert "torchrun" not in exported(name).command


def test_fsdp_on_one_gpu_has_a_launcher_without_which_accelerate_leaves_it_out() -> None:
    on_host = Plan(shard="zero3", param_offload="cpu", precision="bf16-true")
    for name in ("torchrun", "accelerate", "hf-trainer", "trl", "axolotl", "llama-factory", "torchtitan"):
        command = exported(name, on_host).command
        assert "accelerate launch" in command or "torchrun --nproc-per-node 1" in command


def test_megatrons_overrides_are_in_the_command() -> None:
    plan, job = Plan(tp=2, pp=2, shard="zero1", checkpointing="full"), dataclasses.replace(LLAMA, grad_accum=2)
    made = exported("megatron-bridge", plan, job, gpus="8xh100-80gb")
    assert "--recipe llama31_8b_pretrain_config" in made.command
    assert "model.tensor_model_parallel_size=2 model.pipeline_model_parallel_size=2" in made.command
    assert "train.global_batch_size=4" in made.command
    [overrides] = made.files
    assert overrides.text.startswith("# of --recipe llama31_8b_pretrain_config\n")
    assert "ddp.use_distributed_optimizer=true\n" in overrides.text
    assert "dataset.sequence_length=" in overrides.text  # a recipe for fine-tuning would call it seq_length
    assert "train.micro_batch_size=1\n" in overrides.text


NEAREST = [
    ("hf-trainer", {"loss": "chunked"}, {"loss": "liger"}),
    ("hf-trainer", {"loss": "fused"}, {"loss": "liger"}),
    ("accelerate", {"loss": "fused"}, {"loss": "chunked"}),
    ("axolotl", {"loss": "chunked", "precision": "bf16-true"}, {"loss": "liger"}),
    ("llama-factory", {"loss": "torch"}, {"loss": "liger"}),
    ("deepspeed", {"loss": "chunked"}, {"loss": "plain"}),
    ("hf-trainer", {"checkpointing": "selective"}, {"checkpointing": "full"}),
    ("megatron-bridge", {"checkpointing": "budget=2GiB"}, {"checkpointing": "full"}),
    ("hf-trainer", {"shard": "zero1"}, {"shard": "zero2"}),
    ("megatron-bridge", {"shard": "zero3"}, {"shard": "zero1"}),
    ("deepspeed", {"optimizer_offload": "nvme=0.5", "shard": "zero2"}, {"optimizer_offload": "nvme"}),
    ("hf-trainer", {"optimizer": "adamw-fp8-ao"}, {"optimizer": "adamw-8bit"}),
    ("deepspeed", {"optimizer": "adamw-8bit"}, {"optimizer": "adamw"}),
    ("torchtitan", {"precision": "fp16-true"}, {"precision": "bf16-true"}),
    ("axolotl", {"precision": "fp16-mixed"}, {"precision": "fp32"}),
]
"""Targets, plans, and what is written in place of each value; all else of these plans can be expressed."""


@pytest.mark.parametrize(("name", "plan", "written"), NEAREST, ids=lambda value: str(value))
def test_the_nearest_value_by_memory_is_written(name: str, plan: dict[str, str], written: dict[str, str]) -> None:
    job = LLAMA if name in LLAMAS else tiny_job("llama")
    gpus = "8xa100-80gb" if "shard" in plan else "a100-80gb"
    made = exported(name, Plan(**plan), job, gpus)
    differing = {item.option.replace("-", "_"): item.instead for item in made.unexpressed}
    assert {option: differing[option] for option in written} == written
    assert {option: getattr(made.plan, option) for option in written} == written


def test_liger_is_not_written_for_a_network_without_its_kernels() -> None:
    made = exported("hf-trainer", Plan(loss="chunked"), tiny_job("gpt2"))
    assert [(item.instead, item.why) for item in made.unexpressed] == [("plain", "Liger has no kernels for gpt2")]


def test_the_families_of_liger_are_those_of_the_package() -> None:
    monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    assert set(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN) == liger.FAMILIES


def test_adapters_in_fp16_are_written_for_axolotl() -> None:
    made = exported("axolotl", Plan(precision="fp16-mixed"), tiny_job(method="lora"), "t4")
    assert made.unexpressed == ()
    assert (made.settings["fp16"], made.settings["bf16"]) == (True, False)


@pytest.mark.parametrize(
    ("method", "plan", "option"), [("lora", {"weights_dtype": "bf16"}, "weights-dtype"), ("qlora", {}, "precision")]
)
def test_sft_decides_the_dtype_of_adapters(method: str, plan: dict[str, str], option: str) -> None:
    precision = "fp16-mixed" if method == "qlora" else "bf16-mixed"
    made = exported("trl", Plan(loss="chunked", precision=precision, **plan), tiny_job(method=method))
    assert [item.option for item in made.unexpressed] == [option]
    assert "SFTTrainer makes the adapters" in made.unexpressed[0].why


def test_variables_reach_all_machines_under_deepspeed() -> None:
    made = exported("deepspeed", Plan(shard="zero3", allocator="expandable"), gpus="2x8xa100-80gb")
    [text] = [item.text for item in made.files if item.name == ".deepspeed_env"]
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text.splitlines()
    alone = exported("deepspeed", Plan(shard="zero3", allocator="expandable"), gpus="8xa100-80gb")
    assert ".deepspeed_env" not in {item.name for item in alone.files}


def test_the_command_line_names_all_targets() -> None:
    from tonnage.cli import export as command

    said = command.export.__annotations__["to"].__metadata__[0].help
    assert [known.name for known in TARGETS if known.name not in said] == []


def test_the_page_has_the_table_of_today() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "export.md").read_text(encoding="utf-8")
    assert f"{table.BEGIN}\n\n{table.table()}\n{table.END}" in page


def test_sftconfig_does_not_checkpoint_besides_fsdp() -> None:
    made = exported("trl", Plan(shard="zero3", checkpointing="full", loss="chunked"), gpus="8xa100-80gb")
    said = file(made, "sft_config.json")
    assert said["fsdp_config"]["activation_checkpointing"] is True
    assert said.get("activation_checkpointing", said.get("gradient_checkpointing")) is False


def test_scripts_say_nothing_of_us_and_compile() -> None:
    for made in map(exported, SCRIPTED):
        for item in made.files:
            if item.name.endswith(".py"):
                compile(item.text, item.name, "exec")
                assert "tonnage" not in item.text


def test_no_trainer_is_imported_to_export(tmp_path: Path) -> None:
    program = """
import sys
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.trainers import targets
from tonnage.trainers.cases import request
job, plan = request("llama-3.1-8b")
for to in targets.TARGETS:
    targets.export_plan(Case(job, plan, parse_cluster("a100-80gb")), "llama-3.1-8b", to)
print({"torch", "transformers", "accelerate", "deepspeed", "trl"} & set(sys.modules))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"


def test_a_card_without_bf16_is_said() -> None:
    notes = {gpu: " ".join(exported("hf-trainer", Plan(), gpus=gpu).notes) for gpu in ("t4", "a100-40gb")}
    assert "t4 does not compute in bf16" in notes["t4"]
    assert "bf16" not in notes["a100-40gb"]
    assert "bf16" not in " ".join(exported("hf-trainer", Plan(precision="fp16-mixed"), gpus="t4").notes)


@pytest.mark.parametrize(("name", "method"), [("torchtitan", "full"), ("trl", "qlora")])
def test_a_card_without_bf16_gets_fp32_in_place_of_fp16(name: str, method: str) -> None:
    job = replace(job_for(targets.find_target(name)), method=method)
    written = {gpu: exported(name, Plan(precision="fp16-mixed"), job, gpu) for gpu in ("t4", "a100-40gb")}
    assert {gpu: made.plan.precision for gpu, made in written.items()} == {"t4": "fp32", "a100-40gb": "bf16-mixed"}
    assert "bf16" not in " ".join(written["t4"].notes)
