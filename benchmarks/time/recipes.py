"""What the recipes behind NVIDIA's tables do and the tables do not say, by network, card and release.

From the recipes themselves, as data:

- github.com/NVIDIA-NeMo/Megatron-Bridge, `scripts/performance/configs` at v0.2.2, v0.3.1, v0.4.2 and v0.5.0, those of
  the containers 25.11, 26.02, 26.04 and 26.06: `moe_a2a_overlap`, `cuda_graph_impl` and `cuda_graph_scope`,
  `cutedsl_fused_grouped_mlp`, `recompute_modules`; `src/megatron/bridge/recipes`: `mtp_num_layers`, `layout_map`.
- github.com/NVIDIA/NeMo-Framework-Launcher, `launcher_scripts/conf/training` at 24.05 and 24.07, `examples/peft` at
  24.03, and the headings of `examples/README.md` at 935c3eff (Mixtral ran in bf16).
- github.com/NVIDIA/dgxc-benchmarking at v25.02: `grok1/grok1_314b.yaml`, `nemotron/nemotron4-340b-synth.yaml`.

GPT-3's recipes of NeMo are taken to run tensor parallelism's exchanges beside products: they turn
`ub_tp_comm_overlap` off and name a buffer configuration for it.
"""

from __future__ import annotations

import re
from typing import Any, Final

_LAYOUTS: Final[dict[tuple[str, int], dict[str, Any]]] = {
    ("llama2-13b", 4): {"vp": 10},
    ("llama2-70b", 4): {"vp": 20},
    ("llama3-70b", 4): {"vp": 10, "cp": 2},
    ("gpt3-175b", 8): {"vp": 12},
    ("nemotron-22b", 4): {"vp": 10},
    ("nemotron4 340b", 8): {"vp": 12},
    ("mixtral-8x7b", 4): {"ep": 8},
}
"""What a row has where its table does not say it, by network and stages of the pipeline."""

_DOCUMENTS: Final = 20
"""Of a packed sequence of 4,096 tokens of SQuAD, whose paragraphs have some 120 words, questions and answers some 20:
an assumption; with a half or twice as many attention still takes next to nothing."""

_COMPILED_LOSS: Final = ("nemotron", "llama-3", "llama3", "llama 3")
"""Networks whose NeMo recipes have `cross_entropy_loss_fusion`, from 24.07 on."""


def completed(raw: dict[str, Any]) -> dict[str, Any]:
    """The row with the layout of its recipe where its table does not state it, and what its table has wrong."""
    if _wrong_experts(raw):
        return {**raw, "ep": 64}
    if raw["source_repo"] == "NVIDIA-NeMo/Megatron-Bridge":
        return raw
    known = _LAYOUTS.get((raw["model"].lower(), raw.get("pp") or 1), {})
    stated = {name: value for name, value in raw.items() if value is not None}
    return {**known, **stated, **({"precision": "bf16"} if raw["model"] == "MIXTRAL-8x7B" else {})}


def _wrong_experts(raw: dict[str, Any]) -> bool:
    """Whether the table has 8 ranks for experts and the recipe, at v0.2.0 and v0.2.2, 64."""
    return raw["model"] == "GPT OSS 120B" and raw["gpu_norm"] == "B200" and _release(raw) == 25.11


