"""Layers with a state of fixed size, read from a Hugging Face configuration: Mamba, linear attention, convolutions.

Shapes of states and the tensors of a step are those of vLLM 0.33 (`mamba_utils.py`, `mamba_mixer.py`,
`mamba_mixer2.py`).
"""

from collections.abc import Mapping
from typing import Any, Final

from tonnage.serving.kv_cache import LayerCache

_HEADS: Final = ("mamba_n_heads", "mamba_num_heads", "num_heads")
"""Fields that state the heads of a Mamba layer: Mamba-2 has some, Mamba none."""


def read_state(text: Mapping[str, Any], kind: str, word: str, tp: int, drafted: int = 0) -> LayerCache:
    """Return what a layer keeps of a request on one rank; `word` is its kind in a list of layers.

    `drafted` tokens lengthen what a convolution keeps, as some of them may be rejected.

    Raises KeyError for a field that the configuration lacks.
    """
    stated = text.get("mamba_ssm_cache_dtype", "float32") if kind == "nemotron_h" else text.get("mamba_ssm_dtype")
    wide = 4 if stated == "float32" else 2
    hidden = text["hidden_size"]
    if word in ("conv", "short_conv"):  # LFM2
        return _of_size(2 * (text["conv_L_cache"] - 1) * hidden // tp)
    if word in ("linear_attention", "linear") and "linear_num_value_heads" in text:  # gated delta net (Qwen3-Next)
        keys = text["linear_key_head_dim"] * text["linear_num_key_heads"]
        values = text["linear_value_head_dim"] * text["linear_num_value_heads"]
        return _delta_net(text, kind, keys, values, wide, tp, drafted)
    if word in ("linear_attention", "linear"):  # lightning attention (MiniMax)
        width = text.get("head_dim") or hidden // text["num_attention_heads"]
        return _of_size(2 * text["num_attention_heads"] // tp * width * width)
    heads = next((text[name] for name in _HEADS if text.get(name)), None)
    if word == "mamba" and heads is None:
        return _mamba(text, kind, wide, tp)
    return _mamba2(text, text["num_heads"] if heads is None else heads, wide, tp, drafted)


def _of_size(state_bytes: int) -> LayerCache:
    return LayerCache(kind="state", state_bytes=int(state_bytes))


def _delta_net(
    text: Mapping[str, Any], kind: str, keys: int, values: int, wide: int, tp: int, drafted: int
) -> LayerCache:
    """Return a layer of a gated delta net.

    Alive in a step: what is projected (queries, keys, values and a gate), the output, the gate's copy, the normed
    output and the projected one.  Qwen3-Next, whose projection mixes them by heads, also has them apart and joined
    again.
    """
    convolved = 2 * keys + values
    size = (
        2 * (text["linear_conv_kernel_dim"] - 1 + drafted) * convolved + wide * values * text["linear_key_head_dim"]
    )
    alive = (convolved + values) + 3 * values
    if kind.startswith("qwen3_next"):
        alive += 2 * convolved
    alive = alive // tp + text["hidden_size"]
    state = "delta net" if kind.startswith("qwen") else ""  # others have layers of their own
    return LayerCache(kind="state", state_bytes=size // tp, state=state, inner_elements=alive)


def _mamba(text: Mapping[str, Any], kind: str, wide: int, tp: int) -> LayerCache:
    """Return a layer of Mamba.  Alive in a step: what comes in and its gate, and a copy of the former."""
    inner = text.get("intermediate_size") if kind.endswith("mamba") else None  # Jamba: of its other layers
    inner = (inner or (text.get("mamba_expand") or text.get("expand", 2)) * text["hidden_size"]) // tp
    kernel = text.get("mamba_d_conv") or text.get("conv_kernel", 4)
    states = text.get("mamba_d_state") or text.get("state_size", 16)
    size = int(2 * inner * (kernel - 1) + wide * inner * states)
    return LayerCache(kind="state", state_bytes=size, inner_elements=3 * inner)


def _mamba2(text: Mapping[str, Any], heads: int, wide: int, tp: int, drafted: int) -> LayerCache:
    """Return a layer of Mamba-2.  Alive in a step: what is projected, the output, two copies of what is convolved."""
    width = text.get("mamba_d_head") or text.get("mamba_head_dim") or text["head_dim"]
    states = text.get("mamba_d_state") or text.get("ssm_state_size") or text["state_size"]
    groups = text.get("mamba_n_groups") or text.get("n_groups") or 1
    kernel = text.get("mamba_d_conv") or text.get("conv_kernel", 4)
    if groups % tp:
        groups = tp
    convolved = (heads * width + 2 * groups * states) // tp
    size = int(2 * (kernel - 1 + drafted) * convolved + wide * heads * width * states // tp)
    inner = heads * width // tp
    alive = (inner + convolved + heads // tp) + inner + 2 * convolved
    return LayerCache(kind="state", state_bytes=size, state="mamba2", inner_elements=alive)
