"""Parameter offload: shards, their gradients and optimizer states rest in host memory, where the optimizer runs.

It is FSDP2's CPUOffloadPolicy with pinned memory, its default.  Only DeepSpeed puts them into files (`nvme`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tonnage.mesh import SHARDING
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.step.step import Step


def accepts(case: Case) -> Refusal | None:
    """Refuse other shardings than FSDP2's, which offloads to the host alone."""
    plan = case.plan
    if plan.param_offload == "nvme" and plan.engine != "deepspeed":
        return Refusal(
            technique="param_offload=nvme",
            reason="FSDP2 keeps parameters on the host, not in files",
            instead="choose param-offload cpu, or engine deepspeed with shard zero3",
        )
    if plan.shard in SHARDING:
        return None
    return Refusal(
        technique="param_offload=cpu",
        reason=f"it is a part of FSDP2, and shard is {plan.shard}",
        instead="choose shard zero3 (it works on one GPU as well)",
    )


def apply(step: Step) -> Step:
    """Set the host as the device of shards, which `fsdp` reads."""
    import torch

    return replace(step, parameters_device=torch.device("cpu"))


CPU_OFFLOAD: Final = Technique(option="param_offload", values=("cpu", "nvme"), accepts=accepts, apply=apply)
