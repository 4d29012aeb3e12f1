"""accelerate's FSDP plugin and its mesh, for a loop of one's own and for Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tonnage.mesh import SHARDING, make_mesh
from tonnage.techniques.technique import Refusal

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.job import Job, SaveCheckpoint
    from tonnage.plans import Plan
    from tonnage.step.world import World


def refuse_context_parallel(plan: Plan) -> Refusal | None:
    """Return the refusal of context parallelism without FSDP2."""
    if plan.cp == 1 or plan.shard in SHARDING:
        return None
    return Refusal(
        technique=f"cp={plan.cp}",
        reason=f"accelerate has ranks share sequences under FSDP2 alone, and shard is {plan.shard}",
        instead="choose shard zero3",
    )


def refuse_sharded_files(job: Job, plan: Plan) -> Refusal | None:
    """Return the refusal of files of parts without FSDP2."""
    if job.save_checkpoint != "sharded" or plan.shard in SHARDING:
        return None
    return Refusal(
        technique=f"save-checkpoint={job.save_checkpoint}",
        reason=f"what shard {plan.shard} has is whole on each rank",
        instead="choose save-checkpoint full, or shard zero3",
    )


def refuse_resume(case: Case, who: str) -> Refusal | None:
    """Return the refusal of the other device than the one to which `who` has the states of a file brought.

    The choice is made by the Trainer's `_load_optimizer_and_scheduler` and the Accelerator's `load_state`.
    """
    device = "gpu" if case.plan.shard == "ddp" and case.cluster.gpus > 1 else "cpu"
    if case.job.resume in ("none", device):
        return None
    return Refusal(
        technique=f"resume={case.job.resume}",
        reason=f"under shard {case.plan.shard} {who} has states brought to the {device.upper()}",
        instead=f"choose resume {device}",
    )


def checkpoint_kind(job: Job, plan: Plan) -> SaveCheckpoint:
    """Return whether `full` or `sharded` files are saved and resumed from.

    Of what FSDP2 divides the Trainer has whole files by default, and accelerate's own plugin files of parts.
    """
    if plan.shard not in SHARDING:
        return "full"
    if job.save_checkpoint != "none":
        return job.save_checkpoint
    return "sharded" if plan.engine == "accelerate" else "full"


def checkpoint_settings(job: Job, plan: Plan) -> dict[str, Any]:
    """Return the plugin's setting for that kind of files, where anything is saved or resumed."""
    if (job.save_checkpoint, job.resume) == ("none", "none"):
        return {}
    return {"state_dict_type": f"{checkpoint_kind(job, plan).upper()}_STATE_DICT"}


def parallelism_settings(plan: Plan, world: World) -> dict[str, Any]:
    """Return accelerate's ParallelismConfig, where the ranks are laid out in more than one row."""
    if plan.shard != "hsdp" and plan.cp == 1:
        return {}
    from accelerate import ParallelismConfig

    layout = make_mesh(plan, world.size, world.gpus_per_node)
    sizes = {"dp_replicate_size": layout.dp_replicate, "dp_shard_size": layout.dp_shard, "cp_size": plan.cp}
    return {"parallelism_config": ParallelismConfig(**sizes)}
