"""PyTorch's memory snapshots: read from untrusted files, and written for PyTorch's own viewer.

`torch.cuda.memory._dump_snapshot` writes a snapshot: the segments at that moment, and the last events of each
device's allocator with their call stacks.
"""

import gzip
import os
import pickle
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from tonnage.allocator import AllocatorSettings, Segment, SegmentBlock, unpickle
from tonnage.allocator.segments import BlockState
from tonnage.allocator.settings import SMALL_BYTES
from tonnage.errors import CannotEstimate, UnreadableFile
from tonnage.trace.trace import Event

MAX_BYTES: Final = 4 * 2**30
"""Limit of an unpacked snapshot's size; a larger one is refused."""
_FREE_BYTES: Final = 16 * 2**20
_UNPACKED: Final = 30
"""Bytes that a compressed snapshot may unpack to: those, and as many for each of its own."""
_PART_BYTES: Final = 2**20
MAX_BLOCKS: Final = 2 * 10**7
"""Limit of a snapshot's blocks; one with more is refused."""

_STATES: Final[tuple[BlockState, ...]] = get_args(BlockState)
_SCALAR: Final = (str, int, float, bool, type(None))
_NO_FRAMES: Final[list[Any]] = []
_SETTINGS_KEYS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Frame(NamedTuple):
    """A line of a call stack."""

    filename: str
    line: int
    name: str


Stack = tuple[Frame, ...]
"""A call stack, innermost call first."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """One device's part of a snapshot."""

    segments: tuple[Segment, ...] = ()
    """Segments at the moment of the snapshot, by address."""
    events: tuple[Event, ...] = ()
    """Events of the allocator before it, oldest first; the mark of an event is the index of its stack."""
    stacks: tuple[Stack, ...] = ((),)
    """Call stacks of the events and blocks; the first one is empty."""
    times_us: tuple[int, ...] = ()
    """Time of each event in microseconds since 1970; empty when unknown."""
    block_stacks: dict[int, int] = field(default_factory=dict)
    """Index of the stack that requested each block in use, by the block's address."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State and history of the caching allocators of one process."""

    devices: tuple[DeviceMemory, ...]
    """Memory of each device, by device number."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Allocator settings as torch lists them; empty in snapshots of old versions."""

    @property
    def allocator_settings(self) -> AllocatorSettings:
        """Return the settings for the allocator's replica.  Raises UsageError for options that it does not know."""
        text = next((self.settings[key] for key in _SETTINGS_KEYS if self.settings.get(key)), "")
        return AllocatorSettings.parse(str(text))


# --- reading --------------------------------------------------------------------------------------------------


def read(path: Path | str) -> Snapshot:
    """Return the snapshot in a file, gzip-compressed or not.  Nothing in it is executed.  Raises UnreadableFile."""
    try:
        data = _read_content(Path(path))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UnreadableFile(f"Cannot read the snapshot {path}: {error}.") from None
    try:
        return from_plain(unpickle.load(data))
    except UnreadableFile as error:
        raise UnreadableFile(f"{path} is not a memory snapshot: {error}") from None


def _read_content(path: Path) -> bytes:
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        size = os.fstat(file.fileno()).st_size
        most = min(MAX_BYTES, _FREE_BYTES + _UNPACKED * size) if is_compressed else MAX_BYTES
        if size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        if not is_compressed:
            return file.read()  # a number of bytes would be allocated at once
        parts, unpacked_bytes = list[bytes](), 0
        with gzip.open(file) as unpacked:
            while part := unpacked.read(_PART_BYTES):
                parts.append(part)
                unpacked_bytes += len(part)
                if unpacked_bytes > most:
                    raise ValueError(f"it unpacks to more than {most} bytes")
    return b"".join(parts)


