"""Attention scores that a plan keeps for backward although another backend would not, and their bytes."""

from typing import Final

from tonnage.cluster import AMPERE, CPU, Cluster
from tonnage.errors import CannotEstimate
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.timing.kinds import read_shape
from tonnage.timing.work import Work

SPARING: Final = ("flex", "efficient")
"""Values that `sparing_attention` may return."""


def sparing_attention(job: Job, plan: Plan, cluster: Cluster) -> str | None:
    """Return the attention backend that keeps no scores, where the plan's keeps them; None where there is none.

    Capped scores and sinks need flex attention.  Heads that share keys get copies of them for the efficient backend,
    where torch has no other kernel for them but the plain one.
    """
    try:
        shape = read_shape(job.model.config)
    except CannotEstimate:
        return None
    if plan.attention not in ("auto", "eager") or cluster.device.id == CPU:
        return None
    if shape.keeps_scores:
        return "flex" if shape.flexible and cluster.device.capability >= AMPERE else None
    return "efficient" if plan.attention == "auto" and is_plain(job, plan, cluster) else None


def avoidable_bytes(job: Job, plan: Plan, cluster: Cluster) -> int | None:
    """Return the bytes of one layer's attention scores in 16 bits, if `sparing_attention` keeps none; else None."""
    if sparing_attention(job, plan, cluster) is None:
        return None
    work = Work.of(job, plan, cluster)
    return work.tokens * work.seq_len * read_shape(job.model.config).heads // work.axes.tp * 2


def is_plain(job: Job, plan: Plan, cluster: Cluster) -> bool:
    """Return True if only torch's plain kernel takes heads that share keys: in fp32, and before capability 8.0
    (ATen/native/transformers/cuda/sdp_utils.cpp)."""
    text = job.model.text
    heads, shared = text.get("num_attention_heads"), text.get("num_key_value_heads")
    return shared not in (None, heads) and (plan.compute_dtype == "fp32" or cluster.device.capability < AMPERE)
