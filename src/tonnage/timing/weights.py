"""Weights of one rank, and how many of them are trained."""

from tonnage.timing.adapters import has_adapter
from tonnage.timing.layer import products
from tonnage.timing.operations import Slice
from tonnage.timing.shape import Shape
from tonnage.timing.work import Work


def rank_weights(shape: Shape, work: Work) -> float:
    """Return the weights of one rank before data parallelism divides them.

    These are its stage's layers, and its part of each matrix.
    """
    all_experts = shape.expert_layers * shape.experts * shape.expert_parameters if shape.experts else 0
    plain = (shape.parameters - all_experts) / (work.axes.tp * work.axes.pp)
    return plain + expert_weights(shape, work)


def expert_weights(shape: Shape, work: Work) -> float:
    """Return the weights of routed experts among those of one rank."""
    if not shape.experts:
        return 0.0
    axes = work.axes
    each = axes.ep * axes.pp * (1 if work.experts_whole else axes.tp)
    return shape.expert_layers * shape.experts * shape.expert_parameters / each


def trained_weights(shape: Shape, work: Work, weights: float) -> float:
    """Return how many of a rank's `weights` are trained: all, or adapters beside the linear modules of its layers."""
    if not work.lora_rank:
        return weights
    adapted = (one for one in products(shape, _ONE_TOKEN) if has_adapter(one.name, work.adapted))
    widths = sum(product.k + product.n for product in adapted)
    return work.lora_rank * widths * shape.layers / (work.axes.tp * work.axes.pp)


def count_modules(shape: Shape) -> int:
    """Return the linear modules of a layer."""
    return 7 if shape.gated else 6


def count_tensors(shape: Shape, work: Work) -> int:
    """Return the tensors of a layer: matrices and norms, and two of each adapter."""
    return count_modules(shape) + shape.norms + _count_adapter_tensors(shape, work)


def count_trained_tensors(shape: Shape, work: Work) -> int:
    """Return the trained tensors of a layer: those of its adapters where it has any, otherwise all."""
    return _count_adapter_tensors(shape, work) if work.lora_rank else count_tensors(shape, work)


def _count_adapter_tensors(shape: Shape, work: Work) -> int:
    if not work.lora_rank:
        return 0
    return 2 * sum(has_adapter(one.name, work.adapted) for one in products(shape, _ONE_TOKEN))


_ONE_TOKEN = Slice(tokens=1, seq_len=1)
"""Slice whose products have the widths of whole matrices."""
