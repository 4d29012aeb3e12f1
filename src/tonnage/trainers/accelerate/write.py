"""accelerate: its configuration file for `accelerate launch`, and a loop of ours around its Accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from tonnage.mesh import SHARDING
from tonnage.trainers import installed, launching
from tonnage.trainers.accelerate.run import MOVES, PLUGINS_OWN, moves_inputs
from tonnage.trainers.engine import ANY
from tonnage.trainers.hf_trainer.write import reread_job
from tonnage.trainers.loop.write import LOOPS, WHY, loop_settings
from tonnage.trainers.target import File, Target, Wish, Written, flat

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

FILE: Final = "accelerate.yaml"

MIXED: Final = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}

PLUGIN: Final = ("accelerate", "utils/dataclasses.py", "FullyShardedDataParallelPlugin")
"""Where the fields are read."""


def besides(job: Job, plan: Plan) -> Mapping[str, tuple[str, Any]]:
    """What FSDP2's plugin has no words for: what layers keep that do not run again, and in older versions all."""
    if plan.activation_offload != "cpu":
        return {}
    if not moves_inputs(plan):
        why = (
            "accelerate moves the inputs of layers that run again in FSDP2: shard zero2 or zero3, checkpointing full"
        )
        return {"activation_offload": (why, "none")}
    known = installed.fields(*PLUGIN)
    if known and MOVES not in known:
        return {"activation_offload": ("the installed accelerate keeps the inputs of layers on the card", "none")}
    return {}


def write(wish: Wish) -> Written:
    """accelerate.yaml, job.json and the script."""
    said = settings(wish)
    by_plugin = PLUGINS_OWN if moves_inputs(wish.plan) else ()
    of_loop = {name: value for name, value in loop_settings(wish).items() if name not in by_plugin}
    job = {**launching.job_settings(wish), **of_loop}
    return Written(
        files=(
            file(said),
            launching.document("job.json", job),
            *launching.scripts(wish, "accelerate", "loop"),
        ),
        command=(*launch(wish), "train.py"),
        settings={**flat(said), **{f"job.{name}": value for name, value in flat(job).items()}},
        notes=(*machines(wish), *launching.rows(wish)),
    )


def file(said: Mapping[str, Any]) -> File:
    """accelerate.yaml."""
    return File(name=FILE, text=yaml.safe_dump({**FIXED, **said}, sort_keys=False))


FIXED: Final = {"compute_environment": "LOCAL_MACHINE", "use_cpu": False, "debug": False}
"""What every such file says."""


def settings(wish: Wish) -> dict[str, Any]:
    """accelerate's ClusterConfig."""
    cluster = wish.cluster
    several = {"same_network": True, "rdzv_backend": "c10d", "main_process_ip": "HOST", "main_process_port": 29500}
    return {
        "distributed_type": _kind(wish),
        "mixed_precision": MIXED.get(wish.plan.precision, "no"),
        "num_machines": cluster.nodes,
        "num_processes": cluster.gpus,
        **(several if cluster.nodes > 1 else {}),
        **_sharding(wish),
    }


def _kind(wish: Wish) -> str:
    return "FSDP" if wish.plan.shard in SHARDING else "NO" if wish.plan.shard == "none" else "MULTI_GPU"


def _sharding(wish: Wish) -> dict[str, Any]:
    plan = wish.plan
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
    if wish.seen is not None and wish.seen.layers:
        fsdp["fsdp_transformer_layer_cls_to_wrap"] = ",".join(wish.seen.layers)
    if plan.shard != "hsdp":
        return {"fsdp_config": fsdp}
    axes = wish.axes
    mesh = {
        "parallelism_config_dp_replicate_size": axes.dp_replicate,
        "parallelism_config_dp_shard_size": axes.dp_shard,
    }
    return {"fsdp_config": fsdp, "parallelism_config": mesh}


def launch(wish: Wish) -> tuple[str, ...]:
    """`accelerate launch` with that file."""
    machine = ("--machine_rank", "MACHINE") if wish.cluster.nodes > 1 else ()
    return ("accelerate", "launch", "--config_file", FILE, *machine)


def machines(wish: Wish) -> tuple[str, ...]:
    """What to know where there are several."""
    if wish.cluster.nodes == 1:
        return ()
    return (
        f"Start it on each of the {wish.cluster.nodes} machines, MACHINE from 0; HOST is the first one's address.",
    )


def reread(folder: Path) -> Mapping[str, Any]:
    """Of the launcher, and of job.json."""
    return {**reread_launch(folder), **reread_job(folder)}


def reread_launch(folder: Path) -> dict[str, Any]:
    """Of the ClusterConfig that `accelerate launch` reads; what it has no argument for, it forgets."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    path = str(folder / FILE)
    read = load_config_from_file(path)
    known = vars(launch_command_parser().parse_args(["--config_file", path, "train.py"]))
    found: dict[str, Any] = {}
    for name, value in vars(read).items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": held for inner, held in value.items() if inner in known}
        else:
            found[name] = getattr(value, "value", value)
    return found


ACCELERATE: Final = Target(
    name="accelerate",
    packages=("accelerate", "transformers"),
    expresses={
        **LOOPS,
        "accum_sync": ANY,
        "activation_offload": ("none", "cpu"),
        "shard": ("none", "ddp", *SHARDING),
        "param_offload": ("none", "cpu"),
    },
    why={**WHY, "shard=zero1": "accelerate divides by FSDP2 or DeepSpeed, not optimizer states alone"},
    besides=besides,
    engine="accelerate",
    scripted=True,
    sees=True,
    write=write,
    reread=reread,
)
