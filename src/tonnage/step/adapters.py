"""LoRA's adapters beside matrices that ranks share, by torch's styles: divided where the matrix is.

Of a matrix that is cut by its rows (queries, gate), A is whole on every rank and B has the rows of the matrix; of one
that is cut by its columns (projections back to the model's width), A has its columns and B is whole.  What goes from
A to B is as wide as the rank of the adapter, so that little is exchanged; PEFT divides them so, too.
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
    """Whether PEFT has put this one in the place of another."""
    return hasattr(module, "lora_A")


def styles(
    name: str, layer: Any, kind: str, style: ParallelStyle, between: Placement
) -> Iterator[tuple[str, ParallelStyle]]:
    """How a module's matrix and its adapters are divided, by their names.

    `kind` is transformers' name for the matrix's `style`, `between` how hidden states between blocks are laid out.
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
    """A style whose exchange is over when the module returns.

    A layer that runs again does so until the last of its products has what it needs, which is an adapter's, before
    the sum of both is taken; and of products that were kept nothing is asked again.  Nobody would wait for what is
    exchanged ahead of them, and torch would keep what is sent until its watchdog comes by.
    """

    def __init__(self, style: ParallelStyle) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        divided: nn.Module = self.style._apply(module, device_mesh)
        divided.register_forward_hook(_wait)
        return divided


def _wait(_module: nn.Module, _inputs: Any, output: Any) -> None:
    local = output.to_local() if isinstance(output, DTensor) else output
    if isinstance(local, AsyncCollectiveTensor):
        local.trigger_wait()


class Whole(ParallelStyle):  # type: ignore[misc]
    """A module that every rank has whole, alike on all; of plain tensors it makes DTensors that are whole, too.

    With `local` what it returns is a plain tensor.
    """

    def __init__(self, *, local: bool) -> None:
        super().__init__()
        self.local = local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=_as_dtensors, output_fn=self._as_wanted)

    def _as_wanted(self, _module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Any:
        return output.to_local() if self.local else output


class OnParts(ParallelStyle):  # type: ignore[misc]
    """A linear module that every rank has whole and applies to its part; gradients are the sum over all parts.

    By plain tensors: up to torch 2.11 DTensor cannot flatten several sequences that are divided.
    """

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        divided: nn.Module = distribute_module(module, device_mesh)
        divided.forward = partial(self._forward, divided)
        return divided

    def _forward(self, module: Any, given: DTensor) -> DTensor:
        weight, bias = (None if one is None else _of_all_parts(one) for one in (module.weight, module.bias))
        output = functional.linear(given.to_local(), weight, bias)
        return DTensor.from_local(output, given.device_mesh, [self.layout], run_check=False)


def _of_all_parts(whole: DTensor) -> Any:
    return whole.to_local(grad_placements=[Partial()])


def _as_dtensors(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    [given] = inputs
    if isinstance(given, DTensor):
        return inputs
    return (DTensor.from_local(given, mesh, [Replicate()], run_check=False),)
