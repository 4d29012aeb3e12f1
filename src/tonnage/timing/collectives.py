"""Seconds of exchanges among ranks: ring collectives by size, ranks, links, and the latency of each hop.

A ring of n ranks moves (n - 1)/n of the whole tensor over each link in n - 1 hops (all-gather, reduce-scatter), an
all-reduce twice that (Patarasu and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002; nccl-tests' PERFORMANCE.md).  Between
machines NCCL runs as many rings side by side as the group has ranks in a machine, each through its own adapter.
"""

from dataclasses import dataclass
from typing import Final

from tonnage.cluster import Cluster, Device
from tonnage.errors import CannotEstimate
from tonnage.timing.rates import Card

_PCIE_REACHES: Final = 0.17
"""Part of PCI Express's rate that ranks without NVLink reach through the host (docs/reference/time.md)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that exchange with each other."""

    ranks: int
    """Ranks in all."""
    per_node: int
    """Ranks in one machine."""

    @property
    def far(self) -> bool:
        """True if it spans machines."""
        return self.ranks > self.per_node

    @property
    def nodes(self) -> float:
        """Machines that it spans."""
        return self.ranks / self.per_node


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links of a cluster as a code uses them."""

    near_bytes_per_second: float
    """Bandwidth from a rank to its neighbour in the machine, in one direction, in large collectives."""
    far_bytes_per_second: float | None
    """Bandwidth of a rank's adapter to another machine; None: not known."""
    half_bytes: float
    """Size of a collective that reaches half of the bandwidth in the machine."""
    near_hidden: float
    """Part of a collective within a machine that computation beside it hides."""
    call_seconds: float
    """Seconds of each collective before the first byte."""
    hop_seconds: float
    """Seconds of each hop in the machine."""
    far_hop_seconds: float
    """Seconds of each hop of a ring that leaves the machine."""

    def latency(self, group: Group) -> float:
        """Return the seconds of a collective of no bytes."""
        return self.call_seconds + self.hops(group)

    def hops(self, group: Group) -> float:
        """Return the seconds in which the first byte goes around the ring."""
        return (group.ranks - 1) * (self.far_hop_seconds if group.far else self.hop_seconds)

    def moving(self, group: Group, moved_bytes: float) -> float:
        """Return the seconds in which one all-gather or reduce-scatter of so many bytes in all passes each link."""
        if group.ranks < 2 or not moved_bytes:
            return 0.0
        share = moved_bytes * (group.ranks - 1) / group.ranks
        near = (share + self.half_bytes * (1 - 1 / group.ranks)) / self.near_bytes_per_second
        if not group.far:
            return near
        if self.far_bytes_per_second is None:
            raise CannotEstimate("The network between the machines is not known, so neither is the step's time.")
        return max(near, share / (self.far_bytes_per_second * group.per_node))

    def gather(self, group: Group, moved_bytes: float) -> float:
        """Return the seconds of an all-gather, or a reduce-scatter, of so many bytes in all."""
        return 0.0 if group.ranks < 2 else self.latency(group) + self.moving(group, moved_bytes)

    def slowing(self, group: Group, moved_bytes: float) -> float:
        """Return the seconds by which such an exchange slows down the computation beside it.

        It takes multiprocessors as long as it lasts, and the memory bandwidth that its bytes need, wherever they go.
        """
        if group.ranks < 2 or not moved_bytes:
            return 0.0
        crossing = moved_bytes * (group.ranks - 1) / group.ranks / self.near_bytes_per_second
        return _HELD * self.gather(group, moved_bytes) + (1 - self.near_hidden - _HELD) * crossing

    def send(self, moved_bytes: float, far: bool) -> float:
        """Return the seconds of handing so many bytes to one other rank."""
        if far and self.far_bytes_per_second is None:
            raise CannotEstimate("The network between the machines is not known, so neither is the step's time.")
        rate = self.far_bytes_per_second if far else self.near_bytes_per_second
        return self.call_seconds + moved_bytes / (rate or 1.0)


_HELD: Final = 0.06
"""Part of a collective's seconds by which it slows down products beside it where a network of 1 to 9 GB/s leaves its
bytes hardly any part in that: 0.05 to 0.09 on 2 and 4 machines of A100 or V100 (Mist's overlap runs)."""


def has_links(device: Device) -> bool:
    """Return True if machines connect such cards by NVLink, and not by a bridge between two that is sold apart."""
    return device.nvlink_bytes_per_second is not None and not device.nvlink_bridged


def near_bytes_per_second(cluster: Cluster, card: Card) -> float:
    """Return the bandwidth from a rank to its neighbours in the machine: NVLink, else PCI Express through the host.

    Raise CannotEstimate where no link is known.
    """
    device = cluster.device
    if device.nvlink_bytes_per_second is not None and has_links(device):
        return device.nvlink_bytes_per_second * card.link
    if device.pcie_bytes_per_second is None:
        raise CannotEstimate(f"How {device.name} is connected is not known, so neither is the step's time.")
    return device.pcie_bytes_per_second * _PCIE_REACHES


def far_bytes_per_second(cluster: Cluster) -> float | None:
    """Return the bandwidth of each GPU's share of the network: the cluster's, or the usual one for this card."""
    if cluster.network_bytes_per_second is not None:
        return cluster.network_bytes_per_second
    return cluster.device.network_bytes_per_second
