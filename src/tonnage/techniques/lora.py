"""LoRA: low-rank adapters beside frozen linear layers, by PEFT.

The frozen weights are made in `base_dtype` (default: the compute dtype).  Adapters are fp32 under autocast, as PEFT
casts them by default, and in the compute dtype for the -true precisions.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from tonnage.techniques.precision import dtype
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.device import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step import Step


def accepts(job: Job, plan: Plan, cluster: Cluster) -> Refusal | None:
    """PEFT must be installed, and the base must fit the computation unless autocast casts it."""
    if find_spec("peft") is None:
        return Refusal(
            technique="method=lora", reason="the package peft is not installed", instead="pip install peft"
        )
    if plan.base_dtype not in (None, plan.compute_dtype) and not plan.precision.endswith("-mixed"):
        return Refusal(
            technique=f"base_dtype={plan.base_dtype}",
            reason=f"without autocast the base must compute in its own dtype, and the precision is {plan.precision}",
            instead="choose a -mixed precision or leave the base dtype out",
        )
    return None


def apply(step: Step) -> Step:
    """Make the base in its dtype, and wrap it with adapters."""
    base = step.plan.base_dtype or step.plan.compute_dtype
    return replace(
        step,
        weights_dtype=dtype(base),
        changes=(*step.changes, lambda module: with_adapters(module, step, fp32=step.autocast_dtype is not None)),
    )


def with_adapters(module: nn.Module, step: Step, *, fp32: bool) -> nn.Module:
    """The network inside PEFT's, everything frozen but the adapters; `fp32`: PEFT casts them to it, its default."""
    from contextlib import nullcontext

    from peft import LoraConfig, get_peft_model

    from tonnage.model import quiet, without_initialisation

    targets = step.job.lora_targets
    config = LoraConfig(
        r=step.job.lora_rank,
        lora_alpha=2 * step.job.lora_rank,
        lora_dropout=step.job.lora_dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
    )
    with nullcontext() if step.initialise else without_initialisation(), quiet():
        adapted: nn.Module = get_peft_model(module, config, autocast_adapter_dtype=fp32)
    return adapted


LORA: Final = Technique(option="method", values=("lora",), accepts=accepts, apply=apply, libraries=("peft",))
