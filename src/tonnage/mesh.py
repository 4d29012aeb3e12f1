"""The layout of a job's ranks: the axes of its device mesh, in torchtitan's order.

For example, 32 ranks under `shard="hsdp", tp=2` with 8 GPUs a machine are dp_replicate 4 x dp_shard 4 x tp 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from tonnage.catalog.conventions import conventions_of
from tonnage.errors import UsageError

if TYPE_CHECKING:
    from tonnage.plans import Plan

NAMES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Names of the axes, outermost first: neighbours on the last one are neighbours in a machine."""

SHARDING: Final = ("zero2", "zero3", "hsdp")
"""Values of `shard` that divide parameters among ranks."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Number of ranks along each axis of the mesh; the product (without `ep`) is the world size."""

    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """Data-parallel replicas: ranks (or groups of them) with a copy of the parameters and batches of their own."""
    dp_shard: int = 1
    """Ranks that divide parameters among them and see their own batches."""
    cp: int = 1
    """Context-parallel ranks: they share a sequence, and divide parameters too."""
    tp: int = 1
    """Tensor-parallel ranks: they share each matrix."""
    ep: int = 1
    """Expert-parallel ranks: they share the experts.  They are ranks along `dp_shard`, `cp` and `tp`, not additional
    ones (also along `dp_replicate` for an engine whose replicas share experts)."""

    @property
    def ranks(self) -> int:
        """Return the world size."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Return the number of ranks that see different batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Return the number of parts into which sharding divides a parameter."""
        return self.dp_shard * self.cp

    def of_mesh(self, shard: str) -> tuple[str, ...]:
        """Return the axes of the mesh: those with several ranks, and the one along which `shard` works."""
        sharded = "dp_shard" if shard in SHARDING else "dp_replicate" if shard != "none" else None
        return tuple(name for name in NAMES if getattr(self, name) > 1 or name == sharded) or ("dp_shard",)

    @property
    def sharing_experts(self) -> int:
        """Return the number of ranks among which experts are distributed; ranks that share an expert divide it."""
        return self.shards * self.tp

    @property
    def different(self) -> tuple[int, ...]:
        """Return one rank of each stage that may need the most memory: the first, the second and the last stage."""
        stages = sorted({0, min(1, self.pp - 1), self.pp - 1})
        return tuple(stage * (self.ranks // self.pp) for stage in stages)

    def place(self, rank: int, axis: str) -> int:
        """Return a rank's coordinate along an axis."""
        inner = 1
        for name in reversed(NAMES):
            if name == axis:
                return rank // inner % int(getattr(self, name))
            inner *= getattr(self, name)
        raise ValueError(axis)


def make_mesh(plan: Plan, ranks: int, gpus_per_node: int) -> Mesh:
    """Return the axes of a plan on this number of ranks.  Raises UsageError where the plan cannot divide them.

    Under `hsdp` the ranks of a machine that tensor and context parallelism leave divide parameters; under `zero2`
    and `zero3` all data-parallel ranks do, and otherwise none.
    """
    copies = conventions_of(plan.engine).copies_share_experts
    return _axes(plan.shard, plan.pp, plan.cp, plan.tp, plan.ep, ranks, gpus_per_node, copies)


@lru_cache(maxsize=8192)  # a search asks for each layout many times
def _axes(
    sharding: str, pp: int, cp: int, tp: int, ep: int, ranks: int, gpus_per_node: int, copies_share_experts: bool
) -> Mesh:
    replica = tp * cp * pp
    if ranks % replica:
        raise UsageError(f"tp {tp} x cp {cp} x pp {pp} needs a multiple of {replica} GPUs, and there are {ranks}.")
    if gpus_per_node % tp and ranks > 1:
        fitting = ", ".join(str(size) for size in divisors(gpus_per_node))
        raise UsageError(
            f"tp {tp} must divide the {gpus_per_node} GPUs of a machine, because tensor parallelism across machines "
            f"is too slow; possible: {fitting}."
        )
    data = ranks // replica
    shard = data if sharding in SHARDING else 1
    if sharding == "hsdp":
        shard = min(data, max(1, gpus_per_node // (tp * cp)))
        while data % shard:
            shard -= 1
    layout = Mesh(pp=pp, dp_replicate=data // shard, dp_shard=shard, cp=cp, tp=tp, ep=ep)
    sharing, kind = layout.sharing_experts, "ranks that divide parameters"
    if copies_share_experts:
        sharing, kind = sharing * layout.dp_replicate, "data-parallel ranks"
    if ep > 1 and (sharing % ep or ep % tp):
        fitting = ", ".join(str(size) for size in divisors(sharing) if size % tp == 0)
        is_unsharded = sharding not in SHARDING and not copies_share_experts
        way_out = "; under shard zero3 all data-parallel ranks divide them" if is_unsharded else ""
        raise UsageError(
            f"ep {ep} must divide the {sharing} {kind}, and be a multiple of tp {tp}; possible: {fitting}{way_out}."
        )
    return layout


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]
