"""Random programs of allocator calls, and the replica that runs them beside the real allocator."""

import random
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tonnage.allocator import AllocatorSettings, CachingAllocator, Driver, OutOfMemory
from tonnage.allocator.settings import round_up
from tonnage.units import MIB

Operation = list[Any]
EDGES = [MIB, MIB + 1, 10 * MIB, 10 * MIB - 512, 20 * MIB, 2 * MIB, 128 * MIB, 200 * MIB, 1, 511, 512, 513]


def random_size(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.3:
        return rng.randint(1, 4096)
    if kind < 0.5:
        return rng.randint(1, MIB)
    if kind < 0.8:
        return rng.randint(MIB, 12 * MIB)
    if kind < 0.95:
        return rng.randint(8 * MIB, 150 * MIB)
    return rng.choice(EDGES)


def graph_program(seed: int, length: int) -> list[Operation]:
    """Return a program with graphs captured on stream 1 between allocations; nothing waits for the GPU meanwhile.

    No other stream's block is used on the capturing stream: torch 2.13 would record an event that it may not query.
    """
    rng = random.Random(seed)
    operations: list[Operation] = []
    capturing = False
    for operation in random_program(seed, length):
        if rng.random() < 0.01:
            operations.append(["end_graph"] if capturing else ["graph", 1])
            capturing = not capturing
        waits = operation[0] in ("synchronise", "empty")
        if not (capturing and waits) and (operation[0] != "record" or operation[2] != 1):
            operations.append(operation)
    return [*operations, ["end_graph"]] if capturing else operations


def random_program(seed: int, length: int, *, late: bool = False, pools: bool = False) -> list[Operation]:
    """Return a program of allocations, frees (half of them of the newest block), uses on other streams, and others.

    `late` is for work that finishes late: blocks are then used on one other stream only, because torch visits the
    streams in the order of a hash map, which changes the peaks of `inactive_split`.
    """
    rng = random.Random(seed)
    operations: list[Operation] = [["pool", rng.random() < 0.7, rng.random() < 0.5]] if pools else []
    count, live, open_pool = 0, [], False
    for _ in range(length):
        kind = rng.random()
        if kind < 0.52 or not live:
            stream = 0 if late or rng.random() < 0.8 else rng.randint(0, 2)
            operations.append(["alloc", random_size(rng), stream])
            live.append(count)
            count += 1
        elif kind < 0.975:
            number = live.pop(rng.randrange(len(live)) if rng.random() < 0.5 else -1)
            if rng.random() < 0.15:
                operations.append(["record", number, 1 if late else rng.randint(0, 2)])
            operations.append(["free", number])
        elif kind < 0.98:
            operations.append(["empty"])
        elif kind < 0.99:
            operations.append(["synchronise"])
        elif kind < 0.992:
            operations.append([rng.choice(["reset_peak", "reset_accumulated"])])
        elif pools:
            operations.append(["end", 0] if open_pool else ["begin", 0])
            open_pool = not open_pool
    if open_pool:
        operations.append(["end", 0])
    if pools:
        operations += [["drop", 0], ["empty"]]
        operations += [["free", number] for number in live]
        operations.append(["empty"])
    return operations


@dataclass
class Replica:
    """Runs the operations of tests/programs/allocator_fuzz.py on the replica."""

    allocator: CachingAllocator
    streams: list[int]
    pool_ids: list[tuple[int, int]] = field(default_factory=list)
    addresses: list[int | None] = field(default_factory=list)
    out_of_memory: list[int] = field(default_factory=list)
    pools: int = 0

    def run(self, operations: Iterable[Operation]) -> None:
        for name, *arguments in operations:
            getattr(self, name)(*arguments)

    def alloc(self, size: int, stream: int) -> None:
        try:
            self.addresses.append(self.allocator.malloc(size, self.streams[stream]))
        except OutOfMemory:
            self.out_of_memory.append(len(self.addresses))
            self.addresses.append(None)

    def free(self, number: int) -> None:
        address, self.addresses[number] = self.addresses[number], None
        if address is not None:
            self.allocator.free(address)

    def record(self, number: int, stream: int) -> None:
        address = self.addresses[number]
        if address is not None:
            self.allocator.record_stream(address, self.streams[stream])

    def synchronise(self) -> None:
        self.allocator.synchronise()

    def empty(self) -> None:
        self.allocator.empty_cache()

    def settings(self, text: str) -> None:
        self.allocator.settings = AllocatorSettings.parse(text)

    def reset_peak(self) -> None:
        self.allocator.reset_peak_memory_stats()

    def reset_accumulated(self) -> None:
        self.allocator.reset_accumulated_memory_stats()

    def pool(self, splits: bool, use_on_oom: bool) -> None:
        self.allocator.create_pool(self.pool_ids[self.pools], splits=splits, use_on_oom=use_on_oom)
        self.pools += 1

    def begin(self, number: int) -> None:
        self.allocator.begin_pool(self.pool_ids[number])

    def end(self, number: int) -> None:
        self.allocator.end_pool(self.pool_ids[number])
        self.allocator.release_pool(self.pool_ids[number])

    def graph(self, stream: int) -> None:
        for _ in range(2):  # seed and offset of the random numbers, held by the graph
            self.allocator.malloc(8, self.streams[0])
        pool = self.pool_ids[self.pools]
        self.allocator.begin_pool(pool, streams=[self.streams[stream]], capturing=True)
        self.pools += 1

    def end_graph(self) -> None:
        self.allocator.end_pool(self.pool_ids[self.pools - 1])

    def drop(self, number: int) -> None:  # what the destructor of a MemPool does
        self.allocator.release_pool(self.pool_ids[number])
        self.allocator.empty_cache(self.pool_ids[number])


def replicate(
    operations: Iterable[Operation],
    real: dict[str, Any],
    *,
    total_bytes: int,
    settings: str = "",
    lazy: bool = False,
) -> Replica:
    """Return the replica after the program that the real allocator ran; `real` is its report."""
    allocator = CachingAllocator(
        Driver(total_bytes),
        AllocatorSettings.parse(settings),
        torch_version=real["torch"],
        lazy=lazy,
    )
    replica = Replica(allocator, real["streams"], [tuple(pool) for pool in real["pools"]])
    replica.run(operations)
    return replica


class Addresses:
    """Translates the replica's addresses into the real ones; each segment or range has one offset."""

    def __init__(self, total_bytes: int, large_page_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.large_page_bytes = large_page_bytes
        self.starts: list[int] = []
        self.shifts: list[tuple[int, int]] = []  # end, shift

    def learn(self, action: str, replica: int, size: int, real: int) -> None:
        """Add a new segment's addresses in the replica and in the real allocator."""
        if action == "segment_map" and self.translate(replica) is not None:
            return
        end = replica + (size if action == "segment_alloc" else self.range_bytes(size))
        position = bisect_right(self.starts, replica)
        if position and self.starts[position - 1] == replica:
            self.shifts[position - 1] = (end, real - replica)
            return
        if position and self.shifts[position - 1][0] > replica:  # a smaller segment where a freed one was
            self.shifts[position - 1] = (replica, self.shifts[position - 1][1])
        self.starts.insert(position, replica)
        self.shifts.insert(position, (end, real - replica))

    def range_bytes(self, mapped_bytes: int) -> int:
        """Return the size of the expandable segment that begins with this mapping; small ones map 2 MiB at a time."""
        page = 2 * MIB if mapped_bytes == 2 * MIB else self.large_page_bytes
        return round_up(self.total_bytes * 9 // 8, page)

    def translate(self, address: int) -> int | None:
        position = bisect_right(self.starts, address) - 1
        if position < 0 or address >= self.shifts[position][0]:
            return None
        return address + self.shifts[position][1]


def compare_events(real: list[list[Any]], replica: CachingAllocator) -> str | None:
    """Return a description of the first difference, or None.  Runs of free_completed are compared as sets.

    When several streams finish, torch walks them in the order of a hash map; nothing else depends on it.
    """
    addresses = Addresses(replica.driver.total_bytes, replica.settings.large_segment_bytes)
    mine = [[event.action, event.address, event.size_bytes, event.stream] for event in replica.events]
    real = _in_one_order(real)
    translated = []
    for (action, address, *_), event in zip(real, mine, strict=False):
        if event[0] == action and action in ("segment_alloc", "segment_map"):
            addresses.learn(action, event[1], event[2], address)
        moved = event[1] if event[0] == "oom" else addresses.translate(event[1]) or -1
        translated.append([event[0], moved, *event[2:]])
    translated = _in_one_order(translated)
    for position, (theirs, ours) in enumerate(zip(real, translated, strict=False)):
        if theirs != ours:
            return f"event {position}: real {theirs}, replica {ours}"
    return None if len(real) == len(mine) else f"{len(real)} real events, {len(mine)} of the replica"


def compare_segments(real: list[list[Any]], replica: CachingAllocator) -> str | None:
    """Return the first difference between the final segments, except for addresses (see compare_events)."""
    theirs = sorted(
        [stream, kind, expandable, list(pool), [block[1:] for block in blocks]]
        for _, stream, kind, expandable, pool, blocks in real
    )
    ours = sorted(
        [
            segment.stream,
            "small" if segment.is_small else "large",
            segment.is_expandable,
            list(segment.pool),
            [[block.size_bytes, block.state] for block in segment.blocks],
        ]
        for segment in replica.segments()
    )
    differences = [pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]]
    if differences:
        return f"real segment {differences[0][0]}, replica {differences[0][1]}"
    return None if len(theirs) == len(ours) else f"{len(theirs)} real segments, {len(ours)} of the replica"


def _in_one_order(events: list[list[Any]]) -> list[list[Any]]:
    result: list[list[Any]] = []
    run: list[list[Any]] = []
    for event in events:
        if event[0] == "free_completed":
            run.append(event)
            continue
        result += sorted(run)
        run = []
        result.append(event)
    return result + sorted(run)


def compare_statistics(real: dict[str, int], replica: CachingAllocator) -> dict[str, tuple[Any, Any]]:
    """Return the numbers that differ, by name: the real value and the replica's value."""
    mine = replica.memory_stats()
    return {
        name: (real.get(name), mine.get(name))
        for name in sorted(real.keys() | mine.keys())
        if real.get(name) != mine.get(name)
    }
