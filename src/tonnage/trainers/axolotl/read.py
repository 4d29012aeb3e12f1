"""axolotl's YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from tonnage.trainers.accelerate.read import FSDP_KEYS, check_fsdp, check_version, read_fsdp
from tonnage.trainers.axolotl.write import ATTENTION
from tonnage.trainers.hf_trainer.read import BATCH_KEYS, OPTIMIZERS, read_checkpointing, read_precision
from tonnage.trainers.keys import (
    FileFormat,
    Setting,
    UnsupportedValue,
    fraction,
    number,
    read_lora_targets,
    read_model,
    read_together,
    word,
)

_SWITCHES: Final = {"flash": "flash", "flex": "flex", "eager": "eager", "sdp": "auto"}
"""`attention` for each switch `..._attention`, which `attn_implementation` has replaced."""


_LIGER: Final = "axolotl.integrations.liger.LigerPlugin"
"""The plugin that takes the `liger_` keys."""


def _check_plugins(value: Any) -> Mapping[str, Any]:
    """Raise UnsupportedValue for other plugins, which may replace parts of the network or the loss."""
    if value not in (None, [], [_LIGER]):
        raise UnsupportedValue
    return {}


def _read(flat: Mapping[str, Any]) -> Iterator[Setting]:
    adapter = flat.get("adapter")
    if flat.get("load_in_8bit") is True:
        yield Setting(option="method", value="qlora", key="load_in_8bit")
        yield Setting(option="quant", value="int8", key="load_in_8bit")
    elif adapter in ("lora", "qlora"):
        yield Setting(option="method", value=adapter, key="adapter")
    if adapter == "qlora":
        is_single = flat.get("bnb_config_kwargs.bnb_4bit_use_double_quant") is False
        kind = "fp4" if flat.get("bnb_config_kwargs.bnb_4bit_quant_type") == "fp4" else "nf4"
        yield Setting(option="quant", value=kind if is_single else f"{kind}-double", key="adapter")
    if adapter == "qlora" or flat.get("load_in_8bit") is True:
        yield Setting(option="unquantized_dtype", value="compute", key="adapter")
    for setting in read_precision(flat, bf16="bf16-mixed" if adapter else "bf16-true"):
        yield replace(setting, guess_reason=None)  # it loads the weights in the dtype of computation
    yield from read_checkpointing(flat)
    if flat.get("liger_fused_linear_cross_entropy") is True:
        yield Setting(option="loss", value="liger", key="liger_fused_linear_cross_entropy")
    if flat.get("fsdp") or any(key.startswith("fsdp_config.") for key in flat):
        yield from read_fsdp(flat, "")


def _ignored(flat: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings of quantized weights without an adapter that has any."""
    if flat.get("adapter") != "qlora":
        yield from (key for key in flat if key.startswith("bnb_config_kwargs."))
        if flat.get("load_in_4bit") is True:
            yield "load_in_4bit"


AXOLOTL_FILE: Final = FileFormat(
    target="axolotl",
    marks=("base_model", "sequence_len"),
    keys={
        **BATCH_KEYS,
        **FSDP_KEYS,
        "base_model": read_model,
        "sequence_len": number("seq_len"),
        "micro_batch_size": number("micro_batch"),
        "optimizer": word("optimizer", OPTIMIZERS),
        "adapter": word("method", {"lora": "lora", "qlora": "qlora", None: None, "": None}),
        "lora_r": number("lora_rank"),
        "lora_dropout": fraction("lora_dropout"),
        "lora_target_linear": word("lora_targets", {True: ("all-linear",), False: None}),
        "lora_target_modules": read_lora_targets,
        "attn_implementation": word("attention", {its: name for name, its in ATTENTION.items()}),
        **{f"{its}_attention": word("attention", {True: name, False: None}) for its, name in _SWITCHES.items()},
        "plugins": _check_plugins,
        "fsdp": check_fsdp,
        "fsdp_version": check_version,
        "dp_shard_size": read_together,
        "dp_replicate_size": read_together,
        **dict.fromkeys(("load_in_4bit", "load_in_8bit", "liger_fused_linear_cross_entropy"), read_together),
        **{f"bnb_config_kwargs.bnb_4bit_{name}": read_together for name in ("quant_type", "use_double_quant")},
        **dict.fromkeys(("bfloat16", "pad_to_sequence_len", "tf32"), read_together),
    },
    read=_read,
    ignored=_ignored,
)
