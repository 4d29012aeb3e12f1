"""Operations that DeepSpeed compiles at first use: Adam's kernels, for minutes, and files (ZeRO-Infinity).

The latter need libaio and a compiler.  DeepSpeed's Python code makes states, buffers and lists of what is where, and
that is run; the kernels do nothing, and a file keeps no values here, as the card keeps none.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy


def patch(policy: Policy, module: ModuleType) -> None:
    """Of `deepspeed.ops.op_builder.builder`."""

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        policy.use("compiled_adam")

    on_card = SimpleNamespace(multi_tensor_adam=nothing)
    on_host = SimpleNamespace(create_adam=nothing, adam_update=nothing, destroy_adam=nothing)
    files = SimpleNamespace(aio_handle=_files(policy.torch, lambda: policy.use("swapped")))
    module.OpBuilder._loaded_ops |= {
        **{"fused_adam": on_card, "cpu_adam": on_host},
        **{"async_io": files, "pin_memory": SimpleNamespace(pin_handle=files.aio_handle)},
    }


def _files(torch: Any, used: Callable[[], None]) -> type:
    """What DeepSpeed calls `aio_handle`; `used` hears of each one that is made."""

    class Handle:
        """Counts what was begun, as the real one does; locked memory is the process's own (not the driver's)."""

        def __init__(
            self, block_size: int, queue_depth: int, *_: Any, intra_op_parallelism: int = 1, **__: Any
        ) -> None:
            used()
            self._block_size, self._queue_depth, self._threads = block_size, queue_depth, intra_op_parallelism
            self._under_way = 0
            self._locked: set[int] = set()

        def get_block_size(self) -> int:
            return self._block_size

        def get_queue_depth(self) -> int:
            return self._queue_depth

        def get_intra_op_parallelism(self) -> int:
            return self._threads

        def get_alignment(self) -> int:
            return 512 * self._threads

        def new_cpu_locked_tensor(self, elements: int, like: Any) -> Any:
            made = torch.empty(elements, dtype=like.dtype)
            self._locked.add(made.untyped_storage().data_ptr())
            return made

        def free_cpu_locked_tensor(self, tensor: Any) -> bool:
            self._locked.discard(tensor.untyped_storage().data_ptr())
            return True

        def is_pinned(self, tensor: Any) -> bool:
            return tensor.untyped_storage().data_ptr() in self._locked or bool(tensor.is_pinned())

        def async_pread(self, *_: Any) -> int:
            self._under_way += 1
            return 0

        async_pwrite = async_pread

        def sync_pread(self, *_: Any) -> int:
            return 1

        sync_pwrite = read = write = sync_pread

        def wait(self) -> int:
            done, self._under_way = self._under_way, 0
            return done

    return Handle
