"""A training case: a Job under a Plan on a Cluster.  Every answer starts from these three values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.job import BatchOptions, Job, JobOptions, Method
from tonnage.mesh import SHARDING, Mesh, make_mesh
from tonnage.plans import Plan, PlanOptions
from tonnage.units import pluralise


class Options(JobOptions, PlanOptions, total=False):
    """The options of a Job and a Plan as typed keywords."""


class SearchOptions(BatchOptions, PlanOptions, total=False):
    """The options of a search as typed keywords; `method` may also be `any`, or several with commas between them."""

    method: Method | Literal["any"] | str


@dataclass(frozen=True)
class Case:
    """A job, the plan that it runs under, and the GPUs that it runs on."""

    job: Job
    """The model, what is trained of it, and the shape of its batches."""
    plan: Plan
    """One value of every technique."""
    cluster: Cluster
    """The GPUs, one per rank."""
    assumed: tuple[str, ...] = ()
    """Assumptions for what the user left out, a sentence each."""
    is_carried_out: bool = False
    """True if real ranks train; an estimate on the CPU is one rank alone, without memory."""

    @cached_property
    def mesh(self) -> Mesh:
        """Return the layout of the ranks.  Raises UsageError if the plan cannot divide the GPUs that way."""
        return make_mesh(self.plan, self.cluster.gpus, self.cluster.gpus_per_node)

    def with_accumulation(self) -> "Case":
        """Return the case with the `grad_accum` at which all ranks together make the job's global batch exactly.

        Raises UsageError if no whole number of micro-batches does.
        """
        return replace(self, job=self.job.on_ranks(self.mesh.data_parallel))


Open = Callable[[str], bool]
"""Tells whether the option of Plan with that name is still to be chosen."""


def check_unused(given: Mapping[str, Any], plan: Plan, gpus: int, is_open: Open = lambda name: False) -> None:
    """Raise UsageError for an option that the user gave and that has no use in any plan on `gpus` GPUs.

    `plan` holds the options that are fixed; the options for which `is_open` is true may still get any value.
    """

    def may_be_several(name: str) -> bool:
        return getattr(plan, name) > 1 or (gpus > 1 and is_open(name))

    for reason in (
        *_check_accum_sync(given, plan, gpus, is_open),
        *_check_reduce_dtype(given, plan, gpus),
        *_check_pipeline(given, plan, may_be_several("pp"), is_open),
        *_check_sequence_parallel(given, may_be_several("tp")),
        *_check_save_checkpoint(given, plan, gpus, is_open("shard") or any(map(may_be_several, ("tp", "pp", "ep")))),
    ):
        raise UsageError(f"{reason}.")


def _check_accum_sync(given: Mapping[str, Any], plan: Plan, gpus: int, is_open: Open) -> Iterator[str]:
    """Yield the reason why accum-sync has no use.

    On a single rank only FSDP2 frees gradients after each micro-batch, because it reduces them there as well.
    """
    if not given.get("accum_sync"):
        return
    needs = "accum-sync needs several GPUs that average gradients"
    if gpus == plan.tp * plan.pp and plan.shard not in SHARDING:
        alone = f"tp {plan.tp} x pp {plan.pp} on {pluralise(gpus, 'GPU')} leaves one that averages"
        why = "there is 1 GPU" if gpus == 1 else alone
        yield f"{needs}, and {why}; leave it out, or choose shard zero3"
    elif plan.shard == "none" and not is_open("shard"):
        yield f"{needs}, and shard is none; choose shard ddp or zero3, or leave it out"


def _check_reduce_dtype(given: Mapping[str, Any], plan: Plan, gpus: int) -> Iterator[str]:
    """Yield the reason why reduce-dtype has no use.

    On one GPU a search would choose FSDP2 for its sake, which moves weights to the host or gains nothing.
    """
    if given.get("reduce_dtype") is not None and gpus == 1 and plan.shard == "none" and plan.param_offload == "none":
        needs = "reduce-dtype needs several GPUs that average gradients, and there is 1 GPU"
        yield f"{needs}; leave it out, or choose shard zero3"


def _check_pipeline(given: Mapping[str, Any], plan: Plan, several: bool, is_open: Open) -> Iterator[str]:
    """Yield the reasons why options of pipelines have no use."""
    for name in ("pp_schedule", "pp_stages"):
        if name in given and not several:
            option = name.replace("_", "-")
            why = f"{option} only applies to pipelines, and pp is 1"
            yield f"{why}; choose pp 2 or more on several GPUs, or leave {option} out"
    if "pp_stages" in given and plan.pp_schedule != "interleaved" and not is_open("pp_schedule"):
        why = f"pp-stages only applies to interleaved pipelines, and pp-schedule is {plan.pp_schedule}"
        yield f"{why}; choose pp-schedule interleaved, or leave pp-stages out"


def _check_sequence_parallel(given: Mapping[str, Any], several: bool) -> Iterator[str]:
    """Yield the reason why sequence-parallel has no use."""
    if given.get("sequence_parallel") == "on" and not several:
        why = "sequence-parallel on needs tensor parallelism, and tp is 1"
        yield f"{why}; choose tp 2 or more on several GPUs, or leave sequence-parallel out"


def _check_save_checkpoint(given: Mapping[str, Any], plan: Plan, gpus: int, may_divide: bool) -> Iterator[str]:
    """Yield the reason why sharded checkpoints have no use."""
    divided = may_divide or plan.shard not in ("none", "ddp")
    if given.get("save_checkpoint") != "sharded" or (divided and gpus > 1):
        return
    why = "there is 1 GPU" if gpus == 1 else f"shard is {plan.shard}"
    yield (
        f"save-checkpoint sharded needs a network that several GPUs shard, and {why}; choose save-checkpoint full"
        + ("" if gpus == 1 else ", or shard zero3")
    )
