"""How the pieces of a step follow each other: pipelines, and what copies and exchanges hide behind."""

from functools import lru_cache


def pipeline_seconds(stages: tuple[float, ...], micro_batches: int, virtual_stages: int = 1) -> float:
    """Seconds of all micro-batches through a 1F1B pipeline whose stages take so long for one (forward + backward).

    The slowest stage works without a pause on m micro-batches; before its first and after its last it waits for the
    others: the sum of theirs, divided by the stages that each rank has of an interleaved pipeline (Narayanan et al.
    2021, arXiv:2104.04473, section 2.2: the bubble of p equal stages is (p - 1)/m of the work, (p - 1)/(v m) interleaved).
    """
    slowest = max(stages)
    return micro_batches * slowest + (sum(stages) - slowest) / virtual_stages


def bubble_fraction(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Idle time of equal stages relative to their work."""
    return (stages - 1) / (virtual_stages * micro_batches)


def exposed(copying: float, hiding: float, overlap: float = 1.0) -> float:
    """Seconds of a copy or an exchange that computation of so many seconds does not hide, if `overlap` of it can."""
    return max(copying - overlap * hiding, copying * (1 - overlap), 0.0)


@lru_cache(maxsize=4096)
def balanced(layers: int, stages: int, first: float, last: float, each: float) -> tuple[tuple[int, ...], float]:
    """Layers of each stage such that the slowest is fastest, and its seconds.

    `first` and `last` are what the embedding and the head take beside `each` layer.
    """
    if stages == 1:
        return (layers,), layers * each + first + last
    best: tuple[tuple[int, ...], float] | None = None
    for on_last in range(max(0, layers // stages - 12), layers // stages + 1):
        for on_first in range(max(0, layers // stages - 2), layers // stages + 2):
            between = layers - on_last - on_first
            if between < 0 or (stages == 2 and between):
                continue
            middle = _spread(between, stages - 2)
            slowest = max([first + on_first * each, last + on_last * each, *(n * each for n in middle)])
            if best is None or slowest < best[1]:
                best = ((on_first, *middle, on_last), slowest)
    return best if best is not None else ((layers,), layers * each + first + last)


def equal(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage as equal as they can be, the more in front."""
    return _spread(layers, stages)


def _spread(items: int, places: int) -> tuple[int, ...]:
    if places < 1:
        return ()
    return tuple(items // places + (1 if place < items % places else 0) for place in range(places))
