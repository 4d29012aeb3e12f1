"""One case on the GPU at hand: its step run a few times and everything about memory and time written down.

Runs in a process of its own that has not touched CUDA before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any, Final

import driver
import events
import packed
import torch
from case import Case
from kernels import kernels_of
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tonnage.step import events as step_events
from tonnage.step import model
from tonnage.step.step import ReadyStep
from tonnage.step.world import World
from tonnage.techniques import build
from tonnage.techniques import environment as technique_environment
from tonnage.trainers import engine_of

MEMORY_STEPS: Final = 3
"""The first makes the optimizer's state, the second is the first with it, the third shows whether it repeats."""
TIMED_SECONDS: Final = 1.5
"""About how long the steps for timing may take together; at least three, at most ten."""
TIMED_BY_TRAINER: Final = 5
"""Steps for timing of a trainer, which is told how many there are before it begins, and one before them."""
PEAKS: Final = {
    "allocated_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.peak",
    "active_bytes": "active_bytes.all.peak",
    "requested_bytes": "requested_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.peak",
    "segments": "segment.all.peak",
}
"""What is kept of a phase, by its name in `torch.cuda.memory_stats`."""
COUNTERS: Final = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "inactive_split_bytes.all.current",
    "segment.all.current",
)


class Phases:
    """Peaks between marks: each mark ends a phase, and its peaks are added to the phase's of this step."""

    def __init__(self) -> None:
        self.of_step: dict[str, dict[str, int]] = {}
        self._running: str | None = None
        self._event = ""

    def set_event(self, name: str) -> None:
        """What happens besides steps is one phase, whatever is marked in it; with an empty name it is over."""
        self._event = ""
        self.mark(name or None)
        self._event = name

    def mark(self, name: str | None) -> None:
        """The running phase ends and `name` begins; None: nothing is running."""
        if self._event:
            return
        if self._running is not None:
            stats = torch.cuda.memory_stats()
            peaks = self.of_step.setdefault(self._running, dict.fromkeys(PEAKS, 0))
            for key, counter in PEAKS.items():
                peaks[key] = max(peaks[key], stats[counter])
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            peaks["cuda_used_bytes"] = max(peaks.get("cuda_used_bytes", 0), total_bytes - free_bytes)
        self._running = name
        torch.cuda.reset_peak_memory_stats()

    @property
    def running(self) -> str | None:
        """The phase that has begun last."""
        return self._running

    def take(self) -> dict[str, dict[str, int]]:
        """The peaks since the last call, by phase."""
        taken, self.of_step = self.of_step, {}
        return taken


def measure(case: Case, *, source: str) -> Iterator[dict[str, Any]]:
    """The record of a case in parts, so that what comes late cannot lose what came first.

    An out-of-memory error is part of it; anything else is raised.
    """
    before = {"nvml_used_bytes": driver.device_used()}
    began = time.perf_counter()
    torch.cuda.init()
    torch.cuda.set_device(0)
    yield {
        "case": case.name,
        "source": source,
        "job": asdict(case.job),
        "plan": asdict(case.plan),
        "limit_bytes": case.limit_bytes,
        "before": before,
        "context": driver.observe(),
        "context_seconds": time.perf_counter() - began,
    }
    _limit(case)
    events.start()
    phases = Phases()
    try:
        yield from (_run_trainer if case.by_trainer else _run)(case, phases, source)
    except torch.OutOfMemoryError as error:
        oom = {"message": str(error), "phase": phases.running}
        phases.mark(None)
        yield {"oom": oom, "unfinished": phases.take()}
        if case.traced:
            yield {"trace": packed.pack(events.columns(events.recorded()))}
    yield {
        "end": driver.observe(),
        "host_bytes": driver.host_bytes(),
        "versions": driver.versions(),
        "allocator_settings": torch.cuda.memory._snapshot(0).get("allocator_settings"),
    }


def _limit(case: Case) -> None:
    if case.limit_bytes is None:
        return
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    # half a byte more, so that rounding down in the allocator gives the limit itself
    torch.cuda.set_per_process_memory_fraction((case.limit_bytes + 0.5) / total_bytes)


