"""Settings of other trainers, read in: what a file says, in options of Job and Plan, and what was not understood.

Reading executes nothing and imports no trainer: YAML as plain values alone, JSON by Python's own reader.  Whatever a
file holds, the answer is a `Given` or one error of ours.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Final

import yaml

from tonnage.errors import UnreadableFile, UsageError
from tonnage.files import read_text
from tonnage.trainers.accelerate.run import MOVES
from tonnage.trainers.axolotl.write import ATTENTION as AXOLOTLS_ATTENTION
from tonnage.trainers.axolotl.write import OPTIMIZERS as AXOLOTLS
from tonnage.trainers.deepspeed.run import OPTIMIZERS as DEEPSPEEDS
from tonnage.trainers.deepspeed.run import STAGES
from tonnage.trainers.hf_trainer.run import OPTIMIZERS as TRAINERS
from tonnage.units import counted

_MOST_BYTES: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a file says."""

    target: str
    """Whose it is."""
    options: Mapping[str, Any]
    """Fields of Job and Plan by their names."""
    keys: Mapping[str, str]
    """The file's own name of each option."""
    not_understood: tuple[str, ...]
    """`key = value` of what has no meaning here: it may need memory that is not counted."""
    document: Mapping[str, Any]
    """Everything that it says, by dotted names."""
    model: str | None = None
    """The model that it names."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Options that it does not say and that are taken to be what they are here: why, and what to do, in one line."""
    batch: int | None = None
    """Sequences of a whole step over all ranks, where the file says that (`train_batch_size`)."""

    def on(self, ranks: int) -> Given:
        """The same on so many ranks, among which a step's sequences are divided as DeepSpeed does it.

        What the file leaves out of micro-batch and accumulation follows.  Raises UnreadableFile for a contradiction.
        """
        if self.batch is None:
            return self
        micro_batch, steps = (self.options.get(name) for name in ("micro_batch", "grad_accum"))
        if micro_batch is None:
            micro_batch = self.batch // ranks // (steps or 1)
        steps = steps or self.batch // (micro_batch * ranks or 1)
        if micro_batch * steps * ranks != self.batch:
            raise UnreadableFile(
                f"{_BATCH_OF_ALL} = {self.batch} is not {micro_batch} sequences x {steps} micro-batches x "
                f"{counted(ranks, 'rank')}; such a job does not start."
            )
        return replace(self, options={**self.options, "micro_batch": micro_batch, "grad_accum": steps})

    def exactly(self, said: Mapping[str, Any], gpus: int) -> dict[str, Any]:
        """The options of the job as the file has it, and what was `said` besides; trainers replicate by default."""
        shard = {"shard": "ddp"} if gpus > 1 else {}
        return {**shard, **self.options, **said}

    def openly(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the same job, with what saves memory or time left open."""
        kept = {name: value for name, value in self.options.items() if name not in CHANGEABLE}
        return {**kept, **said}


_BATCH_OF_ALL: Final = "train_batch_size"

CHANGEABLE: Final = (
    *("checkpointing", "activation_offload", "optimizer_offload", "param_offload", "shard", "loss", "attention"),
    *("tp", "pp", "cp", "ep", "allocator"),
)
"""Options that a plan may choose without training something else, or otherwise."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """One thing that a key says."""

    option: str
    value: Any
    key: str
    silent: str | None = None
    """What the file does not say, so that the value is only likely."""


class _Unclear(Exception):
    """A value that a key is not known to have."""


class _IllTyped(Exception):
    """A value that a key cannot have; says what it can."""


Reader = Callable[[Any], Mapping[str, Any]]
"""Turns the value of a key into options; raises _Unclear, or _IllTyped."""


def read(path: Path) -> Given:
    """What a file of a trainer says.  Raises UnreadableFile where it is none that is known here."""
    document = _document(path)
    for target, marks, keys, whole in _KINDS:
        if any(mark in document for mark in marks):
            _check_one_precision(document, path)
            return _given(target, document, keys, whole, path)
    known = "; ".join(f"{target}: {', '.join(marks)}" for target, marks, _, _ in _KINDS)
    raise UnreadableFile(f"{path} has no key by which a trainer's file is known ({known}).")


def _check_one_precision(document: Mapping[str, Any], path: Path) -> None:
    """Both of 16 bits is what no trainer starts with."""
    if all(_is_on(document.get(name)) for name in ("bf16", "fp16")):
        raise UnreadableFile(f"{path} asks for bf16 and for fp16; a trainer computes in one of them.")


def _is_on(said: Any) -> bool:
    """A switch, or DeepSpeed's section with one."""
    return said is True or (isinstance(said, Mapping) and said.get("enabled") is True)


def _document(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, _MOST_BYTES)
        found = json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else yaml.load(text, _Loader)
    except FileNotFoundError as error:
        raise UnreadableFile(f"{path} is not there.") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnreadableFile(f"{path} cannot be read as {_format(path)} ({reason}).") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UnreadableFile(f"{path} has no named settings.")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON.  Raises ValueError for a key that it has twice, of which libraries take either."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it says {key} twice")
        found[key] = value
    return found


