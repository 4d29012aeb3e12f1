"""Counts the FLOPs and the bytes read and written by the operations of a step, as they are dispatched.

A mode of torch's dispatcher sees each operation with its tensors, in backward too.  It may change when a tensor is
freed, so it is on only when times are wanted and memory has been recorded.  Operations that launch nothing (views,
allocations) are not counted.
"""

import json
import os
import zipfile
from array import array
from collections.abc import Callable, Iterator
from typing import Any

_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "set_")
"""In-place operations that overwrite a tensor without reading it."""

_ROWS = ("embedding", "index_select", "gather", "take", "index", "take_along_dim", "_embedding_bag")
"""Operations that read only the part of a table that they return."""

_SCATTERED = (
    "index_put_",
    "scatter_",
    "scatter_add_",
    "index_add_",
    "index_copy_",
    "index_fill_",
    "_index_put_impl_",
)
"""Operations that write only the part of a table that they are given values for."""


_LEFT = ("grads",)
"""Arguments that a fused optimizer may write (gradients that a scaler scaled) and usually does not."""


class OperationCounter:
    """Counts the operations of one process between `start` and `stop`; `phase` returns the current phase.

    Each operation is noted with the fields of `tonnage.trace.operations.Operation`.
    """

    def __init__(self, torch: Any, native: Any, phase: Callable[[], str]) -> None:
        self._torch = torch
        self._native = native
        self._phase = phase
        self._flops = _flops(torch)
        self._mode: Any = None
        self._rows: dict[tuple[Any, ...], int] = {}
        self._places = array("q")
        self._passed_on: dict[str, int] = {}
        self._began = self._ended = 0

    def start(self) -> None:
        """Start counting."""
        from torch.utils._python_dispatch import TorchDispatchMode

        counter, torch = self, self._torch

        class Mode(TorchDispatchMode):  # type: ignore[misc]  # torch is not imported where types are checked
            """Runs each operation and counts it."""

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if any(_dispatches(kind, torch) for kind in types):
                    counter._pass_on(args, kwargs)
                    return NotImplemented  # what it does with its plain tensors comes here later
                return counter._count(func, args, kwargs or {})

        self._began = self._native.log_count()
        self._mode = Mode()
        self._mode.__enter__()

    def stop(self) -> bool:
        """Stop counting; return whether all was counted: a program's own modes may have removed this one."""
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        self._ended = self._native.log_count()
        if _get_current_dispatch_mode() is not self._mode:
            return False
        self._mode.__exit__(None, None, None)
        return True

    def write(self, path: str, phases: Callable[[int], str]) -> None:
        """Write a file that `tonnage.trace.operations` reads; `phases` returns the phase of a mark."""
        log = self._native.log_bytes()[64 * self._began : 64 * self._ended]
        marks = sorted({int.from_bytes(log[at : at + 4], "little") for at in range(4, len(log), 64)})
        document = {
            "rows": [list(row) for row in self._rows],
            "names": self._native.names(),
            "phases": {str(mark): phases(mark) for mark in marks},
            "passed_on": self._passed_on,
        }
        partial = f"{path}.partial"
        with zipfile.ZipFile(partial, "w") as archive:
            archive.writestr("worked.json", json.dumps(document))
            archive.writestr("worked.places", self._places.tobytes())
            archive.writestr("worked.log", log)
        os.replace(partial, path)

    def _pass_on(self, *given: Any) -> None:
        """Count by phase the tensors of classes that implement operations in Python by other operations."""
        phase = self._phase()
        count = sum(_dispatches(type(tensor), self._torch) for tensor in self._tensors(given))
        self._passed_on[phase] = self._passed_on.get(phase, 0) + count

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        before = self._native.log_count()
        with self._torch._C.DisableTorchFunction():  # it has been through what the program, or the ghost, does there
            result = func(*args, **kwargs)
        after = self._native.log_count()
        kernels = self._native.launched(before) if after > before else 0
        if kernels:
            given = len(list(self._tensors((args, kwargs))))
            row = (self._phase(), *self._row(func, args, kwargs, result, kernels), given)
            self._places.extend(
                (self._rows.setdefault(row, len(self._rows)), before - self._began, after - self._began)
            )
        return result

    def _row(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, kernels: int) -> tuple[Any, ...]:
        name = func._schema.name.partition("::")[2]
        given = [tensor for tensor in self._tensors((args, kwargs)) if tensor.is_cuda]
        returned = [tensor for tensor in self._tensors(result) if tensor.is_cuda]
        moved = self._moved(func, name, args, kwargs, given, returned)
        first = next((tensor for tensor in given if tensor.is_floating_point()), None)
        dtype = "" if first is None else str(first.dtype).removeprefix("torch.")
        flops = self._flops_of(func, name, args, kwargs, result, given, returned)
        if not flops:
            return name, "pass", dtype, 0, moved, kernels, True, False, 0
        if dtype == "float32" and self._torch.backends.cuda.matmul.allow_tf32:
            dtype = "tf32"
        if "attention" in name:
            causal = bool(_argument(func, args, kwargs, "is_causal"))
            masked = any(_argument(func, args, kwargs, one) is not None for one in ("attn_bias", "bias"))
            tokens = int(_argument(func, args, kwargs, "key").shape[-2])
            name = f"{name} masked" if masked else name
            return name, "attention", dtype, flops, moved, kernels, True, causal, tokens
        aligned = all(_is_aligned(tensor) for tensor in given if tensor.dim() >= 2)
        return name, "product", dtype, flops, moved, kernels, aligned, False, 0

    def _flops_of(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        given: list[Any],
        returned: list[Any],
    ) -> int:
        if name == "_grouped_mm":
            left, right = given[0], given[1]
            return int(2 * left.shape[0] * left.shape[1] * right.shape[-1])
        formula = self._flops.get(func._overloadpacket)
        if formula is None:
            return 0
        # torch's formulas have no place for the dtype of a product's result (`addmm.dtype`)
        factors = [argument for argument in args if not isinstance(argument, self._torch.dtype)]
        return int(formula(*factors, **kwargs, out_val=result))

    def _moved(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], given: list[Any], returned: list[Any]
    ) -> int:
        """Return the bytes that an operation reads and writes."""
        written = [
            tensor
            for argument, value in _named(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name not in _LEFT
            for tensor in self._tensors(value)
            if tensor.is_cuda
        ]
        inplace = {id(tensor) for tensor in written}
        if name in _ROWS:
            return sum(2 * _bytes(tensor) for tensor in returned) + sum(map(_bytes, given[1:]))
        if name in _SCATTERED:
            values = [tensor for tensor in given if id(tensor) not in inplace]
            return sum(3 * _bytes(tensor) for tensor in values)
        overwrites = name.removeprefix("_foreach_") in _OVERWRITES or "out" in func._overloadname
        read = [tensor for tensor in given if not (overwrites and id(tensor) in inplace)]
        new = [tensor for tensor in returned if id(tensor) not in inplace]
        return sum(map(_bytes, (*read, *written, *new)))

    def _tensors(self, value: Any) -> Iterator[Any]:
        if isinstance(value, self._torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            for each in value:
                yield from self._tensors(each)
        elif isinstance(value, dict):
            for each in value.values():
                yield from self._tensors(each)


def _dispatches(kind: Any, torch: Any) -> bool:
    """Return whether a tensor class (DTensor, a quantized one) implements operations by others."""
    return kind.__torch_dispatch__ not in (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)


def _flops(torch: Any) -> dict[Any, Callable[..., int]]:
    """Return torch's own FLOP formulas, by operation."""
    from torch.utils.flop_counter import flop_registry

    return dict(flop_registry)


def _named(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of the schema with their values."""
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args) and not argument.kwarg_only:
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _argument(func: Any, args: Any, kwargs: dict[str, Any], name: str) -> Any:
    return next((value for argument, value in _named(func, args, kwargs) if argument.name == name), None)


def _bytes(tensor: Any) -> int:
    """Return the bytes of a tensor's elements, each once where an expanded tensor repeats it."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or size <= 1 else 1
    return int(count * tensor.element_size()) if tensor.numel() else 0


def _is_aligned(tensor: Any) -> bool:
    """Return whether rows begin at multiples of 16 bytes."""
    longest = max((stride for stride in tensor.stride()), default=1)
    return bool(longest * tensor.element_size() % 16 == 0)
