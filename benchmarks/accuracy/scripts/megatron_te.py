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
    if possible():
        megatron_lm.make_importable()


def rehearse() -> None:
    """As `megatron_lm.rehearse`."""
    if possible():
        megatron_lm.rehearse()


def possible() -> bool:
    """Whether checkout and library are there."""
    return megatron_lm.FOLDER in os.environ and find_spec("transformer_engine") is not None


def _trust_other_ranks() -> None:
    """All others say what this one says: how many tokens there were, and that their shards cover a tensor (FSDP)."""
    finalizing: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    finalizing.all = lambda of_ranks: True
    try:
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
    except ImportError:  # before the end of 2025 it did not ask
        return

    param_and_grad_buffer.validate_uneven_dtensor = lambda tensor: None
