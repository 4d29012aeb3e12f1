"""Does a job in this process, as a request says it, and writes its trace into the file that was asked for."""

import gc
import os
import time
from dataclasses import fields
from typing import Any, Final

import torch
from tonnage_inside import (
    decided,
    meshes,
    micro_batches,
    outcome,
    pairs,
    repeating,
    requested,
    shortcuts,
    values,
    worked,
    written,
)
from tonnage_inside.native import Native
from tonnage_inside.watch import Watch

from tonnage.ghost import card
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.shallow.few import is_first_alike, micro_batches_alike
from tonnage.step import events as occasions
from tonnage.step import flex_stub as sketched
from tonnage.step import inputs, repeats
from tonnage.step.world import World
from tonnage.trainers import engine_of, libraries
from tonnage.trainers.loop.run import TONNAGE


def settle(request: dict[str, Any], policy: values.Policy) -> None:
    """Have the card, the rank and the patches that the job and all like it (`child.alike`) want.

    Raises CannotEstimate outside a ghost's environment.
    """
    os.environ.update(request["environment"])
    card.take(request["settings"], rank=request["rank"], world_size=request["world_size"])
    values.patch_libraries(policy)
    shortcuts.install()
    decided.install()
    meshes.install()
    if request.get("sketched"):
        sketched.install()


def do(request: dict[str, Any], policy: values.Policy, built: list[object], *, again: bool) -> dict[str, Any]:
    """Run the job's steps in this process and write the trace; `built` gets what the caller is to keep alive.

    `again`: others were done here before.  Memory that runs out is raised then, and else told in the trace.
    """
    began = time.perf_counter()
    ghost = policy.native
    assert ghost is not None
    job, plan = job_of(request), Plan(**request["plan"])
    every_event = request.get("every_event", not _on_one_stream(plan, request["world_size"]))
    watch = Watch(torch, ghost, unwritten=() if every_event else (pairs.TAKEN,))
    watch.start()
    built.append(watch)
    occasions.listen(watch.occasion)
    ghost.log(True)
    alike = micro_batches_alike(job, plan) and not {"every_micro_batch", "worked"} & request.keys()
    as_first = is_first_alike(job, plan)
    repeats.listen(micro_batches.Alike(watch, as_first=as_first).ask if alike else None)
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
        else:
            if "worked" in request:
                built.append(_counted(request, job, plan, world, watch, ghost))
            else:
                built.append(engine_of(plan).run(job, plan, world, request["steps"]))
        gc.disable()  # what follows leaves no cycles
        if request["repeated"]:
            before = asked.columns() if asked is not None else written.event_columns(torch, watch)
            asked = repeating.repetitions(watch, before, request["repeated"])
            asked.make()
    except Exception as error:
        if again or not outcome.ran_out(error):
            raise
        ended = outcome.of_exception(error, watch)
        built.append(error)
    watch.began = began
    columns = asked.columns() if asked is not None else None
    assumed = [*policy.assumed(), *inputs.assumed()]
    written.write(request["trace"], watch, ended, assumed, "ghost", columns, libraries(job, plan))
    watch.end()
    occasions.listen(None)
    repeats.listen(None)
    decided.leave(request["decided"])
    return {"error": None, "seconds": time.perf_counter() - began, "completed": not ended, "process": os.getpid()}


def _counted(request: dict[str, Any], job: Job, plan: Plan, world: World, watch: Watch, ghost: Native) -> object:
    """Run the job's steps and write down what the operations of the last of them work."""
    counted = worked.Worked(torch, ghost, lambda: watch.marks[-1][1])

    def begin(steps: int) -> None:
        if steps == request["steps"] - 1:
            counted.start()

    watch.on_step = begin
    ran = engine_of(plan).run(job, plan, world, request["steps"])
    counted.stop()
    counted.write(request["worked"], lambda mark: watch.marks[mark][1])
    return ran


_BESIDE: Final = ("shard", "activation_offload", "optimizer_offload", "param_offload")
"""Families of techniques that copy and exchange on streams of their own."""


def _on_one_stream(plan: Plan, ranks: int) -> bool:
    """Whether blocks are likely to be taken as soon as they are given back."""
    return ranks == 1 and engine_of(plan) is TONNAGE and all(getattr(plan, family) == "none" for family in _BESIDE)


def job_of(request: dict[str, Any]) -> Job:
    """The Job that `asdict` wrote."""
    document = request["job"]
    plain = {item.name: document[item.name] for item in fields(Job) if item.name != "model"}
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    return Job(model=ModelRef(**document["model"]), **plain)
