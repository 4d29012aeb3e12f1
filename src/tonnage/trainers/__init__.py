"""All engines: who runs the step, chosen by the option `engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tonnage.trainers.accelerate import run as accelerate
from tonnage.trainers.axolotl import run as axolotl
from tonnage.trainers.deepspeed import run as deepspeed
from tonnage.trainers.engine import Engine
from tonnage.trainers.hf_trainer import run as hf_trainer
from tonnage.trainers.loop import run as own
from tonnage.trainers.megatron import run as megatron
from tonnage.trainers.torchtitan import run as torchtitan
from tonnage.trainers.trl import run as trl

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

_BY_NAME: Final = {engine.name: engine for engine in ENGINES}


def names() -> tuple[str, ...]:
    """The values of the option `engine`."""
    return tuple(engine.name for engine in ENGINES)


def engine_of(plan: Plan) -> Engine:
    """The engine that the plan asks for."""
    return _BY_NAME[plan.engine]


def with_words(option: str, value: Any, default: Any) -> tuple[str, ...]:
    """The engines that can be told this value of an option."""
    return tuple(engine.name for engine in ENGINES if engine.has_words(option, value, default))


def libraries(job: Job, plan: Plan) -> frozenset[str]:
    """Modules of the packages whose code the job runs: others may be there that earlier jobs have asked for."""
    from tonnage.techniques import chosen

    by_technique = (name.partition(".")[0] for technique in chosen(job, plan) for name in technique.libraries)
    by_engine = (package.replace("-", ".") for package in engine_of(plan).packages)
    return frozenset(("transformers", *by_technique, *by_engine))
