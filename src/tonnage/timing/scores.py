"""Attention scores that a plan keeps for backward although another backend would not, and their bytes."""

from typing import Final

from tonnage.case import Case
from tonnage.cluster import AMPERE, CPU
from tonnage.errors import CannotEstimate
from tonnage.timing.kinds import read_shape
from tonnage.timing.work import Work

SPARING: Final = ("flex", "efficient")
"""Values that `find_sparing_attention` may return."""


def find_sparing_attention(case: Case) -> str | None:
    """Return the attention backend that keeps no scores, where the plan's keeps them; None where there is none.

    Capped scores and sinks need flex attention.  Heads that share keys get copies of them for the efficient backend,
    where torch has no other kernel for them but the plain one.
    """
    try:
        shape = read_shape(case.job.model.config)
    except CannotEstimate:
        return None
    if case.plan.attention not in ("auto", "eager") or case.cluster.device.id == CPU:
        return None
    if shape.keeps_scores:
        return "flex" if shape.flexible and case.cluster.device.capability >= AMPERE else None
    return "efficient" if case.plan.attention == "auto" and needs_plain_kernel(case) else None


def avoidable_score_bytes(case: Case) -> int | None:
    """Return the bytes of one layer's attention scores in 16 bits, if `find_sparing_attention` keeps none; else
    None."""
    if find_sparing_attention(case) is None:
        return None
    work = Work.of(case.job, case.plan, case.cluster)
    return work.tokens * work.seq_len * read_shape(case.job.model.config).heads // work.axes.tp * 2


def needs_plain_kernel(case: Case) -> bool:
    """Return True if only torch's plain kernel takes heads that share keys: in fp32, and before capability 8.0
    (ATen/native/transformers/cuda/sdp_utils.cpp)."""
    text = case.job.model.text
    heads, shared = text.get("num_attention_heads"), text.get("num_key_value_heads")
    return shared not in (None, heads) and (
        case.plan.compute_dtype == "fp32" or case.cluster.device.capability < AMPERE
    )
