"""A user's own network in a step: its weights, dtypes and ties are kept, also while the ranks divide them.

A network that is not sharded is used as it is, on this rank's device.  One that is sharded loses its memory, as an
estimate builds it, goes through the same changes, and each rank then fills its own slices from the weights that were
set aside.  A weight is recognised by the module that holds it, because wrappers change names.  Stages of a pipeline
are cut from copies without memory, so that the network itself stays whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
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
        names = {id(module): name for name, module in network.named_modules()}
        self._names: dict[int, str] = {}  # the first name of each tensor
        for (module, name), tensor in (*self.parameters, *self.buffers):
            self._names.setdefault(id(tensor), f"{names[id(module)]}.{name}".removeprefix("."))
        self._copies: list[nn.Module] = []
        self._origins: dict[int, tuple[nn.Module, nn.Module]] = {}
        """Each module of a copy, or in another one's place, by id, with the module that it stands for."""
        self._replaced: dict[int, nn.Module] = {}
        """The module that stands in the place of another one, by the other's id."""

    def take(self, device: torch.device, *, without_memory: bool, copied: bool = False) -> nn.Module:
        """Return the network on the device; `without_memory` it is on meta, with its ties, or `copied` from there."""
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
        return self._copy() if copied else self.network

    def _copy(self) -> nn.Module:
        made = copy.deepcopy(self.network)
        pairs = zip(made.modules(), self.network.modules(), strict=True)
        self._origins |= {id(own): (own, origin) for own, origin in pairs}
        self._copies.append(made)
        return made

    def _origin(self, module: nn.Module) -> nn.Module:
        """Return the module that this one stands for; any other as it is."""
        return self._origins.get(id(module), (module, module))[1]

    def note_replaced(self, module: nn.Module, new: nn.Module) -> None:
        """Note that a technique put `new`, which has the same parameters, in a module's place."""
        if new is not module:
            self._origins[id(new)] = new, self._origin(module)
            self._replaced[id(module)] = new

    def named(self) -> list[tuple[str, torch.Tensor]] | None:
        """Return what this rank has of a copied network, its parameters and saved buffers, by their names in the
        network; None if nothing was copied.

        A tied parameter has its first name, also where another rank has the module of that name.
        """
        if not self._copies:
            return None
        own = {(id(module), name): tensor for (module, name), tensor in (*self.parameters, *self.buffers)}
        found: dict[str, torch.Tensor] = {}
        for (module, name), tensor in self._copied_slots():
            origin = self._origin(module)
            if (id(origin), name) in own and name not in module._non_persistent_buffers_set:
                found.setdefault(self._names[id(own[id(origin), name])], tensor)
        return list(found.items())

    def _now(self, module: nn.Module) -> nn.Module:
        """Return the module that is in this one's place now."""
        return self._replaced.get(id(module), module)

    def _copied_slots(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        for made in self._copies:
            yield from _slots(made, "_parameters")
            yield from _slots(made, "_buffers")

    def fill(self, network: nn.Module) -> None:
        """Copy the weights into the memory that a sharded network got; each rank copies its own slices.

        Adapters that the step added get their usual first values.
        """
        given = {(id(module), name): tensor for (module, name), tensor in (*self.parameters, *self.buffers)}
        with torch.no_grad():
            for store in ("_parameters", "_buffers"):
                for (module, name), tensor in _slots(network, store):
                    slot = id(self._origin(module)), name
                    if slot in given:
                        _copy_own_part(tensor, given[slot])
        own_modules = {id(module) for (module, _), _ in self.parameters}
        for module in network.modules():
            if hasattr(module, "reset_lora_parameters"):
                for name, adapter in module.lora_A.items():
                    if id(self._origin(adapter)) not in own_modules:
                        module.reset_lora_parameters(name, True)

    def release(self) -> None:
        """Free the memory of the whole weights, of which each rank now has its slices."""
        for (module, name), parameter in self.parameters:
            if self._now(module)._parameters.get(name) is not parameter:
                parameter.data = torch.empty(0, dtype=parameter.dtype)

    def current(self, stages: Any = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return every parameter and buffer of before with its value of now, whole and on its device of before.

        Tied ones come once.  All ranks must call it; `stages` is the group of ranks that hold a stage each.
        """
        return [(tensor, value.to(self.devices[id(tensor)])) for tensor, value in self._whole(stages)]

    def state(self, network: nn.Module, stages: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole values of a copied network's state_dict by their names.  All ranks must call it."""
        slots = [(module._parameters[name], tensor) for (module, name), tensor in self.parameters]
        slots += [(module._buffers[name], tensor) for (module, name), tensor in self.buffers]
        origins = {id(empty): id(tensor) for empty, tensor in slots}
        names: dict[int, list[str]] = {}
        for name, empty in network.state_dict(keep_vars=True).items():
            names.setdefault(origins[id(empty)], []).append(name)
        for tensor, value in self._whole(stages):
            for name in names.get(id(tensor), ()):
                yield name, value

    def _whole(self, stages: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield every parameter and buffer of before with its whole value of now; tied ones once."""
        reshard(self.network, *self._copies)
        slots = [(slot, tensor, self._now(slot[0])._parameters[slot[1]]) for slot, tensor in self.parameters]
        slots += [(slot, tensor, self._now(slot[0])._buffers[slot[1]]) for slot, tensor in self.buffers]
        if not self._copies:
            once = {id(tensor): (tensor, held) for _, tensor, held in slots if held is not None}
            yield from ((tensor, gather(held)) for tensor, held in once.values())
            return
        present = {(id(self._origin(module)), name): held for (module, name), held in self._copied_slots()}
        here: dict[int, torch.Tensor | None] = {}
        for (module, name), tensor, _ in slots:
            held = present.get((id(module), name))
            here[id(tensor)] = held if held is not None else here.get(id(tensor))
        empty = {id(tensor): (tensor, held) for _, tensor, held in slots}
        device = next(held.device for held in here.values() if held is not None)
        for owner, (key, held) in zip(_find_owners(here.values(), stages, device), here.items(), strict=True):
            tensor, like = empty[key]
            whole = torch.empty_like(like, dtype=self.dtypes[key], device=device) if held is None else gather(held)
            whole = whole.to(device, self.dtypes[key]).contiguous()
            dist.broadcast(whole, group_src=owner, group=stages)
            yield tensor, whole

    def give_back(self, values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give the parameters and buffers of before these values, each where it was."""
        for tensor, value in values:
            tensor.grad = None
            if value.data_ptr() != tensor.data_ptr() or value.dtype != self.dtypes[id(tensor)]:
                tensor.data = value.to(self.devices[id(tensor)], self.dtypes[id(tensor)])


def _find_owners(here: Iterable[torch.Tensor | None], stages: Any, device: torch.device) -> list[int]:
    """Return the first rank of a pipeline that has each tensor; `here` has None for what this rank lacks."""
    own, count = dist.get_rank(stages), dist.get_world_size(stages)
    owners = torch.tensor([count if held is None else own for held in here], device=device)
    dist.all_reduce(owners, op=dist.ReduceOp.MIN, group=stages)
    return [int(owner) for owner in owners.tolist()]


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


def reshard(*networks: nn.Module) -> None:
    """Free what ranks have gathered: a forward without backward leaves parameters whole under zero2."""
    for network in networks:
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
