"""Expandable segments: the caching allocator maps pages into one large range instead of fixed segments.

An environment setting, read when torch first touches a GPU.  torch 2.9 renamed the variable; its own CUDA allocator
and 2.8 read the old name only.
"""

from typing import Final

from tonnage.techniques.technique import Technique

EXPANDABLE: Final = Technique(
    option="allocator",
    values=("expandable",),
    environment={
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    },
)
