"""job.json and the scripts of ours that read it: network, adapters and rows, whatever trainer runs them."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.mesh import SHARDING
from tonnage.trainers.target import File, flat, without_none
from tonnage.units import pluralise

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.trainers.target import ExportRequest

PARTS: Final = ("job", "loop", "rows")
"""Scripts that a train.py imports."""


def script(name: str, file_name: str | None = None) -> File:
    """Return one of our scripts as it is: `job.py`, `loop.py`, `rows.py`, or that of a target as `train.py`."""
    text = (files("tonnage.trainers") / "scripts" / f"{name}.py").read_text(encoding="utf-8")
    return File(name=f"{file_name or (name if name in PARTS else 'train')}.py", text=text)


def scripts(request: ExportRequest, *names: str) -> tuple[File, ...]:
    """Return a target's train.py and what it imports; with images, the rows of images and the shapes of one row."""
    shared = tuple(script(name) for name in (*names, "job"))
    if not has_images(request):
        return (*shared, script("rows"))
    assert request.image_row is not None
    made_up = File(name="made_up.json", text=json.dumps(dict(request.image_row.row)) + "\n")
    return (*shared, script("images", "rows"), made_up)


def has_images(request: ExportRequest) -> bool:
    """Return whether rows hold images."""
    return request.image_row is not None and request.job.images > 0


def note_rows(request: ExportRequest) -> tuple[str, ...]:
    """Return what to know of the data."""
    if not has_images(request):
        return (
            "train.py --data FILE trains on a text or on JSON lines with a field text; without it rows are made up.",
        )
    assert request.image_row is not None
    size = request.image_row.image_size
    shrunk = "" if size is None else f"; larger ones are shrunk to as many pixels as {size[0]}x{size[1]}"
    return (
        "train.py --data FILE trains on JSON lines with images and messages (rows.py shows one); without it rows are "
        "made up.",
        f"The plan counts on {pluralise(request.job.images, 'image')} in each row{shrunk}. Rows are padded or cut to "
        f"{request.job.seq_len:,} tokens.",
    )


def job_settings(request: ExportRequest, images_dtype: str | None = None) -> dict[str, Any]:
    """Return the fields of job.json that decide network, adapters and rows, whatever trains.

    `images_dtype` is that of the network's images; None: what autocast takes, or else that of the weights.
    """
    from tonnage.techniques.attention import BACKENDS, NETWORKS_OWN

    job, plan = request.job, request.plan
    backend = BACKENDS.get(plan.attention)
    return without_none(
        {
            "model": request.model,
            "seq_len": job.seq_len,
            "weights_dtype": weights_dtype(job, plan),
            **_image_settings(request, images_dtype),
            "attn_implementation": "sdpa" if backend else NETWORKS_OWN.get(plan.attention),
            "sdpa_backend": backend,
            "lora": lora(job),
            "adapters_dtype": adapters_dtype(plan.weights_dtype) if job.method != "full" else None,
            "quantization": quantization(job, plan),
            "cast_unquantized": plan.unquantized_dtype == "fp32" if job.method == "qlora" else None,
        }
    )


def _image_settings(request: ExportRequest, images_dtype: str | None) -> dict[str, Any]:
    """Return the fields of a network that reads images, and of the images if there are any."""
    from tonnage.trainers.image_rows import AUTO_CLASS

    if request.image_row is None:
        return {}
    if not has_images(request):
        return {"auto_class": AUTO_CLASS}
    autocast = request.plan.precision.endswith("-mixed")
    size = request.image_row.image_size
    return {
        "auto_class": AUTO_CLASS,
        "images_dtype": images_dtype or ("float32" if autocast else weights_dtype(request.job, request.plan)),
        "image_size": None if size is None else list(size),
        "image_token": request.image_row.image_token,
    }


def adapters_dtype(name: str | None) -> str | None:
    """Return torch's name of the dtype to which adapters are cast; None: they stay in float32, as PEFT makes them."""
    from tonnage.techniques.precision import DTYPE_NAMES

    return None if name in (None, "fp32") else DTYPE_NAMES[name]


def weights_dtype(job: Job, plan: Plan) -> str:
    """Return torch's name of the dtype in which weights are loaded."""
    from tonnage.techniques.precision import DTYPE_NAMES

    if job.method == "lora":
        return DTYPE_NAMES[plan.base_dtype or plan.compute_dtype]
    if plan.weights_dtype is not None:
        return DTYPE_NAMES[plan.weights_dtype]
    is_mixed = plan.precision.endswith("-mixed") and job.method == "full"
    return "float32" if is_mixed else DTYPE_NAMES[plan.compute_dtype]


def lora(job: Job) -> dict[str, Any] | None:
    """Return the fields of PEFT's LoraConfig; None without adapters."""
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
    """Return the fields of transformers' BitsAndBytesConfig; None where nothing is quantized."""
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


def reread_job(folder: Path) -> dict[str, Any]:
    """Return job.json as our script reads it, with adapters and quantization as PEFT and transformers read them."""
    from dataclasses import asdict

    from tonnage.trainers.scripts import job

    parsed = job.read(folder)
    settings = without_none(asdict(parsed))
    if parsed.lora is not None:
        import peft

        adapters = peft.LoraConfig(**parsed.lora)
        settings["lora"] = {name: _to_json(getattr(adapters, name)) for name in parsed.lora}
    if parsed.quantization is not None:
        from transformers import BitsAndBytesConfig

        bits = BitsAndBytesConfig(**parsed.quantization)
        settings["quantization"] = {name: _to_json(getattr(bits, name)) for name in parsed.quantization}
    return {f"job.{name}": value for name, value in flat(settings).items()}


def _to_json(value: Any) -> Any:
    """Return sets, enums and dtypes as JSON has them."""
    if isinstance(value, set):
        return sorted(value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else getattr(value, "value", value)
