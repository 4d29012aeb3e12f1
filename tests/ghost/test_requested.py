"""Which of a step's blocks the allocator asked the card for, by what it wrote down and what the ghost did."""

import sys
from array import array
from types import SimpleNamespace

import pytest

from tonnage.ghost.environment import PATH
from tonnage.trace.trace import Activity, pack_activity

sys.path.extend(PATH.split(":"))
from tonnage_inside import requested
from tonnage_recorder import written


def of_card(kind: str, block: int, count: int) -> bytes:
    return pack_activity(Activity(kind, "", block, 0, (0, 0, 0), 0, 0, count, 4096, 0), {"": 0})


def told(action: str, size: int) -> dict[str, object]:
    return {"action": action, "addr": 4096, "size": size, "stream": 0, "user_metadata": None}


def found(monkeypatch: pytest.MonkeyPatch, log: bytes, events: list[dict[str, object]]) -> list[int]:
    native = SimpleNamespace(log_bytes=lambda: log, log_cut=lambda count: None)
    watch = SimpleNamespace(native=native, marks=[], torch=None)
    monkeypatch.setattr(written, "events", lambda torch: events)
    asked = requested.Requested(watch, [], array("q", [requested.ALLOC, 512, 0] * 9))
    asked._asked.blocks = 9
    return asked._segment_events()[1].tolist()


def test_what_was_taken_in_pieces_is_for_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [("malloc", 0, 20), ("vm_map", 3, 2), ("vm_map", 3, 2), ("vm_map", 3, 2), ("free", 8, 20)]
    log = b"".join(of_card(*one) for one in taken) + of_card("kernel", 5, 99)
    events = [told("segment_alloc", 20), told("segment_map", 6), told("segment_free", 20), told("oom", 512)]
    assert found(monkeypatch, log, events) == [0, 3, 8, 9]


@pytest.mark.parametrize("events", [[told("segment_alloc", 21)], [told("segment_alloc", 20), told("segment_map", 2)]])
def test_what_the_ghost_did_not_give_is_no_place_to_guess_at(
    monkeypatch: pytest.MonkeyPatch, events: list[dict[str, object]]
) -> None:
    with pytest.raises(RuntimeError, match="do not agree with the ghost"):
        found(monkeypatch, of_card("malloc", 0, 20) + of_card("malloc", 1, 4), events)
