"""`tonnage.estimate`: a Job under a Plan, run on ghost GPUs, summed up."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from tonnage.cluster import CPU, Cluster
from tonnage.errors import CannotEstimate, GhostUnavailable, UsageError
from tonnage.estimates.assumptions import assumed_of
from tonnage.estimates.ddp_buckets import with_buckets
from tonnage.estimates.step_time import is_better_seen, with_time
from tonnage.estimates.summary import Run, summarise
from tonnage.job import Job, check_sequences, check_tokens
from tonnage.mesh import axes
from tonnage.plans import Plan
from tonnage.shallow.continuing import continued, requests_of
from tonnage.shallow.few import depths_to_continue, is_repetitive, layers_of, roomy, with_layers
from tonnage.shallow.requests import Requests
from tonnage.timing.scores import avoidable_bytes, sparing_attention
from tonnage.trace.gc_paused import uncollected
from tonnage.trace.operations import Worked
from tonnage.trace.trace import Trace
from tonnage.units import counted

STEPS: Final = 3
"""The first makes optimizer states, the second holds them beside activations, the third is as all others."""

ALLOCATORS: Final = ("expandable", "default")
"""Which of them answers changes where blocks lie, not which are asked for."""

Progress = Callable[[str], None]

SOURCES: Final = ("ghost", "meta")
"""Where an estimate's Trace may come from; `real` ones are recorded, not estimated."""


def estimate(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    *,
    rank: int | None = None,
    steps: int = STEPS,
    repeated: int = 0,
    few_layers: bool = False,
    torch_version: str | None = None,
    worker: Any = None,
    source: str = "ghost",
    fresh: bool = False,
    seen: bool = False,
    progress: Progress = lambda text: None,
) -> Run:
    """Run `steps` optimizer steps of one rank on a ghost of the cluster's card, in a process of its own.

    Without a `rank`, those that differ are run (of a pipeline the first stage, the one behind it and the last), the
    worst is reported and the others are listed.
    For the device `cpu` nothing is run on a ghost: the step is recorded here, without computing (see `record`).
    With the source `meta` this is so for every card, whose choices are imitated (see `portable`).  `worker` is a warm
    `tonnage.ghost.pool.Worker` to use instead of a new one.

    With `repeated`, of one step on a ghost, so many more ask the allocator for what that one asked, without its
    program.  With `few_layers`, that one step is not made either where networks of a few layers say what it asks for
    (`tonnage.shallow`).  Where the same was run before, its Trace is taken from the cache
    (`tonnage.estimates.cache`), and nothing is run, unless `fresh`.  With `seen`, where a network's dimensions do not
    say its seconds, the operations of a step are counted as they are launched (`tonnage.timing.replay`).

    Raises UsageError when a technique refuses the job, CannotEstimate when the model cannot be built,
    GhostUnavailable when no ghost can run here.
    """
    if source not in SOURCES:
        raise UsageError(f"Unknown source {source!r}; possible: {', '.join(SOURCES)}.")
    laid = axes(plan, cluster.gpus, cluster.gpus_per_node)
    job = job.on_ranks(laid.data_parallel)
    check(job, plan, cluster)
    if steps < 1:
        raise UsageError(f"{steps} steps cannot be run; at least 1.")
    if rank is not None and rank not in range(cluster.gpus):
        raise UsageError(f"Rank {rank!r} does not exist: the cluster has ranks 0 to {cluster.gpus - 1}.")
    with ExitStack() as stack:
        asked = _Asked(
            job,
            plan,
            cluster,
            steps,
            repeated,
            few_layers,
            torch_version,
            worker,
            source,
            fresh,
            seen,
            progress,
            stack,
        )
        found = [asked.trace(one) for one in (laid.different if rank is None else (rank,))]
    with uncollected():  # it is made of many small things that all stay
        run = _summed_up([trace for trace, _ in found], job, plan, cluster, steps + repeated)
    return _from_the_shelf(run) if all(kept for _, kept in found) else run


def trace(job: Job, plan: Plan, cluster: Cluster, *, rank: int, steps: int, worker: Any) -> Trace:
    """The Trace alone of one rank's steps on a warm worker: for those who compare and show nothing, so sketched.

    Raises UsageError and CannotEstimate as `estimate` does.
    """
    job = job.on_ranks(axes(plan, cluster.gpus, cluster.gpus_per_node).data_parallel)
    check(job, plan, cluster)
    with ExitStack() as stack:
        said = (steps, 0, False, None, worker, "ghost", False, False, lambda text: None)
        asked = _Asked(job, plan, cluster, *said, stack, sketched=True)
        return asked.trace(rank)[0]


