"""All engines: who runs the step, chosen by the option `engine`.

One folder a trainer: `run.py` runs its step, `write.py` writes its files, `read.py` reads them, `facts.py` knows what
a script that uses it tells of itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tonnage.trainers.accelerate.run import ACCELERATE_ENGINE
from tonnage.trainers.axolotl.run import AXOLOTL_ENGINE
from tonnage.trainers.deepspeed.run import DEEPSPEED_ENGINE
from tonnage.trainers.engine import Engine
from tonnage.trainers.hf_trainer.run import HF_TRAINER_ENGINE
from tonnage.trainers.loop.run import TONNAGE_ENGINE
from tonnage.trainers.megatron.run import MEGATRON_ENGINE
from tonnage.trainers.torchtitan.run import TORCHTITAN_ENGINE
from tonnage.trainers.trl.run import TRL_ENGINE

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

ENGINES: Final[tuple[Engine, ...]] = (
    TONNAGE_ENGINE,
    HF_TRAINER_ENGINE,
    TRL_ENGINE,
    ACCELERATE_ENGINE,
    DEEPSPEED_ENGINE,
    TORCHTITAN_ENGINE,
    MEGATRON_ENGINE,
    AXOLOTL_ENGINE,
)

_BY_NAME: Final = {engine.name: engine for engine in ENGINES}


def names() -> tuple[str, ...]:
    """Return the values of the option `engine`."""
    return tuple(engine.name for engine in ENGINES)


def engine_of(plan: Plan) -> Engine:
    """Return the engine that the plan asks for."""
    return _BY_NAME[plan.engine]


def engines_with_setting(option: str, value: Any, default: Any) -> tuple[str, ...]:
    """Return the names of the engines that have a setting for this value of an option."""
    return tuple(engine.name for engine in ENGINES if engine.has_setting(option, value, default))


def libraries(job: Job, plan: Plan) -> frozenset[str]:
    """Return the modules of the packages whose code the job runs; a warm worker may hold others of earlier jobs."""
    from tonnage.techniques import select_techniques

    by_technique = (
        name.partition(".")[0] for technique in select_techniques(job, plan) for name in technique.libraries
    )
    by_engine = (package.replace("-", ".") for package in engine_of(plan).packages)
    return frozenset(("transformers", *by_technique, *by_engine))
