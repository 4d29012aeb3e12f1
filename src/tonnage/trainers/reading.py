"""Settings files of other trainers, read into options of Job and Plan.

`read` takes the first of READERS by one of its marks.  It executes nothing and imports no trainer: YAML as plain
values alone, JSON by Python's own reader.  Whatever a file holds, the answer is a `TrainerConfig` or one error of
ours; what has no meaning here is listed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from tonnage.errors import UnreadableFile, UsageError
from tonnage.files import read_text
from tonnage.trainers.accelerate.read import ACCELERATE_FILE
from tonnage.trainers.axolotl.read import AXOLOTL_FILE
from tonnage.trainers.deepspeed.read import DEEPSPEED_FILE, GLOBAL_BATCH
from tonnage.trainers.hf_trainer.read import HF_TRAINER_FILE
from tonnage.trainers.keys import FileFormat, InvalidValue, UnsupportedValue
from tonnage.trainers.llama_factory.read import LLAMA_FACTORY_FILE
from tonnage.trainers.relevance import is_irrelevant
from tonnage.trainers.trl.read import TRL_FILE
from tonnage.units import pluralise

READERS: Final[tuple[FileFormat, ...]] = (
    DEEPSPEED_FILE,
    ACCELERATE_FILE,
    AXOLOTL_FILE,
    LLAMA_FACTORY_FILE,
    TRL_FILE,
    HF_TRAINER_FILE,
)
"""The formats that are known, the first match first: SFTConfig has all keys of TrainingArguments."""

CHANGEABLE: Final = (
    *("checkpointing", "activation_offload", "optimizer_offload", "param_offload", "shard", "loss", "attention"),
    *("tp", "pp", "cp", "ep", "allocator"),
)
"""Options that a plan may choose without training something else, or otherwise."""

RANKS: Final = "num_processes"
"""accelerate's key of the number of ranks."""

_MOST_BYTES: Final = 2**20