class _Loader(yaml.SafeLoader):
    """Plain values, each key once, and no aliases: a few lines of them can stand for more than any memory holds."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"it says {twice} twice")
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)


def _format(path: Path) -> str:
    return "JSON" if path.suffix == ".json" else "YAML"


def _given(
    target: str, document: Mapping[str, Any], keys: Mapping[str, Reader], whole: Callable[..., Any], path: Path
) -> Given:
    """Key by key, then what several of them say together."""
    flat = dict(_flat(document))
    options: dict[str, Any] = {}
    names: dict[str, str] = {}
    unclear = []
    for key, value in flat.items():
        reader = keys.get(key)
        if reader is None:
            if not _says_nothing(key, value):
                unclear.append(_shown(key, value))
            continue
        try:
            said = reader(value)
        except _IllTyped as possible:
            raise UnreadableFile(f"{path}: {_shown(key, value)}; it can be {possible}.") from None
        except (_Unclear, UsageError, TypeError, ValueError, KeyError, OverflowError):
            unclear.append(_shown(key, value))
            continue
        options |= said
        names |= dict.fromkeys(said, key)
    silent = {}
    for found in whole(flat):
        options[found.option] = found.value
        names[found.option] = found.key
        if found.silent is not None:
            silent[found.option] = found.silent
    model = options.pop("model", None)
    names.pop("model", None)
    kept = _possible(options, names, flat, unclear)
    batch = _batch(flat.get(_BATCH_OF_ALL), unclear) if _BATCH_OF_ALL in keys else None
    return Given(
        target=target,
        options={**_engine(target, kept), **kept},
        keys=names,
        not_understood=tuple(unclear),
        document=flat,
        model=model,
        silent=silent,
        batch=batch,
    )


def _batch(said: Any, unclear: list[str]) -> int | None:
    """Sequences of a step; what is no such number is added to what is not understood."""
    if said is None or said == "auto":
        return None
    if type(said) is not int or not 0 < said < 10**9:
        unclear.append(_shown(_BATCH_OF_ALL, said))
        return None
    return said


def _engine(target: str, said: Mapping[str, Any]) -> Mapping[str, str]:
    """The engine that carries the target's name, where it has words for all that the file says."""
    from tonnage.job import Job
    from tonnage.options import options as declared
    from tonnage.plans import Plan
    from tonnage.trainers import ENGINES

    engine = next((one for one in ENGINES if one.name == target), None)
    if engine is None:
        return {}
    defaults = {item.name: item.default for kind in (Job, Plan) for item, _ in declared(kind)}
    told = all(engine.has_words(name, value, defaults[name]) for name, value in said.items())
    return {"engine": target} if told else {}


