"""How the pieces of a step follow each other: pipelines, and what copies and exchanges hide behind."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final


def pipeline_seconds(stages: tuple[float, ...], micro_batches: int, virtual_stages: int = 1) -> float:
    """Seconds of all micro-batches through a 1F1B pipeline whose stages take so long for one (forward + backward).

    The slowest stage works without a pause on m micro-batches; before its first and after its last it waits for the
    others: the sum of theirs, divided by the stages that each rank has of an interleaved pipeline (Narayanan et al.
    2021, arXiv:2104.04473, section 2.2: the bubble of p equal stages is (p - 1)/m of the work, (p - 1)/(v m)
    interleaved).
    """
    slowest = max(stages)
    return micro_batches * slowest + (sum(stages) - slowest) / virtual_stages


def exposed(copying: float, hiding: float, overlap: float = 1.0) -> float:
    """Seconds of a copy or an exchange that computation of so many seconds does not hide, if `overlap` of it can.

    What goes on beside computation slows that down, not itself: a product of 9.0 ms and a collective of 16.8 take
    17.1 together, one of 34.8 ms takes 42.8 (Mist's overlap runs on 8 A100).
    """
    return max(copying - hiding, copying * (1 - overlap), 0.0)


@dataclass(frozen=True, slots=True)
class Split:
    """Which parts of a network are on which stage of a pipeline."""

    layers: tuple[int, ...]
    """Layers of each stage."""
    head: int
    """The stage with the product with all words."""
    loss: int
    """The stage with the loss."""

    @property
    def filled(self) -> bool:
        """Whether each stage has weights: without any, its optimizer has nothing to do and cannot be made."""
        return all(count or place in (0, self.head) for place, count in enumerate(self.layers))


@lru_cache(maxsize=4096)
def equally(layers: int, stages: int) -> Split:
    """As many layers on each stage, the more in front; head and loss on the last."""
    counts = tuple(layers // stages + (1 if place < layers % stages else 0) for place in range(stages))
    return Split(counts, stages - 1, stages - 1)


@lru_cache(maxsize=4096)
def by_cost(layers: int, stages: int, head_layers: float) -> Split:
    """Parts handed out in order; one with which the sum of costs passes the stage's part of the whole begins the
    next.

    The parts are the layers, a final norm, the head (as costly as `head_layers` layers), a cast and the loss, the
    last two and the norm without cost: as nanotron's `build_and_set_rank` does with `get_block_compute_costs`.
    """
    whole = layers + head_layers
    counts, place, passed = [0] * stages, 0, 0.0
    places = []
    for part, cost in (*(("layer", 1.0) for _ in range(layers)), ("norm", 0.0), ("head", head_layers), *_FREE):
        passed += cost
        if place < stages - 1 and passed > whole * (place + 1) / stages * (1 + 1e-12):
            place += 1
        counts[place] += part == "layer"
        places.append(place)
    return Split(tuple(counts), places[-3], places[-1])


_FREE: Final = (("cast", 0.0), ("loss", 0.0))
"""Parts behind the head that cost nothing."""
