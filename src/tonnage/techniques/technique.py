"""The interface of every technique: one option of the Plan or the Job, two questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tonnage.options import listed

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.step import Step


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a technique cannot be used for a job on a cluster, and what can."""

    technique: str
    """The option and value that were refused, as on the command line: `attention=flash`."""
    reason: str
    """What stands against it, with numbers or versions, in one line."""
    instead: str
    """What to choose in its place."""

    def __str__(self) -> str:
        return f"{self.technique}: {self.reason}; {self.instead}."

    @property
    def is_of_here(self) -> bool:
        """Whether only a package is missing, which may be there where the plan will run."""
        return self.instead.startswith("pip install")


def first_of(refusals: Iterable[Refusal | None]) -> Refusal | None:
    """The first that holds wherever the plan runs; else the first."""
    found = [one for one in refusals if one is not None]
    return next((one for one in found if not one.is_of_here), found[0] if found else None)


def nothing_against(case: Case) -> Refusal | None:
    """The `accepts` of a technique that works everywhere."""
    return None


def unchanged(step: Step) -> Step:
    """The `apply` of a technique that acts before the process starts (see `environment`)."""
    return step


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One trade of time or precision for memory: when it may be used, and what it does to a Step."""

    option: str
    """The field of the Plan (or of the Job: `method`) that chooses it."""
    values: tuple[str, ...]
    """The values of that field which this technique answers for; a trailing `-N` stands for any whole number,
    `N` alone for one above 1."""
    accepts: Callable[[Case], Refusal | None] = nothing_against
    """Whether it can be used; imports no torch."""
    apply: Callable[[Step], Step] = unchanged
    """The changed Step; imports torch inside."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that must be set before the training process starts."""
    libraries: tuple[str, ...] = ()
    """Optional packages and parts of torch that it takes to import; a warm worker does so once."""

    def chosen(self, job: Job, plan: Plan) -> bool:
        """True if the plan (or the job) asks for this technique."""
        return self.takes(getattr(plan if hasattr(plan, self.option) else job, self.option))

    def takes(self, value: str | bool | int) -> bool:
        """True if this technique answers for the value: `every-3` is taken by one that lists `every-N`.

        A switch that is set has the value `on`; a number above one is taken by a technique that lists `N`.
        """
        if isinstance(value, int) and not isinstance(value, bool):
            return value > 1 and "N" in self.values
        return listed("on" if value is True else str(value), self.values)
