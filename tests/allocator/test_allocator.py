"""The allocator replica: short sequences with results derived by hand, then invariants under random sequences."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allocator_programs import Replica, random_program
from tonnage.allocator import (
    AllocatorSettings,
    CachingAllocator,
    Driver,
    OutOfMemory,
    Segment,
    SegmentBlock,
    replay,
)
from tonnage.allocator.settings import tie_rule
from tonnage.errors import UsageError
from tonnage.trace.trace import Event
from tonnage.units import GIB, MIB


def allocator(text: str = "", total: int = GIB, *, version: str = "2.13", lazy: bool = False) -> CachingAllocator:
    return CachingAllocator(Driver(total), AllocatorSettings.parse(text), torch_version=version, lazy=lazy)


def actions(device: CachingAllocator) -> list[str]:
    return [event.action for event in device.events]


# --- sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (101 * MIB, 101 * MIB, 102 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(requested: int, block: int, segment: int) -> None:
    assert AllocatorSettings().round_size(requested) == block
    assert AllocatorSettings().segment_size(block) == segment


def test_powers_of_two_with_divisions() -> None:
    four = AllocatorSettings.parse("roundup_power2_divisions:4")
    assert four.round_size(2048) == 2048  # not above 4 * 512: multiples of 512
    assert four.round_size(2049) == 2560
    assert four.round_size(5 * MIB + 1) == 6 * MIB  # between 4 and 8 MiB: 5, 6, 7
    assert four.round_size(8 * MIB) == 8 * MIB
    by_size = AllocatorSettings.parse("roundup_power2_divisions:[4:2,16:4,>:1]")
    assert by_size.round_size(5 * MIB) == 6 * MIB  # between 4 and 8 MiB: 6
    assert by_size.round_size(9 * MIB + 1) == 9 * MIB + 512  # 8 MiB was left out
    assert by_size.round_size(17 * MIB) == 20 * MIB  # between 16 and 32 MiB: 20, 24, 28
    assert by_size.round_size(33 * MIB + 1) == 33 * MIB + 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:19", "max_split_size_mb: 19 is too small; at least 20"),
        ("large_segment_size_mb:64,max_split_size_mb:32", "max_split_size_mb: 32 is too small; at least 64"),
        ("max_split_size_mb:128.5", "'128.5' is not a whole number"),
        ("max_split_size_mb:-1", "'-1' is not a whole number"),
        ("max_split_size_mb", "must be name:value"),
        ("max_split_size_mb:[1:2]", "takes one value"),
        ("roundup_power2_divisions:[1:2", "no closing bracket"),
        ("roundup_power2_divisions:[1:2]3", "expected a comma"),
        ("roundup_power2_divisions:6", "6 divisions are not a power of two"),
        ("roundup_power2_divisions:[3:2]", "the size 3 is not a power of two"),
        ("expandable_segments:yes", "'yes' is neither True nor False"),
        ("garbage_collection_threshold:1.0", "1.0 is not between 0 and 1"),
        ("per_process_memory_fraction:nan", "nan is not in [0, 1]"),
        ("per_process_memory_fraction:half", "'half' is not a number"),
        ("backend:cudaMallocAsync", "only backend:native"),
        ("max_split_size:128", "Unknown allocator option 'max_split_size'; possible: backend"),
    ],
)
def test_errors_name_the_option(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        AllocatorSettings.parse(text)
    assert message in str(raised.value)


def test_options_of_later_versions_are_refused_for_earlier_ones() -> None:
    text = "large_segment_size_mb:64"
    assert AllocatorSettings.parse(text, torch_version="2.11.0").large_segment_bytes == 64 * MIB
    with pytest.raises(UsageError, match=r"came with torch 2\.11"):
        AllocatorSettings.parse(text, torch_version="2.10.0")


@given(st.text(alphabet="abcmx_:,[]>0123456789. ", max_size=60))
def test_any_text_is_settings_or_a_one_line_error(text: str) -> None:
    try:
        divisions = AllocatorSettings.parse(text).roundup_power2_divisions
    except UsageError as error:
        message = str(error)
    else:
        message = ""
        assert len(divisions) == 16
    assert "\n" not in message


@pytest.mark.parametrize(
    ("version", "rule"),
    [
        ("2.8.0+cu128", "address"),
        ("2.11.0", "address"),
        ("2.12.1", "block"),
        ("2.13.0", "segment"),
        ("3.0", "segment"),
    ],
)
def test_tie_rules_by_version(version: str, rule: str) -> None:
    assert tie_rule(version) == rule


# --- splitting, merging, choosing -----------------------------------------------------------------------------


def test_small_requests_share_a_segment_and_merge_again() -> None:
    device = allocator()
    first, second = device.malloc(1000), device.malloc(600)
    assert second - first == 1024
    assert device.reserved_bytes == 2 * MIB
    assert device.allocated_bytes == 1024 + 1024
    device.free(first)
    assert [block.size_bytes for block in device.segments()[0].blocks] == [1024, 1024, 2 * MIB - 2048]
    device.free(second)
    assert [block.size_bytes for block in device.segments()[0].blocks] == [2 * MIB]
    assert actions(device) == ["segment_alloc", "alloc", "alloc", *["free_requested", "free_completed"] * 2]


def test_large_block_keeps_a_rest_of_up_to_1_mib() -> None:
    device = allocator()
    keeps = device.malloc(19 * MIB + 1)  # 20 MiB segment: the rest is below 1 MiB
    splits = device.malloc(18 * MIB + 512)  # 20 MiB segment: the rest is 2 MiB - 512
    assert device.block_size(keeps) == 20 * MIB
    assert device.block_size(splits) == 18 * MIB + 512
    assert device.memory_stats()["requested_bytes.all.current"] == 37 * MIB + 513


def test_smallest_fitting_block_is_taken() -> None:
    device = allocator()
    blocks = [device.malloc(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        device.free(block)
    assert device.malloc(20 * MIB) == blocks[1]
    assert device.malloc(25 * MIB) == blocks[2]


def test_streams_do_not_share_blocks() -> None:
    device = allocator()
    block = device.malloc(20 * MIB, stream=7)
    device.free(block)
    assert device.malloc(20 * MIB, stream=0) != block
    assert device.malloc(20 * MIB, stream=7) == block


OLD, NEW = 64 * MIB, 32 * MIB  # where the driver places the first and the second segment


@pytest.mark.parametrize(("version", "taken"), [("2.11", NEW), ("2.12", OLD), ("2.13", OLD)])
def test_equal_blocks_are_chosen_by_address_or_age(version: str, taken: int) -> None:
    driver = Driver(GIB, recorded_addresses=[OLD, NEW])
    device = CachingAllocator(driver, torch_version=version)
    for block in [device.malloc(20 * MIB), device.malloc(20 * MIB)]:
        device.free(block)
    assert device.malloc(20 * MIB) == taken


@pytest.mark.parametrize(("version", "taken"), [("2.11", NEW), ("2.12", NEW), ("2.13", OLD)])
def test_equal_blocks_are_chosen_by_age_of_block_or_segment(version: str, taken: int) -> None:
    """The older segment is split after the newer one was obtained, so its first half is the newest block."""
    driver = Driver(GIB, recorded_addresses=[OLD, NEW])
    device = CachingAllocator(driver, torch_version=version)
    whole, newer = device.malloc(40 * MIB), device.malloc(20 * MIB)
    device.free(whole)
    half, _other_half = device.malloc(20 * MIB), device.malloc(20 * MIB)
    assert half == OLD
    device.free(half)
    device.free(newer)
    assert device.malloc(20 * MIB) == taken


def test_oversize_blocks_are_not_split() -> None:
    device = allocator("max_split_size_mb:20")
    big = device.malloc(100 * MIB)
    device.free(big)
    assert device.malloc(10 * MIB) != big  # below the limit: must not split it
    assert device.malloc(70 * MIB) != big  # 100 is not below 70 + 20
    assert device.malloc(90 * MIB) == big
    assert device.block_size(big) == 100 * MIB
    assert device.memory_stats()["oversize_allocations.current"] == 2


# --- other streams --------------------------------------------------------------------------------------------


def test_block_used_on_another_stream_waits_for_it() -> None:
    device = allocator(lazy=True)
    block = device.malloc(20 * MIB)
    device.record_stream(block, 5)
    device.free(block)
    assert device.allocated_bytes == 0
    assert device.memory_stats()["active_bytes.all.current"] == 20 * MIB
    assert device.segments()[0].blocks[0].state == "active_pending_free"
    assert device.malloc(20 * MIB) != block
    device.synchronise(stream=5)
    assert device.malloc(20 * MIB) == block


def test_block_does_not_wait_for_its_own_stream() -> None:
    device = allocator(lazy=True)
    block = device.malloc(20 * MIB, stream=5)
    device.record_stream(block, 5)
    device.free(block)
    assert device.malloc(20 * MIB, stream=5) == block


def test_running_out_of_memory_waits_for_all_streams() -> None:
    device = allocator(total=64 * MIB, lazy=True)
    block = device.malloc(60 * MIB)
    device.record_stream(block, 5)
    device.free(block)
    device.malloc(62 * MIB)  # another size: the waiting block is freed and given back first
    assert device.counters["num_sync_all_streams"] == device.counters["num_alloc_retries"] == 1


# --- running out ----------------------------------------------------------------------------------------------


def test_out_of_memory_states_sizes() -> None:
    device = allocator(total=100 * MIB)
    device.malloc(60 * MIB)
    device.free(device.malloc(512))
    with pytest.raises(OutOfMemory) as raised:
        device.malloc(45 * MIB + 1)
    shortage = raised.value.shortage
    assert (shortage.requested_bytes, shortage.segment_bytes) == (45 * MIB + 512, 46 * MIB)
    assert (shortage.allocated_bytes, shortage.reserved_bytes) == (60 * MIB, 60 * MIB)  # the small one was given back
    assert shortage.free_bytes == 40 * MIB
    assert actions(device)[-2:] == ["segment_free", "oom"]
    assert device.events[-1][1:3] == (40 * MIB, 45 * MIB + 512)


def test_split_segments_cannot_be_given_back() -> None:
    """Fragmentation: 50 of 60 MiB are free, but a request of 40 MiB fails."""
    device = allocator(total=60 * MIB)
    device.free(device.malloc(60 * MIB))
    blocks = [device.malloc(size * MIB) for size in (25, 5, 25, 5)]
    assert len(device.segments()) == 1
    device.free(blocks[0])
    device.free(blocks[2])
    with pytest.raises(OutOfMemory):
        device.malloc(40 * MIB)


def test_memory_fraction_limits_reserved_bytes() -> None:
    device = allocator("per_process_memory_fraction:0.5", total=200 * MIB)
    device.malloc(90 * MIB)
    with pytest.raises(OutOfMemory):
        device.malloc(20 * MIB)
    device.set_memory_fraction(1.0)
    device.malloc(20 * MIB)


def test_garbage_collection_gives_back_the_oldest() -> None:
    device = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:0.5", total=400 * MIB)
    old, young = device.malloc(60 * MIB), device.malloc(42 * MIB)
    device.free(old)
    device.free(device.malloc(30 * MIB, stream=3))
    device.free(young)
    device.malloc(64 * MIB)  # 132 MiB of 200 are reserved; the threshold is 100
    assert ("segment_free", 60 * MIB) in [(event.action, event.size_bytes) for event in device.events]
    assert device.counters["num_alloc_retries"] == 0


def test_rejection_does_not_retry() -> None:
    device = allocator("throw_on_cudamalloc_oom:True", total=64 * MIB)
    device.free(device.malloc(60 * MIB))
    with pytest.raises(OutOfMemory):
        device.malloc(62 * MIB)
    assert device.reserved_bytes == 60 * MIB
    assert device.counters["num_oom_rejections"] == 1
    assert "oom" not in actions(device)


# --- expandable segments --------------------------------------------------------------------------------------


def test_expandable_segments_grow_by_pages_of_20_mib() -> None:
    device = allocator("expandable_segments:True")
    first = device.malloc(30 * MIB)
    assert device.reserved_bytes == 40 * MIB
    second = device.malloc(12 * MIB)  # 10 MiB are free behind the first: one more page
    assert second == first + 30 * MIB
    assert device.reserved_bytes == 60 * MIB
    assert [event.size_bytes for event in device.events if event.action == "segment_map"] == [40 * MIB, 20 * MIB]
    assert device.memory_stats()["segment.all.current"] == 0


def test_expandable_segments_give_whole_free_pages_back() -> None:
    device = allocator("expandable_segments:True")
    first, second, third = (device.malloc(30 * MIB) for _ in range(3))
    device.free(second)  # 30 to 60 MiB: one whole page, from 40 to 60
    device.empty_cache()
    assert device.events[-1][:3] == ("segment_unmap", first + 40 * MIB, 20 * MIB)
    assert device.reserved_bytes == 80 * MIB
    assert [segment.address for segment in device.segments()] == [first, third]
    assert device.malloc(25 * MIB) == second  # the gap is filled again
    assert device.reserved_bytes == 100 * MIB


def test_expandable_segments_do_not_fragment() -> None:
    device = allocator("expandable_segments:True", total=64 * MIB)
    blocks = [device.malloc(size * MIB) for size in (25, 5, 25)]
    device.free(blocks[0])
    device.free(blocks[1])
    device.free(blocks[2])
    device.malloc(60 * MIB)


# --- private pools --------------------------------------------------------------------------------------------


def test_private_pool_keeps_its_memory_until_it_is_released() -> None:
    device = allocator()
    device.create_pool((0, 1))
    device.begin_pool((0, 1))
    block = device.malloc(20 * MIB)
    device.end_pool((0, 1))
    device.release_pool((0, 1))
    device.free(block)
    assert device.malloc(20 * MIB) != block
    device.empty_cache()
    assert device.reserved_bytes == 40 * MIB
    device.release_pool((0, 1))
    device.empty_cache((0, 1))
    assert device.reserved_bytes == 20 * MIB
    assert device.memory_stats()["reserved_bytes_by_private_pools.0_1.all.peak"] == 20 * MIB


def test_released_pool_is_kept_while_one_of_its_blocks_is_used() -> None:
    """One expansion of 100 MiB, of which 40 are given back: by torch's count of expansions nothing is left."""
    device = allocator("expandable_segments:True")
    device.begin_pool((0, 1))
    device.free(device.malloc(100 * MIB))
    block = device.malloc(45 * MIB)
    device.end_pool((0, 1))
    device.release_pool((0, 1))
    device.empty_cache((0, 1))
    assert device.reserved_bytes == sum(segment.size_bytes for segment in device.segments()) == 60 * MIB
    device.free(block)
    device.empty_cache((0, 1))
    assert device.reserved_bytes == 0
    assert not device.heap.private


