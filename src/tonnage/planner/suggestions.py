"""Suggest what would make the best plan faster and needs the user's word, the biggest gain first.

That is what changes the mathematics of training (another precision, optimizer or method), torch.compile, the host's
memory in place of recomputing, and what needs a package that is not installed.  Of each the fastest plan that may
fit is run on the ghost; what cannot be run here is priced only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from tonnage.case import Case
from tonnage.errors import CannotEstimate, UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.step_time import price
from tonnage.options import replace_checked, spell_option
from tonnage.planner.candidates import find_loss_refusal, find_refusal, list_candidates
from tonnage.planner.describe import describe
from tonnage.planner.fit import fits
from tonnage.planner.pricing import Priced, bound_candidate, price_in_order
from tonnage.planner.question import Question
from tonnage.planner.search_space import AXES, CHANGES, LOSSES, OFFLOADS
from tonnage.planner.solution import Candidate, Choice, Offer
from tonnage.planner.trial_runner import TrialRunner
from tonnage.timing.timing import Timing
from tonnage.trainers import engine_of

MOST: Final = 4
"""Suggestions at most."""

_WORTH: Final = 0.03
"""The part of a step that a suggestion must save at least."""

_MOST_RUNS: Final = 3
"""Plans that are run for each of them."""

_MOST_LOOKED_AT: Final = 100
"""Candidates of each of them, of which most are refused without a run."""

_MOST_GPUS: Final = 8
"""GPUs up to which they are run, and may have another layout than the best plan: on more each run takes seconds."""

_COMPILED: Final = {
    "layers": "torch.compile makes one kernel of what is between two products of a layer; not unasked, because it "
    "needs a compiler where you train and takes a minute at the start",
    "model": "torch.compile makes kernels of the network as a whole; not unasked, because it needs a compiler where "
    "you train and takes a minute or more at the start",
}

_OFFLOADED: Final = (("activation_offload", "cpu-streamed"), ("param_offload", "cpu"))
"""Offloads that may take less time than recomputing; not unasked, because they need the host's memory and link."""

_INSTALL: Final = "pip install"
"""The words of a refusal for want of a package."""


@dataclass(frozen=True, eq=False)
class _Change:
    """Something that the user may say."""

    name: str
    """The option."""
    question: Question
    """With the option open, or said."""


def suggest_options(best: Choice, question: Question, runner: TrialRunner) -> tuple[Offer, ...]:
    """Return what would save most of the best plan's seconds, if it saves enough."""
    seconds = best.estimate.time.get("step_seconds")
    if seconds is None or question.only:
        return ()
    limit = (1 - _WORTH) * seconds
    offers = [*_list_compiled(best.candidate, question)]
    changes = [] if runner.is_late else list(_list_changes(best, question))
    faster = {change: list(islice(_list_faster(change, best, limit), _MOST_LOOKED_AT)) for change in changes}
    for change in changes:
        offers += _find_offers(change, faster[change], runner)
    return tuple(sorted((one for one in offers if one.step_seconds < limit), key=lambda one: one.step_seconds)[:MOST])


def _list_changes(best: Choice, question: Question) -> Iterator[_Change]:
    if question.cluster.gpus > _MOST_GPUS:
        plan = best.candidate.plan
        layout = {name: getattr(plan, name) for name in (*AXES, "shard")}
        stated = tuple(dict.fromkeys((*question.stated, *layout)))
        question = replace(question, plan=replace(question.plan, **layout), stated=stated)
    for name in CHANGES:
        if name not in question.allow and question.is_open(name):
            yield _Change(name, replace(question, allow=(*question.allow, name)))
    order = ("full", "lora", "qlora")
    for method in order[order.index(question.job.method) + 1 :] if not question.methods else ():
        yield _Change("method", replace(question, job=question.job.with_method(method)))
    if all(getattr(best.candidate.plan, name) == "none" for name in OFFLOADS):
        for name, value in _OFFLOADED:
            if question.is_open(name):
                plan = replace_checked(question.plan, {name: value})
                yield _Change(name, replace(question, plan=plan, stated=(*question.stated, name)))
    if question.is_open("loss"):
        for loss in question.keep_supported("loss", LOSSES):
            plan = replace_checked(question.plan, {"loss": loss})
            refusal = find_loss_refusal(question, replace(plan, shard="none"))
            if refusal is not None and refusal.instead.startswith(_INSTALL):
                yield _Change("loss", replace(question, plan=plan, stated=(*question.stated, "loss")))


def _find_offers(change: _Change, faster: Sequence[Priced], runner: TrialRunner) -> Iterator[Offer]:
    """Yield the fastest plan with a change that fits, or that only lacks a package."""
    question, tried = change.question, 0
    for priced in faster:
        refusal = find_refusal(priced.candidate, question.cluster)
        if refusal is not None and (_INSTALL not in str(refusal) or change.name in OFFLOADS):
            continue
        if refusal is not None:
            yield _offer(change, priced, None, f"{refusal}")
            return
        if question.cluster.gpus > _MOST_GPUS:
            yield _offer(change, priced, None, describe(priced.candidate))
            return
        tried += 1
        (run,) = runner.run_whole([priced.candidate], question.cluster, question.budget_bytes)
        if isinstance(run, Estimate) and fits(run, question):
            yield _offer(change, priced, run, describe(priced.candidate))
            return
        if tried == _MOST_RUNS:
            return


def _list_faster(change: _Change, best: Choice, limit: float) -> Iterator[Priced]:
    """Yield the candidates of a change that are faster than the limit and seem to fit, fastest first."""
    question, usual = change.question, _value(change.name, best.candidate)
    try:
        candidates = [one for one in list_candidates(question) if _value(change.name, one) != usual]
    except (UsageError, CannotEstimate):
        return
    bounded = (bound_candidate(candidate, question.cluster) for candidate in candidates)
    possible = [one for one in bounded if one.bound_bytes <= question.budget_bytes]
    for priced in price_in_order(possible, question.cluster):
        if priced.timing is None or priced.timing.step_seconds >= limit:
            return
        if priced.bound_bytes + priced.extra_bytes <= question.budget_bytes:
            yield priced


def _value(name: str, candidate: Candidate) -> str:
    return str(getattr(candidate.job if name == "method" else candidate.plan, name))


def _offer(change: _Change, priced: Priced, run: Estimate | None, why: str) -> Offer:
    assert priced.timing is not None
    return _priced_offer(
        f"--{spell_option(change.name)} {_value(change.name, priced.candidate)}",
        why,
        priced.timing,
        process_bytes=None if run is None else run.peak.process_bytes,
        changes_mathematics=change.name not in ("loss", *OFFLOADS),
    )


def _list_compiled(best: Candidate, question: Question) -> Iterator[Offer]:
    """Yield the kinds of torch.compile, priced: compiling for the ghost would take as long as for the card."""
    for kind, why in _COMPILED.items() if question.is_open("compile") else ():
        case = Case(best.job, replace_checked(best.plan, {"compile": kind}), question.cluster)
        if engine_of(case.plan).refusals(case):
            continue
        try:
            yield _priced_offer(f"--compile {kind}", why, price(case))
        except CannotEstimate:
            continue


def _priced_offer(
    what: str, why: str, timing: Timing, *, process_bytes: int | None = None, changes_mathematics: bool = False
) -> Offer:
    return Offer(
        what=what,
        why=why,
        step_seconds=timing.step_seconds,
        low_seconds=timing.low_seconds,
        high_seconds=timing.high_seconds,
        process_bytes=process_bytes,
        changes_mathematics=changes_mathematics,
    )
