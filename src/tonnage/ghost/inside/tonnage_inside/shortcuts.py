"""Patches of torch that avoid work whose cost grows with the number of parameters, operations or ranks.

For example the sharding of a fused optimizer's results over 700 parameters, which are of a dozen kinds: torch derives
it for each from all of them.  The patches change no allocation and no launch.  A torch that lacks a patched function
stays as it is.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from tonnage_recorder.imports import after_import


def install() -> None:
    """Patch torch's modules when they are imported."""
    after_import("torch.distributed.tensor._sharding_prop", _sharding)
    after_import("torch.distributed.tensor._sharding_prop", _shapes)
    after_import("torch.distributed.fsdp._fully_shard._fsdp_param", _own_chunks)


def _sharding(module: ModuleType) -> None:
    """Derive the sharding of a foreach or fused operation's results once per kind of tensor.

    Result i depends only on the i-th tensor of each list, and the hundreds of parameters of a network are of a dozen
    kinds (shape, dtype, placement).  torch therefore decides about one tensor of each kind, and the answer is copied
    to the others.  If tensors would have to be redistributed first, torch decides about the whole list.
    """
    original: Callable[[Any, Any], Any] | None
    original = getattr(module.ShardingPropagator, "propagate_op_sharding_non_cached", None)
    if original is None:
        return

    @functools.wraps(original)
    def propagate(propagator: Any, operation: Any) -> Any:
        kinds = _kinds(operation, module.DTensorSpec) if _is_foreach(operation) else []
        if len(set(kinds)) == len(kinds):
            return original(propagator, operation)
        first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
        chosen = sorted(first.values())
        fewer = tuple(_picked(argument, chosen, len(kinds)) for argument in operation.args_schema)
        short = original(propagator, _on(operation, fewer))
        if short.needs_redistribute:
            return original(propagator, operation)
        if short.output_spec is None:
            return short
        answers = dict(zip(chosen, short.output_spec, strict=True))
        specs = (answers[first[kind]] for kind in kinds)
        return dataclasses.replace(
            short, output_spec=tuple(spec.shallow_copy_with_tensor_meta(spec.tensor_meta) for spec in specs)
        )

    module.ShardingPropagator.propagate_op_sharding_non_cached = propagate


def _on(operation: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the operation with other arguments, without the comparison key that newer versions cache."""
    forgotten = {name: None for name in ("_comparison_key",) if hasattr(operation, name)}
    return dataclasses.replace(operation, args_schema=arguments, **forgotten)


def _shapes(module: ModuleType) -> None:
    """Derive the shapes of an operation's results from meta tensors instead of fake ones, which take milliseconds.

    torch keeps its own way for operations that name a device, take no tensor, or do not run on meta tensors.
    """
    name = "_propagate_tensor_meta_non_cached"
    original: Callable[[Any, Any], Any] | None = getattr(module.ShardingPropagator, name, None)
    if original is None:
        return
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    def on_meta(spec: Any) -> Any:
        of = spec.tensor_meta
        return torch.empty_strided(of.shape, of.stride, dtype=of.dtype, device="meta")

    def meta_of(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return None
        return module.TensorMeta(shape=result.shape, stride=result.stride(), dtype=result.dtype)

    @functools.wraps(original)
    def propagate(propagator: Any, operation: Any) -> Any:
        arguments = (operation.args_schema, operation.kwargs_schema)
        has_device = any(isinstance(leaf, torch.device) for leaf in tree_leaves(arguments))
        if has_device or not _has_tensor(arguments, module):
            return original(propagator, operation)
        try:
            args, options = tree_map_only(module.DTensorSpec, on_meta, arguments)
            results = operation.op(*args, **options)
        except (RuntimeError, NotImplementedError):
            return original(propagator, operation)
        if isinstance(results, list | tuple):
            return type(results)(meta_of(each) for each in results)
        return meta_of(results)

    setattr(module.ShardingPropagator, name, propagate)


def _has_tensor(arguments: Any, module: ModuleType) -> bool:
    """Return whether an operation takes a tensor; one that takes none creates it on the default device."""
    from torch.utils._pytree import tree_leaves

    return any(isinstance(leaf, module.DTensorSpec) for leaf in tree_leaves(arguments))


def _is_foreach(operation: Any) -> bool:
    return str(operation.op.name()).startswith(("aten::_foreach_", "aten::_fused_"))


def _kinds(operation: Any, spec: type) -> list[tuple[Any, ...]]:
    """Return, for each i, the i-th tensors of all lists of a foreach operation; empty if it has no such list."""
    lists = [a for a in operation.args_schema if isinstance(a, list | tuple) and a and isinstance(a[0], spec)]
    if any(len(items) != len(lists[0]) for items in lists):
        return []
    return list(zip(*lists, strict=True))


def _picked(argument: Any, chosen: list[int], count: int) -> Any:
    """Return the chosen items of a list with one item per tensor; any other argument unchanged."""
    if isinstance(argument, list | tuple) and len(argument) == count:
        return type(argument)(argument[index] for index in chosen)
    return argument


def _own_chunks(module: ModuleType) -> None:
    """Create only those views of a parameter that FSDP2 uses: it chunks for every rank, and keeps two."""
    original: Callable[..., Sequence[Any]] | None = getattr(module, "_chunk_with_empty", None)
    if original is None:
        return

    @functools.wraps(original)
    def chunks(tensor: Any, num_chunks: int, dim: int) -> Sequence[Any]:
        return _Chunks(tensor, num_chunks, dim) if tensor.size(dim) else original(tensor, num_chunks, dim)

    module._chunk_with_empty = chunks  # type: ignore[attr-defined]


class _Chunks(Sequence[Any]):
    """The result of `torch.chunk`, padded with empty tensors to `count`; each item is created on access."""

    def __init__(self, tensor: Any, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        position = range(self._count)[index]
        whole = self._tensor.size(self._dim)
        size = -(-whole // self._count)
        start = position * size
        if start >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(size, whole - start))
