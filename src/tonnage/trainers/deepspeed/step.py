"""A step by DeepSpeed's engine: the same code for an estimate and for a plan that is carried out.

The torch half of the trainer: only the process that runs the step imports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tonnage.step import model
from tonnage.step.model import Batch
from tonnage.step.step import ReadyStep, Step
from tonnage.techniques.checkpointing import CHECKPOINTING
from tonnage.techniques.precision import dtype
from tonnage.trainers import common
from tonnage.trainers.deepspeed import run
from tonnage.trainers.liger import apply_liger

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan


@dataclass(frozen=True, kw_only=True)
class EngineStep(ReadyStep):
    """A network in DeepSpeed's engine, ready to train; `model` is the engine."""

    output: common.KeptOutput
    """The network's output, kept as long as the plan says."""
    loss: list[torch.Tensor] = field(default_factory=list)
    """The last loss, which a loop as in DeepSpeed's documentation holds until the next one."""

    @property
    def group(self) -> Any:
        """Return the group in which the engine exchanges; another one of NCCL's would take memory of its own.

        Stage 3 has the group of each divided parameter, and leaves that of the engine unused.
        """
        divided = (getattr(parameter, "ds_process_group", None) for parameter in self.model.parameters())
        return next((group for group in divided if group is not None), self.model.data_parallel_group)

    def to_device(self, batch: Batch) -> Batch:
        """Return the batch on this rank's device, images and sounds in the compute dtype: there is no autocast."""
        wanted = dtype(self.step.plan.compute_dtype)
        cast = {name: one.to(wanted) if one.is_floating_point() else one for name, one in batch.items()}
        return super().to_device(cast)

    def micro_batch(self, batch: Batch, divisor: float = 1) -> None:
        """Run forward and backward of one micro-batch; the engine averages gradients over ranks and adds them up."""
        engine = self.model
        with self.around():
            self.loss[:] = [self.output.loss_of(engine(**batch))]
            del batch
            loss = self.loss[0] / divisor
            engine.backward(loss, scale_wrt_gas=False)
        for observer in self.observers:
            observer.see_loss(loss)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()  # which counts
            self.output.end_step()

    def clip_gradients(self) -> None:
        """Do nothing: the engine clips as it updates."""

    def update(self) -> None:
        """Update the weights and free the gradients."""
        self.model.step()
        self.output.end_step()
        norm = self.model.get_global_grad_norm() if self.observers else None
        if norm is not None and self.step.plan.clip_grad_norm is not None:
            for observer in self.observers:
                observer.see_norm(torch.as_tensor(norm))

    def leave_out(self) -> None:
        """Free the gradients without an update, as the engine does where gradients in fp16 overflow."""
        skipped = self.model.skipped_steps
        with _overflowing(self.model):
            self.model.step()
        self.model.skipped_steps = skipped
        self.output.end_step()


@contextmanager
def _overflowing(engine: Any) -> Iterator[None]:
    """Have the engine's next step find gradients that overflow, with a loss scale that stays."""
    optimizer = engine.optimizer

    def overflow(*_: Any, **__: Any) -> bool:
        optimizer.overflow = True
        return True

    def nothing(*_: Any, **__: Any) -> None:
        pass

    changes: dict[str, Any] = {"step": nothing}
    if engine.zero_optimization():  # stages 1 and 2, and stage 3
        looks = {"check_overflow": overflow, "_overflow_check_and_loss_scale_update": overflow}
        changes = {"check_grad_overflow": True, "_update_scale": nothing, **looks}
    before = {name: vars(optimizer)[name] for name in changes if name in vars(optimizer)}
    vars(optimizer).update(changes)
    try:
        yield
    finally:
        for name in changes:
            with suppress(KeyError):
                del vars(optimizer)[name]
        vars(optimizer).update(before)


@contextmanager
def _before_the_last(engine: Any) -> Iterator[None]:
    """Tell the engine that the micro-batches inside are not the last of a step."""
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(True)


def make(step: Step, network: nn.Module, config: Mapping[str, Any]) -> EngineStep:
    """Return the step of a network under DeepSpeed; for stage 3 its parameters are divided already."""
    import deepspeed

    plan = step.plan
    if plan.loss == "liger":
        apply_liger(network)
    network = common.add_adapters(network, step)
    if CHECKPOINTING.is_chosen(step.job, plan):
        for change in CHECKPOINTING.apply(step).changes:
            network = change(network)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=network, model_parameters=trained, config=dict(config))
    engine.set_gradient_accumulation_boundary(True)
    without_torchs = replace(
        step, autocast_dtype=None, scales_loss=False, gradients_stay_local=_before_the_last
    )  # mixed precision is the engine's
    return EngineStep(
        step=without_torchs,
        model=engine,
        optimizers=(engine.basic_optimizer,),
        output=common.KeptOutput(plan.outputs),
    )


def configure(
    job: Job, plan: Plan, folder: str, network: nn.Module | None, ranks: int, **optimizer: Any
) -> dict[str, Any]:
    """Return DeepSpeed's configuration with files in a folder; a buffer must hold a rank's part of any parameter.

    `network` may have no memory; None: the plan has no parameters in files.
    """
    path: dict[str, Any] = {"nvme_path": folder}
    sections = {"offload_optimizer": path}
    if network is not None:
        largest = max(model.elements(parameter) for parameter in network.parameters())
        sections["offload_param"] = {**path, "buffer_size": max(run.BUFFER_ELEMENTS, -(-largest // ranks))}
    return run.settings(job, plan, sections, optimizer)
