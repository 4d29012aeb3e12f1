"""accelerate: its configuration file for `accelerate launch`, and a loop of ours around its Accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from tonnage.mesh import SHARDING
from tonnage.trainers import job_file, packages
from tonnage.trainers.accelerate.run import MOVES, PLUGINS_OWN, moves_inputs
from tonnage.trainers.engine import ANY
from tonnage.trainers.loop.write import LOOPS, WHY, loop_settings
from tonnage.trainers.target import ExportRequest, File, Target, Written, flat, json_file

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

FILE: Final = "accelerate.yaml"

MIXED: Final = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}
"""accelerate's `mixed_precision` of each precision under autocast."""

PLUGIN: Final = ("accelerate", "utils/dataclasses.py", "FullyShardedDataParallelPlugin")
"""The class whose fields are read."""


def overrides(job: Job, plan: Plan) -> Mapping[str, tuple[str, Any]]:
    """Return why FSDP2's plugin moves no activations: it moves inputs of layers that run again, in newer versions."""
    if plan.activation_offload != "cpu":
        return {}
    if not moves_inputs(plan):
        why = (
            "accelerate moves the inputs of layers that run again in FSDP2: shard zero2 or zero3, checkpointing full"
        )
        return {"activation_offload": (why, "none")}
    fields = packages.fields(*PLUGIN)
    if fields and MOVES not in fields:
        return {"activation_offload": ("the installed accelerate keeps the inputs of layers on the card", "none")}
    return {}


def write(request: ExportRequest) -> Written:
    """Return accelerate.yaml, job.json and the script."""
    settings = cluster_config(request)
    by_plugin = PLUGINS_OWN if moves_inputs(request.plan) else ()
    loop = {name: value for name, value in loop_settings(request).items() if name not in by_plugin}
    job = {**job_file.job_settings(request), **loop}
    return Written(
        files=(
            yaml_file(settings),
            json_file("job.json", job),
            *job_file.scripts(request, "accelerate", "loop"),
        ),
        command=(*launch(request), "train.py"),
        settings={**flat(settings), **{f"job.{name}": value for name, value in flat(job).items()}},
        notes=(*note_machines(request), *job_file.note_rows(request)),
    )


def yaml_file(settings: Mapping[str, Any]) -> File:
    """Return accelerate.yaml with these settings."""
    return File(name=FILE, text=yaml.safe_dump({**FIXED, **settings}, sort_keys=False))


FIXED: Final = {"compute_environment": "LOCAL_MACHINE", "use_cpu": False, "debug": False}
"""Settings of every such file."""


def cluster_config(request: ExportRequest) -> dict[str, Any]:
    """Return accelerate's ClusterConfig."""
    cluster = request.cluster
    several = {"same_network": True, "rdzv_backend": "c10d", "main_process_ip": "HOST", "main_process_port": 29500}
    return {
        "distributed_type": _distributed_type(request),
        "mixed_precision": MIXED.get(request.plan.precision, "no"),
        "num_machines": cluster.nodes,
        "num_processes": cluster.gpus,
        **(several if cluster.nodes > 1 else {}),
        **_sharding(request),
    }


def _distributed_type(request: ExportRequest) -> str:
    return "FSDP" if request.plan.shard in SHARDING else "NO" if request.plan.shard == "none" else "MULTI_GPU"


def _sharding(request: ExportRequest) -> dict[str, Any]:
    plan = request.plan
    if plan.shard not in SHARDING:
        return {}
    fsdp = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.shard != "zero2",
        "fsdp_offload_params": plan.param_offload == "cpu",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if moves_inputs(plan):
        fsdp |= {"fsdp_activation_checkpointing": True, f"fsdp_{MOVES}": True}
    if request.image_row is not None and request.image_row.layers:
        fsdp["fsdp_transformer_layer_cls_to_wrap"] = ",".join(request.image_row.layers)
    if plan.shard != "hsdp":
        return {"fsdp_config": fsdp}
    axes = request.axes
    mesh = {
        "parallelism_config_dp_replicate_size": axes.dp_replicate,
        "parallelism_config_dp_shard_size": axes.dp_shard,
    }
    return {"fsdp_config": fsdp, "parallelism_config": mesh}


def launch(request: ExportRequest) -> tuple[str, ...]:
    """Return the words of `accelerate launch` with that file."""
    machine = ("--machine_rank", "MACHINE") if request.cluster.nodes > 1 else ()
    return ("accelerate", "launch", "--config_file", FILE, *machine)


def note_machines(request: ExportRequest) -> tuple[str, ...]:
    """Return what to know where there are several machines."""
    if request.cluster.nodes == 1:
        return ()
    return (
        f"Start it on each of the {request.cluster.nodes} machines, MACHINE from 0; HOST is the first one's address.",
    )


def reread(folder: Path) -> Mapping[str, Any]:
    """Return the settings that the launcher and our script made of the files."""
    return {**reread_launch(folder), **job_file.reread_job(folder)}


def reread_launch(folder: Path) -> dict[str, Any]:
    """Return the ClusterConfig that `accelerate launch` reads.

    Settings of a section that the launcher has no argument for are left out, because it ignores them.
    """
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    path = str(folder / FILE)
    config = load_config_from_file(path)
    known = vars(launch_command_parser().parse_args(["--config_file", path, "train.py"]))
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, dict):
            settings |= {f"{name}.{inner}": held for inner, held in value.items() if inner in known}
        else:
            settings[name] = getattr(value, "value", value)
    return settings


ACCELERATE_TARGET: Final = Target(
    name="accelerate",
    packages=("accelerate", "transformers"),
    expresses={
        **LOOPS,
        "accum_sync": ANY,
        "activation_offload": ("none", "cpu"),
        "shard": ("none", "ddp", *SHARDING),
        "param_offload": ("none", "cpu"),
    },
    why=WHY,
    overrides=overrides,
    engine="accelerate",
    scripted=True,
    reads_images=True,
    write=write,
    reread=reread,
)
