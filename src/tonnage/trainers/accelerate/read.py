"""accelerate.yaml, the configuration of `accelerate launch`, and its section of FSDP, which other trainers share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tonnage.trainers.accelerate.run import MOVES
from tonnage.trainers.deepspeed.read import DEVICES, read_stage
from tonnage.trainers.keys import (
    FileFormat,
    KeyReader,
    Setting,
    UnsupportedValue,
    fp32_by_default,
    number,
    only,
    read_norm,
    read_together,
    word,
)

STRATEGIES: Final = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp"}
"""`shard` for each strategy of FSDP's first version; accelerate also takes their numbers, from 1."""

_OTHER_WORDS: Final = ("OFFLOAD", "AUTO_WRAP")
"""Words that a Trainer's `fsdp` may hold beside a strategy."""

_FIRST_VERSION: Final = (
    "fsdp_version is not set, and then it is FSDP's first version that runs; its second is what is estimated: "
    "fsdp_version: 2"
)
"""The default of accelerate, up to 1.15."""

_FSDP_KEY: Final = re.compile(r"fsdp_config\.(fsdp_)?")

_REPLICAS: Final = (
    "parallelism_config.parallelism_config_dp_replicate_size",
    "parallelism_config.dp_replicate_size",
    "dp_replicate_size",
)
"""Keys of the number of replicas."""

_MOVES: Final = f"fsdp_config.fsdp_{MOVES}"
"""A key that the Trainer's fsdp_config takes and ignores."""


def _shard(value: Any) -> str | None:
    """Return `shard` for an FSDP strategy, or for whether layers are gathered again; None where it is neither."""
    by_number = dict(zip("1234", STRATEGIES.values(), strict=True))
    return {"TRUE": "zero3", "FALSE": "zero2", **by_number, **STRATEGIES}.get(str(value).upper())


def _check_strategy(value: Any) -> Mapping[str, Any]:
    """Raise UnsupportedValue for another strategy; the key is read together with others."""
    if value is not None and _shard(value) is None:
        raise UnsupportedValue
    return {}


def check_version(value: Any) -> Mapping[str, Any]:
    """Raise UnsupportedValue for another version of FSDP than the second, which is what is run."""
    if value not in (None, 2):
        raise UnsupportedValue
    return {}


def check_fsdp(value: Any) -> Mapping[str, Any]:
    """Raise UnsupportedValue for other words of a Trainer's `fsdp`; the key is read together with others."""
    if not {*_split_words(value)} <= {*STRATEGIES, *_OTHER_WORDS, "TRUE"}:
        raise UnsupportedValue
    return {}


def _split_words(value: Any) -> tuple[str, ...]:
    """Return the words of a Trainer's `fsdp`, which newer versions only switch on.  Raises UnsupportedValue."""
    if isinstance(value, bool) or value is None:
        return ()
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UnsupportedValue
    return tuple(word.upper() for word in words)


FSDP_KEYS: Final[Mapping[str, KeyReader]] = (
    {
        f"fsdp_config.{prefix}{name}": read_together
        for prefix in ("", "fsdp_")
        for name in (
            *("activation_checkpointing", "offload_params", "cpu_offload"),
            *(
                "transformer_layer_cls_to_wrap",
                "state_dict_type",
                "final_state_dict_type",
                "cpu_ram_efficient_loading",
            ),
        )
    }
    | {
        f"fsdp_config.{prefix}{name}": reader
        for prefix in ("", "fsdp_")
        for name, reader in {
            "auto_wrap_policy": only("TRANSFORMER_BASED_WRAP"),
            **dict.fromkeys(("sync_module_states", "use_orig_params"), only(True, "true")),
        }.items()
    }
    | {
        f"fsdp_config.{prefix}{name}": check_version if name == "version" else _check_strategy
        for prefix in ("", "fsdp_")
        for name in ("version", "reshard_after_forward", "sharding_strategy")
    }
)