@dataclass
class _Asked:
    """What is asked of every rank, and the worker that answers, started when the first has to be run."""

    job: Job
    plan: Plan
    cluster: Cluster
    steps: int
    repeated: int
    few_layers: bool
    torch_version: str | None
    worker: Any
    source: str
    fresh: bool
    seen: bool
    progress: Progress
    stack: ExitStack
    sketched: bool = False

    def trace(self, rank: int) -> tuple[Trace, bool]:
        """The rank's Trace, and whether it was kept from an earlier run of the same."""
        job, plan, cluster, steps = self.job, self.plan, self.cluster, self.steps
        if cluster.device.id == CPU:
            _check_torch()
            from tonnage.meta import recording as record

            self.progress(f"recording {counted(steps, 'step')} on the CPU without computing them")
            return record.run(job, plan, cluster, rank=rank, steps=steps), False

        from tonnage.estimates import cache as shelf

        if self.source == "meta":
            _check_portable(job, plan, cluster, self._version)
        depths = depths_to_continue(job, plan) if self.few_layers and self.source == "ghost" else None
        key = self._key(rank, depths)
        kept = self._kept(key)
        counting = self.seen and self.source == "ghost" and is_better_seen(job, plan, cluster)
        if kept is not None and (kept.worked is not None or not counting):
            return kept, True
        trace = self._continued(rank, depths) if depths is not None else None
        written = None
        if trace is None and self.source == "meta":
            trace = self._imitated(rank)
        elif trace is None:
            trace, written = self._run(rank), self._worker().trace_file
        if counting and trace.outcome["kind"] == "completed":
            trace, written = replace(trace, worked=self._counted(rank)), None
        if key is not None and key == self._key(rank, depths):  # nothing was installed meanwhile
            shelf.keep(key, trace, written)
        return trace, False

    def _request(self, rank: int) -> dict[str, Any]:
        from tonnage.ghost.pool import request

        return request(self.job, self.plan, self.cluster, rank=rank, **self._how)

    def _key(self, rank: int, depths: tuple[int, int, int] | None = None) -> str | None:
        """Under what the rank's Trace is kept."""
        from tonnage.estimates import cache as shelf

        return shelf.key({**self._request(rank), "source": self.source, "depths": depths}, self._version)

    def _kept(self, key: str | None) -> Trace | None:
        from tonnage.estimates import cache as shelf

        return shelf.find(key) if key is not None and not self.fresh else None

    @property
    def _version(self) -> str | None:
        return self.worker.torch_version if self.worker is not None else self.torch_version

    @property
    def _how(self) -> dict[str, Any]:
        return {"steps": self.steps, "repeated": self.repeated, "sketched": self.sketched}

    def _imitated(self, rank: int) -> Trace:
        _check_torch()
        from tonnage.meta import step

        self.progress(f"imitating {counted(self.steps, 'step')} on one {self.cluster.device.id}")
        return step.run(self.job, self.plan, self.cluster, rank=rank, steps=self.steps)

    def _counted(self, rank: int) -> Worked | None:
        """What the operations of a step work, where its second one can be made while they are counted."""
        self.progress("counting the operations of a step, for its seconds")
        try:
            found: Worked = self._worker().worked(self.job, self.plan, self.cluster, rank=rank)
        except CannotEstimate:
            if self._worker().closed:
                raise
            return None
        return found

    def _run(self, rank: int) -> Trace:
        run = partial(self._worker().run, self.job, self.plan, self.cluster, rank=rank)
        found: Trace = run(**self._how)
        if found.repeated and found.outcome["kind"] == "oom" and not self.few_layers:
            found = run(steps=self.steps + self.repeated)  # a repetition has no stack to be told
        return found

    def _continued(self, rank: int, depths: tuple[int, int, int]) -> Trace | None:
        """By networks of a few layers; None where they do not say what all the layers ask for."""
        worker = self._worker()
        shallow = replace(self, cluster=roomy(self.cluster), steps=1, repeated=0, few_layers=False)
        layers = layers_of(self.job)
        few = [replace(shallow, job=with_layers(self.job, depth)) for depth in depths]
        try:
            runs = [asked._by_any_allocator(rank) for asked in few]
            keys = [asked._as_by(ALLOCATORS[0])._key(rank) for asked in few]
            requests = _requests((*keys, layers), partial(requests_of, runs, depths, layers))
        except CannotEstimate:
            if worker.closed:  # it has died, and said of what
                raise
            return None
        found = worker.again(requests, self.job, self.plan, self.cluster, rank=rank, repeated=self.repeated)
        if found.outcome["kind"] == "oom" and found.outcome.get("phase") in requests.growing:
            return None
        return continued(found, runs, depths, layers)

    def _by_any_allocator(self, rank: int) -> Trace:
        """The rank's Trace, or one that is kept of another allocator alone, where everything fits: what a program
        asks for does not hang on who answers."""
        kept = (asked._kept(asked._key(rank)) for asked in (self, *map(self._as_by, ALLOCATORS)))
        return next((trace for trace in kept if trace is not None), None) or self.trace(rank)[0]

    def _as_by(self, allocator: str) -> "_Asked":
        """The same under another allocator."""
        return replace(self, plan=replace(self.plan, allocator=allocator))

    def _worker(self) -> Any:
        if self.worker is None:
            self.worker = self.stack.enter_context(_started(self.torch_version, self.progress))
            steps = counted(self.steps + self.repeated, "step")
            self.progress(f"running {steps} on a ghost {self.cluster.device.id}")
        return self.worker