def _possible(
    options: dict[str, Any], names: dict[str, str], flat: Mapping[str, Any], unclear: list[str]
) -> dict[str, Any]:
    """Without values that a field cannot have."""
    from tonnage.job import Job
    from tonnage.options import is_amount, listed
    from tonnage.options import options as declared
    from tonnage.plans import Plan

    fields = {item.name: option for kind in (Job, Plan) for item, option in declared(kind)}
    kept = {}
    for name, value in options.items():
        option = fields[name]
        number = isinstance(value, int) and not isinstance(value, bool) and option.least <= value < 2**31
        right = {
            "word": isinstance(value, str) and listed(value, option.possible),
            "number": number,
            "amount": is_amount(value),
            "fraction": isinstance(value, float) and 0 <= value < 1,
            "names": isinstance(value, tuple) and all(isinstance(word, str) for word in value),
            "switch": isinstance(value, bool),
        }[option.kind]
        if right:
            kept[name] = value
        else:
            unclear.append(_shown(names[name], flat.get(names[name], value)))
    return kept


def _flat(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth < 5:
            yield from _flat({str(inner): held for inner, held in value.items()}, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _shown(key: str, value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # a whole number of more than 4,300 digits, which Python writes for nobody
        text = "a number of thousands of digits"
    return f"{key} = {text if len(text) <= 60 else text[:57] + '...'}"


_QUIET: Final = re.compile(
    "learning_rate|lr|weight_decay|warmup|scheduler|seed|output_dir|logging|save|eval|dataset|data_|datasets|"
    "num_train_epochs|num_epochs|max_steps|wandb|report_to|template|steps_per_print|wall_clock_breakdown|"
    "special_tokens|lora_alpha|machine_rank|main_process|main_training|rdzv|same_network|debug|"
    "use_cpu|compute_environment|do_train|overwrite|plot_loss|hub_|push_to_hub|run_name|disable_tqdm|val_set|"
    "betas|eps|adam_|preprocessing|dataloader_|tpu_|downcast_bf16|dynamo|logger|plugins"
)
"""Beginnings of keys (of their last part) that say nothing about the memory of a step."""


def _says_nothing(key: str, value: Any) -> bool:
    """Off, absent, automatic, or about something else than memory."""
    if value in (None, False, "auto", "", 0) or value == {} or value == []:
        return True
    last = key.rpartition(".")[2]
    return _QUIET.match(key) is not None or _QUIET.match(last) is not None


def _number(option: str) -> Reader:
    def reader(value: Any) -> Mapping[str, Any]:
        if value == "auto" or value is None:
            return {}
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _IllTyped("a whole number above zero")
        return {option: value}

    return reader


def _fraction(option: str) -> Reader:
    def reader(value: Any) -> Mapping[str, Any]:
        if value is None:
            return {}
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise _IllTyped("a number from 0 to below 1")
        return {option: float(value)}

    return reader


def _norm(value: Any) -> Mapping[str, Any]:
    """A norm to clip at; 0 and absent are none."""
    if value in ("auto", None, 0):
        return {}
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise _IllTyped("a number above zero")
    return {"clip_grad_norm": float(value)}


def _word(option: str, words: Mapping[Any, Any]) -> Reader:
    def reader(value: Any) -> Mapping[str, Any]:
        if isinstance(value, str) and value.lower() == "auto" and "auto" not in words:
            return {}
        for word, found in words.items():
            if word == value and type(word) is type(value):  # True is not 1
                return {} if found is None else {option: found}
        raise _Unclear

    return reader


def _model(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, str) or not value:
        raise _Unclear
    return {"model": value}


def _understood(value: Any) -> Mapping[str, Any]:
    """Read together with others by the kind's own function."""
    return {}


def _targets(value: Any) -> Mapping[str, Any]:
    if value in ("all-linear", "all", "all_linear"):
        return {"lora_targets": ("all-linear",)}
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise _Unclear
    return {"lora_targets": tuple(name.strip() for name in names)}


_OPTIM: Final = {
    **{said["optim"]: name for name, said in TRAINERS.items() if "optim" in said},
    **{its: name for name, its in AXOLOTLS.items() if its != "adamw_torch_fused"},
    "adamw_torch_fused": "adamw",
    "adamw_8bit": "adamw-8bit",
    "paged_adamw": "paged-adamw",
}

_MOMENTUM: Final = TRAINERS["sgd"]["optim_args"]
"""Without it the Trainer's `sgd` is torch's, which has none."""


def _momentum(flat: Mapping[str, Any]) -> Iterator[_Found]:
    if flat.get("optim") == "sgd" and flat.get("optim_args") == _MOMENTUM:
        yield _Found(option="optimizer", value="sgd", key="optim_args")


def _checkpointed(flat: Mapping[str, Any]) -> Iterator[_Found]:
    """The Trainer's two names, and every N-th layer."""
    for word in ("activation_checkpointing", "gradient_checkpointing"):
        if not flat.get(word):
            continue
        every = flat.get(f"{word}_kwargs.every_n_layers", 1)
        several = isinstance(every, int) and not isinstance(every, bool) and every > 1
        reentrant = flat.get(f"{word}_kwargs.use_reentrant") is True
        said = f"every-{every}" if several else "full-reentrant" if reentrant else "full"
        yield _Found(option="checkpointing", value=said, key=word)
        if flat.get(f"{word}_kwargs.offload") or flat[word] == "offload":
            yield _Found(option="activation_offload", value="cpu", key=word)
    if flat.get("fsdp_config.activation_checkpointing") or flat.get("fsdp_config.fsdp_activation_checkpointing"):
        yield _Found(option="checkpointing", value="full", key="fsdp_config.activation_checkpointing")


_STRATEGIES: Final = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp"}
"""What FSDP's first version calls what is divided; accelerate also takes their numbers, from 1."""

_BESIDES: Final = ("OFFLOAD", "AUTO_WRAP")
"""What a Trainer's `fsdp` may hold in words beside a strategy."""


def _strategy(value: Any) -> str | None:
    """What is divided by an FSDP strategy, or by whether layers are gathered again; None where it is neither."""
    word = str(value).upper()
    numbered = dict(zip("1234", _STRATEGIES.values(), strict=True))
    return {"TRUE": "zero3", "FALSE": "zero2", **numbered, **_STRATEGIES}.get(word)


def _sharding(value: Any) -> Mapping[str, Any]:
    """Read together with others."""
    if value is not None and _strategy(value) is None:
        raise _Unclear
    return {}


def _version(value: Any) -> Mapping[str, Any]:
    """Of FSDP; what is run is the second."""
    if value not in (None, 2):
        raise _Unclear
    return {}


def _fsdp_words(value: Any) -> tuple[str, ...]:
    """The words of a Trainer's `fsdp`, which newer ones only switch on.  Raises _Unclear."""
    if isinstance(value, bool) or value is None:
        return ()
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise _Unclear
    return tuple(word.upper() for word in words)


def _fsdp(value: Any) -> Mapping[str, Any]:
    """Read together with others."""
    if not {*_fsdp_words(value)} <= {*_STRATEGIES, *_BESIDES, "TRUE"}:
        raise _Unclear
    return {}


def _fully_sharded(flat: Mapping[str, Any], prefix: str, version: int = 2) -> Iterator[_Found]:
    """FSDP's part of a file: what is divided, replicas, offload; its keys may have fsdp_ in front everywhere.

    The first version of FSDP is told a strategy, the second whether layers are gathered again; `version` is the
    trainer's where the file does not say.
    """
    keys = {_FSDPS_KEY.sub("", key): key for key in flat if _FSDPS_KEY.match(key)}
    said = {name: flat[key] for name, key in keys.items() if flat[key] is not None}
    stated = said.get("version", flat.get("fsdp_version"))
    silent = _FIRST_VERSION if stated is None and version == 1 else None
    version = version if stated is None else stated
    try:
        words = _fsdp_words(flat.get("fsdp"))
    except _Unclear:
        words = ()
    strategy = next((word for word in words if word in _STRATEGIES), True)
    name = "sharding_strategy" if version != 2 and "sharding_strategy" in said else "reshard_after_forward"
    divided = _strategy(said.get(name, strategy)) or "zero3"
    replicas = next((flat[key] for key in _REPLICAS if isinstance(flat.get(key), int)), 1)
    key = keys.get(name, f"fsdp_config.{prefix}{name}")
    yield _Found(option="shard", value="hsdp" if replicas > 1 else divided, key=key, silent=silent)
    offloaded = [keys[place] for place in ("offload_params", "cpu_offload") if said.get(place) in (True, "true")]
    if offloaded or "OFFLOAD" in words:
        yield _Found(option="param_offload", value="cpu", key=next(iter(offloaded), "fsdp"))


_FIRST_VERSION: Final = (
    "fsdp_version is not set, and then it is FSDP's first version that runs; its second is what is estimated: "
    "fsdp_version: 2"
)
"""Of accelerate, up to 1.15."""

_FSDPS_KEY: Final = re.compile(r"fsdp_config\.(fsdp_)?")

_REPLICAS: Final = (
    "parallelism_config.parallelism_config_dp_replicate_size",
    "parallelism_config.dp_replicate_size",
    "dp_replicate_size",
)


def _weights_decide(key: str) -> _Found:
    """Without bf16 and fp16 all is computed in the dtype of the weights, which such a file does not say."""
    said = "neither bf16 nor fp16 is set; weights are taken to be fp32, and if they are not: --precision bf16-true"
    return _Found(option="precision", value="fp32", key=key, silent=said)


def _precision(flat: Mapping[str, Any], *, bf16: str = "bf16-mixed") -> Iterator[_Found]:
    if flat.get("pure_bf16") is True:
        yield _Found(option="precision", value="bf16-true", key="pure_bf16")
    elif flat.get("fp16") is True:
        yield _Found(option="precision", value="fp16-mixed", key="fp16")
    elif flat.get("bf16") in (True, "auto", "true", "full") or flat.get("bfloat16") is True:
        yield _Found(option="precision", value=bf16, key="bf16")
    else:
        yield _weights_decide("bf16")


def _of_sft(flat: Mapping[str, Any]) -> Iterator[_Found]:
    """SFTConfig computes in bf16 and checkpoints where nothing is said, and its loss never has all logits."""
    yield _Found(option="loss", value="chunked", key="SFTConfig")
    bf16 = True if flat.get("bf16") is None and flat.get("fp16") is not True else flat.get("bf16")
    words = ("activation_checkpointing", "gradient_checkpointing")
    checkpointed = {} if any(flat.get(word) is not None for word in words) else {words[1]: True}
    yield from _of_trainer({**flat, **checkpointed, "bf16": bf16})
    yield _Found(option="engine", value="trl", key="SFTConfig")


def _of_trainer(flat: Mapping[str, Any]) -> Iterator[_Found]:
    yield _Found(option="engine", value="hf-trainer", key="TrainingArguments")
    yield from _precision(flat)
    yield from _momentum(flat)
    yield from _checkpointed(flat)
    if flat.get("fsdp"):
        yield from _fully_sharded(flat, "")


def _of_axolotl(flat: Mapping[str, Any]) -> Iterator[_Found]:
    adapter = flat.get("adapter")
    if flat.get("load_in_8bit") is True:
        yield _Found(option="method", value="qlora", key="load_in_8bit")
        yield _Found(option="quant", value="int8", key="load_in_8bit")
    elif adapter in ("lora", "qlora"):
        yield _Found(option="method", value=adapter, key="adapter")
    if adapter == "qlora":
        single = flat.get("bnb_config_kwargs.bnb_4bit_use_double_quant") is False
        kind = "fp4" if flat.get("bnb_config_kwargs.bnb_4bit_quant_type") == "fp4" else "nf4"
        yield _Found(option="quant", value=kind if single else f"{kind}-double", key="adapter")
    if adapter == "qlora" or flat.get("load_in_8bit") is True:
        yield _Found(option="unquantized_dtype", value="compute", key="adapter")
    for found in _precision(flat, bf16="bf16-mixed" if adapter else "bf16-true"):
        yield replace(found, silent=None)  # it loads the weights in what it computes in
    yield from _checkpointed(flat)
    if flat.get("liger_fused_linear_cross_entropy") is True:
        yield _Found(option="loss", value="liger", key="liger_fused_linear_cross_entropy")
    if flat.get("fsdp") or any(key.startswith("fsdp_config.") for key in flat):
        yield from _fully_sharded(flat, "")


def _of_llama_factory(flat: Mapping[str, Any]) -> Iterator[_Found]:
    if flat.get("finetuning_type", "lora") == "lora":
        bits = flat.get("quantization_bit")
        yield _Found(option="method", value="qlora" if bits in (4, 8) else "lora", key="finetuning_type")
        if bits in (4, 8):
            kind = "fp4" if flat.get("quantization_type") == "fp4" else "nf4"
            double = "" if flat.get("double_quantization") is False else "-double"
            yield _Found(option="quant", value="int8" if bits == 8 else kind + double, key="quantization_bit")
            yield _Found(option="unquantized_dtype", value="compute", key="quantization_bit")
    yield from _precision(flat)
    yield from _momentum(flat)
    off = flat.get("disable_gradient_checkpointing") is True
    reentrant = flat.get("use_reentrant_gc", True) is True
    said = "none" if off else "full-reentrant" if reentrant and flat.get("finetuning_type") == "full" else "full"
    yield _Found(option="checkpointing", value=said, key="disable_gradient_checkpointing")
    if flat.get("enable_liger_kernel") is True:
        yield _Found(option="loss", value="liger", key="enable_liger_kernel")


def _of_deepspeed(flat: Mapping[str, Any]) -> Iterator[_Found]:
    yield _Found(option="engine", value="deepspeed", key="ds_config")
    for name, precision in (("bf16", "bf16-mixed"), ("fp16", "fp16-mixed")):
        if flat.get(f"{name}.enabled") in (True, "auto"):
            yield _Found(option="precision", value=precision, key=f"{name}.enabled")
            break
    else:
        yield _weights_decide("bf16.enabled")
    params = {key.rpartition(".")[2]: value for key, value in flat.items() if key.startswith("optimizer.params.")}
    own = {name: value for name, value in params.items() if name in ("torch_adam", "foreach")}
    for name, said in DEEPSPEEDS.items():
        if said == own and name != "adamw":
            yield _Found(option="optimizer", value=name, key="optimizer.params")


_MOVES: Final = f"fsdp_config.fsdp_{MOVES}"
"""A key that the Trainer's fsdp_config takes and forgets."""


def _of_accelerate(flat: Mapping[str, Any]) -> Iterator[_Found]:
    yield _Found(option="engine", value="accelerate", key="accelerate")
    kind = flat.get("distributed_type")
    if kind == "FSDP":
        yield from _fully_sharded(flat, "fsdp_", version=1)
    elif kind == "MULTI_GPU":
        yield _Found(option="shard", value="ddp", key="distributed_type")
    if flat.get("mixed_precision") == "no":
        yield _weights_decide("mixed_precision")
    yield from _checkpointed(flat)
    if flat.get(_MOVES) is True:
        yield _Found(option="activation_offload", value="cpu", key=_MOVES)


_BATCH: Final[Mapping[str, Reader]] = {
    "per_device_train_batch_size": _number("micro_batch"),
    "gradient_accumulation_steps": _number("grad_accum"),
    "max_grad_norm": _norm,
    "bf16": _understood,
    "fp16": _understood,
    "activation_checkpointing": _understood,
    "gradient_checkpointing": _understood,
    **{
        f"{word}_checkpointing_kwargs.{name}": _understood
        for word in ("activation", "gradient")
        for name in ("every_n_layers", "use_reentrant", "offload")
    },
}

_FSDP: Final[Mapping[str, Reader]] = {
    f"fsdp_config.{prefix}{name}": _understood
    for prefix in ("", "fsdp_")
    for name in (
        *("activation_checkpointing", "offload_params", "cpu_offload"),
        *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "state_dict_type", "final_state_dict_type"),
        *("cpu_ram_efficient_loading", "sync_module_states", "use_orig_params"),
    )
} | {
    f"fsdp_config.{prefix}{name}": _version if name == "version" else _sharding
    for prefix in ("", "fsdp_")
    for name in ("version", "reshard_after_forward", "sharding_strategy")
}

_COMPILES: Final = _word("compile", {True: "model", "auto": "model", False: None, None: None})

_TRAINER: Final[Mapping[str, Reader]] = {
    "torch_compile": _COMPILES,
    **_BATCH,
    **_FSDP,
    "optim": _word("optimizer", _OPTIM),
    "optim_args": _word("optimizer", {_MOMENTUM: None}),
    "fsdp": _fsdp,
    "parallelism_config.dp_replicate_size": _understood,
    "parallelism_config.dp_shard_size": _understood,
    "parallelism_config.cp_size": _number("cp"),
    "max_length": _number("seq_len"),
    "accelerator_config.gradient_accumulation_kwargs.sync_each_batch": _word("accum_sync", {True: True, False: None}),
}

_SWITCHES: Final = {"flash": "flash", "flex": "flex", "eager": "eager", "sdp": "auto"}
"""What axolotl's switches that became `attn_implementation` have in front."""

_AXOLOTL: Final[Mapping[str, Reader]] = {
    "torch_compile": _COMPILES,
    **_BATCH,
    **_FSDP,
    "base_model": _model,
    "sequence_len": _number("seq_len"),
    "micro_batch_size": _number("micro_batch"),
    "optimizer": _word("optimizer", _OPTIM),
    "adapter": _word("method", {"lora": "lora", "qlora": "qlora", None: None, "": None}),
    "lora_r": _number("lora_rank"),
    "lora_dropout": _fraction("lora_dropout"),
    "lora_target_linear": _word("lora_targets", {True: ("all-linear",), False: None}),
    "lora_target_modules": _targets,
    "attn_implementation": _word("attention", {its: name for name, its in AXOLOTLS_ATTENTION.items()}),
    **{f"{its}_attention": _word("attention", {True: name, False: None}) for its, name in _SWITCHES.items()},
    "fsdp": _fsdp,
    "fsdp_version": _version,
    "dp_shard_size": _understood,
    "dp_replicate_size": _understood,
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "liger_fused_linear_cross_entropy"), _understood),
    **{f"bnb_config_kwargs.bnb_4bit_{name}": _understood for name in ("quant_type", "use_double_quant")},
    **dict.fromkeys(("bfloat16", "pad_to_sequence_len", "tf32"), _understood),
}

