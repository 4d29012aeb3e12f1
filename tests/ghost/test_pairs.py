"""Events that the allocator need not write down: a block that is given back and taken at once."""

import sys
from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from networks import tiny_job
from tonnage.catalog.devices import parse_cluster
from tonnage.ghost.pool import request
from tonnage.ghost.process import INSIDE
from tonnage.plans import Plan
from tonnage.trace.trace import ACTIONS

sys.path.append(str(INSIDE))
from tonnage_inside import pairs


def record(kind: int) -> bytes:
    return bytes([kind]).ljust(64, b"\0")


def ghost(*kinds: int) -> SimpleNamespace:
    return SimpleNamespace(log_bytes=lambda: b"".join(map(record, kinds)))


def columns(*events: tuple[str, int]) -> dict[str, "array[int]"]:
    return {
        "action": array("q", [ACTIONS.index(action) for action, _ in events]),
        "address": array("q", [address for _, address in events]),
    }


def test_each_block_is_taken_behind_its_being_given_back() -> None:
    found = pairs.both(
        columns(("alloc", 512), ("free_requested", 512), ("oom", 0), ("free_requested", 1024)), ghost(1, 5)
    )
    assert found == columns(
        *(("alloc", 512), ("free_requested", 512), ("free_completed", 512), ("oom", 0)),
        *(("free_requested", 1024), ("free_completed", 1024)),
    )
    assert pairs.both(columns(), ghost()) == columns()


def test_nothing_is_certain_where_an_event_was_recorded() -> None:
    with pytest.raises(pairs.Uncertain):
        pairs.both(columns(("alloc", 512)), ghost(1, 14))


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("plan", "certain"),
    [
        (Plan(checkpointing="full", allocator="expandable"), True),
        (Plan(activation_offload="cpu"), False),
    ],
    ids=["plain", "offloaded"],
)
def test_the_events_are_those_that_the_allocator_writes(worker, plan, certain) -> None:
    """Also where it has to write down all, since copies on another stream let blocks wait."""
    job = tiny_job("llama", seq_len=256, grad_accum=2)
    asked = request(job, plan, parse_cluster("a100-40gb"), rank=0, steps=2)
    told, whole = (worker._traced(asked | {"every_event": every}) for every in (False, True))
    assert worker._traced(asked).event_count == whole.event_count
    assert (14 not in told.log[::64]) is certain
    assert told.event_count == whole.event_count
    for name in ("action", "mark"):
        assert told.event_columns[name] == whole.event_columns[name]
    assert sorted(told.event_columns["size"]) == sorted(whole.event_columns["size"])
    assert told.peaks == whole.peaks
    taken = np.flatnonzero(np.array(told.event_columns["action"]) == ACTIONS.index(pairs.TAKEN))
    assert len(taken) > 100
