"""What a search over plans found, as frozen values that save to JSON."""

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from tonnage.estimates.estimate import Estimate
from tonnage.job import Job
from tonnage.plans import Plan

SCHEMA_VERSION: Final = 1

Status = Literal["found", "too_large", "unsupported", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A job with its batch decided, and a plan for it."""

    job: Job
    """With micro-batch and accumulation as they would run."""
    plan: Plan
    """The techniques."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why one technique is in a plan."""

    technique: str
    """The option and its value, as on the command line: `checkpointing=full`."""
    why: str
    """One sentence: what it does for this job, and which cheaper choice was not enough."""
    saves_bytes: int | None
    """Peak process memory without it (the next cheaper value in its place) less that with it; None: not run."""
    costs_seconds: float | None
    """Step time with it less that without it; negative where it is faster."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan that fits, run on the ghost."""

    name: str
    """`best`, or what distinguishes an alternative: `zero3, no checkpointing`."""
    candidate: Candidate
    """Job and plan."""
    estimate: Estimate
    """Of the ghost, with the time model's seconds."""
    reasons: tuple[Reason, ...] = ()
    """One for each technique that is not the default."""

    def to_json(self) -> dict[str, Any]:
        """As in `plan --json`."""
        return {
            "name": self.name,
            "plan": _plan_document(self.candidate),
            "estimate": self.estimate.to_json(),
            "reasons": [asdict(reason) for reason in self.reasons],
        }


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the decision path: memory with all techniques up to this one."""

    change: str
    """What was added: `baseline`, `zero3`."""
    process_bytes: int
    """Peak of the process on a card where everything fits."""
    by_category: dict[str, int]
    """What it consists of."""
    fits: bool
    """Whether that is within the card and its headroom."""
    whole: bool
    """Whether the whole network was run; else two runs of a few layers say what it needs."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Something that was not planned, and why."""

    what: str
    """A technique, or a plan in words."""
    why: str
    """One line, with numbers where there are any."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A plan on the frontier of memory and speed: nothing else is as fast with less memory."""

    candidate: Candidate
    """Job and plan."""
    process_bytes: int
    """Peak of the process, run on the ghost."""
    step_seconds: float
    """By the time model."""
    tokens_per_second_per_gpu: float
    """By the time model."""
    whole: bool
    """Whether it was run whole; else a look at a few layers says what it needs."""
    fits: bool
    """Whether that is within the card, less its headroom."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What the question left closed and would make the best plan faster."""

    what: str
    """What to say: `--compile layers`."""
    why: str
    """What it does, and why it is not chosen unasked."""
    step_seconds: float
    """Of the best plan with it, by the time model; it was not run."""
    low_seconds: float
    """Lower end of the interval."""
    high_seconds: float
    """Upper end."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """What would make a job fit that does not."""

    what: str
    """`LoRA`, `--seq-len 4096`, `8 x h200`."""
    process_bytes: int
    """Peak of the process then, run on the ghost."""
    step_seconds: float | None
    """Of its fastest plan that fits."""
    tokens_per_second_per_gpu: float | None
    """The same in tokens."""


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The plan that comes closest, where none fits."""

    candidate: Candidate
    """Job and plan."""
    needed_bytes: int
    """Peak of its process on a card where everything fits."""
    missing_bytes: int
    """How far that is above the card less its headroom."""
    remedies: tuple[Remedy, ...] = ()
    """What would make it fit, each with its price."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The answer of a search."""

    status: Status
    """`found`; `too_large`: nothing fits; `unsupported`: the constraints leave nothing; `unknown`: not priced."""
    question: dict[str, Any]
    """Model, cluster, constraints and headroom as asked."""
    plans: tuple[Choice, ...] = ()
    """Best first."""
    path: tuple[Stage, ...] = ()
    """From the baseline to the best plan."""
    refused: tuple[Refused, ...] = ()
    """Faster plans that do not fit, and techniques that cannot be used here."""
    frontier: tuple[Point, ...] = ()
    """Where it was asked for."""
    offers: tuple[Offer, ...] = ()
    """What was not asked for and would be faster."""
    nearest: Nearest | None = None
    """Where nothing fits."""
    unpriced: str | None = None
    """Why the plans are ranked without seconds, where they are."""
    looked_at: dict[str, int] | None = None
    """How many candidates there were, how many were priced, refused by bounds, and run."""

    def to_json(self) -> dict[str, Any]:
        """The document that `plan --json` prints (schema_version 1)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "question": self.question,
            "plans": [choice.to_json() for choice in self.plans],
            "path": [asdict(stage) for stage in self.path],
            "refused": [asdict(refused) for refused in self.refused],
            "frontier": [_with_plan(point) for point in self.frontier],
            "offers": [asdict(offer) for offer in self.offers],
            "nearest": None if self.nearest is None else _with_plan(self.nearest),
            "unpriced": self.unpriced,
            "looked_at": self.looked_at,
        }


def _with_plan(value: Point | Nearest) -> dict[str, Any]:
    document = asdict(value)
    document.pop("candidate")
    return {"plan": _plan_document(value.candidate), **document}


def _plan_document(candidate: Candidate) -> dict[str, Any]:
    """The plan's fields with the batch beside them, which a plan decides as well."""
    job = candidate.job
    batch = {"method": job.method, "micro_batch": job.micro_batch, "grad_accum": job.grad_accum}
    return {**asdict(candidate.plan), **batch}
