"""The attention backend: forced, where `auto` lets torch choose by card, dtype, mask and head size.

`eager` is the network's own code with the full matrix of scores; `math`, `efficient`, `flash` and `cudnn` are the
backends of torch's scaled_dot_product_attention, each alone, so that a call which it cannot serve fails loudly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from tonnage.device import Cluster
    from tonnage.job import Job
    from tonnage.plan import Plan
    from tonnage.step import Step

BACKENDS: Final = {
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
HALF_ONLY: Final = ("flash", "cudnn")


def accepts(job: Job, plan: Plan, cluster: Cluster) -> Refusal | None:
    """Flash and cuDNN attention compute in half precision only."""
    if plan.attention in HALF_ONLY and plan.precision == "fp32":
        return Refusal(
            technique=f"attention={plan.attention}",
            reason="it computes in bf16 or fp16 only, and the precision is fp32",
            instead="choose attention efficient, or precision bf16-mixed",
        )
    return None


def apply(step: Step) -> Step:
    """Choose transformers' implementation, and torch's backend around forward and backward.

    Around the backward as well, because checkpointed layers compute attention again there.
    """
    if step.plan.attention == "eager":
        return replace(step, attention="eager")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, BACKENDS[step.plan.attention])
    return replace(step, attention="sdpa", contexts=(*step.contexts, lambda: sdpa_kernel(backend)))


ATTENTION: Final = Technique(option="attention", values=("eager", *BACKENDS), accepts=accepts, apply=apply)
