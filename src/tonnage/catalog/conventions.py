"""What each trainer does by itself, whatever a plan says: facts that decide memory and seconds of its steps.

The trainers' own code is in `tonnage.trainers`; tests/trainers compares these facts with it where it is installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tonnage.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """The habits of one trainer."""

    torchs_ddp: bool = False
    """Whether its `ddp` is torch's, which averages gradients in buckets beside them."""
    clips: bool = False
    """Whether it scales gradients down to norm 1.0 where a plan says nothing of it."""
    fuses_adamw: bool = False
    """Whether AdamW without further options is one kernel for many tensors."""
    keeps_adapters: bool = False
    """Whether adapters stay in the dtype in which PEFT makes them."""
    reduces_as_computed: bool = False
    """Whether FSDP2 reduces gradients in the dtype of computation: accelerate's policy, which names no other."""
    by_zero: bool = False
    """Whether DeepSpeed's ZeRO divides, which stores weights and gradients in the dtype of computation."""
    copies_share_experts: bool = False
    """Whether all data-parallel ranks may deal the experts out among them, also those that divide nothing else."""


_OF_HF_TRAINER: Final = Conventions(
    torchs_ddp=True, clips=True, fuses_adamw=True, keeps_adapters=True, reduces_as_computed=True
)

_BY_ENGINE: Final[Mapping[str, Conventions]] = {
    "tonnage": Conventions(torchs_ddp=True),
    "hf-trainer": _OF_HF_TRAINER,
    "trl": _OF_HF_TRAINER,
    "axolotl": _OF_HF_TRAINER,
    "accelerate": Conventions(torchs_ddp=True, reduces_as_computed=True),
    "deepspeed": Conventions(fuses_adamw=True, by_zero=True),
    "torchtitan": Conventions(clips=True, fuses_adamw=True, keeps_adapters=True),
    "megatron": Conventions(clips=True, copies_share_experts=True),
}


def conventions_of(engine: str) -> Conventions:
    """Return what the trainer of this name does by itself."""
    return _BY_ENGINE[engine]


def averages_by_ddp(plan: Plan) -> bool:
    """Return whether torch's DDP averages the gradients, in buckets beside them."""
    if plan.shard == "zero1":
        return plan.engine == "tonnage" and plan.precision != "megatron-bf16"
    return plan.shard == "ddp" and conventions_of(plan.engine).torchs_ddp
