"""tonnage's own loop: what the techniques make of a Step, run as a careful user would write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tonnage.engines.engine import Engine
from tonnage.techniques import chosen, refusals
from tonnage.techniques.technique import Refusal

if TYPE_CHECKING:
    from tonnage.device import Cluster
    from tonnage.job import Job
    from tonnage.plan import Plan
    from tonnage.step import World


def accepts(job: Job, plan: Plan, cluster: Cluster) -> Refusal | None:
    """What the techniques say; degrees of parallelism that none of them answers for are not run."""
    answered = {technique.option for technique in chosen(job, plan)}
    for degree in ("tp", "pp", "cp", "ep"):
        if getattr(plan, degree) > 1 and degree not in answered:
            return Refusal(
                technique=f"{degree}={getattr(plan, degree)}",
                reason="it is not run by this version",
                instead=f"choose {degree} 1",
            )
    return next(iter(refusals(job, plan, cluster)), None)


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """Build the step and run it."""
    from tonnage import step

    ready = step.build(
        job,
        plan,
        world_size=world.size,
        rank=world.rank,
        gpus_per_node=world.gpus_per_node,
        device=world.device.type,
    )
    ready.run(steps)
    return ready


TONNAGE: Final = Engine(name="tonnage", accepts=accepts, run=run)
