"""Formats of quantized weights: what they make of a matrix, and which matrices they leave as they are.

`find_quantization("awq-int4").bytes(rows, columns)` returns the bytes of a matrix with its scales.  Embeddings, head,
router, norms and biases keep 16 bits, as engines leave them by default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final

from tonnage.catalog.spelling import closest
from tonnage.errors import CannotEstimate, UsageError


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """One format of weights."""

    name: str
    """Name on the command line."""
    bits: int
    """Bits of an element."""
    scale_bytes: float = 0
    """Bytes of the scale of a block, with its own scales."""
    zero_bits: int = 0
    """Bits of the zero point of a block."""
    group: int = 0
    """Elements of a row that share a scale; 0: all of them (a scale for each row); -1: one scale for the matrix."""
    square: bool = False
    """True if blocks are squares of `group` by `group`."""
    experts_only: bool = False
    """True if only experts are quantized."""
    keeps_experts: bool = False
    """True if experts keep 16 bits."""
    scratch_bits: int = 0
    """Bits of an element of the copy that 16-bit multiplication makes of one matrix at a time; 0: none."""
    computes_as: str = "bf16"
    """Dtype of products where the card has it: a field of `Peaks`."""
    activation_bytes: int = 2
    """Bytes of an element of a product's input, which is quantized first where it is less than 2."""
    online: bool = False
    """True if an engine quantizes 16-bit weights while it loads them; else the checkpoint is quantized already."""
    flags: Mapping[str, str] | None = None
    """vLLM's options for it; None: the checkpoint's configuration states it."""
    method: str = ""
    """vLLM's method for it, as configurations name it in `quant_method`."""

    def bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix of so many outputs and inputs, with its scales and zero points."""
        elements = rows * columns
        return ceil(elements * self.bits / 8) + self.overhead_bytes(rows, columns)

    def overhead_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of the scales and zero points of such a matrix."""
        if self.group < 0:
            blocks = 1
        elif self.group == 0:
            blocks = rows
        elif self.square:
            blocks = ceil(rows / self.group) * ceil(columns / self.group)
        else:
            blocks = rows * ceil(columns / self.group)
        return ceil(blocks * (self.scale_bytes + self.zero_bits / 8))


NONE: Final = Quantization(name="none", bits=16)

QUANTIZATIONS: Final = (
    NONE,
    Quantization(
        name="fp8",
        bits=8,
        scale_bytes=4,
        group=-1,
        computes_as="fp8",
        activation_bytes=1,
        online=True,
        flags={"--quantization": "fp8"},
        method="fp8",
    ),
    Quantization(
        name="fp8-channel",
        bits=8,
        scale_bytes=4,
        computes_as="fp8",
        activation_bytes=1,
        method="compressed-tensors",
    ),
    Quantization(
        name="fp8-block",
        bits=8,
        scale_bytes=4,
        group=128,
        square=True,
        computes_as="fp8",
        activation_bytes=1,
        method="fp8",
    ),
    Quantization(
        name="int8", bits=8, scale_bytes=4, computes_as="int8", activation_bytes=1, method="compressed-tensors"
    ),
    Quantization(name="int8-weight", bits=8, scale_bytes=2, group=128, method="gptq"),
    Quantization(
        name="nf4",
        bits=4,
        scale_bytes=4,
        group=64,
        scratch_bits=16,
        online=True,
        flags={"--quantization": "bitsandbytes"},
        method="bitsandbytes",
    ),
    Quantization(
        name="nf4-double", bits=4, scale_bytes=1 + 4 / 256, group=64, scratch_bits=16, method="bitsandbytes"
    ),
    Quantization(name="gptq-int4", bits=4, scale_bytes=2, zero_bits=4, group=128, method="gptq"),
    Quantization(name="awq-int4", bits=4, scale_bytes=2, zero_bits=4, group=128, method="awq"),
    Quantization(
        name="mxfp4",
        bits=4,
        scale_bytes=1,
        group=32,
        online=True,
        flags={"--quantization": "mxfp4"},
        method="mxfp4",
    ),
    Quantization(
        name="nvfp4", bits=4, scale_bytes=1, group=16, computes_as="fp4", activation_bytes=1, method="modelopt_fp4"
    ),
)
"""All formats, in the order of help texts."""

NAMES: Final = tuple(item.name for item in QUANTIZATIONS)

_OTHER_NAMES: Final = {
    **{"bf16": "none", "fp16": "none", "float16": "none", "bfloat16": "none", "auto": "none"},
    **{"awq": "awq-int4", "awq_marlin": "awq-int4", "gptq": "gptq-int4", "gptq_marlin": "gptq-int4"},
    **{"int4": "gptq-int4", "w4a16": "gptq-int4", "w8a8": "int8", "bitsandbytes": "nf4", "bnb": "nf4"},
    **{
        "fp8-dynamic": "fp8-channel",
        "fp8_e4m3": "fp8",
        "compressed-tensors": "fp8-channel",
        "deepseek-fp8": "fp8-block",
    },
}
"""Names that engines and checkpoints use."""


