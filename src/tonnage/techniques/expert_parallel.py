"""Expert parallelism: the ranks of `ep` divide the experts, and tokens are sent to the ranks of their experts.

transformers' own code (`transformers.distributed.expert_parallel`) does it: each rank has whole experts, and every
layer exchanges tokens with the others twice, by all-to-all.  The ranks of `ep` are neighbours among those that shard
parameters (`dp_shard`, `cp` and `tp`, of which `ep` is a multiple; ranks of tp send parts of the batch they share);
FSDP2 shards an expert among the ranks that hold the same ones, and everything else as usual.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import CannotEstimate
from tonnage.mesh import SHARDING, divisors
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.step import Step

COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Configuration fields with the number of experts."""


def accepts(case: Case) -> Refusal | None:
    """Refuse experts that cannot be divided, and a transformers that cannot exchange tokens."""
    refused = dealt_out(case)
    if refused is not None:
        return refused
    if find_spec("transformers") is None or not transformers_has_it():
        return _refuse(case.plan, "this version of transformers has no expert parallelism", "upgrade transformers")
    return None


def dealt_out(case: Case) -> Refusal | None:
    """Return the reason why experts cannot be divided, by any trainer; this needs FSDP2."""
    job, plan = case.job, case.plan
    from tonnage.cluster import CPU

    if plan.shard not in SHARDING:
        return _refuse(plan, f"experts are divided under FSDP2, and shard is {plan.shard}", "choose shard zero3")
    if job.method != "full":
        return _refuse(plan, f"adapters on divided experts are not built, and the method is {job.method}")
    if job.generate is not None:
        return _refuse(plan, "it is not built for generate")
    if case.cluster.device.id == CPU and not case.is_carried_out:
        return _refuse(plan, "the exchange of tokens is not imitated on the CPU", "choose a GPU")
    experts = experts_of(job)
    if experts is not None and experts % plan.ep:
        fitting = ", ".join(str(size) for size in divisors(experts))
        return _refuse(
            plan, f"{job.model.name} has {experts} experts, which {plan.ep} does not divide", f"choose ep {fitting}"
        )
    return None


def experts_of(job: Job) -> int | None:
    """Return the number of experts in a layer; None if the configuration does not state it."""
    text = job.model.text
    return next((text[name] for name in COUNTS if isinstance(text.get(name), int)), None)


def _refuse(plan: Plan, reason: str, instead: str = "choose ep 1") -> Refusal:
    return Refusal(technique=f"ep={plan.ep}", reason=reason, instead=instead)


def transformers_has_it() -> bool:
    """Return True if the installed transformers has expert parallelism, without importing it."""
    from pathlib import Path

    spec = find_spec("transformers")
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / "distributed" / "expert_parallel.py").exists() for folder in folders or ())


def apply(step: Step) -> Step:
    """Remove the experts of other ranks before the network has memory."""
    from tonnage.step import clipping

    return replace(step, divide=(*step.divide, _divide), clip=partial(clipping.clip, world=step.world))


def _divide(step: Step, module: nn.Module) -> nn.Module:
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    from tonnage.step.model import causal_network

    network = causal_network(module, "Expert parallelism", "ep 1")
    plan = _named_plan(network)
    mesh = step.world.expert_mesh
    assert mesh is not None
    sharing_a_batch = step.world.along("tp") if step.world.axes.tp > 1 else mesh["alone"]
    apply_expert_parallelism(network, mesh["ep"], sharing_a_batch, plan, "all_to_all")
    for name, style in plan.items():
        if style == DISPATCHES:
            network.get_submodule(name).gets_tokens = True
    return module


DISPATCHES: Final = "ep_dispatch_experts"
"""transformers' name for a module of experts that gets tokens from other ranks."""


def _named_plan(network: Any) -> dict[str, str]:
    """Return transformers' treatment of parameters and modules by their names, parameters before their module."""
    patterns: dict[str, str] = getattr(network, "ep_plan", None) or {}
    names = [*(name for name, _ in network.named_parameters()), *(name for name, _ in network.named_modules())]
    plan = {
        name: patterns[generic] for name in names if (generic := re.sub(r"\.\d+(?=\.|$)", ".*", name)) in patterns
    }
    if DISPATCHES not in patterns.values():
        raise CannotEstimate(
            f"How the experts of {type(network).__name__} are divided is not known: transformers has no ep_plan for "
            "it; choose ep 1."
        )
    return plan


EXPERT_PARALLEL: Final = Technique(option="ep", values=("N",), accepts=accepts, apply=apply)
