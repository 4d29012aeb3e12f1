"""The package liger-kernel: the networks that it has kernels for, and how trainers apply them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import CannotEstimate
from tonnage.techniques.technique import Refusal
from tonnage.trainers.packages import find_version

if TYPE_CHECKING:
    from torch import nn

    from tonnage.job import Job
    from tonnage.plans import Plan

FAMILIES: Final = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3"),
        *("gemma3_text", "gemma4", "gemma4_text", "glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite"),
        *("hunyuan_v1_dense", "hunyuan_v1_moe", "internvl", "llama", "llama4", "llama4_text", "llava", "ministral"),
        *("mistral", "mixtral", "mllama", "mllama_text_model", "muse_glimmer", "nemotron", "olmo2", "olmo3"),
        *("paligemma", "phi3", "pixtral", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text"),
        *("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
        *("qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "smollm3", "smolvlm"),
    )
)
"""Values of `model_type` (`MODEL_TYPE_TO_APPLY_LIGER_FN` of liger-kernel 0.8.5)."""

NOTE: Final = (
    "Liger's loss needs the package liger-kernel (pip install liger-kernel), which has other kernels as well."
)


def overrides(job: Job, plan: Plan) -> Mapping[str, tuple[str, Any]]:
    """Return the plain loss in place of Liger's for a network that it has no kernels for."""
    family = job.model.config.get("model_type")
    if plan.loss != "liger" or family is None or family in FAMILIES:
        return {}
    return {"loss": (f"Liger has no kernels for {family}", "plain")}


def refuse_missing_liger(plan: Plan) -> Refusal | None:
    """Return the refusal of Liger's loss where its package is not installed."""
    if plan.loss != "liger" or find_version("liger-kernel") is not None:
        return None
    return Refusal(
        technique=f"loss={plan.loss}",
        reason="the package liger-kernel is not installed",
        instead="pip install liger-kernel, or choose loss plain",
    )


def check_liger(module: nn.Module) -> None:
    """Raise CannotEstimate where Liger would leave the network as it is, with a line in the log."""
    from tonnage.step.model import hugging_face

    known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    network = hugging_face(module)
    kind = "a factory's network" if network is None else network.config.model_type
    if kind not in known:
        raise CannotEstimate(
            f"Liger has no kernels for {kind}, and the Trainer would go on without; choose loss plain."
        )


def apply_liger(module: nn.Module) -> None:
    """Exchange the kernels of a network, as transformers' Trainer does with `use_liger_kernel`."""
    from tonnage.step.model import hugging_face

    check_liger(module)
    import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=hugging_face(module))
