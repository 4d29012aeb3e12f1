"""Operations that DeepSpeed compiles at first use: Adam's kernels, for minutes, and files (ZeRO-Infinity).

The latter need libaio and a compiler.  DeepSpeed's Python code, which creates states, buffers and their tables, is
run; the kernels do nothing, and a file keeps no values here, as the card keeps none.  Its host optimizers' queries of
the processor are answered from /proc/cpuinfo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .policy import Policy


def patch(policy: Policy, module: ModuleType) -> None:
    """Patch `deepspeed.ops.op_builder.builder`."""

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        policy.use("compiled_adam")

    on_card = SimpleNamespace(multi_tensor_adam=nothing)
    on_host = SimpleNamespace(create_adam=nothing, adam_update=nothing, destroy_adam=nothing)
    files = SimpleNamespace(aio_handle=_files(policy.torch, lambda: policy.use("swapped")))
    module.OpBuilder._loaded_ops |= {
        **{"fused_adam": on_card, "cpu_adam": on_host},
        **{"async_io": files, "pin_memory": SimpleNamespace(pin_handle=files.aio_handle)},
    }


HOST_OPTIMIZERS: Final = ("deepspeed.ops.adam.cpu_adam", "deepspeed.ops.lion.cpu_lion")
"""Modules that read the processor's vendor, for a warning; py-cpuinfo reads everything, which takes a second."""


def answer_at_once(policy: Policy, module: ModuleType) -> None:
    """Replace py-cpuinfo's function in one of HOST_OPTIMIZERS that has imported it by name (0.19.2)."""
    if hasattr(module, "get_cpu_info"):
        vars(module)["get_cpu_info"] = _processor


def answer_some_at_once(policy: Policy, module: ModuleType) -> None:
    """Patch `cpuinfo` so that HOST_OPTIMIZERS (0.19.8) get only what they read, and other callers everything."""
    everything: Callable[[], dict[str, Any]] = module.get_cpu_info

    def get_cpu_info() -> dict[str, Any]:
        asker = sys._getframe(1).f_globals.get("__name__")
        return _processor() if asker in HOST_OPTIMIZERS else everything()

    module.get_cpu_info = get_cpu_info  # type: ignore[attr-defined]


def _processor() -> dict[str, str]:
    """Return the facts of the processor that HOST_OPTIMIZERS read."""
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for name, _, value in (line.partition(":") for line in lines):
            if name.strip() == "vendor_id":
                return {"vendor_id_raw": value.strip()}
    return {}


def _files(torch: Any, used: Callable[[], None]) -> type:
    """Return the class that DeepSpeed calls `aio_handle`; `used` is called for each object of it."""

    class Handle:
        """Counts begun operations, as the real one does; locked memory is the process's, not the driver's."""

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
