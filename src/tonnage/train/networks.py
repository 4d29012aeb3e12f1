"""The network that a run trains: given weights from a folder, or random ones from a configuration."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.utils import logging

from tonnage.catalog.configurations import read_config, resolve
from tonnage.errors import TonnageError, UnreadableModel, UsageError
from tonnage.model import text_part
from tonnage.step.step import Step
from tonnage.step.world import World
from tonnage.techniques import lora, qlora, select_techniques
from tonnage.train import checks

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

OF_WEIGHTS: Final = ("precision", "weights_dtype", "method")
"""Options that say in which dtype the network's weights are."""

_WEIGHTS: Final = ("*.safetensors", "*.bin")

_SHAPE: Final = (
    *("model_type", "hidden_size", "n_embd", "intermediate_size", "num_hidden_layers", "n_layer"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_experts", "num_local_experts"),
)
"""Fields of a configuration that decide the memory and work of a step."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a network comes from."""

    config: dict[str, Any]
    """Its configuration."""
    folder: Path | None
    """The folder with its weights; None: they are random."""
    home: Path
    """The folder in which its tokenizer may be."""

    @property
    def vocabulary(self) -> int:
        """Return the number of token ids."""
        size = text_part(self.config).get("vocab_size")
        if not isinstance(size, int):
            raise UnreadableModel("The model's configuration has no vocab_size; give a language model.")
        return size

    @property
    def digest(self) -> str:
        """Return a text that differs for another configuration, or for weight files of other sizes."""
        files = sorted(file for pattern in _WEIGHTS for file in (self.folder.glob(pattern) if self.folder else ()))
        weights = [(file.name, file.stat().st_size) for file in files]
        return hashlib.sha256(json.dumps([self.config, weights], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def description(self) -> str:
        """Return what it is, for the user."""
        return "random weights" if self.folder is None else f"the weights of {self.folder}"


def find(model: str) -> Source:
    """Return the source that `--model` names: a folder with weights, or a configuration.  Raises UsageError."""
    path = Path(model).expanduser()
    if not path.exists():
        raise UsageError(f"{model} does not exist; give a model's folder, or a config.json for random weights.")
    config = resolve(path if path.is_absolute() else f"./{path}", offline=True).config
    has_weights = path.is_dir() and any(next(path.glob(pattern), None) for pattern in _WEIGHTS)
    return Source(config=config, folder=path if has_weights else None, home=path if path.is_dir() else path.parent)


def load(folder: str | Path, job: Job, plan: Plan) -> Any:
    """Return the network of a folder with weights, as the plan wants it.  Raises UsageError if it has none."""
    source = find(str(folder))
    if source.folder is None:
        raise UsageError(f"{folder} has no weights; give a folder that save_pretrained wrote, or a network.")
    return build(source, job, plan, seed=torch.initial_seed())


def check_model(planned: str, config: Mapping[str, Any]) -> None:
    """Raise UsageError if the plan is known to be for a network of another shape than this configuration's."""
    try:
        wanted = text_part(resolve(planned, offline=True).config)
    except TonnageError:
        return  # the plan's model is elsewhere; the plan is taken at its word
    given = text_part(config)
    others = [
        f"{name} is {given[name]} and not {wanted[name]}"
        for name in _SHAPE
        if name in wanted and name in given and wanted[name] != given[name]
    ]
    if others:
        raise UsageError(
            f"The plan is for {planned}, and the model is another: {', '.join(others)}; make a plan for it with "
            "tonnage plan."
        )


def build(source: Source, job: Job, plan: Plan, seed: int) -> Any:
    """Return the network, in the dtype that the plan gives its weights: on the host, or quantized on its device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    weights_dtype = weights_step(job, plan).weights_dtype
    torch.manual_seed(seed)
    try:
        config = AutoConfig.for_model(**source.config)  # and not the folder's own, which could name code
        if source.folder is None:
            return AutoModelForCausalLM.from_config(config, dtype=weights_dtype)
        if (stored := read_config(source.folder / "config.json").get("quantization_config")) is not None:
            config.quantization_config = stored
        quantized = _quantized(plan, weights_dtype) if job.method == "qlora" else {}
        with _without_remarks():
            network, weights = AutoModelForCausalLM.from_pretrained(
                source.folder,
                config=config,
                dtype=weights_dtype,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **quantized,
            )
    except (TonnageError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # libraries of several packages read the files
        reason = " ".join(str(error).split()).partition(". ")[0][:300].rstrip(".")
        what = "It is" if source.folder is None else f"{source.folder} is"
        raise UnreadableModel(f"{what} no causal language model that transformers can make: {reason}.") from error
    _check_loaded(source.folder, weights)
    return _adapt(network, job) if job.method == "lora" and max(plan.tp, plan.pp) > 1 else network


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Keep transformers from printing a table of the weights that it did not load."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_loaded(folder: Path, weights: Mapping[str, Any]) -> None:
    """Raise UnreadableModel if parameters have random values: the folder has none for them, or of other sizes."""
    sizes = {
        name: f"{name}: {tuple(stored)} and not {tuple(size)}" for name, stored, size in weights["mismatched_keys"]
    }
    missing = sorted({*weights["missing_keys"]} - sizes.keys())
    for names, what in ((missing, "has no weights for"), (sorted(sizes.values()), "has weights of other sizes for")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UnreadableModel(f"{folder} {what} {names[0]}{more}; its config.json is another network's.")
    if (unused := sorted(weights["unexpected_keys"])) and checks.started_as()[0] == 0:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        print(f"not loaded from {folder}: {unused[0]}{more}, which its config.json has not", file=sys.stderr)


def _adapt(network: Any, job: Job) -> Any:
    """Return the network with the job's adapters, whose values are those of the seed on all ranks."""
    from peft import get_peft_model

    return get_peft_model(network, lora.configuration(job))


def _quantized(plan: Plan, compute: torch.dtype) -> dict[str, Any]:
    """Return the arguments by which transformers quantizes layers while it loads them, each on its device."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    return {"quantization_config": qlora.quantization_config(plan, compute), "device_map": {"": device}}


def weights_step(job: Job, plan: Plan) -> Step:
    """Return a step with the techniques that say in which dtype the network's weights are, and no others."""
    step = Step(job=job, plan=plan, world=World(device=torch.device("cpu")), initialise=False)
    for technique in select_techniques(job, plan):
        if technique.option in OF_WEIGHTS:
            step = technique.apply(step)
    return step
