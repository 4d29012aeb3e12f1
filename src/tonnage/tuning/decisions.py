"""The decisions of `tonnage tune`: what to try next, from what the trials gave.

For each of the predicted plans: does it hold?  If not, the next technique that saves memory is added, first
checkpointing, then offload, then a smaller micro-batch.  If it holds, the micro-batch grows while the global batch
stays, until memory is nearly full or runs out, or speed falls.  The fastest of all that held is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tonnage.errors import UsageError
from tonnage.mesh import divisors
from tonnage.planner import plan_file
from tonnage.planner.solution import Candidate
from tonnage.script.changed_command import ChangedCommand
from tonnage.tuning.outcome import Outcome

Try = Callable[[Candidate], Outcome]

SCHEMA_VERSION: Final = 1

RUNGS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("checkpointing full", {"checkpointing": "full"}),
    ("activations on the host", {"checkpointing": "full", "activation_offload": "cpu-streamed"}),
    ("optimizer states on the host", {"optimizer_offload": "cpu"}),
)
"""Techniques that are added in turn while memory runs out at a micro-batch of one sequence."""

FULL: Final = 0.95
"""Part of the card above which a larger micro-batch is not tried."""

SLOWER: Final = 0.98
"""Part of the best speed below which larger micro-batches are not tried."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial on the path, with the reason for it."""

    candidate: Candidate | None
    """The job and plan that were tried; None for a script that could not be read as a job."""
    why: str
    """Why it was the next."""
    outcome: Outcome
    """Its outcome."""
    predicted_seconds: float | None = None
    """Seconds of a step by the time model alone; None if it has none."""
    unpredicted: str = ""
    """The reason why an estimate of the trial was refused; empty if there is none."""
    changed: ChangedCommand | None = None
    """The command that was run; None for tonnage's own step."""
    not_taken: tuple[str, ...] = ()
    """A sentence about each setting that a script did not take."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `trials` in the document of `tune --json`."""
        job, plan = (None, None) if self.candidate is None else (self.candidate.job, self.candidate.plan)
        document: dict[str, Any] = {
            "why": self.why,
            "micro_batch": None if job is None else job.micro_batch,
            "grad_accum": None if job is None else job.grad_accum,
            "plan": None if plan is None else asdict(plan),
            "outcome": self.outcome.to_json(),
            "predicted_step_seconds": self.predicted_seconds,
        }
        if self.changed is not None:
            document["command"] = list(self.changed.command)
            document["environment"] = dict(self.changed.environment)
            document["arguments"] = dict(self.changed.arguments)
            document["in_code"] = list(self.changed.in_code)
            document["not_taken"] = list(self.not_taken)
        return document


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """All trials in their order, and the best one."""

    trials: tuple[Trial, ...]
    """The path."""
    model: str = ""
    """The model as in a plan file."""
    gpu: str = ""
    """The devices as on the command line."""
    seen: str = ""
    """Description of a script's job, in one line, or the reason why it could not be read as one."""

    @property
    def best(self) -> Trial | None:
        """Return the fastest trial that held; None if none did."""
        held = [trial for trial in self.trials if trial.outcome.holds]
        return max(held, key=lambda trial: trial.outcome.speed, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the document of `tune --json`; `best` is the index of a trial, or null."""
        best = None if self.best is None else self.trials.index(self.best)
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "gpu": self.gpu,
            "best": best,
            **({"seen": self.seen} if self.seen else {}),
            "trials": [trial.to_json() for trial in self.trials],
        }

    def plan_text(self) -> str:
        """Return the content of a plan file with the best plan.  Raises UsageError if nothing held."""
        if self.best is None or self.best.candidate is None:
            raise UsageError("No trial of a plan finished, so there is no plan to save.")
        outcome = self.best.outcome
        remark = f"measured: {outcome.tokens_per_second:,.0f} tokens/s, {outcome.step_seconds:.3g} s a step"
        return plan_file.text_of(self.best.candidate, remark=remark, gpu=self.gpu, model=self.model)


def tune(
    starts: Sequence[tuple[str, Candidate]],
    try_candidate: Try,
    *,
    is_possible: Callable[[Candidate], bool],
    on_trial: Callable[[str, Candidate], None] = lambda why, candidate: None,
    most_trials: int = 20,
    tried: Sequence[Trial] = (),
) -> Tuned:
    """Return the path from each start, a name with a candidate, within a number of trials.

    `is_possible` says of a candidate whether its techniques go together.  The path begins with the trials that were
    `tried`, which may be starts, too.
    """
    trials = list(tried)
    seen = [trial.candidate for trial in tried]

    def attempt(why: str, candidate: Candidate) -> Outcome | None:
        if candidate in seen or len(trials) >= most_trials or not is_possible(candidate):
            return None
        seen.append(candidate)
        on_trial(why, candidate)
        trials.append(Trial(candidate=candidate, why=why, outcome=try_candidate(candidate)))
        return trials[-1].outcome

    for name, start in starts:
        earlier = next((trial.outcome for trial in tried if trial.candidate == start), None)
        outcome = earlier or attempt(name, start)
        if outcome is None:
            continue
        held = start
        if outcome.ended == "out_of_memory":
            shrunk = _shrink(start, attempt)
            if shrunk is None:
                continue
            held, outcome = shrunk
        if outcome.holds:
            _grow(held, outcome, attempt)
    return Tuned(trials=tuple(trials))


Attempt = Callable[[str, Candidate], Outcome | None]


def _shrink(start: Candidate, attempt: Attempt) -> tuple[Candidate, Outcome] | None:
    """Return the first candidate with less memory that holds, and its outcome."""
    for why, candidate in _smaller(start):
        outcome = attempt(f"out of memory: {why}", candidate)
        if outcome is not None and outcome.ended != "out_of_memory":
            return candidate, outcome
    return None


def _smaller(start: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Yield candidates that need ever less: smaller micro-batches, each technique in turn at the smallest."""
    sizes = [size for size in reversed(micro_batches(start)) if size < start.job.micro_batch]
    for size in sizes:
        yield f"micro-batch {size}", with_micro_batch(start, size)
    changed = with_micro_batch(start, sizes[-1]) if sizes else start
    for why, changes in RUNGS:
        news = {name: value for name, value in changes.items() if getattr(changed.plan, name) in ("none", value)}
        added = replace(changed, plan=replace(changed.plan, **news))
        if added != changed:
            changed = added
            yield why, changed


def _grow(held: Candidate, outcome: Outcome, attempt: Attempt) -> None:
    """Try ever larger micro-batches of the same global batch."""
    sizes = [size for size in micro_batches(held) if size > held.job.micro_batch]
    best = outcome.speed
    for size in sizes:
        if outcome.fullness >= FULL:
            return
        larger = attempt(f"memory is left: micro-batch {size}", with_micro_batch(held, size))
        if larger is None or not larger.holds:
            return
        outcome = larger
        if outcome.speed < SLOWER * best:
            return
        best = max(best, outcome.speed)


def micro_batches(candidate: Candidate) -> list[int]:
    """Return the micro-batches that make the same global batch, smallest first."""
    return sorted(divisors(candidate.job.micro_batch * candidate.job.grad_accum))


def with_micro_batch(candidate: Candidate, size: int) -> Candidate:
    """Return the candidate with another micro-batch and as many micro-batches as make the same global batch."""
    rows = candidate.job.micro_batch * candidate.job.grad_accum
    return replace(candidate, job=replace(candidate.job, micro_batch=size, grad_accum=rows // size))
