"""Options that stand against each other, the model or the card, whatever is chosen for all others.

Nothing is searched for then: the question is refused as `tonnage estimate` refuses the same options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

from tonnage.case import Case
from tonnage.catalog.families import learned_positions
from tonnage.errors import UsageError
from tonnage.job import check_sequences
from tonnage.mesh import axes
from tonnage.options import spelled, varied
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.search.space import Question, candidates
from tonnage.step.heads import check_type
from tonnage.techniques import chosen
from tonnage.techniques.technique import Refusal, Technique, first_of
from tonnage.trainers import engine_of

Ask = Callable[[Candidate], Refusal | None]
"""What one technique, or a trainer, has against a combination."""


def check_possible(question: Question) -> None:
    """Raise UsageError with what stands against an option that was said, if it does so in every combination.

    Raises UnreadableModel for a type that transformers does not know.
    """
    check_sequences(question.job, learned_positions(question.job.model))
    if question.job.model.kind == "config":
        check_type(question.job.model.config)
    said = _as_said(question)
    if said is None:
        return
    for ask in _asks(said, question):
        refusal = ask(said)
        if refusal is None or refusal.is_of_here:
            continue
        option = refusal.technique.partition("=")[0].replace("-", "_")
        if option in question.stated and all(ask(one) == refusal for one in _every(question)):
            raise UsageError(f"{refusal}")


def ways_out(question: Question) -> tuple[str, ...]:
    """Options, as the command line spells them, without one of which there would be a combination."""
    return tuple(words for words, other in _loosened(question) if any(True for _ in _every(other)))


def _loosened(question: Question) -> Iterator[tuple[str, Question]]:
    """The question without one of its constraints, and which."""
    without: dict[str, dict[str, Any]] = {"--only": {"only": ()}} if question.only else {}
    for word in question.without:
        without[f"--without {word}"] = {"without": tuple(other for other in question.without if other != word)}
    for item in fields(Plan):
        if question.said(item.name):
            plan = varied(question.plan, {item.name: item.default})
            stated = tuple(other for other in question.stated if other != item.name)
            value = getattr(question.plan, item.name)
            words = f"--{spelled(item.name)}" if value is True else f"--{spelled(item.name)} {value}"
            without[words] = {"plan": plan, "stated": stated}
    if question.only_micro_batch is not None:
        without[f"--micro-batch {question.only_micro_batch}"] = {"only_micro_batch": None}
    for words, changed in without.items():
        with suppress(UsageError):  # the rest stands against each other then
            yield words, replace(question, **changed)


def _as_said(question: Question) -> Candidate | None:
    """What is said alone, with the defaults of the rest; None where those do not divide ranks and batch."""
    try:
        layout = axes(question.plan, question.cluster.gpus, question.cluster.gpus_per_node)
        return Candidate(job=question.job.on_ranks(layout.data_parallel), plan=question.plan)
    except UsageError:
        return None


def _asks(said: Candidate, question: Question) -> Iterator[Ask]:
    """Techniques that are used, one by one, of which their own engine says the first alone; or another trainer."""
    if engine_of(said.plan).expresses is not None:
        yield partial(_by_engine, question)
        return
    for technique in chosen(said.job, said.plan):
        yield partial(_by_technique, question, technique)


def _by_engine(question: Question, one: Candidate) -> Refusal | None:
    return first_of(engine_of(one.plan).refusals(Case(one.job, one.plan, question.cluster)))


def _by_technique(question: Question, technique: Technique, one: Candidate) -> Refusal | None:
    return (
        technique.accepts(Case(one.job, one.plan, question.cluster)) if technique.chosen(one.job, one.plan) else None
    )


def _every(question: Question) -> Iterator[Candidate]:
    return (one for place in question.places for one in candidates(question, **place))