def test_private_pool_can_serve_other_requests_when_memory_runs_out() -> None:
    device = allocator(total=50 * MIB)
    device.create_pool((0, 1), use_on_oom=True)
    device.begin_pool((0, 1))
    block = device.malloc(30 * MIB)
    device.end_pool((0, 1))
    device.free(block)
    assert device.malloc(25 * MIB) == block


def test_misuse_raises_value_error() -> None:
    device = allocator()
    with pytest.raises(ValueError, match="at least 1"):
        device.malloc(0)
    with pytest.raises(ValueError, match="0x200 is not the address"):
        device.free(512)
    with pytest.raises(ValueError, match="not in use"):
        device.end_pool((0, 1))
    device.begin_pool((0, 1))
    with pytest.raises(ValueError, match="in use already"):
        device.begin_pool((0, 1))


# --- statistics -----------------------------------------------------------------------------------------------


def test_statistics_of_one_split() -> None:
    device = allocator()
    first = device.malloc(3 * MIB)  # 20 MiB segment: 17 MiB are left
    numbers = device.memory_stats()
    assert numbers["inactive_split.large_pool.current"] == 1
    assert numbers["inactive_split_bytes.all.current"] == 17 * MIB
    device.malloc(16 * MIB)  # the rest, with 1 MiB of slack
    numbers = device.memory_stats()
    assert numbers["inactive_split.all.current"] == numbers["inactive_split_bytes.all.current"] == 0
    assert numbers["allocated_bytes.large_pool.current"] == 20 * MIB
    device.free(first)
    numbers = device.memory_stats()
    assert numbers["inactive_split_bytes.all.current"] == 3 * MIB
    assert numbers["allocated_bytes.all.peak"] == 20 * MIB
    device.reset_peak_memory_stats()
    device.reset_accumulated_memory_stats()
    numbers = device.memory_stats()
    assert numbers["allocated_bytes.all.peak"] == 17 * MIB
    assert numbers["allocated_bytes.all.allocated"] == numbers["num_device_alloc"] == 0


