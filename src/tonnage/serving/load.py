"""An engine under requests of some lengths: who runs together in pages and in slots, and how fast."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tonnage.errors import CannotEstimate
from tonnage.serving.blocks import Contiguous, PagedEngine, Simulation, contiguous, simulate
from tonnage.serving.closed_form import ServingEstimate
from tonnage.serving.lengths import Lengths
from tonnage.serving.speed import ServingSpeed, serving_speed

REQUESTS: Final = 10_000
"""Requests that are simulated."""

_ROUNDS: Final = 4
"""Simulations in which the seconds of a step are brought in line with the requests that run together."""

_UNKNOWN_STEP_SECONDS: Final = 0.025
"""Seconds of a step for the arrival of requests, where the card's speed is not known."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Course of serving requests."""

    lengths: Lengths
    concurrency: int
    """Requests that are always there, by which the speed is computed."""
    speed: ServingSpeed | None
    """None for a card or a network whose rates are not known."""
    paged: Simulation | None
    """None for a network whose layers keep windows or states, which the simulator does not count."""
    slots: Contiguous | None
    """The same pool in slots of the maximal length."""

    refused: float = 0.0
    """Part of the prompts that the engine refuses: they leave no room for an answer in the maximal length."""

    def to_json(self) -> dict[str, Any]:
        """Return the load as a document."""
        return {
            "concurrency": self.concurrency,
            "mean_prompt": self.lengths.mean_prompt,
            "mean_output": self.lengths.mean_output,
            "rate": self.lengths.rate,
            "refused": self.refused,
            "speed": None if self.speed is None else asdict(self.speed),
            "paged": None if self.paged is None else asdict(self.paged),
            "contiguous": None if self.slots is None else asdict(self.slots),
        }


def serve_load(estimate: ServingEstimate, lengths: Lengths, concurrency: int | None) -> Load:
    """Return what one replica of the engine makes of requests of these lengths.

    Without a `concurrency` as many are always there as may run together, or as the rate of arrivals brings.
    """
    full, layout = estimate.settings, estimate.worst.layout
    if full.stated.no_prefix_caching:
        lengths = replace(lengths, prefix=0)
    together = full.max_seqs if concurrency is None else concurrency
    speed, refused = _known_speed(estimate, lengths, together), lengths.share_from(full.max_len)
    if len(layout.groups) != 1 or layout.groups[0].kind != "full":
        return Load(lengths=lengths, concurrency=together, speed=speed, paged=None, slots=None, refused=refused)
    requests = lengths.draw(REQUESTS, most=full.max_len)
    paged = None
    for _ in range(_ROUNDS if lengths.rate is not None and concurrency is None else 1):
        if paged is not None:  # how many run together decides how long a step takes, and the reverse
            together = max(1, round(paged.mean_running))
            speed = _known_speed(estimate, lengths, together)
        engine = PagedEngine(
            blocks=estimate.pool.blocks,
            block_tokens=layout.block_tokens,
            max_seqs=full.max_seqs if concurrency is None else min(full.max_seqs, concurrency),
            batched_tokens=full.max_batched_tokens,
            caches=full.engine.name == "vllm" and not full.stated.no_prefix_caching,
            step_seconds=_UNKNOWN_STEP_SECONDS if speed is None else speed.token_seconds,
        )
        paged = simulate(requests, engine)
    slots = contiguous(requests, pool_tokens=estimate.pool.blocks * layout.block_tokens, max_len=full.max_len)
    return Load(lengths=lengths, concurrency=together, speed=speed, paged=paged, slots=slots, refused=refused)


def _known_speed(estimate: ServingEstimate, lengths: Lengths, together: int) -> ServingSpeed | None:
    try:
        return serving_speed(estimate, lengths, together)
    except CannotEstimate:
        return None
