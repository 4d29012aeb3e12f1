"""What all targets share: the name that a loader takes, the launcher's words, what a script of ours can train."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.case import Case
from tonnage.errors import UsageError
from tonnage.mesh import SHARDING, axes
from tonnage.techniques.chunked_loss import CAUSAL
from tonnage.trainers.target import File
from tonnage.units import counted

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.trainers.target import Target, Wish


def loadable(job: Job, model: str) -> str:
    """What `from_pretrained` takes: the Hub id of a catalog name, an existing folder's path, or the name as it is.

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


SEEING: Final = "; export it to hf-trainer, accelerate, deepspeed or torchrun"
"""Where networks that read images can go."""


def reads_images(job: Job) -> bool:
    """Whether the job's network reads images beside text."""
    return "vision_config" in job.model.config


def check_network(job: Job, to: Target) -> None:
    """Raises UsageError for networks that what is written does not train.

    Scripts train causal language models, and where they see, what `seeing` finds to write of words and images; the
    settings of trainers with loaders of their own are for text, of image-text networks too.
    """
    config, target = job.model.config, to.name
    kind, *_ = config.get("architectures") or [str(config.get("model_type"))]
    sees = reads_images(job)
    unlike = "architectures" in config and not kind.endswith(CAUSAL)
    if (sees and to.sees) or not (config.get("is_encoder_decoder") or sees or unlike):
        return
    why = f" ({to.why['images']})" if "images" in to.why else ""
    if to.scripted:
        raise UsageError(
            f"The script of {target} trains causal language models{why if sees else ''}, and {job.model.name} is a "
            f"{kind}{SEEING if sees else ''}."
        )
    if not sees or kind.endswith("Model"):
        raise UsageError(f"The settings of {target} are for text, and {job.model.name} is a {kind}.")
    if job.images:
        raise UsageError(
            f"The settings of {target} are for text alone{why}, and {job.model.name} is planned with images; plan it "
            f"with --images 0{SEEING.replace(';', ', or')}."
        )


def check_cluster(cluster: Cluster, target: str) -> None:
    """Raises UsageError where there is no GPU to launch anything on."""
    from tonnage.cluster import CPU

    if cluster.device.id == CPU:
        raise UsageError(f"An export to {target} is for GPUs, and the plan's is cpu.")


def check_plan(wish: Wish, to: Target) -> None:
    """Raises UsageError for what cannot be done together, by the words of engine and techniques.

    A package that is only missing here may be there where the export will run.
    """
    from tonnage.trainers import engine_of

    copies = data_parallel(wish.plan, wish.cluster)
    if wish.plan.shard == "none" and copies > 1:
        raise UsageError(
            f"shard=none: {copies} copies would be trained without any exchange, and {to.name} trains one; "
            "choose shard ddp or zero3."
        )
    plan = replace(wish.plan, engine=to.engine or "tonnage")
    refusal = engine_of(plan).accepts(Case(wish.job, plan, wish.cluster))
    if refusal is not None and not refusal.is_of_here:
        raise UsageError(str(refusal))


def data_parallel(plan: Plan, cluster: Cluster) -> int:
    """Ranks that have batches of their own."""
    return axes(plan, cluster.gpus, cluster.gpus_per_node).data_parallel


