"""Files of trainers read in: what they say, what is not understood; whatever they hold, one answer or one line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import TonnageError, UnreadableFile
from tonnage.job import Job
from tonnage.options import options
from tonnage.planner.candidates import list_candidates
from tonnage.planner.question import Question
from tonnage.planner.settings_file import wordless
from tonnage.plans import Plan
from tonnage.trainers import reading, targets

READ = ["hf-trainer", "accelerate", "deepspeed", "axolotl", "llama-factory"]
FILES = {
    "hf-trainer": "training_args.json",
    "accelerate": "accelerate.yaml",
    "deepspeed": "ds_config.json",
    "axolotl": "axolotl.yaml",
    "llama-factory": "llama_factory.yaml",
}
ROUND: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("hf-trainer", {"checkpointing": "every-2", "clip_grad_norm": 2, "optimizer": "adamw-8bit-ao"}, {}, "a100-80gb"),
    ("hf-trainer", {"shard": "zero2", "checkpointing": "full", "precision": "fp16-mixed"}, {}, "8xt4"),
    ("hf-trainer", {"shard": "hsdp", "param_offload": "cpu"}, {"micro_batch": 4}, "2x8xa100-80gb"),
    ("hf-trainer", {"checkpointing": "full", "activation_offload": "cpu"}, {"grad_accum": 8}, "a100-80gb"),
    ("hf-trainer", {"loss": "liger", "checkpointing": "full"}, {}, "a100-80gb"),
    ("accelerate", {"shard": "zero3", "param_offload": "cpu", "precision": "fp32"}, {}, "8xa100-80gb"),
    ("accelerate", {"shard": "hsdp", "precision": "fp16-mixed"}, {}, "2x8xa100-80gb"),
    ("accelerate", {"shard": "ddp"}, {}, "8xa100-80gb"),
    ("deepspeed", {"shard": "zero3", "param_offload": "cpu", "clip_grad_norm": 1}, {"micro_batch": 2}, "8xa100-80gb"),
    ("deepspeed", {"shard": "zero1", "optimizer": "adamw-loop", "precision": "fp32"}, {}, "8xa100-80gb"),
    ("axolotl", {"precision": "bf16-true", "shard": "zero2", "optimizer": "muon"}, {}, "8xa100-80gb"),
    (
        "axolotl",
        {"attention": "eager", "quant": "nf4"},
        {"method": "qlora", "lora_targets": ("q_proj",), "lora_dropout": 0.1},
        "a100-80gb",
    ),
    (
        "axolotl",
        {"loss": "liger", "checkpointing": "full"},
        {"method": "lora", "lora_rank": 4, "lora_dropout": 0.05},
        "a100-80gb",
    ),
    ("llama-factory", {"checkpointing": "full", "loss": "liger", "precision": "bf16-true"}, {}, "a100-80gb"),
    ("llama-factory", {"quant": "int8", "unquantized_dtype": "compute"}, {"method": "qlora"}, "a100-80gb"),
]


def written(folder: Path, name: str, text: Any) -> Path:
    path = folder / name
    if not isinstance(text, str):
        text = json.dumps(text) if name.endswith(".json") else yaml.safe_dump(text)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "plan", "job", "gpus"), ROUND)
def test_what_was_exported_is_read_again(
    tmp_path: Path, name: str, plan: dict[str, Any], job: dict[str, Any], gpus: str
) -> None:
    """Every option that the file itself carries; the rest is job.json's, which is ours."""
    wanted = Plan(**plan)
    export = targets.export_plan(
        Case(dataclasses.replace(tiny_job(), **job), wanted, parse_cluster(gpus)), "gpt2", targets.find_target(name)
    )
    if any("installed" in item.why for item in export.unexpressed):
        pytest.skip(f"{export.unexpressed[0].why}")
    [text] = [item.text for item in export.files if item.name == FILES[name]]
    found = reading.read(written(tmp_path, FILES[name], text))
    assert found.target == name
    assert found.not_understood == ()
    asked = {**plan, **job}
    if name in ("hf-trainer", "deepspeed"):  # their scripts say these
        asked = {key: value for key, value in asked.items() if key != "attention"}
    assert {key: found.options.get(key, getattr(Plan(), key, None)) for key in asked} == asked
    Plan(**{key: value for key, value in found.options.items() if hasattr(wanted, key)})


