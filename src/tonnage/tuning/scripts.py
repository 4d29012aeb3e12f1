"""`tonnage tune -- python train.py`: the settings of a user's own script that are fastest on this machine.

The script is run as it is.  If it can be read as a Job under a Plan, the plans that are predicted to be fastest are
tried on it, by its own flags or by what is put into the objects that it makes, and each is shrunk or grown as in the
tuning of a model; else the rungs of the ladder are tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.case import Case
from tonnage.cluster import CPU
from tonnage.errors import TonnageError, TrialFailed
from tonnage.estimates import history
from tonnage.planner.describe import describe
from tonnage.planner.solution import Candidate
from tonnage.planner.solve import search
from tonnage.planner.trial_runner import TrialRunner
from tonnage.script.changed_command import ChangedCommand, change_command
from tonnage.script.facts import Facts, NotUnderstood, Understood, describe_recognised, understood
from tonnage.script.ladder import list_rungs
from tonnage.script.planning import Asked, can_set_batch, has_no_setting, make_question
from tonnage.script.setting_changes import list_setting_changes
from tonnage.tuning import decisions, here
from tonnage.tuning.decisions import Trial, Tuned
from tonnage.tuning.script_trials import ScriptTrials

if TYPE_CHECKING:
    from tonnage.tuning.outcome import Outcome

Progress = Callable[[str], None]

AS_IS: Final = "the script as it is"


def tune_script(
    asked: Asked,
    *,
    out: Path,
    trials: int = 12,
    steps: int = 20,
    forget: bool = False,
    variables: Mapping[str, str] | None = None,
    progress: Progress = lambda text: None,
) -> Tuned:
    """Return the trials of a script on this machine's devices; `asked.cluster` are those.

    Raises TrialFailed if the script itself fails for another reason than memory, UsageError.
    """
    run = ScriptTrials(asked.cluster, out, steps=steps, timeout_seconds=asked.timeout_seconds, variables=variables)
    progress(AS_IS)
    own = ChangedCommand(command=tuple(asked.command))
    outcome, facts = run.run(own)
    if outcome.ended == "failed":
        raise TrialFailed(f"{_describe_failure(outcome)}.")
    ranks = int(facts.recorded.get("processes", 1))
    asked = replace(asked, cluster=replace(asked.cluster, nodes=1, gpus_per_node=ranks))
    seen = describe_recognised(facts)
    first = Trial(candidate=None, why=AS_IS, outcome=outcome, changed=own)
    try:
        now = understood(facts)
    except NotUnderstood as reason:
        progress(f"no plan can be made for it: {reason}")
        tried = _try_rungs(asked, facts, first, run, trials, progress)
        return Tuned(trials=tried, seen=f"{seen}; no plan can be made for it: {reason}", gpu=str(asked.cluster))
    first = replace(first, candidate=Candidate(job=now.job, plan=now.plan))
    if forget:
        history.forget(Case(now.job, now.plan, asked.cluster))
    tuned = _tune(asked, facts, now, first, run, trials, progress)
    batch = facts.recorded.get("batch", {})
    if batch.get("least_tokens") == batch.get("tokens"):
        compared = here.compare(tuned.trials, asked.cluster, progress)
    else:
        lengths = f"{batch['least_tokens']:,} to {batch['tokens']:,}"
        why = f"batches of {lengths} tokens were seen, and only one length is estimated"
        compared = tuple(replace(trial, unpredicted=why) for trial in tuned.trials)
    return replace(tuned, trials=compared, seen=f"{seen}: {now.words}")


def _describe_failure(outcome: Outcome) -> str:
    """Return why the script as it is gave no answer."""
    if outcome.message.startswith("exit 0:"):
        return "The script ended without an optimizer step of torch's, so there is nothing to time"
    when = "" if outcome.moment == "unknown" else f" at {outcome.moment}"
    return f"The script failed{when}: {outcome.message.rstrip('.')}"


def _tune(
    asked: Asked, facts: Facts, now: Understood, first: Trial, run: ScriptTrials, most: int, progress: Progress
) -> Tuned:
    """Return the path from the script and from the predicted plans."""
    present = Candidate(job=now.job, plan=now.plan)
    runs: list[tuple[ChangedCommand, tuple[str, ...]]] = []

    def change(candidate: Candidate) -> ChangedCommand:
        return change_command(asked.command, facts, list_setting_changes(present, candidate, facts, asked.command))

    def attempt(candidate: Candidate) -> Outcome:
        changed = change(candidate)
        outcome, after = run.run(changed)
        runs.append((changed, tuple(changed.list_not_taken(after)) if after.recorded else ()))
        return outcome

    tuned = decisions.tune(
        [*_predict(asked, facts, now, progress), (AS_IS, present)],
        attempt,
        is_possible=lambda candidate: (
            is_settable(candidate, present, facts, asked) and change(candidate).settings != ()
        ),
        on_trial=lambda why, candidate: progress(f"{why}: {describe(candidate)}"),
        most_trials=most,
        tried=(first,),
    )
    later = [
        replace(trial, changed=changed, not_taken=not_taken)
        for trial, (changed, not_taken) in zip(tuned.trials[1:], runs, strict=True)
    ]
    return replace(tuned, trials=(first, *later), gpu=str(asked.cluster))


def _predict(asked: Asked, facts: Facts, now: Understood, progress: Progress) -> list[tuple[str, Candidate]]:
    """Return the fastest plans by prediction; none on the CPU, and where no ghost runs."""
    if asked.cluster.device.id == CPU:
        return []
    try:
        question = make_question(asked, now, facts)
        with TrialRunner(progress, torch=asked.torch_version) as runner:
            plans = search(question, runner, top=here.SHOWN, explain=False, progress=progress).plans
    except TonnageError as error:
        progress(f"no predictions: {error}")
        return []
    return [(f"predicted {rank}", choice.candidate) for rank, choice in enumerate(plans, 1)]


def is_settable(candidate: Candidate, present: Candidate, facts: Facts, asked: Asked) -> bool:
    """Return True if the script has a setting for each option in which the candidate differs from it."""
    if candidate.job.micro_batch != present.job.micro_batch and not can_set_batch(asked, facts):
        return False
    differing: dict[str, Any] = {}
    for owner, before in ((candidate.job, present.job), (candidate.plan, present.plan)):
        differing |= {name: value for name, value in vars(owner).items() if value != getattr(before, name)}
    return not any(
        has_no_setting(name, value, candidate.job, candidate.plan, facts, asked.cluster)
        for name, value in differing.items()
    )


def _try_rungs(
    asked: Asked, facts: Facts, first: Trial, run: ScriptTrials, most: int, progress: Progress
) -> tuple[Trial, ...]:
    """Return the first trial and those of the rungs, up to the first that holds."""
    trials = [first]
    rungs: Sequence[Any] = list(list_rungs(facts, asked.command, fits=first.outcome.holds))
    for rung in itertools.islice(rungs, most - 1):
        usable = [change for change in rung if change.technique != "allocator" or asked.cluster.device.id != CPU]
        changed = change_command(asked.command, facts, usable)
        if not changed.settings:
            continue
        why = "; ".join(str(setting) for setting in changed.settings)
        progress(why)
        outcome, after = run.run(changed)
        not_taken = tuple(changed.list_not_taken(after)) if after.recorded else ()
        trials.append(Trial(candidate=None, why=why, outcome=outcome, changed=changed, not_taken=not_taken))
        if outcome.holds:
            break
    return tuple(trials)
