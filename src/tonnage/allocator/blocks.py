"""Blocks, and the pools in which free blocks wait."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from tonnage.allocator.settings import round_up
from tonnage.allocator.statistics import Stat, Statistics

PoolId = tuple[int, int]
"""Names a private pool as `torch.cuda.MemPool.id` does."""
DEFAULT_POOL: Final[PoolId] = (0, 0)
"""What traces and snapshots call the pools that are not private."""

_Key = tuple[int, int, int, int]


class Range:
    """The addresses of one expandable segment, and the pages in which memory is mapped to them."""

    __slots__ = ("address", "page_bytes", "size_bytes")

    def __init__(self, address: int, size_bytes: int, page_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.page_bytes = page_bytes

    def pages_for(self, block: "Block", size_bytes: int) -> int:
        """Bytes to map so that the first `size_bytes` of an unmapped block have memory: whole pages."""
        return round_up(block.address - self.address + size_bytes, self.page_bytes) - (block.address - self.address)

    def pages_within(self, block: "Block") -> tuple[int, int]:
        """Address and bytes of the pages that lie wholly inside a block; zero bytes when none does."""
        start = round_up(block.address - self.address, self.page_bytes)
        end = (block.address + block.size - self.address) // self.page_bytes * self.page_bytes
        return self.address + start, max(end - start, 0)


class Block:
    """A piece of a segment: handed out, waiting for other streams, free, or (expandable) without memory."""

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
        self.order = order  # decides among free blocks of one size: see settings.tie_rule
        self.range = range
        self.requested = 0
        self.allocated = False
        self.mapped = True
        self.previous: Block | None = None
        self.next: Block | None = None
        self.uses: set[int] = set()  # other streams on which the program used it
        self.events = 0  # of those streams, not yet seen to be finished
        self.searches = 0  # of the pool, when the block came into it: its age for garbage collection
        self.key: _Key = (0, 0, 0, 0)

    @property
    def is_split(self) -> bool:
        """Whether it is only a part of its segment."""
        return self.previous is not None or self.next is not None

    @property
    def is_free(self) -> bool:
        """Whether nobody uses it, on any stream."""
        return not (self.allocated or self.events or self.uses)

    @property
    def size_when_expanded(self) -> int:
        """Its size if the unmapped addresses behind it were mapped too."""
        following = self.next
        return self.size + (following.size if following is not None and not following.mapped else 0)

    def insert_before(self, block: "Block") -> None:
        """Become the left neighbour of `block`."""
        self.previous = block.previous
        self.next = block
        if self.previous is not None:
            self.previous.next = self
        block.previous = self

    def insert_after(self, block: "Block") -> None:
        """Become the right neighbour of `block`."""
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
    """Blocks by key; two lists in step, because bisection over tuples runs in C."""

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
        self.statistics = statistics  # of all blocks, and of this size class
        self.reserved = [each.reserved_bytes for each in statistics]
        self.owner = owner
        self.searches = 0  # counted only while garbage collection is on
        self._free = _SortedBlocks()
        self._unmapped = _SortedBlocks()

    @property
    def id(self) -> PoolId:
        """The private pool it belongs to, or DEFAULT_POOL."""
        return DEFAULT_POOL if self.owner is None else self.owner.id

    def add(self, block: Block) -> None:
        """Put a free block in."""
        block.searches = self.searches
        self._free.add(block, (block.stream, block.size, block.order, block.address))

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        self._free.remove(block)

    def add_unmapped(self, block: Block) -> None:
        """Remember addresses without memory."""
        self._unmapped.add(block, (block.stream, block.address, 0, 0))

    def remove_unmapped(self, block: Block) -> None:
        """Forget addresses without memory."""
        self._unmapped.remove(block)

    def unmapped(self, stream: int) -> Iterator[Block]:
        """Blocks without memory of a stream, by address."""
        for position in range(bisect_left(self._unmapped.keys, (stream,)), len(self._unmapped.keys)):
            block = self._unmapped.blocks[position]
            if block.stream != stream:
                return
            yield block

    def best_fit(self, stream: int, size: int) -> int:
        """Position in `free` of the smallest block of at least `size`; it may be of another stream or the end."""
        return bisect_left(self._free.keys, (stream, size))

    @property
    def free(self) -> list[Block]:
        """The free blocks in order; copy it before changing the pool."""
        return self._free.blocks


class PrivatePool:
    """Pools of their own for a CUDA graph or a torch.cuda.MemPool."""

    __slots__ = ("id", "large", "reserved_bytes", "small", "splits", "use_on_oom", "users")

    def __init__(self, pool_id: PoolId, all_pools: Statistics, small: Statistics, large: Statistics) -> None:
        self.id = pool_id
        self.small = Pool(is_small=True, statistics=(all_pools, small), owner=self)
        self.large = Pool(is_small=False, statistics=(all_pools, large), owner=self)
        self.users = 1  # graphs and MemPool objects that hold it
        self.splits = True
        self.use_on_oom = False
        self.reserved_bytes = {"all": Stat(), "small_pool": Stat(), "large_pool": Stat()}
        self.small.reserved += (self.reserved_bytes["all"], self.reserved_bytes["small_pool"])
        self.large.reserved += (self.reserved_bytes["all"], self.reserved_bytes["large_pool"])
