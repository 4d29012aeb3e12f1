"""The interface of every technique: the option that chooses it, when it can be used, what it does to a Step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tonnage.options import is_accepted

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.step import Step


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The reason why a technique cannot be used in a case, and what to choose instead."""

    technique: str
    """The option and value that were refused, as on the command line: `attention=flash`."""
    reason: str
    """The reason in one line, with numbers or versions."""
    instead: str
    """The choices that work instead."""

    def __str__(self) -> str:
        return f"{self.technique}: {self.reason}; {self.instead}."

    @property
    def is_of_here(self) -> bool:
        """Return True if only a package is missing, which may be installed where the plan will run."""
        return self.instead.startswith("pip install")


def first_of(refusals: Iterable[Refusal | None]) -> Refusal | None:
    """Return the first refusal that holds wherever the plan runs; else the first one."""
    given = [refusal for refusal in refusals if refusal is not None]
    return next((refusal for refusal in given if not refusal.is_of_here), given[0] if given else None)


def nothing_against(case: Case) -> Refusal | None:
    """Accept every case: the `accepts` of a technique that works everywhere."""
    return None


def unchanged(step: Step) -> Step:
    """Return the step as it is: the `apply` of a technique that acts before the process starts (`environment`)."""
    return step


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A trade of time or precision for memory: when it can be used, and what it does to a Step."""

    option: str
    """The field of the Plan (or of the Job: `method`) that chooses it."""
    values: tuple[str, ...]
    """The values of that field that this technique implements; a trailing `-N` stands for any whole number, `N`
    alone for one above 1.
    """
    accepts: Callable[[Case], Refusal | None] = nothing_against
    """Returns a refusal if the technique cannot be used in a case; imports no torch."""
    apply: Callable[[Step], Step] = unchanged
    """Returns the changed Step; imports torch inside."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that must be set before the training process starts."""
    libraries: tuple[str, ...] = ()
    """Optional packages and parts of torch that it imports; a warm worker does so once."""

    def is_chosen(self, job: Job, plan: Plan) -> bool:
        """Return True if the plan (or the job) chooses this technique."""
        return self.takes(getattr(plan if hasattr(plan, self.option) else job, self.option))

    def takes(self, value: str | bool | int) -> bool:
        """Return True if this technique implements the value: `every-3` matches a listed `every-N`.

        A switch that is on has the value `on`; a number above one matches a listed `N`.
        """
        if isinstance(value, int) and not isinstance(value, bool):
            return value > 1 and "N" in self.values
        return is_accepted("on" if value is True else str(value), self.values)
