"""Megatron-Bridge: overrides of one of its recipes, as its run_recipe.py takes them.  Written against 0.3.1.

It is not read back: it imports Transformer Engine, which wants CUDA's libraries, and more (docs/export.md).  Names
are those that its recipes assign (`recipes/llama/llama3.py`) and those of `ConfigContainer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tonnage.engines import megatron as engine
from tonnage.engines.engine import ANY, SHAPES
from tonnage.errors import CannotEstimate
from tonnage.exports import launching
from tonnage.exports.export import File, Target, Wish, Written, flat

FILE: Final = "overrides.txt"

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
    launched = launching.torchrun(wish.cluster, "scripts/training/run_recipe.py", alone=False)
    return Written(
        files=(File(name=FILE, text="".join(f"{name}={_hydra(value)}\n" for name, value in said.items())),),
        command=(
            *launched,
            "--recipe",
            recipe or "RECIPE",
            "--mode",
            "pretrain",
            *(f"{n}={_hydra(v)}" for n, v in said.items()),
        ),
        settings=said,
        notes=(*notes, *launching.several_machines(wish.cluster), "Start it in a clone of Megatron-Bridge."),
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
        "dataset": {"seq_length": job.seq_len},
        "train": {
            "micro_batch_size": job.micro_batch,
            "global_batch_size": job.micro_batch * job.grad_accum * axes.data_parallel,
        },
        "ddp": {"use_distributed_optimizer": plan.shard == "zero1", "overlap_param_gather": plan.shard == "zero1"},
        "mixed_precision": PRECISIONS[plan.precision],
        **clip,
    }


def reread(folder: Path) -> Mapping[str, Any]:
    """Not possible here."""
    raise CannotEstimate(f"{folder} is not read back: Megatron-Bridge wants Transformer Engine.")


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
)
