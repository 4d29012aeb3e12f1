"""The entrance to the search, for the command line and for Python: make a Question from options, and answer it."""

from collections.abc import Mapping
from typing import Any

from tonnage.case import check_unused
from tonnage.cluster import Cluster
from tonnage.job import check_stated
from tonnage.planner.contradictions import check_possible
from tonnage.planner.limits import check_find_options, find_limit, initial_cluster, most_gpus
from tonnage.planner.question import Question, parse_methods
from tonnage.planner.solution import Solution
from tonnage.planner.solve import solve
from tonnage.trainers.cases import request


def ask(
    model: str,
    cards: Cluster,
    options: Mapping[str, Any],
    *,
    stated: Mapping[str, Any] | None = None,
    find: str | None = None,
    offline: bool = False,
    **limits: Any,
) -> Question:
    """Return the Question for a job under `options`; the search keeps those that the user `stated` (default: all).

    `limits` are further fields of the Question.  Raises UsageError.
    """
    stated = options if stated is None else stated
    check_find_options(find, stated)
    methods = parse_methods(stated.get("method", ""))
    first = {"method": methods[0]} if methods else {}
    job, given = request(model, offline=offline, **{**options, **first})
    if not methods:
        check_stated(stated, job)
    cluster = initial_cluster(find, cards, given)
    question = Question(job=job, plan=given, cluster=cluster, stated=tuple(stated), methods=methods, **limits)
    check_unused(stated, given, most_gpus(find, cluster), question.is_undecided)
    if find is None:  # `find` tries other GPUs, lengths and batches than those of the question
        check_possible(question)
    return question


def answer(asked: Question, find: str | None = None, **how: Any) -> Solution:
    """Return the plans for a question, or the limit that `find` names; `how` are arguments of `solve`."""
    if find is not None:
        return find_limit(find, asked, **how)
    return solve(asked, **how)