# --- invariants -----------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:40",
        "roundup_power2_divisions:4",
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5",
        "expandable_segments:True,per_process_memory_fraction:0.5",
    ]
)


@example(
    seed=105832,
    text="expandable_segments:True,per_process_memory_fraction:0.5",
    total=256 * MIB,
    version="2.13",
    lazy=False,
    pools=True,
)
@given(
    seed=st.integers(0, 2**32),
    text=TEXTS,
    total=st.sampled_from([256 * MIB, GIB, 8 * GIB]),
    version=st.sampled_from(["2.8", "2.12", "2.13"]),
    lazy=st.booleans(),
    pools=st.booleans(),
)
def test_invariants(seed: int, text: str, total: int, version: str, lazy: bool, pools: bool) -> None:
    device = allocator(text, total, version=version, lazy=lazy)
    replica = Replica(device, [0, 1, 2], [(0, 1)])
    for number, operation in enumerate(random_program(seed, 120, pools=pools)):
        replica.run([operation])
        if number % 10 == 0:
            check(device)
    check(device)
    for address in filter(None, replica.addresses):
        device.free(address)
    device.synchronise()
    device.empty_cache()
    check(device)
    assert device.allocated_bytes == 0
    assert device.memory_stats()["active.all.current"] == 0
    if "expandable" not in text:
        assert device.reserved_bytes == device.driver.used_bytes == 0


