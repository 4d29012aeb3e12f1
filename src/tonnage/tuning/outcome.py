"""The outcome of a trial of a plan on real devices, as a frozen value that saves to JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from tonnage.errors import OutOfDeviceMemory

Ending = Literal["finished", "out_of_memory", "failed"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one trial; of several ranks the worst."""

    ended: Ending
    """`finished`: all steps ran, an evaluation and a save unless the `moment` is a step of a script."""
    moment: str
    """The part that ran last: `load`, `step 2`, `longest rows`, `evaluation`, `save`."""
    message: str = ""
    """The error in one line; empty if it finished."""
    step_seconds: float | None = None
    """Median seconds of a steady optimizer step, of the slowest rank."""
    spread: float | None = None
    """Half the distance between the fastest and the slowest measured step, as a part of the median."""
    tokens_per_second: float | None = None
    """Tokens of all ranks in a second."""
    allocated_bytes: int | None = None
    """Largest peak of torch's allocator on any rank; None on the CPU."""
    reserved_bytes: int | None = None
    """The same of reserved memory."""
    capacity_bytes: int | None = None
    """Memory of the smallest card; None on the CPU."""

    @property
    def holds(self) -> bool:
        """Return True if the trial finished."""
        return self.ended == "finished"

    @property
    def speed(self) -> float:
        """Return tokens per second, steps per second where tokens are not known, 0 without either."""
        return self.tokens_per_second or (1 / self.step_seconds if self.step_seconds else 0.0)

    @property
    def fullness(self) -> float:
        """Return the part of the card that was reserved; 0 where it is not known."""
        return self.reserved_bytes / self.capacity_bytes if self.reserved_bytes and self.capacity_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Outcome:
        """Return the outcome that `to_json` wrote; unknown fields are left out."""
        names = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in document.items() if name in names})


def worst(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome of a trial on several ranks: an error of any, else the slowest and largest of all.

    Memory that ran out on one rank explains what the others say, whose exchanges it ended; ranks that were told of it
    raise OutOfDeviceMemory.
    """
    for ending in ("out_of_memory", "failed"):
        found = [outcome for outcome in outcomes if outcome.ended == ending]
        if found:
            return min(found, key=lambda outcome: outcome.message.startswith(OutOfDeviceMemory.__name__))
    slowest = max(outcomes, key=lambda outcome: outcome.step_seconds or 0.0)
    values = {
        name: max((value for outcome in outcomes if (value := getattr(outcome, name)) is not None), default=None)
        for name in ("allocated_bytes", "reserved_bytes")
    }
    capacities = [outcome.capacity_bytes for outcome in outcomes if outcome.capacity_bytes is not None]
    return Outcome(**{**slowest.to_json(), **values, "capacity_bytes": min(capacities, default=None)})
