"""Options that stand against each other, the model or the card, whatever is chosen for all others.

Nothing is searched for then: the question is refused as `tonnage estimate` refuses the same options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tonnage.axes import axes
from tonnage.engines import engine_of
from tonnage.errors import UsageError
from tonnage.job import check_sequences
from tonnage.search.space import Question, candidates
from tonnage.solution import Candidate
from tonnage.step.heads import check_type
from tonnage.techniques import chosen
from tonnage.techniques.technique import Refusal, Technique, first_of

Ask = Callable[[Candidate], Refusal | None]
"""What one technique, or a trainer, has against a combination."""


def check_possible(question: Question) -> None:
    """Raise UsageError with what stands against an option that was said, if it does so in every combination.

    Raises UnreadableModel for a type that transformers does not know.
    """
    check_sequences(question.job)
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
    return first_of(engine_of(one.plan).refusals(one.job, one.plan, question.cluster))


def _by_technique(question: Question, technique: Technique, one: Candidate) -> Refusal | None:
    return technique.accepts(one.job, one.plan, question.cluster) if technique.chosen(one.job, one.plan) else None


def _every(question: Question) -> Iterator[Candidate]:
    return (one for place in question.places for one in candidates(question, **place))
