"""Recording of a step without a GPU and without computing: fake tensors whose storages live as long as real ones.

The step runs under torch's FakeTensorMode: dispatch, autograd, autocast, optimizers and sharding are the real code,
tensors have shapes and no memory.  The Recorder sees every operation's results; a storage that is new to it is an
allocation, the end of that storage is a free.  On the CPU, where the allocator neither rounds nor caches, the bytes
alive between two operations are those of a real run, to the byte (tests compare them with what torch's profiler
counts).

Memory that an operation allocates and frees internally is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from tonnage.errors import CannotEstimate
from tonnage.meta import patches
from tonnage.meta.host_memory import HostMemory
from tonnage.meta.inside import inside
from tonnage.meta.recorder import Recorder
from tonnage.step import fake_ranks, inputs
from tonnage.step.world import World
from tonnage.trace.trace import Claim, Mark, Trace, pack_activity
from tonnage.trainers import engine_of, libraries

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.cluster import Cluster

NOT_SEEN: Final = "memory that an operation allocates and frees internally: not counted"
VALUES: Final = "computed values that the program reads: zero"


_ROOM: Final = str(Path(__file__).parent)
"""Folder whose frames are not part of the program's own stack."""


@contextmanager
def recording(device: torch.device, capacity_bytes: int) -> Iterator[tuple[Recorder, Any]]:
    """Record everything on the host while nothing is computed; yield the Recorder and its Watch."""
    recorder = Recorder(device, HostMemory(capacity_bytes))
    with watching(recorder, FakeTensorMode(allow_non_fake_inputs=True)) as watch:
        yield recorder, watch


@contextmanager
def watching(recorder: Recorder, fake: FakeTensorMode) -> Iterator[Any]:
    """Make tensors fake and the Recorder listen to them; yield a Watch."""
    fake_ranks.known_to_fake_tensors()
    watch = inside("watch").Watch(torch, address=recorder.address)
    recorder.mark = lambda: len(watch.marks) - 1
    recorder.on_shortage = lambda requested: watch.add_shortage(0, requested, recorder.memory.capacity_bytes, 0)
    patched = (
        patches.memory_outside_dispatcher(recorder),
        patches.module_conversions(),
        fake_ranks.ddp(),
        fake_ranks.pairs(recorder.exchanges.batched),
        patches.sharding_propagation(recorder),
        patches.hidden_fake_tensors(),
        watch.install_hooks(),
    )
    with fake, recorder, ExitStack() as stack:
        for context in patched:
            stack.enter_context(context)
        yield watch


def run(case: Case, *, rank: int = 0, steps: int = 3) -> Trace:
    """Return the Trace of one rank's steps on the CPU.  Raises CannotEstimate if the step needs computed values."""
    with recording(torch.device("cpu"), case.cluster.device.capacity_bytes) as (recorder, watch):
        return steps_of(case, recorder, watch, rank=rank, steps=steps, assumed=(NOT_SEEN,))


def steps_of(
    case: Case,
    recorder: Recorder,
    watch: Any,
    *,
    rank: int,
    steps: int,
    assumed: tuple[str, ...],
    allocator_settings: str = "",
) -> Trace:
    """Run the job's steps under a Recorder and return their Trace.  Raises CannotEstimate if they need computed
    values.
    """
    plan, cluster = case.plan, case.cluster
    began = time.perf_counter()
    outcome: dict[str, Any] = {"kind": "completed"}
    world = World(size=cluster.gpus, rank=rank, gpus_per_node=cluster.gpus_per_node, device=recorder.device)
    with _destroy_new_group():
        try:
            kept = engine_of(plan).run(case.job, plan, world, steps)
        except (DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise CannotEstimate(
                f"The step depends on computed values, which do not exist here ({error})."
            ) from error
        except Exception as error:
            if not inside("outcome").ran_out(error):
                raise
            outcome = inside("outcome").of_exception(error, watch)
            outcome["stack"] = [frame for frame in outcome["stack"] if not frame.startswith(_ROOM)]
            kept = error
        watch.finish()
        versions = inside("written").versions(torch, libraries(case.job, plan))
        trace = _make_trace(recorder, watch, cluster, versions, rank=rank, outcome=outcome, assumed=assumed)
        del kept  # everything that was built lives until its trace is written
    return replace(trace, allocator_settings=allocator_settings, seconds=time.perf_counter() - began)


@contextmanager
def _destroy_new_group() -> Iterator[None]:
    """Destroy a process group that is made inside."""
    before = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not before:
            dist.destroy_process_group()


def _make_trace(
    recorder: Recorder,
    watch: Any,
    cluster: Cluster,
    versions: dict[str, str],
    *,
    rank: int,
    outcome: dict[str, Any],
    assumed: tuple[str, ...],
) -> Trace:
    memory, device = recorder.memory, cluster.device
    return Trace(
        source="meta",
        versions=versions,
        device={
            "type": recorder.device.type,
            "name": device.name,
            "total_bytes": memory.capacity_bytes,
            "capability": f"{device.capability[0]}.{device.capability[1]}",
            "context_bytes": device.context_bytes,
            "devices": 1,
        },
        rank=rank,
        world_size=cluster.gpus,
        steps=watch.steps,
        outcome=outcome,
        peaks={
            "allocated_bytes": memory.peak_allocated_bytes,
            "reserved_bytes": memory.peak_reserved_bytes,
            "retries": memory.retries,
            "ooms": len(watch.ooms),
        },
        model=watch.model,
        assumed=(*assumed, *inputs.list_assumptions(), *((VALUES,) if recorder.read_values else ())),
        marks=tuple(Mark(step=done, phase=phase, module=module) for done, phase, module in watch.marks),
        claims=tuple(Claim(mark=mark, address=address, category=kind) for mark, address, kind in watch.claims),
        event_columns=memory.columns(),
        **_exchange_columns(recorder),
    )


def _exchange_columns(recorder: Recorder) -> dict[str, Any]:
    """Return the exchanges of ranks as fields of a Trace; none on the host, where only tensors take memory."""
    if recorder.device.type != "cuda":
        return {}
    activities = recorder.exchanges.activities
    names = tuple(sorted({activity.name for activity in activities}))
    numbers = {name: number for number, name in enumerate(names)}
    return {"names": names, "log": b"".join(pack_activity(activity, numbers) for activity in activities)}
