"""Checks of an export before anything is written, and the name by which a trainer loads the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tonnage.case import Case
from tonnage.errors import UsageError
from tonnage.mesh import make_mesh
from tonnage.options import replace_checked
from tonnage.techniques.chunked_loss import CAUSAL

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.trainers.target import ExportRequest, Target

IMAGE_TARGETS: Final = "; export it to hf-trainer, accelerate, deepspeed or torchrun"
"""The targets of networks that read images."""


def loadable_name(job: Job, model: str) -> str:
    """Return what `from_pretrained` takes: a catalog name's Hub id, an existing folder's path, or the name as it is.

    Raises UsageError for a factory, which only Python can load.
    """
    from tonnage.catalog.models import find_model

    if job.model.kind == "factory":
        raise UsageError(f"{model} is a factory, which no trainer's settings can name; use a Hub id or a folder.")
    known = find_model(model)
    if known is not None:
        return known.hub
    path = Path(model).expanduser()
    if path.is_file():
        return str(path.resolve().parent)
    return str(path.resolve()) if path.is_dir() else model


def reads_images(job: Job) -> bool:
    """Return whether the job's network reads images beside text."""
    return "vision_config" in job.model.config


def check_network(job: Job, to: Target) -> None:
    """Raise UsageError for networks that the target does not train.

    Scripts train causal language models and, where they take images, the networks that `image_rows` describes.  The
    settings of trainers with loaders of their own are for text, of image-text networks too.
    """
    config, target = job.model.config, to.name
    kind, *_ = config.get("architectures") or [str(config.get("model_type"))]
    with_images = reads_images(job)
    is_other = "architectures" in config and not kind.endswith(CAUSAL)
    if (with_images and to.reads_images) or not (config.get("is_encoder_decoder") or with_images or is_other):
        return
    why = f" ({to.why['images']})" if "images" in to.why else ""
    if to.scripted:
        raise UsageError(
            f"The script of {target} trains causal language models{why if with_images else ''}, and {job.model.name} "
            f"is a {kind}{IMAGE_TARGETS if with_images else ''}."
        )
    if not with_images or kind.endswith("Model"):
        raise UsageError(f"The settings of {target} are for text, and {job.model.name} is a {kind}.")
    if job.images:
        raise UsageError(
            f"The settings of {target} are for text alone{why}, and {job.model.name} is planned with images; plan it "
            f"with --images 0{IMAGE_TARGETS.replace(';', ', or')}."
        )


def check_cluster(cluster: Cluster, target: str) -> None:
    """Raise UsageError where there is no GPU to launch anything on."""
    from tonnage.cluster import CPU

    if cluster.device.id == CPU:
        raise UsageError(f"An export to {target} is for GPUs, and the plan's is cpu.")


def check_plan(request: ExportRequest, to: Target) -> None:
    """Raise NotExpressed for what cannot be done together, with the reason of the engine or a technique.

    A package that is missing here may be installed where the export will run.
    """
    from tonnage.trainers import engine_of
    from tonnage.trainers.target import NotExpressed

    copies = data_parallel(request.plan, request.cluster)
    if request.plan.shard == "none" and copies > 1:
        raise NotExpressed(
            f"shard=none: {copies} copies would be trained without any exchange, and {to.name} trains one; "
            "choose shard ddp or zero3."
        )
    plan = replace_checked(request.plan, {"engine": to.engine or "tonnage"})
    refusal = engine_of(plan).accepts(Case(request.job, plan, request.cluster))
    if refusal is not None and not refusal.is_of_here:
        raise NotExpressed(str(refusal))


def data_parallel(plan: Plan, cluster: Cluster) -> int:
    """Return the number of ranks that have batches of their own."""
    return make_mesh(plan, cluster.gpus, cluster.gpus_per_node).data_parallel
