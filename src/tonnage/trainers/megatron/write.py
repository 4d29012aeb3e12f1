"""Megatron-Bridge: overrides of one of its recipes, as its run_recipe.py takes them.  Written against 0.3.1.

It imports Transformer Engine, which needs CUDA's libraries, and so is read back on a ghost.  Names are those of
`ConfigContainer`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from tonnage.catalog.configurations import resolve
from tonnage.trainers import launching
from tonnage.trainers.engine import ANY, SHAPES
from tonnage.trainers.megatron.run import RECOMPUTED
from tonnage.trainers.target import ExportRequest, File, Target, Written, flat

FILE: Final = "overrides.txt"

_FIRST_LINE: Final = "# of --recipe "
"""The beginning of the file's first line, which names the recipe."""

RECIPES: Final = {
    "llama-2-7b": "llama2_7b_pretrain_config",
    "llama-3-8b": "llama3_8b_pretrain_config",
    "llama-3-70b": "llama3_70b_pretrain_config",
    "llama-3.1-8b": "llama31_8b_pretrain_config",
    "llama-3.1-70b": "llama31_70b_pretrain_config",
    "llama-3.1-405b": "llama31_405b_pretrain_config",
    "llama-3.2-1b": "llama32_1b_pretrain_config",
    "llama-3.2-3b": "llama32_3b_pretrain_config",
}
"""Megatron-Bridge's recipe for each name of the catalog."""

_FALLBACK: Final = "llama-3.1-8b"
"""The model whose recipe reads the overrides of a model without one: all recipes take the same."""

PRECISIONS: Final = {"bf16-mixed": "bf16_mixed", "megatron-bf16": "bf16_mixed", "fp16-mixed": "fp16_mixed"}
"""Its `mixed_precision` for each precision; in all of them gradients and main weights are fp32."""

WHY: Final = {
    "method": "these are overrides of a recipe for pre-training",
    "precision": "its precisions keep fp32 main weights and gradients",
    "checkpointing": "Megatron recomputes whole layers or their core attention",
    "shard": "its recipes divide the optimizer's states (zero1)",
    "optimizer": "its recipes train with Adam",
    "loss": "its cross-entropy is Transformer Engine's, on all logits",
}


def write(request: ExportRequest) -> Written:
    """Return a file with one override a line, and the command that takes them."""
    plan_settings = flat(settings(request))
    recipe = RECIPES.get(request.job.model.name)
    notes = (
        () if recipe else ("RECIPE stands for one of its recipes; there is none for this model in its list here.",)
    )
    overrides = [f"{name}={_hydra(value)}" for name, value in plan_settings.items()]
    launcher = launching.torchrun(request.cluster, "scripts/training/run_recipe.py", alone=False)
    return Written(
        files=(File(name=FILE, text="\n".join((f"{_FIRST_LINE}{recipe or 'RECIPE'}", *overrides, ""))),),
        command=(
            *launcher,
            "--recipe",
            recipe or "RECIPE",
            "--mode",
            "pretrain",
            *overrides,
        ),
        settings=plan_settings,
        notes=(
            *notes,
            *launching.note_machines(request.cluster),
            *launching.note_clipping(request, "Megatron's"),
            "Start it in a clone of Megatron-Bridge.",
        ),
    )


def _hydra(value: Any) -> str:
    """Return a value as Hydra's overrides spell it."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


def settings(request: ExportRequest) -> dict[str, Any]:
    """Return the fields of its ConfigContainer."""
    job, plan, axes = request.job, request.plan, request.axes
    recomputed = {"recompute_granularity": None, **RECOMPUTED[plan.checkpointing]}
    clip = {} if plan.clip_grad_norm is None else {"optimizer": {"clip_grad": float(plan.clip_grad_norm)}}
    return {
        "model": {
            "tensor_model_parallel_size": plan.tp,
            "pipeline_model_parallel_size": plan.pp,
            "context_parallel_size": plan.cp,
            "sequence_parallel": plan.tp > 1 and plan.sequence_parallel != "off",
            "seq_length": job.seq_len,
            **recomputed,
        },
        "dataset": {"sequence_length": job.seq_len},
        "train": {
            "micro_batch_size": job.micro_batch,
            "global_batch_size": job.micro_batch * job.grad_accum * axes.data_parallel,
        },
        "ddp": {"use_distributed_optimizer": plan.shard == "zero1", "overlap_param_gather": plan.shard == "zero1"},
        "mixed_precision": PRECISIONS[plan.precision],
        **clip,
    }


def reread(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the ConfigContainer that recipe and overrides make, as in run_recipe.py.

    The recipe asks the Hub for the network's configuration; it gets the catalog's.
    """
    first, *overrides = (folder / FILE).read_text(encoding="utf-8").splitlines()
    named = first.removeprefix(_FIRST_LINE)
    name = next((model for model, recipe in RECIPES.items() if recipe == named), _FALLBACK)
    recipes = importlib.import_module("megatron.bridge.recipes.llama")
    omegaconf = importlib.import_module("megatron.bridge.training.utils.omegaconf_utils")
    _provide_configuration(name)
    config = omegaconf.process_config_with_overrides(getattr(recipes, RECIPES[name])(), cli_overrides=overrides)
    return {each: attrgetter(each)(config) for each in (line.partition("=")[0] for line in overrides)}


def _provide_configuration(name: str) -> None:
    """Have recipes load the catalog's configuration of this model."""
    import transformers

    fields = resolve(name, offline=True).config
    configuration = transformers.AutoConfig.for_model(**fields)
    for module in list(sys.modules.values()):
        if hasattr(module, "safe_load_config_with_retry"):
            vars(module)["safe_load_config_with_retry"] = lambda *_args, **_options: configuration


MEGATRON_BRIDGE_TARGET: Final = Target(
    name="megatron-bridge",
    packages=("megatron-bridge", "transformer-engine"),
    expresses={
        **SHAPES,
        "precision": tuple(PRECISIONS),
        "clip_grad_norm": ANY,
        "checkpointing": tuple(RECOMPUTED),
        "shard": ("none", "ddp", "zero1"),
        "tp": ANY,
        "pp": ANY,
        "cp": ANY,
        "sequence_parallel": ANY,
    },
    why=WHY,
    base_engine=lambda plan: "megatron",
    write=write,
    reread=reread,
    on_ghost=True,
)
