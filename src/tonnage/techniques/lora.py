"""LoRA: low-rank adapters beside frozen linear layers, by PEFT.

If matrices are divided (tensor parallelism) or layers are on other ranks (a pipeline), adapters are added before, and
divided along with them; PEFT then injects them into the network, else it wraps the network.

The frozen weights are made in `base_dtype` (default: the compute dtype), the adapters in `weights_dtype`.  Its
default is fp32, to which PEFT casts adapters, except under bf16-true, where it is the compute dtype; so it is for
QLoRA without other fp32 parts.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from tonnage.errors import UsageError
from tonnage.techniques.precision import dtype
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peft import LoraConfig
    from torch import nn

    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.step.step import Step


def accepts(case: Case) -> Refusal | None:
    """Refuse a missing PEFT, and a base dtype that the computation does not fit without autocast."""
    plan = case.plan
    if plan.base_dtype not in (None, plan.compute_dtype) and not plan.precision.endswith("-mixed"):
        return Refusal(
            technique=f"base_dtype={plan.base_dtype}",
            reason=f"without autocast the base must compute in its own dtype, and the precision is {plan.precision}",
            instead="choose a -mixed precision or leave the base dtype out",
        )
    if find_spec("peft") is None:
        return Refusal(
            technique="method=lora", reason="the package peft is not installed", instead="pip install peft"
        )
    return None


def apply(step: Step) -> Step:
    """Make the base in its dtype, and wrap it with adapters."""
    adapters_dtype = step.plan.adapters_dtype(step.job.method)
    step = replace(step, weights_dtype=dtype(step.plan.base_dtype or step.plan.compute_dtype))
    if max(step.plan.tp, step.plan.pp) > 1:
        return replace(step, adapt=lambda network: _inject_adapters(network, step, adapters_dtype))
    return replace(step, changes=(*step.changes, lambda module: with_adapters(module, step, adapters_dtype)))


def with_adapters(module: nn.Module, step: Step, kept: str) -> nn.Module:
    """Return the network wrapped by PEFT, everything frozen but the adapters, which are kept in the dtype `kept`
    (`fp32`).

    A network that its user has wrapped is returned as it is.
    """
    if hasattr(module, "peft_config"):
        return module
    from peft import get_peft_model

    with _report_errors_of_peft(step):
        adapted: nn.Module = get_peft_model(module, configuration(step.job), autocast_adapter_dtype=kept == "fp32")
    return _cast_adapters(adapted, kept)


def _inject_adapters(network: nn.Module, step: Step, kept: str) -> nn.Module:
    """Return the network itself, its linear layers replaced by PEFT's, otherwise like `with_adapters`."""
    if hasattr(network, "peft_config"):
        return network
    from peft import inject_adapter_in_model

    with _report_errors_of_peft(step):
        adapted: nn.Module = inject_adapter_in_model(configuration(step.job), network)
    return _cast_adapters(adapted, kept)


def configuration(job: Job) -> LoraConfig:
    """Return PEFT's configuration for the job's adapters."""
    from peft import LoraConfig

    targets = job.lora_targets
    return LoraConfig(
        r=job.lora_rank,
        lora_alpha=2 * job.lora_rank,
        lora_dropout=job.lora_dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
    )


@contextmanager
def _report_errors_of_peft(step: Step) -> Iterator[None]:
    """Raise PEFT's errors as errors of an option, while it adds adapters."""
    from tonnage.step.model import quiet, without_initialisation

    try:
        with nullcontext() if step.initialise else without_initialisation(), quiet():
            yield
    except ValueError as error:
        raise not_adapted(step.job, error) from error


def _cast_adapters(adapted: nn.Module, kept: str) -> nn.Module:
    from tonnage.step.step import trainable

    for parameter in trainable(adapted):
        parameter.data = parameter.data.to(dtype(kept))
    return adapted


def not_adapted(job: Job, error: ValueError) -> UsageError:
    """Return the error for what PEFT refuses: targets that do not exist, dropout on experts."""
    message = " ".join(str(error).split())
    return UsageError(f"PEFT cannot adapt {job.model.name}: {message} (--lora-targets, --lora-dropout)")


LORA: Final = Technique(option="method", values=("lora",), accepts=accepts, apply=apply, libraries=("peft",))
