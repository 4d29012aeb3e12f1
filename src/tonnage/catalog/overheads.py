"""GPU memory of a process that torch's allocator does not see: the CUDA context and NCCL's buffers."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from tonnage.cluster import GPUS_PER_NODE, Cluster, Device

_MOST_RANKS: Final = 2**31 - 1
"""More than any communicator has."""


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """GPU memory of one process that torch's allocator does not see, as an interval."""

    low_bytes: int
    """The least that sources support."""
    bytes: int
    """The figure to reckon with."""
    high_bytes: int
    """The most that sources support."""
    context_bytes: int
    """Of `bytes`: the CUDA context and lazily loaded modules."""
    nccl_bytes: int
    """Of `bytes`: buffers of NCCL communicators and of direct sends."""
    source: tuple[str, ...]
    """Where the figures come from."""


def overheads(
    device: Device,
    communicators: Iterable[int] = (),
    *,
    gpus_per_node: int = GPUS_PER_NODE,
    send_recv_peers: int = 0,
) -> Overhead:
    """Memory of one rank outside torch's allocator.

    `communicators` are the numbers of ranks of the NCCL communicators in which it takes part; one larger than
    `gpus_per_node` spans machines.  `send_recv_peers` are the ranks with which it exchanges directly; at most as
    many are counted as the rank has others on its machine, because what is known (overheads.toml) is about NVLink.
    """
    tables = _overheads()["nccl"]
    peers = min(send_recv_peers, _most_peers(gpus_per_node))
    kinds = [_communicator(ranks, gpus_per_node) for ranks in communicators] + ["peer"] * peers
    low, typical, high = (
        sum(tables[kind][column] for kind in kinds) for column in ("low_bytes", "typical_bytes", "high_bytes")
    )
    nccl_sources = (line for kind in dict.fromkeys(kinds) for line in tables[kind]["source"])
    return Overhead(
        low_bytes=device.context_low_bytes + low,
        bytes=device.context_bytes + typical,
        high_bytes=device.context_high_bytes + high,
        context_bytes=device.context_bytes,
        nccl_bytes=typical,
        source=(f"CUDA context: {device.context_source}", *(f"NCCL: {line}" for line in nccl_sources)),
    )


def ghost_settings(cluster: Cluster) -> dict[str, str]:
    """The environment that makes a ghost a machine of this cluster: its card, and what NCCL takes of it.

    That is what `overheads` reckons with: bytes of a communicator up to a number of ranks, and of a direct peer.
    """
    tables, per_node = _overheads()["nccl"], cluster.gpus_per_node
    sizes = [*sorted({size for size in (1, 2, per_node) if size <= per_node}), _MOST_RANKS]
    taken = ((size, tables[_communicator(size, per_node)]["typical_bytes"]) for size in sizes)
    return {
        **cluster.device.ghost_settings(),
        "GHOST_NCCL_BYTES": ",".join(f"{size}:{count}" for size, count in taken),
        "GHOST_NCCL_PEER_BYTES": str(tables["peer"]["typical_bytes"]),
        "GHOST_NCCL_PEERS": str(_most_peers(per_node)),
    }


def _most_peers(gpus_per_node: int) -> int:
    return gpus_per_node - 1


def _communicator(ranks: int, gpus_per_node: int) -> str:
    """The table of overheads.toml for a communicator of so many ranks."""
    if ranks > gpus_per_node:
        return "machines"
    return {1: "one", 2: "two"}.get(ranks, "node")


@cache
def _overheads() -> Mapping[str, Any]:
    return tomllib.loads((files("tonnage") / "catalog" / "overheads.toml").read_text(encoding="utf-8"))
