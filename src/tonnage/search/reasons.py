"""Why a plan is as it is: each technique taken back on its own, and all of them added one after the other.

Both are runs on the ghost on a card where everything fits, so that what a technique saves is a difference of two
measured peaks; seconds are those of the time model.  Where few layers were looked at, what the plan would need
without it is the whole plan's peak and that difference, and marked (~).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tonnage.case import Case
from tonnage.errors import UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.mesh import axes
from tonnage.options import spelled
from tonnage.planner.solution import Candidate, Choice, Reason, Stage
from tonnage.plans import Plan
from tonnage.search.depth import Need, of_run
from tonnage.search.memory import Ask, Failure, Ghosts
from tonnage.search.pricing import priced
from tonnage.search.space import AXES, FILES, FREE_OPTIONS, OFFLOADS, ORDER, Question, free_wins
from tonnage.shallow.few import depths, depths_to_continue, roomy
from tonnage.trainers.cases import check
from tonnage.units import gib

DOES: Final[Mapping[str, str]] = {
    "allocator": "segments that grow leave no holes between blocks",
    "optimizer": "one kernel updates all weights in place, without copies of them",
    "loss": "logits exist for a slice of the tokens at a time",
    "attention": "scores exist for a block of tokens at a time, in kernels that are compiled when training starts",
    "precision": "matrix products run in fewer bits",
    "shard": "weights, gradients and optimizer states are divided among the ranks",
    "tp": "each matrix is divided among the GPUs of a machine",
    "pp": "each GPU has a part of the layers",
    "pp_schedule": "a GPU's stages take turns, so each waits less for the others",
    "cp": "each GPU has a part of the sequence",
    "ep": "each GPU has a part of the experts",
    "checkpointing": "layers keep less for backward and run again",
    "accum_sync": "no rank keeps whole gradients between micro-batches",
    "optimizer_in_backward": "a gradient is gone as soon as its weight is updated",
    "activation_offload": "activations wait on the host",
    "optimizer_offload": "optimizer states rest on the host, where the update runs",
    "param_offload": "weights and optimizer states rest on the host",
}

OF_VALUES: Final[Mapping[str, str]] = {
    "efficient": "heads get copies of keys that they share, for which torch has a kernel that keeps no scores",
    "adamw-8bit": "optimizer states are kept in 8 bits",
    "adamw-4bit": "optimizer states are kept in 4 bits",
    "muon": "matrices have one moment, and their updates are orthogonalized",
    "adafactor": "of a matrix's squared gradients the means of rows and columns alone are kept",
    "cpu-streamed": "activations wait on the host, copied beside the computation",
    "nvme": "what the card need not have waits in files",
    "bf16-true": "weights, gradients and optimizer states are in 16 bits, which rounds otherwise",
}
"""The same of values that do something else than the usual one of their option."""

STATES: Final = ("optimizer_offload", "param_offload")
"""Options that put weights and states on the host, of which a plan has one."""

PATH: Final = (
    FREE_OPTIONS,
    ("precision",),
    ("shard",),
    (*AXES, "pp_schedule"),
    ("accum_sync",),
    ("optimizer_in_backward",),
    ("checkpointing",),
    STATES,
    ("activation_offload",),
)
"""In what order techniques are added: what is free first, then what costs least."""


_NO_TIME: Final = 5e-4
"""Part of a step that is not worth a word."""


@dataclass(frozen=True, kw_only=True)
class _Without:
    """A plan with one technique taken back to the next cheaper value."""

    name: str
    """The option."""
    value: Any
    """In the plan."""
    cheaper: Any
    """In its place."""
    candidate: Candidate
    """Job and plan."""

    @property
    def asks_alike(self) -> bool:
        """Whether it asks for what the plan asks for, which a few layers have said: then it is run whole at once."""
        job, plan = self.candidate.job, self.candidate.plan
        return self.name == "allocator" and plan.pp == 1 and depths_to_continue(job, plan) is not None


def reasons(choice: Choice, question: Question, ghosts: Ghosts) -> tuple[Reason, ...]:
    """One for each technique of a plan that the user did not ask for."""
    chosen = choice.candidate
    taken_back = _taken_back(chosen, question)
    like = _looked_at(chosen)
    seen = iter(ghosts.need([*like, *(one.candidate for one in taken_back if not one.asks_alike)], question.cluster))
    whole = next(seen) if like else of_run(choice.estimate)
    alike = iter(ghosts.fit([one.candidate for one in taken_back if one.asks_alike], roomy(question.cluster)))
    found = []
    for one in taken_back:
        answer = _of_whole(next(alike)) if one.asks_alike else next(seen)
        saved, run = None, ghosts.made(one.candidate, question.cluster)
        if fits := run is not None and run.fits:  # which says more than a look
            answer = of_run(run)
        if isinstance(answer, Need) and (fits or one.asks_alike):
            saved = answer.process_bytes - choice.estimate.peak.process_bytes
        elif isinstance(whole, Need) and isinstance(answer, Need):
            saved = answer.process_bytes - whole.process_bytes
            if not answer.whole and not whole.whole:
                answer = replace(answer, process_bytes=choice.estimate.peak.process_bytes + saved)
        found.append(_reason(one, choice, question, saved, answer, run))
    return tuple(found)


def _of_whole(answer: Estimate | Failure) -> Need | Failure:
    return of_run(answer) if isinstance(answer, Estimate) else answer


def looks(chosen: Candidate, question: Question) -> list[Ask]:
    """All that `reasons` and `path` of a candidate ask for."""
    stages = [candidate for _, candidate in _stages(chosen, question)]
    asks: list[Ask] = [(one, None) for one in _looked_at(chosen)]
    on = roomy(question.cluster)
    asks += [(one.candidate, on if one.asks_alike else None) for one in _taken_back(chosen, question)]
    return [*asks, *((one, None) for one in stages[:-1])]


def _looked_at(chosen: Candidate) -> list[Candidate]:
    """The plan itself, if those like it are looked at by a few layers; else its own run says as much."""
    return [chosen] if depths(chosen.job, chosen.plan) else []


def _taken_back(chosen: Candidate, question: Question) -> list[_Without]:
    return [one for name in _techniques(chosen.plan, question) if (one := _without(name, chosen, question))]


def does(name: str, plan: Plan) -> str:
    """What the value that a plan has of an option does, in words."""
    return OF_VALUES.get(str(getattr(plan, name)), DOES[name])


def _techniques(plan: Plan, question: Question) -> list[str]:
    names = (
        *FREE_OPTIONS,
        "shard",
        *AXES,
        "pp_schedule",
        "accum_sync",
        "optimizer_in_backward",
        "checkpointing",
        *OFFLOADS,
    )
    if plan.shard == "ddp" or _is_alone(plan, question):
        # Several ranks that train one network do that at least; alone it is how what rests on the host gets there.
        names = tuple(name for name in names if name != "shard")
    given = replace(question.plan, precision=free_wins(question).precision)  # which the card decides
    return [name for name in ("precision", *names) if getattr(plan, name) != getattr(given, name)]


def _without(name: str, chosen: Candidate, question: Question) -> _Without | None:
    """The plan with the nearest cheaper value of one option that it can have; None where there is none."""
    value = getattr(chosen.plan, name)
    for cheaper in _cheaper(name, value, question):
        plan = replace(chosen.plan, **{name: cheaper})
        if name in STATES and _is_alone(plan, question) and not question.said("shard"):
            plan = replace(plan, shard="none")  # what it did was to move them
        if (candidate := _of_same_batch(chosen, plan, question)) is not None:
            return _Without(name=name, value=value, cheaper=cheaper, candidate=candidate)
    return None


def _cheaper(name: str, value: Any, question: Question) -> list[Any]:
    if name in ORDER:
        values = question.values(name)
        if str(value).startswith("budget") or value == FILES:
            return ["none"]
        return list(reversed(values[: values.index(value)])) if value in values else []
    if name in AXES:
        return [size for size in (value // 2, 1) if size >= 1 and size != value]
    return [getattr(free_wins(question) if name == "precision" else question.plan, name)]


def _of_same_batch(chosen: Candidate, plan: Plan, question: Question) -> Candidate | None:
    """A candidate with another plan and the same global batch; None where the ranks cannot be divided so."""
    cluster = question.cluster
    try:
        before = axes(chosen.plan, cluster.gpus, cluster.gpus_per_node).data_parallel
        after = axes(plan, cluster.gpus, cluster.gpus_per_node).data_parallel
        each = chosen.job.grad_accum * chosen.job.micro_batch * before
        if each % after:
            return None
        sequences = each // after
        micro_batch = min(chosen.job.micro_batch, sequences)
        while sequences % micro_batch:
            micro_batch -= 1
        job = replace(chosen.job, micro_batch=micro_batch, grad_accum=sequences // micro_batch)
        check(Case(job, plan, cluster))
    except UsageError:
        return None
    return Candidate(job=job, plan=plan)


def _reason(
    one: _Without, choice: Choice, question: Question, saved: int | None, answer: Need | Failure, run: Estimate | None
) -> Reason:
    """`run`: without the technique, if it was run whole; it may have run out of memory where looks said less."""
    costs = _seconds_more(choice, one.candidate, question)
    instead = "without it" if isinstance(one.value, bool) else f"with {spelled(one.name)} {one.cheaper}"
    why = does(one.name, choice.candidate.plan)
    if not isinstance(answer, Need):
        why += f"; {instead} it cannot be run ({str(answer).partition('. ')[0].rstrip('.')})"
    else:
        need = answer.process_bytes
        said = gib(need) if answer.whole else f"~{gib(need)}"
        if run is not None and not run.fits:
            said = f"more than {gib(question.cluster.device.capacity_bytes)}"
        fits = need <= question.budget_bytes and (run is None or run.fits)
        why += f"; {instead} {said}, {'which fits as well' if fits else 'too much'}"
        if fits and costs is not None:
            nothing = _NO_TIME * (choice.estimate.time["step_seconds"] or 0.0)
            why += ", but slower" if costs < -nothing else " at no less time" if costs <= nothing else ""
    value = "on" if one.value is True else one.value
    return Reason(technique=f"{spelled(one.name)}={value}", why=f"{why}.", saves_bytes=saved, costs_seconds=costs)


def _seconds_more(choice: Choice, other: Candidate, question: Question) -> float | None:
    """That a plan takes than another; what a budget makes run again is known of the plan alone, which was run."""
    chosen = choice.candidate
    mine, theirs = _seconds(chosen, question), _seconds(other, question)
    if chosen.plan.checkpointing.startswith("budget"):
        if other.plan.checkpointing == chosen.plan.checkpointing:
            full = (replace(one, plan=replace(one.plan, checkpointing="full")) for one in (chosen, other))
            mine, theirs = (_seconds(one, question) for one in full)
        else:
            mine = choice.estimate.time["step_seconds"]
    return None if mine is None or theirs is None else mine - theirs


def _seconds(candidate: Candidate, question: Question) -> float | None:
    timing = priced(candidate, question.cluster).timing
    return None if timing is None else timing.step_seconds


def path(choice: Choice, question: Question, ghosts: Ghosts) -> tuple[Stage, ...]:
    """Memory from the baseline to a plan, technique by technique, where everything fits; the plan's as it was run."""
    known = _stages(choice.candidate, question)
    runs = [*(ghosts.made(candidate, question.cluster) for _, candidate in known[:-1]), choice.estimate]
    answers = ghosts.need([candidate for _, candidate in known[:-1]], question.cluster)
    answers.append(of_run(choice.estimate))
    found = []
    for (change, _), answer, run in zip(known, answers, runs, strict=True):
        if not isinstance(answer, Need):
            continue
        seen = of_run(run) if run is not None and run.fits else answer
        found.append(
            Stage(
                change=change,
                process_bytes=seen.process_bytes,
                by_category=seen.by_category,
                whole=seen.whole,
                fits=seen.process_bytes <= question.budget_bytes and (run is None or run.fits),
            )
        )
    return tuple(found)


