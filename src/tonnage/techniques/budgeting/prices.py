"""What an operation costs, as torch runs it: seconds of the card by the rates of the time model, and its FLOPs.

Only the ratios matter to what is worth keeping, and the same function prices operations on a ghost and on the card.
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
from tonnage.techniques.budgeting.replay import Price
from tonnage.timing import rates
from tonnage.timing.operations import Operation
from tonnage.timing.software import software_of

_BYTES_PER_SECOND: Final = 1e12
_FLOPS_PER_SECOND: Final = 1e14
"""Of a device that is not known: a hundred operations in the time of a byte, as cards since 2018 have it (T4 200,
A100 150, H100 300)."""

_LINK_BYTES_PER_SECOND: Final = 1e10
"""Of such a device to its host: a hundredth of its memory's, as PCIe 3.0 and 4.0 have it beside GDDR6 and HBM2."""

_REACHED: Final = 0.85
"""Part of a link that copies reach, as in the time model."""

_DTYPES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp32"}
_OF_4_BITS: Final = "gemm_4bit"
_OF_8_BITS: Final = ("int8_linear_matmul", "int8_scaled_mm")
"""bitsandbytes' products with quantized weights (0.50)."""

_HEADS_DIMS: Final = 4
"""Dimensions of queries, keys and values: (batch, heads, tokens, width of a head)."""

_BACKENDS: Final = ("flash", "cudnn", "efficient")


def link_bytes_per_second(device: torch.device) -> float:
    """What copies between this device and the host reach in one direction."""
    known = _known(device)
    link = None if known is None else known.host_link_bytes_per_second or known.pcie_bytes_per_second
    return _REACHED * (link or _LINK_BYTES_PER_SECOND)


def kernel_seconds(device: torch.device) -> float:
    """Of the host for each kernel that plain PyTorch launches; zero where nothing is known of the card's."""
    return 0.0 if _known(device) is None else software_of("tonnage").kernel_seconds


def _known(device: torch.device) -> Device | None:
    """The catalog's card of that name, if its speeds are known."""
    try:
        known = find_device(torch.cuda.get_device_name(device))
        rates.bandwidth(known), rates.peak_flops(known, "fp16")
    except (AssertionError, RuntimeError, UnknownDevice, CannotEstimate):
        return None
    return known


def on(device: torch.device) -> Price:
    """The prices of this device: the catalog's card of that name, or FLOPs and bytes alone."""
    known = _known(device)
    if known is None:
        return _of_any
    reached = rates.card(known)

    def price(operation: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, float]:
        if _is_free(operation):
            return 0.0, 0.0
        one, backend, seq_len = _described(operation, args, kwargs, output)
        described = [one, *_dequantizing(operation, args, one)]
        try:
            return rates.seconds(described, known, reached, backend=backend, seq_len=seq_len).total, one.flops
        except CannotEstimate:  # a dtype that this card has no figure for
            return _plain_seconds(one), one.flops

    return price


def _of_any(operation: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, float]:
    if _is_free(operation):
        return 0.0, 0.0
    one, _, _ = _described(operation, args, kwargs, output)
    return _plain_seconds(one), one.flops


def _plain_seconds(one: Operation) -> float:
    return one.bytes / _BYTES_PER_SECOND + one.flops / _FLOPS_PER_SECOND


def _is_free(operation: Any) -> bool:
    """Views and empty memory: nothing is read or written."""
    schema = getattr(operation, "_schema", None)
    name = str(getattr(operation, "overloadpacket", operation))
    return getattr(operation, "is_view", False) or "empty" in name or (schema is not None and not schema.returns)


def _flops(operation: Any, args: Any, kwargs: Any, output: Any) -> float:
    """By torch's formulas; bitsandbytes' products have none there."""
    count = flop_registry.get(getattr(operation, "overloadpacket", None))
    if count is not None:
        shown = _with_all_heads(args) if "attention" in _name(operation) else args
        return float(count(*shown, **kwargs, out_val=output))
    if _name(operation) in (_OF_4_BITS, *_OF_8_BITS):
        return float(2 * output.numel() * args[0].shape[-1])
    return 0.0


def _with_all_heads(args: Any) -> tuple[Any, ...]:
    """The shapes of queries, keys and values with as many heads each: up to torch 2.11 formulas know no others."""
    heads = max((one.shape[1] for one in args if _has_heads(one)), default=0)
    return tuple(torch.Size((one.shape[0], heads, *one.shape[2:])) if _has_heads(one) else one for one in args)


def _has_heads(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == _HEADS_DIMS


def _dequantizing(operation: Any, args: Any, one: Operation) -> list[Operation]:
    """What a product with weights of 4 bits does before: it reads those, and writes them in 16 bits."""
    if _name(operation) != _OF_4_BITS:
        return []
    weights = math.prod(args[2])
    return [Operation("dequantize", "copy", one.dtype, 0, 2.5 * weights)]


def _name(operation: Any) -> str:
    return str(getattr(operation, "overloadpacket", operation)).rpartition(".")[2]


def _described(operation: Any, args: Any, kwargs: Any, output: Any) -> tuple[Operation, str, int]:
    """The operation in the time model's words, with the attention's backend and the tokens that it sees."""
    name = _name(operation)
    flops = _flops(operation, args, kwargs, output)
    tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, torch.Tensor)]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    dtype = _DTYPES.get(tensors[0].dtype, "fp16") if tensors else "fp32"
    if "attention" not in name:
        return Operation(name, "matmul" if flops else "pointwise", dtype, flops, moved), "flash", 1
    if any(value is True for value in (*args, kwargs.get("is_causal"))):
        flops /= 2  # kernels skip what the mask hides
    backend = next((one for one in _BACKENDS if one in name), "efficient")
    keys = args[1] if len(args) > 1 else kwargs.get("key")
    seq_len = int(keys.shape[-2]) if isinstance(keys, torch.Tensor) else 1
    return Operation(name, "attention", dtype, flops, moved), backend, seq_len
