"""The answer of a search over plans, as frozen values that save to JSON."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from tonnage.estimates.estimate import Estimate
from tonnage.estimates.training import TrainingGoal, with_training
from tonnage.estimates.viewed import Viewed
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.units import pluralise

SCHEMA_VERSION: Final = 1

Status = Literal["found", "too_large", "unsupported", "unknown"]
"""Outcome of a search, described at `Solution.status`."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A job whose micro-batch is decided, and a plan for it."""

    job: Job
    """The job, with micro-batch and accumulation as they would run."""
    plan: Plan
    """The techniques."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why one technique is in a plan."""

    technique: str
    """The option and its value, as on the command line: `checkpointing=full`."""
    why: str
    """One sentence: its effect on this job, and the cheaper choice that was not enough."""
    saves_bytes: int | None
    """Peak process memory without it (the next cheaper value in its place) less that with it; None: not run."""
    costs_seconds: float | None
    """Step time with it less that without it; negative if it makes the step faster."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan that fits and was run on the ghost."""

    name: str
    """`best`, or what distinguishes an alternative: `zero3, no checkpointing`."""
    candidate: Candidate
    """The job and the plan."""
    estimate: Estimate
    """Memory as the ghost ran it, and the seconds of the time model."""
    reasons: tuple[Reason, ...] = ()
    """A reason for each technique that is not the default."""
    note: str | None = None
    """A remark about a plan that nearly fills the card."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `plans` in the document of `plan --json`."""
        return {
            "name": self.name,
            "plan": _plan_document(self.candidate),
            "estimate": self.estimate.to_json(),
            "reasons": [asdict(reason) for reason in self.reasons],
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the decision path: memory with all techniques up to this one."""

    change: str
    """The technique that this step adds: `baseline`, `zero3`."""
    process_bytes: int
    """Peak of the process on a GPU without a memory limit."""
    by_category: dict[str, int]
    """The bytes of each category in that peak."""
    fits: bool
    """True if the peak is within the GPU less its headroom."""
    whole: bool
    """True if the whole network was run; else the bytes are extrapolated from two runs of a few layers."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A technique or plan that was ruled out, and the reason."""

    what: str
    """A technique, or the description of a plan."""
    why: str
    """The reason in one line, with numbers if there are any."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A Pareto-optimal plan: no other is as fast with less memory."""

    candidate: Candidate
    """The job and the plan."""
    process_bytes: int
    """Peak of the process on the ghost."""
    step_seconds: float
    """Seconds of a step by the time model."""
    tokens_per_second_per_gpu: float
    """Throughput by the time model."""
    whole: bool
    """True if the whole network was run; else the bytes are extrapolated from a few layers."""
    fits: bool
    """True if the peak is within the GPU less its headroom."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A choice that needs the user's word and would make training faster."""

    what: str
    """The option to give: `--compile layers`."""
    why: str
    """Its effect, the plan with it, or what is missing."""
    step_seconds: float
    """Seconds of a step with it, by the time model."""
    low_seconds: float
    """Lower end of the interval of these seconds."""
    high_seconds: float
    """Upper end of the interval."""
    process_bytes: int | None = None
    """Peak of the process on the ghost; None: priced, not run."""
    changes_mathematics: bool = False
    """True if it trains another way."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that makes a job fit."""

    what: str
    """The change as options: `--seq-len 4096`, `--gpu 8xh200 --method lora`."""
    command: str
    """The question with the change in it."""
    process_bytes: int
    """Peak of the process with the change, on the ghost."""
    step_seconds: float | None
    """Seconds of a step of the fastest plan that fits then."""
    tokens_per_second_per_gpu: float | None
    """Throughput of the same plan."""


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The plan that needs least memory, if none fits."""

    candidate: Candidate
    """The job and the plan."""
    needed_bytes: int
    """Peak of its process on a GPU without a memory limit."""
    missing_bytes: int
    """The bytes by which that exceeds the GPU less its headroom."""
    remedies: tuple[Remedy, ...] = ()
    """Changes that make the job fit, each with its peak and its seconds."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Solution(Viewed):
    """The answer of a search."""

    status: Status
    """`found`; `too_large`: nothing fits; `unsupported`: the constraints leave none; `unknown`: no price is known."""
    question: dict[str, Any]
    """Model, cluster, constraints and headroom of the question."""
    plans: tuple[Choice, ...] = ()
    """The plans that fit, best first; if only one inside the headroom does, that one."""
    barely: Choice | None = None
    """A faster plan that fits the card, but not the card less its headroom."""
    path: tuple[Stage, ...] = ()
    """The decision path, from the baseline to the best plan."""
    refused: tuple[Refused, ...] = ()
    """Faster plans that do not fit, and techniques that cannot be used here."""
    frontier: tuple[Point, ...] = ()
    """The Pareto-optimal plans, if they were asked for."""
    offers: tuple[Offer, ...] = ()
    """Options that were not asked for and would be faster."""
    nearest: Nearest | None = None
    """The plan that comes closest, if nothing fits."""
    unpriced: str | None = None
    """The reason why the plans are ranked without seconds, if they are."""
    looked_at: dict[str, int] | None = None
    """The number of candidates, and of those priced, refused by bounds, and run."""

    def summary(self) -> str:
        """Return the question and the best plan's need in one line."""
        asked = f"{self.question['model']} on {self.question['cluster']}"
        if not self.plans:
            return f"{asked}: {self.status}"
        best = self.plans[0].estimate
        seconds = best.time.get("step_seconds")
        pace = f", {seconds:.3g} s a step" if seconds else ""
        return f"{asked}: {pluralise(len(self.plans), 'plan')}, the best {best.verdict()}{pace}"

    def with_training(self, goal: TrainingGoal) -> "Solution":
        """Return the solution with the whole training in the time of each plan."""
        timed = (replace(choice, estimate=with_training(choice.estimate, goal)) for choice in self.plans)
        return replace(self, plans=tuple(timed))

    def to_json(self) -> dict[str, Any]:
        """Return the document that `plan --json` prints (schema_version 1)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "question": self.question,
            "plans": [choice.to_json() for choice in self.plans],
            "barely": None if self.barely is None else self.barely.to_json(),
            "path": [asdict(stage) for stage in self.path],
            "refused": [asdict(refused) for refused in self.refused],
            "frontier": [_with_plan(point) for point in self.frontier],
            "offers": [asdict(offer) for offer in self.offers],
            "nearest": None if self.nearest is None else _describe_nearest(self.nearest),
            "unpriced": self.unpriced,
            "looked_at": self.looked_at,
        }


def _describe_nearest(nearest: Nearest) -> dict[str, Any]:
    """Return the document of the nearest plan; `advice` has its remedies as `estimate --json` has tried changes."""
    advice = [
        {
            "change": (change := _read_options(remedy.what)),
            "command": remedy.command,
            "fits": True,
            "peak_bytes": remedy.process_bytes,
            "gain_bytes": max(nearest.needed_bytes - remedy.process_bytes, 0),
            "step_seconds": remedy.step_seconds,
            "changes_mathematics": not _MATHEMATICS.isdisjoint(change),
        }
        for remedy in nearest.remedies
    ]
    return {**_with_plan(nearest), "advice": advice}


_MATHEMATICS: Final = frozenset(("method", "seq_len", "quant", "unquantized_dtype"))
"""Options of remedies that change what training computes, or the data of a step."""


def _read_options(what: str) -> dict[str, str | int]:
    """Return the options of a remedy by name: `--seq-len 4096` is {"seq_len": 4096}."""
    words = what.split()
    return {
        flag.removeprefix("--").replace("-", "_"): int(value) if value.isdigit() else value
        for flag, value in zip(words[::2], words[1::2], strict=True)
    }


def _with_plan(value: Point | Nearest) -> dict[str, Any]:
    """Return the fields of a value, with the document of its plan in place of the candidate."""
    document = asdict(value)
    document.pop("candidate")
    return {"plan": _plan_document(value.candidate), **document}


def _plan_document(candidate: Candidate) -> dict[str, Any]:
    """Return the fields of the plan, with the method and the batch, which the search decides as well."""
    job = candidate.job
    batch = {"method": job.method, "micro_batch": job.micro_batch, "grad_accum": job.grad_accum}
    return {**asdict(candidate.plan), **batch}
