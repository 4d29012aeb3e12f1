"""Sources of the Trace of a rank's steps: a ghost GPU, fake tensors for an imitated GPU, or the host's CPU.

Each source has `trace(case, rank, steps)`; everything above sees Cases and Traces only.  `SOURCES` lists the values
of the option `--source`; a further source is one class here and one line there.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

from tonnage.case import Case
from tonnage.cluster import CPU
from tonnage.errors import CannotEstimate, GhostUnavailable, UsageError
from tonnage.estimates import cache
from tonnage.estimates.step_time import needs_counting
from tonnage.ghost.environment import any_libraries
from tonnage.meta import scope
from tonnage.plans import Allocator
from tonnage.shallow.continuing import extend, requests_of
from tonnage.shallow.depths import choose_assembly_depths, counted_micro_batches, layers_of, roomy, with_layers
from tonnage.shallow.requests import Requests
from tonnage.trace.operations import StepOperations
from tonnage.trace.trace import Trace
from tonnage.units import pluralise
from tonnage.workers.worker import Worker, request

ALLOCATORS: Final[tuple[Allocator, ...]] = ("expandable", "default")
"""The choice between them changes where blocks are, not which are requested."""

Progress = Callable[[str], None]


class Source(Protocol):
    """A way to find what a rank's training steps request from its device."""

    reused: int
    """Traces that were taken from the cache so far."""

    def trace(self, case: Case, rank: int, steps: int) -> Trace:
        """Return what one rank requests in `steps` optimizer steps; `case` has its accumulation steps decided.

        Raises UsageError for a case that the source does not support, CannotEstimate if the model cannot be built,
        GhostUnavailable if no ghost can run here.
        """


@dataclass(kw_only=True)
class Cpu:
    """Records steps on the host's CPU without computing them (`tonnage.meta.recording`)."""

    progress: Progress = lambda text: None
    reused: int = 0

    def trace(self, case: Case, rank: int, steps: int) -> Trace:
        """Return the Trace; see Source."""
        _check_torch()
        from tonnage.meta import recording  # imports torch

        self.progress(f"recording {pluralise(steps, 'step')} on the CPU without computing them")
        return recording.run(case, rank=rank, steps=steps)


@dataclass(kw_only=True)
class Meta:
    """Imitates a GPU with fake tensors on any platform (`tonnage.meta.step`)."""

    fresh: bool = False
    """True to run the steps even if their Trace is cached."""
    progress: Progress = lambda text: None
    reused: int = 0

    def trace(self, case: Case, rank: int, steps: int) -> Trace:
        """Return the Trace; see Source."""
        for refusal in scope.refusals(case):
            raise UsageError(f"{refusal}")
        key = _key(case, None, source="meta", rank=rank, steps=steps)
        if (cached := _find(key, self.fresh)) is not None:
            self.reused += 1
            return cached
        _check_torch()
        from tonnage.meta import step  # imports torch

        self.progress(f"imitating {pluralise(steps, 'step')} on one {case.cluster.device.id}")
        trace = step.run(case, rank=rank, steps=steps)
        if key is not None and key == _key(case, None, source="meta", rank=rank, steps=steps):
            cache.keep(key, trace, None)
        return trace


