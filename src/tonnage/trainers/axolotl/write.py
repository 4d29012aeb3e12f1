"""axolotl: one YAML.  Written against the schema of axolotl 0.19.

Where `bf16` is set, axolotl loads the weights in bf16 and computes under autocast: with adapters that is `bf16-mixed`
(frozen bf16 weights, fp32 adapters), without them `bf16-true`, of which it keeps embeddings, head and norms in fp32
unless FSDP divides them or the attention is neither sdpa nor eager (`ModelLoader._configure_embedding_dtypes`).  With
adapters it casts the same to the dtype of computation, also those that PEFT's preparation for quantized weights has
made fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from tonnage.mesh import SHARDING
from tonnage.trainers import finetuners, launching
from tonnage.trainers.hf_trainer.run import OPTIMIZERS as TRAINERS
from tonnage.trainers.target import Target, Wish, Written, flat

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

FILE: Final = "axolotl.yaml"

OPTIMIZERS: Final = {
    **{name: said.get("optim", "adamw_torch_fused") for name, said in TRAINERS.items() if name != "sgd"},
    "adamw-8bit-ao": "ao_adamw_8bit",
    "adamw-4bit": "ao_adamw_4bit",
    "adamw-fp8-ao": "ao_adamw_fp8",
    "muon": "muon",
}
"""Its name of each optimizer: the Trainer's, and its own."""

ATTENTION: Final = {"auto": "sdpa", "eager": "eager", "flex": "flex_attention", "flash": "flash_attention_2"}
"""The last is the package flash-attn's, which keeps what torch's own kernel of that algorithm keeps."""

KERNELS: Final = dict.fromkeys((f"lora_{part}_kernel" for part in ("mlp", "qkv", "o", "embedding")), False)
"""Its own kernels around adapters, which it would turn on where nothing is said; they keep fewer activations."""

LIGER: Final = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True}

WHY: Final = {
    "checkpointing": "axolotl checkpoints every layer; its selective_checkpointing keeps attention alone",
    "unquantized_dtype": "axolotl casts embeddings, head and norms to the dtype of computation",
    "loss": "its chunked_cross_entropy still has all logits; without them is Liger's",
    "attention": "attn_implementation names transformers' implementations, not torch's backends",
    "shard=zero1": "axolotl divides by FSDP2 or DeepSpeed, not optimizer states alone",
    "images": "axolotl leaves rows of images as long as they are",
    "tp": "axolotl has it under DeepSpeed's AutoTP only",
    "cp": "axolotl's is ring attention of another library",
}


def besides(job: Job, plan: Plan) -> Mapping[str, tuple[str, Any]]:
    """bf16 with fp32 weights, for which it has no words; for frozen weights it is the other way round."""
    if job.method == "full" and plan.precision == "bf16-mixed":
        return {"precision": ("axolotl loads the weights in bf16 where it computes in bf16", "bf16-true")}
    if job.method != "full" and plan.precision == "bf16-true":
        return {"precision": ("axolotl computes under autocast, with adapters in fp32", "bf16-mixed")}
    if plan.base_dtype not in (None, plan.compute_dtype):
        return {"base_dtype": ("axolotl loads frozen weights in the dtype of computation", None)}
    return {}


def write(wish: Wish) -> Written:
    """The YAML, with a place for the data."""
    said = settings(wish)
    data = {
        "datasets": [{"path": "DATA.jsonl", "ds_type": "json", "type": "completion"}],
        "sample_packing": False,
        "pad_to_sequence_len": True,
        "num_epochs": 1,
        "learning_rate": 1e-4,
        "output_dir": "output",
    }
    return Written(
        files=(finetuners.file(FILE, said, data),),
        command=_command(wish),
        settings=flat(said),
        notes=(
            *launching.several_machines(wish.cluster),
            *_its_own_way(wish),
            *launching.clipping(wish, "the Trainer's"),
            "DATA.jsonl in axolotl.yaml stands for your data.",
        ),
    )


def _command(wish: Wish) -> tuple[str, ...]:
    """Its launcher for a process that is alone; else, also of FSDP on one GPU, what `--launcher torchrun` starts."""
    if wish.plan.shard == "none":
        return ("axolotl", "train", FILE, "--launcher", "python")
    return (*launching.torchrun(wish.cluster, "-m", alone=False), "axolotl.cli.train", FILE)


