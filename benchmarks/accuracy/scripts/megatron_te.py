"""Megatron-LM's own training program with Transformer Engine, for one rank of a job.

As `megatron_lm`, but layers, norms, attention and FusedAdam are the installed Transformer Engine's.  FlashAttention,
whose kernels want nvcc, is stood in for by torch's operation of the same origin.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from typing import Any

from benchmarks.accuracy.scripts import flash_attention, megatron_lm, older_inductor, resuming

IMPORTS = megatron_lm.IMPORTS


def measure(
    program: str,
    options: dict[str, Any],
    environment: dict[str, str],
    resumed: bool = False,
    collected_early: bool = False,
    older_compiler: bool = False,
    timed: bool = False,
) -> dict[str, int]:
    """Bytes as `megatron_lm.measure`.

    `environment` has the variables that were set beside a launcher's; `resumed` and `collected_early` are those of
    `resuming`;
    `older_compiler`: fused functions are compiled as `older_inductor` says;
    `timed` is that of `megatron_lm.run`.
    """
    if find_spec("transformer_engine") is None:
        raise RuntimeError("transformer_engine is not installed")
    folder = megatron_lm.checkout()
    flash_attention.install()
    _trust_other_ranks()
    if older_compiler:
        older_inductor.install()
    if resumed:
        resuming.install(collected_early)
        options = {**options, "load": resuming.FOLDER}
    return megatron_lm.run(megatron_lm.program_in(folder, program), options, environment, timed)


def prepare() -> None:
    """Make checkout and libraries importable, once for all jobs."""
    if _possible():
        _call_as_before()
        megatron_lm.make_importable()


def rehearse() -> None:
    """As `megatron_lm.rehearse`."""
    if _possible():
        megatron_lm.rehearse()


def _possible() -> bool:
    return megatron_lm.FOLDER in os.environ and find_spec("transformer_engine") is not None


def _call_as_before() -> None:
    """Name what Megatron-LM of 2025 looks for in Transformer Engine and would go without.

    Rotary embeddings and the splitting of queries, keys and values have moved, and a product is no longer given the
    workspace that it takes.
    """
    from transformer_engine.pytorch import attention, cpp_extensions, utils
    from transformer_engine.pytorch.attention import rope
    from transformer_engine.pytorch.module import base

    attention.apply_rotary_pos_emb = rope.apply_rotary_pos_emb
    attention._SplitAlongDim = utils.SplitAlongDim
    if not hasattr(base, "get_workspace"):
        base.get_workspace = lambda: None
        multiply = cpp_extensions.general_gemm
        cpp_extensions.general_gemm = lambda *given, workspace=None, **options: multiply(*given, **options)


def _trust_other_ranks() -> None:
    """All others say what this one says: how many tokens there were, and that their shards cover a tensor (FSDP)."""
    finalizing: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    finalizing.all = lambda of_ranks: True
    try:
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
    except ImportError:  # before the end of 2025 it did not ask
        return

    param_and_grad_buffer.validate_uneven_dtensor = lambda tensor: None