def _run(case: Case, phases: Phases, source: str) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    if case.plan.shard != "none":
        yield {"process_group": _alone_in_a_group()}
    phases.mark("load")
    began = time.perf_counter()
    ready = build(case.job, case.plan, device="cuda", initialise=True)
    torch.cuda.synchronize()
    phases.mark(None)
    yield {
        "load": {
            "seconds": time.perf_counter() - began,
            "phases": phases.take(),
            "parameters": sum(parameter.numel() for parameter in ready.model.parameters()),
            "trainable_parameters": sum(p.numel() for p in ready.model.parameters() if p.requires_grad),
            **driver.observe(),
        }
    }
    taken: list[dict[str, Any]] = []
    try:
        _memory_steps(ready, phases, taken, source, awaited=case.awaited)
    finally:
        yield {"steps": taken}
    if case.traced:
        yield {"trace": packed.pack(events.columns(events.recorded()))}
    torch.cuda.memory._record_memory_history(None)
    if source == "real" and case.timed:
        yield {"timing": _timed_steps(ready, case, taken[-1]["seconds"])}
        if case.profiled:
            yield {"kernels": packed.pack(kernels_of(lambda: ready.run(1)))}


def _run_trainer(case: Case, phases: Phases, source: str) -> Iterator[dict[str, Any]]:
    """A trainer builds network and optimizer and runs all steps, which are told apart by those of its optimizer."""
    torch.manual_seed(0)
    watched = TrainerSteps(phases, source, traced=case.traced)
    steps_for_timing = TIMED_BY_TRAINER + 1 if source == "real" else 0
    world = World(size=1, rank=0, gpus_per_node=8, device=torch.device("cuda"))
    try:
        with _without_garbage(source), watched:
            kept = engine_of(case.plan).run(case.job, case.plan, world, MEMORY_STEPS + steps_for_timing)
    finally:
        yield {"steps": watched.taken}
    if watched.trace is not None:
        yield {"trace": packed.pack(events.columns(watched.trace))}
    if watched.marks:
        torch.cuda.synchronize()
        yield {"timing": _timing(watched.marks, case)}
    del kept


@contextmanager
def _without_garbage(source: str) -> Iterator[None]:
    """Networks for trainers get weights of zero on a real card: of whatever memory holds, losses may be no numbers.

    A trainer that looks for those (DeepSpeed, Megatron) would then leave its steps out.
    """
    build = model.build

    def zeroed(*given: Any, **named: Any) -> torch.nn.Module:
        network = build(*given, **named)
        with torch.no_grad():
            for parameter in network.parameters():
                getattr(parameter, "ds_tensor", parameter).zero_()  # the part that DeepSpeed's stage 3 leaves
        return network

    model.build = zeroed if source == "real" else build
    try:
        yield
    finally:
        model.build = build


class TrainerSteps:
    """What each step of a trainer did: as `_memory_steps` has it for the first ones, marks in time for the rest.

    A phase is `backward` while autograd runs, `optimizer` while the optimizer does, else `step`.  An optimizer's step
    without a backward before it makes states ahead of time (DeepSpeed) and ends nothing.
    """

    def __init__(self, phases: Phases, source: str, *, traced: bool) -> None:
        self.taken: list[dict[str, Any]] = []
        self.trace: list[dict[str, Any]] | None = None
        self.marks: list[torch.cuda.Event] = []
        self._phases, self._source, self._traced = phases, source, traced
        self._began = 0.0
        self._went_back = False
        self._closing = ExitStack()

    def __enter__(self) -> None:
        run_backward = torch.autograd._engine_run_backward
        torch.autograd._engine_run_backward = partial(self._backward, run_backward)
        self._closing.callback(setattr, torch.autograd, "_engine_run_backward", run_backward)
        self._closing.callback(register_optimizer_step_pre_hook(self._before).remove)
        self._closing.callback(register_optimizer_step_post_hook(self._after).remove)
        self._began = time.perf_counter()
        self._phases.mark("step")

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _mark(self, phase: str) -> None:
        if len(self.taken) < MEMORY_STEPS:
            self._phases.mark(phase)

    def _backward(self, run_backward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._went_back = True
        if self._phases.running == "backward":  # of a layer that runs again
            return run_backward(*given, **named)
        self._mark("backward")
        try:
            return run_backward(*given, **named)
        finally:
            self._mark("step")

    def _before(self, *_: object) -> None:
        self._mark("optimizer")

    def _after(self, *_: object) -> None:
        if not self._went_back:
            self._mark("step")
            return
        self._went_back = False
        if len(self.taken) == MEMORY_STEPS:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
            return
        self.taken.append(_observed(self._phases, self._source, self._began))
        self._mark("step")
        self._began = time.perf_counter()
        if len(self.taken) == MEMORY_STEPS:
            self.trace = events.recorded() if self._traced else None
            torch.cuda.memory._record_memory_history(None)


def _alone_in_a_group() -> dict[str, Any]:
    import torch.distributed as dist

    before = driver.observe()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1024, device="cuda"))
    torch.cuda.synchronize()
    return {"before": before, "after": driver.observe()}


