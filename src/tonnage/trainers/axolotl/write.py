"""axolotl: one YAML file.  Written against the schema of axolotl 0.19.

Where `bf16` is set, axolotl loads the weights in bf16 and computes under autocast.

- With adapters that is `bf16-mixed`: frozen bf16 weights, fp32 adapters.  Embeddings, head and norms are cast to the
  dtype of computation, also where PEFT's preparation for quantized weights has made them fp32.
- `fp16` with adapters is `fp16-mixed` in the same way.  Without, torch's GradScaler refuses the fp16 weights.
- Without adapters `bf16` is `bf16-true`.  Embeddings, head and norms stay in fp32 unless FSDP divides them or the
  attention is neither sdpa nor eager (`ModelLoader._configure_embedding_dtypes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from tonnage.catalog.optimizers import words
from tonnage.mesh import SHARDING
from tonnage.trainers import finetuners, launching, liger
from tonnage.trainers.target import ExportRequest, Target, Written, flat, without_none

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

FILE: Final = "axolotl.yaml"

OPTIMIZERS: Final[Mapping[str, str]] = words("axolotl")
"""Its name of each optimizer: the Trainer's, and its own."""

ATTENTION: Final = {"auto": "sdpa", "eager": "eager", "flex": "flex_attention", "flash": "flash_attention_2"}
"""transformers' name of each attention; the last is that of the package flash-attn, which keeps what torch's own
kernel of that algorithm keeps."""

KERNELS: Final = dict.fromkeys((f"lora_{part}_kernel" for part in ("mlp", "qkv", "o", "embedding")), False)
"""Its own kernels around adapters, which it would turn on by default; they keep fewer activations."""

LIGER: Final = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True}

WHY: Final = {
    "checkpointing": "axolotl checkpoints every layer; its selective_checkpointing keeps attention alone",
    "unquantized_dtype": "axolotl casts embeddings, head and norms to the dtype of computation",
    "loss": "its chunked_cross_entropy still has all logits; without them is Liger's",
    "attention": "attn_implementation names transformers' implementations, not torch's backends",
    "images": "axolotl leaves rows of images as long as they are",
    "tp": "axolotl has it under DeepSpeed's AutoTP",
    "cp": "it is ring attention of another library",
}


def overrides(job: Job, plan: Plan) -> Mapping[str, tuple[str, Any]]:
    """Return what it does instead of 16 bits with fp32 weights, or of bf16-true with frozen weights."""
    forced = dict(liger.overrides(job, plan))
    if job.method == "full" and plan.precision == "bf16-mixed":
        forced["precision"] = ("axolotl loads the weights in bf16 where it computes in bf16", "bf16-true")
    elif job.method == "full" and plan.precision == "fp16-mixed":
        forced["precision"] = ("axolotl loads the weights in fp16, which torch's GradScaler does not train", "fp32")
    elif job.method != "full" and plan.precision == "bf16-true":
        forced["precision"] = ("axolotl computes under autocast, with adapters in fp32", "bf16-mixed")
    elif plan.base_dtype not in (None, plan.compute_dtype):
        forced["base_dtype"] = ("axolotl loads frozen weights in the dtype of computation", None)
    return forced


def write(request: ExportRequest) -> Written:
    """Return the YAML file, with a place for the data."""
    plan_settings = settings(request)
    data = {
        "datasets": [{"path": "DATA.jsonl", "ds_type": "json", "type": "completion"}],
        "sample_packing": False,
        "pad_to_sequence_len": True,
        "num_epochs": 1,
        "learning_rate": 1e-4,
        "output_dir": "output",
    }
    return Written(
        files=(finetuners.yaml_file(FILE, plan_settings, data),),
        command=_command(request),
        settings=flat(plan_settings),
        notes=(
            *launching.note_machines(request.cluster),
            *_note_differences(request),
            *((liger.NOTE,) if request.plan.loss == "liger" else ()),
            *launching.note_clipping(request, "the Trainer's"),
            "DATA.jsonl in axolotl.yaml stands for your data.",
        ),
    )


def _command(request: ExportRequest) -> tuple[str, ...]:
    """Return its launcher's command for a process without a group, else the command of `--launcher torchrun`.

    FSDP needs a process group on one GPU as well.
    """
    if request.plan.shard == "none":
        return ("axolotl", "train", FILE, "--launcher", "python")
    return (*launching.torchrun(request.cluster, "-m", alone=False), "axolotl.cli.train", FILE)


def _note_differences(request: ExportRequest) -> tuple[str, ...]:
    """Return what it does that the plan has no option for."""
    plan = request.plan
    if request.job.method != "full":
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


def settings(request: ExportRequest) -> dict[str, Any]:
    """Return the plan's values by axolotl's keys."""
    job, plan = request.job, request.plan
    return without_none(
        {
            "base_model": request.model,
            **finetuners.shared_settings(request),
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
            **_sharding(request),
        }
    )


def _reentrant(plan: Plan) -> dict[str, bool] | None:
    if plan.checkpointing == "none":
        return None
    return {"use_reentrant": plan.checkpointing == "full-reentrant"}


def _adapters(job: Job, plan: Plan) -> dict[str, Any]:
    if job.method == "full":
        return {}
    on_all_linear = job.lora_targets == ("all-linear",)
    return {
        "adapter": "qlora" if job.method == "qlora" and plan.quant != "int8" else "lora",
        "lora_r": job.lora_rank,
        "lora_target_linear": True if on_all_linear else None,
        "lora_target_modules": None if on_all_linear else list(job.lora_targets),
        **KERNELS,
        **(_quantization(plan) if job.method == "qlora" else {}),
    }


def _quantization(plan: Plan) -> dict[str, Any]:
    """Return its settings of quantized weights; by default it quantizes the scales as well."""
    if plan.quant == "int8":
        return {"load_in_8bit": True}
    kind, _, double = plan.quant.partition("-")
    options = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": bool(double)}
    return {"load_in_4bit": True, "bnb_config_kwargs": options}


def _sharding(request: ExportRequest) -> dict[str, Any]:
    plan, axes = request.plan, request.axes
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
    """Return the settings of the object that its schema makes, with those of plugins; it drops unknown keys."""
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args

    settings = yaml.safe_load((folder / FILE).read_text(encoding="utf-8"))
    for plugin in settings.get("plugins", ()):
        PluginManager.get_instance().register(plugin)
    _, kind = merge_input_args()
    return flat(kind(**settings).model_dump(mode="json", exclude_none=True))


AXOLOTL_TARGET: Final = Target(
    name="axolotl",
    packages=("axolotl",),
    expresses={
        **finetuners.EXPRESSES,
        "precision": ("bf16-mixed", "bf16-true", "fp16-mixed", "fp32"),
        "optimizer": tuple(OPTIMIZERS),
        "attention": tuple(ATTENTION),
    },
    overrides=overrides,
    why=WHY,
    engine="axolotl",
    write=write,
    reread=reread,
)
