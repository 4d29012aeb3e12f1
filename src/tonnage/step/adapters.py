"""Tensor parallelism of LoRA's adapters: they are sharded along with the matrix that they stand beside.

Beside a column-parallel matrix, which is cut by rows (queries, gate), A is replicated and B is cut by rows.  Beside a
row-parallel matrix, which is cut by columns (projections back to the model's width), A is cut by columns and B is
replicated.  What passes from A to B is as wide as the adapter's rank, so that little is exchanged; PEFT divides them
the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def are_in(module: nn.Module) -> bool:
    """Return True if PEFT has replaced a module by this one."""
    return hasattr(module, "lora_A")


def styles(
    name: str, layer: Any, kind: str, style: ParallelStyle, between: Placement
) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield the parallel style of a module's matrix and of its adapters, with their names.

    `kind` is transformers' name for the matrix's `style`; `between` is the layout of hidden states between blocks.
    """
    local = between.is_replicate()
    yield f"{name}.base_layer", style if kind == "colwise" else Waited(style)
    for adapter in layer.lora_A:
        first, second = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
        if kind == "colwise":
            yield first, Whole(local=local)
            yield second, ColwiseParallel()
        else:
            yield first, Waited(RowwiseParallel(output_layouts=between, use_local_output=local))
            yield second, Whole(local=True) if local else OnParts(between)


class Waited(ParallelStyle):  # type: ignore[misc]
    """A style whose communication has finished when the module returns.

    A layer that runs again stops at the last product that it needs.  That product is an adapter's, and comes before
    the sum of both; products that were kept are not computed again.  Nobody would wait for communication that was
    started earlier, and torch would keep its buffers until the watchdog frees them.
    """

    def __init__(self, style: ParallelStyle) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        divided: nn.Module = self.style._apply(module, device_mesh)
        divided.register_forward_hook(_wait_for_output)
        return divided


def _wait_for_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
    local = output.to_local() if isinstance(output, DTensor) else output
    if isinstance(local, AsyncCollectiveTensor):
        local.trigger_wait()


class Whole(ParallelStyle):  # type: ignore[misc]
    """A module that is replicated on every rank; plain tensors that it gets become replicated DTensors.

    With `local` it returns a plain tensor.
    """

    def __init__(self, *, local: bool) -> None:
        super().__init__()
        self.local = local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=_inputs_as_dtensors, output_fn=self._convert_output)

    def _convert_output(self, _module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Any:
        return output.to_local() if self.local else output


class OnParts(ParallelStyle):  # type: ignore[misc]
    """A replicated linear module that each rank applies to its part; gradients are summed over all parts.

    It works on plain tensors: up to torch 2.11 DTensor cannot flatten several sequences that are sharded.
    """

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        divided: nn.Module = distribute_module(module, device_mesh)
        divided.forward = partial(self._forward, divided)
        return divided

    def _forward(self, module: Any, given: DTensor) -> DTensor:
        parameters = (module.weight, module.bias)
        weight, bias = (None if each is None else _sum_gradients_of_parts(each) for each in parameters)
        output = functional.linear(given.to_local(), weight, bias)
        return DTensor.from_local(output, given.device_mesh, [self.layout], run_check=False)


def _sum_gradients_of_parts(whole: DTensor) -> Any:
    return whole.to_local(grad_placements=[Partial()])


def _inputs_as_dtensors(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    [given] = inputs
    if isinstance(given, DTensor):
        return inputs
    return (DTensor.from_local(given, mesh, [Replicate()], run_check=False),)
