"""The attention backend: fixed, where `auto` lets torch choose by GPU, dtype, mask and head width.

`eager` is the network's own code with the full matrix of scores.  `math`, `efficient`, `flash` and `cudnn` are the
backends of torch's scaled_dot_product_attention, each enabled alone, so that a call which it does not support fails.
`efficient` does not take grouped keys and values, so transformers repeats them for each head, as it does beside a
mask.  `flex` is torch's flex_attention as transformers calls it: compiled by Triton, with a block mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.cluster import Cluster
    from tonnage.plans import Plan
    from tonnage.step.step import Step

BACKENDS: Final = {
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
NETWORKS_OWN: Final = {"eager": "eager", "flex": "flex_attention"}
"""transformers' names of the implementations that need no backend of torch."""

CANNOT_SERVE: Final = "attention cannot serve this network"
"""Part of the message if torch has no kernel for a network."""


def accepts(case: Case) -> Refusal | None:
    """Refuse what is known beforehand not to work; torch itself reports the rest when it runs."""
    plan = case.plan
    from tonnage.cluster import CPU

    if plan.attention == "flex" and case.cluster.device.id == CPU:
        return Refusal(
            technique="attention=flex",
            reason="flex_attention keeps all scores unless it is compiled, and kernels for the CPU are not run",
            instead="choose a GPU, or attention auto",
        )
    if plan.attention in ("efficient", "flash", "cudnn") and case.cluster.device.id == CPU:
        return Refusal(
            technique=f"attention={plan.attention}",
            reason="it is a kernel of GPUs, and the CPU has none like it",
            instead="choose attention auto or math",
        )
    if plan.attention in ("flash", "cudnn"):
        return _refuse_half_precision_only(plan, case.cluster)
    return None


def _refuse_half_precision_only(plan: Plan, cluster: Cluster) -> Refusal | None:
    from tonnage.cluster import AMPERE

    if plan.precision == "fp32":
        reason, instead = "it computes in bf16 or fp16 only, and the precision is fp32", "choose precision bf16-mixed"
    elif cluster.device.capability < AMPERE:
        capability = ".".join(map(str, cluster.device.capability))
        reason, instead = f"it needs compute capability 8.0, and {cluster.device.id} has {capability}", "choose auto"
    else:
        return None
    return Refusal(technique=f"attention={plan.attention}", reason=reason, instead=instead)


def apply(step: Step) -> Step:
    """Choose transformers' implementation, and torch's backend around forward and backward.

    Backward is included because checkpointed layers compute attention again there.
    """
    if step.plan.attention in NETWORKS_OWN:
        return replace(step, attention=NETWORKS_OWN[step.plan.attention])
    context = partial(_force_backend, step.plan.attention)
    return replace(step, attention="sdpa", contexts=(*step.contexts, context))


@contextmanager
def _force_backend(name: str) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tonnage.errors import CannotEstimate

    try:
        with (
            sdpa_kernel(getattr(SDPBackend, BACKENDS[name])),
            _repeat_grouped_keys() if name == "efficient" else nullcontext(),
        ):
            yield
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise CannotEstimate(
            f"torch's {name} {CANNOT_SERVE} (card, dtype, mask or head size); choose attention auto."
        ) from error


@contextmanager
def _repeat_grouped_keys() -> Iterator[None]:
    """Make transformers repeat grouped keys and values itself instead of passing them grouped to torch."""
    from transformers.integrations import sdpa_attention

    original = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda *_given: False
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = original


ATTENTION: Final = Technique(option="attention", values=("eager", *BACKENDS), accepts=accepts, apply=apply)
FLEX: Final = Technique(
    option="attention",
    values=("flex",),
    accepts=accepts,
    apply=apply,
    libraries=("triton", "torch._inductor.compile_fx"),
)
