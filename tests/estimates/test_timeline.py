"""Timelines short enough to add up by hand."""

import random
from array import array
from dataclasses import replace

import pytest

from allocator_programs import Replica, random_program
from tonnage.allocator import AllocatorSettings, CachingAllocator, Driver
from tonnage.estimates.timeline import timeline
from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS, EVENT_COLUMNS
from tonnage.trace.trace import Claim, Mark, Trace
from tonnage.units import MIB

STEP = (
    Mark(step=0, phase="load", module=""),
    Mark(step=0, phase="forward", module="layer"),
    Mark(step=0, phase="backward", module="layer"),
    Mark(step=0, phase="optimizer", module=""),
    Mark(step=0, phase="other", module=""),
)


def trace(events: list[tuple[str, int, int, int]], claims: tuple[Claim, ...] = (), conf: str = "") -> Trace:
    """Return a Trace of (action, address, requested size, mark) on stream 0."""
    columns = {name: array("q") for name in EVENT_COLUMNS}
    for action, address, size, mark in events:
        for name, value in zip(EVENT_COLUMNS, (ACTIONS.index(action), address, size, 0, mark), strict=True):
            columns[name].append(value)
    return Trace(
        source="ghost",
        versions={},
        device={},
        marks=STEP,
        claims=claims,
        event_columns=columns,
        allocator_settings=conf,
    )


def test_sizes_are_rounded_to_512_bytes() -> None:
    walked = timeline(trace([("segment_alloc", 0, 2 * MIB, 0), ("alloc", 0, 1, 0), ("alloc", 512, 513, 0)]))
    assert walked.peak_allocated_bytes == 512 + 1024
    assert walked.peak_reserved_bytes == 2 * MIB


