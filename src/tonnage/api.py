"""The Python API, with the names, defaults and errors of the command line.

tonnage.estimate("llama-3.1-8b", gpu="8xA100-80GB", seq_len=8192, shard="zero3").peak.process_bytes
tonnage.plan("llama-3.1-8b", gpu="8xA100-80GB").plans[0].candidate.plan
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from tonnage.errors import UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.plans import HEADROOM
from tonnage.report.html import fragment

if TYPE_CHECKING:
    from collections.abc import Callable

    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.planner.solution import Solution
    from tonnage.plans import Plan

Estimate.notebook_view = fragment


def estimate(
    model: str,
    job: "Job | None" = None,
    plan: "Plan | None" = None,
    cluster: "str | Cluster | None" = None,
    *,
    gpu: "str | Cluster | None" = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    rank: int | None = None,
    steps: int | None = None,
    torch_version: str | None = None,
    offline: bool = False,
    worker: Any = None,
    source: str = "ghost",
    fresh: bool = False,
    advice: bool = True,
    progress: "Callable[[str], None]" = lambda text: None,
    **options: Any,
) -> "Estimate":
    """Return the memory and time of a training step of `model` on each rank, as `tonnage estimate` prints them.

    `options` are fields of Job and Plan.  They override the fields of `job` and `plan`, so these two are the same:

        tonnage.estimate("llama-3.1-8b", gpu="8xA100-80GB", seq_len=8192, shard="zero3", checkpointing="full")
        tonnage.estimate(
            "llama-3.1-8b", Job(seq_len=8192), Plan(shard="zero3", checkpointing="full"), "8xA100-80GB"
        )

    `host_memory` is the memory of each machine beside its GPUs, such as "256GiB"; by default what machines with this
    card usually have.  `worker` is a warm `tonnage.Worker`, for many estimates in a row.  `source="meta"` needs no
    ghost: it imitates the GPU on any platform, with a wider interval.  `fresh` runs the steps even if their trace is
    cached.  By default there are three steps; if all are alike, only the first one is run and its requests are
    repeated (`predict.usual_steps`).  If the number of `steps` is given, all of them run.  If they do not fit, or
    only barely, `advice` tries changes for some seconds and adds those that fit (`Estimate.advice`).

    Raises UsageError, CannotEstimate and their subclasses; a step that does not fit is an answer (`Estimate.fits`),
    not an error.
    """
    from tonnage.advice.advise import Asked, answers
    from tonnage.trainers import cases

    if cluster is not None and gpu is not None:
        raise UsageError("Both cluster and gpu name the GPUs; give one of the two.")
    cards = _parse_gpus(cluster if gpu is None else gpu, gpus, gpu_memory, host_memory)
    asked = Asked(
        model=model,
        case=cases.make_case(model, cards, options, job=job, plan=plan, offline=offline),
        options={**_list_fields(job), **_list_fields(plan), **options},
        rank=rank,
        steps=steps,
    )
    *_, run = answers(
        asked,
        advise=advice,
        torch_version=torch_version,
        worker=worker,
        source=source,
        fresh=fresh,
        progress=progress,
    )
    return run.estimate


def _list_fields(value: "Job | Plan | None") -> dict[str, Any]:
    """Return the fields of a Job or a Plan that differ from their defaults."""
    if value is None:
        return {}
    named = ((item.name, getattr(value, item.name), item.default) for item in dataclasses.fields(value))
    return {name: chosen for name, chosen, default in named if name != "model" and chosen != default}


def plan(
    model: str,
    *,
    gpu: "str | Cluster | None" = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    only: "tuple[str, ...]" = (),
    without: "tuple[str, ...]" = (),
    allow: "tuple[str, ...]" = (),
    headroom: float = HEADROOM,
    host_memory: str | int | None = None,
    find: str | None = None,
    top: int = 4,
    pareto: bool = False,
    torch_version: str | None = None,
    offline: bool = False,
    progress: "Callable[[str], None]" = lambda text: None,
    **options: Any,
) -> "Solution":
    """Return the fastest plans that fit, as `tonnage plan` prints them.

        tonnage.plan("llama-3.1-8b", gpu="8xA100-80GB", seq_len=8192)

    `options` are fields of Job and Plan: those that are given are kept, the search chooses the others.  `method` may
    be `any`, or several methods with commas between them, which are compared.  `headroom` is the fraction of each GPU
    that stays free.  `host_memory` is that of `tonnage.estimate`.
    Raises UsageError, CannotEstimate and their subclasses; that nothing fits is an answer (`Solution.status`), not an
    error.
    """
    from tonnage.planner.ask import answer, ask
    from tonnage.planner.limits import check_cards, initial_card

    cluster = _parse_gpus(initial_card(find, gpu) if gpu is None else gpu, gpus, gpu_memory, host_memory)
    check_cards(find, cluster, gpu=gpu, gpus=gpus, gpu_memory=gpu_memory)
    question = ask(
        model,
        cluster,
        options,
        find=find,
        offline=offline,
        only=only,
        without=without,
        allow=allow,
        headroom=headroom,
    )
    return answer(question, find, top=top, pareto=pareto, torch_version=torch_version, progress=progress)


def _parse_gpus(
    gpu: "str | Cluster | None", gpus: int | None, gpu_memory: str | int | None, host_memory: str | int | None
) -> "Cluster":
    """Return the cluster that a name such as `8xA100-80GB`, a number of GPUs and the memories describe."""
    from tonnage.catalog.devices import parse_cluster
    from tonnage.cluster import Cluster

    if gpu is not None and not isinstance(gpu, str | Cluster):
        raise UsageError(
            f"GPUs are given by a name such as '8xA100-80GB' or a Cluster, not by a {type(gpu).__name__}."
        )
    host_bytes = _parse_memory(host_memory)
    if isinstance(gpu, Cluster):
        return gpu if host_bytes is None else dataclasses.replace(gpu, host_memory_bytes=host_bytes)
    return parse_cluster(gpu, gpus=gpus, gpu_memory_bytes=_parse_memory(gpu_memory), host_memory_bytes=host_bytes)


def _parse_memory(memory: str | int | None) -> int | None:
    """Return a number of bytes, which a text such as `24GiB` may spell."""
    from tonnage.units import parse_bytes

    return parse_bytes(memory) if isinstance(memory, str) else memory
