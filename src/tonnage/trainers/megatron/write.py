"""Megatron-Bridge: overrides of one of its recipes, as its run_recipe.py takes them.  Written against 0.3.1.

It imports Transformer Engine, which wants CUDA's libraries, and so is read back on a ghost.  Names are those of
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
from tonnage.trainers.megatron import run as engine
from tonnage.trainers.target import File, Target, Wish, Written, flat

FILE: Final = "overrides.txt"

_OF: Final = "# of --recipe "
"""Begins the file's first line, which names the recipe."""

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
"""Its recipe for each name of the catalog."""

_ANOTHER: Final = "llama-3.1-8b"
"""Whose recipe reads the overrides of a model that has none: all take the same."""

PRECISIONS: Final = {"bf16-mixed": "bf16_mixed", "megatron-bf16": "bf16_mixed", "fp16-mixed": "fp16_mixed"}
"""Its `mixed_precision`; in all of them gradients and main weights are fp32."""

WHY: Final = {
    "method": "these are overrides of a recipe for pre-training",
    "precision": "its precisions keep fp32 main weights and gradients",
    "checkpointing": "Megatron recomputes whole layers or their core attention",
    "shard": "its optimizer's states are divided (zero1); Megatron-FSDP is another recipe",
    "optimizer": "its recipes train with Adam",
    "loss": "its cross-entropy is Transformer Engine's, on all logits",
    "ep": "the recipes of dense networks have no experts",
}


def write(wish: Wish) -> Written:
    """One override a line, and the command that takes them."""
    said = flat(settings(wish))
    recipe = RECIPES.get(wish.job.model.name)
    notes = (
        () if recipe else ("RECIPE stands for one of its recipes; there is none for this model in its list here.",)
    )
    overrides = [f"{name}={_hydra(value)}" for name, value in said.items()]
    launched = launching.torchrun(wish.cluster, "scripts/training/run_recipe.py", alone=False)
    return Written(
        files=(File(name=FILE, text="\n".join((f"{_OF}{recipe or 'RECIPE'}", *overrides, ""))),),
        command=(
            *launched,
            "--recipe",
            recipe or "RECIPE",
            "--mode",
            "pretrain",
            *overrides,
        ),
        settings=said,
        notes=(
            *notes,
            *launching.several_machines(wish.cluster),
            *launching.clipping(wish, "Megatron's"),
            "Start it in a clone of Megatron-Bridge.",
        ),
    )


def _hydra(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):  # which equals a number
        return "true" if value else "false"
    return "null" if value is None else str(value)


def settings(wish: Wish) -> dict[str, Any]:
    """Of its ConfigContainer."""
    job, plan, axes = wish.job, wish.plan, wish.axes
    recomputed = {"recompute_granularity": None, **engine.RECOMPUTED[plan.checkpointing]}
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
    """Of the ConfigContainer that the recipe makes and the overrides change, as run_recipe.py has it.

    The recipe asks the Hub for the network's configuration; it gets the catalog's.
    """
    first, *overrides = (folder / FILE).read_text(encoding="utf-8").splitlines()
    asked = first.removeprefix(_OF)
    name, recipe = next(((n, r) for n, r in RECIPES.items() if r == asked), (_ANOTHER, RECIPES[_ANOTHER]))
    recipes = importlib.import_module("megatron.bridge.recipes.llama")
    omegaconf = importlib.import_module("megatron.bridge.training.utils.omegaconf_utils")
    _give_configuration(name)
    config = omegaconf.process_config_with_overrides(getattr(recipes, recipe)(), cli_overrides=overrides)
    return {each: attrgetter(each)(config) for each in (line.partition("=")[0] for line in overrides)}


def _give_configuration(name: str) -> None:
    import transformers

    fields = resolve(name, offline=True).config
    given = transformers.AutoConfig.for_model(**fields)
    for module in list(sys.modules.values()):
        if hasattr(module, "safe_load_config_with_retry"):
            vars(module)["safe_load_config_with_retry"] = lambda *_args, **_options: given


MEGATRON_BRIDGE: Final = Target(
    name="megatron-bridge",
    packages=("megatron-bridge", "transformer-engine"),
    expresses={
        **SHAPES,
        "precision": tuple(PRECISIONS),
        "clip_grad_norm": ANY,
        "checkpointing": tuple(engine.RECOMPUTED),
        "shard": ("none", "ddp", "zero1"),
        "tp": ANY,
        "pp": ANY,
        "cp": ANY,
        "sequence_parallel": ANY,
    },
    why=WHY,
    write=write,
    reread=reread,
    on_ghost=True,
)