def _its_own_way(wish: Wish) -> tuple[str, ...]:
    """What it does that the plan has no word for."""
    plan = wish.plan
    if wish.job.method != "full":
        return (
            "axolotl's own LoRA kernels are off (lora_*_kernel); with them it needs less.",
            *(() if plan.checkpointing != "none" else ("axolotl's first layer computes gradients of its inputs.",)),
        )
    if plan.compute_dtype != "bf16" or plan.shard in SHARDING or plan.attention == "flex":
        return ()
    return (
        "axolotl keeps embeddings, head and norms in fp32 here, 8 bytes more for each of their parameters (weight, "
        "gradient, moments), and what flows between layers; not with FSDP2 or attention flex.",
    )


def settings(wish: Wish) -> dict[str, Any]:
    """What the plan says, by axolotl's keys."""
    job, plan = wish.job, wish.plan
    return launching.without_defaults(
        {
            "base_model": wish.model,
            **finetuners.shared(wish),
            "sequence_len": job.seq_len,
            "micro_batch_size": job.micro_batch,
            "bf16": plan.compute_dtype == "bf16",
            "fp16": plan.compute_dtype == "fp16",
            "optimizer": OPTIMIZERS[plan.optimizer],
            "gradient_checkpointing": plan.checkpointing != "none",
            "gradient_checkpointing_kwargs": _reentrant(plan),
            "attn_implementation": ATTENTION[plan.attention],
            **(LIGER if plan.loss == "liger" else {}),
            **_adapters(job, plan),
            **_sharding(wish),
        }
    )


def _reentrant(plan: Plan) -> dict[str, bool] | None:
    if plan.checkpointing == "none":
        return None
    return {"use_reentrant": plan.checkpointing == "full-reentrant"}


def _adapters(job: Job, plan: Plan) -> dict[str, Any]:
    if job.method == "full":
        return {}
    everywhere = job.lora_targets == ("all-linear",)
    return {
        "adapter": "qlora" if job.method == "qlora" and plan.quant != "int8" else "lora",
        "lora_r": job.lora_rank,
        "lora_target_linear": True if everywhere else None,
        "lora_target_modules": None if everywhere else list(job.lora_targets),
        **KERNELS,
        **(_bits(plan) if job.method == "qlora" else {}),
    }


def _bits(plan: Plan) -> dict[str, Any]:
    """It quantizes scales as well, unless told otherwise."""
    if plan.quant == "int8":
        return {"load_in_8bit": True}
    kind, _, double = plan.quant.partition("-")
    chosen = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": bool(double)}
    return {"load_in_4bit": True, "bnb_config_kwargs": chosen}


def _sharding(wish: Wish) -> dict[str, Any]:
    plan, axes = wish.plan, wish.axes
    if plan.shard not in SHARDING:
        return {}
    replicas = {"dp_replicate_size": axes.dp_replicate} if plan.shard == "hsdp" else {}
    return {
        "fsdp_version": 2,
        "fsdp_config": {
            "offload_params": plan.param_offload == "cpu",
            "reshard_after_forward": plan.shard != "zero2",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "FULL_STATE_DICT",
        },
        "dp_shard_size": axes.dp_shard,
        **replicas,
    }


def reread(folder: Path) -> Mapping[str, Any]:
    """Of the object that its schema makes, plugins' parts included; keys that it does not know it drops."""
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args

    said = yaml.safe_load((folder / FILE).read_text(encoding="utf-8"))
    for plugin in said.get("plugins", ()):
        PluginManager.get_instance().register(plugin)
    _, kind = merge_input_args()
    return flat(kind(**said).model_dump(mode="json", exclude_none=True))


AXOLOTL: Final = Target(
    name="axolotl",
    packages=("axolotl",),
    expresses={
        **finetuners.EXPRESSES,
        "precision": ("bf16-mixed", "bf16-true", "fp32"),
        "optimizer": tuple(OPTIMIZERS),
        "attention": tuple(ATTENTION),
    },
    besides=besides,
    why=WHY,
    engine="axolotl",
    write=write,
    reread=reread,
)
