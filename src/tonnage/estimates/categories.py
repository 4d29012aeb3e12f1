"""Categories of blocks: parameters, gradients, optimizer states, communication, activations and workspaces.

A block is in the category that claims it (parameters, gradients, optimizer states, buffers of collectives), for its
whole life.  Of the others, what a forward pass allocates and does not free before it ends is an activation (kept for
backward), unless it is never freed (cuBLAS's workspace); so is what a program makes outside of any module, or in an
earlier backward pass, and a backward pass frees.  The rest is workspace.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from tonnage.estimates.asleep import ASLEEP, AWAKE
from tonnage.estimates.block_events import OOM, Events, Flags, Numbers
from tonnage.estimates.blocks import ACTIVATION, COMMUNICATION, PARAMETER, PRIORITY, WORKSPACE, Blocks, Owners
from tonnage.trace.trace import Trace

_FORWARD: Final = ("forward", "recompute")
_OUTSIDE: Final = ("load", "other")
_BACKWARD: Final = ("backward", "recompute")


def categorise(trace: Trace, events: Events, owners: Owners) -> Numbers:
    """Return the category of each block.  What a forward keeps beyond its own step is a library's workspace."""
    blocks = owners.blocks
    category = np.full(len(blocks.born), WORKSPACE)
    category[_is_kept_by_forward(events, blocks)] = ACTIVATION
    category[_is_being_loaded(trace, events, blocks)] = PARAMETER
    sent = _exchanged_memory(trace)
    claims = [
        (claim.mark, claim.address, PRIORITY.index(claim.category))
        for claim in trace.claims
        if claim.category not in (ASLEEP, AWAKE)
    ]
    claimed = np.array(claims, dtype=np.int64).reshape(-1, 3)
    for mark, address, code in (claimed.T, (*sent.T, np.full(len(sent), COMMUNICATION))):
        known = mark < len(events.begin)
        holder = owners.holding(address[known], events.begin[mark[known]])
        np.minimum.at(category, holder[holder >= 0], code[known][holder >= 0])
    received = owners.allocated_under(*sent.T)
    category[received] = np.minimum(category[received], COMMUNICATION)
    category[(category == ACTIVATION) & _outlives_its_step(events, blocks)] = WORKSPACE
    for first, later in _repetitions(trace, events, blocks):
        count = min(len(first), len(later))
        category[later[:count]] = category[first[:count]]
    return category


def _is_being_loaded(trace: Trace, events: Events, blocks: Blocks) -> Flags:
    """Return True for blocks that a program holds when memory runs out while it loads: weights, not yet claimed."""
    held: Flags = np.zeros(len(blocks.born), dtype=bool)
    if trace.outcome.get("kind") == "oom" and trace.outcome.get("phase") == "load":
        ran_out = events.of_kind(OOM)
        held |= blocks.died >= (ran_out[-1] if len(ran_out) else len(events))
    return held


def _repetitions(trace: Trace, events: Events, blocks: Blocks) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield for each repetition of a step's requests the blocks of the repeated step, and its own, in order.

    What the step freed is repeated; a repetition has fewer blocks if memory ran out.
    """
    if not trace.repeated:
        return
    start_of_step, *starts = events.begin[list(trace.repeated)].tolist()
    ends = [*starts[1:], len(events)]
    first = np.flatnonzero((blocks.gone >= start_of_step) & (blocks.gone < starts[0]))
    for start, end in zip(starts, ends, strict=True):
        yield first, np.flatnonzero((blocks.born >= start) & (blocks.born < end))


def _is_kept_by_forward(events: Events, blocks: Blocks) -> Flags:
    """Return True for blocks that a forward pass (or a recomputation) allocated and had not freed when it ended.

    It ends where the phase changes, where memory runs out (what it had kept is then freed), or with the trace.
    """
    forward = events.is_in(_FORWARD)
    changes = np.flatnonzero(forward[:-1] & (events.phase[1:] != events.phase[:-1])) + 1
    ends = np.sort(np.concatenate((events.begin[changes], events.of_kind(OOM), [len(events)])))
    end = ends[np.searchsorted(ends, blocks.born, side="right")]
    kept: Flags = forward[blocks.mark] & (blocks.died >= end)
    return kept | _is_freed_by_backward(events, blocks)


def _is_freed_by_backward(events: Events, blocks: Blocks) -> Flags:
    """Return True for blocks that were made outside of any module and freed by a backward pass, for which they were
    kept.

    Or made by an earlier backward pass: one that makes a graph itself (of a penalty on gradients).
    """
    outside, backward = events.is_in(_OUTSIDE), events.is_in(_BACKWARD)
    passes = np.cumsum(np.diff(backward, prepend=False))
    is_freed = blocks.died < len(events)
    taken: Flags = (outside | backward)[blocks.mark] & is_freed
    made, gone = blocks.mark[taken], events.mark[blocks.died[taken]]
    taken[taken] = backward[gone] & (passes[made] != passes[gone])
    return taken


def _exchanged_memory(trace: Trace) -> Numbers:
    """Return mark and address of what each collective reads or writes, a row each, every row once."""
    pairs = {
        (activity.mark, address)
        for activity in trace.activities("collective")
        for address in (activity.address, activity.address2)
    }
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)


def _outlives_its_step(events: Events, blocks: Blocks) -> Flags:
    """Return True for blocks that were never freed and belong to a step before the last."""
    outlived: Flags = (blocks.died == len(events)) & (events.step[blocks.mark] < events.step[-1])
    return outlived
