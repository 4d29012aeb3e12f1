"""Why a plan is as it is: each of its techniques is removed on its own, and the plan run again.

Runs are on a card where everything fits, so what a technique saves is a difference of two peaks; seconds are those of
the time model.  If only a few layers are probed, what the plan would need without a technique is the whole plan's
peak plus that difference, marked with ~.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tonnage.case import Case
from tonnage.errors import UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.mesh import make_mesh
from tonnage.options import spell_option
from tonnage.planner.candidates import with_free_choices
from tonnage.planner.fit import LEAST_FREE
from tonnage.planner.pricing import price_candidate
from tonnage.planner.probe import Need, need_of
from tonnage.planner.question import Question
from tonnage.planner.search_space import AXES, FILES, FREE_OPTIONS, OFFLOADS, ORDER
from tonnage.planner.solution import Candidate, Choice, Reason
from tonnage.planner.trial_runner import Failure, TrialRunner
from tonnage.plans import Plan
from tonnage.shallow.depths import choose_assembly_depths, choose_probe_depths, roomy
from tonnage.trainers.cases import check
from tonnage.units import format_gib

EFFECTS: Final[Mapping[str, str]] = {
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
"""Effect of each option."""

EFFECTS_OF_VALUES: Final[Mapping[str, str]] = {
    "efficient": "heads get copies of keys that they share, for which torch has a kernel that keeps no scores",
    "flash": "attention has the faster of the trainer's kernels on this card",
    "adamw-8bit": "optimizer states are kept in 8 bits",
    "adamw-4bit": "optimizer states are kept in 4 bits",
    "muon": "matrices have one moment, and their updates are orthogonalized",
    "adafactor": "of a matrix's squared gradients the means of rows and columns alone are kept",
    "cpu-streamed": "activations wait on the host, copied beside the computation",
    "nvme": "what the card need not have waits in files",
    "bf16-true": "weights, gradients and optimizer states are in 16 bits, which rounds otherwise",
}
"""Effects of values that differ from the effect of their option."""

STATES: Final = ("optimizer_offload", "param_offload")
"""Options that put optimizer states, or weights and states, on the host; a plan has one of them at most."""

NO_TIME: Final = 5e-4
"""The part of a step that is not worth mentioning."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """A plan with one technique replaced by the next cheaper value."""

    name: str
    """The option."""
    value: Any
    """In the plan."""
    cheaper: Any
    """In its place."""
    candidate: Candidate
    """Job and plan."""

    @property
    def repeats_requests(self) -> bool:
        """Return whether it makes the same requests to the allocator, so that a whole run is as quick as a probe."""
        job, plan = self.candidate.job, self.candidate.plan
        return self.name == "allocator" and plan.pp == 1 and choose_assembly_depths(job, plan) is not None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A plan without one technique, and what that needs."""

    ablation: Ablation
    """The technique, and the plan without it."""
    saved_bytes: int | None
    """Bytes that the technique saves; None: not known."""
    need: Need | Failure
    """Need of the plan without it."""
    run: Estimate | None
    """The whole run of that plan, if there was one."""

    def may_fit(self, question: Question) -> bool:
        """Return whether the plan without the technique fits, by what was run of it."""
        if not isinstance(self.need, Need) or (self.run is not None and not self.run.fits):
            return False
        return self.need.process_bytes <= question.budget_bytes


def explain_choice(choice: Choice, question: Question, runner: TrialRunner) -> tuple[Reason, ...]:
    """Return a reason for each technique of a plan that the user did not ask for."""
    return tuple(_make_reason(one, choice, question) for one in measure_ablations(choice, question, runner))


def measure_ablations(choice: Choice, question: Question, runner: TrialRunner) -> list[Measured]:
    """Return what the plan needs without each of its techniques."""
    plan, cluster = choice.candidate, question.cluster
    ablations = list_ablations(plan, question)
    is_probed = choose_probe_depths(plan.job, plan.plan)  # by few layers: then the plan itself is probed as well
    itself = [plan] if is_probed else []
    probed = [ablation.candidate for ablation in ablations if not ablation.repeats_requests]
    needs = iter(runner.probe([*itself, *probed], cluster))
    own_need = next(needs) if itself else need_of(choice.estimate)
    whole = [ablation.candidate for ablation in ablations if ablation.repeats_requests]
    runs = iter(runner.run_whole(whole, roomy(cluster)))
    measured = []
    for ablation in ablations:
        need = _need_of_run(next(runs)) if ablation.repeats_requests else next(needs)
        need = runner.find_failure(ablation.candidate, cluster) or need
        saved, run = None, runner.find_estimate(ablation.candidate, cluster)
        if run is not None and run.fits_card:  # more exact than a probe
            need = need_of(run)
        if isinstance(need, Need) and ((run is not None and run.fits_card) or ablation.repeats_requests):
            saved = need.process_bytes - choice.estimate.peak.process_bytes
        elif isinstance(own_need, Need) and isinstance(need, Need):
            saved = need.process_bytes - own_need.process_bytes
            if not need.whole and not own_need.whole:
                need = replace(need, process_bytes=choice.estimate.peak.process_bytes + saved)
        measured.append(Measured(ablation=ablation, saved_bytes=saved, need=need, run=run))
    return measured


def _need_of_run(answer: Estimate | Failure) -> Need | Failure:
    return need_of(answer) if isinstance(answer, Estimate) else answer


def list_ablations(chosen: Candidate, question: Question) -> list[Ablation]:
    names = _list_techniques(chosen.plan, question)
    return [ablation for name in names if (ablation := _remove_technique(name, chosen, question)) is not None]