_LLAMA_FACTORY: Final[Mapping[str, Reader]] = {
    "torch_compile": _COMPILES,
    **_BATCH,
    "model_name_or_path": _model,
    "cutoff_len": _number("seq_len"),
    "stage": _word("method", {"pt": None, "sft": None}),
    "optim": _word("optimizer", _OPTIM),
    "optim_args": _word("optimizer", {_MOMENTUM: None}),
    "finetuning_type": _word("method", {"full": "full", "lora": "lora"}),
    "lora_rank": _number("lora_rank"),
    "lora_dropout": _fraction("lora_dropout"),
    "lora_target": _targets,
    "flash_attn": _word("attention", {"auto": "auto", "disabled": "eager", "sdpa": "auto"}),
    **dict.fromkeys(
        (
            *("pure_bf16", "disable_gradient_checkpointing", "use_reentrant_gc", "enable_liger_kernel"),
            *("quantization_bit", "quantization_type", "double_quantization"),
        ),
        _understood,
    ),
}

_STAGES: Final = {stage: name for name, stage in STAGES.items() if name != "none"}


def _stage(value: Any) -> Mapping[str, Any]:
    """Of ZeRO."""
    if isinstance(value, int | float) and value not in _STAGES:
        raise _IllTyped(", ".join(map(str, _STAGES)))
    return _word("shard", _STAGES)(value)