_KEPT: Final = 2
"""Requests of whole networks that are kept: a plan is asked for under either allocator, one soon after the other."""

_made: dict[tuple[Any, ...], Requests] = {}


def _requests(key: tuple[Any, ...], make: Callable[[], Requests]) -> Requests:
    """What is made, or was before of runs with the same keys; of runs without it is made each time."""
    if None in key:
        return make()
    found = _made.get(key)
    if found is None:
        found = make()
        while len(_made) >= _KEPT:
            _made.pop(next(iter(_made)), None)
        _made[key] = found
    return found


def usual_steps(job: Job, plan: Plan, cluster: Cluster, source: str = "ghost") -> tuple[int, int]:
    """How many steps are made where nobody says it, and how many more are the first one's requests again.

    Where all steps ask for the same (`tonnage.shallow.few.is_repetitive`), one and two; else three and none.
    """
    alike = source == "ghost" and cluster.device.id != CPU and is_repetitive(job, plan)
    return (1, STEPS - 1) if alike else (STEPS, 0)


def _from_the_shelf(run: Run) -> Run:
    coverage = run.estimate.coverage
    said = (*coverage.run, "not now: the trace was kept from an earlier run of the same (--fresh runs it again)")
    return replace(run, estimate=replace(run.estimate, coverage=replace(coverage, run=said)))


def check(job: Job, plan: Plan, cluster: Cluster) -> None:
    """Raise UsageError with the reasons why the plan's engine cannot run this job.

    Raises UnreadableModel for a type that transformers does not know.
    """
    from tonnage.step.heads import check_type
    from tonnage.trainers import engine_of

    check_sequences(job)
    check_tokens(job)
    if job.model.kind == "config":
        check_type(job.model.config)
    if reasons := engine_of(plan).refusals(job, plan, cluster):
        raise UsageError(" ".join(map(str, reasons)))


def _check_portable(job: Job, plan: Plan, cluster: Cluster, torch_version: str | None) -> None:
    from tonnage.meta import scope

    if torch_version is not None:
        raise UsageError("The source meta runs the installed torch only; leave the version out, or choose ghost.")
    for refusal in scope.refusals(job, plan, cluster):
        raise UsageError(f"{refusal}")


def _check_torch() -> None:
    """What records a step asks everywhere whether ranks share something.  Raises CannotEstimate."""
    import torch

    if not torch.distributed.is_available():
        raise CannotEstimate(
            f"The installed torch {torch.__version__} was built without torch.distributed, and no step is recorded "
            "without; install a wheel of the package index: pip install torch."
        )


def _started(torch_version: str | None, progress: Progress) -> Any:
    from tonnage.ghost.pool import Worker
    from tonnage.ghost.process import any_libraries

    any_libraries()
    try:
        return Worker(torch_version, progress)
    except GhostUnavailable as error:
        raise GhostUnavailable(f"{error} Or choose --source meta, which needs no ghost.") from error


def _summed_up(traces: list[Trace], job: Job, plan: Plan, cluster: Cluster, steps: int) -> Run:
    described = {**asdict(job), "steps": steps}
    model = described.pop("model")
    run = summarise(
        traces,
        cluster,
        model={
            "name": model["name"],
            "source": model["source"],
            "vocab_size": model["config"].get("vocab_size"),
            "scores_bytes": avoidable_bytes(job, plan, cluster),
            "sparing_attention": sparing_attention(job, plan, cluster),
            "words": model["config"].get("vocab_size") is not None or "text_config" in model["config"],
        },
        job=described,
        plan=asdict(plan),
    )
    found = run.estimate
    assumed = (*found.coverage.assumed, *assumed_of(job, plan, cluster))
    run = replace(run, estimate=replace(found, coverage=replace(found.coverage, assumed=assumed)))
    run = with_time(run, job, plan, cluster, [trace.worked for trace in traces if trace.worked is not None])
    return replace(run, estimate=with_buckets(run.estimate, plan, cluster))
