"""Answer a case, and complete an answer that does not fit: what the whole step needs, and changes that were tried.

asked = Asked(model="llama-3-8b", case=case, options={"seq_len": 2048})
for run in answers(asked):      # first the verdict, then the verdict with advice
    run.estimate
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.advice.changes import Change
from tonnage.advice.command import spell_command
from tonnage.advice.trials import Trials, run_without_limit
from tonnage.case import Case
from tonnage.cluster import CPU
from tonnage.estimates import predict
from tonnage.estimates.estimate import Advice, Estimate
from tonnage.estimates.from_traces import Run
from tonnage.options import spell_words
from tonnage.planner.pricing import bound_candidate
from tonnage.planner.solution import Candidate
from tonnage.planner.trial_runner import TrialRunner

if TYPE_CHECKING:
    from tonnage.workers.worker import Worker

WORKERS: Final = 2
"""Workers of the trials: a start takes some seconds of a core, a trial about one."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The question as the user asked it, so that a command with a change in it can be spelled."""

    model: str
    """The model as typed."""
    case: Case
    """The case."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of Job and Plan that the user or a plan file gave."""
    others: tuple[str, ...] = ()
    """Other words of the command that decide the answer, such as `--rank 1`."""
    rank: int | None = None
    """The only rank to run; None: all that differ."""
    steps: int | None = None
    """Number of steps that the user asked for."""

    def spell(self, change: Change) -> str:
        """Return the command with a change in it."""
        return spell_command(self.model, self.case.cluster, self.options, change, self.others)


def answers(
    asked: Asked,
    *,
    advise: bool = True,
    source: str = "ghost",
    worker: Worker | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Generator[Run]:
    """Yield the answer for a case; if it does not fit, or only barely, also the answer with `advice`.

    `options` are those of `tonnage.estimates.sources.Options`.  Raises as `predict.estimate` does.
    """
    with ExitStack() as stack:
        started: list[Worker] = []

        def adopt(new: Worker) -> None:
            stack.push(new)
            started.append(new)

        runner: TrialRunner | None = None
        if advise and worker is None and source == "ghost" and _is_hopeless(asked.case):
            runner = stack.enter_context(TrialRunner(progress, WORKERS, options.get("torch_version")))
            runner.warm_up(WORKERS - 1)
        run = predict.answer(
            asked.case,
            rank=asked.rank,
            steps=asked.steps,
            source=source,
            worker=worker,
            adopt=adopt,
            progress=progress,
            **options,
        )
        if not run.estimate.wants_advice or source != "ghost" or asked.case.cluster.device.id == CPU:
            yield run
            return
        if runner is None:
            count = WORKERS if worker is None else 1
            runner = stack.enter_context(TrialRunner(progress, count, options.get("torch_version")))
        for one in started if worker is None else [worker]:
            runner.adopt(one, closing=worker is None)
        run = replace(run, estimate=add_needed(run.estimate, asked, runner))
        yield run
        if advise:
            progress("trying what would make it fit")
            yield replace(run, estimate=add_advice(run.estimate, asked, runner, progress))


def _spell_options(change: Change) -> str:
    cards = [] if change.cluster is None else [f"--gpu {change.cluster}"]
    return " ".join([*cards, *(word for option in change.options.items() for word in spell_words(*option))])


def _is_hopeless(case: Case) -> bool:
    """Return True if a lower bound of what the step needs is more than the card has."""
    bound = bound_candidate(Candidate(job=case.job, plan=case.plan), case.cluster)
    return bound.bound_bytes > case.cluster.device.capacity_bytes


def add_needed(estimate: Estimate, asked: Asked, runner: TrialRunner) -> Estimate:
    """Return an estimate that does not fit with what the whole step needs on a card without a limit."""
    if estimate.fits_card:
        return estimate
    whole = run_without_limit(asked.case, runner, asked.rank, asked.steps)
    if whole is None:
        return estimate
    names = ("parameters", "trainable_parameters")
    counted: dict[str, Any] = {name: whole.model[name] for name in names if name in whole.model}
    return replace(
        estimate,
        needed=whole.peak,
        needed_seconds=whole.time.get("step_seconds"),
        model={**estimate.model, **counted},
    ).with_host(whole.host)


def add_advice(
    estimate: Estimate, asked: Asked, runner: TrialRunner, progress: Callable[[str], None] = lambda text: None
) -> Estimate:
    """Return an estimate that does not fit, or only barely, with the changes that were tried."""
    peak = estimate.peak if estimate.fits_card else estimate.needed
    if peak is None:
        return estimate
    trials = Trials(
        asked.case,
        peak,
        runner,
        host=estimate.host,
        rank=asked.rank,
        steps=asked.steps,
        with_room=estimate.is_tight,
        found=lambda change: progress(f"it fits with {_spell_options(change)}; looking further"),
    )
    trials.run()
    advice = tuple(
        Advice(
            change={**one.change.options, **({"gpu": str(one.case.cluster)} if one.change.cluster else {})},
            command=asked.spell(one.change),
            fits=one.fits,
            peak_bytes=one.peak_bytes,
            gain_bytes=max(peak.process_bytes - one.peak_bytes, 0),
            step_seconds=one.step_seconds,
            changes_mathematics=one.change.changes_mathematics,
            host_bytes=one.host_bytes,
            is_tight=one.is_tight,
        )
        for one in trials.best()
    )
    return replace(estimate, advice=advice)