_PLACES: Final = {"cpu": "cpu", "nvme": "nvme", "none": None}

_DEEPSPEED: Final[Mapping[str, Reader]] = {
    "train_micro_batch_size_per_gpu": _number("micro_batch"),
    "gradient_accumulation_steps": _number("grad_accum"),
    _BATCH_OF_ALL: _understood,
    "gradient_clipping": _norm,
    "bf16.enabled": _understood,
    "fp16.enabled": _understood,
    "zero_optimization.stage": _stage,
    "zero_optimization.offload_optimizer.device": _word("optimizer_offload", _PLACES),
    "zero_optimization.offload_param.device": _word("param_offload", _PLACES),
    **{
        f"zero_optimization.{place}.{name}": _understood
        for place in ("offload_optimizer", "offload_param")
        for name in ("pin_memory", "nvme_path")
    },
    "optimizer.type": _word("optimizer", {"AdamW": "adamw"}),
    "optimizer.params.torch_adam": _understood,
    "optimizer.params.foreach": _understood,
}

_ACCELERATE: Final[Mapping[str, Reader]] = {
    **_FSDP,
    _MOVES: _understood,
    "distributed_type": _word("shard", {"FSDP": "zero3", "MULTI_GPU": "ddp", "NO": "none", "DEEPSPEED": None}),
    "mixed_precision": _word("precision", {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "no": "fp32"}),
    "num_machines": _understood,
    "num_processes": _understood,
    "gradient_accumulation_steps": _number("grad_accum"),
    "parallelism_config.parallelism_config_dp_replicate_size": _understood,
    "parallelism_config.parallelism_config_dp_shard_size": _understood,
    "parallelism_config.parallelism_config_tp_size": _number("tp"),
    "parallelism_config.parallelism_config_cp_size": _number("cp"),
    "deepspeed_config.zero_stage": _stage,
    "deepspeed_config.gradient_accumulation_steps": _number("grad_accum"),
    "deepspeed_config.gradient_clipping": _norm,
    "deepspeed_config.offload_optimizer_device": _word("optimizer_offload", _PLACES),
    "deepspeed_config.offload_param_device": _word("param_offload", _PLACES),
}

