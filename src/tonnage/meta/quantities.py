"""Quantities that the memory inside an operation depends on: its shapes, as the few numbers that its kernels
multiply.

A ghost runs the operations, a script fits how many bytes each number stands for (`benchmarks/portable`), and
`temporaries` multiplies them again.  `variant` names the kernel that the operation chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

aten = torch.ops.aten


class Quantities(NamedTuple):
    """The quantities of one call of an operation."""

    variant: str
    """The kernel that serves it, as far as that changes the memory."""
    numbers: Mapping[str, int]
    """Numbers that blocks inside it may be proportional to."""


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _size_bytes(tensor: torch.Tensor) -> int:
    count: int = tensor.numel() * tensor.element_size()
    return count


def _attention(query: torch.Tensor, key: torch.Tensor, *more: str) -> Quantities:
    """Return the quantities of query (batch, heads, tokens, width) and key alike; `one` is for constant blocks.

    If each head's tokens are contiguous, kernels that need each token's heads contiguous make a copy.
    """
    batch, heads, tokens, width = query.shape
    grouped = key.shape[1] != heads
    rows = batch * heads
    if grouped:
        more = (*more, "grouped")
    if not query.transpose(1, 2).is_contiguous():
        more = (*more, "heads-first")
    numbers = {
        "rows": rows * tokens,
        "rows_by_128": rows * _round_up(tokens, 128),
        "elements": rows * tokens * width,
        "elements_by_128x32": rows * _round_up(tokens, 128) * _round_up(width, 32),
        "rows_by_64": rows * _round_up(tokens, 64),
        "elements_by_64x128": rows * _round_up(tokens, 64) * _round_up(width, 128),
        "elements_by_128x128": rows * _round_up(tokens, 128) * _round_up(width, 128),
        "elements_of_first_512": rows * min(_round_up(tokens, 128), 512) * _round_up(width, 128),
        "key_elements": rows * key.shape[2] * width if grouped else 0,
        "one": 1,
    }
    return Quantities(" ".join(more), numbers)


def _attention_forward(args: Any, kwargs: Any, result: Any) -> Quantities:
    return _attention(args[0], args[1])


def _attention_backward(args: Any, kwargs: Any, result: Any) -> Quantities:
    return _attention(args[1], args[2])


def _efficient_backward(args: Any, kwargs: Any, result: Any) -> Quantities:
    """Return the quantities of a kernel made for widths up to 64, 96, 128 or more; fp32 ones write into matching
    results.
    """
    query = args[1]
    tokens, width = query.shape[2:]
    kernel = next((f"up to {most}" for most in (64, 96, 128) if width <= most), "wide")
    if query.dtype != torch.float32:
        return _attention(query, args[2], "half", kernel)
    return _attention(query, args[2], "fp32", kernel, *(("even",) if tokens % 64 == 0 and width % 64 == 0 else ()))


def _result_bytes(args: Any, kwargs: Any, result: Any) -> Quantities:
    return Quantities("", {"result_bytes": _size_bytes(result[0] if isinstance(result, tuple) else result), "one": 1})


def _input_elements(args: Any, kwargs: Any, result: Any) -> Quantities:
    return Quantities("", {"elements": args[0].numel(), "one": 1})


def _elements_and_rows(args: Any, kwargs: Any, result: Any) -> Quantities:
    elements, width = args[0].numel(), args[0].shape[args[1]]
    return Quantities("", {"elements": elements, "rows": elements // width if width else 0, "one": 1})


def _embedding_backward(args: Any, kwargs: Any, result: Any) -> Quantities:
    """Return the quantities; one kernel adds up few indices, many are sorted first
    (ATen/native/cuda/Embedding.cu).
    """
    gradient, indices = args[0], args[1]
    strided = 0 if gradient.is_contiguous() else _size_bytes(gradient)
    many = "many" if indices.numel() > 3072 else "few"
    segments = min(args[2], indices.numel())
    partial = indices.numel() // 10 + segments
    numbers = {
        "indices": indices.numel(),
        "segments": segments,
        "partial": partial,
        "partial_elements": partial * gradient.shape[-1],
        "copy": strided,
        "one": 1,
    }
    return Quantities(f"{many} strided" if strided else many, numbers)


def _index_put(args: Any, kwargs: Any, result: Any) -> Quantities:
    accumulates = len(args) > 3 and bool(args[3])
    return Quantities("adds" if accumulates else "writes", {"values": _count_values(args), "one": 1})


def _count_values(args: Any) -> int:
    return max((index.numel() for index in args[1] if index is not None), default=0)


def _convolution(args: Any, kwargs: Any, result: Any) -> Quantities:
    image, filters = args[0], args[1]
    numbers = {
        "image": _channels_last_bytes(image),
        "filter": _channels_last_bytes(filters),
        "result": _size_bytes(result),
        "one": 1,
    }
    return Quantities(_element_size(image), numbers)


def _convolution_backward(args: Any, kwargs: Any, result: Any) -> Quantities:
    gradient, image, filters = args[:3]
    numbers = {
        "image": _channels_last_bytes(image),
        "filter": _channels_last_bytes(filters),
        "result": _size_bytes(gradient),
        "one": 1,
    }
    wanted = " ".join(name for name, is_set in zip(("image", "filter", "bias"), args[-1], strict=True) if is_set)
    strided = "" if gradient.is_contiguous() else " strided"
    return Quantities(f"{_element_size(image)} to {wanted}{strided}", numbers)


def _element_size(tensor: torch.Tensor) -> str:
    return f"{tensor.element_size()} bytes"


def _channels_last_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of (images, channels, ...) with channels rounded up to 16 bytes, as in channels-last
    copies.
    """
    channels = _round_up(tensor.shape[1], 16 // tensor.element_size())
    count: int = _size_bytes(tensor) // tensor.shape[1] * channels
    return count


def _norms(args: Any, kwargs: Any, result: Any) -> Quantities:
    """Return the quantities; each tensor's norm is first that of its pieces of 65,536 elements
    (ForeachReduceOp.cu).
    """
    most = max((-(-tensor.numel() // 65536) for tensor in args[0]), default=0)
    return Quantities("", {"pieces": most * len(args[0]), "one": 1})


Rule = Callable[[Any, Any, Any], Quantities]

OF: Final[dict[str, Rule]] = {
    "_scaled_dot_product_cudnn_attention": _attention_forward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_softmax_backward_data": _result_bytes,
    "_safe_softmax": _elements_and_rows,
    "embedding_dense_backward": _embedding_backward,
    "index_put": _index_put,
    "index_put_": _index_put,
    "cumsum": _input_elements,
    "_grouped_mm": _input_elements,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_foreach_norm": _norms,
}
"""Rules by the operation's name in torch.ops.aten."""
