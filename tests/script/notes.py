"""What a script says of itself, as the ghost's process writes it."""

from typing import Any

from tonnage.catalog.models import find_model
from tonnage.script.facts import Facts

TRAINER = ("transformers.trainer.Trainer",)
SFT = ("trl.trainer.sft_trainer.SFTTrainer", "trl.trainer.base_trainer._BaseTrainer", *TRAINER)
LOOP = {"distributed": "NO", "fsdp": None, "mixed_precision": "fp16", "gradient_accumulation_steps": 2}
"""Of an Accelerator."""

SETTINGS = {
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "adamw_torch", "bf16": True},
    **{
        "fp16": False,
        "max_grad_norm": 1.0,
        "activation_checkpointing": False,
        "activation_checkpointing_kwargs": None,
    },
    **{"fsdp": None, "fsdp_config": None, "max_length": 1024},
}


def facts(settings: dict[str, Any] | None = None, network: dict[str, Any] | None = None, **more: Any) -> Facts:
    """A Trainer of Llama-3.2-1B in fp32 under autocast, with four sequences of 1,024 tokens."""
    config = find_model("llama-3.2-1b").config()  # type: ignore[union-attr]
    notes = {
        "trainer": TRAINER,
        "arguments": {"class": "TrainingArguments", "values": {**SETTINGS, **(settings or {})}},
        "network": {
            **{"class": "LlamaForCausalLM", "config": config, "attention": "sdpa", "adapters": None},
            **{"trainable": {"float32": 1_235_814_400}, "frozen": {}},
            **(network or {}),
        },
        "batch": {"sequences": 4, "tokens": 1024, "least_tokens": 1024},
        "accelerator": {"distributed": "NO", "fsdp": None},
    }
    return Facts(recorded={**notes, **more})
