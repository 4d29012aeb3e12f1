"""torchtitan: a recipe in Python, which is what its configuration is.  Written against torchtitan 0.3."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tonnage.errors import UsageError
from tonnage.job import Job
from tonnage.trainers import launching
from tonnage.trainers.job_file import script
from tonnage.trainers.target import ExportRequest, File, Target, Written, flat, json_file
from tonnage.trainers.torchtitan.networks import NETWORKS
from tonnage.trainers.torchtitan.run import BACKENDS, DTYPES, IMPLEMENTATIONS, TORCHTITAN_ENGINE

_HEADS: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_WORDS: Final = ("vocab_size", "tie_word_embeddings")
_LATENT: Final = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank"),
    *("intermediate_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("first_k_dense_replace", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", *_WORDS),
)

FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "llama": (*_HEADS, "intermediate_size", *_WORDS),
    "qwen3": (*_HEADS, "head_dim", "intermediate_size", *_WORDS),
    "qwen3_moe": (
        *(*_HEADS, "head_dim", "moe_intermediate_size", "num_experts", "num_experts_per_tok"),
        *("norm_topk_prob", *_WORDS),
    ),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "gpt_oss": (*_HEADS, "head_dim", "intermediate_size", "num_local_experts", "num_experts_per_tok", *_WORDS),
}
"""The fields that tell one network from another, for each `model_type`."""

DEFAULTS: Final = {"tie_word_embeddings": False}
"""transformers' value of a field that a configuration leaves out."""

FLAVORS: Final[Mapping[str, Mapping[str, tuple[int | bool | None, ...]]]] = {
    "llama": {
        "debugmodel": (256, 6, 16, 16, 768, 2048, False),
        "1B": (2048, 16, 32, 8, 8192, 128256, True),
        "3B": (3072, 28, 24, 8, 8192, 128256, True),
        "8B": (4096, 32, 32, 8, 14336, 128256, False),
        "70B": (8192, 80, 64, 8, 28672, 128256, False),
        "405B": (16384, 126, 128, 8, 53248, 128256, False),
    },
    "qwen3": {
        "debugmodel": (256, 8, 16, 8, 128, 3072, 2048, True),
        "0.6B": (1024, 28, 16, 8, 128, 3072, 151936, True),
        "1.7B": (2048, 28, 16, 8, 128, 6144, 151936, True),
        "4B": (2560, 36, 32, 8, 128, 9728, 151936, True),
        "8B": (4096, 36, 32, 8, 128, 12288, 151936, False),
        "14B": (5120, 40, 40, 8, 128, 17408, 151936, False),
        "32B": (5120, 64, 64, 8, 128, 25600, 151936, False),
    },
    "qwen3_moe": {
        "debugmodel_moe": (256, 8, 16, 8, 128, 768, 64, 8, True, 2048, False),
        "30B-A3B": (2048, 48, 32, 4, 128, 768, 128, 8, True, 151936, False),
        "235B-A22B": (4096, 94, 64, 4, 128, 1536, 128, 8, True, 151936, False),
    },
    "deepseek_v2": {
        "debugmodel": (256, 6, 16, None, 1024, 256, 8, 2, 3, 1, 512, 128, 64, 128, 2048, False),
        "16B": (2048, 27, 16, None, 10944, 1408, 64, 2, 6, 1, 512, 128, 64, 128, 102400, False),
        "236B": (5120, 60, 128, 1536, 12288, 1536, 160, 2, 6, 1, 512, 128, 64, 128, 102400, False),
    },
    "deepseek_v3": {"671B": (7168, 61, 128, 1536, 18432, 2048, 256, 1, 8, 3, 512, 128, 64, 128, 129280, False)},
    "gpt_oss": {
        "debugmodel": (256, 4, 64, 8, 64, 2880, 8, 4, 2048, False),
        "20b": (2880, 24, 64, 8, 64, 2880, 32, 4, 201088, False),
        "120b": (2880, 36, 64, 8, 64, 2880, 128, 4, 201088, False),
    },
}
"""torchtitan's own networks by the fields of FIELDS (torchtitan/models/*/__init__.py)."""

LONGEST: Final = {"deepseek_v2": 16384, "deepseek_v3": 16384}
"""The positions of its flavors, where they are fewer than the configuration's."""

WHY: Final = {
    "method": "torchtitan trains whole networks",
    "checkpointing": "this recipe's activation checkpointing is full or selective",
    "compile": "it compiles its blocks one by one",
    "attention": "its attention is FlexAttention or variable-length flash attention",
    "shard=zero1": "torchtitan divides by FSDP2",
    "optimizer": "its AdamW is torch's, as a loop, foreach or fused",
    "optimizer_offload": "FSDP2 moves parameters and states together: param-offload cpu",
}