def check(device: CachingAllocator) -> None:
    """Assert that no blocks overlap, that splitting loses nothing, and that all counts agree with the segments."""
    segments = device.segments()
    numbers = device.memory_stats()
    end = 0
    for segment in segments:
        assert segment.address >= end
        end = segment.address
        for block in segment.blocks:
            assert block.address == end
            assert block.size_bytes > 0
            assert block.size_bytes % 512 == 0
            assert block.requested_bytes <= block.size_bytes or block.state == "inactive"
            end += block.size_bytes
        neighbours = zip(segment.blocks, segment.blocks[1:], strict=False)
        assert not any(first.state == second.state == "inactive" for first, second in neighbours)
    assert sum(segment.size_bytes for segment in segments) == device.reserved_bytes == device.driver.used_bytes
    assert sum(segment.allocated_bytes for segment in segments) == device.allocated_bytes
    assert sum(segment.active_bytes for segment in segments) == numbers["active_bytes.all.current"]
    assert device.allocated_bytes <= numbers["active_bytes.all.current"] <= device.reserved_bytes
    assert device.reserved_bytes <= device.driver.total_bytes
    for name in ("allocated_bytes", "reserved_bytes", "active", "segment"):
        small, large = (numbers[f"{name}.{pool}_pool.current"] for pool in ("small", "large"))
        assert small + large == numbers[f"{name}.all.current"] <= numbers[f"{name}.all.peak"]


