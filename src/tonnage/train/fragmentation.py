"""A watch on the caching allocator of a GPU: memory that it holds and cannot use, and searches for memory."""

from typing import Final

from tonnage.units import format_size, pluralise

_LARGE_GAP: Final = 0.2
"""Part of the reserved memory that may be unused at the peak before it is remarked."""

_NEARLY_FULL: Final = 0.9
"""Part of the card from which on a gap matters."""


def remark(
    *, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int, retries: int, expandable: bool
) -> str | None:
    """Return a line about fragmented memory with what to set; None if all is well.

    The bytes are peaks of the run; `retries` is how often the allocator freed all its cached blocks to find memory,
    which waits for the device each time.
    """
    gap = reserved_bytes - allocated_bytes
    is_gap = reserved_bytes >= _NEARLY_FULL * capacity_bytes and gap >= _LARGE_GAP * reserved_bytes
    if not retries and not is_gap:
        return None
    facts = [f"freed its cache {pluralise(retries, 'time')} to find memory, which is slow"] if retries else []
    facts += [f"holds {format_size(gap)} more than is in use"] if is_gap else []
    cure = (
        "a smaller micro-batch or more checkpointing leaves it room"
        if expandable
        else "plan with --allocator expandable, or leave it room"
    )
    return f"fragmentation: the allocator {' and '.join(facts)}; {cure}"
