"""`plan="auto"`: the fastest plan that is predicted to fit a network on this machine's GPUs."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tonnage.errors import CannotEstimate, UsageError
from tonnage.planner import ask
from tonnage.step import model as models

if TYPE_CHECKING:
    from torch import nn

    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan


def choose(network: nn.Module, job: Job, cluster: Cluster) -> Plan:
    """Return the fastest plan for this network's configuration with the job's batches; the first rank searches.

    Weights keep their dtype: a network in 16 bits gets a plan that trains it so.  Raises CannotEstimate if no plan
    fits, UsageError for a network of no known configuration.
    """
    found: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found[0] = _search(network, job, cluster)
        except (UsageError, CannotEstimate) as error:
            found[0] = error
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], Exception):
        raise found[0]
    chosen: Plan = found[0]
    return chosen


def _search(network: nn.Module, job: Job, cluster: Cluster) -> Plan:
    inner = models.hugging_face(network)
    if inner is None:
        raise UsageError(
            f"auto plans by a transformers configuration, and {type(network).__name__} has none; give a Plan."
        )
    stated: dict[str, Any] = {
        **{"method": job.method, "seq_len": job.seq_len, "micro_batch": job.micro_batch},
        "grad_accum": job.grad_accum,
    }
    dtype = next(parameter.dtype for parameter in inner.parameters() if parameter.is_floating_point())
    if job.method == "full" and dtype == torch.bfloat16:
        stated["precision"] = "bf16-true"
    with tempfile.TemporaryDirectory() as folder:
        inner.config.save_pretrained(folder)
        solution = ask.answer(ask.ask(folder, cluster, stated, offline=True), top=1, pareto=False)
    if not solution.plans:
        raise CannotEstimate(
            f"No plan for {type(inner).__name__} is predicted to fit {cluster} with {job.micro_batch} x "
            f"{job.seq_len} tokens; tonnage plan says what would make it fit."
        )
    return solution.plans[0].candidate.plan
