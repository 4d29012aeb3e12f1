"""sft_config.json: TRL's SFTConfig."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tonnage.trainers.hf_trainer.read import ARGUMENT_KEYS, read_arguments
from tonnage.trainers.keys import FileFormat, Setting


def _read(flat: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield settings with SFTConfig's defaults: bf16, checkpointing, and a loss that never has all logits."""
    yield Setting(option="loss", value="chunked", key="SFTConfig")
    bf16 = True if flat.get("bf16") is None and flat.get("fp16") is not True else flat.get("bf16")
    names = ("activation_checkpointing", "gradient_checkpointing")
    checkpointing = {} if any(flat.get(name) is not None for name in names) else {names[1]: True}
    yield from read_arguments({**flat, **checkpointing, "bf16": bf16})
    yield Setting(option="engine", value="trl", key="SFTConfig")


TRL_FILE: Final = FileFormat(
    target="trl",
    marks=(  # fields of SFTConfig that TrainingArguments has not
        *("max_length", "dataset_kwargs", "dataset_text_field", "completion_only_loss", "assistant_only_loss"),
        *("padding_free", "packing_strategy"),
    ),
    keys=ARGUMENT_KEYS,
    read=_read,
)
