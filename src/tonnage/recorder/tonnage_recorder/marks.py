"""Marks: numbered changes of phase or module, announced to the allocator and to the ghost's log.

The number is given to the caching allocator (`_cuda_setMemoryMetadata`, torch >= 2.10), which writes it into each of
its trace events, and to the ghost, which writes it into each record of its log.  Older allocators take no notes: for
them, the blocks handed out and taken back are counted at each mark.
"""

from array import array
from typing import Any

from .native import Native

MAX_EVENTS = 20_000_000
"""Events that the allocator's history holds at most."""


class Marks:
    """The marks of one process and the allocator's history that refers to them."""

    def __init__(self, torch: Any, native: Native | None) -> None:
        self.torch = torch
        self.native = native
        self.rows: list[tuple[int, str, str]] = [(0, "load", "")]
        """Completed steps, phase and module of each mark."""
        self.positions: dict[int, int] = {}
        """Number of blocks handed out or taken back before a mark, where they were counted."""
        self.steps = 0
        """Completed steps."""
        self.is_recording = False
        """True once CUDA is initialised and the allocator's history is on."""
        self.early_events: dict[str, array[int]] = {}
        """Events that were read while the program runs, as columns; the allocator's history began anew after them."""
        self.early_block_count = 0
        """Blocks that were handed out or taken back in these events."""
        self._event = ""
        self._set_metadata = getattr(torch._C, "_cuda_setMemoryMetadata", None)

    def latest(self) -> int:
        """Return the number of the current mark."""
        return len(self.rows) - 1

    def mark(self, phase: str, module: str) -> None:
        """Assign what happens in this thread from now on to this phase and module."""
        self.rows.append((self.steps, self._event or phase, module))
        if self.is_recording:
            if self._set_metadata is None:
                self.note_position()
            self._announce()

    def set_event(self, name: str) -> None:
        """Assign what happens now to this event instead of a step; an empty name ends the event."""
        self._event = name
        self.mark("other", "")

    def describe_latest(self) -> dict[str, Any]:
        """Return step, phase and module of the current mark."""
        step, phase, module = self.rows[-1]
        return {"step": step + 1, "phase": "backward" if phase == "recompute" else phase, "module": module}

    def begin_recording(self, out_of_memory: Any) -> None:
        """Turn on the allocator's history and observe requests that cannot be served."""
        self._record_history()
        self.torch._C._cuda_attach_out_of_memory_observer(out_of_memory)
        self.is_recording = True
        self.positions[self.latest()] = 0
        self._announce()

    def read_history(self, read: "dict[str, array[int]]", handed: int) -> None:
        """Keep the events so far, in which `handed` blocks changed hands, and clear the allocator's history."""
        self.early_events, self.early_block_count = read, handed
        self._record_history(clear_history=True)

    def note_position(self) -> None:
        """Count the blocks handed out or taken back before the current mark.

        This is needed for every mark where the allocator takes no notes itself (before torch 2.10), and where another
        thread, which has announced nothing yet, goes on allocating.  The counts are the allocator's own statistics: a
        Python callback for each block (`torch.cuda._gpu_trace`) would lose an exception that is on its way while
        tensors are freed, and checkpointing ends a recomputation with such an exception.
        """
        counts = self.torch._C._cuda_memoryStats(self.torch.cuda.current_device())["allocation"]["all"]
        self.positions[self.latest()] = int(counts["allocated"] + counts["freed"])

    def _announce(self) -> None:
        number = self.latest()
        if self._set_metadata is not None:
            self._set_metadata(str(number))
        if self.native is not None:
            self.native.mark(number)

    def _record_history(self, **options: Any) -> None:
        self.torch.cuda.memory._record_memory_history("all", context=None, max_entries=MAX_EVENTS, **options)