def _hook(ready: ReadyStep, phases: Phases) -> Callable[[], None]:
    """Marks at the borders of forward, backward and optimizer; returns what takes them away again."""
    handles = [
        ready.model.register_forward_pre_hook(lambda *_: phases.mark("forward")),
        ready.model.register_forward_hook(lambda *_: phases.mark("backward")),
    ]
    for optimizer in ready.optimizers:
        handles.append(optimizer.register_step_pre_hook(lambda *_: phases.mark("optimizer")))

    def unhook() -> None:
        for handle in handles:
            handle.remove()

    return unhook


def _memory_steps(
    ready: ReadyStep, phases: Phases, taken: list[dict[str, Any]], source: str, *, awaited: bool
) -> None:
    """Runs MEMORY_STEPS steps and adds to `taken` what each did, waiting for the GPU after each if it is awaited."""
    began = time.perf_counter()

    def on_step(index: int) -> None:
        nonlocal began
        taken.append(_observed(phases, source, began, awaited=awaited))
        began = time.perf_counter()

    unhook = _hook(ready, phases)
    step_events.listen(phases.set_event)
    try:
        ready.run(MEMORY_STEPS, on_step)
    finally:
        unhook()


def _observed(phases: Phases, source: str, began: float, *, awaited: bool = True) -> dict[str, Any]:
    """What a step did that began then, once the GPU has done all of it if it is awaited."""
    if awaited:
        torch.cuda.synchronize()
    phases.mark(None)
    if source == "ghost":
        from tonnage_recorder.steps import let_watchdog_pass

        let_watchdog_pass(torch)
    stats = torch.cuda.memory_stats()
    return {
        "seconds": time.perf_counter() - began,
        "phases": phases.take(),
        "counters": {key: stats.get(key) for key in COUNTERS},
        **driver.observe(),
    }


def _timed_steps(ready: ReadyStep, case: Case, seconds: float) -> dict[str, Any]:
    """Seconds from step to step by CUDA events, without waiting in between, after one step to warm up."""
    count = max(3, min(10, int(TIMED_SECONDS / max(seconds, 1e-3))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 2)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks[0].record()
    began = time.perf_counter()
    ready.run(count + 1, lambda index: marks[index + 1].record())
    torch.cuda.synchronize()
    return {**_timing(marks[1:], case), "wall_seconds": (time.perf_counter() - began) / (count + 1)}


def _timing(marks: list[torch.cuda.Event], case: Case) -> dict[str, Any]:
    """Seconds between marks, one mark at the end of each step, and the memory that these steps took at most."""
    each = [first.elapsed_time(second) / 1e3 for first, second in pairwise(marks)]
    median = sorted(each)[len(each) // 2]
    return {
        "step_seconds": each,
        "median_seconds": median,
        "tokens_per_second": case.job.tokens_per_micro_batch * case.job.grad_accum / median,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def environment(case: Case) -> dict[str, str]:
    """What must be set before the case's process touches CUDA."""
    return {**technique_environment(case.plan), "TOKENIZERS_PARALLELISM": "false"}


def apply_environment(case: Case) -> None:
    """Set it here: the allocator reads its settings when it is first used."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.pop(name, None)
    os.environ.update(environment(case))
