"""Ends the loops of a program when they have made their steps, so that the program goes on behind them.

A torch DataLoader of such a loop has no more batches, and trainers are told to stop.  A loop without one may go on
for a second, since the end of most is near.  Then its iterator has no more items (`running_loops`).  Where there is
none, `LoopEnded` unwinds the loop, which `except Exception` does not catch.  A further loop, with another loader or a
new optimizer, makes as many steps as the first; so does one with a new optimizer behind a loop that ended before.
"""

import contextlib
import functools
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import outcome
from .imports import after_import
from .marks import Marks
from .running_loops import RunningLoops
from .step_counter import StepCounter

GRACE_SECONDS = 1.0
"""Time for which a loop without a loader may go on after its last wanted step, in a program of one process."""

_MOST_ALIKE = 8
"""Loops at one place over equally many weights; more of them are one, which makes an optimizer for each step."""

_MOST_LOADERS = 3
"""Loops at one place over loaders of equally many rows; more of them are epochs, each with a loader of its own."""

_MOST_KEEPING = 128
"""Batches that an evaluation runs at most if each of them leaves something on the card."""

LEAST_LEFT_BYTES = 2**14
"""Bytes that a batch or a step leaves on the card without a further look: a loss, a count."""

_MOST_EPOCHS = 100
"""Epochs in which a Lightning trainer without a last epoch may train more weights."""

_PATIENCE = 16
"""Number of times that a loop is unwound before the process is ended: something in it catches everything."""


class LoopEnded(SystemExit):
    """Unwinds a loop that has made its steps; a program that does not catch it ends with exit code 0."""