# --- replays --------------------------------------------------------------------------------------------------


def recorded(text: str = "", total: int = 4 * GIB, seed: int = 3) -> CachingAllocator:
    device = allocator(text, total)
    Replica(device, [0, 1, 2]).run(random_program(seed, 400))
    device.reset_peak_memory_stats()
    return device


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:64"])
def test_replay_with_recorded_settings_equals_the_recording(text: str) -> None:
    device = recorded(text)
    again = replay(device.events, device.settings, 4 * GIB, recorded_limit_bytes=4 * GIB)
    assert list(again.events) == device.events
    assert again.fits
    assert again.segments == device.segments()
    assert again.unmatched_frees == 0


def test_events_of_the_peaks() -> None:
    events = [
        Event("segment_alloc", 64 * MIB, 20 * MIB, 0, 1),
        Event("alloc", 64 * MIB, 12 * MIB, 0, 1),
        Event("alloc", 80 * MIB, 30 * MIB, 0, 2),
        Event("free_requested", 80 * MIB, 30 * MIB, 0, 2),
        Event("free_completed", 80 * MIB, 30 * MIB, 0, 2),
        Event("alloc", 200 * MIB, 32 * MIB, 0, 3),
    ]
    result = replay(events, AllocatorSettings(), GIB)
    assert (result.peak_allocated_bytes, result.peak_allocated_at) == (44 * MIB, 5)
    assert (result.peak_reserved_bytes, result.peak_reserved_at) == (74 * MIB, 5)
    assert [event.mark for event in result.events] == [1, 1, 2, 2, 2, 2, 3, 3]


