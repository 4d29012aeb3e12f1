"""Blocks of memory, and the pools that keep the free ones."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from tonnage.allocator.settings import round_up
from tonnage.allocator.statistics import Stat, Statistics

PoolId = tuple[int, int]
"""Id of a private pool, as `torch.cuda.MemPool.id` has it."""
DEFAULT_POOL: Final[PoolId] = (0, 0)
"""Id of the pools that are not private in traces and snapshots."""

_Key = tuple[int, int, int, int]


class Range:
    """The address range of one expandable segment, and the size of the pages in which memory is mapped to it."""

    __slots__ = ("address", "page_bytes", "size_bytes")

    def __init__(self, address: int, size_bytes: int, page_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.page_bytes = page_bytes

    def pages_for(self, block: "Block", size_bytes: int) -> int:
        """Return the bytes to map, in whole pages, to give memory to the first `size_bytes` of an unmapped block."""
        return round_up(block.address - self.address + size_bytes, self.page_bytes) - (block.address - self.address)

    def pages_within(self, block: "Block") -> tuple[int, int]:
        """Return the address and bytes of the pages that lie completely inside a block; zero bytes if none does."""
        start = round_up(block.address - self.address, self.page_bytes)
        end = (block.address + block.size - self.address) // self.page_bytes * self.page_bytes
        return self.address + start, max(end - start, 0)


class Block:
    """A part of a segment: allocated, freed but used by other streams, free, or (expandable segments) unmapped."""

    __slots__ = (
        "address",
        "allocated",
        "events",
        "key",
        "mapped",
        "next",
        "order",
        "pool",
        "previous",
        "range",
        "requested",
        "searches",
        "size",
        "stream",
        "uses",
    )

    def __init__(
        self, address: int, size: int, stream: int, pool: "Pool", order: int, range: Range | None = None
    ) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.order = order  # breaks ties between free blocks of one size: see settings.tie_rule
        self.range = range
        self.requested = 0
        self.allocated = False
        self.mapped = True
        self.previous: Block | None = None
        self.next: Block | None = None
        self.uses: set[int] = set()  # other streams on which the program used it
        self.events = 0  # events of those streams that have not finished
        self.searches = 0  # the pool's count when the block entered it: its age for garbage collection
        self.key: _Key = (0, 0, 0, 0)

    @property
    def is_split(self) -> bool:
        """Return True if it is only a part of its segment."""
        return self.previous is not None or self.next is not None

    @property
    def is_free(self) -> bool:
        """Return True if no stream uses it."""
        return not (self.allocated or self.events or self.uses)

    @property
    def size_when_expanded(self) -> int:
        """Return the size that it has when the unmapped addresses after it are mapped too."""
        following = self.next
        return self.size + (following.size if following is not None and not following.mapped else 0)

    def insert_before(self, block: "Block") -> None:
        """Insert this block in front of `block`."""
        self.previous = block.previous
        self.next = block
        if self.previous is not None:
            self.previous.next = self
        block.previous = self

    def insert_after(self, block: "Block") -> None:
        """Insert this block after `block`."""
        self.next = block.next
        self.previous = block
        if self.next is not None:
            self.next.previous = self
        block.next = self

    def absorb(self, neighbour: "Block") -> None:
        """Take over the addresses of an adjacent block."""
        if self.previous is neighbour:
            self.address = neighbour.address
            self.previous = neighbour.previous
            if self.previous is not None:
                self.previous.next = self
        else:
            self.next = neighbour.next
            if self.next is not None:
                self.next.previous = self
        self.size += neighbour.size


class _SortedBlocks:
    """Blocks sorted by key, in two parallel lists, because bisection over tuples runs in C."""

    __slots__ = ("blocks", "keys")

    def __init__(self) -> None:
        self.keys: list[_Key] = []
        self.blocks: list[Block] = []

    def add(self, block: Block, key: _Key) -> None:
        block.key = key
        position = bisect_left(self.keys, key)
        self.keys.insert(position, key)
        self.blocks.insert(position, block)

    def remove(self, block: Block) -> None:
        position = bisect_left(self.keys, block.key)
        assert self.blocks[position] is block
        del self.keys[position]
        del self.blocks[position]


class Pool:
    """Free blocks of one size class, smallest first within each stream."""

    __slots__ = ("_free", "_unmapped", "is_small", "owner", "reserved", "searches", "statistics")

    def __init__(
        self, *, is_small: bool, statistics: tuple[Statistics, ...], owner: "PrivatePool | None" = None
    ) -> None:
        self.is_small = is_small
        self.statistics = statistics  # those of all blocks, and those of this size class
        self.reserved = [each.reserved_bytes for each in statistics]
        self.owner = owner
        self.searches = 0  # counted only while garbage collection is on
        self._free = _SortedBlocks()
        self._unmapped = _SortedBlocks()

    @property
    def id(self) -> PoolId:
        """Return the id of its private pool, or DEFAULT_POOL."""
        return DEFAULT_POOL if self.owner is None else self.owner.id

    def add(self, block: Block) -> None:
        """Add a free block."""
        block.searches = self.searches
        self._free.add(block, (block.stream, block.size, block.order, block.address))

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        self._free.remove(block)

    def add_unmapped(self, block: Block) -> None:
        """Add an unmapped block: addresses without memory."""
        self._unmapped.add(block, (block.stream, block.address, 0, 0))

    def remove_unmapped(self, block: Block) -> None:
        """Remove an unmapped block."""
        self._unmapped.remove(block)

    def unmapped(self, stream: int) -> Iterator[Block]:
        """Yield a stream's unmapped blocks by address."""
        for position in range(bisect_left(self._unmapped.keys, (stream,)), len(self._unmapped.keys)):
            block = self._unmapped.blocks[position]
            if block.stream != stream:
                return
            yield block

    def best_fit(self, stream: int, size: int) -> int:
        """Return the position in `free` of the smallest block of at least `size`.

        The position may be that of another stream's block, or the end.
        """
        return bisect_left(self._free.keys, (stream, size))

    @property
    def free(self) -> list[Block]:
        """Return the free blocks in order; copy the list before you change the pool."""
        return self._free.blocks


class PrivatePool:
    """The separate pools of a CUDA graph or a torch.cuda.MemPool."""

    __slots__ = ("id", "large", "reserved_bytes", "small", "splits", "use_on_oom", "users")

    def __init__(self, pool_id: PoolId, all_pools: Statistics, small: Statistics, large: Statistics) -> None:
        self.id = pool_id
        self.small = Pool(is_small=True, statistics=(all_pools, small), owner=self)
        self.large = Pool(is_small=False, statistics=(all_pools, large), owner=self)
        self.users = 1  # graphs and MemPool objects that use it
        self.splits = True
        self.use_on_oom = False
        self.reserved_bytes = {"all": Stat(), "small_pool": Stat(), "large_pool": Stat()}
        self.small.reserved += (self.reserved_bytes["all"], self.reserved_bytes["small_pool"])
        self.large.reserved += (self.reserved_bytes["all"], self.reserved_bytes["large_pool"])
