"""Expert parallelism: the ranks of `ep` share the experts, and tokens go to where their experts are.

transformers' own code (`transformers.distributed.expert_parallel`) does it: each rank has whole experts, and every
layer exchanges tokens with the others twice, by all-to-all.  The ranks of `ep` are neighbours among those that divide
parameters (`dp_shard`, `cp` and `tp`, of which `ep` is a multiple; ranks of tp send parts of the batch they share);
FSDP2 divides an expert among the ranks that hold the same ones, and everything else as usual.
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
"""What configurations call the number of experts."""


def accepts(case: Case) -> Refusal | None:
    """Experts that can be dealt out, and transformers' exchange of tokens."""
    refused = dealt_out(case)
    if refused is not None:
        return refused
    if find_spec("transformers") is None or not transformers_has_it():
        return _refused(case.plan, "this version of transformers has no exchange of tokens", "upgrade transformers")
    return None


def dealt_out(case: Case) -> Refusal | None:
    """Whoever exchanges tokens: why experts cannot be dealt out, which they are under FSDP2."""
    job, plan = case.job, case.plan
    from tonnage.cluster import CPU

    if plan.shard not in SHARDING:
        return _refused(plan, f"experts are divided under FSDP2, and shard is {plan.shard}", "choose shard zero3")
    if job.method != "full":
        return _refused(plan, f"adapters on divided experts are not built, and the method is {job.method}")
    if job.generate is not None:
        return _refused(plan, "it is not built for generate")
    if case.cluster.device.id == CPU:
        return _refused(plan, "how many tokens go where is not imitated on the CPU", "choose a GPU")
    experts = experts_of(job)
    if experts is not None and experts % plan.ep:
        fitting = ", ".join(str(size) for size in divisors(experts))
        return _refused(
            plan, f"{job.model.name} has {experts} experts, which {plan.ep} does not divide", f"choose ep {fitting}"
        )
    return None


def experts_of(job: Job) -> int | None:
    """How many experts a layer has, as far as the configuration says it."""
    text = job.model.text
    return next((text[name] for name in COUNTS if isinstance(text.get(name), int)), None)


def _refused(plan: Plan, reason: str, instead: str = "choose ep 1") -> Refusal:
    return Refusal(technique=f"ep={plan.ep}", reason=reason, instead=instead)


def transformers_has_it() -> bool:
    """Looked for without importing transformers."""
    from pathlib import Path

    found = find_spec("transformers")
    places = found.submodule_search_locations if found is not None else None
    return any((Path(place) / "distributed" / "expert_parallel.py").exists() for place in places or ())


def apply(step: Step) -> Step:
    """Take out the experts of other ranks before the network has memory."""
    from tonnage.step import clipping

    return replace(step, divide=(*step.divide, _divided), clip=partial(clipping.clip, world=step.world))


def _divided(step: Step, module: nn.Module) -> nn.Module:
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    from tonnage.step.model import causal_network

    network = causal_network(module, "Expert parallelism", "ep 1")
    plan = _plan(network)
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


def _plan(network: Any) -> dict[str, str]:
    """What transformers does with which parameters and modules, by their names; parameters before their module."""
    wanted: dict[str, str] = getattr(network, "ep_plan", None) or {}
    here = [*(name for name, _ in network.named_parameters()), *(name for name, _ in network.named_modules())]
    found = {name: wanted[generic] for name in here if (generic := re.sub(r"\.\d+(?=\.|$)", ".*", name)) in wanted}
    if DISPATCHES not in wanted.values():
        raise CannotEstimate(
            f"How the experts of {type(network).__name__} are divided is not known: transformers has no ep_plan for "
            "it; choose ep 1."
        )
    return found


EXPERT_PARALLEL: Final = Technique(option="ep", values=("N",), accepts=accepts, apply=apply)
