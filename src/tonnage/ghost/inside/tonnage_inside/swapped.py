"""DeepSpeed's tensors in files (ZeRO-Infinity): its asynchronous reads and writes without a file.

DeepSpeed compiles the operation at first use, for which it needs libaio and a compiler; its Python code makes buffers
and lists of what is where, and that is run.  A file keeps no values here, as the card keeps none.
"""

from collections.abc import Callable
from typing import Any


def operation(torch: Any, used: Callable[[], None]) -> type:
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