def from_plain(document: Any) -> Snapshot:
    """Return the snapshot of a document that `torch.cuda.memory._snapshot()` returns.  Raises UnreadableFile."""
    try:
        traces = list(_check_type(document["device_traces"], list))
        segments = list(_check_type(document["segments"], list))
        settings = dict(_plain_settings(document.get("allocator_settings", {})))
        count = max([len(traces), *(_check_natural(segment["device"]) + 1 for segment in segments)], default=0)
        if count > 1024:
            raise ValueError(f"{count} devices")
        if sum(len(_check_type(segment["blocks"], list)) for segment in segments) > MAX_BLOCKS:
            raise ValueError(f"more than {MAX_BLOCKS} blocks")
        traces += [[] for _ in range(count - len(traces))]
        devices = tuple(
            _parse_device([segment for segment in segments if segment["device"] == number], trace)
            for number, trace in enumerate(traces)
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise UnreadableFile(f"its form is another ({type(error).__name__}: {str(error)[:80]}).") from None
    return Snapshot(devices=devices, settings=settings)


def _parse_device(segments: list[Any], trace: list[Any]) -> DeviceMemory:
    stacks = _Stacks()
    events = []
    times = []
    for entry in _check_type(trace, list):
        action = _check_type(entry["action"], str)
        address = entry.get("device_free", 0) if action == "oom" else entry.get("addr", 0)
        stack = stacks.index(entry.get("frames", _NO_FRAMES))
        stream = _check_integer(entry.get("stream", 0))
        events.append(Event(action, _check_integer(address), _check_natural(entry["size"]), stream, stack))
        times.append(_check_integer(entry.get("time_us", 0)))
    block_stacks: dict[int, int] = {}
    parsed = tuple(sorted((_parse_segment(each, stacks, block_stacks) for each in segments), key=_address))
    return DeviceMemory(
        segments=parsed,
        events=tuple(events),
        stacks=tuple(stacks.stacks),
        times_us=tuple(times),
        block_stacks=block_stacks,
    )


def _parse_segment(entry: Any, stacks: "_Stacks", block_stacks: dict[int, int]) -> Segment:
    start = address = _check_natural(entry["address"])
    blocks = []
    for block in entry["blocks"]:
        state = _check_type(block["state"], str)
        if state == "active_awaiting_free":  # the name in torch's documentation
            state = "active_pending_free"
        if state not in _STATES:
            raise ValueError(f"a block in state {state[:40]!r}")
        size = _check_natural(block["size"])
        blocks.append(SegmentBlock(address, size, _check_natural(block.get("requested_size", size)), state))
        if state != "inactive":
            block_stacks[address] = stacks.index(block.get("frames", _NO_FRAMES))
        address += size
    if address - start != _check_natural(entry["total_size"]):
        raise ValueError(f"a segment of {entry['total_size']} bytes whose blocks have {address - start}")
    return Segment(
        address=start,
        stream=_check_integer(entry["stream"]),
        is_small=entry["segment_type"] == "small",
        is_expandable=bool(entry.get("is_expandable", False)),
        pool=_parse_pool(entry.get("segment_pool_id", (0, 0))),
        blocks=tuple(blocks),
    )


class _Stacks:
    """Assigns indices to call stacks; torch writes equal stacks as the same object."""

    def __init__(self) -> None:
        self.stacks: list[Stack] = [()]
        self._indices: dict[Stack, int] = {(): 0}
        self._index_by_id: dict[int, int] = {}
        self._frames: dict[int, Frame] = {}

    def index(self, frames: Any) -> int:
        known = self._index_by_id.get(id(frames))
        if known is None:
            stack = tuple(self._parse_frame(frame) for frame in _check_type(frames, list))
            known = self._indices.setdefault(stack, len(self.stacks))
            if known == len(self.stacks):
                self.stacks.append(stack)
            self._index_by_id[id(frames)] = known  # the document keeps `frames` alive while it is read
        return known

    def _parse_frame(self, frame: Any) -> Frame:
        known = self._frames.get(id(frame))
        if known is None:
            filename, name = _check_type(frame["filename"], str), _check_type(frame["name"], str)
            known = Frame(filename, _check_integer(frame["line"]), name)
            self._frames[id(frame)] = known
        return known


def _plain_settings(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings whose values are plain, or tables of plain values."""
    for name, value in _check_type(settings, dict).items():
        if isinstance(value, dict):
            yield str(name), {str(key): each for key, each in value.items() if isinstance(each, _SCALAR)}
        elif isinstance(value, _SCALAR):
            yield str(name), value


def _check_type(value: Any, kind: type) -> Any:
    """Return the value.  Raises TypeError unless it is of this type."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _check_integer(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**64:
        raise TypeError(f"{type(value).__name__} instead of a 64-bit integer")
    return value


def _check_natural(value: Any) -> int:
    if _check_integer(value) < 0:
        raise ValueError("a negative size or address")
    return int(value)


def _parse_pool(value: Any) -> tuple[int, int]:
    first, second = value
    return _check_integer(first), _check_integer(second)


def _address(segment: Segment) -> int:
    return segment.address


# --- before the recording -------------------------------------------------------------------------------------


def segments_before(memory: DeviceMemory, settings: AllocatorSettings) -> tuple[Segment, ...]:
    """Return the segments before the first recorded event, by address, by undoing the events.

    A recording has the requested size of a freed block, not the block's size.  A block of a large segment may have
    up to 1 MiB of slack.  The slack shows as a gap that is too small for a free block, or by a later block that
    begins after a gap instead of at its start.  Slack in front of a larger gap that stays unused while the block
    lives leaves no trace, and counts as free memory.  Raises CannotEstimate for expandable segments, because their
    reserved addresses are not recorded.
    """
    return _EarlierState(memory, settings).segments()


class _LiveBlock(NamedTuple):
    """A block in use; `awaits` is True if it is freed and waits for other streams."""

    requested_bytes: int
    stream: int
    awaits: bool


class _EarlierState:
    """The segments and blocks before the first event, found by undoing the events from the last one on."""

    def __init__(self, memory: DeviceMemory, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.held: dict[int, tuple[int, int, bool]] = {}
        self.live: dict[int, _LiveBlock] = {}
        self.sizes: dict[int, int] = {}
        for segment in memory.segments:
            if segment.is_expandable:
                raise CannotEstimate(
                    "The snapshot has expandable segments, whose reserved addresses are not recorded; "
                    "replay a recording from the start of the program instead."
                )
            self.held[segment.address] = (segment.size_bytes, segment.stream, segment.is_small)
            for block in segment.blocks:
                if block.state != "inactive":
                    awaits = block.state == "active_pending_free"
                    self.live[block.address] = _LiveBlock(block.requested_bytes, segment.stream, awaits)
                    self.sizes[block.address] = block.size_bytes
        for event in reversed(memory.events):
            self.undo(event)
        self.learn_slack(memory.events)

    def undo(self, event: Event) -> None:
        match event.action:
            case "alloc":
                self.live.pop(event.address, None)
                self.sizes.pop(event.address, None)
            case "free_completed":
                self.live[event.address] = _LiveBlock(event.size_bytes, event.stream, True)
                self.sizes.pop(event.address, None)
            case "free_requested":
                self.live[event.address] = _LiveBlock(event.size_bytes, event.stream, False)
            case "segment_alloc":
                self.held.pop(event.address, None)
            case "segment_free":
                is_small = self.settings.segment_size(1) == event.size_bytes
                self.held[event.address] = (event.size_bytes, event.stream, is_small)
            case "segment_map" | "segment_unmap":
                raise CannotEstimate("Expandable segments cannot be traced back; record from the start.")

    def learn_slack(self, events: Sequence[Event]) -> None:
        """Derive sizes of blocks from later allocations that begin where a block of unknown size must end."""
        unknown = sorted(self.live.keys() - self.sizes.keys())
        for event in events:
            if event.action == "free_completed":
                position = bisect_left(unknown, event.address)
                if unknown[position : position + 1] == [event.address]:
                    del unknown[position]
            elif event.action == "alloc":
                position = bisect_left(unknown, event.address) - 1
                if position >= 0 and self._can_reach(unknown[position], event.address):
                    self.sizes[unknown[position]] = event.address - unknown[position]
                    del unknown[position]

    def _can_reach(self, address: int, following: int) -> bool:
        """Return True if the block at `address` can end at `following`, with at most 1 MiB of slack."""
        size = self.settings.round_size(self.live[address].requested_bytes)
        slack = following - address - size
        return size > SMALL_BYTES and 0 <= slack <= SMALL_BYTES

    def segments(self) -> tuple[Segment, ...]:
        addresses = sorted(self.live)
        result = []
        position = 0
        for start, (size, stream, is_small) in sorted(self.held.items()):
            while position < len(addresses) and addresses[position] < start:
                position += 1
            inside = position
            while inside < len(addresses) and addresses[inside] < start + size:
                inside += 1
            blocks = tuple(self._iterate_blocks(addresses[position:inside], start, start + size, is_small))
            position = inside
            result.append(Segment(address=start, stream=stream, is_small=is_small, blocks=blocks))
        return tuple(result)

    def _iterate_blocks(
        self, addresses: Sequence[int], start: int, end: int, is_small: bool
    ) -> Iterator[SegmentBlock]:
        for number, address in enumerate(addresses):
            if address > start:
                yield SegmentBlock(start, address - start, 0, "inactive")
            following = addresses[number + 1] if number + 1 < len(addresses) else end
            live = self.live[address]
            size = self._block_size(address, following - address, is_small)
            state: BlockState = "active_pending_free" if live.awaits else "active_allocated"
            yield SegmentBlock(address, size, live.requested_bytes, state)
            start = address + size
        if start < end:
            yield SegmentBlock(start, end - start, 0, "inactive")

    def _block_size(self, address: int, available: int, is_small: bool) -> int:
        known = self.sizes.get(address)
        if known is not None:
            return known
        size = self.settings.round_size(self.live[address].requested_bytes)
        slack = available - size
        return available if not is_small and slack <= SMALL_BYTES else size


# --- writing --------------------------------------------------------------------------------------------------


def write(snapshot: Snapshot, path: Path | str) -> None:
    """Write a file for PyTorch's memory viewer (pytorch.org/memory_viz, `python -m torch.cuda._memory_viz`)."""
    with Path(path).open("wb") as file:
        pickle.dump(to_plain(snapshot), file, protocol=4)


def to_plain(snapshot: Snapshot) -> dict[str, Any]:
    """Return the snapshot as a document of `torch.cuda.memory._snapshot()`."""
    return {
        "segments": [
            entry for number, memory in enumerate(snapshot.devices) for entry in _plain_segments(number, memory)
        ],
        "device_traces": [_plain_events(memory) for memory in snapshot.devices],
        "allocator_settings": snapshot.settings,
        "external_annotations": [],
    }


def _plain_segments(device: int, memory: DeviceMemory) -> Iterator[dict[str, Any]]:
    frames = _plain_stacks(memory)
    for segment in memory.segments:
        yield {
            "device": device,
            "address": segment.address,
            "total_size": segment.size_bytes,
            "allocated_size": segment.allocated_bytes,
            "active_size": segment.active_bytes,
            "requested_size": sum(each.requested_bytes for each in segment.blocks if each.state != "inactive"),
            "stream": segment.stream,
            "segment_type": "small" if segment.is_small else "large",
            "segment_pool_id": segment.pool,
            "is_expandable": segment.is_expandable,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size_bytes,
                    "requested_size": block.requested_bytes,
                    "state": block.state,
                    "frames": frames[memory.block_stacks.get(block.address, 0)],
                }
                for block in segment.blocks
            ],
        }


def _plain_events(memory: DeviceMemory) -> list[dict[str, Any]]:
    frames = _plain_stacks(memory)
    times = memory.times_us or range(len(memory.events))
    return [
        {
            "action": event.action,
            "device_free" if event.action == "oom" else "addr": event.address,
            "size": event.size_bytes,
            "stream": event.stream,
            "time_us": time,
            "frames": frames[event.mark],
        }
        for event, time in zip(memory.events, times, strict=True)
    ]


def _plain_stacks(memory: DeviceMemory) -> list[list[dict[str, Any]]]:
    return [[frame._asdict() for frame in stack] for stack in memory.stacks]
