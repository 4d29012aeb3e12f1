"""Work that torch does again and again with the same answer, done once.

Nothing here changes what is allocated or launched; a torch that does not have what is replaced is left as it is.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .imports import after_import


def install() -> None:
    """Take the shortcuts in torch's parts when they are imported."""
    after_import("torch.distributed.tensor._sharding_prop", _strided_shards)


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
