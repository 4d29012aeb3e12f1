"""The Python face of the command line: the same names, the same defaults, the same errors."""

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
    """What a training step of `model` needs on each rank, as `tonnage estimate` says it.

    `options` are the fields of Job and Plan: `tonnage.estimate("llama-3.1-8b", gpu="8xA100-80GB", seq_len=8192,
    shard="zero3", checkpointing="full")`; or `tonnage.estimate("llama-3.1-8b", Job(seq_len=8192), Plan(shard="zero3",
    checkpointing="full"), "8xA100-80GB")`.  What options say goes before what `job` and `plan` say.
    `worker` is a warm `tonnage.Worker`, for many estimates in a row.
    `source="meta"` needs no ghost: it imitates the card on any platform, with a wider interval.
    `fresh` runs the steps even if the same were run before.  Of three steps the later two are the first one's
    requests again where all are alike (`predict.usual_steps`); with a number of `steps` all are made.
    Raises UsageError, CannotEstimate and their kinds; not fitting is an answer (`Estimate.fits`).
    """
    from tonnage.estimates import predict
    from tonnage.trainers import cases

    if cluster is not None and gpu is not None:
        raise UsageError("Both cluster and gpu are given; leave one out.")
    cards = _cluster(cluster if gpu is None else gpu, gpus, gpu_memory)
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
    """The fastest plan that fits, as `tonnage plan` says it: `tonnage.plan("llama-3.1-8b", gpu="8xA100-80GB")`.

    `options` are the fields of Job and Plan; those that are named are kept, the others are chosen.  `host_memory` is
    what a machine has beside its GPUs, if that is to be a limit.  The method may be `any`, or several with commas
    between them, which are compared.  Raises UsageError, CannotEstimate and their kinds; that nothing fits is an
    answer (`Solution.status`).
    """
    from tonnage.planner.ask import answer, ask
    from tonnage.planner.limits import check_cards, initial_card

    cards = _cluster(initial_card(find, gpu) if gpu is None else gpu, gpus, gpu_memory)
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
        host_memory_bytes=_bytes(host_memory),
    )
    return answer(asked, find, top=top, pareto=pareto, torch_version=torch_version, progress=progress)


def _cluster(gpu: "str | Cluster | None", gpus: int | None, gpu_memory: str | int | None) -> "Cluster":
    from tonnage.catalog.devices import parse_cluster
    from tonnage.cluster import Cluster

    if gpu is not None and not isinstance(gpu, str | Cluster):
        raise UsageError(f"A card is given by its name, such as '8xA100-80GB', and this is a {type(gpu).__name__}.")
    return gpu if isinstance(gpu, Cluster) else parse_cluster(gpu, gpus=gpus, gpu_memory_bytes=_bytes(gpu_memory))


def _bytes(said: str | int | None) -> int | None:
    from tonnage.units import parse_bytes

    return parse_bytes(said) if isinstance(said, str) else said
