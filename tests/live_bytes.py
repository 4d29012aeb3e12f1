"""Bytes alive on the CPU at every boundary of a step: counted by torch's profiler in a real run, and predicted.

A boundary is the moment when network and optimizer are made (load), a backward begins (forward) or has ended
(backward), or an optimizer step has ended (step).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from tonnage.job import Job
from tonnage.meta import recording
from tonnage.plans import Plan
from tonnage.techniques import build

MARK = "boundary: "
SETTLING_SECONDS = 0.1
"""After a collective gloo's own threads hold its tensors until they have put it away."""
Boundaries = list[tuple[str, int]]
Reached = Callable[[str], None]


def measured(job: Job, plan: Plan, count: int = 2, **ranks: Any) -> tuple[Boundaries, int]:
    """Run with real memory under torch's profiler; return live bytes at each boundary, and the most ever alive.

    The profiler records each of the allocator's allocations and frees with its size.
    """

    def reached(name: str) -> None:
        if dist.is_initialized():
            time.sleep(SETTLING_SECONDS)
        with record_function(MARK + name):
            pass

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        torch.manual_seed(0)
        kept = _train(job, plan, count, reached, initialise=True, **ranks)
    del kept
    events = [
        (event.start_ns(), event.name(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" or event.name().startswith(MARK)
    ]
    boundaries: Boundaries = []
    live = peak = 0
    for _, name, change in sorted(events, key=lambda event: event[0]):
        if name == "[memory]":
            live += change
            peak = max(peak, live)
        else:
            boundaries.append((name.removeprefix(MARK), live))
    return boundaries, peak


def predicted(job: Job, plan: Plan, count: int = 2, **ranks: Any) -> tuple[Boundaries, int]:
    """Return the same for the step recorded without computing."""
    boundaries: Boundaries = []
    with recording.recording(torch.device("cpu"), 2**40) as (recorder, _watch):

        def reached(name: str) -> None:
            recorder.settle()
            boundaries.append((name, recorder.memory.live_bytes))

        kept = _train(job, plan, count, reached, initialise=False, **ranks)
        del kept
    return boundaries, recorder.memory.peak_allocated_bytes


def _train(job: Job, plan: Plan, count: int, reached: Reached, *, initialise: bool, **ranks: Any) -> Any:
    ready = build(job, plan, device="cpu", initialise=initialise, **ranks)
    reached("load")
    with _backward_told(reached):
        ready.run(count, lambda index: reached("step"))
    ready.close()
    return ready


@contextmanager
def _backward_told(reached: Reached) -> Iterator[None]:
    original = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        reached("forward")
        original(self, *args, **kwargs)
        reached("backward")

    torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]
