"""Bytes of the weights of a folder on one rank, from the headers of its safetensors files."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod
from typing import Final

from tonnage.serving.quantization import Quantization
from tonnage.serving.safetensors import StoredTensor
from tonnage.serving.weights import allocated_bytes

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]{1,5})\.")
_FURTHER: Final = re.compile(r"(?:^|\.)mtp\.")
"""Tensors of layers that predict further tokens, which engines load only to draft with them."""
_EXPERT: Final = re.compile(r"\bexperts?\b")
_KEYS: Final = re.compile(r"\b[kv]_proj\b")
_ROUTER: Final = re.compile(r"\brouter\b|(?:mlp|moe)\.gate\.")
_WHOLE: Final = re.compile(rf"{_ROUTER.pattern}|\b(?:q_a_proj|kv_a_proj\w*)\b")
"""Matrices that every tensor-parallel rank holds whole: routers, and what compresses for latent attention."""
_TOWER: Final = re.compile(r"vision|visual|audio|tower|multi_modal|mm_proj|^mlp1\.")
"""Towers for images and sounds, and what joins them with the text: all in the first stage."""
_WHOLE_OF_TOWER: Final = re.compile(r"embed|mm_input_projection")
"""Their tables of places, what reads patches, and the matrix between Gemma 3's tower and its text."""
_KEPT: Final = re.compile(
    r"norm|embed|lm_head|router|(?:mlp|moe)\.gate\.|rotary|wte|wpe|"
    r"conv(?:1d)?\.(?:weight|bias)$"
)
"""Tensors that formats leave unquantized: embeddings, head, norms, routers, towers, convolutions."""

_MERGED: Final = re.compile(r"(?<=experts\.)[0-9]{1,5}\.|\b(?:(?:gate|up|[qkv])_proj|w[13])\b")
"""Parts of names in which tensors differ that an engine makes one of: experts, gate and up, queries, keys, values."""

_SCALES: Final = re.compile(r"scale|absmax|SCB|quant_map")
"""Scales of quantized weights, which keep their dtype; bitsandbytes has them in vectors."""

_FLOATS: Final = ("BF16", "F16", "F32")
"""Dtypes that an engine casts to the 16 bits it computes with."""

_ALL_LAYERS: Final = range(10**5)
"""All numbers that `_LAYER` reads."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a folder's tensors that one rank holds; by default all of them."""

    layers: range = _ALL_LAYERS
    """Layers of its pipeline stage."""
    is_last: bool = True
    """True if the stage has the head."""
    tp: int = 1
    """Ranks that share each matrix."""
    experts: int = 1
    """Ranks that share all experts of a layer: whole ones, or a part of each."""
    kv_heads: int | None = None
    """Key and value heads: more ranks than these hold copies.  None: as many as there are ranks."""
    tied: bool = False
    """True if the head is the embedding, also where the folder has both."""
    tower: int = 1
    """Ranks that share each matrix of a tower."""

    def has(self, name: str, layer: int | None) -> bool:
        """Return True if the rank holds a part of this tensor, of a layer or (None) of none."""
        if _TOWER.search(name):
            return not self.layers.start
        if layer is not None:
            return layer in self.layers
        if "lm_head" in name:
            return self.is_last and not self.tied
        return "embed" not in name or not self.layers.start or (self.is_last and self.tied)

    def parts(self, name: str, *, is_expert: bool) -> int:
        """Return among how many ranks a matrix is divided."""
        if _TOWER.search(name):
            return 1 if _WHOLE_OF_TOWER.search(name) else self.tower
        if is_expert:
            return self.experts
        if _WHOLE.search(name):
            return 1
        return min(self.tp, self.kv_heads or self.tp) if _KEYS.search(name) else self.tp


def stored_bytes(
    tensors: Iterable[StoredTensor],
    wanted: Quantization,
    published: Quantization,
    share: Share,
    *,
    element_bytes: int = 2,
    router_bytes: int | None = None,
    further: bool = False,
    allocated: bool = False,
) -> dict[str, int]:
    """Return the bytes of one rank's weights by part: `layers`, `experts` and `others`.

    Floating-point tensors but for scales count `element_bytes` an element, routers `router_bytes` if stated.  If
    `wanted` is not the published format, the matrices of layers are quantized so.  Vectors other than scales are
    whole on each rank.  `further`: only the layers that predict further tokens, which are those of the share or named
    so.  `allocated`: as torch's allocator holds what an engine merges them into.
    """
    sizes: dict[tuple[str, str], int] = {}
    turns = wanted.name != published.name and wanted.bits < 16
    for tensor in tensors:
        matched, is_further = _LAYER.search(tensor.name), _FURTHER.search(tensor.name) is not None
        layer = None if matched is None or _TOWER.search(tensor.name) else int(matched[1])
        if is_further or further:
            if not further or not (is_further or (layer is not None and layer in share.layers)):
                continue
        elif not share.has(tensor.name, layer):
            continue
        kept = _KEPT.search(tensor.name) is not None or _TOWER.search(tensor.name) is not None or layer is None
        is_expert = not kept and _EXPERT.search(tensor.name) is not None
        part = "others" if kept else "experts" if is_expert else "layers"
        is_divided = len(tensor.shape) > 1 or is_expert or "absmax" in tensor.name
        divided = share.parts(tensor.name, is_expert=is_expert) if is_divided else 1
        is_turned = turns and not kept and len(tensor.shape) > 1 and not (is_expert and wanted.keeps_experts)
        of_element = router_bytes if router_bytes and _ROUTER.search(tensor.name) else element_bytes
        merged = (part, _MERGED.sub("", tensor.name))
        size = _tensor_bytes(tensor, wanted if is_turned else None, divided, of_element)
        sizes[merged] = sizes.get(merged, 0) + size
    parts = dict.fromkeys(("layers", "experts", "others"), 0)
    for (part, _), size in sizes.items():
        parts[part] += allocated_bytes(size) if allocated else size
    return {name: size for name, size in parts.items() if size}


def _tensor_bytes(tensor: StoredTensor, wanted: Quantization | None, divided: int, element_bytes: int) -> int:
    """Return the bytes of a tensor's part; `wanted`: the format into which it is turned, if it is."""
    if tensor.dtype not in _FLOATS or _SCALES.search(tensor.name):
        return ceil(tensor.bytes / divided)
    if wanted is not None:
        *stacked, rows, columns = tensor.shape
        return prod(stacked) * wanted.bytes(ceil(rows / divided), columns)
    return ceil(element_bytes * prod(tensor.shape) / divided)
