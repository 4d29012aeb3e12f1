"""How the ranks of a job are laid out: the axes of its device mesh, in torchtitan's order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from tonnage.catalog.conventions import conventions_of
from tonnage.errors import UsageError

if TYPE_CHECKING:
    from tonnage.plans import Plan

NAMES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes, outermost first: neighbours on the last one are neighbours in a machine."""

SHARDING: Final = ("zero2", "zero3", "hsdp")
"""Values of `shard` that divide parameters."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """How many ranks lie along each axis of the mesh; the product is all of them."""

    pp: int = 1
    """Stages of the pipeline."""
    dp_replicate: int = 1
    """Ranks (or groups of them) that each have a copy of the parameters, and batches of their own."""
    dp_shard: int = 1
    """Ranks that divide parameters, and have batches of their own."""
    cp: int = 1
    """Ranks that share a sequence; they divide parameters too."""
    tp: int = 1
    """Ranks that share each matrix."""
    ep: int = 1
    """Ranks that share the experts: they lie along `dp_shard`, `cp` and `tp`, and add none of their own (of an engine
    whose copies share experts also along `dp_replicate`)."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks that see different batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Parts into which sharding divides a parameter."""
        return self.dp_shard * self.cp

    def of_mesh(self, shard: str) -> tuple[str, ...]:
        """The axes that a mesh has: those of several ranks, and the one along which `shard` does its work."""
        wanted = "dp_shard" if shard in SHARDING else "dp_replicate" if shard != "none" else None
        return tuple(name for name in NAMES if getattr(self, name) > 1 or name == wanted) or ("dp_shard",)

    @property
    def sharing_experts(self) -> int:
        """Ranks among which the experts are dealt out: those that share an expert divide it."""
        return self.shards * self.tp

    @property
    def different(self) -> tuple[int, ...]:
        """A rank of each stage that may be the fullest: the first, the one behind it, and the last."""
        stages = sorted({0, min(1, self.pp - 1), self.pp - 1})
        return tuple(stage * (self.ranks // self.pp) for stage in stages)

    def place(self, rank: int, axis: str) -> int:
        """Where a rank lies along an axis."""
        inner = 1
        for name in reversed(NAMES):
            if name == axis:
                return rank // inner % int(getattr(self, name))
            inner *= getattr(self, name)
        raise ValueError(axis)


def axes(plan: Plan, ranks: int, gpus_per_node: int) -> Axes:
    """The axes of a plan on so many ranks.  Raises UsageError where they cannot be divided so.

    Under `hsdp` as many ranks of a machine as are not taken by tensor and context parallelism divide parameters;
    under `zero2` and `zero3` all that see different batches do, and otherwise none.
    """
    copies = conventions_of(plan.engine).copies_share_experts
    return _axes(plan.shard, plan.pp, plan.cp, plan.tp, plan.ep, ranks, gpus_per_node, copies)


@lru_cache(maxsize=8192)  # a search asks for each layout many times
def _axes(
    sharding: str, pp: int, cp: int, tp: int, ep: int, ranks: int, gpus_per_node: int, copies_share_experts: bool
) -> Axes:
    asked = tp * cp * pp
    if ranks % asked:
        raise UsageError(f"tp {tp} x cp {cp} x pp {pp} needs a multiple of {asked} GPUs, and there are {ranks}.")
    if gpus_per_node % tp and ranks > 1:
        fitting = ", ".join(str(size) for size in divisors(gpus_per_node))
        raise UsageError(
            f"tp {tp} must divide the {gpus_per_node} GPUs of a machine, across which it is too slow; "
            f"possible: {fitting}."
        )
    data = ranks // asked
    shard = data if sharding in SHARDING else 1
    if sharding == "hsdp":
        shard = min(data, max(1, gpus_per_node // (tp * cp)))
        while data % shard:
            shard -= 1
    found = Axes(pp=pp, dp_replicate=data // shard, dp_shard=shard, cp=cp, tp=tp, ep=ep)
    sharing, who = found.sharing_experts, "ranks that divide parameters"
    if copies_share_experts:
        sharing, who = sharing * found.dp_replicate, "data-parallel ranks"
    if ep > 1 and (sharing % ep or ep % tp):
        fitting = ", ".join(str(size) for size in divisors(sharing) if size % tp == 0)
        alone = sharding not in SHARDING and not copies_share_experts
        way_out = "; under shard zero3 all data-parallel ranks divide them" if alone else ""
        raise UsageError(
            f"ep {ep} must divide the {sharing} {who}, and be a multiple of tp {tp}; possible: {fitting}{way_out}."
        )
    return found


def divisors(number: int) -> list[int]:
    """All numbers that divide it, smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]