_MOST_YAML_BYTES: Final = 2**17
"""Size of the largest YAML file that is read: its parser takes a second for a tenth of a megabyte."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The settings of a trainer's file, in options of Job and Plan."""

    target: str
    """The trainer's name."""
    options: Mapping[str, Any]
    """Fields of Job and Plan by their names."""
    keys: Mapping[str, str]
    """The file's own name of each option."""
    not_understood: tuple[str, ...]
    """`key = value` of settings without a meaning here: they may need memory that is not counted."""
    document: Mapping[str, Any]
    """The whole file, by dotted names."""
    model: str | None = None
    """The model that it names."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Options that the file leaves out and that are only likely: why, and what to do, in one line."""
    batch: int | None = None
    """Sequences of a whole step over all ranks, where the file has them (`train_batch_size`)."""

    def on(self, ranks: int) -> TrainerConfig:
        """Return the same on so many ranks, among which a step's sequences are divided as DeepSpeed does it.

        What the file leaves out of micro-batch and accumulation follows.  Raises UnreadableFile for a contradiction.
        """
        return self._with_batch(ranks)._with_ranks(ranks)

    def _with_ranks(self, ranks: int) -> TrainerConfig:
        """Return the same; a number of ranks in the file that is another one is not understood."""
        stated = self.document.get(RANKS)
        if type(stated) is not int or stated == ranks:
            return self
        other = f"{RANKS} = {stated}, and the plan is for {pluralise(ranks, 'GPU')}"
        return replace(self, not_understood=(*self.not_understood, other))

    def _with_batch(self, ranks: int) -> TrainerConfig:
        if self.batch is None:
            return self
        micro_batch, steps = (self.options.get(name) for name in ("micro_batch", "grad_accum"))
        if micro_batch is None:
            micro_batch = self.batch // ranks // (steps or 1)
        steps = steps or self.batch // (micro_batch * ranks or 1)
        if micro_batch * steps * ranks != self.batch:
            raise UnreadableFile(
                f"{GLOBAL_BATCH} = {self.batch} is not {micro_batch} sequences x {steps} micro-batches x "
                f"{pluralise(ranks, 'rank')}; such a job does not start."
            )
        return replace(self, options={**self.options, "micro_batch": micro_batch, "grad_accum": steps})

    def exactly(self, stated: Mapping[str, Any], gpus: int) -> dict[str, Any]:
        """Return the options of the job as the file has it, with those that the user `stated`.

        Trainers replicate by default.
        """
        shard = {"shard": "ddp"} if gpus > 1 else {}
        return {**shard, **self.options, **stated}

    def openly(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the same job without CHANGEABLE ones, with those that the user `stated`."""
        kept = {name: value for name, value in self.options.items() if name not in CHANGEABLE}
        return {**kept, **stated}


def read(path: Path) -> TrainerConfig:
    """Return the settings of a trainer's file.  Raises UnreadableFile where no format is recognised."""
    document = _load(path)
    for reader in READERS:
        if any(mark in document for mark in reader.marks):
            _check_one_precision(document, path)
            return _read_as(reader, document, path)
    known = "; ".join(f"{reader.target}: {', '.join(reader.marks)}" for reader in READERS)
    raise UnreadableFile(f"{path} has no key by which a trainer's file is known ({known}).")


def _check_one_precision(document: Mapping[str, Any], path: Path) -> None:
    """Raise UnreadableFile for both 16-bit precisions, with which no trainer starts."""
    if all(_is_on(document.get(name)) for name in ("bf16", "fp16")):
        raise UnreadableFile(f"{path} asks for bf16 and for fp16; a trainer computes in one of them.")


def _is_on(value: Any) -> bool:
    """Return whether a switch is on, or DeepSpeed's section with one."""
    return value is True or (isinstance(value, Mapping) and value.get("enabled") is True)


def _load(path: Path) -> dict[str, Any]:
    if path.suffix == ".toml":
        raise UnreadableFile(f"{path} is TOML, as torchtitan's; JSON and YAML files of other trainers are read.")
    try:
        is_json = path.suffix == ".json"
        text = read_text(path, _MOST_BYTES if is_json else _MOST_YAML_BYTES)
        document = json.loads(text, object_pairs_hook=_unique) if is_json else yaml.load(text, _Loader)
    except FileNotFoundError as error:
        raise UnreadableFile(f"{path} is not there.") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        language = "JSON" if path.suffix == ".json" else "YAML"
        raise UnreadableFile(f"{path} cannot be read as {language} ({reason}).") from error
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UnreadableFile(f"{path} has no named settings.")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON.  Raises ValueError for a repeated key, of which libraries take either value."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"it says {key} twice")
        values[key] = value
    return values


class _Loader(yaml.SafeLoader):
    """Plain values, each key once, and no aliases: a few lines of them can stand for more than any memory holds."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        repeated = next((name for name, count in counts.items() if count > 1), None)
        if repeated is not None:
            raise yaml.YAMLError(f"it says {repeated} twice")
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)


def _read_as(reader: FileFormat, document: Mapping[str, Any], path: Path) -> TrainerConfig:
    """Return the settings key by key, then those of several keys together."""
    flat = dict(_flatten(document))
    options: dict[str, Any] = {}
    keys: dict[str, str] = {}
    not_understood = []
    for key, value in flat.items():
        read_key = reader.keys.get(key)
        if read_key is None:
            if not is_irrelevant(key, value, flat):
                not_understood.append(_shown(key, value))
            continue
        try:
            values = read_key(value)
        except InvalidValue as possible:
            raise UnreadableFile(f"{path}: {_shown(key, value)}; it can be {possible}.") from None
        except (UnsupportedValue, UsageError, TypeError, ValueError, KeyError, OverflowError):
            not_understood.append(_shown(key, value))
            continue
        options |= values
        keys |= dict.fromkeys(values, key)
    not_understood += [_shown(key, flat[key]) for key in reader.ignored(flat) if key in flat]
    silent = {}
    for setting in reader.read(flat):
        options[setting.option] = setting.value
        keys[setting.option] = setting.key
        if setting.guess_reason is not None:
            silent[setting.option] = setting.guess_reason
    model = options.pop("model", None)
    keys.pop("model", None)
    possible_options = _possible(options, keys, flat, not_understood)
    batch = _batch(flat.get(GLOBAL_BATCH), not_understood) if GLOBAL_BATCH in reader.keys else None
    return TrainerConfig(
        target=reader.target,
        options={**_engine(reader.target, possible_options), **possible_options},
        keys=keys,
        not_understood=tuple(not_understood),
        document=flat,
        model=model,
        silent=silent,
        batch=batch,
    )


def _batch(value: Any, not_understood: list[str]) -> int | None:
    """Return the sequences of a step; another value than a number is added to what is not understood."""
    if value is None or value == "auto":
        return None
    if type(value) is not int or not 0 < value < 10**9:
        not_understood.append(_shown(GLOBAL_BATCH, value))
        return None
    return value


def _engine(target: str, options: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the engine with the target's name, where it has settings for all options of the file."""
    from tonnage.job import Job
    from tonnage.options import options as declared
    from tonnage.plans import Plan
    from tonnage.trainers import ENGINES

    engine = next((engine for engine in ENGINES if engine.name == target), None)
    if engine is None:
        return {}
    defaults = {item.name: item.default for kind in (Job, Plan) for item, _ in declared(kind)}
    runs_all = all(engine.has_setting(name, value, defaults[name]) for name, value in options.items())
    return {"engine": target} if runs_all else {}


def _possible(
    options: dict[str, Any], keys: dict[str, str], flat: Mapping[str, Any], not_understood: list[str]
) -> dict[str, Any]:
    """Return the options whose values a field can have; the others are added to what is not understood."""
    from tonnage.job import Job
    from tonnage.options import is_accepted, is_amount
    from tonnage.options import options as declared
    from tonnage.plans import Plan

    fields = {item.name: option for kind in (Job, Plan) for item, option in declared(kind)}
    possible = {}
    for name, value in options.items():
        option = fields[name]
        is_number = isinstance(value, int) and not isinstance(value, bool) and option.least <= value < 2**31
        is_possible = {
            "word": isinstance(value, str) and is_accepted(value, option.possible),
            "number": is_number,
            "amount": is_amount(value),
            "fraction": isinstance(value, float) and 0 <= value < 1,
            "names": isinstance(value, tuple) and all(isinstance(word, str) for word in value),
            "switch": isinstance(value, bool),
        }[option.kind]
        if is_possible:
            possible[name] = value
        else:
            not_understood.append(_shown(keys[name], flat.get(keys[name], value)))
    return possible


def _flatten(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth < 5:
            yield from _flatten({str(inner): held for inner, held in value.items()}, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _shown(key: str, value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # a whole number of more than 4,300 digits, which Python refuses to write
        text = "a number of thousands of digits"
    return f"{key} = {text if len(text) <= 60 else text[:57] + '...'}"
