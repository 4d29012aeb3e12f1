"""A training step to be run on a real GPU and on the ghost: what is trained, how, and what is written down of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from typing import Any, Final

from models import model

from tonnage.job import Job
from tonnage.options import options, spell_option
from tonnage.plans import Plan
from tonnage.techniques import select_techniques
from tonnage.trainers import engine_of
from tonnage.trainers.loop.run import TONNAGE_ENGINE
from tonnage.units import GIB

JOB_FIELDS: Final = tuple(item.name for item, _ in options(Job))

BESIDES: Final = ("lengths", "eval_batch", "generate", "resume", "save_checkpoint")
"""Options of a job that make its steps unlike each other."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step to be run in a process of its own."""

    name: str
    """Model and every choice, unique in the matrix."""
    job: Job
    """What is trained."""
    plan: Plan
    """How."""
    limit_bytes: int | None = None
    """What the caching allocator may reserve (`set_per_process_memory_fraction`); None: all there is."""
    traced: bool = False
    """Whether every allocator event is written down."""
    profiled: bool = False
    """Whether the kernels of one step are written down, with grids and seconds."""
    awaited: bool = True
    """Whether the GPU is awaited after each step; without, as in most loops, Python runs ahead of it."""

    @property
    def timed(self) -> bool:
        """Whether its steps are alike, so that one number says how long they take."""
        return all(getattr(self.job, name) == getattr(_USUAL, name) for name in BESIDES)

    @property
    def by_trainer(self) -> bool:
        """Whether the code of a trainer runs its steps, not tonnage's own loop."""
        return engine_of(self.plan) is not TONNAGE_ENGINE

    @property
    def libraries(self) -> tuple[str, ...]:
        """Optional modules that it takes, to be imported before a process is forked for it."""
        of_techniques = (name for technique in select_techniques(self.job, self.plan) for name in technique.libraries)
        return tuple(dict.fromkeys((*of_techniques, *engine_of(self.plan).imports)))

    def lacking(self) -> str | None:
        """The first package that it needs and that is not installed; None if all are there."""
        refusal = next(engine_of(self.plan).missing(), None)
        if refusal is not None:
            return refusal.reason
        packages = (name.partition(".")[0] for name in self.libraries)
        missing = (name for name in packages if find_spec(name) is None)
        return next((f"the package {name} is not installed" for name in missing), None)


_USUAL: Final = Job()


def case(
    network: str,
    *,
    limit_gib: float | None = None,
    traced: bool = False,
    profiled: bool = False,
    awaited: bool = True,
    time: int = 1,
    **choices: Any,
) -> Case:
    """A case from a model's name and whatever differs from the defaults of Job and Plan.

    `time`: above 1 where the same is run again, to see what differs from run to run.
    """
    job = Job(model=model(network), **{key: choices.pop(key) for key in JOB_FIELDS if key in choices})
    plan = Plan(**choices)
    return Case(
        name="/".join([*_name(job, plan), *_way(limit_gib, awaited, time)]),
        job=job,
        plan=plan,
        limit_bytes=None if limit_gib is None else int(limit_gib * GIB),
        traced=traced,
        profiled=profiled,
        awaited=awaited,
    )


_IN_FRONT: Final = ("method", "seq_len", "micro_batch", "grad_accum", "precision", "optimizer", "checkpointing")
"""Options that every name says, and accumulation."""

_SHORTER: Final = {
    "attention": "attn",
    "base_dtype": "base",
    "param_offload": "offload",
    "allocator": "alloc",
    "lora_rank": "rank",
}


def _name(job: Job, plan: Plan) -> Iterator[str]:
    yield from (job.model.name, job.method, plan.precision, plan.optimizer, f"ckpt-{plan.checkpointing}")
    yield from (f"seq{job.seq_len}", f"mb{job.micro_batch}")
    if job.grad_accum > 1:
        yield f"accum{job.grad_accum}"
    for value in (job, plan):
        for item, _ in options(type(value)):
            chosen = getattr(value, item.name)
            if item.name not in _IN_FRONT and chosen != item.default:
                yield f"{_SHORTER.get(item.name, spell_option(item.name))}-{_word(chosen)}"


def _way(limit_gib: float | None, awaited: bool, time: int) -> Iterator[str]:
    if limit_gib is not None:
        yield f"limit{limit_gib:g}GiB"
    if not awaited:
        yield "unawaited"
    if time > 1:
        yield f"time-{time}"


def _word(chosen: Any) -> str:
    if isinstance(chosen, tuple):
        return "+".join(chosen)
    return "on" if chosen is True else str(chosen)


def chosen(cases: Iterable[Case], pattern: str) -> list[Case]:
    """The cases whose names match a shell pattern; `*` also spans slashes."""
    return [one for one in cases if fnmatch(one.name, pattern)]
