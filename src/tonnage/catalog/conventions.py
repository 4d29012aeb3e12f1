"""Defaults of each trainer that no option of a plan changes, and that decide memory and seconds of its steps.

The code that runs each trainer is in `tonnage.trainers`; tests/trainers compares these facts with the installed
trainers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tonnage.plans import SHARDS, Plan


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """Defaults of one trainer."""

    torchs_ddp: bool = False
    """True if its `ddp` is torch's DistributedDataParallel, which averages gradients in separate buckets."""
    clips: bool = False
    """True if it clips gradients to norm 1.0 where a plan does not say whether to clip."""
    fuses_adamw: bool = False
    """True if its default AdamW is fused: one kernel for many tensors."""
    keeps_adapters: bool = False
    """True if adapters stay in the dtype in which PEFT creates them."""
    reduces_as_computed: bool = False
    """True if FSDP2 reduces gradients in the compute dtype: accelerate's policy, which sets no other reduce dtype."""
    by_zero: bool = False
    """True if DeepSpeed's ZeRO shards, which stores weights and gradients in the compute dtype."""
    loads_in_parts: tuple[str, ...] = ()
    """Values of `shard` under which each rank loads its own part; else it makes the whole network in host memory."""
    copies_share_experts: bool = False
    """True if all data-parallel ranks can share the experts, also replicas that share nothing else."""


_HF_TRAINER: Final = Conventions(
    torchs_ddp=True, clips=True, fuses_adamw=True, keeps_adapters=True, reduces_as_computed=True
)

_BY_ENGINE: Final[Mapping[str, Conventions]] = {
    "tonnage": Conventions(torchs_ddp=True, loads_in_parts=("zero2", "zero3", "hsdp")),
    "hf-trainer": _HF_TRAINER,
    "trl": _HF_TRAINER,
    "axolotl": _HF_TRAINER,
    "accelerate": Conventions(torchs_ddp=True, reduces_as_computed=True),
    "deepspeed": Conventions(fuses_adamw=True, by_zero=True, loads_in_parts=("zero3",)),
    "torchtitan": Conventions(clips=True, fuses_adamw=True, keeps_adapters=True, loads_in_parts=SHARDS),
    "megatron": Conventions(clips=True, copies_share_experts=True, loads_in_parts=SHARDS),
}


def conventions_of(engine: str) -> Conventions:
    """Return the defaults of the trainer of this name."""
    return _BY_ENGINE[engine]


def averages_by_ddp(plan: Plan) -> bool:
    """Return True if torch's DDP averages the gradients, in separate buckets."""
    if plan.shard == "zero1":
        return plan.engine == "tonnage" and plan.precision != "megatron-bf16"
    return plan.shard == "ddp" and conventions_of(plan.engine).torchs_ddp