@dataclass(kw_only=True)
class Ghost:
    """Runs steps on a ghost GPU, in a warm worker that is started for the first run and closed with `stack`."""

    stack: ExitStack
    """Closes the worker that is started here."""
    worker: Worker | None = None
    """The worker to use; None: a new one, if anything has to run."""
    torch_version: str | None = None
    """The torch of a new worker; None: the installed one."""
    repeated: int = 0
    """Further repetitions of a single step's requests, without the program."""
    few_layers: bool = False
    """True to let networks of a few layers replace a deep one (`tonnage.shallow`)."""
    fresh: bool = False
    """True to run the steps even if their Trace is cached."""
    counting: bool = False
    """True to count operations if a network's dimensions do not give its seconds (`tonnage.timing.replay`)."""
    sketched: bool = False
    """True to replace what would have to be compiled by something of the same size (`tonnage.step.flex_stub`)."""
    adopt: Callable[[Worker], None] | None = None
    """Takes over the worker that is started here, and closes it; None: it is closed with `stack`."""
    progress: Progress = lambda text: None
    reused: int = 0

    def trace(self, case: Case, rank: int, steps: int) -> Trace:
        """Return the Trace; see Source."""
        depths = choose_assembly_depths(case.job, case.plan) if self.few_layers else None
        counting = self.counting and needs_counting(case)
        cached = _find(self._key(case, rank, steps, depths), self.fresh)
        if cached is not None and (cached.worked is not None or not counting):
            self.reused += 1
            return cached
        key = self._key(case, rank, steps, depths)
        trace = self._extend_shallow(case, rank, depths) if depths is not None else None
        trace_file = None
        if trace is None:
            trace, trace_file = self._run(case, rank, steps), self._start_worker(case).trace_file
        if counting and trace.outcome["kind"] == "completed":
            trace, trace_file = replace(trace, worked=self._count(case, rank)), None
        if key is not None and key == self._key(case, rank, steps, depths):  # nothing was installed in the meantime
            cache.keep(key, trace, trace_file)
        return trace

    def _key(self, case: Case, rank: int, steps: int, depths: tuple[int, int, int] | None = None) -> str | None:
        version = self.worker.torch_version if self.worker is not None else self.torch_version
        run = {"steps": steps, "repeated": self.repeated, "sketched": self.sketched}
        return _key(case, version, source="ghost", depths=depths, rank=rank, **run)

    def _run(self, case: Case, rank: int, steps: int) -> Trace:
        run = partial(self._start_worker(case, steps).run, case.job, case.plan, case.cluster, rank=rank)
        trace: Trace = run(steps=steps, repeated=self.repeated, sketched=self.sketched)
        if trace.repeated and trace.outcome["kind"] == "oom" and not self.few_layers:
            trace = run(steps=steps + self.repeated)  # a repetition has no stack to report
        return trace

    def _count(self, case: Case, rank: int) -> StepOperations | None:
        """Return the operations of a step; None if its second one cannot run while they are counted."""
        self.progress("counting the operations of a step, for its seconds")
        worker = self._start_worker(case)
        job = replace(case.job, grad_accum=counted_micro_batches(case.job, case.plan))
        try:
            return worker.count_operations(job, case.plan, case.cluster, rank=rank)
        except CannotEstimate:
            if worker.closed:
                raise
            return None

    def _extend_shallow(self, case: Case, rank: int, depths: tuple[int, int, int]) -> Trace | None:
        """Return the Trace from networks of a few layers; None if they do not determine the requests of all
        layers.
        """
        worker = self._start_worker(case)
        source = replace(self, worker=worker, repeated=0, few_layers=False)
        layers = layers_of(case.job)
        shallow_cases = [
            replace(case, job=with_layers(case.job, depth), cluster=roomy(case.cluster)) for depth in depths
        ]
        try:
            runs = [source._trace_under_any_allocator(shallow, rank) for shallow in shallow_cases]
            keys = [source._key(_with_allocator(shallow, ALLOCATORS[0]), rank, 1) for shallow in shallow_cases]
            requests = _requests((*keys, layers), partial(requests_of, runs, depths, layers))
        except CannotEstimate:
            if worker.closed:  # it died with that error
                raise
            return None
        trace = worker.repeat(requests, case.job, case.plan, case.cluster, rank=rank, repeated=self.repeated)
        if trace.outcome["kind"] == "oom" and trace.outcome.get("phase") in requests.growing:
            return None
        return extend(trace, runs, depths, layers)

    def _trace_under_any_allocator(self, case: Case, rank: int) -> Trace:
        """Return the Trace of one step, or one that is cached under another allocator if everything fits.

        What a program requests does not depend on the allocator.
        """
        cases = (case, *(_with_allocator(case, allocator) for allocator in ALLOCATORS))
        cached = (_find(self._key(variant, rank, 1), self.fresh) for variant in cases)
        return next((trace for trace in cached if trace is not None), None) or self.trace(case, rank, 1)

    def _start_worker(self, case: Case, steps: int = 1) -> Worker:
        if self.worker is None:
            worker = _start(self.torch_version, self.progress)
            if self.adopt is None:
                self.stack.push(worker)
            else:
                self.adopt(worker)
            self.worker = worker
            steps_made = pluralise(steps + self.repeated, "step")
            self.progress(f"running {steps_made} on a ghost {case.cluster.device.id}")
        return self.worker


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of all sources."""

    torch_version: str | None = None
    """The torch to run; None: the installed one."""
    worker: Any = None
    """A warm `tonnage.Worker` to use; None: a new one."""
    repeated: int = 0
    """See Ghost."""
    few_layers: bool = False
    """See Ghost."""
    fresh: bool = False
    """True to run steps even if their Trace is cached."""
    counting: bool = False
    """See Ghost."""
    sketched: bool = False
    """See Ghost."""
    adopt: Callable[[Worker], None] | None = None
    """See Ghost."""
    progress: Progress = lambda text: None
    """Called with a description of the current work."""


def _open_ghost(options: Options, stack: ExitStack) -> Source:
    return Ghost(stack=stack, **vars(options))


def _open_meta(options: Options, stack: ExitStack) -> Source:
    if (options.worker.torch_version if options.worker is not None else options.torch_version) is not None:
        raise UsageError("The source meta runs the installed torch only; leave the version out, or choose ghost.")
    return Meta(fresh=options.fresh, progress=options.progress)


SOURCES: Final[Mapping[str, Callable[[Options, ExitStack], Source]]] = {"ghost": _open_ghost, "meta": _open_meta}
"""The sources that `--source` can choose.

