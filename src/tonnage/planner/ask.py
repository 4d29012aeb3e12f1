"""Questions to the search as users ask them, from the command line and from Python alike, and their answers."""

from collections.abc import Mapping
from typing import Any

from tonnage.case import check_idle
from tonnage.cluster import Cluster
from tonnage.job import check_said
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
    said: Mapping[str, Any] | None = None,
    find: str | None = None,
    offline: bool = False,
    **limits: Any,
) -> Question:
    """Return the Question for a job under `options`, of which those that the user `said` (default: all) stay fixed.

    `limits` are further fields of the Question.  Raises UsageError.
    """

    said = options if said is None else said
    check_find_options(find, said)
    methods = parse_methods(said.get("method", ""))
    first = {"method": methods[0]} if methods else {}
    job, given = request(model, offline=offline, **{**options, **first})
    if not methods:
        check_said(said, job)
    cluster = initial_cluster(find, cards, given)
    asked = Question(job=job, plan=given, cluster=cluster, stated=tuple(said), methods=methods, **limits)
    check_idle(said, given, most_gpus(find, cluster), asked.is_undecided)
    if find is None:  # else cards, lengths and batches are tried that nobody has said
        check_possible(asked)
    return asked


def answer(asked: Question, find: str | None = None, **how: Any) -> Solution:
    """Return the plans for a question, or the limit that `find` names; `how` as in `solve`."""
    if find is not None:
        return find_limit(find, asked, **how)

    return solve(asked, **how)
