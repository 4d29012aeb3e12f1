"""The Python API: the same names, defaults and errors as the command line."""

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
    rank: int | None = None,
    steps: int | None = None,
    torch_version: str | None = None,
    offline: bool = False,
    worker: Any = None,
    source: str = "ghost",
    fresh: bool = False,
    progress: "Callable[[str], None]" = lambda text: None,
    **options: Any,
) -> "Estimate":
    """Return what a training step of `model` needs on each rank, as `tonnage estimate` prints it.

    `options` are the fields of Job and Plan: `tonnage.estimate("llama-3.1-8b", gpu="8xA100-80GB", seq_len=8192,
    shard="zero3", checkpointing="full")`; or `tonnage.estimate("llama-3.1-8b", Job(seq_len=8192), Plan(shard="zero3",
    checkpointing="full"), "8xA100-80GB")`.  Options override the fields of `job` and `plan`.  `worker` is a warm
    `tonnage.Worker`, for many estimates in a row.  `source="meta"` needs no ghost: it imitates the GPU on any
    platform, with a wider interval.  `fresh` runs the steps even if their trace is cached.  Of three steps the last
    two are copies of the first one's requests if all steps are alike (`predict.usual_steps`); if the number of
    `steps` is given, all of them run.  Raises UsageError, CannotEstimate and their subclasses; a step that does not
    fit is an answer (`Estimate.fits`).
    """
    from tonnage.estimates import predict
    from tonnage.trainers import cases

    if cluster is not None and gpu is not None:
        raise UsageError("Both cluster and gpu are given; leave one out.")
    cards = _parse_gpus(cluster if gpu is None else gpu, gpus, gpu_memory)
    return predict.answer(
        cases.ask(model, cards, options, job=job, plan=plan, offline=offline),
        rank=rank,
        steps=steps,
        torch_version=torch_version,
        worker=worker,
        source=source,
        fresh=fresh,
        progress=progress,
    ).estimate


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
    """Return the fastest plan that fits, as `tonnage plan` prints it: `tonnage.plan("llama-3.1-8b",
    gpu="8xA100-80GB")`.

    `options` are the fields of Job and Plan: those that are given are kept, the search chooses the others.
    `host_memory` limits the memory of a machine's host, by default unlimited.  The method may be `any`, or several
    with commas between them, which are compared.  Raises UsageError, CannotEstimate and their subclasses; that
    nothing fits is an answer (`Solution.status`).
    """
    from tonnage.planner.ask import answer, ask
    from tonnage.planner.limits import check_cards, initial_card

    cards = _parse_gpus(initial_card(find, gpu) if gpu is None else gpu, gpus, gpu_memory)
    check_cards(find, cards, gpu=gpu, gpus=gpus, gpu_memory=gpu_memory)
    asked = ask(
        model,
        cards,
        options,
        find=find,
        offline=offline,
        only=only,
        without=without,
        allow=allow,
        headroom=headroom,
        host_memory_bytes=_parse_memory(host_memory),
    )
    return answer(asked, find, top=top, pareto=pareto, torch_version=torch_version, progress=progress)


def _parse_gpus(gpu: "str | Cluster | None", gpus: int | None, gpu_memory: str | int | None) -> "Cluster":
    from tonnage.catalog.devices import parse_cluster
    from tonnage.cluster import Cluster

    if gpu is not None and not isinstance(gpu, str | Cluster):
        raise UsageError(f"A card is given by its name, such as '8xA100-80GB', and this is a {type(gpu).__name__}.")
    return (
        gpu if isinstance(gpu, Cluster) else parse_cluster(gpu, gpus=gpus, gpu_memory_bytes=_parse_memory(gpu_memory))
    )


def _parse_memory(memory: str | int | None) -> int | None:
    """Return a number of bytes, parsed from a text such as 24GiB."""
    from tonnage.units import parse_bytes

    return parse_bytes(memory) if isinstance(memory, str) else memory
