"""Memory snapshots: real ones replay event by event, hostile ones are refused, torch's viewer opens written ones."""

import gzip
import io
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator_programs import Replica, random_program
from tonnage.allocator import (
    AllocatorSettings,
    CachingAllocator,
    Driver,
    Segment,
    SegmentBlock,
    replay,
    snapshot,
    unpickle,
)
from tonnage.allocator.snapshot import DeviceMemory, Frame, Snapshot
from tonnage.errors import CannotEstimate, UnreadableFile
from tonnage.trace.trace import Event
from tonnage.units import GIB, MIB

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "snapshots"
LIMIT_BYTES = 78 * GIB  # limit of a process on 80 GB cards, from which most snapshots come

REAL = {  # file: version that recorded it (for the tie rule), allocations, segment events
    "kk_memory_ctx128_forward_": ("2.7", 2058, 289),
    "kk_memory_ctx128_fullstep_": ("2.7", 6770, 1212),
    "kk_memory_ctx256_forward_mixed": ("2.7", 2702, 1057),
    "kk_memory_ctx512_fullstep_": ("2.7", 6769, 1379),
    "kk_logs_memory_ctx128_forward": ("2.7", 3113, 178),
    "wed_medium_512_training_memory_snapshot": ("2.11", 7591, 1),
    "wed_medium_1024_inference_memory_snapshot": ("2.11", 1280, 0),
    "eor_snapshot": ("2.5", 1935, 7),
}


def published(name: str) -> DeviceMemory:
    path = PUBLISHED / f"{name}.pickle.gz"
    if not path.exists():
        pytest.skip(f"the published snapshot {path.name} is not here")
    return snapshot.read(path).devices[0]


def events_of(memory: DeviceMemory) -> list[Event]:
    return [event for event in memory.events if event.action != "snapshot"]


@pytest.mark.parametrize("name", REAL)
def test_replays_equal_recordings_of_real_gpus(name: str) -> None:
    """All addresses, sizes and streams of events are equal, and the segments at the end."""
    version, allocations, segment_events = REAL[name]
    memory = published(name)
    recorded = events_of(memory)
    assert sum(event.action == "alloc" for event in recorded) == allocations
    assert sum(event.action.startswith("segment") for event in recorded) == segment_events
    result = replay(
        recorded,
        AllocatorSettings(),
        2**46,
        version,
        before=snapshot.segments_before(memory, AllocatorSettings()),
        recorded_limit_bytes=LIMIT_BYTES,
        recorded_addresses=[event.address for event in recorded if event.action == "segment_alloc"],
    )
    assert [event[:4] for event in result.events] == [event[:4] for event in recorded]
    assert result.segments == memory.segments


def test_wrong_tie_rule_fails_the_comparison() -> None:
    """The comparison can fail: torch 2.12's rule places blocks elsewhere."""
    memory = published("wed_medium_512_training_memory_snapshot")
    before = snapshot.segments_before(memory, AllocatorSettings())
    result = replay(events_of(memory), AllocatorSettings(), 2**46, "2.12", before=before)
    assert [event[:4] for event in result.events] != [event[:4] for event in events_of(memory)]


def test_stacks_and_times_are_kept() -> None:
    memory = published("kk_memory_ctx128_forward_")
    stack = memory.stacks[memory.events[0].mark]
    assert stack
    assert all(isinstance(frame, Frame) for frame in stack)
    assert len(memory.times_us) == len(memory.events)
    assert set(memory.block_stacks) == {
        block.address for segment in memory.segments for block in segment.blocks if block.state != "inactive"
    }


# --- before the recording -------------------------------------------------------------------------------------


def snapshot_of(device: CachingAllocator, events: list[Event]) -> DeviceMemory:
    return DeviceMemory(segments=device.segments(), events=tuple(events))


@pytest.mark.parametrize("seed", range(10))
def test_segments_before_the_recording_are_found_by_undoing_it(seed: int) -> None:
    device = CachingAllocator(Driver(8 * GIB))
    replica = Replica(device, [0, 1, 2])
    program = random_program(seed, 300)
    replica.run(program[:150])
    before = device.segments()
    start = len(device.events)
    replica.run(program[150:])
    memory = snapshot_of(device, device.events[start:])
    derived = snapshot.segments_before(memory, AllocatorSettings())
    assert [(each.address, each.size_bytes, each.stream) for each in derived] == [
        (each.address, each.size_bytes, each.stream) for each in before
    ]
    assert states(derived) == states(before)