def test_a_remainder_of_up_to_one_mib_belongs_to_the_block() -> None:
    # 19.5 MiB of a 20 MiB segment: the half MiB behind it is never split off
    walked = timeline(trace([("segment_alloc", 0, 20 * MIB, 0), ("alloc", 0, 19 * MIB + MIB // 2, 0)]))
    assert walked.peak_allocated_bytes == 20 * MIB


def test_a_larger_remainder_is_free_memory() -> None:
    walked = timeline(trace([("segment_alloc", 0, 20 * MIB, 0), ("alloc", 0, 18 * MIB, 0)]))
    assert walked.peak_allocated_bytes == 18 * MIB


def test_the_neighbour_bounds_the_slack() -> None:
    # A takes 4 of 20, B takes 4 behind it; A is given back and C of 3.5 MiB takes its place and its last half MiB
    events = [
        ("segment_alloc", 0, 20 * MIB, 0),
        ("alloc", 0, 4 * MIB, 0),
        ("alloc", 4 * MIB, 4 * MIB, 0),
        ("free_requested", 0, 4 * MIB, 0),
        ("free_completed", 0, 4 * MIB, 0),
        ("alloc", 0, 7 * MIB // 2, 0),
    ]
    walked = timeline(trace(events))
    assert [life.size_bytes for life in walked.lives] == [4 * MIB] * 3


def test_expandable_segments_have_no_slack() -> None:
    events = [("segment_map", 0, 20 * MIB, 0), ("alloc", 0, 19 * MIB + MIB // 2, 0)]
    walked = timeline(trace(events, conf="expandable_segments:True"))
    assert walked.peak_allocated_bytes == 19 * MIB + MIB // 2
    assert walked.peak_reserved_bytes == 20 * MIB


def test_what_a_forward_leaves_alive_is_activation_and_the_rest_workspace() -> None:
    events = [
        ("segment_alloc", 0, 2 * MIB, 1),
        ("alloc", 0, 512, 1),  # kept for backward
        ("alloc", 512, 1024, 1),  # freed within forward
        ("free_requested", 512, 1024, 1),
        ("free_completed", 512, 1024, 1),
        ("alloc", 512, 2048, 2),  # a temporary of backward: the peak
        ("free_requested", 512, 2048, 2),
        ("free_completed", 512, 2048, 2),
        ("free_requested", 0, 512, 2),
        ("free_completed", 0, 512, 2),
    ]
    walked = timeline(trace(events))
    held = walked.by_category()
    assert (held["activation"], held["workspace"]) == (512, 2048)
    assert sum(held.values()) == walked.peak_allocated_bytes == 2560
    assert walked.marks[walked.peak_mark].phase == "backward"


def test_what_a_forward_never_gives_back_is_workspace() -> None:
    marks = (Mark(step=0, phase="forward", module=""), Mark(step=0, phase="backward", module=""))
    marks += tuple(Mark(step=1, phase=mark.phase, module="") for mark in marks)
    first = trace([("segment_alloc", 0, 2 * MIB, 0), ("alloc", 0, 512, 0), ("alloc", 512, 1024, 2)])
    held = timeline(replace(first, marks=marks)).by_category()
    # the block of the first forward outlives its step; the second one may still be given back
    assert (held["workspace"], held["activation"]) == (512, 1024)


def test_a_claim_holds_for_the_whole_life_and_for_inner_addresses() -> None:
    events = [
        ("segment_alloc", 0, 2 * MIB, 0),
        ("alloc", 0, 4096, 0),
        ("alloc", 4096, 512, 2),
        ("free_requested", 4096, 512, 4),
    ]
    claims = (
        Claim(mark=1, address=1024, category="parameter"),
        Claim(mark=3, address=4096, category="gradient"),
    )
    held = timeline(trace(events, claims)).by_category()
    assert (held["parameter"], held["gradient"], held["workspace"]) == (4096, 512, 0)


def test_a_claim_on_memory_that_was_given_back_claims_nothing() -> None:
    events = [
        ("segment_alloc", 0, 2 * MIB, 0),
        ("alloc", 0, 512, 0),
        ("free_requested", 0, 512, 0),
        ("free_completed", 0, 512, 0),
    ]
    walked = timeline(trace(events, (Claim(mark=1, address=0, category="parameter"),)))
    assert walked.by_category()["workspace"] == 512


def test_each_mark_knows_its_highest_use_including_what_it_began_with() -> None:
    events = [
        ("segment_alloc", 0, 2 * MIB, 0),
        ("alloc", 0, 1024, 0),
        ("alloc", 1024, 512, 2),
        ("free_requested", 1024, 512, 2),
    ]
    walked = timeline(trace(events))
    assert walked.allocated_by_mark.tolist() == [1024, 1024, 1536, 1024, 1024]


def test_an_empty_trace_has_no_peak() -> None:
    walked = timeline(Trace(source="ghost", versions={}, device={}))
    assert (walked.peak_allocated_bytes, walked.peak_reserved_bytes, walked.lives) == (0, 0, ())


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "roundup_power2_divisions:4"])
@pytest.mark.parametrize("seed", range(4))
def test_the_levels_are_those_of_the_allocator(seed: int, conf: str) -> None:
    """Random programs that run out of memory, free segments and use several streams, on the replica."""
    allocator = CachingAllocator(Driver(2**30), AllocatorSettings.parse(conf))
    Replica(allocator, [0, 1, 2], []).run(random_program(seed, 400))
    events = [(event.action, event.address, event.size_bytes, 0) for event in allocator.events]
    statistics = allocator.memory_stats()
    walked = timeline(trace(events, conf=conf))
    assert walked.peak_allocated_bytes == statistics["allocated_bytes.all.peak"]
    assert walked.peak_reserved_bytes == statistics["reserved_bytes.all.peak"]
    left = sum(life.size_bytes for life in walked.lives if life.died == len(events))
    assert left == statistics["allocated_bytes.all.current"]


@pytest.mark.parametrize("seed", range(3))
def test_a_claim_finds_the_block_around_any_address_at_its_time(seed: int) -> None:
    """The search by address, against a check of every block."""
    allocator = CachingAllocator(Driver(2**31), AllocatorSettings())
    Replica(allocator, [0, 1, 2], []).run(random_program(seed, 200))
    rng = random.Random(seed)
    marks = sorted(rng.randrange(len(STEP)) for _ in allocator.events)
    events = [
        (event.action, event.address, event.size_bytes, mark)
        for event, mark in zip(allocator.events, marks, strict=True)
    ]
    plain = trace(events)
    lives = timeline(plain).lives
    for event in rng.sample(allocator.events, 15):
        claim = Claim(
            mark=rng.randrange(len(STEP)), address=event.address + rng.choice((0, 512, MIB)), category="gradient"
        )
        time = (
            marks.index(claim.mark) if claim.mark in marks else next(i for i, m in enumerate(marks) if m > claim.mark)
        )
        expected = [
            life.born
            for life in lives
            if life.born < time <= life.died and life.address <= claim.address < life.address + life.size_bytes
        ]
        claimed = timeline(replace(plain, claims=(claim,))).lives
        assert [life.born for life in claimed if life.category == "gradient"] == expected


def test_the_most_since_an_event() -> None:
    events = [
        ("segment_alloc", 0, 20 * MIB, 0),
        ("alloc", 0, 12 * MIB, 0),
        ("free_requested", 0, 12 * MIB, 1),
        ("free_completed", 0, 12 * MIB, 1),
        ("alloc", 0, 4 * MIB, 2),
        ("alloc", 4 * MIB, 2 * MIB, 2),
    ]
    walked = timeline(trace(events))
    assert [walked.highest_since(event) // MIB for event in (0, 1, 2, 4, 5)] == [12, 12, 6, 6, 6]
    assert timeline(trace([])).highest_since(3) == 0


@pytest.mark.parametrize(
    ("wakes", "allocated", "reserved"), [(True, 34, 64), (False, 34, 44)], ids=["wakes", "stays"]
)
def test_memory_that_sleeps_is_not_held(wakes: bool, allocated: int, reserved: int) -> None:
    pool, other = 0, 256 * MIB
    events = [
        *(("segment_alloc", pool, 20 * MIB, 0), ("alloc", pool, 16 * MIB, 0)),
        *(("segment_alloc", other, 40 * MIB, 1), ("alloc", other, 34 * MIB, 1)),
        *(("free_requested", other, 34 * MIB, 1), ("free_completed", other, 34 * MIB, 1)),
        *(("segment_alloc", 2 * other, 4 * MIB, 2), ("alloc", 2 * other, 2 * MIB, 2)),
    ]
    asleep = Claim(mark=1, address=pool, category="asleep")
    claims = (Claim(mark=1, address=pool, category="kv_cache"), asleep)
    claims = (*claims, Claim(mark=2, address=pool, category="awake")) if wakes else claims
    walked = timeline(trace(events, claims))
    assert walked.peak_allocated_bytes == allocated * MIB
    assert {name: size for name, size in walked.by_category().items() if size} == {"workspace": allocated * MIB}
    assert walked.peak_reserved_bytes == reserved * MIB
    assert walked.counted_bytes == (50 * MIB, 64 * MIB), "torch goes on counting it"
    lives = [(life.born, life.died, life.category) for life in walked.lives if life.address == pool]
    assert lives == [(1, 2, "kv_cache"), *([(5, 8, "kv_cache")] if wakes else [])]
