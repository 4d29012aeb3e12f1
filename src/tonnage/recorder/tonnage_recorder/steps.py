"""Counts the steps of a program and stops it after the number that was asked for."""

import time
import weakref
from collections.abc import Callable
from typing import Any

from .claims import Claims
from .cuda_graphs import MOST_WARM_UPS
from .loops import Loops
from .marks import Marks
from .networks import Networks
from .shortage import Shortage
from .step_counter import StepCounter, count_elements

PASSES_A_STEP = 32
"""Backward passes that stand for a step where no optimizer says when one is made: a program may update its weights
by hand, or in backward (LOMO).  Gradients are rarely accumulated over as many."""


class Steps:
    """The step that is being made.  A step counts when the next one begins.

    `on_step` is called with the number of completed steps, `on_stop` when there are as many as `stop_after`.
    """

    def __init__(
        self,
        marks: Marks,
        claims: Claims,
        networks: Networks,
        shortage: Shortage,
        *,
        stop_after: int | None,
        on_step: Callable[[int], None],
        on_stop: Callable[[], None],
    ) -> None:
        self.optimizers = StepCounter(claims.is_here)
        self.is_stepped = False
        """True once an optimizer has stepped in this step."""
        self.is_backward_seen = False
        """True once a backward pass has ended in this step."""
        self.backward_passes = 0
        """Backward passes of this step."""
        self.passes_a_step = 0
        """Backward passes of the last whole step."""
        self.updating: weakref.ref[Any] | None = None
        """The optimizer that is in its `step` now."""
        self.loops = Loops(marks, self.optimizers, stop_after, self.count_made, self._is_enough)
        """The loops of the program."""
        self._marks, self._networks, self._shortage = marks, networks, shortage
        self._stop_after = stop_after
        self._on_step, self._on_stop = on_step, on_stop
        self._is_on_other_stream = False

    def add(self) -> None:
        """Note a step that was made without an optimizer."""
        self.is_stepped = self._shortage.is_overcome = True

    def add_optimizer(self, optimizer: Any) -> None:
        """Add a new optimizer."""
        self.optimizers.add(optimizer)
        self.loops.add_optimizer(count_elements(optimizer))

    def count(self, optimizer: Any) -> None:
        """Count the step of an optimizer."""
        self.add()
        self.loops.count_step()
        self._note_stream()
        self.optimizers.count(optimizer)
        self.loops.note_left(self._marks.steps)

    def count_made(self) -> int:
        """Return the number of steps with the latest, once all optimizers have stepped in it."""
        return self._marks.steps + (self.is_stepped and not self.optimizers.is_unfinished())

    def begin_pass(self) -> None:
        """Begin a forward or backward: if the optimizers stepped since the last one, a step is complete."""
        if not self.is_stepped and self._are_passes_enough():
            self.loops.is_over = True
            self._on_stop()
        if not self.is_stepped or self.optimizers.is_unfinished():
            return
        self.optimizers.begin_step()
        self._networks.update_model()
        self.is_stepped = self.is_backward_seen = False
        self.passes_a_step, self.backward_passes = self.backward_passes, 0
        self._marks.steps += 1
        self._on_step(self._marks.steps)
        if self._is_enough(self._marks.steps):
            self._shortage.is_overcome = True  # what ran out since the last step was for one that nobody asked for
            self.loops.is_over = True
            self._on_stop()
        if self._marks.native is not None:
            let_watchdog_pass(self._marks.torch)

    def is_done(self) -> bool:
        """Return whether the last of the steps that are wanted is made."""
        return self.is_stepped and not self.optimizers.is_unfinished() and self._is_enough(self._marks.steps + 1)

    def finish(self) -> None:
        """Count the last step of a run that is over."""
        if self.is_stepped:
            self.is_stepped = self.is_backward_seen = False
            self._marks.steps += 1

    def describe_omissions(self) -> list[str]:
        """Return a sentence for each optimizer that trains something alone and never stepped, or for having none."""
        sentences = [
            f"an optimizer of {count:,} elements never stepped: its states are not included"
            for count in self.optimizers.sizes_never_stepped(None if self.updating is None else self.updating())
        ]
        if self._are_passes_enough():
            sentences.append(f"no optimizer makes steps here: {self.backward_passes} backward passes count as steps")
        return sentences

    def _note_stream(self) -> None:
        """Note whether this thread works on another stream than the default one."""
        cuda = self._marks.torch.cuda
        self._is_on_other_stream = self._marks.is_recording and bool(cuda.current_stream() != cuda.default_stream())

    def _is_enough(self, steps: int) -> bool:
        wanted = self._stop_after
        return wanted is not None and self.loops.steps_here(steps) >= wanted + self._warm_ups()

    def _warm_ups(self) -> int:
        """Return the steps that may come before a capture of a CUDA graph, which needs the most memory.

        Warm-ups are made on another stream than the default one.
        """
        return MOST_WARM_UPS if self._is_on_other_stream else 0

    def _are_passes_enough(self) -> bool:
        """Return whether there were backward passes for all steps, in a program without optimizers."""
        wanted = self._stop_after
        return wanted is not None and self.backward_passes >= wanted * PASSES_A_STEP and self.optimizers.is_empty()


WATCHDOG_SECONDS = 0.15
"""A little more than the 100 ms at which ProcessGroupNCCL's watchdog looks for finished work."""


def let_watchdog_pass(torch: Any) -> None:
    """Give NCCL's watchdog the time between two steps that it has on a real GPU.

    The watchdog holds the results of collectives (DDP's buckets, until they are rebuilt in the second step) until it
    has seen that they are finished.  A step on a ghost can be over before it looks once; on a GPU it rarely is.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and "nccl" in distributed.get_backend():
        time.sleep(WATCHDOG_SECONDS)