def states(segments: tuple[Segment, ...]) -> list[tuple[int, str]]:
    """Return the addresses of the blocks in use; their sizes are unknown where slack is in front of free memory."""
    return [
        (block.address, block.state) for segment in segments for block in segment.blocks if block.state != "inactive"
    ]


def test_slack_is_derived_from_the_next_allocation() -> None:
    """A block of 5 MiB has 600 KiB of slack and 14 MiB of free memory after it: only the next address shows it."""
    slack = 600 * 1024
    held = Segment(
        address=64 * MIB,
        stream=0,
        is_small=False,
        blocks=(SegmentBlock(64 * MIB, 20 * MIB, 0, "inactive"),),
    )
    events = (
        Event("alloc", 69 * MIB + slack, 8 * MIB, 0, 0),
        Event("free_requested", 69 * MIB + slack, 8 * MIB, 0, 0),
        Event("free_completed", 69 * MIB + slack, 8 * MIB, 0, 0),
        Event("free_requested", 64 * MIB, 5 * MIB, 0, 0),
        Event("free_completed", 64 * MIB, 5 * MIB, 0, 0),
    )
    (segment,) = snapshot.segments_before(DeviceMemory(segments=(held,), events=events), AllocatorSettings())
    assert [block.size_bytes for block in segment.blocks] == [5 * MIB + slack, 15 * MIB - slack]


def test_expandable_segments_are_not_traced_back() -> None:
    segment = Segment(
        address=0, stream=0, is_small=False, is_expandable=True, blocks=(SegmentBlock(0, 20 * MIB, 0, "inactive"),)
    )
    with pytest.raises(CannotEstimate, match="expandable"):
        snapshot.segments_before(DeviceMemory(segments=(segment,)), AllocatorSettings())


# --- writing --------------------------------------------------------------------------------------------------


def example() -> Snapshot:
    device = CachingAllocator(Driver(512 * MIB), AllocatorSettings())
    Replica(device, [0, 1, 2]).run(random_program(5, 300))
    stacks = ((), (Frame("train.py", 7, "forward"), Frame("train.py", 30, "main")))
    events = [event._replace(mark=number % 2) for number, event in enumerate(device.events)]
    assert any(event.action == "oom" for event in events)
    memory = DeviceMemory(
        segments=device.segments(),
        events=tuple(events),
        stacks=stacks,
        times_us=tuple(range(len(events))),
        block_stacks={
            block.address: 1 for segment in device.segments() for block in segment.blocks if block.state != "inactive"
        },
    )
    return Snapshot(devices=(memory,), settings={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})


def test_written_snapshots_are_read_back(tmp_path: Path) -> None:
    snapshot.write(example(), tmp_path / "plain.pickle")
    with gzip.open(tmp_path / "packed.pickle.gz", "wb") as packed:
        packed.write((tmp_path / "plain.pickle").read_bytes())
    assert snapshot.read(tmp_path / "plain.pickle") == example()
    assert snapshot.read(tmp_path / "packed.pickle.gz") == example()
    assert snapshot.read(tmp_path / "plain.pickle").allocator_settings.max_split_bytes == 64 * MIB


