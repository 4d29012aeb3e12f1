"""Heads: what a configuration is trained for, and by which class of transformers.

A class that `architectures` names is built if it has a loss that is known here; a configuration without one gets the
first task that its type has a class for.  Decisions that the configuration does not make itself are in the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from tonnage.catalog.families import types_with
from tonnage.errors import UnreadableModel

MAPPINGS: Final[dict[str, tuple[str, ...]]] = {
    "image-text-to-text": ("IMAGE_TEXT_TO_TEXT",),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "masked-lm": ("MASKED_LM",),
    "speech-seq2seq": ("SPEECH_SEQ_2_SEQ",),
    "causal-lm": ("CAUSAL_LM",),
    "image-text-contrast": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    "image-classification": ("IMAGE_CLASSIFICATION",),
    "ctc": ("CTC",),
    "video-classification": ("VIDEO_CLASSIFICATION",),
    "object-detection": ("OBJECT_DETECTION",),
    "universal-segmentation": ("UNIVERSAL_SEGMENTATION",),
    "semantic-segmentation": ("SEMANTIC_SEGMENTATION",),
    "depth-estimation": ("DEPTH_ESTIMATION",),
    "sequence-classification": ("SEQUENCE_CLASSIFICATION",),
    "token-classification": ("TOKEN_CLASSIFICATION",),
    "question-answering": ("QUESTION_ANSWERING",),
    "audio-classification": ("AUDIO_CLASSIFICATION",),
    "time-series": ("TIME_SERIES_PREDICTION", "TIME_SERIES_REGRESSION"),
    "pretraining": ("PRETRAINING",),
    "features": ("", "TEXT_ENCODING"),
}
"""The mappings of transformers that list each task's classes, in the order in which a type is looked up.

BERT's and Whisper's types are in the causal mapping as well, T5's and BART's in several; the first that fits is
taken.  `features` are networks without a head.
"""

TASKS: Final = tuple(MAPPINGS)

NAMED_ALONE: Final = ("pretraining",)
"""Tasks that only `architectures` chooses if the type has another; their classes have several losses or none."""

_CHOSEN: Final[WeakKeyDictionary[Any, Head]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Head:
    """The task and the class that are chosen for a configuration."""

    task: str
    """One of TASKS."""
    class_name: str
    """The name of the class in transformers."""
    note: str | None = None
    """A sentence for the report on what the configuration did not state itself."""


def head(config: dict[str, Any]) -> Head:
    """Return the task and the class for a configuration.  Raises UnreadableModel for a type that transformers
    cannot train.
    """
    model_type = str(config.get("model_type"))
    fitting = {task: classes for task in TASKS if (classes := trainable_types()[task].get(model_type))}
    if not fitting:
        raise _untrainable_error(model_type, f" (looked for: {', '.join(TASKS)})")
    named = tuple(config.get("architectures") or ())
    for task, classes in fitting.items():
        for class_name in classes:
            if class_name in named:
                return _replace_headless(Head(task=task, class_name=class_name), fitting)
    chosen = _first_task(fitting, decoder=bool(config.get("is_decoder")))
    if not named:
        return chosen
    note = f"{named[0]} is not a class that tonnage trains: {chosen.class_name} is built in its place"
    return Head(task=chosen.task, class_name=chosen.class_name, note=note)


def check_type(config: Mapping[str, Any]) -> None:
    """Raise UnreadableModel for a type that the installed transformers does not name, without importing it."""
    model_type = str(config.get("model_type"))
    if not _may_be_listed(model_type):
        raise _untrainable_error(model_type)


@cache  # a search asks for each candidate
def _may_be_listed(model_type: str) -> bool:
    lists = _listing_source()
    return not lists or f'"{model_type}"' in lists


@cache
def _listing_source() -> str:
    """Return the source in which transformers lists its types; empty if it is not found."""
    spec = find_spec("transformers")
    folders = [Path(place) / "models" / "auto" for place in (spec.submodule_search_locations or ())] if spec else []
    files = [folder / "modeling_auto.py" for folder in folders]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def _untrainable_error(model_type: str, looked_for: str = "") -> UnreadableModel:
    return UnreadableModel(
        f"transformers {version('transformers')} has no trainable class for model_type {model_type!r}{looked_for}; "
        "upgrade transformers or give package.module:factory."
    )


def remember(network: Any, chosen: Head) -> None:
    """Remember the choice that a network was built from, as long as it lives."""
    _CHOSEN[network] = chosen


def of(network: Any) -> Head:
    """Return the choice that a network was built from; for a network that others built, by its configuration."""
    return _CHOSEN.get(network) or head(network.config.to_dict())


def _first_task(fitting: dict[str, tuple[str, ...]], *, decoder: bool) -> Head:
    tasks = [task for task in fitting if task not in NAMED_ALONE] or list(fitting)
    if decoder and "causal-lm" in fitting:
        tasks = ["causal-lm"]
    if len(tasks) > 1 and "features" in tasks:
        tasks.remove("features")
    if tasks == ["features"] and "pretraining" in fitting:
        tasks = ["pretraining"]
    return Head(task=tasks[0], class_name=fitting[tasks[0]][0])


def _replace_headless(chosen: Head, fitting: dict[str, tuple[str, ...]]) -> Head:
    """Return the choice with a classification head for an image network without a head, as its users train it."""
    if chosen.task != "features" or "image-classification" not in fitting:
        return chosen
    trained = fitting["image-classification"][0]
    return Head(
        task="image-classification", class_name=trained, note=f"{chosen.class_name} has no loss: {trained} is trained"
    )


@cache
def trainable_types() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return for each of TASKS the model types that transformers has classes for, and the classes' names."""
    from transformers.models.auto import modeling_auto as auto

    types: dict[str, dict[str, tuple[str, ...]]] = {}
    for task, mappings in MAPPINGS.items():
        types[task] = {}
        for mapping in mappings:
            name = f"MODEL_FOR_{mapping}_MAPPING_NAMES" if mapping else "MODEL_MAPPING_NAMES"
            for model_type, classes in getattr(auto, name, {}).items():
                listed = (classes,) if isinstance(classes, str) else tuple(classes)
                types[task][model_type] = (*types[task].get(model_type, ()), *listed)
    types["time-series"] |= {model_type: (name,) for model_type, name in types_with("forecasters").items()}
    return types


def trained_part(config: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the configuration of the trained part of a network, and a sentence for the report if that is not all
    of it.
    """
    name = types_with("trained_part").get(str(config.get("model_type")))
    part = config.get(name) if name is not None else None
    if not isinstance(part, dict):
        return config, None
    inner = {"model_type": f"{config['model_type']}_thinker", "dtype": config.get("dtype"), **part}
    return inner, f"only the thinker of {config['model_type']} is trained, without the parts that speak"
