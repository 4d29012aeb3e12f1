"""How an export is started: torchrun's command line, and what whoever types it has to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.trainers.target import ExportRequest


def torchrun(cluster: Cluster, script: str, *, alone: bool) -> tuple[str, ...]:
    """Return the command that starts a script on every GPU; `alone`: on the only one, without a process group."""
    if alone:
        return ("python", script)
    machines: tuple[str, ...] = ()
    if cluster.nodes > 1:
        machines = ("--nnodes", str(cluster.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500")
    return ("torchrun", *machines, "--nproc-per-node", str(cluster.gpus_per_node), script)


def note_machines(cluster: Cluster) -> tuple[str, ...]:
    """Return what to know where there are several machines."""
    if cluster.nodes == 1:
        return ()
    return (f"Start it on each of the {cluster.nodes} machines; HOST is the name of one of them.",)


def note_clipping(request: ExportRequest, owner: str) -> tuple[str, ...]:
    """Return the note about a trainer that clips gradients where the plan has no norm; `owner`: `the Trainer's`."""
    if request.plan.clip_grad_norm is not None:
        return ()
    return (f"Gradients are clipped at norm 1.0, {owner} default, because the plan names no norm.",)
