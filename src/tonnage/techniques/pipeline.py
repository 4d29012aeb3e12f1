"""Pipeline parallelism: each rank of `pp` has some of the layers, and micro-batches pass from one to the next.

torch.distributed.pipelining runs the schedule: 1F1B, interleaved 1F1B with several stages on each rank, or GPipe.
`grad_accum` is the number of micro-batches; how many of them are in flight on a stage at once decides its memory, so
that the first stages hold the most activations, and the last one has the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques.technique import Refusal, Technique
from tonnage.units import pluralise

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.step import Step


def accepts(case: Case) -> Refusal | None:
    """Refuse all but plain training of a causal language model, with layers and micro-batches for all stages."""
    job, plan = case.job, case.plan
    from tonnage.cluster import CPU

    unbuilt = (
        ("method", job.method, "lora") if job.method == "qlora" else None,
        ("precision", plan.precision, "bf16-mixed") if plan.precision in ("fp16-mixed", "fp8") else None,
        ("checkpointing", plan.checkpointing, "full") if plan.checkpointing.startswith("budget") else None,
        ("lengths", "given", "one length") if job.lengths else None,
        ("eval-batch", job.eval_batch, "none") if job.eval_batch else None,
        ("generate", job.generate, "none") if job.generate else None,
        ("resume", job.resume, "none"),
        ("optimizer-in-backward", "on", "off") if plan.optimizer_in_backward else None,
    )
    for item in unbuilt:
        if item is not None and item[1] != item[2]:
            return _refuse(plan, f"it is not built for {item[0]} {item[1]}", f"choose {item[0]} {item[2]}, or pp 1")
    if plan.precision == "megatron-bf16" and job.model.config.get("tie_word_embeddings"):
        return _refuse(
            plan, "main gradients of a weight shared by two stages are not added up", "choose precision bf16-true"
        )
    if job.model.text.get("output_router_logits"):
        return _refuse(plan, "the last stage cannot balance the experts of the others", "choose pp 1")
    if job.model.kind == "factory":
        return _refuse(plan, "where a factory's network is cut is not known", "choose pp 1")
    if case.cluster.device.id == CPU and not case.is_carried_out:
        return _refuse(plan, "the exchange between stages is not imitated on the CPU", "choose a GPU")
    return _check_layers(job, plan) or check_micro_batches(plan, job.grad_accum)


def _refuse(plan: Plan, reason: str, instead: str) -> Refusal:
    return Refusal(technique=f"pp={plan.pp}", reason=reason, instead=instead)


def stages(plan: Plan) -> int:
    """Return the stages of the whole pipeline."""
    return plan.pp * (plan.pp_stages if plan.pp_schedule == "interleaved" else 1)


def _check_layers(job: Job, plan: Plan) -> Refusal | None:
    layers = job.model.text.get("num_hidden_layers")
    if isinstance(layers, int) and layers < stages(plan):
        return _refuse(
            plan,
            f"{pluralise(layers, 'layer')} cannot be cut into {stages(plan)} stages",
            f"choose at most {pluralise(layers, 'stage')}",
        )
    return None


def check_micro_batches(plan: Plan, count: int) -> Refusal | None:
    """Refuse numbers of micro-batches that the schedule cannot run."""
    if plan.pp_schedule == "1f1b" and count < plan.pp:
        return _refuse(
            plan,
            f"a step has {pluralise(count, 'micro-batch')}, fewer than stages",
            f"choose grad-accum {plan.pp} or more",
        )
    rounds = max(1, count // plan.pp)
    if plan.pp_schedule == "interleaved" and count % rounds:
        return _refuse(
            plan,
            f"{count} micro-batches cannot be divided into {rounds} equal rounds",
            f"choose grad-accum {rounds * plan.pp} or {(rounds + 1) * plan.pp}",
        )
    return None


def apply(step: Step) -> Step:
    """Cut the network before it has memory, and run its micro-batches by torch's schedule."""
    from functools import partial

    from tonnage.step import clipping
    from tonnage.step.stages import Pipeline

    return replace(
        step,
        divide=(*step.divide, _cut_own_stage),
        parts=stages(step.plan) // step.plan.pp,
        accumulate=Pipeline(),
        clip=partial(clipping.clip, world=step.world),
    )


def _cut_own_stage(step: Step, module: nn.Module) -> Any:
    """Return the stage that this rank holds; of several, each is `pp` stages after the one before it."""
    from tonnage.step.stages import cut

    place = step.world.axes.place(step.world.rank, "pp")
    return cut(module, index=step.part * step.plan.pp + place, count=stages(step.plan))


PIPELINE: Final = Technique(
    option="pp", values=("N",), accepts=accepts, apply=apply, libraries=("torch.distributed.pipelining",)
)
