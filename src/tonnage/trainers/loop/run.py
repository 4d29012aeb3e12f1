"""tonnage's own loop: a Step changed by the techniques, run as a careful user would write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tonnage.techniques import build, refusals
from tonnage.techniques.technique import first_of
from tonnage.trainers.engine import Engine

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.world import World
    from tonnage.techniques.technique import Refusal


def accepts(case: Case) -> Refusal | None:
    """Return the first refusal of the techniques."""
    return first_of(refusals(case))


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """Build the step, run it, and return it."""
    ready = build(
        job,
        plan,
        world_size=world.size,
        rank=world.rank,
        gpus_per_node=world.gpus_per_node,
        device=world.device.type,
    )
    ready.run(steps)
    return ready


TONNAGE_ENGINE: Final = Engine(name="tonnage", accepts=accepts, run=run)
