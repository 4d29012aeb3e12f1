"""A loop of one's own with accelerate's Accelerator, as in its documentation.

Network, checkpointing, loss and optimizer are the plan's techniques, as in tonnage's own loop; precision,
replication, sharding and accumulation are the Accelerator's: autocast around the forward, outputs cast to fp32, DDP
with its defaults, FSDP2 by its plugin, which also moves the inputs of layers that run again to the host.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.catalog.optimizers import OPTIMIZERS
from tonnage.mesh import SHARDING
from tonnage.techniques import refusals, select_techniques
from tonnage.techniques.technique import Refusal, first_of
from tonnage.trainers.accelerate.plugin import (
    checkpoint_kind,
    checkpoint_settings,
    parallelism_settings,
    refuse_context_parallel,
    refuse_resume,
    refuse_sharded_files,
)
from tonnage.trainers.engine import ANY, FILES, IMAGES, ROWS, SHAPES, Engine, refuse_undivided

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.step import Step
    from tonnage.step.world import World

ACCELERATORS_OWN: Final = ("shard", "param_offload", "accum_sync", "cp")
"""Options that the Accelerator answers for; of `precision`, it is the autocast."""

PLUGINS_OWN: Final = ("checkpointing", "activation_offload")
"""Options that its plugin for FSDP answers for where both are asked for (`moves_inputs`)."""

MOVES: Final = "activation_checkpointing_offload"
"""The plugin's name of that setting, since accelerate 1.15."""


def moves_inputs(plan: Plan) -> bool:
    """Return whether all layers run again and their inputs wait on the host, in FSDP2."""
    return plan.shard in SHARDING and plan.checkpointing == "full" and plan.activation_offload == "cpu"


def accepts(case: Case) -> Refusal | None:
    """Return what stands against the Accelerator, and against the techniques."""
    plan = case.plan
    return (
        refuse_undivided(plan, case.cluster)
        or refuse_context_parallel(plan)
        or refuse_sharded_files(case.job, plan)
        or refuse_resume(case, "the Accelerator")
        or _refuse_generate(case.job, plan)
        or first_of(refusals(case))
    )


def _refuse_generate(job: Job, plan: Plan) -> Refusal | None:
    """Return the refusal of what fails on a card as well.

    `generate` wants logits, and whole weights of the network's own forward.
    """
    if job.generate is None:
        return None
    technique = f"generate={job.generate}"
    if plan.loss != "plain":
        reason = f"with loss {plan.loss} the network's forward returns no logits"
        return Refusal(technique=technique, reason=reason, instead="choose loss plain")
    if job.method != "full" and plan.shard in SHARDING:
        reason = "PEFT's generate passes by the outermost module, which gathers the last norm under FSDP2"
        return Refusal(technique=technique, reason=reason, instead="choose engine hf-trainer, or shard ddp")
    return None


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """Prepare network, optimizer and loader together, then train."""
    from tonnage.trainers import resume

    def run(job: Job, world: World, steps: int, folder: str) -> object:
        resume.check_rank(job, plan, world)
        return _train(job, plan, world, steps, os.path.join(folder, "checkpoint"))

    return resume.run_with_files(job, world, steps, run, checkpoint_kind(job, plan))


def _train(job: Job, plan: Plan, world: World, steps: int, checkpoint: str) -> object:
    import torch
    from accelerate import Accelerator

    from tonnage.step.events import phase
    from tonnage.trainers import common

    common.launch(plan, world)
    step = _make_step(job, plan, world)
    accelerator = Accelerator(
        mixed_precision=plan.compute_dtype if plan.precision.endswith("-mixed") else "no",
        **accumulation_settings(job, plan),
        **sharding_settings(job, plan, world),
    )
    module = _build_network(step)
    if plan.shard in SHARDING and (layers := common.layers_to_wrap(module)):
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = list(layers)
    rows = common.Rows(step, module, common.count_rows(step, steps))
    loader = torch.utils.data.DataLoader(rows, batch_size=job.micro_batch, pin_memory=True, collate_fn=common.collate)
    prepared: tuple[Any, Any, Any] = accelerator.prepare(module, _make_optimizer(step, module), loader)
    model, optimizer, batches = prepared
    if job.resume != "none":
        with phase("resume"):
            accelerator.load_state(checkpoint)
    output = common.KeptOutput(plan.outputs)
    for batch in batches:
        with accelerator.accumulate(model), _share_sequences(accelerator, batch, plan):
            with common.contexts(step):
                accelerator.backward(output.loss_of(model(**batch)))
            if plan.clip_grad_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), plan.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            output.end_step()
    if job.generate is not None:
        with common.contexts(step):
            common.generate(step, accelerator.unwrap_model(model), rows)
    if job.save_checkpoint != "none":
        with phase("save"):
            accelerator.save_state(checkpoint)
    return prepared


