"""The part of a tower for images that a tensor-parallel rank of an engine holds.

vLLM divides the matrices of its layers (`--mm-encoder-tp-mode weights`, the default).  What reads patches and the
table of their places are whole on each rank, as is all of a tower whose heads cannot be divided.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any, Final

from tonnage.model import text_part

TOWERS: Final = ("vision_config", "audio_config", "visual")
"""Fields of configurations with a tower."""

_ONE_MATRIX: Final = "mm_tokens_per_image"
"""Field of networks between whose tower and text is one matrix, whole on each rank (Gemma 3)."""


def tower_ranks(config: Mapping[str, Any], tp: int) -> int:
    """Return among how many of `tp` ranks the matrices of a tower are divided: all of them, or 1."""
    tower = _tower(config)
    heads = tower.get("num_heads") or tower.get("num_attention_heads")
    return tp if type(heads) is int and heads % tp == 0 else 1


def elements_on_rank(config: Mapping[str, Any], elements: int, tp: int) -> int:
    """Return how many of a tower's weights one of `tp` ranks holds."""
    ranks = tower_ranks(config, tp)
    whole = min(elements, _whole_elements(config))
    return whole + ceil((elements - whole) / ranks)


def _whole_elements(config: Mapping[str, Any]) -> int:
    """Return the weights that are whole on each rank; biases and norms, which are small, are not counted."""
    tower = _tower(config)
    width, side, size = (_number(tower.get(name)) for name in ("hidden_size", "patch_size", "image_size"))
    of_patch = 3 * side**2 * (_number(tower.get("temporal_patch_size")) or 1)
    places = _number(tower.get("num_position_embeddings")) or (size // side) ** 2 if side else 0
    joined = _number(text_part(config).get("hidden_size")) if _ONE_MATRIX in config else 0
    return width * (of_patch + places + joined)


def _tower(config: Mapping[str, Any]) -> Mapping[str, Any]:
    tower = config.get("vision_config")
    return tower if isinstance(tower, Mapping) else {}


def _number(value: Any) -> int:
    """Return a number of a configuration; 0 for anything else."""
    return value if type(value) is int and 0 < value < 10**6 else 0
