"""The Shape of a network, read from its Hugging Face configuration.

    read_shape({"model_type": "llama", "hidden_size": 4096, ...}).parameters

`decoders` reads the kinds whose configurations have Llama's fields, `classics` and `encoders` the others.  Tests
build each kind and compare its count of weights, its norms and its biases.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Final

from tonnage.errors import UnknownNetwork
from tonnage.timing.classics import CLASSICS
from tonnage.timing.decoders import DECODERS, read_decoder
from tonnage.timing.encoders import ENCODERS
from tonnage.timing.shape import Shape

_READERS: Final[dict[str, Callable[[Mapping[str, Any]], Shape]]] = {
    **dict.fromkeys(DECODERS, read_decoder),
    **CLASSICS,
    **ENCODERS,
}

KINDS: Final = tuple(_READERS)
"""Values of `model_type` whose networks have a Shape."""

TIMED: Final = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "olmo2", "granite"),
        *("phi", "phi3", "deepseek_v2", "deepseek_v3", "gpt_oss", "gpt2", "gpt_neox", "opt", "bert", "modernbert"),
    }
)
"""Kinds of which steps were measured."""

_MOST_SHAPES: Final = 64
_SHAPES: Final[dict[int, tuple[dict[str, Any], Shape]]] = {}
"""Shapes by the identity of their configuration, each with a copy of that: a search reads one ten thousand times."""


def read_shape(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of a config.json.  Raise UnknownNetwork, with one line, for a kind that is not known."""
    known = _SHAPES.get(id(config))
    if known is None or known[0] != config:
        if len(_SHAPES) >= _MOST_SHAPES:
            _SHAPES.clear()
        known = _SHAPES[id(config)] = dict(config), _read(config)
    return known[1]


def _read(config: Mapping[str, Any]) -> Shape:
    kind = str(config.get("model_type"))
    reader = _READERS.get(kind)
    if reader is None:
        known = f"Known: {len(KINDS)} kinds of decoders and encoders of text."
        raise UnknownNetwork(f"The time of a {kind!r} network is not known; its memory is. {known}")
    try:
        shape = reader(config)
        _check_numbers(shape)
    except KeyError as missing:
        raise UnknownNetwork(f"The configuration of this {kind} network does not say {missing}.") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UnknownNetwork(f"The dimensions of this {kind} network cannot be read ({error}).") from None
    return replace(shape, unmeasured="" if kind in TIMED else kind)


_NUMBERS: Final = {"int": (int,), "int | None": (int, type(None)), "float": (int, float)}
"""Types of a field's value by its annotation; booleans and texts are made by the readers, not read."""


def _check_numbers(shape: Shape) -> None:
    """Raise ValueError where a field is not a number, e.g. one for which transformers has a default."""
    for item in fields(shape):
        value = getattr(shape, item.name)
        allowed = _NUMBERS.get(str(getattr(item.type, "__name__", item.type)))
        if allowed is not None and (isinstance(value, bool) or not isinstance(value, allowed)):
            raise ValueError(f"{item.name} is {'not stated' if value is None else repr(value)[:40]}")
