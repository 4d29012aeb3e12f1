"""Expandable segments: the caching allocator maps pages into one large range instead of fixed segments.

This is an environment setting, read when torch first uses a GPU. torch 2.9 renamed the variable; its own CUDA
allocator and 2.8 read the old name only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from tonnage.case import Case


def accepts(case: Case) -> Refusal | None:
    """Refuse the CPU: the host's memory has no caching allocator."""
    from tonnage.cluster import CPU

    if case.cluster.device.id != CPU:
        return None
    return Refusal(
        technique=f"allocator={case.plan.allocator}",
        reason="it is a setting of the GPU's caching allocator, and the CPU has none",
        instead="choose allocator default",
    )


EXPANDABLE: Final = Technique(
    option="allocator",
    values=("expandable",),
    accepts=accepts,
    environment={
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    },
)