def torchrun(cluster: Cluster, script: str, *, alone: bool) -> tuple[str, ...]:
    """The command line that starts a script on every GPU; `alone`: on the only one, without a process group."""
    if alone:
        return ("python", script)
    machines: tuple[str, ...] = ()
    if cluster.nodes > 1:
        machines = ("--nnodes", str(cluster.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500")
    return ("torchrun", *machines, "--nproc-per-node", str(cluster.gpus_per_node), script)


def clipping(wish: Wish, whose: str) -> tuple[str, ...]:
    """What trainers do that clip where the plan says nothing."""
    if wish.plan.clip_grad_norm is not None:
        return ()
    return (f"Gradients are clipped at norm 1.0, {whose} default, since the plan does not say.",)


def several_machines(cluster: Cluster) -> tuple[str, ...]:
    """What to know where there are several."""
    if cluster.nodes == 1:
        return ()
    return (f"Start it on each of the {cluster.nodes} machines; HOST is the name of one of them.",)


def script(name: str, called: str | None = None) -> File:
    """One of our scripts as it is: `job.py`, `loop.py`, `rows.py`, or that of a target as `train.py`."""
    text = (files("tonnage.trainers") / "scripts" / f"{name}.py").read_text(encoding="utf-8")
    return File(name=f"{called or (name if name in PARTS else 'train')}.py", text=text)


PARTS: Final = ("job", "loop", "rows")
"""Scripts that a train.py imports."""


def scripts(wish: Wish, *names: str) -> tuple[File, ...]:
    """A target's train.py and what it imports; with images, rows of these and the shapes of one."""
    found = tuple(script(name) for name in (*names, "job"))
    if not with_images(wish):
        return (*found, script("rows"))
    assert wish.seen is not None
    made_up = File(name="made_up.json", text=json.dumps(dict(wish.seen.row)) + "\n")
    return (*found, script("images", "rows"), made_up)


def with_images(wish: Wish) -> bool:
    """Whether rows hold images."""
    return wish.seen is not None and wish.job.images > 0


def rows(wish: Wish) -> tuple[str, ...]:
    """What to know of the data."""
    if not with_images(wish):
        return (
            "train.py --data FILE trains on a text or on JSON lines with a field text; without it rows are made up.",
        )
    assert wish.seen is not None
    size = wish.seen.image_size
    shrunk = "" if size is None else f"; larger ones are shrunk to as many pixels as {size[0]}x{size[1]}"
    return (
        "train.py --data FILE trains on JSON lines with images and messages (rows.py shows one); without it rows are "
        "made up.",
        f"The plan counts on {counted(wish.job.images, 'image')} in each row{shrunk}. Rows are padded or cut to "
        f"{wish.job.seq_len:,} tokens.",
    )


def document(name: str, values: Any) -> File:
    """A JSON file."""
    return File(name=name, text=json.dumps(values, indent=2) + "\n")


def without_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Less what is None."""
    return {name: value for name, value in values.items() if value is not None}


def job_settings(wish: Wish, images_dtype: str | None = None) -> dict[str, Any]:
    """job.json: what our scripts are told about network, adapters and rows, whoever trains.

    `images_dtype`: in which the network gets images; by default as autocast takes them, or else in its weights'.
    """
    from tonnage.techniques.attention import BACKENDS, NETWORKS_OWN

    plan = wish.plan
    backend = BACKENDS.get(plan.attention)
    return without_defaults(
        {
            "model": wish.model,
            "seq_len": wish.job.seq_len,
            "weights_dtype": weights_dtype(wish.job, plan),
            **_of_images(wish, images_dtype),
            "attn_implementation": "sdpa" if backend else NETWORKS_OWN.get(plan.attention),
            "sdpa_backend": backend,
            "lora": lora(wish.job),
            "adapters_dtype": adapters_dtype(wish.plan.weights_dtype) if wish.job.method != "full" else None,
            "quantization": quantization(wish.job, plan),
            "cast_unquantized": plan.unquantized_dtype == "fp32" if wish.job.method == "qlora" else None,
        }
    )


def _of_images(wish: Wish, images_dtype: str | None) -> dict[str, Any]:
    """What our scripts are told about a network that reads images, and of these if there are any."""
    from tonnage.trainers.image_rows import AUTO_CLASS

    if wish.seen is None:
        return {}
    if not with_images(wish):
        return {"auto_class": AUTO_CLASS}
    autocast = wish.plan.precision.endswith("-mixed")
    size = wish.seen.image_size
    return {
        "auto_class": AUTO_CLASS,
        "images_dtype": images_dtype or ("float32" if autocast else weights_dtype(wish.job, wish.plan)),
        "image_size": None if size is None else list(size),
        "image_token": wish.seen.image_token,
    }


def adapters_dtype(name: str | None) -> str | None:
    """torch's name of the dtype that adapters are cast to; None: they stay in float32, as PEFT makes them."""
    from tonnage.techniques.precision import DTYPE_NAMES

    return None if name in (None, "fp32") else DTYPE_NAMES[name]


def weights_dtype(job: Job, plan: Plan) -> str:
    """torch's name of the dtype in which weights are loaded."""
    from tonnage.techniques.precision import DTYPE_NAMES

    if job.method == "lora":
        return DTYPE_NAMES[plan.base_dtype or plan.compute_dtype]
    if plan.weights_dtype is not None:
        return DTYPE_NAMES[plan.weights_dtype]
    mixed = plan.precision.endswith("-mixed") and job.method == "full"
    return "float32" if mixed else DTYPE_NAMES[plan.compute_dtype]


def lora(job: Job) -> dict[str, Any] | None:
    """Fields of PEFT's LoraConfig."""
    if job.method == "full":
        return None
    targets = job.lora_targets
    return {
        "r": job.lora_rank,
        "lora_alpha": 2 * job.lora_rank,
        "lora_dropout": job.lora_dropout,
        "target_modules": targets[0] if targets == ("all-linear",) else list(targets),
        "task_type": "CAUSAL_LM",
    }


def quantization(job: Job, plan: Plan) -> dict[str, Any] | None:
    """Fields of transformers' BitsAndBytesConfig."""
    from tonnage.techniques.precision import DTYPE_NAMES

    if job.method != "qlora":
        return None
    if plan.quant == "int8":
        return {"load_in_8bit": True}
    kind, _, double = plan.quant.partition("-")
    storage = {"bnb_4bit_quant_storage": DTYPE_NAMES[plan.compute_dtype]} if plan.shard in SHARDING else {}
    return {
        "load_in_4bit": True,
        **storage,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": bool(double),
        "bnb_4bit_compute_dtype": DTYPE_NAMES[plan.compute_dtype],
    }
