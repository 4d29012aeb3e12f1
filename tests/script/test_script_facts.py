"""What a script is, from its notes of itself."""

from dataclasses import replace

import pytest
from notes import LOOP, SFT, facts

from tonnage.plans import Plan
from tonnage.script.facts import NotUnderstood, describe_recognised, understood

LORA = {"peft_type": "LORA", "r": 8, "target_modules": ["model.layers.0.self_attn.q_proj", "v_proj"]}
FSDP = {"version": 2, "reshard_after_forward": True, "offload": False, "activation_checkpointing": True}


def plan(**changed):
    return understood(facts(**changed)).plan


def test_a_trainer():
    found = understood(facts())
    assert (found.job.micro_batch, found.job.grad_accum, found.job.seq_len) == (4, 2, 1024)
    assert found.job.model.config["architectures"] == ["LlamaForCausalLM"]
    assert found.plan == Plan(engine="hf-trainer", optimizer="adamw-foreach", clip_grad_norm=1)
    assert describe_recognised(facts()).startswith(
        "Trainer with TrainingArguments, LlamaForCausalLM (1.24 B parameters)"
    )


@pytest.mark.parametrize(
    ("changed", "precision"),
    [
        ({}, "bf16-mixed"),
        ({"settings": {"bf16": False, "fp16": True}}, "fp16-mixed"),
        ({"settings": {"bf16": False}}, "fp32"),
        ({"network": {"trainable": {"bfloat16": 9, "float32": 1}}, "settings": {"bf16": False}}, "bf16-true"),
    ],
)
def test_precision_is_that_of_the_weights(changed, precision):
    assert plan(**changed).precision == precision


def test_weights_in_bf16_under_autocast_stay_so():
    found = plan(network={"trainable": {"bfloat16": 9, "float32": 1}})
    assert (found.precision, found.weights_dtype) == ("bf16-mixed", "bf16")


def test_the_optimizer_is_the_one_that_was_built():
    assert (
        plan(optimizer={"class": "torch.optim.adamw.AdamW", "fused": True, "foreach": None}).optimizer
        == "adamw-fused"
    )
    made = {"class": "bitsandbytes.optim.adamw.AdamW", "fused": False, "foreach": None}
    assert plan(settings={"optim": "paged_adamw_8bit"}, optimizer=made).optimizer == "paged-adamw-8bit"


def test_checkpointing_by_the_trainer_and_by_fsdp():
    assert plan(settings={"activation_checkpointing": True}).checkpointing == "full"
    several = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 4}}
    assert plan(settings=several).checkpointing == "every-4"
    divided = plan(accelerator={"distributed": "FSDP", "fsdp": FSDP})
    assert (divided.shard, divided.checkpointing) == ("zero3", "full")


@pytest.mark.parametrize("kind", ["MULTI_GPU", "MULTI_CPU"])
def test_copies_on_several_ranks_are_ddp(kind):
    assert plan(accelerator={"distributed": kind, "fsdp": None}).shard == "ddp"


def test_whose_sharding_it_is():
    sharded = {"distributed": "FSDP", "fsdp": FSDP}
    assert facts(accelerator=sharded).is_launchers
    assert not facts(accelerator=sharded, settings={"fsdp": True}).is_launchers
    assert not facts().is_launchers
    assert facts(trainer=None, accelerator={**sharded, **LOOP}).is_launchers


def test_a_loop_with_accelerate():
    found = understood(
        facts(
            trainer=None,
            accelerator=LOOP,
            optimizer={"class": "torch.optim.adamw.AdamW", "fused": False, "foreach": None},
        )
    )
    assert (found.job.micro_batch, found.job.grad_accum) == (4, 2)
    assert found.plan == Plan(engine="accelerate", optimizer="adamw-foreach", precision="fp16-mixed")


def test_adapters_and_their_base():
    network = {"adapters": LORA, "frozen": {"bfloat16": 100}, "trainable": {"float32": 1}}
    found = understood(facts(network=network))
    assert (found.job.method, found.job.lora_rank, found.job.lora_targets) == ("lora", 8, ("q_proj", "v_proj"))
    assert (found.plan.precision, found.plan.base_dtype) == ("bf16-mixed", "bf16")


def test_quantized_weights():
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = {
        **facts().network["config"],
        "quantization_config": {**quantization, "bnb_4bit_compute_dtype": "bfloat16"},
    }
    network = {"adapters": LORA, "config": config, "frozen": {"uint8": 9, "bfloat16": 3}, "trainable": {"float32": 1}}
    found = understood(facts(network=network, trainer=SFT))
    assert (found.job.method, found.plan.quant, found.plan.unquantized_dtype) == ("qlora", "nf4", "compute")
    assert (found.plan.engine, found.plan.loss) == ("trl", "chunked")
    assert "quantization_config" not in found.job.model.config


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"trainer": None, "accelerator": None}, "neither a Trainer nor an Accelerator"),
        ({"trainer": ("trl.trainer.dpo_trainer.DPOTrainer", "transformers.trainer.Trainer")}, "DPOTrainer"),
        ({"network": {"class": "LlamaForSequenceClassification"}}, "LlamaForSequenceClassification"),
        ({"network": {"adapters": {"peft_type": "IA3"}}}, "IA3"),
        ({"settings": {"optim": "galore_adamw"}}, "galore_adamw"),
        ({"batch": {"sequences": 1, "tokens": 4096}}, "packs or drops"),
        ({"batch": None, "settings": {"max_length": None}}, "before its first batch"),
        ({"accelerator": {"distributed": "DEEPSPEED", "fsdp": None}}, "DEEPSPEED"),
        ({"cards_of_process": 8}, "torchrun"),
    ],
)
def test_what_is_not_understood_is_said_in_one_line(changed, why):
    with pytest.raises(NotUnderstood, match=why) as told:
        understood(facts(**changed))
    assert "\n" not in str(told.value)


def test_a_script_that_ran_out_of_memory_before_its_first_batch():
    found = understood(facts(batch=None))
    assert found.job.seq_len == 1024
    assert any("max_length" in note for note in found.notes)


def test_what_a_plan_keeps_and_what_it_may_choose():
    now = understood(facts(settings={"activation_checkpointing": True, "bf16": False}))
    assert now.openly({}) == Plan(engine="hf-trainer", clip_grad_norm=1)
    assert now.openly({"checkpointing": "full"}).checkpointing == "full"
    low = replace(now, plan=replace(now.plan, optimizer="adamw-8bit", precision="bf16-true"))
    assert (low.openly({}).optimizer, low.openly({}).precision) == ("adamw-8bit", "bf16-true")


def test_what_could_not_be_seen_is_said():
    found = understood(facts(missed=["built: AttributeError: no args"]))
    assert "Not all of it could be seen (built: AttributeError: no args)." in found.notes