def test_smaller_card_runs_out_of_memory() -> None:
    events = [Event("alloc", number * GIB, 30 * MIB, 0, number) for number in range(1, 5)]
    result = replay(events, AllocatorSettings(), 128 * MIB, taken_bytes=20 * MIB)
    assert not result.fits
    assert result.stopped_at == 3
    assert result.shortage is not None
    assert (result.shortage.mark, result.shortage.free_bytes) == (4, 18 * MIB)
    assert result.peak_allocated_bytes == 90 * MIB


def test_frees_of_older_blocks_are_counted() -> None:
    events = [Event("free_requested", 512, 512, 0, 0), Event("free_completed", 512, 512, 0, 0)]
    assert replay(events, AllocatorSettings(), GIB).unmatched_frees == 1


def test_segments_before_the_recording_are_restored() -> None:
    before = Segment(
        address=64 * MIB,
        stream=0,
        is_small=False,
        blocks=(
            SegmentBlock(64 * MIB, 5 * MIB, 5 * MIB, "active_allocated"),
            SegmentBlock(69 * MIB, 5 * MIB, 0, "inactive"),
            SegmentBlock(74 * MIB, 10 * MIB, 10 * MIB, "active_pending_free"),
        ),
    )
    events = [
        Event("alloc", 69 * MIB, 5 * MIB, 0, 0),
        Event("free_completed", 74 * MIB, 10 * MIB, 0, 0),
        Event("free_requested", 64 * MIB, 5 * MIB, 0, 0),
        Event("free_completed", 64 * MIB, 5 * MIB, 0, 0),
    ]
    result = replay(events, AllocatorSettings(), GIB, before=[before])
    assert list(result.events) == events
    (segment,) = result.segments
    assert [(block.size_bytes, block.state) for block in segment.blocks] == [
        (5 * MIB, "inactive"),
        (5 * MIB, "active_allocated"),
        (10 * MIB, "inactive"),
    ]


def test_call_of_empty_cache_is_distinguished_from_a_retry() -> None:
    """A segment is given back and a larger one obtained: a call of the program if there was room for both."""
    events = [
        Event("segment_alloc", 64 * MIB, 40 * MIB, 0, 0),
        Event("alloc", 64 * MIB, 40 * MIB, 0, 0),
        Event("free_requested", 64 * MIB, 40 * MIB, 0, 0),
        Event("free_completed", 64 * MIB, 40 * MIB, 0, 0),
        Event("segment_free", 64 * MIB, 40 * MIB, 0, 0),
        Event("segment_alloc", 64 * MIB, 50 * MIB, 0, 0),
        Event("alloc", 64 * MIB, 50 * MIB, 0, 0),
    ]
    wished = replay(events, AllocatorSettings(), GIB, recorded_limit_bytes=90 * MIB)
    retried = replay(events, AllocatorSettings(), GIB, recorded_limit_bytes=80 * MIB)
    assert wished.peak_reserved_bytes == 50 * MIB
    assert retried.peak_reserved_bytes == 90 * MIB
