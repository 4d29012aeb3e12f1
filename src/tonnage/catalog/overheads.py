"""GPU memory of a process outside torch's allocator: the CUDA context and NCCL's buffers."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from tonnage.cluster import GPUS_PER_NODE, Cluster, Device

_MAX_RANKS: Final = 2**31 - 1
"""Upper limit of a communicator's ranks: more than any has."""


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """GPU memory of one process outside torch's allocator, as an interval."""

    low_bytes: int
    """Lowest value that the sources support."""
    bytes: int
    """Typical value, which estimates use."""
    high_bytes: int
    """Highest value that the sources support."""
    context_bytes: int
    """Part of `bytes`: the CUDA context and lazily loaded modules."""
    nccl_bytes: int
    """Part of `bytes`: buffers of NCCL communicators and of direct sends."""
    source: tuple[str, ...]
    """Sources of the figures."""


def overheads(
    device: Device,
    communicators: Iterable[int] = (),
    *,
    gpus_per_node: int = GPUS_PER_NODE,
    send_recv_peers: int = 0,
) -> Overhead:
    """Return the memory of one rank outside torch's allocator.

    `communicators` are the sizes in ranks of its NCCL communicators; one larger than `gpus_per_node` spans machines.
    `send_recv_peers` is the number of ranks with which it exchanges directly.  At most the other ranks of its own
    machine are counted, because the figures (overheads.toml) are of NVLink.
    """
    tables = _overhead_tables()["nccl"]
    peers = min(send_recv_peers, _max_peers(gpus_per_node))
    kinds = [_table_name(ranks, gpus_per_node) for ranks in communicators] + ["peer"] * peers
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
    """Return the environment variables that make a ghost a machine of this cluster: its card and NCCL's memory.

    The figures are those of `overheads`: bytes of a communicator up to a number of ranks, and of a direct peer.
    """
    tables, per_node = _overhead_tables()["nccl"], cluster.gpus_per_node
    sizes = [*sorted({size for size in (1, 2, per_node) if size <= per_node}), _MAX_RANKS]
    bytes_by_size = ((size, tables[_table_name(size, per_node)]["typical_bytes"]) for size in sizes)
    return {
        **cluster.device.ghost_settings(),
        "GHOST_NCCL_BYTES": ",".join(f"{size}:{count}" for size, count in bytes_by_size),
        "GHOST_NCCL_PEER_BYTES": str(tables["peer"]["typical_bytes"]),
        "GHOST_NCCL_PEERS": str(_max_peers(per_node)),
        "GHOST_GRAPH_BYTES": str(graph_bytes(cluster.device)),
    }


def graph_bytes(device: Device) -> int:
    """Return the memory of one executable CUDA graph on a card, beside what its work allocates."""
    capability = f"{device.capability[0]}.{device.capability[1]}"
    entries = [entry for entry in _overhead_tables()["graph"] if _order(entry["capability"]) <= _order(capability)]
    return int(entries[-1]["typical_bytes"]) if entries else 0


def _order(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def _max_peers(gpus_per_node: int) -> int:
    return gpus_per_node - 1


def _table_name(ranks: int, gpus_per_node: int) -> str:
    """Return the name of overheads.toml's table for a communicator of this size."""
    if ranks > gpus_per_node:
        return "machines"
    return {1: "one", 2: "two"}.get(ranks, "node")


@cache
def _overhead_tables() -> Mapping[str, Any]:
    return tomllib.loads((files("tonnage") / "catalog" / "overheads.toml").read_text(encoding="utf-8"))
