"""The decision path: memory from a plain baseline to a plan, one technique after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tonnage.options import spell_option
from tonnage.planner.candidates import with_free_choices
from tonnage.planner.probe import Need, need_of
from tonnage.planner.question import Question
from tonnage.planner.reasons import STATES, shares_nothing, with_plan
from tonnage.planner.search_space import AXES, FREE_OPTIONS
from tonnage.planner.solution import Candidate, Choice, Stage
from tonnage.planner.trial_runner import TrialRunner
from tonnage.plans import Plan

STAGES: Final = (
    (*FREE_OPTIONS, "loss"),
    ("precision",),
    ("shard",),
    (*AXES, "pp_schedule"),
    ("accum_sync",),
    ("optimizer_in_backward",),
    ("checkpointing",),
    STATES,
    ("activation_offload",),
)
"""The order in which techniques are added: free ones first, then the cheapest."""


def trace_path(choice: Choice, question: Question, runner: TrialRunner) -> tuple[Stage, ...]:
    """Return the memory of each stage on a card where everything fits; the last one is the plan as it was run."""
    stages = list_stages(choice.candidate, question)
    before = [candidate for _, candidate in stages[:-1]]
    runs = [*(runner.find_estimate(candidate, question.cluster) for candidate in before), choice.estimate]
    needs = [*runner.probe(before, question.cluster), need_of(choice.estimate)]
    path = []
    for (change, _), probed, run in zip(stages, needs, runs, strict=True):
        if not isinstance(probed, Need):
            continue
        need = need_of(run) if run is not None and run.fits_card else probed
        path.append(
            Stage(
                change=change,
                process_bytes=need.process_bytes,
                by_category=need.by_category,
                whole=need.whole,
                fits=need.process_bytes <= question.budget_bytes and (run is None or run.fits_card),
            )
        )
    return tuple(path)


def list_stages(chosen: Candidate, question: Question) -> list[tuple[str, Candidate]]:
    """Return what is added at each stage and the candidate with it, from the baseline to the chosen one."""
    plans: list[tuple[str, Plan]] = [("baseline", _baseline(chosen.plan, question))]
    for names in _order_options(chosen.plan, question):
        changes = {name: getattr(chosen.plan, name) for name in names}
        following = replace(plans[-1][1], **changes)
        if following.shard == "none" and following != chosen.plan:
            following = replace(following, shard=plans[-1][1].shard)
        if following != plans[-1][1]:
            added = [name for name in names if getattr(following, name) != getattr(plans[-1][1], name)]
            plans.append((" + ".join(_describe_value(name, getattr(following, name)) for name in added), following))
    if plans[-1][1] != chosen.plan:
        plans.append(("as planned", chosen.plan))
    return [
        (change, candidate) for change, plan in plans if (candidate := with_plan(chosen, plan, question)) is not None
    ]


def _order_options(plan: Plan, question: Question) -> tuple[tuple[str, ...], ...]:
    """Return STAGES; on a single rank sharding comes with the offload that it serves."""
    if not shares_nothing(plan, question):
        return STAGES
    return tuple(("shard", *names) if names == STATES else names for names in STAGES if names != ("shard",))


def _baseline(plan: Plan, question: Question) -> Plan:
    """Return a plan without any technique: a copy of everything on each GPU."""
    first = {name: getattr(question.plan, name) for name in STAGES[0]}
    plain = replace(with_free_choices(question), **first)
    is_single = question.cluster.gpus == 1
    shard = question.plan.shard if question.is_stated("shard") else "none" if is_single else "ddp"
    return replace(plain, shard=shard)


def _describe_value(name: str, value: Any) -> str:
    if name in AXES:
        return f"{name} {value}"
    if name in ("shard", "precision", "optimizer"):
        return str(value)
    if isinstance(value, bool):
        return spell_option(name)
    return f"{spell_option(name)} {value}"
