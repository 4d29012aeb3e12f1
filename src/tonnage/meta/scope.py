"""The scope of the portable source: what it imitates, what it refuses, and its uncertainty; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from tonnage.options import is_accepted, options, spell_option
from tonnage.techniques.technique import Refusal

if TYPE_CHECKING:
    from tonnage.case import Case

ANY: Final = ("*",)

IMITATED: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("lora_rank", "lora_targets", "lora_dropout", "seq_len", "images", "image_size", "micro_batch", "grad_accum"),
        ANY,
    ),
    **dict.fromkeys(("packing", "lengths", "eval_batch", "eval_logits", "global_batch_tokens"), ANY),
    **dict.fromkeys(("base_dtype", "clip_grad_norm", "checkpointing", "optimizer_in_backward", "allocator"), ANY),
    "method": ("full", "lora"),
    "precision": ("bf16-mixed", "bf16-true", "fp16-mixed", "fp32", "fp8", "megatron-bf16"),
    "optimizer": (
        *("adamw", "adamw-loop", "adamw-foreach", "adamw-fused", "adamw-8bit"),
        *("adafactor", "sgd", "sgd-plain", "muon"),
    ),
    "activation_offload": ("cpu",),
    "attention": ("eager", "math", "efficient", "flash", "cudnn"),
    "loss": ("chunked", "fused", "torch"),
    "shard": ("ddp", "zero1", "zero2", "zero3", "hsdp"),
    "accum_sync": ANY,
    "reduce_dtype": ANY,
    "tp": ANY,
    "sequence_parallel": ANY,
    "pp": ANY,
    "pp_schedule": ANY,
    "pp_stages": ANY,
    "cp": ANY,
}
"""Values of options that were compared with the ghost, besides each option's default."""

IMITATION: Final = (
    "the GPU: kernels of attention, autocast and fused operations are chosen by CUDA's rules, none is run",
    "memory inside operations: a table made on a ghost",
    "the caching allocator: a replica",
)
"""Sentences for an estimate's coverage."""

RESERVED_RESIDUAL: Final = 0.05
"""Relative error of reserved memory: 99 of 100 comparisons in docs/explanation/meta.md are closer."""


def refusals(case: Case) -> Iterator[Refusal]:
    """Yield the reasons why the step cannot be imitated."""
    plan = case.plan
    if plan.reduce_dtype is not None and plan.shard in ("ddp", "zero1"):
        yield _refusal(f"reduce-dtype={plan.reduce_dtype} and shard={plan.shard}", "it runs only DDP's own averaging")
    for value in (case.job, plan):
        for item, _ in options(type(value)):
            chosen = getattr(value, item.name)
            known = IMITATED.get(item.name, ())
            if chosen != item.default and known != ANY and not is_accepted(str(chosen), known):
                yield _refusal(f"{spell_option(item.name)}={chosen}", "it does not imitate this")


def _refusal(technique: str, reason: str) -> Refusal:
    return Refusal(technique=f"source=meta with {technique}", reason=reason, instead="choose source ghost")