def test_deepspeed(tmp_path: Path) -> None:
    found = reading.read(
        written(
            tmp_path,
            "ds_config.json",
            {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": 4,
                "bf16": {"enabled": "auto"},
                "zero_optimisation": {"stage": 3},
                "zero_optimization": {"stage": 2, "reduce_bucket_size": 500000000, "overlap_comm": False},
                "gradient_clipping": 0.5,
            },
        )
    )
    assert found.options == {
        **{"engine": "deepspeed", "precision": "bf16-mixed", "shard": "zero2", "grad_accum": 4},
        "clip_grad_norm": 0.5,
    }
    assert found.not_understood == (
        "zero_optimisation.stage = 3",
        "zero_optimization.reduce_bucket_size = 500000000",
    )
    assert found.keys["shard"] == "zero_optimization.stage"


@pytest.mark.parametrize("norm", [-0.5, "much", True, [1.0]])
def test_what_is_no_norm_is_said(tmp_path: Path, norm: Any) -> None:
    path = written(tmp_path, "ds_config.json", {"zero_optimization": {"stage": 2}, "gradient_clipping": norm})
    with pytest.raises(UnreadableFile, match=r"gradient_clipping = .*; it can be a number above zero"):
        reading.read(path)


@pytest.mark.parametrize(
    ("said", "ranks", "expected"),
    [
        ({}, 2, (16, 1)),
        ({"gradient_accumulation_steps": 4}, 2, (4, 4)),
        ({"train_micro_batch_size_per_gpu": 4}, 2, (4, 4)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}, 2, (4, 4)),
        ({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}, 32, (1, 1)),
    ],
)
def test_deepspeed_divides_a_steps_sequences(
    tmp_path: Path, said: dict[str, Any], ranks: int, expected: tuple[int, int]
) -> None:
    found = reading.read(written(tmp_path, "ds.json", {"train_batch_size": 32, "bf16": {"enabled": True}, **said}))
    assert (found.target, found.not_understood) == ("deepspeed", ())
    divided = found.on(ranks).options
    assert (divided["micro_batch"], divided["grad_accum"]) == expected


@pytest.mark.parametrize(
    "said",
    [
        {"optim": "sgd"},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
        {"optim_args": "momentum=0.9", "optim": "sgd"},
    ],
)
@pytest.mark.parametrize("mark", [{"per_device_train_batch_size": 1}, {"finetuning_type": "full"}])
def test_the_trainers_sgd_has_momentum_where_it_says_so(
    tmp_path: Path, mark: dict[str, Any], said: dict[str, Any]
) -> None:
    found = reading.read(written(tmp_path, "t.json", {**mark, **said}))
    assert found.options["optimizer"] == ("sgd" if "optim_args" in said else "sgd-plain")
    assert found.not_understood == ()