def describe_effect(name: str, plan: Plan) -> str:
    """Return what a plan's value of an option does."""
    return EFFECTS_OF_VALUES.get(str(getattr(plan, name)), EFFECTS[name])


def _list_techniques(plan: Plan, question: Question) -> list[str]:
    names = (
        *FREE_OPTIONS,
        "loss",
        "shard",
        *AXES,
        "pp_schedule",
        "accum_sync",
        "optimizer_in_backward",
        "checkpointing",
        *OFFLOADS,
    )
    if plan.shard == "ddp" or shares_nothing(plan, question):
        # Several ranks that train one network need ddp at least; on one rank sharding only serves the offload.
        names = tuple(name for name in names if name != "shard")
    given = replace(question.plan, precision=with_free_choices(question).precision)  # the card decides the precision
    return [name for name in ("precision", *names) if getattr(plan, name) != getattr(given, name)]


def _remove_technique(name: str, chosen: Candidate, question: Question) -> Ablation | None:
    """Return the plan with the nearest cheaper value of one option that it can have; None if there is none."""
    value = getattr(chosen.plan, name)
    for cheaper in _list_cheaper(name, value, question):
        plan = replace(chosen.plan, **{name: cheaper})
        if name in STATES and shares_nothing(plan, question) and not question.is_stated("shard"):
            plan = replace(plan, shard="none")  # it only served to move them
        if (candidate := with_plan(chosen, plan, question)) is not None:
            return Ablation(name=name, value=value, cheaper=cheaper, candidate=candidate)
    return None


def _list_cheaper(name: str, value: Any, question: Question) -> list[Any]:
    if name in ORDER:
        values = question.list_values(name)
        if str(value).startswith("budget") or value == FILES:
            return ["none"]
        return list(reversed(values[: values.index(value)])) if value in values else []
    if name in AXES:
        return [size for size in (value // 2, 1) if size >= 1 and size != value]
    return [getattr(with_free_choices(question) if name == "precision" else question.plan, name)]


def shares_nothing(plan: Plan, question: Question) -> bool:
    """Return whether no two ranks have the same weights or shards of one network."""
    cluster = question.cluster
    layout = make_mesh(plan, cluster.gpus, cluster.gpus_per_node)
    return layout.shards * layout.dp_replicate == 1


def with_plan(chosen: Candidate, plan: Plan, question: Question) -> Candidate | None:
    """Return a candidate with another plan and the same global batch; None if the ranks cannot be divided so."""
    cluster = question.cluster
    try:
        before = make_mesh(chosen.plan, cluster.gpus, cluster.gpus_per_node).data_parallel
        after = make_mesh(plan, cluster.gpus, cluster.gpus_per_node).data_parallel
        batch = chosen.job.grad_accum * chosen.job.micro_batch * before
        if batch % after:
            return None
        sequences = batch // after
        micro_batch = min(chosen.job.micro_batch, sequences)
        while sequences % micro_batch:
            micro_batch -= 1
        job = replace(chosen.job, micro_batch=micro_batch, grad_accum=sequences // micro_batch)
        check(Case(job, plan, cluster))
    except UsageError:
        return None
    return Candidate(job=job, plan=plan)


def _make_reason(measured: Measured, choice: Choice, question: Question) -> Reason:
    """Return the reason; a whole run without the technique may have run out of memory where its probe did not."""
    ablation, need, run = measured.ablation, measured.need, measured.run
    costs = extra_seconds(choice, ablation.candidate, question)
    is_switch = isinstance(ablation.value, bool)
    instead = "without it" if is_switch else f"with {spell_option(ablation.name)} {ablation.cheaper}"
    why = describe_effect(ablation.name, choice.candidate.plan)
    if not isinstance(need, Need):
        why += f"; {instead} it cannot be run ({str(need).partition('. ')[0].rstrip('.')})"
    else:
        needed, capacity = need.process_bytes, question.cluster.device.capacity_bytes
        shown = format_gib(needed) if need.whole else f"~{format_gib(needed)}"
        if run is not None and not run.fits_card:
            shown = f"more than {format_gib(capacity)}"
        elif run is not None and not run.host.fits:
            shown = f"{format_gib(run.host.machine_bytes or 0)} of host memory on each machine"
        fits = measured.may_fit(question)
        is_tight = capacity - needed < LEAST_FREE
        verdict = (
            "which leaves too little free" if fits and is_tight else "which fits as well" if fits else "too much"
        )
        why += f"; {instead} {shown}, {verdict}"
        if fits and not is_tight and costs is not None:
            nothing = NO_TIME * (choice.estimate.time["step_seconds"] or 0.0)
            why += ", but slower" if costs < -nothing else " at no less time" if costs <= nothing else ""
    value = "on" if ablation.value is True else ablation.value
    technique = f"{spell_option(ablation.name)}={value}"
    return Reason(technique=technique, why=f"{why}.", saves_bytes=measured.saved_bytes, costs_seconds=costs)


def extra_seconds(choice: Choice, other: Candidate, question: Question) -> float | None:
    """Return how much longer a plan takes than another.

    How much a budget recomputes is known only for the plan, which was run.
    """
    chosen = choice.candidate
    own, others = _step_seconds(chosen, question), _step_seconds(other, question)
    if chosen.plan.checkpointing.startswith("budget"):
        if other.plan.checkpointing == chosen.plan.checkpointing:
            full = (replace(one, plan=replace(one.plan, checkpointing="full")) for one in (chosen, other))
            own, others = (_step_seconds(one, question) for one in full)
        else:
            own = choice.estimate.time["step_seconds"]
    return None if own is None or others is None else own - others


def _step_seconds(candidate: Candidate, question: Question) -> float | None:
    timing = price_candidate(candidate, question.cluster).timing
    return None if timing is None else timing.step_seconds
