"""LoRA: low-rank adapters beside frozen linear layers, by PEFT.

The frozen weights are made in `base_dtype` (default: the compute dtype), the adapters in `weights_dtype`.  Its
default is fp32, to which PEFT casts adapters, but the compute dtype under bf16-true; of QLoRA's, where nothing else
is fp32.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from tonnage.errors import UsageError
from tonnage.techniques.precision import dtype
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.device import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.step import Step


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
        changes=(*step.changes, lambda module: with_adapters(module, step, adapters_dtype(step.job, step.plan))),
    )


def adapters_dtype(job: Job, plan: Plan) -> str:
    """`fp32`, or what else adapters are kept in; fp16 would lose their small steps."""
    beside_fp32 = plan.unquantized_dtype == "fp32" if job.method == "qlora" else plan.compute_dtype == "fp16"
    usual = "fp32" if beside_fp32 or plan.precision.endswith("-mixed") else plan.compute_dtype
    return plan.weights_dtype or usual


def with_adapters(module: nn.Module, step: Step, kept: str) -> nn.Module:
    """The network inside PEFT's, everything frozen but the adapters, which are `kept` in a dtype (`fp32`)."""
    from contextlib import nullcontext

    from peft import LoraConfig, get_peft_model

    from tonnage.step.model import quiet, without_initialisation
    from tonnage.step.step import trainable

    targets = step.job.lora_targets
    config = LoraConfig(
        r=step.job.lora_rank,
        lora_alpha=2 * step.job.lora_rank,
        lora_dropout=step.job.lora_dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
    )
    try:
        with nullcontext() if step.initialise else without_initialisation(), quiet():
            adapted: nn.Module = get_peft_model(module, config, autocast_adapter_dtype=kept == "fp32")
    except ValueError as error:
        raise not_adapted(step.job, error) from error
    for parameter in trainable(adapted):
        parameter.data = parameter.data.to(dtype(kept))
    return adapted


def not_adapted(job: Job, error: ValueError) -> UsageError:
    """What PEFT has against adapters: targets that are not there, dropout on experts."""
    said = " ".join(str(error).split())
    return UsageError(f"PEFT cannot adapt {job.model.name}: {said} (--lora-targets, --lora-dropout)")


LORA: Final = Technique(option="method", values=("lora",), accepts=accepts, apply=apply, libraries=("peft",))
