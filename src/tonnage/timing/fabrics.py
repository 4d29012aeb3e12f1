"""Links of a cluster as each kind of exchange uses them: data parallelism, tensor parallelism, experts."""

from dataclasses import replace
from functools import lru_cache
from typing import Final

from tonnage.cluster import Cluster
from tonnage.timing.collectives import Fabric, Group, far_bytes_per_second, has_links, near_bytes_per_second
from tonnage.timing.rates import Card
from tonnage.timing.software import Software

_EXPERTS_REACH: Final = 0.9
"""Part of its adapter that handing tokens to experts on other machines reaches: 90 and 61 GB/s at 50 GB/s where a
half and a fourth of them stay in the machine (github.com/deepseek-ai/DeepEP, README at 0297fc80)."""


def place_group(ranks: int, inner: int, cluster: Cluster) -> Group:
    """Return a group of so many ranks, each `inner` places from the next."""
    return Group(ranks, max(1, min(ranks, cluster.gpus_per_node // inner)))


@lru_cache(maxsize=256)
def data_fabric(cluster: Cluster, card: Card, software: Software) -> Fabric:
    """Return the rings of data-parallel ranks; of as many hops as a machine has GPUs one leaves it."""
    network, g = far_bytes_per_second(cluster), cluster.gpus_per_node
    return Fabric(
        near_bytes_per_second=near_bytes_per_second(cluster, card) * software.near_part if cluster.gpus > 1 else 1.0,
        far_bytes_per_second=None if network is None else network * software.far_part,
        half_bytes=card.link_half_bytes if has_links(cluster.device) else 1e6,
        near_hidden=card.link_hidden,
        call_seconds=20e-6,
        hop_seconds=software.data_hop_seconds,
        far_hop_seconds=(software.data_far_hop_seconds + (g - 1) * software.data_hop_seconds) / g,
    )


@lru_cache(maxsize=256)
def tensor_fabric(cluster: Cluster, card: Card, software: Software, piped: bool, far: bool) -> Fabric:
    """Return the rings of tensor-parallel ranks.

    `piped`: a pipeline spans machines; `far`: the rings do.
    """
    fabric = data_fabric(cluster, card, software)
    if piped and software.piped_rank_seconds:
        each = software.piped_far_rank_seconds if far else software.piped_rank_seconds
        return replace(fabric, call_seconds=each, hop_seconds=each, far_hop_seconds=each)  # once for each rank
    return replace(
        fabric,
        call_seconds=software.call_seconds,
        hop_seconds=software.hop_seconds,
        far_hop_seconds=software.far_hop_seconds,
    )


@lru_cache(maxsize=256)
def expert_fabric(cluster: Cluster, card: Card, fabric: Fabric) -> Fabric:
    """Return the links on which tokens are handed to experts; `fabric`: those of the tensor-parallel ranks."""
    network = far_bytes_per_second(cluster)
    return replace(
        fabric,
        near_bytes_per_second=near_bytes_per_second(cluster, card),
        far_bytes_per_second=None if network is None else network * _EXPERTS_REACH,
    )
