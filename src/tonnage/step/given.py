"""A user's own network in a step: its weights, dtypes and ties are kept, also while the ranks divide them.

A network that is not sharded is used as it is, on this rank's device.  One that is sharded loses its memory, as an
estimate builds it, goes through the same changes, and each rank then fills its own slices from the weights that were
set aside.  A weight is recognised by the module that holds it, because wrappers change names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Slot = tuple[nn.Module, str]
"""A module, and the name under which it holds a parameter or buffer."""

_NO_MEMORY: Final = torch.device("meta")


class GivenNetwork:
    """A network that the user made, and what belongs to it from before the step."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.parameters = list(_slots(network, "_parameters"))
        """Every parameter with where it is; tied ones several times."""
        self.buffers = list(_slots(network, "_buffers"))
        """Every buffer with where it is."""
        self.devices = {id(tensor): tensor.device for _, tensor in (*self.parameters, *self.buffers)}
        """The device on which each of them was."""
        self.dtypes = {id(tensor): tensor.dtype for _, tensor in (*self.parameters, *self.buffers)}
        """Its dtype: PEFT casts what is not quantized."""

    def take(self, device: torch.device, *, without_memory: bool) -> nn.Module:
        """Return the network on the device; `without_memory` it is on meta, with its ties."""
        if not without_memory:
            is_there = all(tensor.device == device for _, tensor in (*self.parameters, *self.buffers))
            return self.network if is_there else self.network.to(device)  # weights in 8 bits cannot be moved
        made: dict[int, torch.Tensor] = {}
        for (module, name), parameter in self.parameters:
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device=_NO_MEMORY)
                made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for (module, name), buffer in self.buffers:
            module._buffers[name] = made.setdefault(id(buffer), torch.empty_like(buffer, device=_NO_MEMORY))
        return self.network

    def fill(self, network: nn.Module) -> None:
        """Copy the weights into the memory that a sharded network got; each rank copies its own slices.

        Adapters that the step added get their usual first values.
        """
        given = {(id(module), name): tensor for (module, name), tensor in (*self.parameters, *self.buffers)}
        with torch.no_grad():
            for store in ("_parameters", "_buffers"):
                for (module, name), tensor in _slots(network, store):
                    if (id(module), name) in given:
                        _copy_own_part(tensor, given[id(module), name])
        own_modules = {id(module) for (module, _), _ in self.parameters}
        for module in network.modules():
            if hasattr(module, "reset_lora_parameters"):
                for name, adapter in module.lora_A.items():
                    if id(adapter) not in own_modules:
                        module.reset_lora_parameters(name, True)

    def release(self) -> None:
        """Free the memory of the whole weights, of which each rank now has its slices."""
        for (module, name), parameter in self.parameters:
            if module._parameters.get(name) is not parameter:
                parameter.data = torch.empty(0, dtype=parameter.dtype)

    def current(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return every parameter and buffer of before with its value of now, whole and on its device of before.

        Tied ones come once.  All ranks must call it.
        """
        reshard(self.network)
        slots = [(tensor, module._parameters[name]) for (module, name), tensor in self.parameters]
        slots += [(tensor, module._buffers[name]) for (module, name), tensor in self.buffers]
        once = {id(tensor): (tensor, held) for tensor, held in slots if held is not None}
        return [(tensor, gather(held).to(self.devices[key])) for key, (tensor, held) in once.items()]

    def give_back(self, values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give the parameters and buffers of before these values, each where it was."""
        for tensor, value in values:
            tensor.grad = None
            if value.data_ptr() != tensor.data_ptr() or value.dtype != self.dtypes[id(tensor)]:
                tensor.data = value.to(self.devices[id(tensor)], self.dtypes[id(tensor)])


def reshard(network: nn.Module) -> None:
    """Free what ranks have gathered: a forward without backward leaves parameters whole under zero2."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of the ranks' shards, also of a plain part under tensor parallelism.

    All ranks must call it.
    """
    layout, part = getattr(tensor, "part_of", None), tensor.detach()
    if layout is not None:
        part = as_part_of(layout, part)
    return part.full_tensor() if isinstance(part, DTensor) else part


def as_part_of(layout: DTensor, part: torch.Tensor) -> DTensor:
    """Return a rank's plain part as the DTensor that is laid out like `layout`; it shares the part's memory."""
    return DTensor.from_local(
        part, layout.device_mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride()
    )


def _copy_own_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor, or the slice of it that this rank holds, which alone goes to the target's device."""
    layout = getattr(target, "part_of", target)
    if isinstance(layout, DTensor):
        for axis, placement in enumerate(layout.placements):
            if not placement.is_replicate():
                ranks = layout.device_mesh.size(axis)
                parts, _ = placement._split_tensor(whole, ranks, with_padding=False, contiguous=False)
                whole = parts[layout.device_mesh.get_local_rank(axis)]
    held = target.to_local() if isinstance(target, DTensor) else target
    held.copy_(whole)


def _slots(network: nn.Module, store: str) -> Iterator[tuple[Slot, Any]]:
    """Yield the parameters or buffers of a network with where they are."""
    for module in network.modules():
        for name, tensor in getattr(module, store).items():
            if tensor is not None:
                yield (module, name), tensor
