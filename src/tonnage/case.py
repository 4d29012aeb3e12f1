"""A training case: a Job under a Plan on a Cluster, the three values that every answer starts from."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.job import Job
from tonnage.mesh import SHARDING, Axes, axes
from tonnage.plans import Plan
from tonnage.units import counted


@dataclass(frozen=True)
class Case:
    """What is trained, how, and on what."""

    job: Job
    """What is trained, and the shape of its batches."""
    plan: Plan
    """One value of every technique."""
    cluster: Cluster
    """The GPUs, which are the ranks."""

    @cached_property
    def mesh(self) -> Axes:
        """The layout of the ranks.  Raises UsageError where the plan cannot divide them so."""
        return axes(self.plan, self.cluster.gpus, self.cluster.gpus_per_node)

    def with_accumulation(self) -> "Case":
        """Return the case with `grad_accum` such that all ranks make the job's global batch exactly.

        Raises UsageError where no whole number of micro-batches does.
        """
        return replace(self, job=self.job.on_ranks(self.mesh.data_parallel))


Open = Callable[[str], bool]
"""Whether an option of Plan is yet to be chosen."""


def check_idle(said: Mapping[str, Any], plan: Plan, gpus: int, is_open: Open = lambda name: False) -> None:
    """Raise UsageError for an option that was said and that no plan on so many GPUs has a use for.

    `plan` holds what is fixed; of what `is_open` anything may be chosen.
    """

    def several(name: str) -> bool:
        return getattr(plan, name) > 1 or (gpus > 1 and is_open(name))

    for reason in (
        *_of_averaging(said, plan, gpus, is_open),
        *_of_its_dtype(said, plan, gpus),
        *_of_pipelines(said, plan, several("pp"), is_open),
        *_of_sequences(said, several("tp")),
        *_of_checkpoints(said, plan, gpus, is_open("shard") or any(map(several, ("tp", "pp", "ep")))),
    ):
        raise UsageError(f"{reason}.")


def _of_averaging(said: Mapping[str, Any], plan: Plan, gpus: int, is_open: Open) -> Iterator[str]:
    """On a single rank gradients leave after each micro-batch only under FSDP2, which reduces them there as well."""
    if not said.get("accum_sync"):
        return
    needs = "accum-sync: it needs several GPUs that average gradients"
    if gpus == plan.tp * plan.pp and plan.shard not in SHARDING:
        alone = f"tp {plan.tp} x pp {plan.pp} on {counted(gpus, 'GPU')} leaves one that averages"
        why = "there is 1 GPU" if gpus == 1 else alone
        yield f"{needs}, and {why}; leave it out, or choose shard zero3"
    elif plan.shard == "none" and not is_open("shard"):
        yield f"{needs}, and shard is none; choose shard ddp or zero3, or leave it out"


def _of_its_dtype(said: Mapping[str, Any], plan: Plan, gpus: int) -> Iterator[str]:
    """A search would choose FSDP2 on one GPU for its sake, which moves weights to the host or gains nothing."""
    if said.get("reduce_dtype") is not None and gpus == 1 and plan.shard == "none" and plan.param_offload == "none":
        needs = "reduce-dtype: it needs several GPUs that average gradients, and there is 1 GPU"
        yield f"{needs}; leave it out, or choose shard zero3"


def _of_pipelines(said: Mapping[str, Any], plan: Plan, several: bool, is_open: Open) -> Iterator[str]:
    for name in ("pp_schedule", "pp_stages"):
        if name in said and not several:
            option = name.replace("_", "-")
            yield f"{option} is of pipelines, and pp is 1; choose pp 2 or more on several GPUs, or leave {option} out"
    if "pp_stages" in said and plan.pp_schedule != "interleaved" and not is_open("pp_schedule"):
        why = f"pp-stages is of interleaved pipelines, and pp-schedule is {plan.pp_schedule}"
        yield f"{why}; choose pp-schedule interleaved, or leave pp-stages out"


def _of_sequences(said: Mapping[str, Any], several: bool) -> Iterator[str]:
    if said.get("sequence_parallel") == "on" and not several:
        why = "sequence-parallel on is of the ranks of tp, and tp is 1"
        yield f"{why}; choose tp 2 or more on several GPUs, or leave sequence-parallel out"


def _of_checkpoints(said: Mapping[str, Any], plan: Plan, gpus: int, may_divide: bool) -> Iterator[str]:
    divided = may_divide or plan.shard not in ("none", "ddp")
    if said.get("save_checkpoint") != "sharded" or (divided and gpus > 1):
        return
    why = "there is 1 GPU" if gpus == 1 else f"shard is {plan.shard}"
    yield (
        f"save-checkpoint sharded is of networks that several GPUs divide, and {why}; choose save-checkpoint full"
        + ("" if gpus == 1 else ", or shard zero3")
    )
