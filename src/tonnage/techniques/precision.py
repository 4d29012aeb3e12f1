"""Precision: the dtype of the weights, of the computation, and the loss scaling that fp16 needs.

| value | weights | computation | loss scaling |
|---|---|---|---|
| bf16-mixed | fp32 | torch.autocast to bf16 | no |
| fp16-mixed | fp32 | torch.autocast to fp16 | GradScaler |
| bf16-true | bf16 | bf16, no autocast | no |
| fp16-true | fp16 | fp16, no autocast | no |
| fp32 | fp32 | fp32; TF32 as in torch's default | no |

Under FSDP2 the mixed precisions become its MixedPrecisionPolicy instead of autocast (see `fsdp`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    import torch

    from tonnage.case import Case
    from tonnage.step.step import Step

DTYPE_NAMES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name: `bf16` -> torch.bfloat16."""
    import torch

    torch_dtype: torch.dtype = getattr(torch, DTYPE_NAMES[name])
    return torch_dtype


def accepts(case: Case) -> Refusal | None:
    """Refuse a dtype for frozen weights if no weights are frozen."""
    if case.plan.base_dtype is not None and case.job.method == "full":
        return Refusal(
            technique=f"base_dtype={case.plan.base_dtype}",
            reason="nothing is frozen under method full",
            instead="choose method lora, or use precision for it",
        )
    return None


def apply(step: Step) -> Step:
    """Set the dtypes of weights and autocast."""
    compute, _, style = step.plan.precision.partition("-")
    if style != "mixed":
        return replace(step, weights_dtype=dtype(compute))
    return replace(step, autocast_dtype=dtype(compute), scales_loss=compute == "fp16")


PRECISION: Final = Technique(
    option="precision",
    values=("bf16-mixed", "bf16-true", "fp16-mixed", "fp16-true", "fp32"),
    accepts=accepts,
    apply=apply,
)