`real` is a `Trace.source` but not one of these: such a Trace was recorded on a real GPU and is only read.
"""


def open_source(name: str, case: Case, options: Options, stack: ExitStack) -> Source:
    """Return the source of this name for a case; on the CPU nothing has to be imitated, whatever the name.

    What it starts is closed with `stack`.  Raises UsageError for an unknown name.
    """
    if name not in SOURCES:
        raise UsageError(f"Unknown source {name!r}; possible: {', '.join(SOURCES)}.")
    if case.cluster.device.id == CPU:
        return Cpu(progress=options.progress)
    return SOURCES[name](options, stack)


def _key(case: Case, version: str | None, *, source: str, depths: Any = None, **run: Any) -> str | None:
    """Return the cache key of the Trace; None if not all that it depends on is known."""
    worker_request = request(case.job, case.plan, case.cluster, **run)
    return cache.key({**worker_request, "source": source, "depths": depths}, version)


def _find(key: str | None, fresh: bool) -> Trace | None:
    return cache.find(key) if key is not None and not fresh else None


def _with_allocator(case: Case, allocator: Allocator) -> Case:
    return replace(case, plan=replace(case.plan, allocator=allocator))


_KEPT_REQUESTS: Final = 2
"""Requests of whole networks that are kept: a plan is run under both allocators, one soon after the other."""


_made_requests: dict[tuple[Any, ...], Requests] = {}
"""The latest requests, by the keys of the runs that they were made from."""


def _requests(key: tuple[Any, ...], make: Callable[[], Requests]) -> Requests:
    """Return what `make` makes, or the cached result for runs with the same keys; without keys always new."""
    if None in key:
        return make()
    if key not in _made_requests:
        made = make()
        while len(_made_requests) >= _KEPT_REQUESTS:
            _made_requests.pop(next(iter(_made_requests)), None)
        _made_requests[key] = made
    return _made_requests[key]


def _check_torch() -> None:
    """Raise CannotEstimate if torch has no torch.distributed: recorded steps use process groups everywhere."""
    import torch

    if not torch.distributed.is_available():
        raise CannotEstimate(
            f"The installed torch {torch.__version__} was built without torch.distributed, which recorded steps "
            "need; install a wheel of the package index: pip install torch."
        )


def _start(torch_version: str | None, progress: Progress) -> Worker:
    any_libraries()
    try:
        return Worker(torch_version, progress)
    except GhostUnavailable as error:
        raise GhostUnavailable(f"{error} Or choose --source meta, which needs no ghost.") from error
