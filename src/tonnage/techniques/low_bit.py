"""Optimizers that keep their states in fewer bits, and Lion, by bitsandbytes and by torchao.

| value | class | bytes of states of a parameter of n elements |
|---|---|---|
| adamw-8bit | bitsandbytes AdamW8bit | 2 x (n + 4 for each 256); fp32 below 4096 elements |
| paged-adamw | bitsandbytes PagedAdamW | 8n, managed memory from 100,000 elements on |
| paged-adamw-8bit | bitsandbytes PagedAdamW8bit | as adamw-8bit, managed memory from 100,000 elements on |
| lion, lion-8bit | bitsandbytes Lion, Lion8bit | one state instead of two, fp32 or 8 bits |
| adamw-8bit-ao | torchao AdamW8bit | 2 x (n + 4 for each 256); else as the parameter |
| adamw-4bit | torchao AdamW4bit | 2 x (n/2 + 4 for each 128); else as the parameter |
| adamw-fp8-ao | torchao AdamWFp8 | 2 x (n + 4 for each 256); else as the parameter |

torchao compresses a parameter, or a rank's shard of it, of at least 4096 elements that its blocks divide.  Its update
is one function that torch.compile compiles for each shape: the first step takes long, and the kernels are kept on
disk.  bitsandbytes keeps fp32 states whatever the parameter's dtype, and torch's SGD, AdamW and torchao do not.
Managed (paged) memory is the driver's: it is no part of what the caching allocator holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from tonnage.mesh import SHARDING
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from tonnage.case import Case
    from tonnage.step.step import Step


@dataclass(frozen=True, kw_only=True)
class Family:
    """The optimizers of one library."""

    package: str
    """What pip installs."""
    module: str
    """Where its optimizers are."""
    classes: dict[str, str]
    """The class of each value of the option."""
    shards: tuple[str, ...]
    """Values of `shard` whose parameters it takes."""


BITSANDBYTES: Final = Family(
    package="bitsandbytes",
    module="bitsandbytes.optim",
    classes={
        "adamw-8bit": "AdamW8bit",
        "paged-adamw": "PagedAdamW",
        "paged-adamw-8bit": "PagedAdamW8bit",
        "lion": "Lion",
        "lion-8bit": "Lion8bit",
    },
    shards=("none", "ddp", "zero1"),
)
TORCHAO: Final = Family(
    package="torchao",
    module="torchao.optim",
    classes={"adamw-8bit-ao": "AdamW8bit", "adamw-4bit": "AdamW4bit", "adamw-fp8-ao": "AdamWFp8"},
    shards=("none", "ddp", "zero1", "zero2", "zero3", "hsdp"),
)
FP8_CAPABILITY: Final = (8, 9)
"""From which compute capability on triton converts to fp8 (Ada, Hopper)."""


def _technique(family: Family) -> Technique:
    def accepts(case: Case) -> Refusal | None:
        plan = case.plan
        name = f"optimizer={plan.optimizer}"
        if plan.shard not in family.shards:
            reason = f"{family.package}'s optimizers do not take parameters divided by {plan.shard}"
            return Refusal(technique=name, reason=reason, instead=f"choose shard {' or '.join(family.shards)}")
        if plan.optimizer == "adamw-4bit" and plan.shard in SHARDING:
            reason = f"torchao's update of 4-bit states fails on parameters divided by {plan.shard} (torch 2.13)"
            return Refusal(technique=name, reason=reason, instead="choose optimizer adamw-8bit-ao")
        if plan.optimizer == "adamw-fp8-ao" and case.cluster.device.capability < FP8_CAPABILITY:
            reason = f"{case.cluster.device.id} has no fp8 (compute capability 8.9)"
            return Refusal(technique=name, reason=reason, instead="choose optimizer adamw-8bit-ao")
        if find_spec(family.package) is None:
            reason = f"the package {family.package} is not installed"
            return Refusal(technique=name, reason=reason, instead=f"pip install {family.package}")
        return None

    def apply(step: Step) -> Step:
        """One optimizer of the library over all trainable parameters."""
        from tonnage.step.step import trainable

        def new(parameters: list[nn.Parameter]) -> Optimizer:
            return _made(family, step.plan.optimizer, parameters)

        return replace(step, optimizer_parts=lambda module: ((trainable(module), new),))

    return Technique(
        option="optimizer",
        values=tuple(family.classes),
        accepts=accepts,
        apply=apply,
        libraries=(family.module,),
    )


def _made(family: Family, value: str, parameters: list[nn.Parameter]) -> Any:
    from importlib import import_module

    return getattr(import_module(family.module), family.classes[value])(parameters, lr=1e-4)


LOW_BIT: Final = _technique(BITSANDBYTES)
LOW_BIT_AO: Final = _technique(TORCHAO)
