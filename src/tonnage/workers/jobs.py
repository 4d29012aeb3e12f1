"""Run one job as a request describes it, and write its trace into the requested file."""

import gc
import os
import time
from typing import Any

import torch
from tonnage_inside import (
    micro_batches,
    repeating,
    requested,
    shortcuts,
    values,
)
from tonnage_recorder import operations, outcome, written
from tonnage_recorder.native import Native
from tonnage_recorder.watch import Watch

from tonnage.job import Job, read_job
from tonnage.plans import Plan
from tonnage.shallow.depths import is_first_alike, micro_batches_alike
from tonnage.step import events, flex_stub, inputs, repeats
from tonnage.step.world import World
from tonnage.trainers import engine_of, libraries
from tonnage.workers import card


def do(request: dict[str, Any], policy: values.Policy, built: list[object]) -> None:
    """Run the job's steps in this process and write the trace.

    `built` receives the objects that the caller is to keep alive.  Memory that runs out is an outcome in the trace;
    every other failure is raised, among them CannotEstimate outside a ghost's environment.
    """
    began = time.perf_counter()
    os.environ.update(request["environment"])
    ghost = card.take(request["settings"], rank=request["rank"], world_size=request["world_size"])
    job, plan = read_job(request["job"]), Plan(**request["plan"])
    values.patch_libraries(policy)
    shortcuts.install()
    if request.get("sketched"):
        flex_stub.install()
    watch = Watch(torch, ghost)
    watch.start()
    events.listen(watch.set_event)
    ghost.log(True)
    if micro_batches_alike(job, plan) and not {"every_micro_batch", "worked"} & request.keys():
        repeats.listen(micro_batches.Alike(watch, as_first=is_first_alike(job, plan)).ask)
    ended: dict[str, Any] = {}
    asked: requested.Requested | None = None
    try:
        world = World(
            size=request["world_size"],
            rank=request["rank"],
            gpus_per_node=request["gpus_per_node"],
            device=torch.device("cuda"),
        )
        if "requests" in request:
            asked = requested.read(request["requests"], watch)
            asked.make()
        elif "worked" in request:
            built.append(_run_counted(request, job, plan, world, watch, ghost))
        else:
            built.append(engine_of(plan).run(job, plan, world, request["steps"]))
        gc.disable()  # the rest creates no cycles, and this process ends with it
        if request["repeated"]:
            before = asked.columns() if asked is not None else written.event_columns(torch, watch)
            asked = repeating.repetitions(watch, before, request["repeated"])
            asked.make()
    except Exception as error:
        if not outcome.ran_out(error):
            raise
        ended = outcome.of_exception(error, watch)
        built.append(error)
    watch.began = began
    columns = asked.columns() if asked is not None else None
    assumed = [*policy.assumed(), *inputs.list_assumptions()]
    written.write(request["trace"], watch, ended, assumed, "ghost", columns, libraries(job, plan))


def _run_counted(request: dict[str, Any], job: Job, plan: Plan, world: World, watch: Watch, ghost: Native) -> object:
    """Run the job's steps and write the FLOPs and bytes of the operations in the last of them."""
    counted = operations.OperationCounter(torch, ghost, lambda: watch.marks[-1][1])

    def begin(steps: int) -> None:
        if steps == request["steps"] - 1:
            counted.start()

    watch.on_step = begin
    ran = engine_of(plan).run(job, plan, world, request["steps"])
    counted.stop()
    counted.write(request["worked"], lambda mark: watch.marks[mark][1])
    return ran
