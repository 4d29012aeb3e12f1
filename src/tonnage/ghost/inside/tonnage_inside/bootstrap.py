"""Sets up the watch in a process of a dry-run.

Environment: TONNAGE_OUT (folder for the traces), TONNAGE_STEPS (optimizer steps to run),
TONNAGE_SOURCE, TONNAGE_ALONE (this process acts for its rank alone, see `ranks`),
TONNAGE_COUNTED (one more step is made, whose operations are counted, see `operations`),
TONNAGE_SETTINGS (see `script`), TONNAGE_CATALOG (see `hub`), TONNAGE_GROWTH (see `engines`).
"""

import atexit
import os
from pathlib import Path
from types import ModuleType

from tonnage_recorder import allocator_guard, native, outcome, ranks, recording
from tonnage_recorder.engines import Engines
from tonnage_recorder.imports import after_import, expect
from tonnage_recorder.script import Script
from tonnage_recorder.watch import Watch

from . import kernels, saves, values
from .hub import Hub

IMPORT_TORCH = (
    *("transformers.modeling_utils", "transformers.masking_utils", "transformers.generation.utils"),
    *("transformers.trainer", "transformers.training_args", "transformers.distributed.expert_parallel"),
    *("accelerate.accelerator", "peft.peft_model", "safetensors.torch", "deepspeed.runtime.engine"),
    *("deepspeed.ops.op_builder.builder", "deepspeed.runtime.zero.utils", "diffusers.models.modeling_utils"),
    *("transformers.cache_utils", "transformers.generation.continuous_batching.cache"),
    *("vllm.engine.arg_utils", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker", "flashinfer.jit.core"),
)
"""Patched modules that may be the first to import torch."""


def install() -> None:
    """Wait for torch; a process that never imports it is left alone."""
    recording.begin(os.environ["TONNAGE_OUT"])
    expect(*IMPORT_TORCH)
    script = Script()
    script.listen()
    environment = dict(os.environ)  # a script may clear its environment before it imports torch
    hub = None
    if "TONNAGE_CATALOG" in environment:
        hub = Hub(environment["TONNAGE_CATALOG"], Path(environment["TONNAGE_OUT"]) / "hub")
        hub.install()
    after_import("torch", lambda torch: _start(torch, script, environment, hub))


def _start(torch: ModuleType, script: Script, environment: dict[str, str], hub: Hub | None) -> None:
    from torch.optim import optimizer

    ghost = native.load()
    steps = environment.get("TONNAGE_STEPS", "3")
    watch = Watch(torch, ghost, stop_after_steps=None if steps == "all" else int(steps))
    policy = values.Policy(torch, ghost)
    if ghost is not None:
        values.install(policy)
        kernels.keep_apart(environment)
        kernels.key_by_dates()
        policy.completed_steps = lambda: watch.made_steps
        values.compiled.follow(policy)
        torch.cuda._lazy_call(lambda: values.numbers.follow(policy))
        saves.Saves(torch, Path(environment["TONNAGE_OUT"]) / "saved", policy.use).install()
        ghost.log(True)
    ranks.prepare(torch, ghost)
    source = environment.get("TONNAGE_SOURCE", "ghost")

    def answered() -> list[str]:
        return [*policy.assumed(), *(hub.assumed() if hub is not None else ())]

    def assumed() -> list[str]:
        return [*answered(), *watch.describe_omissions()]

    recorded = recording.Recording(watch, environment["TONNAGE_OUT"], source, assumed)
    recorded.counts = bool(environment.get("TONNAGE_COUNTED"))
    watch.on_stop = recorded.stop
    watch.on_end = watch.loops.give_up = recorded.end
    watch.loops.complete, watch.loops.end_step = recorded.complete, recorded.end_step
    watch.loops.on_unwind = recorded.note
    watch.follow_script()
    watch.script = script
    watch.start()
    Engines(watch, environment["TONNAGE_OUT"], recorded.ended, answered).listen()
    torch.cuda._lazy_call(lambda: allocator_guard.install(torch))
    torch.cuda._lazy_call(recorded.begin)
    optimizer.register_optimizer_step_post_hook(recorded.note)
    outcome.hear_uncaught(watch, recorded.ended)
    outcome.hear_spawned(torch, watch, recorded.ended)
    atexit.register(recorded.at_exit)
    os._exit, os.kill = recorded.leave_at_once, recorded.kill
