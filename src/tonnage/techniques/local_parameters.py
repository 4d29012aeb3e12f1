"""Plain parameters of modules that compute with DTensors, so that DDP and every optimizer can take them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


def keep_local(module: Any, mesh: DeviceMesh, made: dict[Any, Any], *, works_on_local: bool) -> None:
    """Replace the module's DTensors by plain parameters and buffers, of which DTensors are made for each forward.

    A module that works on plain tensors gets no DTensors. torch's own hooks for this (those of DDP with a 2-D mesh)
    make new parameters in each step, which neither DDP nor an optimizer knows.  `made` has the plain parameters so
    far: modules that share one continue to share it.
    """
    from torch.distributed.tensor import DTensor

    layouts: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        if isinstance(parameter, DTensor):
            layouts[name] = (parameter.placements, parameter.shape, parameter.stride())
            if parameter not in made:
                made[parameter] = _local_parameter(parameter)
            module._parameters[name] = made[parameter]
    for name, buffer in module._buffers.items():  # torch's styles replicate them, such as Gemma's scale of embeddings
        if isinstance(buffer, DTensor):
            layouts[name] = (buffer.placements, buffer.shape, buffer.stride())
            module._buffers[name] = buffer.to_local()
    if layouts and not works_on_local:
        module.register_forward_pre_hook(partial(_set_dtensors, mesh=mesh, layouts=layouts), prepend=True)
        module.register_forward_hook(partial(_unset_dtensors, layouts=layouts), always_call=True)


def _local_parameter(parameter: Any) -> Any:
    """Return this rank's part as a parameter, which notes what it is `part_of` and whether it is `divided`."""
    from torch import nn

    local: Any = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    local.part_of = parameter  # on the meta device: the layout by which weights are cut and gathered
    local.divided = not all(placement.is_replicate() for placement in parameter.placements)
    return local


def _set_dtensors(module: Any, _arguments: Any, *, mesh: DeviceMesh, layouts: dict[str, Any]) -> None:
    from torch.distributed.tensor import DTensor

    for name, (placements, shape, stride) in layouts.items():
        local = module._parameters[name] if name in module._parameters else module._buffers[name]
        module.__dict__[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )  # an attribute of the instance hides the parameter of that name


def _unset_dtensors(module: Any, _arguments: Any, _output: Tensor, *, layouts: dict[str, Any]) -> None:
    for name in layouts:
        module.__dict__.pop(name, None)