@pytest.mark.parametrize("kind", ["trace_plot", "segment_plot"])
def test_torchs_viewer_opens_written_snapshots(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    snapshot.write(example(), tmp_path / "run.pickle")
    page = tmp_path / "run.html"
    command = [sys.executable, "-m", "torch.cuda._memory_viz", kind, str(tmp_path / "run.pickle"), "-o", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert page.stat().st_size > 1000


def test_torchs_own_functions_read_written_snapshots() -> None:
    """The text reports of torch read all fields of segments and events."""
    pytest.importorskip("torch")
    from torch.cuda import _memory_viz

    plain = snapshot.to_plain(example())
    assert "OutOfMemory" in _memory_viz.trace(plain)
    total = sum(segment.size_bytes for segment in example().devices[0].segments)
    assert f"total_reserved: {_memory_viz.Bytes(total)}" in _memory_viz.segsum(plain)
    assert "forward" in _memory_viz.memory(plain, format_flamegraph=str)


# --- hostile and damaged files --------------------------------------------------------------------------------


class Attack:
    """An object that runs a command when pickle loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_hostile_pickles_do_not_run(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    file = tmp_path / "hostile.pickle"
    file.write_bytes(pickle.dumps({"segments": [Attack(marker)]}, protocol=protocol))
    with pytest.raises(UnreadableFile) as raised:
        snapshot.read(file)
    assert "was not executed" in str(raised.value)
    assert not marker.exists()
    pickle.loads(file.read_bytes())  # shows that the file is an attack
    assert marker.exists()


HOSTILE = {
    "nothing": b"",
    "text": b"hello",
    "no end": b"\x80\x04]",
    "empty stack": b"\x80\x04.",
    "no mark": b"\x80\x04]t.",
    "append to nothing": b"a.",
    "append to a dict": b"}Na.",
    "missing memo": b"h\x07.",
    "length beyond the end": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc",
    "negative integer length": b"\x8b\xff\xff\xff\xff.",
    "bad text": b"\x8c\x02\xff\xff.",
    "persistent id": b"Pos\nsystem\n.",
    "extension registry": b"\x82\x01.",
    "build": b"}}b.",
    "a list": pickle.dumps([]),
    "a mark": b"(.",
    "no traces": pickle.dumps({"segments": []}),
    "traces of text": pickle.dumps({"segments": [], "device_traces": ["abc"]}),
    "unknown state": pickle.dumps(
        {
            "device_traces": [],
            "segments": [{"device": 0, "address": 0, "blocks": [{"size": 1, "state": "x"}]}],
        }
    ),
    "many devices": pickle.dumps({"device_traces": [], "segments": [{"device": 10**12, "blocks": []}]}),
    "huge numbers": pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": 2**900}]]}),
    "a deep key": b"}" + b")" + b"\x85" * 100_000 + b"Ns.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_files_raise_one_clear_error(name: str, tmp_path: Path) -> None:
    file = tmp_path / "damaged.pickle"
    file.write_bytes(HOSTILE[name])
    with pytest.raises(UnreadableFile) as raised:
        snapshot.read(file)
    assert "\n" not in str(raised.value)
    assert str(file) in str(raised.value)


def test_damaged_compression_and_missing_files_are_clear_errors(tmp_path: Path) -> None:
    file = tmp_path / "damaged.pickle.gz"
    file.write_bytes(gzip.compress(pickle.dumps(snapshot.to_plain(example())))[:-100])
    for path in (file, tmp_path / "missing.pickle", tmp_path):
        with pytest.raises(UnreadableFile, match="Cannot read"):
            snapshot.read(path)


def mutations(data: bytes) -> Iterator[bytes]:
    rng = random.Random(1)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        cut = rng.randrange(len(changed)) if rng.random() < 0.3 else len(changed)
        yield bytes(changed[:cut])


def test_corrupted_snapshots_are_read_or_refused(tmp_path: Path) -> None:
    small = example()
    memory = small.devices[0]
    small = Snapshot(
        devices=(
            DeviceMemory(
                segments=memory.segments[:2],
                events=memory.events[:20],
                stacks=memory.stacks,
                times_us=memory.times_us[:20],
            ),
        )
    )
    data = pickle.dumps(snapshot.to_plain(small), protocol=4)
    file = tmp_path / "corrupt.pickle"
    refused = 0
    for changed in mutations(data):
        file.write_bytes(changed)
        try:
            snapshot.read(file)
        except UnreadableFile as error:
            refused += 1
            assert "\n" not in str(error)  # noqa: PT017
    assert refused > 100


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner, inner, inner),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.sampled_from([2, 3, 4, 5]))
def test_plain_values_are_read_like_pickle(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    assert unpickle.load(data) == pickle.load(io.BytesIO(data))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    try:
        unpickle.load(data)
    except UnreadableFile as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