def read_fsdp(flat: Mapping[str, Any], prefix: str, version: int = 2) -> Iterator[Setting]:
    """Yield what FSDP's section says: what is divided, replicas, offload; its keys may have fsdp_ in front.

    The first version of FSDP has a strategy, the second whether layers are gathered again; `version` is the trainer's
    default.
    """
    keys = {_FSDP_KEY.sub("", key): key for key in flat if _FSDP_KEY.match(key)}
    section = {name: flat[key] for name, key in keys.items() if flat[key] is not None}
    stated = section.get("version", flat.get("fsdp_version"))
    guess_reason = _FIRST_VERSION if stated is None and version == 1 else None
    version = version if stated is None else stated
    try:
        words = _split_words(flat.get("fsdp"))
    except UnsupportedValue:
        words = ()
    strategy = next((word for word in words if word in STRATEGIES), True)
    name = "sharding_strategy" if version != 2 and "sharding_strategy" in section else "reshard_after_forward"
    shard = _shard(section.get(name, strategy)) or "zero3"
    replicas = next((flat[key] for key in _REPLICAS if isinstance(flat.get(key), int)), 1)
    key = keys.get(name, f"fsdp_config.{prefix}{name}")
    yield Setting(option="shard", value="hsdp" if replicas > 1 else shard, key=key, guess_reason=guess_reason)
    offload_keys = [keys[name] for name in ("offload_params", "cpu_offload") if section.get(name) in (True, "true")]
    if offload_keys or "OFFLOAD" in words:
        yield Setting(option="param_offload", value="cpu", key=next(iter(offload_keys), "fsdp"))


def read_fsdp_checkpointing(flat: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield that FSDP checkpoints every layer, if its section says so."""
    if flat.get("fsdp_config.activation_checkpointing") or flat.get("fsdp_config.fsdp_activation_checkpointing"):
        yield Setting(option="checkpointing", value="full", key="fsdp_config.activation_checkpointing")


def _read(flat: Mapping[str, Any]) -> Iterator[Setting]:
    yield Setting(option="engine", value="accelerate", key="accelerate")
    kind = flat.get("distributed_type")
    if kind == "FSDP":
        yield from read_fsdp(flat, "fsdp_", version=1)
    elif kind == "MULTI_GPU":
        yield Setting(option="shard", value="ddp", key="distributed_type")
    if flat.get("mixed_precision") == "no":
        yield fp32_by_default("mixed_precision")
    yield from read_fsdp_checkpointing(flat)
    if flat.get(_MOVES) is True:
        yield Setting(option="activation_offload", value="cpu", key=_MOVES)


ACCELERATE_FILE: Final = FileFormat(
    target="accelerate",
    marks=("distributed_type", "compute_environment"),
    keys={
        **FSDP_KEYS,
        _MOVES: read_together,
        "distributed_type": word("shard", {"FSDP": "zero3", "MULTI_GPU": "ddp", "NO": "none", "DEEPSPEED": None}),
        "mixed_precision": word("precision", {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "no": "fp32"}),
        "use_cpu": only(False),
        "num_machines": read_together,
        "num_processes": read_together,
        "gradient_accumulation_steps": number("grad_accum"),
        "parallelism_config.parallelism_config_dp_replicate_size": read_together,
        "parallelism_config.parallelism_config_dp_shard_size": read_together,
        "parallelism_config.parallelism_config_tp_size": number("tp"),
        "parallelism_config.parallelism_config_cp_size": number("cp"),
        "deepspeed_config.zero_stage": read_stage,
        "deepspeed_config.gradient_accumulation_steps": number("grad_accum"),
        "deepspeed_config.gradient_clipping": read_norm,
        "deepspeed_config.offload_optimizer_device": word("optimizer_offload", DEVICES),
        "deepspeed_config.offload_param_device": word("param_offload", DEVICES),
    },
    read=_read,
)