def _stages(chosen: Candidate, question: Question) -> list[tuple[str, Candidate]]:
    """What is added, and the candidate with it, from the baseline to the chosen one."""
    plans: list[tuple[str, Plan]] = [("baseline", _baseline(chosen.plan, question))]
    for names in _path_to(chosen.plan, question):
        changes = {name: getattr(chosen.plan, name) for name in names}
        following = replace(plans[-1][1], **changes)
        if following.shard == "none" and following != chosen.plan:
            following = replace(following, shard=plans[-1][1].shard)
        if following != plans[-1][1]:
            added = [name for name in names if getattr(following, name) != getattr(plans[-1][1], name)]
            plans.append((" + ".join(_word(name, getattr(following, name)) for name in added), following))
    if plans[-1][1] != chosen.plan:
        plans.append(("as planned", chosen.plan))
    return [
        (change, candidate)
        for change, plan in plans
        if (candidate := _of_same_batch(chosen, plan, question)) is not None
    ]


def _path_to(plan: Plan, question: Question) -> tuple[tuple[str, ...], ...]:
    """PATH; on a single rank, where sharding is how what rests on the host gets there, they come together."""
    if not _is_alone(plan, question):
        return PATH
    return tuple(("shard", *names) if names == STATES else names for names in PATH if names != ("shard",))


def _is_alone(plan: Plan, question: Question) -> bool:
    """Whether each rank has weights, or parts of them, that no other has."""
    cluster = question.cluster
    laid = axes(plan, cluster.gpus, cluster.gpus_per_node)
    return laid.shards * laid.dp_replicate == 1


def _baseline(plan: Plan, question: Question) -> Plan:
    """What somebody runs who has changed nothing: a copy of everything on each GPU."""
    plain = replace(free_wins(question), **{name: getattr(question.plan, name) for name in FREE_OPTIONS})
    alone = question.cluster.gpus == 1
    shard = question.plan.shard if question.said("shard") else "none" if alone else "ddp"
    return replace(plain, shard=shard)


def _word(name: str, value: Any) -> str:
    if name in AXES:
        return f"{name} {value}"
    if name in ("shard", "precision", "optimizer"):
        return str(value)
    if isinstance(value, bool):
        return spelled(name)
    return f"{spelled(name)} {value}"
