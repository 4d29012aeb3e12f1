"""The whole training: how long its tokens take, how many hours of GPUs that is, and what they cost.

with_training(estimate, TrainingGoal(tokens=10**9, price=2.0)).time["training"]
# {"tokens": 1000000000, "seconds": 86400.0, "gpu_hours": 192.0, "cost": 384.0}
"""

from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from tonnage.errors import UsageError
from tonnage.estimates.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class TrainingGoal:
    """How much is trained, and the price of a GPU."""

    tokens: int | None = None
    """Tokens of the whole training."""
    samples: int | None = None
    """The same in sequences; one of both is stated."""
    price: float | None = None
    """Price of an hour of one GPU, in any currency; None: not stated."""

    def __post_init__(self) -> None:
        if self.tokens is not None and self.samples is not None:
            raise UsageError("--tokens and --samples both say how much is trained; leave one of them out.")
        if self.price is not None and not isinstance(self.price, int | float):
            raise UsageError(f"--price is {self.price}; it must be a number above 0.")
        if self.price is not None and self.tokens is None and self.samples is None:
            raise UsageError("--price is of an hour of a GPU; say with --tokens or --samples how much is trained.")
        if self.price is not None and not 0 < self.price < float("inf"):
            raise UsageError(f"--price is {self.price:g}; it must be a number above 0.")

    def count_tokens(self, job: dict[str, Any]) -> int | None:
        """Return the tokens of the training; sequences of drawn lengths have their mean."""
        if self.samples is None:
            return self.tokens
        lengths = [min(int(length), job["seq_len"]) for length in job.get("lengths") or ()]
        return int(self.samples * (mean(lengths) if lengths else job["seq_len"]))


def with_training(estimate: Estimate, goal: TrainingGoal) -> Estimate:
    """Return the estimate with the whole training in its `time`; unchanged where no goal or no pace is known."""
    tokens, pace = goal.count_tokens(estimate.job), estimate.time.get("tokens_per_second_per_gpu")
    if not tokens or not pace:
        return estimate
    gpus = estimate.cluster["gpus"]
    seconds = tokens / (pace * gpus)
    hours = seconds * gpus / 3600
    cost = None if goal.price is None else hours * goal.price
    training = {"tokens": tokens, "seconds": seconds, "gpu_hours": hours, "cost": cost}
    return replace(estimate, time={**estimate.time, "training": training})


def describe_training(time: dict[str, Any]) -> str | None:
    """Return the whole training in words; None where it was not asked for."""
    training = time.get("training")
    if training is None:
        return None
    days, hours = training["seconds"] / 86400, training["seconds"] / 3600
    short = f"{hours:,.1f} hours" if hours >= 2 else f"{60 * hours:,.0f} minutes"
    duration = f"{days:,.1f} days" if days >= 2 else short
    words = f"{training['tokens']:,} tokens take {duration}, {training['gpu_hours']:,.1f} GPU-hours"
    return words if training["cost"] is None else f"{words}, which cost {training['cost']:,.2f}"