def of_release(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a Work: how the loss is computed, and whether sequences are of packed documents.

    Megatron-Bridge's benchmarks have Transformer Engine's loss (`cross_entropy_fusion_impl`, in its
    `scripts/performance/utils/overrides.py`), NeMo's Megatron's own, compiled or not.
    """
    name = raw["model"].lower()
    settings: dict[str, Any] = {"loss": "fused", "gradient_bytes": 2}  # grad_sync_dtype, grad_reduce_in_fp32
    if raw["source_repo"] != "NVIDIA-NeMo/Megatron-Bridge":
        new = raw["source_repo"] != "NVIDIA/NeMo-Framework-Launcher"
        settings["loss"] = "compiled" if new and name.startswith(_COMPILED_LOSS) else "plain"
    if raw["phase"] == "sft" or "finetuning" in name:
        settings["packing"] = _DOCUMENTS
    if "grok" in name or ("235b" in name and raw["gpu_norm"] == "H100"):
        settings["tensor_beside"] = False  # ub_tp_comm_overlap, tp_comm_overlap
    return settings


_FULL: Final = {
    "experts_overlapped": True, "experts_once": True, "experts_fused": True, "captured": "all",
    "attention": "cudnn",  # in 8 bits, sinks or not: `fp8_dot_product_attention`
}  # fmt: skip
"""A whole iteration in one CUDA graph, with experts' products in one kernel: MXFP8 from 26.06 on."""

_FULL_ON: Final = {
    "30b": ("GB200", "GB300", "B300"),
    "235b": ("GB200", "GB300"),
    "deepseek": ("GB200", "GB300"),
    "gpt oss": ("GB200", "GB300"),
}


def regressed(raw: dict[str, Any]) -> bool:
    """Whether the table says in a footnote that the row is not what it should be."""
    return raw["model"] == "GPT OSS 120B" and "26.06.01" in raw["notes"]


def of_experts(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a Work, of a row of a network with experts."""
    model = raw["model"].lower().replace("_", " ").replace("-", " ")
    if raw["source_repo"] == "NVIDIA/NeMo-Framework-Launcher":
        return {}
    if "grok" in model:  # moe_grouped_gemm: false, moe_expert_capacity_factor: 1.0
        return {"experts_even": True}
    name = next((name for name in _FULL_ON if name in model), "")
    card, release = raw["gpu_norm"], _release(raw)
    eight_bits = (raw.get("precision") or "").upper() in ("MXFP8", "FP8-MX", "FP8_MX")
    if release >= 26.06 and eight_bits and card in _FULL_ON.get(name, ()):
        again = {"checkpointing": "latent"} if (name, card) == ("deepseek", "GB200") else {}
        return {**_FULL, **_divided(name, raw), **again}
    settings = {**_divided(name, raw), **_recomputed(name, card, release)}
    settings["experts_once"] = _sent_once(name, card, release)
    if name == "gpt oss":  # sinks: fused from cuDNN 9.13.1 on (Transformer Engine, fused_attn.cpp), as in 25.11
        settings["attention"] = "cudnn"
    if _overlapped(name, card, release, raw):
        settings["experts_overlapped"] = True
    if _captured(name, card, release, raw):
        settings["captured"] = "part"
    return settings


def _divided(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """`expert_tensor_parallel_size: 1`; of DeepSeek's 61 layers the last stage has 3 fewer than the others, and the
    layer that predicts a second token (`layout_map`)."""
    stages = raw.get("pp") or 1
    if name != "deepseek" or stages == 1:
        return {"experts_whole": True}
    each = 64 // stages
    return {"experts_whole": True, "stage_layers": (each,) * (stages - 1) + (each - 2,)}


def _recomputed(name: str, card: str, release: float) -> dict[str, Any]:
    """What runs again: of DeepSeek `mla_up_proj` (`mlp` is of dense layers), of gpt-oss `layernorm` and `moe_act`."""
    if name == "deepseek" and not (card == "GB200" and 26.04 <= release < 26.05):
        return {"checkpointing": "latent"}
    if name == "gpt oss" and card in ("H100", "B200", "GB200"):
        return {"checkpointing": "norms"}
    return {}


def _release(raw: dict[str, Any]) -> float:
    """Year and month of the container; 0: not said.  Verification cards run the recipes of 26.08 (at 067f987d)."""
    if "pretrain_performance" in raw["phase"]:
        return 26.08
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


def _sent_once(name: str, card: str, release: float) -> bool:
    """Whether tokens are sent by DeepEP or HybridEP (`moe_flex_dispatcher_backend`, where `moe_token_dispatcher_type`
    does not set it aside), which is never so for Qwen3 235B on H100 and B200."""
    if name == "gpt oss":
        return card == "B300" and release >= 26.04
    if card in ("GB200", "GB300"):
        return True
    if name == "235b":
        return card == "B300" and release >= 26.04
    return release >= 26.02


def _captured(name: str, card: str, release: float, raw: dict[str, Any]) -> bool:
    """Whether attention and router are in CUDA graphs: `["attn", "moe_router", "moe_preprocess"]`."""
    if (name, card) in (("235b", "GB200"), ("gpt oss", "GB300")):
        return True
    return release >= 26.02 and (
        (name == "deepseek" and card == "GB200")
        or (name == "235b" and card == "GB300")
        or (name == "30b" and card == "B200")
        or (name == "deepseek" and card == "B300" and raw.get("pp") == 8)
        or (name == "deepseek" and card == "B200" and raw.get("ep") == 32)
        or (name == "gpt oss" and card == "B300")
    )
