"""Memory that was given back to the card for a while although torch's allocator went on counting it.

vLLM's sleep mode unmaps the segments of a pool of its own.  The recorder claims each segment as `asleep` and, when
its memory is back, as `awake`; what lies on it has one life before and one after.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Final

import numpy as np

from tonnage.estimates.block_events import SEGMENT_ALLOC, Events, Numbers
from tonnage.estimates.blocks import Blocks
from tonnage.trace.trace import Trace

ASLEEP: Final = "asleep"
AWAKE: Final = "awake"


def without_sleep(trace: Trace, events: Events, blocks: Blocks) -> tuple[Blocks, Numbers]:
    """Return the blocks while they were on the card, and the bytes that were asleep after each number of events."""
    asleep = np.zeros(len(events) + 1, dtype=np.int64)
    for address, size, fell, woke in _iterate_sleeps(trace, events):
        asleep[fell + 1] += size
        asleep[woke] -= size if woke < len(events) else 0
        blocks = _interrupt(blocks, address, size, fell, woke if woke < len(events) else None)
    return blocks, asleep.cumsum()


def _iterate_sleeps(trace: Trace, events: Events) -> Iterator[tuple[int, int, int, int]]:
    """Yield address and bytes of each segment that slept, and the numbers of events before its sleep and its end."""
    since: dict[int, int] = {}
    made = events.of_kind(SEGMENT_ALLOC)
    sizes = dict(zip(events.address[made].tolist(), events.size[made].tolist(), strict=True))
    for mark, address, state in trace.claims:
        if state not in (ASLEEP, AWAKE) or mark >= len(events.begin):
            continue
        now = int(events.begin[mark])
        if state == ASLEEP:
            since.setdefault(address, now)
        elif address in since and now > since[address]:
            yield address, sizes.get(address, 0), since.pop(address), now
        else:
            since.pop(address, None)
    for address, fell in since.items():
        if fell < len(events):
            yield address, sizes.get(address, 0), fell, len(events)


def _interrupt(blocks: Blocks, address: int, size: int, fell: int, woke: int | None) -> Blocks:
    """Return the blocks, those on a segment that sleeps with two lives, or one if it stays so (`woke` is None)."""
    is_on_it = (blocks.address >= address) & (blocks.address < address + size)
    slept = is_on_it & (blocks.born < fell) & (blocks.died > fell)
    earlier = replace(blocks, died=np.where(slept, fell, blocks.died))
    if woke is None:
        return earlier
    again = slept & (blocks.died >= woke)
    later = {item.name: getattr(blocks, item.name)[again] for item in fields(blocks)}
    later["born"] = np.full(len(later["born"]), woke - 1)
    blocks = earlier
    joined = {name: np.concatenate((getattr(blocks, name), column)) for name, column in later.items()}
    order = np.argsort(joined["born"], kind="stable")
    return Blocks(**{name: column[order] for name, column in joined.items()})
