"""All techniques, in the order in which they are applied to a Step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques import (
    activation_offload,
    allocator,
    attention,
    budget,
    checkpointing,
    chunked_loss,
    compiled,
    context_parallel,
    core_attention,
    cpu_offload,
    ddp,
    expert_parallel,
    fp8,
    fsdp,
    fused_loss,
    lora,
    megatron,
    muon,
    optimizer_in_backward,
    optimizer_offload,
    optimizers,
    outputs,
    parts,
    pipeline,
    precision,
    qlora,
    sqrt_checkpointing,
    tensor_parallel,
    zero1,
)
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.step import ReadyStep

TECHNIQUES: Final[tuple[Technique, ...]] = (
    allocator.EXPANDABLE,
    precision.PRECISION,
    parts.WEIGHTS,
    attention.ATTENTION,
    attention.FLEX,
    lora.LORA,
    qlora.QLORA,
    fp8.FP8,
    checkpointing.CHECKPOINTING,
    core_attention.CORE_ATTENTION,
    sqrt_checkpointing.SQRT_CHECKPOINTING,
    budget.BUDGET,
    activation_offload.ACTIVATION_OFFLOAD,
    chunked_loss.CHUNKED_LOSS,
    fused_loss.FUSED_LOSS,
    fused_loss.LIGER,
    compiled.COMPILED,
    outputs.OUTPUTS,
    optimizers.ADAMW,
    optimizers.SGD,
    optimizers.ADAFACTOR,
    muon.MUON,
    optimizers.BITSANDBYTES,
    optimizers.TORCHAO,
    optimizer_offload.OPTIMIZER_OFFLOAD,
    cpu_offload.CPU_OFFLOAD,
    ddp.DDP,
    zero1.ZERO1,
    fsdp.FSDP,
    parts.REDUCTION,
    pipeline.PIPELINE,
    tensor_parallel.TENSOR_PARALLEL,
    context_parallel.CONTEXT_PARALLEL,
    expert_parallel.EXPERT_PARALLEL,
    megatron.MEGATRON,
    optimizer_in_backward.IN_BACKWARD,  # it measures by the clipping that others choose
)


def choices(option: str) -> tuple[str, ...]:
    """Return the values of an option that some technique implements, in the order of application."""
    return tuple(value for technique in TECHNIQUES if technique.option == option for value in technique.values)


def select_techniques(job: Job, plan: Plan) -> tuple[Technique, ...]:
    """Return the techniques that a job under a plan uses."""
    return tuple(technique for technique in TECHNIQUES if technique.is_chosen(job, plan))


def build(job: Job, plan: Plan, **where: Any) -> ReadyStep:
    """Return the step of one rank, ready to run: a plain step with the plan's techniques applied in their order.

    `where` gives the rank and the device, as in `tonnage.step.step.assemble`.
    """
    from tonnage.step.step import assemble  # imports torch

    return assemble(job, plan, (technique.apply for technique in select_techniques(job, plan)), **where)


def refusals(case: Case) -> tuple[Refusal, ...]:
    """Return the reasons why the plan cannot be carried out; empty if it can."""
    answers = (technique.accepts(case) for technique in select_techniques(case.job, case.plan))
    return tuple(answer for answer in answers if answer is not None)


def environment(plan: Plan) -> dict[str, str]:
    """Return the environment variables that the plan needs before the training process starts."""
    wanted = (t for t in TECHNIQUES if t.environment and t.takes(getattr(plan, t.option)))
    return {name: value for technique in wanted for name, value in technique.environment.items()}
