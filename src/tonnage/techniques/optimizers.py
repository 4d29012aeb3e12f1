"""The optimizers that take all parameters: torch's, and those of bitsandbytes and torchao with states of fewer bits.

`tonnage.catalog.optimizers` has the class, the arguments and the states of each value.  `adamw` is as torch makes it;
on CUDA that is foreach, whose temporaries at the step can be as large as all parameters together.  The temporaries of
`adamw-loop` are those of one parameter; the kernel of `adamw-fused` has none.

torchao compresses a parameter, or a rank's shard of it, of at least 4,096 elements that its blocks divide.  Its
update is one function that torch.compile compiles for each shape: the first step takes long, and the kernels are kept
on disk.  Paged states are managed memory of the driver, which the caching allocator does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from tonnage.catalog.optimizers import OPTIMIZERS, Optimizer, find_optimizer
from tonnage.errors import UsageError
from tonnage.mesh import SHARDING
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.step.step import NewOptimizer, Step

HYPERPARAMETERS: Final = ("lr", "weight_decay", "betas", "eps", "momentum")
"""Arguments of optimizers that a user chooses; the others decide memory, and belong to the plan."""

FP8_CAPABILITY: Final = (8, 9)
"""The first compute capability for which triton converts to fp8 (Ada, Hopper)."""


def make(
    optimizer: Optimizer, parameters: list[nn.Parameter], hyperparameters: Mapping[str, Any] | None = None
) -> Any:
    """Return an optimizer of that class over these parameters.

    `hyperparameters` replace those of the table; those that the class does not have are for another optimizer.
    """
    stated = {name: value for name, value in (hyperparameters or {}).items() if name in accepted_names(optimizer)}
    rate = {} if optimizer.learning_rate is None else {"lr": optimizer.learning_rate}
    try:
        return _class_of(optimizer)(parameters, **{**rate, **optimizer.arguments, **stated})
    except ValueError as error:
        raise UsageError(f"{optimizer.class_name} refuses its hyperparameters: {error}.") from error


def _class_of(optimizer: Optimizer) -> Any:
    return getattr(import_module(optimizer.module), optimizer.class_name)


def accepted_names(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the HYPERPARAMETERS that an optimizer has.

    Momentum where the plan's optimizer has none would be a state that the plan does not know.
    """
    possible = signature(_class_of(optimizer)).parameters
    without = ("momentum",) if optimizer.family == "sgd" and not optimizer.moments else ()
    return tuple(name for name in HYPERPARAMETERS if name in possible and name not in without)


def maker(step: Step, name: str) -> NewOptimizer:
    """Return the function that makes the optimizer of that name, as the step's user wants it."""
    row = find_optimizer(name)
    if step.optimizer_factory is not None:
        return partial(_make_by_factory, step.optimizer_factory, row)
    return partial(make, row, hyperparameters=step.hyperparameters)


def _make_by_factory(factory: NewOptimizer, row: Optimizer, parameters: list[nn.Parameter]) -> Any:
    """Return what the user's factory makes.  Raises UsageError unless it is the optimizer that the plan names."""
    made = factory(parameters)
    if not isinstance(made, _class_of(row)):
        raise UsageError(
            f"The factory made a {type(made).__name__}, and the plan's optimizer {row.name} is "
            f"{row.module}.{row.class_name}; make that, or choose another plan."
        )
    taken = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    missing = sum(id(parameter) not in taken for parameter in parameters)
    if missing:
        raise UsageError(
            f"The factory left out {missing} of {len(parameters)} trained parameters; give it all of them."
        )
    return made


def apply(step: Step) -> Step:
    """Return the step with one optimizer over all trainable parameters."""
    from tonnage.step.step import trainable

    new = maker(step, step.plan.optimizer)
    return replace(step, optimizer_parts=lambda module: ((trainable(module), new),))


def _accepts_adafactor(case: Case) -> Refusal | None:
    """Return the refusal for parameters that FSDP2 divides, which torch's Adafactor does not take."""
    if case.plan.shard not in SHARDING:
        return None
    return Refusal(
        technique="optimizer=adafactor",
        reason="torch.optim.Adafactor fails on FSDP2's sharded parameters",
        instead="choose shard none, ddp or zero1, or optimizer adamw",
    )


def _accepts_bitsandbytes(case: Case) -> Refusal | None:
    """Return the refusal for parameters that FSDP2 divides, or for a missing package."""
    if case.plan.shard not in SHARDING:
        return _missing(case)
    return Refusal(
        technique=f"optimizer={case.plan.optimizer}",
        reason=f"bitsandbytes's optimizers do not take parameters divided by {case.plan.shard}",
        instead="choose shard none or ddp or zero1",
    )


def _accepts_torchao(case: Case) -> Refusal | None:
    """Return the refusal for divided 4-bit states, for a card without fp8, or for a missing package."""
    plan, device = case.plan, case.cluster.device
    if plan.optimizer == "adamw-4bit" and plan.shard in SHARDING:
        reason = f"torchao's update of 4-bit states fails on parameters divided by {plan.shard} (torch 2.13)"
    elif plan.optimizer == "adamw-fp8-ao" and device.capability < FP8_CAPABILITY:
        reason = f"{device.id} has no fp8 (compute capability 8.9)"
    else:
        return _missing(case)
    return Refusal(technique=f"optimizer={plan.optimizer}", reason=reason, instead="choose optimizer adamw-8bit-ao")


def _missing(case: Case) -> Refusal | None:
    """Return the refusal for a library that is not installed."""
    library = find_optimizer(case.plan.optimizer).library
    if find_spec(library) is not None:
        return None
    return Refusal(
        technique=f"optimizer={case.plan.optimizer}",
        reason=f"the package {library} is not installed",
        instead=f"pip install {library}",
    )


def _names(*, library: str = "torch", family: str | None = None) -> tuple[str, ...]:
    return tuple(one.name for one in OPTIMIZERS if one.library == library and family in (None, one.family))


ADAMW: Final = Technique(option="optimizer", values=_names(family="adamw"), apply=apply)
SGD: Final = Technique(option="optimizer", values=_names(family="sgd"), apply=apply)
ADAFACTOR: Final = Technique(
    option="optimizer", values=_names(family="adafactor"), accepts=_accepts_adafactor, apply=apply
)
BITSANDBYTES: Final = Technique(
    option="optimizer",
    values=_names(library="bitsandbytes"),
    accepts=_accepts_bitsandbytes,
    apply=apply,
    libraries=("bitsandbytes.optim",),
)
TORCHAO: Final = Technique(
    option="optimizer",
    values=_names(library="torchao"),
    accepts=_accepts_torchao,
    apply=apply,
    libraries=("torchao.optim",),
)
