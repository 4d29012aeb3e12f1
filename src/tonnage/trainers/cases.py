"""Cases as users ask for them: a model's name and options by their names, resolved, completed and checked.

The command line and Python both come through here, so that the same mistake gets the same answer.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tonnage.case import Case, check_unused
from tonnage.catalog.configurations import resolve
from tonnage.catalog.families import learned_positions
from tonnage.catalog.spelling import closest
from tonnage.cluster import CPU, Cluster
from tonnage.errors import UsageError
from tonnage.job import Job, check_sequences, check_stated, check_tokens
from tonnage.options import spell_option
from tonnage.plans import Plan
from tonnage.step.heads import check_type
from tonnage.synonyms import NO_SOURCE, find_option, is_without_effect
from tonnage.trainers import engine_of
from tonnage.units import pluralise


def make_case(
    model: str,
    cluster: Cluster,
    options: Mapping[str, Any],
    *,
    stated: Mapping[str, Any] | None = None,
    job: Job | None = None,
    plan: Plan | None = None,
    offline: bool = False,
) -> Case:
    """Return the Case of these options, by their names, completed as `request` does.

    `stated` are the options that the user gave (default: all); the others come from a file and may have no effect.
    Raises UsageError for an option that has no effect on the job or the plan.
    """
    stated = options if stated is None else stated
    full_job, full_plan = request(model, job, plan, offline=offline, **options)
    # Another method leaves the file's adapters unused.
    check_stated(stated if "method" in stated else options, full_job)
    case = Case(full_job, full_plan, cluster)
    if plan is None and "shard" not in options:
        case = _assume_ddp(case)
    check_unused(stated, case.plan, cluster.gpus)
    return case


def _unknown_option(name: str, possible: set[str]) -> UsageError:
    """Return the error for an option of Python that does not exist, with the one that other programs call so."""
    if name == "source":
        return UsageError(f"Unknown option {name!r}. {NO_SOURCE}")
    known = find_option(name)
    if known is not None:
        return UsageError(f"Unknown option {name!r}; here it is {known.in_python}.")
    if is_without_effect(name):
        return UsageError(f"Unknown option {name!r}; neither memory nor seconds depend on it: leave it out.")
    near = [option.replace("-", "_") for option in closest(name, map(spell_option, sorted(possible)))]
    hint = f"close: {', '.join(near)}; " if near else ""
    return UsageError(f"Unknown option {name!r}; {hint}possible: {', '.join(sorted(possible))}.")


def _assume_ddp(case: Case) -> Case:
    """Return the case under DDP if several GPUs would else train copies that never exchange anything.

    It is returned as it is where its engine or a technique does not run under DDP.
    """
    if case.plan.shard != "none" or case.cluster.device.id == CPU or case.mesh.data_parallel * case.mesh.cp == 1:
        return case
    assumed = replace(
        case,
        plan=replace(case.plan, shard="ddp"),
        assumed=(
            f"shard, which was not given: DDP (--shard ddp), in which each of {pluralise(case.cluster.gpus, 'GPU')} "
            "holds the whole model and gradients are averaged; ZeRO divides the model's states among them: --shard "
            "zero1 (optimizer states), zero2 (also gradients), zero3 (also parameters)",
        ),
    )
    return case if any(not refusal.is_of_here for refusal in engine_of(assumed.plan).refusals(assumed)) else assumed


def check(case: Case) -> None:
    """Raise UsageError with the reasons why the plan's engine cannot run this job.

    Raises UnreadableModel for a type that transformers does not know.
    """
    check_sequences(case.job, learned_positions(case.job.model))
    check_tokens(case.job)
    if case.job.model.kind == "config":
        check_type(case.job.model.config)
    if reasons := engine_of(case.plan).refusals(case):
        raise UsageError(" ".join(map(str, reasons)))


def request(
    model: str, job: Job | None = None, plan: Plan | None = None, *, offline: bool = False, **options: Any
) -> tuple[Job, Plan]:
    """Return the Job and the Plan of these options, by their names, and of `job` and `plan` for all others.

    An option that nothing sets and whose default the engine cannot do gets the engine's own value.  Sequences are no
    longer than learned positions.  Raises UsageError.
    """
    job_fields = {item.name for item in fields(Job)} - {"model"}
    plan_fields = {item.name for item in fields(Plan)}
    unknown = sorted(set(options) - job_fields - plan_fields)
    if unknown:
        raise _unknown_option(unknown[0], job_fields | plan_fields)
    for value, kind, example in ((job, Job, "seq_len=8192"), (plan, Plan, 'shard="zero3"')):
        if value is not None and not isinstance(value, kind):
            was, name = type(value).__name__, kind.__name__
            raise UsageError(f"A {name} is wanted, and this is a {was}; give {name}({example}), or options by name.")
    full_job = replace(job or Job(), **{name: value for name, value in options.items() if name in job_fields})
    full_plan = replace(plan or Plan(), **{name: value for name, value in options.items() if name in plan_fields})
    if plan is None:
        defaults = engine_of(full_plan).own_defaults(full_job)
        full_plan = replace(full_plan, **{name: value for name, value in defaults.items() if name not in options})
    resolved = resolve(model, offline=offline)
    longest = learned_positions(resolved)
    if job is None and "seq_len" not in options and longest is not None and longest < full_job.seq_len:
        full_job = replace(full_job, seq_len=longest)
    return replace(full_job, model=resolved), full_plan
