"""training_args.json: TrainingArguments, most of which TRL, axolotl and LLaMA-Factory have as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tonnage.catalog.optimizers import find_optimizer, words
from tonnage.trainers.accelerate.read import FSDP_KEYS, check_fsdp, read_fsdp, read_fsdp_checkpointing
from tonnage.trainers.keys import (
    FileFormat,
    KeyReader,
    Setting,
    fp32_by_default,
    number,
    read_norm,
    read_together,
    word,
)

ALIASES: Final = {"adamw_8bit": "adamw-8bit", "paged_adamw": "paged-adamw"}
"""Further names of `optim` (OptimizerNames of transformers)."""

OPTIMIZERS: Final[Mapping[str, str]] = {
    **{arguments["optim"]: name for name, arguments in words("hf_trainer").items() if "optim" in arguments},
    **{optim: name for name, optim in words("axolotl").items() if optim != "adamw_torch_fused"},
    "adamw_torch_fused": "adamw",
    **ALIASES,
}
"""The optimizer of each `optim`, axolotl's names included; `sgd` without `optim_args` has no momentum."""

_MOMENTUM: Final = (find_optimizer("sgd").hf_trainer or {})["optim_args"]


def read_momentum(flat: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield SGD with momentum, if `optim_args` asks for it."""
    if flat.get("optim") == "sgd" and flat.get("optim_args") == _MOMENTUM:
        yield Setting(option="optimizer", value="sgd", key="optim_args")


def read_checkpointing(flat: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield checkpointing by either of transformers' names or by FSDP, of every layer or every N-th."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if not flat.get(name):
            continue
        every = flat.get(f"{name}_kwargs.every_n_layers", 1)
        several = isinstance(every, int) and not isinstance(every, bool) and every > 1
        reentrant = flat.get(f"{name}_kwargs.use_reentrant") is True
        value = f"every-{every}" if several else "full-reentrant" if reentrant else "full"
        yield Setting(option="checkpointing", value=value, key=name)
        if flat.get(f"{name}_kwargs.offload") or flat[name] == "offload":
            yield Setting(option="activation_offload", value="cpu", key=name)
    yield from read_fsdp_checkpointing(flat)


def read_precision(flat: Mapping[str, Any], *, bf16: str = "bf16-mixed") -> Iterator[Setting]:
    """Yield the precision; `bf16` is that of the switch of this name."""
    if flat.get("pure_bf16") is True:
        yield Setting(option="precision", value="bf16-true", key="pure_bf16")
    elif flat.get("fp16") is True:
        yield Setting(option="precision", value="fp16-mixed", key="fp16")
    elif flat.get("bf16") in (True, "auto", "true", "full") or flat.get("bfloat16") is True:
        yield Setting(option="precision", value=bf16, key="bf16")
    else:
        yield fp32_by_default("bf16")


def read_arguments(flat: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield what several TrainingArguments say together."""
    yield Setting(option="engine", value="hf-trainer", key="TrainingArguments")
    yield from read_precision(flat)
    yield from read_momentum(flat)
    yield from read_checkpointing(flat)
    if flat.get("fsdp"):
        yield from read_fsdp(flat, "")


BATCH_KEYS: Final[Mapping[str, KeyReader]] = {
    "torch_compile": word("compile", {True: "model", "auto": "model", False: None, None: None}),
    "per_device_train_batch_size": number("micro_batch"),
    "gradient_accumulation_steps": number("grad_accum"),
    "max_grad_norm": read_norm,
    "bf16": read_together,
    "fp16": read_together,
    "activation_checkpointing": read_together,
    "gradient_checkpointing": read_together,
    **{
        f"{kind}_checkpointing_kwargs.{name}": read_together
        for kind in ("activation", "gradient")
        for name in ("every_n_layers", "use_reentrant", "offload")
    },
}
"""Keys that all trainers above the Trainer have."""

OPTIM_KEYS: Final[Mapping[str, KeyReader]] = {
    "optim": word("optimizer", OPTIMIZERS),
    "optim_args": word("optimizer", {_MOMENTUM: None, None: None}),
}

ARGUMENT_KEYS: Final[Mapping[str, KeyReader]] = {
    **BATCH_KEYS,
    **FSDP_KEYS,
    **OPTIM_KEYS,
    "fsdp": check_fsdp,
    "parallelism_config.dp_replicate_size": read_together,
    "parallelism_config.dp_shard_size": read_together,
    "parallelism_config.cp_size": number("cp"),
    "max_length": number("seq_len"),
    "accelerator_config.gradient_accumulation_kwargs.sync_each_batch": word("accum_sync", {True: True, False: None}),
}
"""Keys of TrainingArguments that SFTConfig takes as well."""

HF_TRAINER_FILE: Final = FileFormat(
    target="hf-trainer",
    marks=("per_device_train_batch_size", "gradient_accumulation_steps"),
    keys={
        **ARGUMENT_KEYS,
        "use_liger_kernel": word("loss", {True: "liger", False: None, None: None}),  # SFTTrainer does not take it
    },
    read=read_arguments,
)
