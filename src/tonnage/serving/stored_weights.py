"""Bytes of the weights of a folder on one rank, from the headers of its safetensors files."""

import re
from collections.abc import Iterable
from math import ceil, prod
from typing import Final

from tonnage.serving.quantization import Quantization
from tonnage.serving.safetensors import StoredTensor

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]{1,5})\.")
_FURTHER: Final = re.compile(r"(?:^|\.)mtp\.")
"""Tensors of layers that predict further tokens, which engines load only to draft with them."""
_EXPERT: Final = re.compile(r"\bexperts?\b")
_KEPT: Final = re.compile(
    r"norm|embed|lm_head|router|(?:mlp|moe)\.gate\.|rotary|vision|visual|audio|tower|conv|wte|wpe"
)
"""Tensors that formats leave unquantized: embeddings, head, norms, routers, towers, convolutions."""

_FLOATS: Final = ("BF16", "F16", "F32")
"""Dtypes that an engine casts to the 16 bits it computes with."""


def stored_bytes(
    tensors: Iterable[StoredTensor],
    wanted: Quantization,
    published: Quantization,
    *,
    tp: int,
    stage: range,
    further: bool = False,
) -> dict[str, int]:
    """Return the bytes of one rank's weights by part: `layers`, `experts` and `others`.

    Floating-point tensors count 16 bits an element.  If `wanted` is not the published format, the matrices of layers
    are quantized so.  Matrices are divided among `tp` ranks, vectors are whole on each.  `further`: only the layers
    that predict further tokens, which are those of the stage or named so.
    """
    parts = {"layers": 0, "experts": 0, "others": 0}
    for tensor in tensors:
        layer, is_further = _LAYER.search(tensor.name), _FURTHER.search(tensor.name) is not None
        if is_further or further:
            if not further or not (is_further or (layer is not None and int(layer[1]) in stage)):
                continue
        elif layer is None:
            if stage.start and "embed" in tensor.name:
                continue  # the first stage has it
        elif int(layer[1]) not in stage:
            continue
        kept = _KEPT.search(tensor.name) is not None or layer is None
        part = "others" if kept else "experts" if _EXPERT.search(tensor.name) else "layers"
        parts[part] += _tensor_bytes(tensor, wanted, published, tp, is_quantized=not kept)
    return {name: size for name, size in parts.items() if size}


def _tensor_bytes(
    tensor: StoredTensor, wanted: Quantization, published: Quantization, tp: int, *, is_quantized: bool
) -> int:
    is_matrix = len(tensor.shape) > 1
    divided = tp if is_matrix else 1
    if tensor.dtype not in _FLOATS:
        return ceil(tensor.bytes / divided)
    if is_matrix and is_quantized and wanted.name != published.name and wanted.bits < 16:
        *stacked, rows, columns = tensor.shape
        return prod(stacked) * wanted.bytes(ceil(rows / divided), columns)
    return ceil(2 * prod(tensor.shape) / divided)
