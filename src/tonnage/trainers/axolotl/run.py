"""axolotl, as a preset: what it makes of a network before Hugging Face's Trainer, which it builds on, has it.

axolotl needs a version of transformers of its own beside which few other packages can be installed, so its own code
is not run here.  Its loader (`ModelLoader` of axolotl 0.19) does this besides loading:

- Where it computes in 16 bits, it loads the weights in that dtype and computes under autocast all the same; torch's
  scaler of fp16 refuses such weights, unless they are frozen.
- Embeddings, head and norms become fp32, unless FSDP divides them, adapters are trained, or the attention is neither
  transformers' sdpa nor eager.
- The network checkpoints the layers, also those that FSDP divides.  Their weights stay as they were loaded, because
  axolotl's `fsdp2_prepare_model` replaces accelerate's, which makes them fp32 for autocast.
- With adapters, the output of the embeddings requires gradients; its own LoRA kernels are off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tonnage.mesh import SHARDING
from tonnage.techniques.technique import Refusal
from tonnage.trainers.engine import ANY, FILES, IMAGES, Engine
from tonnage.trainers.hf_trainer.run import EXPRESSES, HF_TRAINER_ENGINE, LOSSES, run_trainer
from tonnage.trainers.hf_trainer.run import accepts as trainer_accepts

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.world import World

EMBEDDINGS: Final = ("embed_tokens", "lm_head")
"""Parts of the names of modules that its loader takes for embeddings and head."""

NORM: Final = "norm"
"""Part of the names of modules that it takes for norms."""

IN_FP32: Final = ("auto", "eager")
"""Values of `attention` with which they become fp32: transformers' sdpa and eager."""


LIGER_LOSS: Final = {
    **dict.fromkeys(("rope", "swiglu", "rms_norm"), False),
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
}
"""Liger's kernels where its plugin is asked for `liger_fused_linear_cross_entropy` alone."""


def accepts(case: Case) -> Refusal | None:
    """Return what axolotl has no setting for, or what stands against the Trainer."""
    return _refuse_dtypes(case.job, case.plan) or trainer_accepts(case)


def _refuse_dtypes(job: Job, plan: Plan) -> Refusal | None:
    """Return the refusal of dtypes in which axolotl loads nothing."""
    if job.method == "full" and plan.precision == "bf16-mixed":
        return Refusal(
            technique=f"precision={plan.precision}",
            reason="axolotl loads the weights in bf16 where it computes in bf16",
            instead="choose precision bf16-true or fp32",
        )
    if job.method == "full" and plan.precision == "fp16-mixed":
        return Refusal(
            technique=f"precision={plan.precision}",
            reason="axolotl loads the weights in fp16, whose gradients torch's GradScaler does not unscale",
            instead="choose precision fp32, or method lora",
        )
    if job.method != "full" and plan.precision == "bf16-true":
        return Refusal(
            technique=f"precision={plan.precision}",
            reason="axolotl trains adapters in fp32 under autocast",
            instead="choose precision bf16-mixed, fp16-mixed or fp32",
        )
    if job.method == "qlora" and plan.unquantized_dtype != "compute":
        return Refusal(
            technique=f"unquantized-dtype={plan.unquantized_dtype}",
            reason="axolotl casts embeddings, head and norms to the dtype of computation",
            instead="choose unquantized-dtype compute",
        )
    return None


def assumes(job: Job, plan: Plan) -> tuple[str, ...]:
    """Return what stands for kernels that are not torch's."""
    if plan.attention != "flash":
        return ()
    return (
        "torch's own kernel stands for that of the package flash-attn, which axolotl calls and which keeps the same",
    )


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """Run the Trainer's steps with the network as axolotl hands it over."""
    autocast = plan.compute_dtype == "bf16" and (job.method != "full" or plan.shard not in SHARDING)
    prepare = _require_input_gradients if job.method != "full" else _cast_to_fp32 if _has_fp32(job, plan) else None
    arguments = {"bf16": autocast, "ddp_find_unused_parameters": False}
    liger = {"liger_kernel_config": LIGER_LOSS} if plan.loss == "liger" else {}
    return run_trainer(job, plan, world, steps, prepare=prepare, by_fsdp=False, **arguments, **liger)


def _has_fp32(job: Job, plan: Plan) -> bool:
    """Return whether embeddings, head and norms become fp32."""
    return job.method == "full" and plan.shard not in SHARDING and plan.attention in IN_FP32


def _cast_to_fp32(network: nn.Module) -> nn.Module:
    """Cast embeddings, head and norms to fp32 in place."""
    import torch

    for name, part in network.named_modules():
        is_embedding = any(word in name for word in EMBEDDINGS) and hasattr(part, "weight")
        if is_embedding or NORM in name:
            part.to(torch.float32)
    return network


def _require_input_gradients(network: nn.Module) -> nn.Module:
    """Have gradients go through all layers, also those below the first adapter."""
    network.get_base_model().enable_input_require_grads()
    return network


AXOLOTL_ENGINE: Final = Engine(
    name="axolotl",
    packages=HF_TRAINER_ENGINE.packages,
    expresses={
        **{option: values for option, values in EXPRESSES.items() if option not in ("accum_sync", "cp")},
        **IMAGES,
        **FILES,
        "eval_batch": ANY,
        **LOSSES,
        "precision": ("bf16-mixed", "bf16-true", "fp16-mixed", "fp32"),
        "checkpointing": ("none", "full"),
        "attention": ("auto", "eager", "flex", "flash"),
    },
    accepts=accepts,
    own_defaults=lambda job: {"precision": "bf16-true"} if job.method == "full" else {},
    imports=HF_TRAINER_ENGINE.imports,
    assumes=assumes,
    run=run,
)
