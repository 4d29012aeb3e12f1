"""A step on a card that is not there, recorded by a torch that knows no CUDA.

The real step runs on fake tensors of the card (`card`): autograd, optimizers and the network's own code are the real
ones.  What torch's C++ decides by a tensor's device is decided here as on CUDA (`choices`, `autocast`); what kernels
take inside themselves comes from formulas and from a table that a ghost made (`temporaries`); memory is dealt out by
the replica of the caching allocator, to each stream from its own pool (`streams`).  Of several ranks one runs, in a
process group that exchanges nothing (`group`).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch

from tonnage.allocator import AllocatorSettings
from tonnage.errors import CannotEstimate, TonnageError
from tonnage.meta import autocast, card, choices, group
from tonnage.meta.memory import CardMemory
from tonnage.meta.recording import Recorder, steps_of, watching
from tonnage.meta.streams import Streams
from tonnage.meta.temporaries import Temporaries
from tonnage.step import sources
from tonnage.techniques import chosen, environment
from tonnage.trace.trace import Trace

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan


def run(case: Case, *, rank: int = 0, steps: int = 3) -> Trace:
    """The Trace of one rank's steps.  Raises CannotEstimate where the step needs computed values."""
    plan, cluster = case.plan, case.cluster
    device = cluster.device
    options = environment(plan).get("PYTORCH_ALLOC_CONF", "")
    settings = AllocatorSettings.parse(options, torch_version=torch.__version__)
    together = cluster.gpus > 1 or plan.shard != "none"
    streams = Streams(card.CARD)
    memory = CardMemory(cluster, settings, torch.__version__, stream=lambda: streams.current.number)
    recorder = Recorder(card.CARD, memory, Temporaries(device, table()["inside"]))
    _import_libraries(case.job, plan)
    with (
        card.present(device, streams) as fake,
        group.of(cluster.gpus, rank) if together else nullcontext(),
        group.voting_alone() if plan.pp > 1 else nullcontext(),
        autocast.on_card(table()["autocast"]),
        choices.on_card(device.capability, recorder.adding_in_place),
        watching(recorder, fake) as watch,
        _told_in_one_line(),
    ):
        return steps_of(
            case,
            recorder,
            watch,
            rank=rank,
            steps=steps,
            assumed=(),
            allocator_settings=options,
        )


@contextmanager
def _told_in_one_line() -> Iterator[None]:
    """Whatever stops the step, as a ghost's worker tells it."""
    try:
        yield
    except TonnageError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise CannotEstimate(
            f"The step failed on the imitated card: {type(error).__name__}: {said[0][:300]}; choose source ghost."
        ) from error


def _import_libraries(job: Job, plan: Plan) -> None:
    """While they are imported, libraries ask for cards and load their kernels: before one seems to be there."""
    for library in (library for technique in chosen(job, plan) for library in technique.libraries):
        importlib.import_module(library)
    for module in sources.modules(job.model.config):
        with suppress(ImportError):  # what is broken says so where it is used
            importlib.import_module(module)


@cache
def table() -> dict[str, Any]:
    """What a ghost told: see `benchmarks/portable`."""
    found: dict[str, Any] = json.loads((files("tonnage.meta") / "meta.json").read_text(encoding="utf-8"))
    return found
