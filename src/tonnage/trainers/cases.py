"""Cases as users ask for them: a model's name and options by their names, resolved, completed and checked.

The command line and Python both come through here, so that the same mistake gets the same answer.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tonnage.case import Case, check_idle
from tonnage.catalog.configurations import resolve
from tonnage.catalog.families import learned_positions
from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.job import Job, check_said, check_sequences, check_tokens
from tonnage.plans import Plan
from tonnage.step.heads import check_type
from tonnage.trainers import engine_of


def ask(
    model: str,
    cluster: Cluster,
    options: Mapping[str, Any],
    *,
    said: Mapping[str, Any] | None = None,
    job: Job | None = None,
    plan: Plan | None = None,
    offline: bool = False,
) -> Case:
    """Return the Case that options by their names ask for, completed as `request` does.

    `said` are the options that the user said (default: all); the others, which come from a file, may be unused.
    Raises UsageError for an option that means nothing to the job or the plan.
    """
    said = options if said is None else said
    found, chosen = request(model, job, plan, offline=offline, **options)
    check_said(said if "method" in said else options, found)  # another method leaves the file's adapters unused
    check_idle(said, chosen, cluster.gpus)
    return Case(found, chosen, cluster)


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
    """Return the Job and the Plan that options by their names ask for, else as given.  Raises UsageError.

    Where neither says anything of an option whose default the engine cannot do, it is what the engine does; and
    sequences are no longer than learned positions go.
    """

    of_job = {item.name for item in fields(Job)} - {"model"}
    of_plan = {item.name for item in fields(Plan)}
    unknown = sorted(set(options) - of_job - of_plan)
    if unknown:
        raise UsageError(f"Unknown option {unknown[0]!r}; possible: {', '.join(sorted(of_job | of_plan))}.")
    for value, kind, example in ((job, Job, "seq_len=8192"), (plan, Plan, 'shard="zero3"')):
        if value is not None and not isinstance(value, kind):
            was, name = type(value).__name__, kind.__name__
            raise UsageError(f"A {name} is wanted, and this is a {was}; give {name}({example}), or options by name.")
    asked = replace(job or Job(), **{name: value for name, value in options.items() if name in of_job})
    said = replace(plan or Plan(), **{name: value for name, value in options.items() if name in of_plan})
    if plan is None:
        unsaid = engine_of(said).unsaid(asked)
        said = replace(said, **{name: value for name, value in unsaid.items() if name not in options})
    found = resolve(model, offline=offline)
    longest = learned_positions(found)
    if job is None and "seq_len" not in options and longest is not None and longest < asked.seq_len:
        asked = replace(asked, seq_len=longest)
    return replace(asked, model=found), said