_ALONE: Final[Mapping[str, Reader]] = {
    **_TRAINER,
    "use_liger_kernel": _word("loss", {True: "liger", False: None, None: None}),  # which SFTTrainer does not take
}

_SFT: Final = (
    *("max_length", "dataset_kwargs", "dataset_text_field", "completion_only_loss", "assistant_only_loss"),
    *("padding_free", "packing_strategy"),
)
"""Keys that SFTConfig has and TrainingArguments has not."""

_KINDS: Final[tuple[tuple[str, tuple[str, ...], Mapping[str, Reader], Callable[..., Iterator[_Found]]], ...]] = (
    ("deepspeed", ("zero_optimization", "train_micro_batch_size_per_gpu", _BATCH_OF_ALL), _DEEPSPEED, _of_deepspeed),
    ("accelerate", ("distributed_type", "compute_environment"), _ACCELERATE, _of_accelerate),
    ("axolotl", ("base_model", "sequence_len"), _AXOLOTL, _of_axolotl),
    ("llama-factory", ("model_name_or_path", "finetuning_type", "cutoff_len"), _LLAMA_FACTORY, _of_llama_factory),
    ("trl", _SFT, _TRAINER, _of_sft),
    ("hf-trainer", ("per_device_train_batch_size", "gradient_accumulation_steps"), _ALONE, _of_trainer),
)
"""Whose a file is: the keys that give it away, what its keys say, and what they say together; first come first."""
