"""LLaMA-Factory's YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tonnage.trainers.hf_trainer.read import BATCH_KEYS, OPTIM_KEYS, read_momentum, read_precision
from tonnage.trainers.keys import (
    FileFormat,
    Setting,
    fraction,
    number,
    read_lora_targets,
    read_model,
    read_together,
    word,
)


def _read(flat: Mapping[str, Any]) -> Iterator[Setting]:
    if flat.get("finetuning_type", "lora") == "lora":
        bits = flat.get("quantization_bit")
        yield Setting(option="method", value="qlora" if bits in (4, 8) else "lora", key="finetuning_type")
        if bits in (4, 8):
            kind = "fp4" if flat.get("quantization_type") == "fp4" else "nf4"
            double = "" if flat.get("double_quantization") is False else "-double"
            yield Setting(option="quant", value="int8" if bits == 8 else kind + double, key="quantization_bit")
            yield Setting(option="unquantized_dtype", value="compute", key="quantization_bit")
    yield from read_precision(flat)
    yield from read_momentum(flat)
    is_off = flat.get("disable_gradient_checkpointing") is True
    reentrant = flat.get("use_reentrant_gc", True) is True and flat.get("finetuning_type") == "full"
    checkpointing = "none" if is_off else "full-reentrant" if reentrant else "full"
    yield Setting(option="checkpointing", value=checkpointing, key="disable_gradient_checkpointing")
    if flat.get("enable_liger_kernel") is True:
        yield Setting(option="loss", value="liger", key="enable_liger_kernel")


def _ignored(flat: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings of quantized weights where none are: with all weights trained, or in another number of bits."""
    is_quantized = flat.get("finetuning_type", "lora") == "lora" and flat.get("quantization_bit") in (4, 8)
    if not is_quantized and flat.get("quantization_bit") is not None:
        yield from ("quantization_bit", "quantization_type", "double_quantization")


LLAMA_FACTORY_FILE: Final = FileFormat(
    target="llama-factory",
    marks=("model_name_or_path", "finetuning_type", "cutoff_len"),
    keys={
        **BATCH_KEYS,
        **OPTIM_KEYS,
        "model_name_or_path": read_model,
        "cutoff_len": number("seq_len"),
        "stage": word("method", {"pt": None, "sft": None}),
        "finetuning_type": word("method", {"full": "full", "lora": "lora"}),
        "lora_rank": number("lora_rank"),
        "lora_dropout": fraction("lora_dropout"),
        "lora_target": read_lora_targets,
        "flash_attn": word("attention", {"auto": "auto", "disabled": "eager", "sdpa": "auto"}),
        **dict.fromkeys(
            (
                *("pure_bf16", "disable_gradient_checkpointing", "use_reentrant_gc", "enable_liger_kernel"),
                *("quantization_bit", "quantization_type", "double_quantization"),
            ),
            read_together,
        ),
    },
    read=_read,
    ignored=_ignored,
)
