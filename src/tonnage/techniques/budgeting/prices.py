"""Prices of operations as torch runs them: seconds of the GPU by the rates of the time model, and FLOPs.

Only ratios matter to what is worth keeping, and the same function prices operations on a ghost and on a real GPU.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tonnage.catalog.devices import find_device
from tonnage.cluster import Device
from tonnage.errors import CannotEstimate, UnknownDevice
from tonnage.techniques.budgeting.recording import Price
from tonnage.timing import rates
from tonnage.timing.operations import Operation
from tonnage.timing.software import software_of

_BYTES_PER_SECOND: Final = 1e12
_FLOPS_PER_SECOND: Final = 1e14
"""Speeds of an unknown device: a hundred operations in the time of a byte, as in GPUs since 2018 (T4 200, A100
150, H100 300).
"""

_LINK_BYTES_PER_SECOND: Final = 1e10
"""Link between such a device and its host: a hundredth of its memory's speed, as PCIe 3.0 and 4.0 beside GDDR6
and HBM2.
"""

_REACHED: Final = 0.85
"""Fraction of a link's speed that copies reach, as in the time model."""

_DTYPES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp32"}
_PRODUCT_OF_4_BITS: Final = "gemm_4bit"
_PRODUCTS_OF_8_BITS: Final = ("int8_linear_matmul", "int8_scaled_mm")
"""bitsandbytes' products with quantized weights (0.50)."""

_HEADS_DIMS: Final = 4
"""Dimensions of queries, keys and values: (batch, heads, tokens, head width)."""

_BACKENDS: Final = ("flash", "cudnn", "efficient")


def link_bytes_per_second(device: torch.device) -> float:
    """Return the speed that copies between this device and the host reach in one direction."""
    known = _find_known_device(device)
    link = None if known is None else known.host_link_bytes_per_second or known.pcie_bytes_per_second
    return _REACHED * (link or _LINK_BYTES_PER_SECOND)


def kernel_seconds(device: torch.device) -> float:
    """Return the host's time for each kernel that plain PyTorch launches; zero for an unknown device."""
    return 0.0 if _find_known_device(device) is None else software_of("tonnage").kernel_seconds


def _find_known_device(device: torch.device) -> Device | None:
    """Return the catalog's device of that name, if its speeds are known."""
    try:
        device_entry = find_device(torch.cuda.get_device_name(device))
        rates.bandwidth(device_entry), rates.peak_flops(device_entry, "fp16")
    except (AssertionError, RuntimeError, UnknownDevice, CannotEstimate):
        return None
    return device_entry


def on(device: torch.device) -> Price:
    """Return the prices of this device: by the catalog's speeds, or by FLOPs and bytes alone."""
    known = _find_known_device(device)
    if known is None:
        return _price_by_bytes_and_flops
    reached = rates.card(known)

    def price(operation: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, float]:
        if _is_free(operation):
            return 0.0, 0.0
        described, backend, seq_len = _describe(operation, args, kwargs, output)
        operations = [described, *_dequantization(operation, args, described)]
        try:
            seconds = rates.seconds(operations, known, reached, backend=backend, seq_len=seq_len).total
        except CannotEstimate:  # a dtype that this GPU has no figure for
            seconds = _default_seconds(described)
        return seconds, described.flops

    return price


def _price_by_bytes_and_flops(operation: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, float]:
    if _is_free(operation):
        return 0.0, 0.0
    described, _, _ = _describe(operation, args, kwargs, output)
    return _default_seconds(described), described.flops


def _default_seconds(operation: Operation) -> float:
    return operation.bytes / _BYTES_PER_SECOND + operation.flops / _FLOPS_PER_SECOND


def _is_free(operation: Any) -> bool:
    """Return True for views and empty memory: nothing is read or written."""
    schema = getattr(operation, "_schema", None)
    name = str(getattr(operation, "overloadpacket", operation))
    return getattr(operation, "is_view", False) or "empty" in name or (schema is not None and not schema.returns)


def _flops(operation: Any, args: Any, kwargs: Any, output: Any) -> float:
    """Return the FLOPs by torch's formulas; it has none for bitsandbytes' products."""
    count = flop_registry.get(getattr(operation, "overloadpacket", None))
    if count is not None:
        shown = _repeat_heads(args) if "attention" in _name(operation) else args
        return float(count(*shown, **kwargs, out_val=output))
    if _name(operation) in (_PRODUCT_OF_4_BITS, *_PRODUCTS_OF_8_BITS):
        return float(2 * output.numel() * args[0].shape[-1])
    return 0.0


def _repeat_heads(args: Any) -> tuple[Any, ...]:
    """Return the shapes of queries, keys and values with equally many heads: up to torch 2.11 formulas need that."""
    heads = max((tensor.shape[1] for tensor in args if _has_heads(tensor)), default=0)
    return tuple(torch.Size((arg.shape[0], heads, *arg.shape[2:])) if _has_heads(arg) else arg for arg in args)


def _has_heads(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == _HEADS_DIMS


def _dequantization(operation: Any, args: Any, product: Operation) -> list[Operation]:
    """Return what runs before a product with weights of 4 bits: it reads them, and writes them in 16 bits."""
    if _name(operation) != _PRODUCT_OF_4_BITS:
        return []
    weights = math.prod(args[2])
    return [Operation("dequantize", "copy", product.dtype, 0, 2.5 * weights)]


def _name(operation: Any) -> str:
    return str(getattr(operation, "overloadpacket", operation)).rpartition(".")[2]


def _describe(operation: Any, args: Any, kwargs: Any, output: Any) -> tuple[Operation, str, int]:
    """Return the operation in the time model's terms, with the attention's backend and the tokens that it sees."""
    name = _name(operation)
    flops = _flops(operation, args, kwargs, output)
    tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, torch.Tensor)]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    dtype = _DTYPES.get(tensors[0].dtype, "fp16") if tensors else "fp32"
    if "attention" not in name:
        return Operation(name, "matmul" if flops else "pointwise", dtype, flops, moved), "flash", 1
    if any(value is True for value in (*args, kwargs.get("is_causal"))):
        flops /= 2  # kernels skip what the mask hides
    backend = next((backend for backend in _BACKENDS if backend in name), "efficient")
    keys = args[1] if len(args) > 1 else kwargs.get("key")
    seq_len = int(keys.shape[-2]) if isinstance(keys, torch.Tensor) else 1
    return Operation(name, "attention", dtype, flops, moved), backend, seq_len
