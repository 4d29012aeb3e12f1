"""What the recipes behind Megatron-Bridge's tables do with experts, by network, card and release.

From the recipes of the releases (github.com/NVIDIA-NeMo/Megatron-Bridge, `scripts/performance/configs` at v0.2.2,
v0.3.1, v0.4.2 and v0.5.0, which are those of the containers 25.11, 26.02, 26.04 and 26.06): `moe_a2a_overlap`,
`cuda_graph_impl` and `cuda_graph_scope`, `cutedsl_fused_grouped_mlp`.
"""

from __future__ import annotations

import re
from typing import Any, Final

_FULL: Final = {
    "experts_overlapped": True, "experts_fused": True, "captured": "all",
    "attention": "cudnn",  # in 8 bits, sinks or not: `fp8_dot_product_attention`
}  # fmt: skip
"""A whole iteration in one CUDA graph, with experts' products in one kernel: MXFP8 from 26.06 on."""

_FULL_ON: Final = {"30b": ("GB200", "B300"), "235b": ("GB200",), "deepseek": ("GB200",), "gpt oss": ("GB200",)}


def of_experts(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a Work, of a row of a network with experts."""
    model = raw["model"].lower().replace("_", " ").replace("-", " ")
    name = next((name for name in _FULL_ON if name in model), "")
    card, release = raw["gpu_norm"], _release(raw)
    eight_bits = (raw.get("precision") or "").upper() in ("MXFP8", "FP8-MX", "FP8_MX")
    if release >= 26.06 and eight_bits and card in _FULL_ON.get(name, ()):
        return _FULL
    settings: dict[str, Any] = {}
    if _overlapped(name, card, release, raw):
        settings["experts_overlapped"] = True
    if _captured(name, card, release, raw):
        settings["captured"] = "part"
    return settings


def _release(raw: dict[str, Any]) -> float:
    """Year and month of the container; 0: not said."""
    found = re.search(r"container (\d+\.\d+)", raw.get("notes") or "")
    return float(found[1]) if found else 0.0


def _overlapped(name: str, card: str, release: float, raw: dict[str, Any]) -> bool:
    """Whether the exchanges with experts run beside another micro-batch."""
    return (
        (name == "235b" and card == "H100")
        or (name == "235b" and card == "B200" and release == 25.11)
        or (name == "30b" and card == "H100" and raw.get("pp") == 2)
        or (name == "deepseek" and card == "B200" and raw.get("ep") == 32)
        or (name == "gpt oss" and card == "GB200" and release >= 26.04)
    )


def _captured(name: str, card: str, release: float, raw: dict[str, Any]) -> bool:
    """Whether attention and router are in CUDA graphs: `["attn", "moe_router", "moe_preprocess"]`."""
    return release >= 26.02 and (
        (name in ("235b", "deepseek") and card == "GB200")
        or (name == "30b" and card == "B200")
        or (name == "deepseek" and card == "B300" and raw.get("pp") == 8)
        or (name == "deepseek" and card == "B200" and raw.get("ep") == 32)
        or (name == "gpt oss" and card == "B300")
    )
