"""Freed blocks that other streams may still use, and the events that tell when those streams are done.

A block that was used on other streams (`record_stream`) becomes free when an event on each of them has finished.
"""

from collections import deque

from tonnage.allocator.blocks import Block, PrivatePool
from tonnage.allocator.heap import Heap


class StreamEvents:
    """The events for which the freed blocks of one heap wait.

    Work on other streams finishes at once or, with `lazy`, when `synchronise` is called.
    """

    def __init__(self, heap: Heap, *, lazy: bool) -> None:
        self.last_ticket = 0
        """Number of the newest event or held block; tickets are numbered from 1."""
        self._heap = heap
        self._lazy = lazy
        self._held: dict[int, Block] = {}
        self._queues: dict[int, deque[tuple[int, Block]]] = {}
        self._finished_everywhere = 0
        self._finished: dict[int, int] = {}
        self._deferred: dict[Block, None] = {}
        self._uses_in_capture: dict[Block, set[int]] = {}

    def hold(self, block: Block) -> None:
        """Keep a freed block until `complete` is called with its ticket, which is `last_ticket` now."""
        block.events = 1
        self.last_ticket += 1
        self._held[self.last_ticket] = block

    def complete(self, ticket: int) -> bool:
        """Finish the only event of a held block; return False when the block no longer waits."""
        block = self._held.pop(ticket, None)
        if block is None:
            return False
        self._finish_event(block)
        return True

    def insert(self, block: Block) -> None:
        """Insert an event for a freed block into each other stream that used it."""
        streams, block.uses = block.uses, set()
        self.last_ticket += 1
        for stream in streams:
            block.events += 1
            self._queues.setdefault(stream, deque()).append((self.last_ticket, block))

    def defer(self, block: Block) -> None:
        """Insert the events of a block that is freed during a capture later, after the capture."""
        self._deferred[block] = None

    def note_use_in_capture(self, block: Block, stream: int) -> None:
        """Record a use of a block that is captured in a graph, for which no event is needed."""
        self._uses_in_capture.setdefault(block, set()).add(stream)

    def synchronise(self, stream: int | None) -> None:
        """Finish all work so far on one stream, or on all (None)."""
        if stream is None:
            self._finished_everywhere = self.last_ticket
        else:
            self._finished[stream] = self.last_ticket

    def process(self) -> None:
        """Free the blocks of finished events; stop at the first unfinished event of each stream."""
        if self._deferred:
            self._insert_deferred()
        if not self._queues:
            return
        for stream in list(self._queues):
            queue = self._queues[stream]
            while queue and self._is_finished(stream, queue[0][0]):
                self._finish_event(queue.popleft()[1])
            if not queue:
                del self._queues[stream]

    def wait(self, private: PrivatePool | None = None) -> None:
        """Finish the events of all blocks, or of one private pool's blocks, and free those blocks."""
        self._heap.counters["num_sync_all_streams"] += 1
        self._insert_deferred()
        for stream in list(self._queues):
            remaining: deque[tuple[int, Block]] = deque()
            for ticket, block in self._queues[stream]:
                if private is None or block.pool.owner is private:
                    self._finish_event(block)
                else:
                    remaining.append((ticket, block))
            if remaining:
                self._queues[stream] = remaining
            else:
                del self._queues[stream]
        for ticket, block in list(self._held.items()):
            if private is None or block.pool.owner is private:
                self.complete(ticket)

    def _insert_deferred(self) -> None:
        """Insert the events of the blocks freed during a capture; uses inside the capture need none."""
        deferred, self._deferred = self._deferred, {}
        for block in deferred:
            block.uses -= self._uses_in_capture.pop(block, set())
            self.insert(block)
            if block.events == 0:
                self._free(block)

    def _is_finished(self, stream: int, ticket: int) -> bool:
        return not self._lazy or ticket <= max(self._finished_everywhere, self._finished.get(stream, 0))

    def _finish_event(self, block: Block) -> None:
        block.events -= 1
        if block.events == 0:
            self._free(block)

    def _free(self, block: Block) -> None:
        self._heap.waiting.discard(block)
        self._heap.free(block)
