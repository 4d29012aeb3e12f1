"""The values policy: the values that a program reads from a GPU that computes nothing.

Real values are those that were copied to the card from the host (up to 1 MiB a copy), set by memset, or copied on
from there; libghost.so tracks which bytes these are.  Everything else would be computed by a kernel and reads as
zero: a loss prints 0.0, `isnan(x).any()` is False, GradScaler finds no infinity, a generation never meets its end
token.  Where zero would send a program down a path that real data does not take, a small named patch in one of these
modules takes the usual path instead; each patch that was used is named in the report's `assumed` (`policy`).
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tonnage_recorder import native
from tonnage_recorder.imports import after_import

from . import (
    compiled,
    conditions,
    constants,
    deepspeed_ops,
    descent,
    detection,
    diffusion,
    downloads,
    experts,
    generation,
    generation_loop,
    host_arithmetic,
    integers,
    jit,
    lengths,
    mask_selection,
    masks,
    multimodal,
    numbers,
    outliers,
    pretrained,
    result_sizes,
    routing,
    scripted,
    serving,
    triton_kernels,
    tuning,
)
from .policy import Policy

__all__ = ["Policy", "compiled", "install", "integers", "numbers"]

TRACKERS = ("wandb", "mlflow", "comet_ml", "clearml", "swanlab", "neptune", "neptune_scale", "trackio")
"""Packages that the dry-run's environment sets to work offline (tonnage.script.trackers)."""

_OF_TORCH = (conditions, constants, host_arithmetic, result_sizes, routing, generation_loop, mask_selection)

_OF_LIBRARIES: tuple[tuple[str, Callable[[Policy, ModuleType], None]], ...] = (
    *((f"torch.optim.{name}", host_arithmetic.patch_optimizer) for name in host_arithmetic.OPTIMIZERS),
    ("torch.optim.lbfgs", descent.patch),
    ("torch.distributed.distributed_c10d", lengths.patch_object_exchange),
    ("triton.runtime.autotuner", tuning.patch),
    ("triton.runtime.jit", triton_kernels.patch),
    ("torch._inductor.config", tuning.patch_inductor),
    ("torch._inductor.select_algorithm", tuning.patch_selection),
    ("torch._inductor.runtime.coordinate_descent_tuner", tuning.patch_descent),
    ("torch._inductor.runtime.triton_heuristics", tuning.patch_forms),
    ("bitsandbytes.functional", outliers.patch),
    ("deepspeed.ops.op_builder.builder", deepspeed_ops.patch),
    ("cpuinfo", deepspeed_ops.answer_some_at_once),
    *((name, deepspeed_ops.answer_at_once) for name in deepspeed_ops.HOST_OPTIMIZERS),
    ("transformers.masking_utils", masks.patch),
    ("transformers.generation.utils", generation.patch),
    ("transformers.modeling_utils", pretrained.patch),
    ("transformers.modeling_utils", multimodal.patch),
    ("transformers.distributed.expert_parallel", experts.patch_exchange),
    ("torchtitan.models.common.token_dispatcher", experts.patch_torchtitan),
    ("megatron.core.transformer.moe.token_dispatcher", experts.patch_megatron),
    ("transformers.models.jetmoe.modeling_jetmoe", experts.patch_jetmoe),
    ("transformers.models.switch_transformers.modeling_switch_transformers", experts.patch_switch),
    ("transformers.models.gemma4.modeling_gemma4", multimodal.patch_pooling),
    *((f"transformers.models.{name}.modeling_{name}", detection.patch_denoising) for name in detection.DENOISING),
    ("trl.trainer.sft_trainer", lengths.patch_chunks),
    ("torchvision.models.detection._utils", detection.patch_sampler),
    ("torchvision.models.detection.rpn", detection.patch_proposals),
    ("torchvision.models.detection.roi_heads", detection.patch_heads),
    ("diffusers.models.modeling_utils", diffusion.patch),
    ("flashinfer.jit", jit.patch_flashinfer),
    ("cutlass.base_dsl.compiler", jit.patch_cutlass),
    ("sglang.kernels.jit.utils.compile.loader", jit.patch_sglang),
    ("vllm.engine.arg_utils", serving.patch_arguments),
    ("sglang.srt.server_args", serving.patch_server_arguments),
    ("vllm.v1.worker.gpu.model_runner", serving.patch_sampler),
    ("vllm.v1.worker.gpu.model_runner", serving.patch_lengths),
    ("vllm.model_executor.layers.quantization.kv_cache", serving.patch_cache_scales),
    ("vllm.v1.worker.gpu_worker", serving.patch_worker),
    ("vllm.distributed.device_communicators.cuda_wrapper", serving.patch_runtime),
    ("torch.hub", downloads.patch_hub),
    ("timm.models._builder", downloads.patch_timm),
)
"""Patches of modules of libraries, made when these are imported."""


@functools.cache
def leave_alone(torch: Any) -> None:
    """Have Dynamo leave this package's code alone, once for all forks, since the marks are on the code."""
    of_package = f"{__name__}."
    looking = [module for name, module in sys.modules.items() if name.startswith(of_package)]
    compiled.leave_alone(torch, [*looking, native])


def install(policy: Policy) -> None:
    """Patch torch now, and other libraries when they are imported."""
    patch_torch(policy)
    patch_libraries(policy)


def patch_torch(policy: Policy) -> None:
    """Patch torch now, in a worker before it forks."""
    leave_alone(policy.torch)
    for part in _OF_TORCH:
        part.patch(policy)
    scripted.keep(policy.torch)


def patch_libraries(policy: Policy) -> None:
    """Patch other libraries when they are imported, or now.  In each fork: an import that is undone comes again."""
    for name, patch in _OF_LIBRARIES:
        after_import(name, functools.partial(patch, policy))
    for name in TRACKERS:
        after_import(name, lambda module: policy.use("trackers"))