def write(request: ExportRequest) -> Written:
    """Return recipe.py, which is ours, and recipe.json, which it reads."""
    recipe = settings(request)
    cluster = request.cluster
    launcher = launching.torchrun(cluster, "-m", alone=False)
    return Written(
        files=(
            json_file("recipe.json", {**recipe, "hf_assets_path": request.model}),
            File(name="recipe.py", text=script("torchtitan").text),
        ),
        command=(*launcher, "torchtitan.train", "--module", "recipe", "--config", "training"),
        settings=flat(recipe),
        notes=(
            *launching.note_machines(cluster),
            *launching.note_clipping(request, "torchtitan's"),
            "hf_assets_path in recipe.json is a folder with the tokenizer; data is torchtitan's own c4.",
        ),
    )


def settings(request: ExportRequest) -> dict[str, Any]:
    """Return the fields of `Trainer.Config` that carry the plan."""
    job, plan, axes = request.job, request.plan, request.axes
    return {
        "family": NETWORKS[request.job.model.config["model_type"]].family,
        "flavor": _flavor(request.job),
        "attention": BACKENDS[plan.attention],
        "training": {
            "local_batch_size": job.micro_batch,
            "global_batch_size": job.micro_batch * job.grad_accum * axes.data_parallel,
            "seq_len": job.seq_len,
            "max_norm": float(plan.clip_grad_norm or 1.0),
            "enable_cpu_offload": plan.param_offload == "cpu",
            "disable_cuda_graphs": True,
            **DTYPES[plan.precision],
        },
        "parallelism": {
            "data_parallel_replicate_degree": axes.dp_replicate,
            "data_parallel_shard_degree": axes.dp_shard,
            "fsdp_reshard_after_forward": "never" if plan.shard == "zero2" else "default",
            "tensor_parallel_degree": plan.tp,
            "expert_parallel_degree": plan.ep,
            "enable_sequence_parallel": plan.sequence_parallel != "off",
        },
        "optimizer": {"implementation": IMPLEMENTATIONS[plan.optimizer]},
        "activation_checkpoint": plan.checkpointing,
        "compile": {"enable": plan.compile == "layers"},
        "loss": plan.loss,
    }


def _flavor(job: Job) -> str:
    """Return the name of torchtitan's network with these shapes.  Raises UsageError where there is none."""
    config = job.model.config
    kind = config["model_type"]
    shapes = tuple(config.get(field, DEFAULTS.get(field)) for field in FIELDS[kind])
    for flavor, known in FLAVORS[kind].items():
        if shapes == known:
            _check_length(job, flavor)
            return flavor
    raise UsageError(
        f"torchtitan has networks of its own (of {kind}: {', '.join(FLAVORS[kind])}), and {job.model.name} is none "
        "of them; choose another target, or one of those."
    )


def _check_length(job: Job, flavor: str) -> None:
    """Raise UsageError for sequences that are longer than the flavor's positions."""
    positions = LONGEST.get(job.model.config["model_type"])
    if positions is not None and job.seq_len > positions:
        raise UsageError(
            f"torchtitan's {flavor} stops at {positions} positions, and the plan has sequences of {job.seq_len}; "
            f"choose seq-len {positions} or less, or another target."
        )


def reread(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the Trainer.Config that the recipe makes, and of the network in it."""
    spec = importlib.util.spec_from_file_location("recipe", folder / "recipe.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    config = recipe.training()
    written = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    settings_read = {
        f"{part}.{name}": getattr(getattr(config, part), name)
        for part in ("training", "parallelism", "optimizer", "compile")
        for name in written[part]
    }
    kinds = {"NoneType": "none", "FullAC": "full", "SelectiveAC": "selective"}
    checkpointing = type(config.activation_checkpoint).__qualname__.partition(".")[0]
    network = config.model_spec.model
    widths = {
        known[0] for flavors in FLAVORS.values() for name, known in flavors.items() if name == written["flavor"]
    }
    attention = type(network.layers[0].attention.inner_attention).__qualname__.partition(".")[0]
    return {
        **settings_read,
        "activation_checkpoint": kinds[checkpointing],
        "loss": "chunked" if "Chunked" in type(config.loss).__qualname__ else "plain",
        "family": config.model_spec.name,
        "flavor": config.model_spec.flavor if network.dim in widths else None,
        "attention": {"FlexAttention": "flex", "VarlenAttention": "varlen"}.get(attention, attention),
    }


TORCHTITAN_TARGET: Final = Target(
    name="torchtitan",
    packages=("torchtitan",),
    expresses=TORCHTITAN_ENGINE.expresses or {},
    why=WHY,
    engine="torchtitan",
    write=write,
    reread=reread,
)
