"""Options that contradict each other, the model or the card, whatever is chosen for the others.

Such a question is not searched: it is refused as `tonnage estimate` refuses the same options.
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
from tonnage.mesh import make_mesh
from tonnage.options import replace_checked, spell_option
from tonnage.planner.candidates import list_candidates
from tonnage.planner.question import Question
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.step.heads import check_type
from tonnage.techniques import select_techniques
from tonnage.techniques.technique import Refusal, Technique, first_of
from tonnage.trainers import engine_of

Check = Callable[[Candidate], Refusal | None]
"""Returns why one technique, or a trainer, refuses a combination."""


def check_possible(question: Question) -> None:
    """Raise UsageError if an option that was stated is refused in every combination.

    Raises UnreadableModel for a type that transformers does not know.
    """
    check_sequences(question.job, learned_positions(question.job.model))
    if question.job.model.kind == "config":
        check_type(question.job.model.config)
    stated = _as_stated(question)
    if stated is None:
        return
    for find_refusal in _list_checks(stated, question):
        refusal = find_refusal(stated)
        if refusal is None or refusal.is_of_here:
            continue
        option = refusal.technique.partition("=")[0].replace("-", "_")
        if option in question.stated and all(find_refusal(other) == refusal for other in _list_all(question)):
            raise UsageError(f"{refusal}")


def find_ways_out(question: Question) -> tuple[str, ...]:
    """Return the options, as the command line spells them, without any one of which there would be a combination."""
    return tuple(words for words, other in _list_loosened(question) if any(True for _ in _list_all(other)))


def _list_loosened(question: Question) -> Iterator[tuple[str, Question]]:
    """Yield each of the question's constraints, and the question without it."""
    changes: dict[str, dict[str, Any]] = {"--only": {"only": ()}} if question.only else {}
    for word in question.without:
        changes[f"--without {word}"] = {"without": tuple(other for other in question.without if other != word)}
    for item in fields(Plan):
        if question.is_stated(item.name):
            plan = replace_checked(question.plan, {item.name: item.default})
            stated = tuple(other for other in question.stated if other != item.name)
            value = getattr(question.plan, item.name)
            words = f"--{spell_option(item.name)}" if value is True else f"--{spell_option(item.name)} {value}"
            changes[words] = {"plan": plan, "stated": stated}
    if question.only_micro_batch is not None:
        changes[f"--micro-batch {question.only_micro_batch}"] = {"only_micro_batch": None}
    for words, changed in changes.items():
        with suppress(UsageError):  # the remaining options contradict each other
            yield words, replace(question, **changed)


def _as_stated(question: Question) -> Candidate | None:
    """Return the stated options with the defaults of the others; None if they do not divide ranks and batch."""
    try:
        layout = make_mesh(question.plan, question.cluster.gpus, question.cluster.gpus_per_node)
        return Candidate(job=question.job.on_ranks(layout.data_parallel), plan=question.plan)
    except UsageError:
        return None


def _list_checks(stated: Candidate, question: Question) -> Iterator[Check]:
    """Yield the check of each technique in use (an engine reports only the first refusal), or of another trainer."""
    if engine_of(stated.plan).expresses is not None:
        yield partial(_check_engine, question)
        return
    for technique in select_techniques(stated.job, stated.plan):
        yield partial(_check_technique, question, technique)


def _check_engine(question: Question, candidate: Candidate) -> Refusal | None:
    return first_of(engine_of(candidate.plan).refusals(Case(candidate.job, candidate.plan, question.cluster)))


def _check_technique(question: Question, technique: Technique, candidate: Candidate) -> Refusal | None:
    if not technique.is_chosen(candidate.job, candidate.plan):
        return None
    return technique.accepts(Case(candidate.job, candidate.plan, question.cluster))


def _list_all(question: Question) -> Iterator[Candidate]:
    return (candidate for place in question.places for candidate in list_candidates(question, **place))
