"""Refusals of a search, with reasons: plans that do not fit, candidates that fail, options that never work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.planner.candidates import find_refusal
from tonnage.planner.describe import describe
from tonnage.planner.dominance import needs_at_least
from tonnage.planner.pricing import Priced
from tonnage.planner.question import Question
from tonnage.planner.search_space import AXES
from tonnage.planner.solution import Candidate, Refused
from tonnage.planner.trial_runner import Failure
from tonnage.step.config_errors import NOT_BUILT
from tonnage.techniques.attention import CANNOT_SERVE

SAME_FAILURES: Final = 6
"""Candidates without parallel dimensions that fail in the same words before their method is given up."""

_MOST_LISTED: Final = 8
"""How many plans that do not fit are listed."""

_ATTENTION_FAILURES: Final = ("flex_attention", CANNOT_SERVE, NOT_BUILT)
"""Words of a failure of an attention: Inductor's name for flex's kernels, that torch has no kernel, transformers no
implementation."""


@dataclass
class Refusals:
    """The refusals of one search, which also rule out candidates that were not run."""

    refused: dict[str, Refused] = field(default_factory=dict)
    """Techniques and plans that are reported, by their description."""
    too_large: list[Priced] = field(default_factory=list)
    """Candidates that were run and do not fit."""
    broken: dict[str, str] = field(default_factory=dict)
    """Options that never work for this network on this card, and why: parallel dimensions, an attention."""
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many candidates without parallel dimensions failed, by method and message."""

    def add(self, what: str, why: str) -> None:
        """Report a refusal, unless there is one of the same description."""
        self.refused.setdefault(what, Refused(what=what, why=why))

    def add_too_large(self, priced: Priced, need: str) -> None:
        """Record a candidate that does not fit; the first few are reported."""
        self.too_large.append(priced)
        if len(self.refused) < _MOST_LISTED:
            self.add(describe(priced.candidate), f"does not fit: {need}")

    def add_failure(self, priced: Priced, failure: Failure) -> None:
        """Record a candidate that failed; it is reported before what was never run."""
        why = str(failure)
        if all(getattr(priced.candidate.plan, axis) == 1 for axis in AXES):
            self.failures[priced.candidate.job.method, why] += 1
        option = find_broken_option(priced.candidate, why)
        if option is not None:
            self.broken[option] = why
        what = option or describe(priced.candidate)
        self.add(what, why)
        self.refused = {what: self.refused[what], **self.refused}

    @property
    def only_failures(self) -> bool:
        """Return whether every candidate that was run failed in its own code, and none for want of memory."""
        return bool(self.failures) and not self.too_large

    def has_given_up(self, method: str) -> bool:
        """Return whether enough candidates of a method failed with the same message."""
        most = max((count for (failed, _), count in self.failures.items() if failed == method), default=0)
        return most >= SAME_FAILURES

    def find_obstacle(self, candidate: Candidate, cluster: Cluster) -> Candidate | UsageError | None:
        """Return why a candidate needs no run: a smaller one that does not fit, or the error it would raise."""
        for priced in self.too_large:
            if needs_at_least(candidate, priced.candidate):
                return priced.candidate
        for option, why in self.broken.items():
            if _uses(candidate, option):
                return UsageError(f"{option}: {why}")
        return find_refusal(candidate, cluster)

    def narrow(self, question: Question) -> Question:
        """Return the question without the options that never work."""
        gone = [option for option in self.broken if question.is_open(option) and option not in question.only]
        return replace(question, without=(*question.without, *gone))

    def forget_candidates(self) -> None:
        """Drop what was learned of single candidates, before a search with other options."""
        self.too_large.clear()
        self.failures.clear()

    def summarize(self, *, something_ran: bool) -> tuple[Refused, ...]:
        """Return the report; if nothing ran and every failure had one message, it is reported once, for all."""
        refused, messages = tuple(self.refused.values()), {why for _, why in self.failures}
        if something_ran or len(messages) != 1:
            return refused
        message = messages.pop()
        return (Refused(what="all", why=message), *(other for other in refused if other.why != message))


def find_broken_option(candidate: Candidate, why: str) -> str | None:
    """Return the option that made a candidate fail, and would make every other one fail."""
    for axis in AXES:
        if _uses(candidate, axis) and why.endswith(f"; choose {axis} 1."):
            return axis
    if _uses(candidate, "attention") and any(words in why for words in _ATTENTION_FAILURES):
        return "attention"
    return None


def _uses(candidate: Candidate, option: str) -> bool:
    if option in AXES:
        return bool(getattr(candidate.plan, option) > 1)
    return candidate.plan.attention != "auto"