def find_quantization(name: str) -> Quantization:
    """Return the format of this name.  Raises UsageError for an unknown one, with the closest."""
    wanted = name.strip().lower()
    wanted = _OTHER_NAMES.get(wanted, wanted)
    for item in QUANTIZATIONS:
        if item.name == wanted.replace("_", "-"):
            return item
    near = closest(wanted, NAMES, limit=1)
    hint = f" Close: {near[0]}." if near else ""
    raise UsageError(f"Unknown quantization {name!r}.{hint} Possible: {', '.join(NAMES)}.")


BITSANDBYTES: Final[Mapping[str, Mapping[str, Any]]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}
"""Formats to which bitsandbytes quantizes 16-bit weights while transformers loads them, with its settings."""

_ONE_TENSOR: Final = (5, 0)
"""Version from which on transformers has the experts of a layer in one tensor, which bitsandbytes leaves as it is."""


def made_by_transformers(quantization: Quantization, version: tuple[int, ...]) -> Quantization:
    """Return a format as this version of transformers makes it of 16-bit weights."""
    is_made = quantization.name in BITSANDBYTES and version >= _ONE_TENSOR
    return replace(quantization, keeps_experts=True) if is_made else quantization


def describe_format(quantization: Quantization) -> str:
    """Return the format in a word or two that stand before `weights`: `fp8`, `16-bit`."""
    return quantization.name if quantization.bits < NONE.bits else "16-bit"


def read_quantization(stated: Any) -> Quantization:
    """Return the format of a checkpoint's `quantization_config`.  Raises CannotEstimate for an unknown one."""
    if not isinstance(stated, Mapping):
        raise CannotEstimate("The quantization_config of the checkpoint cannot be read: it is no table.")
    method = str(stated.get("quant_method") or stated.get("quant_algo") or "").lower()
    return replace(_read_method(method, stated), method=method.removesuffix("_marlin"))


def keeps_fp8_cache(stated: Any) -> bool:
    """Return True if a checkpoint's `quantization_config` says that keys and values are kept in 8-bit floats."""
    if not isinstance(stated, Mapping):
        return False
    scheme = stated.get("kv_cache_scheme") or stated.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    return isinstance(scheme, str) and scheme.lower() == "fp8"


def _read_method(method: str, stated: Mapping[str, Any]) -> Quantization:
    """Return the format of a checkpoint of a method."""
    try:
        if method == "fp8" and stated.get("weight_block_size"):
            return replace(find_quantization("fp8-block"), group=_whole(stated["weight_block_size"][0]))
        if method in ("fp8", "fbgemm_fp8"):
            return find_quantization("fp8" if method == "fp8" else "fp8-channel")
        if method in ("gptq", "awq", "gptq_marlin", "awq_marlin"):
            return _grouped(method.split("_")[0], stated)
        if method == "bitsandbytes":
            if stated.get("load_in_8bit"):
                return replace(find_quantization("int8"), computes_as="bf16")
            return find_quantization("nf4-double" if stated.get("bnb_4bit_use_double_quant") else "nf4")
        if method == "mxfp4":
            return replace(find_quantization(method), experts_only=True, online=False, flags=None)
        if method == "nvfp4":
            return find_quantization(method)
        if method in ("modelopt", "modelopt_fp4"):
            return find_quantization("nvfp4" if "FP4" in str(stated.get("quant_algo", "NVFP4")).upper() else "fp8")
        if method == "compressed-tensors":
            return _compressed(stated)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise CannotEstimate(f"The quantization_config of the checkpoint cannot be read ({method}).") from None
    raise CannotEstimate(
        f"The checkpoint's quantization {method!r} is not known, only {', '.join(NAMES[1:])}; run its engine: "
        "tonnage dry-run --gpu NAME -- vllm serve MODEL."
    )


def _grouped(method: str, stated: Mapping[str, Any]) -> Quantization:
    """Return GPTQ's or AWQ's format with the bits and groups of the checkpoint."""
    bits, group = _whole(stated.get("bits") or stated.get("w_bit") or 4), stated.get("group_size", 128)
    base = find_quantization(f"{method}-int4" if bits < 8 else "int8-weight")
    group = 0 if group in (-1, None) else _whole(group)
    return replace(base, bits=bits, group=group, zero_bits=bits)


def _compressed(stated: Mapping[str, Any]) -> Quantization:
    """Return the format of a `compressed-tensors` checkpoint, by its first group of layers."""
    group = next(iter(stated["config_groups"].values()))
    weights, inputs = group["weights"], group.get("input_activations")
    bits, kind = _whole(weights["num_bits"]), weights.get("type", "int")
    size = weights.get("group_size")
    if kind == "float" and bits == 8:
        if weights.get("strategy") == "block":
            return find_quantization("fp8-block")
        return find_quantization("fp8" if weights.get("strategy") == "tensor" else "fp8-channel")
    if kind == "float":
        return replace(find_quantization("nvfp4"), group=_whole(size or 16))
    if bits == 8 and inputs:
        return find_quantization("int8")
    base = find_quantization("gptq-int4" if bits < 8 else "int8-weight")
    return replace(base, bits=bits, group=_whole(size or 0), zero_bits=0 if weights.get("symmetric", True) else bits)


def _whole(value: Any) -> int:
    """Return a number of a checkpoint's configuration.  Raises ValueError for anything else."""
    if type(value) is not int or not 0 <= value <= 2**20:
        raise ValueError(value)
    return value
