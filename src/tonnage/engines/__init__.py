"""All engines: who runs the step, chosen by the option `engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tonnage.engines import accelerate, axolotl, deepspeed, hf_trainer, megatron, own, torchtitan, trl
from tonnage.engines.engine import Engine

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

ENGINES: Final[tuple[Engine, ...]] = (
    own.TONNAGE,
    hf_trainer.HF_TRAINER,
    trl.TRL,
    accelerate.ACCELERATE,
    deepspeed.DEEPSPEED,
    torchtitan.TORCHTITAN,
    megatron.MEGATRON,
    axolotl.AXOLOTL,
)


def names() -> tuple[str, ...]:
    """The values of the option `engine`."""
    return tuple(engine.name for engine in ENGINES)


def engine_of(plan: Plan) -> Engine:
    """The engine that the plan asks for."""
    return next(engine for engine in ENGINES if engine.name == plan.engine)


def libraries(job: Job, plan: Plan) -> frozenset[str]:
    """Modules of the packages whose code the job runs: others may be there that earlier jobs have asked for."""
    from tonnage.techniques import chosen

    by_technique = (name.partition(".")[0] for technique in chosen(job, plan) for name in technique.libraries)
    by_engine = (package.replace("-", ".") for package in engine_of(plan).packages)
    return frozenset(("transformers", *by_technique, *by_engine))
