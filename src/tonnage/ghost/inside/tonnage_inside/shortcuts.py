"""Work that torch does again and again with the same answer, done once.

Nothing here changes what is allocated or launched; a torch that does not have what is replaced is left as it is.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from tonnage_recorder.imports import after_import


def install() -> None:
    """Take the shortcuts in torch's parts when they are imported."""
    after_import("torch.distributed.tensor._sharding_prop", _sharding)
    after_import("torch.distributed.tensor._sharding_prop", _shapes)
    after_import("torch.distributed.tensor._api", _no_constructor)
    after_import("torch.distributed.tensor._api", _signatures)
    after_import("torch.distributed.tensor._dtensor_spec", _specs)
    after_import("torch.distributed._functional_collectives", _results_of_exchanges)
    after_import("torch.distributed.fsdp._fully_shard._fsdp_param", _own_chunks)
    after_import("torch.distributed.device_mesh", _one_mesh)


def _sharding(module: ModuleType) -> None:
    """How the results of a foreach or fused operation are divided, DTensor finds for each tensor by going over all.

    Result i follows from the i-th tensor of each list alone, and the hundreds of parameters of a network are of a
    dozen kinds (shape, dtype, placement): one of each kind is asked for, and answers for all like it.  Where tensors
    would have to be moved first, torch decides about the whole list as ever.
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
    """An operation on other arguments; what newer versions compare it by is found anew."""
    forgotten = {name: None for name in ("_comparison_key",) if hasattr(operation, name)}
    return dataclasses.replace(operation, args_schema=arguments, **forgotten)


def _shapes(module: ModuleType) -> None:
    """DTensor learns the shape of an operation's result from fake tensors, which take milliseconds to be made.

    The operation says the same of meta tensors.  Where a device is named, which a meta tensor is not on, and where
    the operation has nothing to say of them, torch asks its way.
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

    def of_result(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return None
        return module.TensorMeta(shape=result.shape, stride=result.stride(), dtype=result.dtype)

    @functools.wraps(original)
    def propagate(propagator: Any, operation: Any) -> Any:
        asked = (operation.args_schema, operation.kwargs_schema)
        if any(isinstance(leaf, torch.device) for leaf in tree_leaves(asked)) or not _has_tensor(asked, module):
            return original(propagator, operation)
        try:
            args, options = tree_map_only(module.DTensorSpec, on_meta, asked)
            found = operation.op(*args, **options)
        except (RuntimeError, NotImplementedError):
            return original(propagator, operation)
        if isinstance(found, list | tuple):
            return type(found)(of_result(each) for each in found)
        return of_result(found)

    setattr(module.ShardingPropagator, name, propagate)


def _has_tensor(asked: Any, module: ModuleType) -> bool:
    """Whether an operation is given a tensor: else it makes one, on a device that goes without saying."""
    from torch.utils._pytree import tree_leaves

    return any(isinstance(leaf, module.DTensorSpec) for leaf in tree_leaves(asked))


def _is_foreach(operation: Any) -> bool:
    return str(operation.op.name()).startswith(("aten::_foreach_", "aten::_fused_"))


def _kinds(operation: Any, spec: type) -> list[tuple[Any, ...]]:
    """The i-th tensors of all lists of a foreach operation, for each i; empty where there is no such list."""
    lists = [a for a in operation.args_schema if isinstance(a, list | tuple) and a and isinstance(a[0], spec)]
    if any(len(items) != len(lists[0]) for items in lists):
        return []
    return list(zip(*lists, strict=True))


def _picked(argument: Any, chosen: list[int], count: int) -> Any:
    """Of a list with one item for each tensor, the chosen items."""
    if isinstance(argument, list | tuple) and len(argument) == count:
        return type(argument)(argument[index] for index in chosen)
    return argument


def _no_constructor(module: ModuleType) -> None:
    """DTensor's constructor asks whether anything is compiled or exported around it, and then does nothing.

    Three layers of functions, for each result of each operation; what makes the tensor is `__new__`.
    """
    tensor: Any = getattr(module, "DTensor", None)
    if tensor is not None and "__init__" in vars(tensor):

        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            """As torch's own, outside of any compiler."""

        tensor.__init__ = construct


def _signatures(module: ModuleType) -> None:
    """How many arguments the functions around a module take is looked up for each module, of a few functions."""
    if getattr(module, "inspect", None) is not inspect:
        return
    known: dict[Any, inspect.Signature] = {}

    def signature(function: Any) -> inspect.Signature:
        if not isinstance(function, functools.partial):
            return inspect.signature(function)
        kind = function.func, len(function.args), *function.keywords
        if kind not in known:
            known[kind] = inspect.signature(function)
        return known[kind]

    own = ModuleType(inspect.__name__)
    vars(own).update(vars(inspect), signature=signature)
    module.inspect = own  # type: ignore[attr-defined]


_HASHED = ("mesh", "placements", "tensor_meta", "shard_order")
"""What a DTensor's specification is known by."""


def _specs(module: ModuleType) -> None:
    """How a DTensor is divided is looked through whenever it is said, for each result of each operation.

    In which order its placements divide it follows from them alone: it is found once for each, and what was found so
    is not looked through again.
    """
    spec: Any = getattr(module, "DTensorSpec", None)
    if spec is None or not hasattr(spec, "_verify_shard_order") or not hasattr(spec, "compute_default_shard_order"):
        return

    def set_attribute(self: Any, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _HASHED and "_hash" in vars(self):
            object.__setattr__(self, "_hash", None)

    spec.compute_default_shard_order = staticmethod(functools.cache(spec.compute_default_shard_order))
    spec.__setattr__ = set_attribute


def _results_of_exchanges(module: ModuleType) -> None:
    """What an exchange gives is waited for by the first operation on it, whose arguments torch takes apart as a tree.

    Nearly all are a few tensors and numbers in a row; whether an operation makes a view is known once it was asked.
    """
    result: Any = getattr(module, "AsyncCollectiveTensor", None)
    if result is None or not hasattr(module, "_is_view_op"):
        return
    import torch

    original = vars(result)["__torch_dispatch__"].__func__
    module._is_view_op = makes_view = functools.cache(module._is_view_op)  # type: ignore[attr-defined]

    def dispatch(kind: Any, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs or operation is torch.ops.aten.view.default or not all(map(_is_leaf, args)):
            return original(kind, operation, types, args, kwargs or {})
        view = makes_view(operation)
        plain = [(each.elem if view else each.trigger_wait()) if isinstance(each, result) else each for each in args]
        found = operation(*plain)
        if not view:
            return found
        return result(found) if isinstance(found, torch.Tensor) else type(found)(map(result, found))

    result.__torch_dispatch__ = classmethod(dispatch)


def _is_leaf(argument: Any) -> bool:
    """Whether an operation's argument has no tensors inside."""
    if isinstance(argument, list | tuple):
        return all(isinstance(each, int) for each in argument)
    return not isinstance(argument, dict)


def _one_mesh(module: ModuleType) -> None:
    """FSDP2 puts its mesh and that of tensor parallelism together for each parameter: once does for all."""
    mesh: Any = getattr(module, "DeviceMesh", None)
    original: Callable[[list[Any]], Any] | None = getattr(mesh, "_concatenate", None)
    if original is None:
        return
    made: dict[tuple[int, ...], tuple[list[Any], Any]] = {}  # with what it is made of, whose identities stay theirs

    @functools.wraps(original)
    def concatenate(meshes: list[Any]) -> Any:
        key = tuple(map(id, meshes))
        if key not in made:
            made[key] = list(meshes), original(meshes)
        return made[key][1]

    mesh._concatenate = staticmethod(concatenate)


def _own_chunks(module: ModuleType) -> None:
    """FSDP2 makes a view of each parameter for every rank and keeps two of them: those asked for are enough."""
    original: Callable[..., Sequence[Any]] | None = getattr(module, "_chunk_with_empty", None)
    if original is None:
        return

    @functools.wraps(original)
    def chunks(tensor: Any, num_chunks: int, dim: int) -> Sequence[Any]:
        return _Chunks(tensor, num_chunks, dim) if tensor.size(dim) else original(tensor, num_chunks, dim)

    module._chunk_with_empty = chunks  # type: ignore[attr-defined]


class _Chunks(Sequence[Any]):
    """What `torch.chunk` gives, filled up with empty tensors to `count`, each made when it is asked for."""

    def __init__(self, tensor: Any, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        place = range(self._count)[index]
        whole = self._tensor.size(self._dim)
        size = -(-whole // self._count)
        start = place * size
        if start >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(size, whole - start))
