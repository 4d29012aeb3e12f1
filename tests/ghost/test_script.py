"""What the ghost's process notes of a script, beside what the script was given."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tonnage.plans import Plan
from tonnage.script.facts import Facts, describe_recognised, understood

pytestmark = pytest.mark.ghost

LAUNCHER = (
    str(Path(sys.executable).parent / "accelerate"),
    "launch",
    "--num_processes",
    "1",
    "--mixed_precision",
    "bf16",
)
LAUNCHER = (*LAUNCHER, "--num_machines", "1", "--dynamo_backend", "no")  # as in test_programs, and so run once


def test_a_trainer_with_flags_and_settings_put_in(dry_run: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.mktemp("flags"))
    flags = ("--max_steps", "9", "--gradient_checkpointing", "True", "--report_to", "none", "--use_cpu", "False")
    answer = dry_run(
        "flags.py",
        *("--output_dir", folder, "--per_device_train_batch_size", "2", "--bf16", *flags),
        steps=2,
        variables=(("TONNAGE_SETTINGS", '{"optim": "adamw_torch", "gradient_accumulation_steps": 3}'),),
    )
    assert answer.error is None, answer.output[-2000:]
    facts = Facts.of(answer.run.traces[0])
    found = understood(facts)
    assert (found.job.micro_batch, found.job.grad_accum, found.job.seq_len) == (2, 3, 128)
    kept = Plan(engine="hf-trainer", optimizer="adamw-foreach", checkpointing="full", clip_grad_norm=1)
    assert found.plan == kept
    assert facts.options["--optim"]["dest"] == "optim"
    assert "missed" not in facts.recorded, facts.recorded["missed"]
    assert facts.options["--rows"]["action"] == "store"
    assert (facts.settings["optim"], facts.settings["bf16"]) == ("adamw_torch", True)
    assert found.job.model.config["num_hidden_layers"] == 2


def test_a_loop_with_accelerate(dry_run: Any) -> None:
    answer = dry_run("accelerated.py", launcher=LAUNCHER, steps=4)
    assert answer.error is None, answer.output[-2000:]
    facts = Facts.of(answer.run.traces[0])
    assert facts.recorded["accelerator"]["mixed_precision"] == "bf16"
    assert facts.recorded["accelerator"]["gradient_accumulation_steps"] == 2
    assert facts.given == ["mixed_precision", "gradient_accumulation_steps"]
    assert facts.recorded["optimizer"] == {"class": "torch.optim.adamw.AdamW", "fused": False, "foreach": None}
    assert "LlamaForCausalLM (139,584 parameters), batches of 4 x 128 tokens" in describe_recognised(facts)


def test_a_plain_loop(dry_run: Any) -> None:
    answer = dry_run("families.py", "llama", "--precision", "fp16-mixed", "--accumulate", "3", "--checkpointing")
    facts = Facts.of(answer.run.traces[0])
    seen = "a loop of its own, LlamaForCausalLM (139,584 parameters), batches of 2 x 128 tokens"
    assert describe_recognised(facts) == seen
    assert facts.settings == {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "gradient_checkpointing": True,
    }
    assert "missed" not in facts.recorded, facts.recorded["missed"]
