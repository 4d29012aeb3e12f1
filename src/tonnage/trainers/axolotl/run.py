"""axolotl, as a preset: what it makes of a network before Hugging Face's Trainer, which it builds on, has it.

axolotl wants a transformers of its own beside which little else installs, so its own code is not run here.  What its
loader does besides loading (`ModelLoader` of axolotl 0.19) is: where it computes in bf16 it loads the weights in bf16
and computes under autocast all the same; embeddings, head and norms become fp32, unless FSDP divides them, adapters
are trained, or the attention is neither transformers' sdpa nor eager.  Layers are checkpointed by the network, also
those that FSDP divides, whose weights stay as they were loaded: its own `fsdp2_prepare_model` stands in place of
accelerate's, which makes them fp32 for autocast.  With adapters, what embeddings return requires gradients; its own
LoRA kernels are off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tonnage.mesh import SHARDING
from tonnage.techniques.technique import Refusal
from tonnage.trainers.engine import ANY, FILES, IMAGES, Engine
from tonnage.trainers.hf_trainer import run as hf_trainer

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.world import World

EMBEDDINGS: Final = ("embed_tokens", "lm_head")
"""In the names of modules that its loader takes for embeddings and head."""

NORM: Final = "norm"
"""In the names of those that it takes for norms."""

IN_FP32: Final = ("auto", "eager")
"""Attention with which they become fp32: transformers' sdpa and eager."""


def accepts(case: Case) -> Refusal | None:
    """What it has no words for, and what stands against the Trainer."""
    return _weights(case.job, case.plan) or hf_trainer.accepts(case)


def _weights(job: Job, plan: Plan) -> Refusal | None:
    if job.method == "full" and plan.precision == "bf16-mixed":
        return Refusal(
            technique=f"precision={plan.precision}",
            reason="axolotl loads the weights in bf16 where it computes in bf16",
            instead="choose precision bf16-true or fp32",
        )
    if job.method != "full" and plan.precision == "bf16-true":
        return Refusal(
            technique=f"precision={plan.precision}",
            reason="axolotl trains adapters in fp32 under autocast",
            instead="choose precision bf16-mixed or fp32",
        )
    if job.method == "qlora" and plan.unquantized_dtype != "compute":
        return Refusal(
            technique=f"unquantized-dtype={plan.unquantized_dtype}",
            reason="axolotl casts embeddings, head and norms to the dtype of computation",
            instead="choose unquantized-dtype compute",
        )
    return None


def assumes(job: Job, plan: Plan) -> tuple[str, ...]:
    """Of kernels that are not torch's."""
    if plan.attention != "flash":
        return ()
    return (
        "torch's own kernel stands for that of the package flash-attn, which axolotl calls and which keeps the same",
    )


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """The Trainer's steps of the network as axolotl hands it over."""
    autocast = plan.compute_dtype == "bf16" and (job.method != "full" or plan.shard not in SHARDING)
    prepare = _with_input_gradients if job.method != "full" else _in_fp32 if _stay_fp32(job, plan) else None
    said = {"bf16": autocast, "ddp_find_unused_parameters": False}
    return hf_trainer.trained(job, plan, world, steps, prepare=prepare, by_fsdp=False, **said)


def _stay_fp32(job: Job, plan: Plan) -> bool:
    return job.method == "full" and plan.shard not in SHARDING and plan.attention in IN_FP32


def _in_fp32(network: nn.Module) -> nn.Module:
    import torch

    for name, part in network.named_modules():
        embeds = any(word in name for word in EMBEDDINGS) and hasattr(part, "weight")
        if embeds or NORM in name:
            part.to(torch.float32)
    return network


def _with_input_gradients(network: nn.Module) -> nn.Module:
    """Through all layers, also those below the first adapter."""
    network.get_base_model().enable_input_require_grads()
    return network


AXOLOTL: Final = Engine(
    name="axolotl",
    packages=hf_trainer.HF_TRAINER.packages,
    expresses={
        **{option: words for option, words in hf_trainer.EXPRESSES.items() if option not in ("accum_sync", "cp")},
        **IMAGES,
        **FILES,
        "eval_batch": ANY,
        "precision": ("bf16-mixed", "bf16-true", "fp32"),
        "checkpointing": ("none", "full"),
        "attention": ("auto", "eager", "flex", "flash"),
    },
    accepts=accepts,
    unsaid=lambda job: {"precision": "bf16-true"} if job.method == "full" else {},
    imports=hf_trainer.HF_TRAINER.imports,
    assumes=assumes,
    run=run,
)