def _share_sequences(accelerator: Any, batch: dict[str, Any], plan: Plan) -> AbstractContextManager[None]:
    """Return accelerate's context in which ranks share sequences.

    As in its guide to context parallelism, labels are shifted before ranks get their parts.
    """
    from tonnage.techniques.context_parallel import placed

    if plan.cp == 1:
        return nullcontext()
    batch.update(placed(batch))
    parts = list(batch.values())
    context: AbstractContextManager[None] = accelerator.maybe_context_parallel(
        buffers=parts, buffer_seq_dims=[1] * len(parts), no_restore_buffers=set(parts)
    )
    return context


def _make_step(job: Job, plan: Plan, world: World) -> Step:
    """Return a Step with all techniques of the plan but those that the Accelerator stands for."""
    import torch

    from tonnage.step.step import Step

    on_card = replace(world, device=torch.device("cuda", 0))  # a quantized network asks which card it is on
    step = Step(job=job, plan=plan, world=on_card, initialise=False)
    own = {*ACCELERATORS_OWN, *(PLUGINS_OWN if _moves_by_plugin(plan) else ())}
    for technique in select_techniques(job, plan):
        if technique.option not in own:
            step = technique.apply(step)
    return step


def accumulation_settings(job: Job, plan: Plan) -> dict[str, Any]:
    """Return the Accelerator's arguments for accumulated micro-batches."""
    if not plan.accum_sync:
        return {"gradient_accumulation_steps": job.grad_accum}
    from accelerate.utils import GradientAccumulationPlugin

    return {"gradient_accumulation_plugin": GradientAccumulationPlugin(job.grad_accum, sync_each_batch=True)}


def _moves_by_plugin(plan: Plan) -> bool:
    from accelerate import FullyShardedDataParallelPlugin

    return moves_inputs(plan) and MOVES in FullyShardedDataParallelPlugin.__dataclass_fields__


def _build_network(step: Step) -> nn.Module:
    from tonnage.trainers import common

    module = common.build_network(step)
    for change in step.changes:
        module = change(module)
    return module


def _make_optimizer(step: Step, module: nn.Module) -> Any:
    """Return the plan's optimizer.

    Nothing else may refer to the parameters that FSDP2 replaces, or they would stay on the card.
    """
    [(parameters, new)] = step.optimizer_parts(module)
    return new(parameters)


def sharding_settings(job: Job, plan: Plan, world: World) -> dict[str, Any]:
    """Return the Accelerator's arguments by which it divides the network: FSDP2's plugin, and a mesh."""
    from accelerate import FullyShardedDataParallelPlugin

    if plan.shard not in SHARDING:
        return {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=plan.shard != "zero2",
        cpu_offload=plan.param_offload == "cpu",
        auto_wrap_policy="transformer_based_wrap",
        **({"activation_checkpointing": True, MOVES: True} if _moves_by_plugin(plan) else {}),
        **checkpoint_settings(job, plan),
    )
    return {"fsdp_plugin": plugin, **parallelism_settings(plan, world)}


ACCELERATE_ENGINE: Final = Engine(
    name="accelerate",
    packages=("accelerate",),
    expresses={
        **SHAPES,
        **IMAGES,
        **ROWS,
        "method": ("full", "lora", "qlora"),
        "quant": ANY,
        "unquantized_dtype": ANY,
        "lora_rank": ANY,
        "lora_dropout": ANY,
        "lora_targets": ANY,
        "precision": ("bf16-mixed", "bf16-true", "fp16-mixed", "fp32"),
        "weights_dtype": ANY,
        "base_dtype": ANY,
        "optimizer": tuple(optimizer.name for optimizer in OPTIMIZERS if not optimizer.only_matrices),
        "clip_grad_norm": ANY,
        "accum_sync": ANY,
        "checkpointing": ANY,
        "activation_offload": ANY,
        "shard": ("none", "ddp", *SHARDING),
        "param_offload": ("none", "cpu"),
        "attention": ANY,
        "loss": ANY,
        "outputs": ANY,
        **FILES,
        "generate": ANY,
        "cp": ANY,
    },
    accepts=accepts,
    imports=("accelerate",),
    run=run,
)
