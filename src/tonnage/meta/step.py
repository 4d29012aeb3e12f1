"""A step on a GPU that is not there, recorded by a torch without CUDA.

The real step runs on fake tensors of the GPU (`card`): autograd, optimizers and the network's own code are the real
ones.  What torch's C++ decides by a tensor's device is decided here as on CUDA (`choices`, `autocast`); memory inside
kernels comes from formulas and from a table that a ghost made (`temporaries`); the replica of the caching allocator
manages the memory, with a pool for each stream (`streams`).  Of several ranks one runs, in a process group that
exchanges nothing (`group`).
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
from tonnage.meta.recorder import Recorder
from tonnage.meta.recording import steps_of, watching
from tonnage.meta.streams import Streams
from tonnage.meta.temporaries import Temporaries
from tonnage.step import hub_kernels, modeling_modules
from tonnage.techniques import environment, select_techniques
from tonnage.trace.trace import Trace

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan


def run(case: Case, *, rank: int = 0, steps: int = 3) -> Trace:
    """Return the Trace of one rank's steps.  Raises CannotEstimate if the step needs computed values."""
    plan, cluster = case.plan, case.cluster
    device = cluster.device
    options = environment(plan).get("PYTORCH_ALLOC_CONF", "")
    settings = AllocatorSettings.parse(options, torch_version=torch.__version__)
    together = cluster.gpus > 1 or plan.shard != "none"
    streams = Streams(card.CARD)
    memory = CardMemory(cluster, settings, torch.__version__, stream=lambda: streams.current.number)
    recorder = Recorder(card.CARD, memory, Temporaries(device, table()["inside"]))
    hub_kernels.hide()
    _import_libraries(case.job, plan)
    with (
        card.present(device, streams) as fake,
        group.of(cluster.gpus, rank) if together else nullcontext(),
        group.voting_alone() if plan.pp > 1 else nullcontext(),
        autocast.on_card(table()["autocast"]),
        choices.on_card(device.capability, recorder.adding_in_place),
        watching(recorder, fake) as watch,
        _report_in_one_line(),
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
def _report_in_one_line() -> Iterator[None]:
    """Raise every error as one line, as a ghost's worker does."""
    try:
        yield
    except TonnageError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise CannotEstimate(
            f"The step failed on the imitated card: {type(error).__name__}: {lines[0][:300]}; choose source ghost."
        ) from error


def _import_libraries(job: Job, plan: Plan) -> None:
    """Import libraries before a GPU seems to be present: on import they look for GPUs and load their kernels."""
    for library in (library for technique in select_techniques(job, plan) for library in technique.libraries):
        importlib.import_module(library)
    for module in modeling_modules.list_modules(job.model.config):
        with suppress(ImportError):  # a broken module raises again when it is used
            importlib.import_module(module)


@cache
def table() -> dict[str, Any]:
    """Return the table that a ghost made (`benchmarks/portable`)."""
    content: dict[str, Any] = json.loads((files("tonnage.meta") / "meta.json").read_text(encoding="utf-8"))
    return content
