"""LoRA: low-rank adapters beside frozen linear layers, by PEFT.

Where matrices are divided (tensor parallelism) or layers are elsewhere (a pipeline), adapters are there before, and
are divided with them; then PEFT puts them into the network, else it wraps the network.

The frozen weights are made in `base_dtype` (default: the compute dtype), the adapters in `weights_dtype`.  Its
default is fp32, to which PEFT casts adapters, but the compute dtype under bf16-true; of QLoRA's, where nothing else
is fp32.
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
    """PEFT must be installed, and the base must fit the computation unless autocast casts it."""
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
    kept = step.plan.adapters_dtype(step.job.method)
    step = replace(step, weights_dtype=dtype(step.plan.base_dtype or step.plan.compute_dtype))
    if max(step.plan.tp, step.plan.pp) > 1:
        return replace(step, adapt=lambda network: _with_adapters_inside(network, step, kept))
    return replace(step, changes=(*step.changes, lambda module: with_adapters(module, step, kept)))


def with_adapters(module: nn.Module, step: Step, kept: str) -> nn.Module:
    """The network inside PEFT's, everything frozen but the adapters, which are `kept` in a dtype (`fp32`)."""
    from peft import get_peft_model

    with _adapting(step):
        adapted: nn.Module = get_peft_model(module, configuration(step.job), autocast_adapter_dtype=kept == "fp32")
    return _kept_in(adapted, kept)


def _with_adapters_inside(network: nn.Module, step: Step, kept: str) -> nn.Module:
    """The network itself, its linear layers replaced by PEFT's, otherwise as `with_adapters` makes it."""
    from peft import inject_adapter_in_model

    with _adapting(step):
        adapted: nn.Module = inject_adapter_in_model(configuration(step.job), network)
    return _kept_in(adapted, kept)


def configuration(job: Job) -> LoraConfig:
    """PEFT's of the job's adapters."""
    from peft import LoraConfig

    targets = job.lora_targets
    return LoraConfig(
        r=job.lora_rank,
        lora_alpha=2 * job.lora_rank,
        lora_dropout=job.lora_dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
    )


@contextmanager
def _adapting(step: Step) -> Iterator[None]:
    """While PEFT adds adapters; what it has against them is an option's error."""
    from tonnage.step.model import quiet, without_initialisation

    try:
        with nullcontext() if step.initialise else without_initialisation(), quiet():
            yield
    except ValueError as error:
        raise not_adapted(step.job, error) from error


def _kept_in(adapted: nn.Module, kept: str) -> nn.Module:
    from tonnage.step.step import trainable

    for parameter in trainable(adapted):
        parameter.data = parameter.data.to(dtype(kept))
    return adapted


def not_adapted(job: Job, error: ValueError) -> UsageError:
    """What PEFT has against adapters: targets that are not there, dropout on experts."""
    said = " ".join(str(error).split())
    return UsageError(f"PEFT cannot adapt {job.model.name}: {said} (--lora-targets, --lora-dropout)")


LORA: Final = Technique(option="method", values=("lora",), accepts=accepts, apply=apply, libraries=("peft",))
