"""Weights of a network that has no files here and no formula: those of the network that transformers builds."""

from dataclasses import replace
from typing import Final

from tonnage.errors import CannotEstimate, UnreadableModel
from tonnage.model import ModelRef
from tonnage.serving.network import ServedNetwork, generates_no_text, rough_shape
from tonnage.serving.safetensors import StoredTensor

_WITH_WORDS: Final = ("causal-lm", "image-text-to-text", "seq2seq", "speech-seq2seq")
"""Tasks of networks that answer in words."""


def complete_weights(network: ServedNetwork) -> ServedNetwork:
    """Return the network with all its weights in 16 bits, built without memory where they are not known otherwise.

    Raises CannotEstimate where transformers cannot build it.
    """
    if network.stored or (network.shape is not None and network.tower_elements is not None):
        return network
    reference = ModelRef(name=network.name, kind="config", config=dict(network.config))
    try:
        stored = _build(reference)
    except UnreadableModel as error:
        raise CannotEstimate(
            f"The weights of a {network.config.get('model_type')!r} network are not known ({error}); give its folder "
            "with safetensors files."
        ) from None
    is_rough = network.shape is None
    return replace(
        network,
        stored=stored,
        is_built=True,
        shape=rough_shape(reference) if is_rough else network.shape,
        is_rough=is_rough,
    )


def _build(reference: ModelRef) -> tuple[StoredTensor, ...]:
    """Return the weights of the network that transformers builds, each once."""
    import torch

    from tonnage.step import model

    if model.task(reference.config) not in _WITH_WORDS:
        raise generates_no_text(reference.name, reference.config.get("model_type"))
    built = model.build(reference, dtype=torch.bfloat16, attention=None, device=torch.device("meta"))
    return tuple(
        StoredTensor(name=name, dtype="BF16", shape=tuple(weight.shape), bytes=2 * weight.numel())
        for name, weight in built.named_parameters()
    )
