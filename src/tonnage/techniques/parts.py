"""Parts of a precision that are chosen separately: the dtype of trained weights, and that in which gradients are
averaged.

`weights_dtype`: `bf16` under bf16-mixed is a network loaded in bf16 and trained under autocast, as many scripts do
unintentionally; for LoRA and QLoRA it is that of the adapters.  `reduce_dtype`: FSDP2's
`MixedPrecisionPolicy(reduce_dtype=)`, or DDP's hook that compresses gradients (`bf16_compress_hook`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques.precision import dtype
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.step.step import Step

REPLICATING: Final = ("ddp", "zero1")
"""Values of `shard` under which DDP averages gradients."""


def accepts_weights(case: Case) -> Refusal | None:
    """Refuse a dtype of trained weights that the computation cannot use; adapters cast their inputs themselves."""
    plan = case.plan
    adapters_cast = case.job.method != "full" and plan.weights_dtype == "fp32"
    if not adapters_cast and not plan.precision.endswith("-mixed") and plan.weights_dtype != plan.compute_dtype:
        reason = f"without autocast weights compute in their own dtype, and the precision is {plan.precision}"
        instead = "choose a -mixed precision"
    elif plan.precision == "fp16-mixed" and plan.weights_dtype != "fp32":
        reason = f"torch's GradScaler does not unscale {plan.weights_dtype} gradients"
        instead = "choose weights-dtype fp32"
    else:
        return None
    return Refusal(technique=f"weights_dtype={plan.weights_dtype}", reason=reason, instead=instead)


def with_weights(step: Step) -> Step:
    """Make the network's own weights in the dtype; adapters read the option themselves."""
    assert step.plan.weights_dtype is not None
    if step.job.method != "full":
        return step
    return replace(step, weights_dtype=dtype(step.plan.weights_dtype))


def accepts_reduction(case: Case) -> Refusal | None:
    """Refuse ranks that average no gradients, and wider dtypes under DDP."""
    plan = case.plan
    if plan.shard == "none" or plan.precision == "megatron-bf16":
        reason, instead = f"shard is {plan.shard} and precision {plan.precision}", "choose shard ddp or zero3"
    elif plan.shard in REPLICATING and plan.reduce_dtype == "fp32":
        reason, instead = "DDP averages gradients in their own dtype or a smaller one", "choose shard zero2"
    else:
        return None
    return Refusal(technique=f"reduce_dtype={plan.reduce_dtype}", reason=reason, instead=instead)


def with_reduction(step: Step) -> Step:
    """Make DDP compress what it averages; FSDP2's policy reads the option itself."""
    if step.plan.shard not in REPLICATING or step.shard is None:
        return step
    return replace(step, shard=partial(_compress_gradients, wrap=step.shard, name=str(step.plan.reduce_dtype)))


def _compress_gradients(module: nn.Module, wrap: Any, name: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    replicated = wrap(module)
    hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[name]
    replicated.register_comm_hook(state=replicated.process_group, hook=hook)
    return replicated


WEIGHTS: Final = Technique(
    option="weights_dtype", values=("fp32", "bf16", "fp16"), accepts=accepts_weights, apply=with_weights
)
REDUCTION: Final = Technique(
    option="reduce_dtype", values=("fp32", "bf16", "fp16"), accepts=accepts_reduction, apply=with_reduction
)