class Loops:
    """The loop that trains now.

    `wanted` is its number of steps, None for all; `made_steps` returns the number of steps that the program has made,
    and `is_enough` whether so many are enough for this loop.
    """

    def __init__(
        self,
        marks: Marks,
        optimizers: StepCounter,
        wanted: int | None,
        made_steps: Callable[[], int],
        is_enough: Callable[[int], bool],
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        """Place and first step of each loop, from 1, and the bytes of all tensors by step: `left` behind
        it, `held` before its backward."""
        self.keeping: list[dict[str, Any]] = []
        """Evaluations that were ended although each batch left something on the card: `place`, `batches` that were
        seen, `more` that were not, and `left_bytes` of a batch."""
        self.unwound = ""
        """Place of the pass at which a loop was unwound; empty if none was."""
        self.is_over = False
        """True when this loop has made its steps."""
        self.is_cut = False
        """True once a loop was ended before its own end."""
        self.is_evaluation_cut = False
        """True once an evaluation behind a loop was ended before its own end."""
        self.give_up: Callable[[], None] = lambda: None
        """Called when a loop does not end."""
        self.on_unwind: Callable[[], None] = lambda: None
        """Called before a loop is unwound."""
        self.complete: Callable[[], None] = lambda: None
        """Called when a further loop begins: the one before has made its steps."""
        self.end_step: Callable[[], bool] = lambda: True
        """Called when a loop goes on after its last wanted step; returns whether no further step is wanted."""
        self._marks, self._optimizers, self._wanted = marks, optimizers, wanted
        self._made_steps, self._is_enough = made_steps, is_enough
        self._base = 0
        self._new_elements: int | None = None
        self._alike: Counter[tuple[Any, ...]] = Counter()
        self._batches: _Batches | None = None
        self._over_since: float | None = None
        self._unwound = self._left = 0
        self._left_at = -1
        self._epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._is_placed = False
        self._running = RunningLoops()
        self._ended: set[tuple[Any, ...]] = set()
        self._backward_passes = 0

    def hook(self) -> None:
        """Follow data loaders and trainers from now on."""
        after_import("torch.utils.data.dataloader", self._hook_loaders)
        after_import("transformers.trainer_callback", self._hook_trainer)
        for package in ("lightning.pytorch", "pytorch_lightning"):
            after_import(f"{package}.loops.training_epoch_loop", self._hook_lightning)
        after_import("IPython.core.interactiveshell", _hook_notebook)

    def steps_here(self, steps: int) -> int:
        """Return how many of the program's steps belong to this loop."""
        return steps - self._base

    def add_optimizer(self, elements: int) -> None:
        """Note that an optimizer of so many weights was made: after the steps of a loop, it is for a further one."""
        if self.steps_here(self._made_steps()) > 0:
            self._new_elements = elements

    def begin_forward(self) -> None:
        """Begin a forward pass that may be the first one of a loop."""
        is_further = self._has_new_optimizer()
        if self._is_done():
            is_further = is_further or self._has_new_loader()
            if is_further:
                self.complete()
        if is_further or not self.rows:
            self._begin_loop()

    def _begin_loop(self) -> None:
        """Begin a loop with the next step."""
        self._base = self._made_steps()
        self.is_over = False
        self._over_since, self._unwound, self._left = None, 0, 0
        self.rows.append({"place": outcome.locate_caller(), "first_step": self._base + 1})
        self._is_placed = False

    def _has_new_optimizer(self) -> bool:
        """Return whether an optimizer for a further loop was made since the last pass."""
        elements, self._new_elements = self._new_elements, None
        if elements is None:
            return False
        return self._are_few(_MOST_ALIKE, elements)

    def _has_new_loader(self) -> bool:
        """Return whether the latest batch comes from a loader for a further loop."""
        batches = self._batches
        return batches is not None and batches.is_new and self._are_few(_MOST_LOADERS, *batches.size)

    def _are_few(self, most: int, *kind: Any) -> bool:
        """Return whether at most so many loops of a kind have begun at this place, with this one."""
        self._alike[outcome.locate_caller(), *kind] += 1
        return self._alike[outcome.locate_caller(), *kind] <= most

    def begin_backward(self) -> None:
        """Begin a backward pass.  Raises LoopEnded in a loop that should have ended."""
        self._backward_passes += 1
        made_steps = self._made_steps()
        self._note_held(made_steps)
        frame = self._running.find_frame(made_steps)
        if frame is not None and self.rows and not self._is_placed and self.steps_here(made_steps) > 0:
            self.rows[-1]["place"], self._is_placed = outcome.locate_caller(frame), True
        if not self.is_over or not self.end_step():
            return
        now = time.monotonic()
        self._over_since = self._over_since or now
        if now - self._over_since < GRACE_SECONDS and not self._is_distributed():
            return
        self.is_cut = True
        if frame is not None and self._running.end(frame, self._left):
            self._left, self._left_at = self._left + 1, made_steps
        if self._left_at == made_steps:
            return
        self.unwound = outcome.locate_caller()
        self.on_unwind()
        self._unwound += 1
        if self._unwound > _PATIENCE:
            self.give_up()
        raise LoopEnded(0)

    def note_left(self, step: int) -> None:
        """Note what is on the card behind the last optimizer of a step."""
        if self.rows and self._marks.is_recording:
            self.rows[-1].setdefault("left", {})[step] = self.count_held()

    def _note_held(self, step: int) -> None:
        """Note what is on the card as a backward pass of a step begins: all activations of its batch."""
        if self.rows and self._marks.is_recording:
            held = self.rows[-1].setdefault("held", {})
            held[step] = max(held.get(step, 0), self.count_held())

    def count_held(self) -> int:
        """Return the bytes of all tensors on this thread's device; 0 before its memory is recorded.

        What is allocated for them differs from step to step: a block may be up to 1 MiB larger than its tensor.
        """
        if not self._marks.is_recording:
            return 0
        torch = self._marks.torch
        return int(torch._C._cuda_memoryStats(torch.cuda.current_device())["requested_bytes"]["all"]["current"])

    def count_step(self) -> None:
        """Note that an optimizer steps."""
        self._running.note_step()

    def _is_done(self) -> bool:
        """Return whether this loop has made its last wanted step, also if the next one has not begun."""
        return self._is_enough(self._made_steps())

    def _is_distributed(self) -> bool:
        distributed = self._marks.torch.distributed
        return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)

    def _hook_loaders(self, module: ModuleType) -> None:
        loader, iterator = module.DataLoader, module._BaseDataLoaderIter
        begin, fetch = loader.__iter__, iterator.__next__

        @functools.wraps(begin)
        def begun(batches: Any) -> Any:
            made = begin(batches)
            made.tonnage_batches = _Batches(self, batches)
            return made

        @functools.wraps(fetch)
        def fetched(batches: Any) -> Any:
            own = getattr(batches, "tonnage_batches", None)
            if own is not None and own.is_at_end():
                self.is_cut = True
                raise StopIteration
            return fetch(batches)

        loader.__iter__, iterator.__next__ = begun, fetched

    def _hook_trainer(self, module: ModuleType) -> None:
        def stop(_handler: Any, control: Any) -> None:
            control.should_training_stop = True

        self._stop_after(module.CallbackHandler, ("on_step_end", "on_evaluate"), stop)

    def _hook_lightning(self, module: ModuleType) -> None:
        def stop(loop: Any, _result: None) -> None:
            if self._has_unfrozen(loop.trainer):
                self.complete()
                self._begin_loop()
                return
            loop.min_steps = loop.trainer.fit_loop.min_epochs = None
            loop.trainer.should_stop = True

        self._stop_after(module._TrainingEpochLoop, ("advance", "on_advance_end"), stop)

    def _has_unfrozen(self, trainer: Any) -> bool:
        """Do what callbacks for fine-tuning do in the next epoch in which they train more; False if there is none."""
        before = self._optimizers.signature()
        changes = [each.finetune_function for each in trainer.callbacks if hasattr(each, "finetune_function")]
        most = trainer.max_epochs if (trainer.max_epochs or -1) >= 0 else _MOST_EPOCHS
        while changes and self._epochs.setdefault(trainer, trainer.current_epoch) + 1 < most:
            self._epochs[trainer] += 1
            for change, optimizer in itertools.product(changes, trainer.optimizers):
                change(trainer.lightning_module, self._epochs[trainer], optimizer)
            if self._optimizers.signature() != before:
                return True
        return False

    def _stop_after(self, kind: Any, names: tuple[str, ...], stop: Callable[[Any, Any], None]) -> None:
        """Call `stop` with the object and the result of these methods once no further step is wanted.

        A step is followed by its evaluation: behind the evaluation, too, the next step must not begin.
        """
        for name in names:
            setattr(kind, name, self._followed(getattr(kind, name), stop))

    def _followed(self, original: Callable[..., Any], stop: Callable[[Any, Any], None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def followed(owner: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(owner, *args, **kwargs)
            if self._is_done() and self.end_step():
                self.is_cut = True
                stop(owner, result)
            return result

        return followed


def _hook_notebook(module: ModuleType) -> None:
    """Let a notebook go on behind a statement that was unwound: IPython runs one after the other by `exec`."""

    def run(*args: Any) -> None:
        with contextlib.suppress(LoopEnded):
            exec(*args)

    module.exec = run  # type: ignore[attr-defined]


def _length(dataset: Any) -> int | None:
    """Return the number of rows; None if it is not known."""
    try:
        return len(dataset)
    except Exception:  # a stream has none, and its own code may fail
        return None


class _Batches:
    """One pass over a data loader."""

    def __init__(self, loops: Loops, loader: Any) -> None:
        self._loops = loops
        self._place, self._loader = outcome.locate_caller(), loader
        self._signature = (self._place, id(loader), *loops._optimizers.signature())
        self._held: list[int] = []
        """Bytes of all tensors as each batch of an evaluation was asked for."""
        self.size = (loader.batch_size, _length(loader.dataset))
        """Rows of a batch, and of the data."""
        self._is_later = loops._is_done()
        """True if it began after the loop had made its steps."""
        self._passes, self._count = loops._backward_passes, 0

    @property
    def is_new(self) -> bool:
        """True if it began after the loop had made its steps, and is not that loop's own loader."""
        return self._is_later and self._signature not in self._loops._ended

    def is_at_end(self) -> bool:
        """Return whether there is no further batch, and count one if there is.

        After the steps of a loop its loader gives one batch each time it is begun again, for programs that divide by
        the number of batches; another loader, with which nothing is trained, as many as steps are wanted, or more if
        each of them leaves something on the card.
        """
        loops = self._loops
        if not loops._is_done():
            at_end = False
        elif not self._is_later:
            loops._ended.add(self._signature)  # a step that is counted may find the end of the data
            at_end = loops.end_step()
        elif self._signature in loops._ended:
            at_end = self._count >= 1
        elif loops._backward_passes > self._passes:
            at_end = loops.end_step()
        else:
            self._held.append(loops.count_held())
            at_end = self._count >= (loops._wanted or 1) and not self._must_go_on()
            loops.is_evaluation_cut = loops.is_evaluation_cut or (at_end and self._count_more() != 0)
        if at_end:
            loops._ended.add(self._signature)
        self._count += 1
        loops._batches = self
        return at_end

    def _must_go_on(self) -> bool:
        """Return whether batches leave something on the card, such as predictions that are kept for a metric.

        The first batches do not tell: a loader may fetch one ahead.
        """
        wanted = self._loops._wanted or 1
        if wanted < 2:
            return False
        left_bytes = (self._held[-1] - self._held[wanted - 1]) // (self._count - wanted + 1)
        if left_bytes < LEAST_LEFT_BYTES:
            return False
        if self._count < _MOST_KEEPING:
            return True
        more = self._count_more()
        if more:
            row = {"place": self._place, "batches": self._count, "more": more, "left_bytes": left_bytes}
            self._loops.keeping.append(row)
        return False

    def _count_more(self) -> int | None:
        """Return the number of batches that are left; None for an iterable data set, whose length is not known."""
        try:
            return max(0, len(self._loader) - self._count)
        except TypeError:
            return None
