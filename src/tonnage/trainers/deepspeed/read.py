"""ds_config.json: DeepSpeed's configuration, which accelerate and Hugging Face's Trainer take as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tonnage.trainers.deepspeed.run import OPTIMIZERS, PLACES, STAGES
from tonnage.trainers.keys import (
    FileFormat,
    InvalidValue,
    Setting,
    fp32_by_default,
    number,
    only,
    read_norm,
    read_together,
    word,
)

GLOBAL_BATCH: Final = "train_batch_size"
"""The key of the sequences of a whole step over all ranks."""

DEVICES: Final = {"cpu": "cpu", "nvme": "nvme", "none": None}
"""The value of an offload option for each `device`."""

_ARGUMENTS: Final = ("torch_adam", "foreach")
"""Parameters of the optimizer that choose its implementation."""

_SHARDS: Final = {stage: shard for shard, stage in STAGES.items() if shard != "none"}


def read_stage(value: Any) -> Mapping[str, Any]:
    """Return `shard` for a ZeRO stage."""
    if isinstance(value, int | float) and value not in _SHARDS:
        raise InvalidValue(", ".join(map(str, _SHARDS)))
    return word("shard", _SHARDS)(value)


def _read(flat: Mapping[str, Any]) -> Iterator[Setting]:
    yield Setting(option="engine", value="deepspeed", key="ds_config")
    for section, precision in (("bf16", "bf16-mixed"), ("fp16", "fp16-mixed")):
        if flat.get(f"{section}.enabled") in (True, "auto"):
            yield Setting(option="precision", value=precision, key=f"{section}.enabled")
            break
    else:
        yield fp32_by_default("bf16.enabled")
    params = _implementation(flat)
    for optimizer, arguments in OPTIMIZERS.items():
        if arguments == params and optimizer != "adamw":
            yield Setting(option="optimizer", value=optimizer, key="optimizer.params")


def _implementation(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that choose the optimizer's implementation."""
    return {name: flat[key] for name in _ARGUMENTS if (key := f"optimizer.params.{name}") in flat}


def _ignored(flat: Mapping[str, Any]) -> Iterator[str]:
    """Yield parameters of an implementation that is not run."""
    if (params := _implementation(flat)) not in OPTIMIZERS.values():
        yield from (f"optimizer.params.{name}" for name in params)


DEEPSPEED_FILE: Final = FileFormat(
    target="deepspeed",
    marks=("zero_optimization", "train_micro_batch_size_per_gpu", GLOBAL_BATCH),
    keys={
        "train_micro_batch_size_per_gpu": number("micro_batch"),
        "gradient_accumulation_steps": number("grad_accum"),
        GLOBAL_BATCH: read_together,
        "gradient_clipping": read_norm,
        "bf16.enabled": read_together,
        "fp16.enabled": read_together,
        "zero_optimization.stage": read_stage,
        "zero_optimization.offload_optimizer.device": word("optimizer_offload", DEVICES),
        "zero_optimization.offload_param.device": word("param_offload", DEVICES),
        **{f"zero_optimization.{place}.pin_memory": only(True) for place in PLACES},
        **{f"zero_optimization.{place}.nvme_path": read_together for place in PLACES},
        "optimizer.type": word("optimizer", {"AdamW": "adamw"}),
        **{f"optimizer.params.{name}": read_together for name in _ARGUMENTS},
    },
    read=_read,
    ignored=_ignored,
)