@pytest.mark.parametrize("said", [{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, {}])
def test_a_batch_that_is_not_its_parts_is_one_line(tmp_path: Path, said: dict[str, Any]) -> None:
    found = reading.read(written(tmp_path, "ds.json", {"train_batch_size": 33, **said}))
    with pytest.raises(UnreadableFile, match=r"train_batch_size = 33 is not .* x 2 ranks; such a job does not start"):
        found.on(2)
    assert found.options == reading.read(written(tmp_path, "ds.json", {"zero_optimization": {}, **said})).options


@pytest.mark.parametrize("size", [0, -1, True, "32", 1.5, 10**12])
def test_a_batch_that_is_no_number_is_not_understood(tmp_path: Path, size: Any) -> None:
    found = reading.read(written(tmp_path, "ds.json", {"train_batch_size": size}))
    assert found.on(2).options == found.options
    assert found.not_understood == (f"train_batch_size = {json.dumps(size)}",)


DEEPSPEEDS = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


def merged(base: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    first, _, rest = dotted.partition(".")
    return {**base, first: merged(base.get(first, {}), rest, value) if rest else value}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *(("deepspeed", f"zero_optimization.{key}", False) for key in ("overlap_comm", "contiguous_gradients")),
        *(
            ("deepspeed", f"zero_optimization.{key}", 0)
            for key in ("stage3_prefetch_bucket_size", "stage3_max_live_parameters")
        ),
        ("deepspeed", "zero_optimization.reduce_bucket_size", 5e8),
        ("deepspeed", "zero_optimization.round_robin_gradients", True),
        ("deepspeed", "zero_optimization.offload_optimizer.pin_memory", False),
        ("deepspeed", "zero_optimization.offload_optimizer.ratio", 0.5),
        ("deepspeed", "data_types.grad_accum_dtype", "fp32"),
        ("deepspeed", "data_efficiency.enabled", True),
        ("deepspeed", "activation_checkpointing.partition_activations", True),
        ("deepspeed", "optimizer.type", "OneBitAdam"),
        ("deepspeed", "optimizer.params.torch_adam", "yes"),
        ("accelerate", "use_cpu", True),
        ("accelerate", "dynamo_config.dynamo_backend", "INDUCTOR"),
        ("accelerate", "fsdp_config.fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
        ("accelerate", "fsdp_config.fsdp_use_orig_params", False),
        ("accelerate", "fsdp_config.fsdp_forward_prefetch", True),
        ("accelerate", "mixed_precision", "fp8"),
        ("hf-trainer", "auto_find_batch_size", True),
        ("hf-trainer", "neftune_noise_alpha", 5),
        ("hf-trainer", "deepspeed", "ds_config.json"),
        ("hf-trainer", "torch_compile_backend", "inductor"),
        ("axolotl", "plugins", ["axolotl.integrations.kd.KDPlugin"]),
        ("axolotl", "sample_packing", True),
        ("axolotl", "load_in_4bit", True),
        ("axolotl", "bnb_config_kwargs.bnb_4bit_quant_type", "fp4"),
        ("axolotl", "lora_modules_to_save", ["lm_head"]),
        ("llama-factory", "quantization_bit", 3),
        ("llama-factory", "neat_packing", True),
        ("llama-factory", "freeze_trainable_layers", 2),
    ],
)
def test_what_is_not_used_is_named(tmp_path: Path, name: str, key: str, value: Any) -> None:
    base = {
        "deepspeed": DEEPSPEEDS,
        "accelerate": ACCELERATES,
        "hf-trainer": TRAINERS,
        "axolotl": AXOLOTLS | {"adapter": "lora"},
        "llama-factory": {"finetuning_type": "lora", "bf16": True},
    }[name]
    assert reading.read(written(tmp_path, FILES[name], base)).not_understood == ()
    found = reading.read(written(tmp_path, FILES[name], merged(base, key, value)))
    assert found.not_understood == (f"{key} = {json.dumps(value)}",)


def test_evaluation_is_named_where_the_trainer_evaluates(tmp_path: Path) -> None:
    given = TRAINERS | {"per_device_eval_batch_size": 8, "eval_steps": 100}
    assert reading.read(written(tmp_path, "t.json", given)).not_understood == ()
    found = reading.read(written(tmp_path, "t.json", given | {"eval_strategy": "steps"}))
    assert found.not_understood == ("per_device_eval_batch_size = 8",)


def test_a_dump_of_defaults_has_nothing_to_name(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    values = TrainingArguments(output_dir=str(tmp_path), bf16=False).to_dict()
    path = written(tmp_path, "training_args.json", json.loads(json.dumps(values, default=str)))
    assert reading.read(path).not_understood == ()


@pytest.mark.parametrize(("ranks", "named"), [(4, ()), (8, ("num_processes = 4, and the plan is for 8 GPUs",))])
def test_another_number_of_ranks_is_named(tmp_path: Path, ranks: int, named: tuple[str, ...]) -> None:
    found = reading.read(written(tmp_path, "a.yaml", ACCELERATES | {"num_processes": 4, "num_machines": 1}))
    assert found.on(ranks).not_understood == named


def test_a_file_in_toml_is_said_not_to_be_read(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="is TOML, as torchtitan's"):
        reading.read(written(tmp_path, "train.toml", "[training]\nseq_len = 2048\n"))


TRAINERS = {"per_device_train_batch_size": 1, "bf16": True}
ACCELERATES = {"distributed_type": "FSDP", "mixed_precision": "bf16"}
AXOLOTLS = {"base_model": "org/x", "bf16": True}


def test_axolotl_names_its_model(tmp_path: Path) -> None:
    found = reading.read(
        written(
            tmp_path,
            "a.yml",
            {
                "base_model": "org/x",
                "sequence_len": 4096,
                "bf16": "auto",
                "gradient_checkpointing": True,
                "xformers": 1,
            },
        )
    )
    assert found.model == "org/x"
    said = {"seq_len": 4096, "precision": "bf16-true", "checkpointing": "full"}
    assert found.options == {"engine": "axolotl", **said}
    assert found.not_understood == ("xformers = 1",)


@pytest.mark.parametrize(
    ("said", "attention"),
    [
        ({"flash_attention": True}, "flash"),
        ({"flash_attention": False, "flex_attention": True}, "flex"),
        ({"sdp_attention": True}, "auto"),
        ({"eager_attention": True}, "eager"),
        ({"attn_implementation": "flash_attention_2"}, "flash"),
        ({"flash_attention": False}, None),
    ],
)
def test_axolotls_attention_in_words_of_both_kinds(
    tmp_path: Path, said: dict[str, Any], attention: str | None
) -> None:
    found = reading.read(written(tmp_path, "a.yml", AXOLOTLS | said))
    assert found.options.get("attention") == attention
    assert found.not_understood == ()


def test_a_trainers_ranks_may_share_sequences(tmp_path: Path) -> None:
    said = TRAINERS | {"fsdp": True, "parallelism_config": {"dp_replicate_size": 1, "dp_shard_size": 4, "cp_size": 2}}
    found = reading.read(written(tmp_path, "t.json", said))
    assert (found.options["shard"], found.options["cp"]) == ("zero3", 2)
    assert found.not_understood == ()


def test_llama_factory_checkpoints_and_adapts_unless_told_otherwise(tmp_path: Path) -> None:
    found = reading.read(written(tmp_path, "l.yaml", {"model_name_or_path": "org/x", "bf16": True}))
    assert (found.options["method"], found.options["checkpointing"]) == ("lora", "full")


def test_true_is_no_stage(tmp_path: Path) -> None:
    found = reading.read(written(tmp_path, "ds.json", {"zero_optimization": {"stage": True}}))
    assert found.not_understood == ("zero_optimization.stage = true",)
    assert "shard" not in found.options


def test_an_sft_config_is_not_a_trainers(tmp_path: Path) -> None:
    """SFTConfig computes in bf16 and checkpoints unless it is told otherwise, and never has all logits."""
    said = {"per_device_train_batch_size": 2, "max_length": 512}
    found = reading.read(written(tmp_path, "sft.json", said))
    assert found.target == "trl"
    assert found.options == {
        **{"engine": "trl", "loss": "chunked", "precision": "bf16-mixed", "checkpointing": "full"},
        **{"micro_batch": 2, "seq_len": 512},
    }
    told = {"bf16": False, "gradient_checkpointing": False}
    otherwise = reading.read(written(tmp_path, "sft.json", said | told)).options
    assert otherwise["precision"] == "fp32"
    assert "checkpointing" not in otherwise


@pytest.mark.parametrize(
    ("name", "said", "options"),
    [
        ("a.yaml", ACCELERATES, {"shard": "zero3"}),
        ("a.yaml", ACCELERATES | {"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, {"shard": "ddp"}),
        ("a.yaml", ACCELERATES | {"fsdp_config": {"fsdp_sharding_strategy": 2}}, {"shard": "zero2"}),
        ("a.yaml", ACCELERATES | {"fsdp_config": {"fsdp_reshard_after_forward": "HYBRID_SHARD"}}, {"shard": "hsdp"}),
        (
            "a.yaml",  # which the second version does not ask for
            ACCELERATES | {"fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "NO_SHARD"}},
            {"shard": "zero3"},
        ),
        ("t.json", TRAINERS | {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, {"shard": "zero2"}),
        ("t.json", TRAINERS | {"fsdp": "shard_grad_op auto_wrap"}, {"shard": "zero2"}),
        ("t.json", TRAINERS | {"fsdp": ["full_shard", "offload"]}, {"shard": "zero3", "param_offload": "cpu"}),
        ("t.json", TRAINERS | {"fsdp": ""}, {}),
        ("x.yaml", AXOLOTLS | {"fsdp": ["shard_grad_op", "auto_wrap"]}, {"shard": "zero2"}),
        (
            "x.yaml",
            AXOLOTLS | {"fsdp_config": {"fsdp_offload_params": True, "fsdp_sharding_strategy": "FULL_SHARD"}},
            {"shard": "zero3", "param_offload": "cpu"},
        ),
    ],
)
def test_what_fsdp_divides_is_read_in_the_words_of_both_versions(
    tmp_path: Path, name: str, said: dict[str, Any], options: dict[str, str]
) -> None:
    found = reading.read(written(tmp_path, name, said))
    assert {key: found.options[key] for key in ("shard", "param_offload") if key in found.options} == options
    assert found.not_understood == ()


@pytest.mark.parametrize("moved", [True, False])
def test_accelerates_plugin_may_move_the_inputs_of_layers(tmp_path: Path, moved: bool) -> None:
    said = {"fsdp_version": 2, "fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": moved}
    found = reading.read(written(tmp_path, "a.yaml", ACCELERATES | {"fsdp_config": said}))
    assert found.options["checkpointing"] == "full"
    assert found.options.get("activation_offload") == ("cpu" if moved else None)
    assert found.not_understood == ()


def test_a_trainer_forgets_what_accelerates_plugin_would_move(tmp_path: Path) -> None:
    said = {"activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True}
    found = reading.read(written(tmp_path, "t.json", TRAINERS | {"fsdp": True, "fsdp_config": said}))
    assert found.not_understood == ("fsdp_config.fsdp_activation_checkpointing_offload = true",)
    assert "activation_offload" not in found.options


def test_what_fsdp_has_no_words_for_here_is_listed(tmp_path: Path) -> None:
    said = {"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}
    found = reading.read(written(tmp_path, "a.yaml", ACCELERATES | {"fsdp_config": said}))
    assert len(found.not_understood) == 2


@pytest.mark.parametrize(("version", "silent"), [(None, True), (2, False), (1, False)])
def test_of_fsdp_accelerate_runs_the_first_version_unless_it_is_told(
    tmp_path: Path, version: int | None, silent: bool
) -> None:
    """A version that is said to be the first is not understood, as it is not what is run."""
    fsdp = {"fsdp_sharding_strategy": "FULL_SHARD"} | ({} if version is None else {"fsdp_version": version})
    said = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": fsdp}
    found = reading.read(written(tmp_path, "a.yaml", said))
    assert found.options["shard"] == "zero3"
    assert ("fsdp_version: 2" in found.silent.get("shard", "")) == silent
    assert found.not_understood == (("fsdp_config.fsdp_version = 1",) if version == 1 else ())


@pytest.mark.parametrize(
    ("name", "said", "silent"),
    [
        ("t.json", {"per_device_train_batch_size": 1}, True),
        ("t.json", {"per_device_train_batch_size": 1, "bf16": True}, False),
        ("d.json", {"zero_optimization": {"stage": 2}}, True),
        ("a.yaml", {"distributed_type": "FSDP", "mixed_precision": "no"}, True),
        ("a.yaml", {"distributed_type": "FSDP", "mixed_precision": "bf16"}, False),
        ("x.yaml", {"base_model": "org/x"}, False),
    ],
)
def test_the_dtype_of_weights_is_said_to_be_assumed(
    tmp_path: Path, name: str, said: dict[str, Any], silent: bool
) -> None:
    """axolotl loads weights in what it computes in; the others leave them as the script has them."""
    found = reading.read(written(tmp_path, name, said))
    assert ("precision" in found.silent) == silent
    assert found.options["precision"] == "fp32" or not silent


def test_deepspeeds_files_of_tensors(tmp_path: Path) -> None:
    places = {name: {"device": "nvme", "nvme_path": "/x"} for name in ("offload_optimizer", "offload_param")}
    found = reading.read(written(tmp_path, "d.json", {"zero_optimization": {"stage": 3, **places}}))
    assert (found.options["optimizer_offload"], found.options["param_offload"]) == ("nvme", "nvme")
    assert found.not_understood == ()


@pytest.mark.parametrize(
    "text",
    [
        '{"per_device_train_batch_size": 0}',
        '{"per_device_train_batch_size": "four"}',
        '{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1e999}',
        '{"per_device_train_batch_size": 1, "max_grad_norm": NaN}',
        '{"zero_optimization": {"stage": 7}}',
        '{"base_model": "gpt2", "lora_dropout": 1.5}',
    ],
)
def test_numbers_that_a_key_cannot_have_are_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UnreadableFile, match=r"t\.json: .* = .*; it can be ") as refused:
        reading.read(written(tmp_path, "t.json", text))
    assert "\n" not in str(refused.value)


def test_averaging_each_time_is_read(tmp_path: Path) -> None:
    said = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    found = reading.read(written(tmp_path, "t.json", {"per_device_train_batch_size": 2, **said}))
    assert found.options["accum_sync"] is True
    assert found.not_understood == ()


def test_trainers_replicate_by_default(tmp_path: Path) -> None:
    found = reading.read(written(tmp_path, "t.json", {"per_device_train_batch_size": 2, "bf16": True}))
    assert found.exactly({}, gpus=8)["shard"] == "ddp"
    assert "shard" not in found.exactly({}, gpus=1)
    assert found.exactly({"micro_batch": 4}, gpus=1)["micro_batch"] == 4
    assert found.openly({}) == {"micro_batch": 2, "engine": "hf-trainer", "precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "cannot be read as JSON"),
        ("a.yaml", "a: [", "cannot be read as YAML"),
        ("a.yaml", "base_model: !!python/object/apply:os.system [touch ran]", "cannot be read as YAML"),
        ("a.yaml", "a: &a [x]\nb: [*a, *a]", "aliases are not read"),
        ("a.json", "[1]", "no named settings"),
        ("a.yaml", "1: 2", "no named settings"),
        ("a.json", '{"hello": 1}', "no key by which"),
        ("a.json", "[" * 100_000, "cannot be read as JSON"),
        ("a.json", '{"zero_optimization": {"stage": 3, "stage": 1}}', "it says stage twice"),
        ("a.yaml", "sequence_len: 64\nbase_model: gpt2\nsequence_len: 128", "it says sequence_len twice"),
        ("a.json", '{"per_device_train_batch_size": 1, "bf16": true, "fp16": true}', "for bf16 and for fp16"),
        ("a.json", '{"train_batch_size": 1, "bf16": {"enabled": true}, "fp16": {"enabled": true}}', "and for fp16"),
        ("a.yaml", "[" * 5_000, "cannot be read as YAML"),
    ],
)
def test_what_is_no_such_file_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UnreadableFile, match=message) as caught:
        reading.read(written(tmp_path, name, text))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_number_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    found = reading.read(written(tmp_path, "a.yaml", f"base_model: gpt2\nsequence_len: 64\nfoo: 0x{'f' * 5000}\n"))
    assert "foo = a number of thousands of digits" in found.not_understood


def test_a_large_or_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match=r"larger than 1\.0 MiB"):
        reading.read(written(tmp_path, "a.json", "a" * 2**21))
    with pytest.raises(UnreadableFile, match=r"larger than 128\.0 KiB"):
        reading.read(written(tmp_path, "a.yaml", "a: 1\n" * 2**16))
    with pytest.raises(UnreadableFile, match="is not there"):
        reading.read(tmp_path / "nothing.json")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnreadableFile):
        reading.read(tmp_path / "bytes.yaml")


KEYS = sorted({key for reader in reading.READERS for key in (*reader.keys, *reader.marks)})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["auto", "cpu", "full", "FSDP", "lora", "qlora", "every-N", "adamw_torch", "budget=1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), VALUES, max_size=8))
def test_whatever_it_holds_is_options_that_can_be_had(tmp_path: Path, document: dict[str, Any]) -> None:
    nested: dict[str, Any] = {}
    for key, value in document.items():
        *path, last = key.split(".")
        place = nested
        for part in path:
            place = place[part] if isinstance(place.get(part), dict) else place.setdefault(f"{part}", {})
            if not isinstance(place, dict):
                place = {}
        place[last] = value
    path = written(tmp_path, "f.json", nested)
    if not any(mark in nested for reader in reading.READERS for mark in reader.marks):
        with pytest.raises(UnreadableFile):
            reading.read(path)
        return
    refused = ""
    try:
        found = reading.read(path)
    except UnreadableFile as error:
        refused = str(error)
    if refused:
        assert "it can be" in refused
        return
    fields = {item.name for item in dataclasses.fields(Plan)}
    try:
        Plan(**{key: value for key, value in found.options.items() if key in fields})
        Job(model=tiny_job().model, **{key: value for key, value in found.options.items() if key not in fields})
    except TonnageError as error:
        raise AssertionError(f"{found} cannot be had") from error


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_any_text_is_an_answer(tmp_path: Path, text: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text, encoding="utf-8", errors="ignore")
    with pytest.raises(UnreadableFile):
        reading.read(path)


def test_axolotls_own_engine_runs_what_it_has_words_for(tmp_path: Path) -> None:
    said = {"base_model": "x", "sequence_len": 512, "bf16": True, "gradient_checkpointing": True}
    assert reading.read(written(tmp_path, "a.yaml", said)).options["engine"] == "axolotl"
    liger = {**said, "liger_fused_linear_cross_entropy": True}
    assert reading.read(written(tmp_path, "a.yaml", liger)).options["engine"] == "axolotl"
    reentrant = {**said, "gradient_checkpointing_kwargs": {"use_reentrant": True}}  # which that engine does not run
    assert "engine" not in reading.read(written(tmp_path, "a.yaml", reentrant)).options


def test_where_no_engine_says_it_a_search_leaves_out_what_the_target_has_no_words_for(tmp_path: Path) -> None:
    factory = reading.read(written(tmp_path, "l.yaml", {"model_name_or_path": "x", "finetuning_type": "lora"}))
    left_out = wordless(factory)
    assert {"tp", "pp", "cp", "ep", "loss=chunked", "checkpointing=budget", "checkpointing=selective"} <= set(
        left_out
    )
    assert not {"checkpointing=full", "shard=zero3", "optimizer=adamw-fused", "param-offload=cpu"} & set(left_out)
    question = Question(job=tiny_job(), plan=Plan(), cluster=parse_cluster("8xa100-80gb"), without=left_out)
    target = targets.find_target("llama-factory")
    for one in list_candidates(question):
        for item, _ in options(Plan):
            value = getattr(one.plan, item.name)
            if item.name in targets.QUANTIZED:
                continue  # says something of QLoRA alone
            assert target.has_setting(item.name, value, item.default), (item.name, value)
    assert wordless(reading.read(written(tmp_path, "t.json", {"per_device_train_batch_size": 1}))) == ()
