"""Work that torch does again and again with the same answer, done once.

Nothing here changes what is allocated or launched; a torch that does not have what is replaced is left as it is.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .imports import after_import


def install() -> None:
    """Take the shortcuts in torch's parts when they are imported."""
    after_import("torch.distributed.tensor._sharding_prop", _sharding)
    after_import("torch.distributed.fsdp._fully_shard._fsdp_param", _own_chunks)


def _sharding(module: ModuleType) -> None:
    _strided_shards(module)
    _lists_of_numbers(module)


def _strided_shards(module: ModuleType) -> None:
    """DTensor goes through all N tensors of a foreach operation for each of its N results, to find strided shards.

    For an optimizer step of hundreds of parameters that takes seconds.  Where there are none (FSDP2 alone), asking
    once for each operation is enough.
    """
    original: Callable[[Any, Any], None] | None = getattr(module, "_propagate_use_strided_shard_flag", None)
    if original is None:
        return
    latest: tuple[Any, bool] = (None, True)

    @functools.wraps(original)
    def propagate(strategy: Any, operation: Any) -> None:
        nonlocal latest
        if latest[0] is not operation:
            placements = (placement for spec in operation.args_spec for placement in spec.placements)
            latest = operation, any(isinstance(placement, module._StridedShard) for placement in placements)
        if latest[1]:
            original(strategy, operation)

    module._propagate_use_strided_shard_flag = propagate  # type: ignore[attr-defined]


def _lists_of_numbers(module: ModuleType) -> None:
    """To place each of N results of a foreach operation, DTensor copies its list of N numbers: the first one will do.

    Placement follows from the tensors; torch itself hands the whole list to each.
    """
    original: Callable[..., Any] | None = getattr(module, "_expand_single_dim_strategy_to_mesh", None)
    if original is None:
        return

    @functools.wraps(original)
    def expand(mesh: Any, operation: Any, *rest: Any) -> Any:
        if operation.op.name().startswith("aten::_foreach_"):
            shorter = tuple(_shortened(argument) for argument in operation.args_schema)
            operation = dataclasses.replace(operation, args_schema=shorter, _comparison_key=None)
        return original(mesh, operation, *rest)

    module._expand_single_dim_strategy_to_mesh = expand  # type: ignore[attr-defined]


def _shortened(argument: Any) -> Any:
    numbers = isinstance(argument, list | tuple) and all(isinstance(item, float | int) for item in argument)
    return argument[:1] if numbers else argument


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
