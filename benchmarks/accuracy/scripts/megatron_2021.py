"""Megatron-LM's training program as of May 2021, unchanged, for one rank of a job.

The folder that the variable MEGATRON_LM names is a checkout of NVIDIA/Megatron-LM of that time.  What it compiles
with nvcc, Apex, and names that torch and numpy have dropped are stood in for, by functions that ask for the same
memory: its fused softmax (a result of the size of the scores; its backward works in place), its layer norm (result,
mean and reciprocal deviation), Apex's multi-tensor kernels (which write into what they are given) and its FusedAdam,
which is torch's of the same kind.
"""

from __future__ import annotations

import math
import os
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from benchmarks.accuracy.scripts.megatron_lm import (
    FOLDER,
    LAUNCHER,
    checkout,
    figures,
    stand_in,
    stand_in_for_softmax,
    start,
)
from torch import Tensor
from torch.utils.data import Dataset

IMPORTS = ("megatron.training", "megatron.model")

WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
"""Up to torch 1.13 cuBLAS kept its own, outside of torch's allocator (pytorch/pytorch#95668)."""


def measure(options: dict[str, Any]) -> dict[str, int]:
    """Bytes as `report_memory` prints them after a step, of options of `pretrain_gpt.py`."""
    program = checkout() / "pretrain_gpt.py"
    os.environ.update(LAUNCHER | WORKSPACES)
    _give_samples()
    _hear_first_tensor_rank()
    seen = _listen()
    start(program, options)
    return seen


def prepare() -> None:
    """Make the checkout importable, once for all jobs."""
    if FOLDER not in os.environ:
        return
    sys.path.insert(0, os.environ[FOLDER])
    np.float = float  # type: ignore[attr-defined]
    stand_in("torch._six", inf=float("inf"))
    stand_in_for_softmax("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda")
    stand_in("fused_mix_prec_layer_norm_cuda", forward_affine=_normalised, backward_affine=_normalised_backward)
    stand_in("amp_C", multi_tensor_l2norm=_norm, multi_tensor_scale=_scale)
    stand_in("apex")
    stand_in("apex.multi_tensor_apply", multi_tensor_applier=_apply)
    stand_in("apex.optimizers", FusedAdam=partial(torch.optim.AdamW, fused=True), FusedSGD=torch.optim.SGD)


def _normalised(values: Tensor, shape: Any, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    """Result, mean and reciprocal deviation of each row, in fp32."""
    rows = values.shape[: -len(shape)].numel()
    mean, deviation = (torch.empty(rows, dtype=torch.float32, device=values.device) for _ in range(2))
    return torch.empty_like(values), mean, deviation


def _normalised_backward(
    gradient: Tensor, mean: Tensor, deviation: Tensor, values: Tensor, shape: Any, weight: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Gradients of values, weight and bias; sums of sixteen parts of the rows lie beside them, in fp32.

    `HostLayerNormGradient` of megatron/fused_kernels/layer_norm_cuda_kernel.cu.
    """
    sums = [torch.empty((16, *weight.shape), dtype=torch.float32, device=weight.device) for _ in range(2)]
    gradients = torch.empty_like(values), torch.empty_like(weight), torch.empty_like(weight)
    del sums
    return gradients


def _apply(kernel: Any, overflow: Tensor, lists: Any, *arguments: Any) -> Any:
    return kernel(2048 * 32, overflow, lists, *arguments)


def _norm(chunk: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """The norm of all and nothing, as `multi_tensor_l2norm_cuda` of Apex: beside a number for each block."""
    blocks = torch.zeros(320, dtype=torch.float32, device=overflow.device)
    norm = torch.empty(1, dtype=torch.float32, device=overflow.device)
    del blocks
    return norm, torch.empty(0, device=overflow.device)


def _scale(chunk: int, overflow: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    """In place."""


def _hear_first_tensor_rank() -> None:
    """What it would have sent to the others: that there is something to train with, and of which shapes."""
    from megatron import get_args, training
    from megatron.mpu import data

    build = training.build_train_valid_test_data_iterators

    def build_train_valid_test_data_iterators(provider: Any) -> Any:
        iterators = build(provider)
        get_args().do_train = True
        return iterators

    def sizes(keys: list[str], batch: dict[str, Tensor] | None) -> tuple[Any, Any, int]:
        arguments = get_args()
        shapes = {key: [arguments.micro_batch_size, arguments.seq_length + 1] for key in keys}
        counts = {key: math.prod(shape) for key, shape in shapes.items()}
        return shapes, counts, sum(counts.values())

    training.build_train_valid_test_data_iterators = build_train_valid_test_data_iterators
    data._build_key_size_numel_dictionaries = sizes


def _listen() -> dict[str, int]:
    """What `report_memory` sees each time it is called; the last call's figures stay."""
    from megatron import training

    seen: dict[str, int] = {}

    training.report_memory = lambda name: seen.update(figures())
    return seen


class _Samples(Dataset[dict[str, Any]]):  # type: ignore[misc, unused-ignore]
    """Made-up samples with the name, shape and dtype of Megatron-LM's."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"text": torch.zeros(self.length + 1, dtype=torch.int64)}


def _give_samples() -> None:
    """In place of files, of the tokenizer's words and of what would be compiled for both."""
    from megatron import fused_kernels, global_vars
    from megatron.data import dataset_utils, gpt_dataset

    def build_tokenizer(args: Any) -> SimpleNamespace:
        of_gpt2 = 50_257
        parts = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-of_gpt2 // parts) * parts
        return SimpleNamespace(vocab_size=of_gpt2, eod=of_gpt2 - 1)

    global_vars.build_tokenizer = build_tokenizer
    fused_kernels.load = lambda args: None
    dataset_utils.compile_helper = lambda: None
    gpt_dataset.build_train_valid_test_datasets = lambda seq_length, **rest: (_Samples(seq_length),) * 3
