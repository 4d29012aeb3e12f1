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

from tonnage.mesh import SHARDING
from tonnage.techniques import choices, chosen, refusals
from tonnage.techniques.technique import Refusal, first_of
from tonnage.trainers.engine import ANY, FILES, IMAGES, ROWS, SHAPES, Engine
from tonnage.trainers.hf_trainer.run import (
    alone_on_many,
    kind_of_files,
    mesh,
    parted,
    parts_or_whole,
    resumed,
    shared_without_fsdp,
)

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
"""The plugin's word for it, since accelerate 1.15."""


def moves_inputs(plan: Plan) -> bool:
    """Whether all layers run again and their inputs wait on the host, in FSDP2."""
    return plan.shard in SHARDING and plan.checkpointing == "full" and plan.activation_offload == "cpu"


def accepts(case: Case) -> Refusal | None:
    """What the techniques themselves say."""
    plan = case.plan
    return (
        alone_on_many(plan, case.cluster)
        or shared_without_fsdp(plan)
        or parted(case.job, plan)
        or resumed(case, "the Accelerator")
        or _generated(case.job, plan)
        or first_of(refusals(case))
    )


def _generated(job: Job, plan: Plan) -> Refusal | None:
    """What fails on a card as well: `generate` wants logits, and whole weights of the network's own forward."""
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
    from tonnage.trainers import resume as earlier_runs

    def run(job: Job, world: World, steps: int, folder: str) -> object:
        earlier_runs.check_rank(job, plan, world)
        return _trained(job, plan, world, steps, os.path.join(folder, "checkpoint"))

    return earlier_runs.trained(job, world, steps, run, parts_or_whole(job, plan))


def _trained(job: Job, plan: Plan, world: World, steps: int, checkpoint: str) -> object:
    import torch
    from accelerate import Accelerator

    from tonnage.step.events import phase
    from tonnage.trainers import common as given

    given.launch(plan, world)
    step = _described(job, plan, world)
    accelerator = Accelerator(
        mixed_precision=plan.compute_dtype if plan.precision.endswith("-mixed") else "no",
        **_accumulation(job, plan),
        **_sharding(job, plan, world),
    )
    module = _network(step)
    if plan.shard in SHARDING and (layers := given.divided(module)):
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = list(layers)
    rows = given.Rows(step, module, given.rows_needed(step, steps))
    loader = torch.utils.data.DataLoader(rows, batch_size=job.micro_batch, pin_memory=True, collate_fn=given.collated)
    prepared: tuple[Any, Any, Any] = accelerator.prepare(module, _optimizer(step, module), loader)
    model, optimizer, batches = prepared
    if job.resume != "none":
        with phase("resume"):
            accelerator.load_state(checkpoint)
    returned = given.Returned(plan.outputs)
    for batch in batches:
        with accelerator.accumulate(model), _shared(accelerator, batch, plan):
            with given.contexts(step):
                accelerator.backward(returned.loss_of(model(**batch)))
            if plan.clip_grad_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), plan.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            returned.stepped()
    if job.generate is not None:
        with given.contexts(step):
            given.generate(step, accelerator.unwrap_model(model), rows)
    if job.save_checkpoint != "none":
        with phase("save"):
            accelerator.save_state(checkpoint)
    return prepared


def _shared(accelerator: Any, batch: dict[str, Any], plan: Plan) -> AbstractContextManager[None]:
    """As in accelerate's guide to context parallelism: labels are shifted before ranks get their parts."""
    from tonnage.techniques.context_parallel import placed

    if plan.cp == 1:
        return nullcontext()
    batch.update(placed(batch))
    parts = list(batch.values())
    shared: AbstractContextManager[None] = accelerator.maybe_context_parallel(
        buffers=parts, buffer_seq_dims=[1] * len(parts), no_restore_buffers=set(parts)
    )
    return shared


def _described(job: Job, plan: Plan, world: World) -> Step:
    """All techniques of the plan but those that the Accelerator stands for."""
    import torch

    from tonnage.step.step import Step

    here = replace(world, device=torch.device("cuda", 0))  # quantized, a network says on which card it is
    step = Step(job=job, plan=plan, world=here, initialise=False)
    own = {*ACCELERATORS_OWN, *(PLUGINS_OWN if _by_plugin(plan) else ())}
    for technique in chosen(job, plan):
        if technique.option not in own:
            step = technique.apply(step)
    return step


def _accumulation(job: Job, plan: Plan) -> dict[str, Any]:
    if not plan.accum_sync:
        return {"gradient_accumulation_steps": job.grad_accum}
    from accelerate.utils import GradientAccumulationPlugin

    return {"gradient_accumulation_plugin": GradientAccumulationPlugin(job.grad_accum, sync_each_batch=True)}


def _by_plugin(plan: Plan) -> bool:
    from accelerate import FullyShardedDataParallelPlugin

    return moves_inputs(plan) and MOVES in FullyShardedDataParallelPlugin.__dataclass_fields__


def _network(step: Step) -> nn.Module:
    from tonnage.trainers import common as given

    module = given.network(step)
    for change in step.changes:
        module = change(module)
    return module


def _optimizer(step: Step, module: nn.Module) -> Any:
    """The plan's; nothing else may know the parameters that FSDP2 replaces, or they would stay on the card."""
    [(parameters, new)] = step.optimizer_parts(module)
    return new(parameters)


def _sharding(job: Job, plan: Plan, world: World) -> dict[str, Any]:
    from accelerate import FullyShardedDataParallelPlugin

    if plan.shard not in SHARDING:
        return {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=plan.shard != "zero2",
        cpu_offload=plan.param_offload == "cpu",
        auto_wrap_policy="transformer_based_wrap",
        **({"activation_checkpointing": True, MOVES: True} if _by_plugin(plan) else {}),
        **kind_of_files(job, plan),
    )
    return {"fsdp_plugin": plugin, **mesh(plan, world)}


ACCELERATE: Final = Engine(
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
        "optimizer": tuple(name for name in choices("optimizer") if name != "muon"),  # which is two optimizers
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
