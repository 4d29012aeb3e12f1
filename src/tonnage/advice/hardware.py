"""Other cards for a case: the smallest one that may hold it as it is, and more of the same that share its states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from tonnage.advice.changes import Change
from tonnage.case import Case
from tonnage.catalog.devices import find_device
from tonnage.cluster import GPUS_PER_NODE, Cluster
from tonnage.estimates.estimate import Peak
from tonnage.mesh import SHARDING
from tonnage.planner.nearest import CARDS, DOUBLINGS


def list_cards(cluster: Cluster, peak: Peak) -> Iterator[Cluster]:
    """Yield as many of the larger cards of the catalog that may hold a rank as it is, smallest first."""
    least = peak.process_bytes - peak.by_category.get("cached", 0)
    for name in CARDS:
        device = find_device(name)
        if device.capacity_bytes > max(cluster.device.capacity_bytes, least):
            yield replace(cluster, device=device, network_bytes_per_second=None)


def list_clusters(case: Case, peak: Peak) -> Iterator[Change]:
    """Yield more of the same cards, with all states sharded among them, from the least that may hold them."""
    cluster = case.cluster
    states = sum(peak.by_category.get(name, 0) for name in ("parameter", "gradient", "optimizer_state"))
    for _ in range(DOUBLINGS):
        if 2 * cluster.gpus_per_node <= GPUS_PER_NODE:
            cluster = replace(cluster, gpus_per_node=2 * cluster.gpus_per_node)
        else:
            cluster = replace(cluster, nodes=2 * cluster.nodes)
        if states // cluster.gpus > cluster.device.capacity_bytes:
            continue
        options: dict[str, Any] = {} if case.plan.shard in SHARDING else {"shard": "zero3"}
        options |= (batch := _keep_batch(case, cluster.gpus // case.cluster.gpus)) or {}
        for more in ({}, _LEAN):
            yield Change(options={**options, **more}, cluster=cluster, changes_mathematics=batch is None)


def _keep_batch(case: Case, times: int) -> dict[str, Any] | None:
    """Return the options with which so many times more ranks make the same global batch; None if none do."""
    job = case.job
    if job.global_batch_tokens is not None:
        return {}
    if job.grad_accum % times == 0:
        return {"grad_accum": job.grad_accum // times}
    if job.micro_batch % times == 0:
        return {"micro_batch": job.micro_batch // times}
    return None


_LEAN: Final = {"checkpointing": "full", "loss": "chunked", "optimizer": "adamw-fused"}
"""Options that make room for a share of the states at little cost."""
