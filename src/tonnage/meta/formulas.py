"""Operations whose rule for fake tensors differs from their kernel in torch, with the kernel's results."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

_NORMS: Final = {torch.ops.aten.native_layer_norm.default: 2, torch.ops.aten.native_group_norm.default: 1}
"""Norms, and which of their arguments is the weight."""


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """Return the result of a grouped matrix product: torch's fake rule takes bf16 alone, its CPU kernel any dtype.

    (rows, k) x (groups, k, n) -> (rows, n); (m, rows) x (rows, n) -> (groups, m, n); each row of the result begins at
    a multiple of 16 bytes. torch/_meta_registrations.py, _create_grouped_mm_output_tensor.
    """
    dtype = out_dtype or a.dtype
    groups = () if a.dim() != b.dim() else (offs.shape[0] if a.dim() == 2 else a.shape[0],)
    rows, columns = a.shape[-2], b.shape[-1]
    padded = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    strides = (padded, 1) if not groups else (rows * padded, padded, 1)
    return a.new_empty_strided((*groups, rows, columns), strides, dtype=dtype)


def _norm_on_host(op: Any, *args: Any, **options: Any) -> Any:
    """Return a norm's results on the host, which keeps means and deviations of 16-bit inputs in fp32 if its weight is
    fp32.

    ATen/native/cpu/mixed_data_type.h; torch's fake rule gives them the input's dtype.
    """
    result, *statistics = op(*args, **options)
    weight = args[_NORMS[op]]
    if weight is not None and weight.dtype == torch.float32:
        statistics = [tensor.float() for tensor in statistics]
    return result, *statistics


def _return_input(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def formula_of(op: Any, device: torch.device) -> Any:
    """Return the operation, or its replacement if torch's rule for fake tensors differs from its kernel."""
    if op is torch.ops._c10d_functional.wait_tensor.default:  # a new tensor for fake ones, the same for real ones
        return _return_input
    if op in _NORMS and device.type == "cpu":
        return functools.partial(_norm_on_host, op)
    return _grouped_mm if op is torch.ops.aten._grouped_mm.default else op
