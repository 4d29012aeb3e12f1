"""Order of the pieces of a step: pipelines, and the computation that hides copies and exchanges."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final


def pipeline_seconds(stages: tuple[float, ...], micro_batches: int, virtual_stages: int = 1) -> float:
    """Return the seconds of all micro-batches through a 1F1B pipeline.

    `stages`: seconds of each stage for one micro-batch, forward and backward.  The slowest stage works without a
    pause on m micro-batches; before its first and after its last it waits for the others: the sum of their seconds,
    divided by the stages that each rank has of an interleaved pipeline (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2: the bubble of p equal stages is (p - 1)/m of the work, (p - 1)/(v m) interleaved).
    """
    slowest = max(stages)
    return micro_batches * slowest + (sum(stages) - slowest) / virtual_stages


def exposed_seconds(copying: float, hiding: float, overlap: float = 1.0) -> float:
    """Return the seconds of a copy or an exchange that computation of `hiding` seconds does not hide.

    `overlap`: the part of it that can be hidden.  An exchange beside computation slows the computation down, not
    itself: a product of 9.0 ms and a collective of 16.8 take
    17.1 together, one of 34.8 ms takes 42.8 (Mist's overlap runs on 8 A100).
    """
    return max(copying - hiding, copying * (1 - overlap), 0.0)


@dataclass(frozen=True, slots=True)
class Split:
    """Parts of a network on each stage of a pipeline."""

    layers: tuple[int, ...]
    """Layers of each stage."""
    head: int
    """The stage with the product with all words."""
    loss: int
    """The stage with the loss."""

    @property
    def filled(self) -> bool:
        """True if each stage has weights: without any, its optimizer has nothing to do and cannot be made."""
        return all(count or stage in (0, self.head) for stage, count in enumerate(self.layers))


@lru_cache(maxsize=4096)
def split_equally(layers: int, stages: int) -> Split:
    """Return equally many layers for each stage, one more in front where they do not divide; head and loss last."""
    counts = tuple(layers // stages + (1 if stage < layers % stages else 0) for stage in range(stages))
    return Split(counts, stages - 1, stages - 1)


@lru_cache(maxsize=4096)
def split_by_cost(layers: int, stages: int, head_layers: float) -> Split:
    """Return a split by cost: the part with which the sum of costs passes a stage's share begins the next stage.

    The parts are the layers, a final norm, the head (as costly as `head_layers` layers), a cast and the loss, the
    last two and the norm without cost: as nanotron's `build_and_set_rank` does with `get_block_compute_costs`.
    """
    whole = layers + head_layers
    counts, stage, passed = [0] * stages, 0, 0.0
    stage_of_part = []
    for part, cost in (*(("layer", 1.0) for _ in range(layers)), ("norm", 0.0), ("head", head_layers), *_FREE):
        passed += cost
        if stage < stages - 1 and passed > whole * (stage + 1) / stages * (1 + 1e-12):
            stage += 1
        counts[stage] += part == "layer"
        stage_of_part.append(stage)
    return Split(tuple(counts), stage_of_part[-3], stage_of_part[-1])


_FREE: Final = (("cast", 0.0), ("loss", 0.0))
"""Parts behind the head that cost nothing."""
