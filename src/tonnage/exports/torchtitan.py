"""torchtitan: a recipe in Python, which is what its configuration is.  Written against torchtitan 0.3."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tonnage.engines import torchtitan as engine
from tonnage.errors import UsageError
from tonnage.exports import launching
from tonnage.exports.export import File, Target, Wish, Written, flat

SHAPES: Final[Mapping[str, tuple[int, int, int, int, int, int]]] = {
    "1B": (2048, 16, 32, 8, 8192, 128256),
    "3B": (3072, 28, 24, 8, 8192, 128256),
    "8B": (4096, 32, 32, 8, 14336, 128256),
    "70B": (8192, 80, 64, 8, 28672, 128256),
    "405B": (16384, 126, 128, 8, 53248, 128256),
}
"""Its own Llamas, by the fields of FIELDS (torchtitan/models/llama3/__init__.py)."""

FIELDS: Final = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size"),
)

WHY: Final = {
    "method": "torchtitan trains whole networks",
    "checkpointing": "its activation checkpointing is full or selective",
    "compile": "it compiles its blocks one by one",
    "attention": "its attention is FlexAttention or variable-length flash attention",
    "shard=zero1": "torchtitan divides by FSDP2",
    "optimizer": "its AdamW is torch's, as a loop, foreach or fused",
    "optimizer_offload": "FSDP2 moves parameters and states together: param-offload cpu",
    "pp": "pipelines of this recipe are not tried",
    "cp": "context parallelism of this recipe is not tried",
    "ep": "its Llamas have no experts",
}


def write(wish: Wish) -> Written:
    """recipe.py, which is ours, and recipe.json, which it reads."""
    said = settings(wish)
    cluster = wish.cluster
    launched = launching.torchrun(cluster, "-m", alone=False)
    return Written(
        files=(
            launching.document("recipe.json", {**said, "hf_assets_path": wish.model}),
            File(name="recipe.py", text=launching.script("torchtitan").text),
        ),
        command=(*launched, "torchtitan.train", "--module", "recipe", "--config", "training"),
        settings=flat(said),
        notes=(
            *launching.several_machines(cluster),
            *launching.clipping(wish, "torchtitan's"),
            "hf_assets_path in recipe.json is a folder with the tokenizer; data is torchtitan's own c4.",
        ),
    )


def settings(wish: Wish) -> dict[str, Any]:
    """The fields of `Trainer.Config` that carry the plan."""
    job, plan, axes = wish.job, wish.plan, wish.axes
    return {
        "flavor": _flavor(wish),
        "attention": engine.BACKENDS[plan.attention],
        "training": {
            "local_batch_size": job.micro_batch,
            "global_batch_size": job.micro_batch * job.grad_accum * axes.data_parallel,
            "seq_len": job.seq_len,
            "max_norm": float(plan.clip_grad_norm or 1.0),
            "enable_cpu_offload": plan.param_offload == "cpu",
            "disable_cuda_graphs": True,
            **engine.DTYPES[plan.precision],
        },
        "parallelism": {
            "data_parallel_replicate_degree": axes.dp_replicate,
            "data_parallel_shard_degree": axes.dp_shard,
            "fsdp_reshard_after_forward": "never" if plan.shard == "zero2" else "default",
            "tensor_parallel_degree": plan.tp,
            "enable_sequence_parallel": plan.sequence_parallel != "off",
        },
        "optimizer": {"implementation": engine.IMPLEMENTATIONS[plan.optimizer]},
        "activation_checkpoint": plan.checkpointing,
        "compile": {"enable": plan.compile == "layers"},
        "loss": plan.loss,
    }


def _flavor(wish: Wish) -> str:
    config = wish.job.model.config
    shapes = tuple(config.get(field) for field in FIELDS)
    for flavor, known in SHAPES.items():
        if shapes == known:
            return flavor
    raise UsageError(
        f"torchtitan has Llamas of its own ({', '.join(SHAPES)}), and {wish.job.model.name} is none of them; "
        "choose another target, or a Llama 3."
    )


def reread(folder: Path) -> Mapping[str, Any]:
    """Of the Trainer.Config that the recipe makes, and of the network in it."""
    spec = importlib.util.spec_from_file_location("recipe", folder / "recipe.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    config = recipe.training()
    said = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    found = {
        f"{part}.{name}": getattr(getattr(config, part), name)
        for part in ("training", "parallelism", "optimizer", "compile")
        for name in said[part]
    }
    kinds = {None: "none", "FullAC": "full", "SelectiveAC": "selective"}
    made = config.activation_checkpoint
    network = config.model_spec.model
    attention = type(network.layers[0].attention.inner_attention).__qualname__.partition(".")[0]
    return {
        **found,
        "activation_checkpoint": kinds[type(made).__qualname__.partition(".")[0] if made is not None else None],
        "loss": "chunked" if "Chunked" in type(config.loss).__qualname__ else "plain",
        "flavor": next((name for name, shape in SHAPES.items() if shape[0] == network.dim), None),
        "attention": {"FlexAttention": "flex", "VarlenAttention": "varlen"}.get(attention, attention),
    }


TORCHTITAN: Final = Target(
    name="torchtitan",
    packages=("torchtitan",),
    expresses=engine.TORCHTITAN.expresses or {},
    why=WHY,
    engine="torchtitan",
    write=write,
    reread=reread,
)
