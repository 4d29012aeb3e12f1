"""Weights and optimizer states of a step by the names of parameters, whatever optimizers contain one another.

Plans compose optimizers: one for each parameter in backward, one on the host beside one on the card, one whose states
ranks divide.  Each of them ends in ordinary optimizers of torch; here their states are found under keys such as
`states.0.model.layers.1.mlp.up_proj.weight.exp_avg`, as DTensors where ranks divide a tensor, so that another number
of ranks finds its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tonnage.errors import UsageError
from tonnage.step.given import as_part_of
from tonnage.step.main_weights import MainOptimizer
from tonnage.techniques import disk

if TYPE_CHECKING:
    from tonnage.step.step import ReadyStep

Leaf = tuple[str, torch.optim.Optimizer, dict[int, str]]
"""The number of the step's optimizer, an ordinary optimizer inside it, and the names of its parameters by id."""

_NUMBERS: Final = {"int": int, "float": float, "bool": bool}
"""Kinds of plain numbers among states, which are saved as tensors."""


_INSIDE: Final = "~"
"""Mark between a quantized state and one of the tensors that it is made of."""

OF_RANK: Final = "@"
"""Mark before the rank that has a state of its own part of a parameter, such as torchao's codes and scales."""

_UNSIGNED: Final = ("exp_avg_sq", "max_exp_avg_sq")
"""States of torchao's optimizers that are never negative."""


class Range(torch.Tensor):  # type: ignore[misc]
    """A view of some elements of a flattened parameter, which torch's checkpoint stores as that part of it."""

    begin: int
    size_of_whole: torch.Size

    @staticmethod
    def of(tensor: torch.Tensor, begin: int, elements: int) -> Range:
        """Return a view of the tensor as the range from `begin` on of so many elements."""
        part: Range = torch.Tensor._make_subclass(Range, tensor.detach().view(-1))
        part.begin, part.size_of_whole = begin, torch.Size([elements])
        return part

    def size(self, *_: Any) -> torch.Size:
        """Return the size of the whole, to which torch compares what is stored."""
        return self.size_of_whole

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        [chunk] = self.__create_chunk_list__()
        data = TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor)),
            size=self.size_of_whole,
        )
        return [WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([self.begin]), sizes=torch.Size([self.numel()]))]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        plain: torch.Tensor = self.as_subclass(torch.Tensor)
        return plain


def parameter_names(ready: ReadyStep) -> dict[int, str]:
    """Return the name of each parameter in the network without DDP's wrapper, by id; a tied one has its first."""
    names: dict[int, str] = {}
    of_stage = None if ready.step.given is None else ready.step.given.named()
    for name, parameter in of_stage or ready.model.named_parameters():
        names.setdefault(id(parameter), _without_wrapper(name))
    return names


def weights(ready: ReadyStep) -> dict[str, torch.Tensor]:
    """Return the trained parameters by `weights.NAME`; if all are trained, every parameter and saved buffer."""
    whole = ready.step.job.method == "full"
    of_stage = None if ready.step.given is None else ready.step.given.named()
    saved = of_stage or ready.model.state_dict(keep_vars=True).items()
    taken = {id(parameter) for parameter in ready.model.parameters() if whole or parameter.requires_grad}
    once = {id(tensor): name for name, tensor in reversed(saved) if isinstance(tensor, torch.Tensor)}
    return {
        f"weights.{_without_wrapper(name)}": _as_dtensor(tensor)
        for name, tensor in saved
        if once.get(id(tensor)) == name and (whole or id(tensor) in taken)
    }


def states(ready: ReadyStep) -> dict[str, torch.Tensor]:
    """Return all optimizer states of this rank, and the main weights that a narrower network was copied from."""
    found: dict[str, torch.Tensor] = {}
    for number, optimizer, names in leaves(ready):
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter))
            for key, value in state.items() if name is not None else ():
                kind = type(value).__name__ if type(value).__name__ in _NUMBERS else None
                of_rank = f"{OF_RANK}{_own_rank()}" if _is_of_rank(optimizer, parameter, value) else ""
                value = value.to_local() if of_rank and isinstance(value, DTensor) else value
                if is_quantized(value):
                    for part in value.__tensor_flatten__()[0]:
                        found[f"states.{number}.{name}.{key}{_INSIDE}{part}{of_rank}"] = getattr(value, part)
                elif of_rank:
                    found[f"states.{number}.{name}.{key}{of_rank}"] = value
                elif isinstance(value, torch.Tensor):
                    found[f"states.{number}.{name}.{key}"] = _like_parameter(value, parameter)
                elif kind is not None:
                    found[f"states.{number}.{name}.{key}#{kind}"] = torch.tensor(value)
    found |= {f"main.{name}": _like_parameter(copy.detach(), copy) for name, copy in _main_weights(ready)}
    return found


def empty_states(ready: ReadyStep, sizes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
    """Return new tensors for those of the stored states that this rank's optimizers take, by the same keys.

    `sizes` are the sizes and dtypes of everything that is stored.
    """
    by_parameter: dict[str, list[str]] = {}
    for key in sizes:
        if key.startswith("states.") and key.partition(OF_RANK)[2] in ("", _own_rank()):
            by_parameter.setdefault(key.rpartition(".")[0], []).append(key)
    made: dict[str, torch.Tensor] = {}
    for number, optimizer, names in leaves(ready):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key in by_parameter.get(f"states.{number}.{names.get(id(parameter))}", ()):
                    made[key] = _empty(key, *sizes[key], parameter, group)
    main = _main_weights(ready)
    return made | {f"main.{name}": _like_parameter(torch.empty_like(copy), copy) for name, copy in main}


def put_states(ready: ReadyStep, loaded: Mapping[str, torch.Tensor]) -> None:
    """Give the optimizers the loaded states and no others, and the copies that they keep of parameters the values of
    now.
    """
    by_parameter: dict[str, list[str]] = {}
    for key in loaded:
        by_parameter.setdefault(key.rpartition(".")[0], []).append(key)
    for number, optimizer, names in leaves(ready):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                keys = by_parameter.get(f"states.{number}.{names.get(id(parameter))}", ())
                state = dict(_as_state(key.rpartition(".")[2], loaded[key], parameter) for key in keys)
                if state:
                    optimizer.state[parameter] = _put_together(state, optimizer, parameter)
                else:
                    optimizer.state.pop(parameter, None)
    with torch.no_grad():
        for name, copy in _main_weights(ready):
            copy.copy_(loaded[f"main.{name}"].as_subclass(torch.Tensor).view(copy.shape))
        for outer in ready.optimizers:
            for parameter, copy, _ in getattr(outer, "pairs", ()):
                copy.copy_(parameter)


def _is_of_rank(optimizer: Any, parameter: Any, value: Any) -> bool:
    """Return True for states of torchao's optimizers, which quantize what each rank has of a divided parameter."""
    is_part = isinstance(value, DTensor) or bool(getattr(parameter, "divided", False))
    return is_part and hasattr(optimizer, "_new_buffer")


def _own_rank() -> str:
    return str(dist.get_rank()) if dist.is_initialized() else "0"


def is_quantized(value: Any) -> bool:
    """Return True for a state of torchao, a tensor made of several: codes, scales and a table."""
    is_made_of_others = isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)
    return is_made_of_others and not isinstance(value, DTensor)


def _put_together(state: dict[str, Any], optimizer: Any, parameter: torch.Tensor) -> dict[str, Any]:
    """Return the states with those of torchao made of their parts: new ones of the optimizer's own, filled."""
    whole = {name: value for name, value in state.items() if _INSIDE not in name}
    for name, value in state.items():
        outer, _, part = name.partition(_INSIDE)
        if part:
            if outer not in whole:
                whole[outer] = optimizer._new_buffer(parameter, outer not in _UNSIGNED)
            own = whole[outer]
            getattr(own.to_local() if isinstance(own, DTensor) else own, part).copy_(value)
    return whole


def groups(ready: ReadyStep) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of every optimizer, by its number: the names of their parameters and the hyperparameters."""
    names = _names_of_updated(ready)
    return {
        str(number): [
            {
                "parameters": [names[id(parameter)] for parameter in group["params"]],
                "values": {key: _plain(value) for key, value in group.items() if key != "params"},
            }
            for group in optimizer.param_groups
        ]
        for number, optimizer in enumerate(ready.optimizers)
    }


def match_groups(
    ready: ReadyStep, saved: Mapping[str, list[dict[str, Any]]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each group of the optimizers, and of those inside them, with the hyperparameters that were saved for it.

    Raises UsageError if its parameters were in groups with other hyperparameters than each other's.
    """
    names = _names_of_updated(ready)
    matched = []
    for place, optimizer in _all_optimizers(ready):
        of_optimizer = saved.get(place.partition(".")[0], [])
        by_name = {name: group["values"] for group in of_optimizer for name in group["parameters"]}
        for index, group in enumerate(optimizer.param_groups):
            held = [names[id(parameter)] for parameter in group["params"]]
            known = [name for name in held if name in by_name]  # the first rank may have had none of these slices
            values = [by_name[name] for name in known] or [one["values"] for one in of_optimizer[index : index + 1]]
            other = next((name for name in known if by_name[name] != values[0]), None)
            if other is not None:
                raise UsageError(
                    f"The checkpoint has {known[0]} and {other} in groups with different hyperparameters, and this "
                    "optimizer has them in one; make the same groups."
                )
            matched += [(group, values[0])] if values else []
    return matched


def put_groups(matched: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Set the hyperparameters that `match_groups` returned, in place; lists become tuples again where they were."""
    for group, values in matched:
        for key, value in values.items():
            set_hyperparameter(group, key, tuple(value) if isinstance(value, list) else value)


def set_hyperparameter(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a hyperparameter of a group; torchao keeps the learning rate in a tensor, which must stay the same one."""
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _plain(value: Any) -> Any:
    """Return a hyperparameter as JSON can hold it: the number of a tensor."""
    return value.item() if isinstance(value, torch.Tensor) else value


def _names_of_updated(ready: ReadyStep) -> dict[int, str]:
    """Return the name of each parameter, and of each copy that an optimizer has in its place, by id."""
    names = parameter_names(ready)
    for optimizer in ready.optimizers:
        names |= {id(copy): names[id(parameter)] for parameter, copy, _ in getattr(optimizer, "pairs", ())}
        names |= dict(_copies(optimizer, names)) if isinstance(optimizer, MainOptimizer) else {}
    return names


def leaves(ready: ReadyStep) -> Iterator[Leaf]:
    """Yield the ordinary optimizers in which all others end."""
    names = parameter_names(ready)
    for number, optimizer in enumerate(ready.optimizers):
        yield from _leaves(str(number), optimizer, names)


def _leaves(number: str, optimizer: Any, names: dict[int, str]) -> Iterator[Leaf]:
    if isinstance(optimizer, MainOptimizer):
        names = dict(_copies(optimizer, names))
    names = {**names, **{id(copy): names[id(parameter)] for parameter, copy, _ in getattr(optimizer, "pairs", ())}}
    inside = list_inside(optimizer)
    if not inside:
        yield number, optimizer, names
    for part in inside.values():
        yield from _leaves(number, part, names)


def list_inside(optimizer: Any) -> dict[str, Any]:
    """Return the optimizers that one contains: ours by `parts`, ZeroRedundancyOptimizer's by `optim`."""
    parts: dict[str, Any] = getattr(optimizer, "parts", None) or {}
    return parts or ({"optim": optimizer.optim} if hasattr(optimizer, "optim") else {})


def _all_optimizers(ready: ReadyStep) -> Iterator[tuple[str, Any]]:
    pending = [(str(number), optimizer) for number, optimizer in enumerate(ready.optimizers)]
    while pending:
        place, optimizer = pending.pop()
        yield place, optimizer
        pending += [(f"{place}.{name}", part) for name, part in list_inside(optimizer).items()]


def _copies(optimizer: MainOptimizer, names: dict[int, str]) -> Iterator[tuple[int, str]]:
    """Yield the names of main weights: those of their parameters, of which a rank may have a range."""
    for copy, (parameter, _, _) in zip(optimizer.param_groups[0]["params"], optimizer.slices, strict=True):
        yield id(copy), names[id(parameter)]


def _main_weights(ready: ReadyStep) -> Iterator[tuple[str, torch.Tensor]]:
    names = parameter_names(ready)
    for optimizer in ready.optimizers:
        if isinstance(optimizer, MainOptimizer):
            of_copies = dict(_copies(optimizer, names))
            for copy in optimizer.param_groups[0]["params"]:
                yield of_copies[id(copy)], copy


def _without_wrapper(name: str) -> str:
    return name.removeprefix("module.")


def _as_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain part under tensor parallelism as the DTensor that it is part of; others as they are."""
    return _like_parameter(tensor.detach(), tensor)


def _like_parameter(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    layout, range_of = getattr(parameter, "part_of", None), getattr(parameter, "range_of", None)
    if range_of is not None and value.shape == parameter.shape:
        return Range.of(value, *range_of)
    return value if layout is None or value.shape != parameter.shape else as_part_of(layout, value)


def _empty(
    key: str, size: torch.Size, dtype: torch.dtype, parameter: torch.Tensor, group: Mapping[str, Any]
) -> torch.Tensor:
    if OF_RANK in key:
        return torch.empty(size, dtype=dtype, device=parameter.device)
    range_of = getattr(parameter, "range_of", None)
    if range_of is not None and size == (range_of[1],):
        return Range.of(torch.empty_like(parameter, dtype=dtype, requires_grad=False), *range_of)
    layout = getattr(parameter, "part_of", parameter)
    if isinstance(layout, DTensor) and size == layout.shape:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return as_part_of(layout, torch.empty_like(local, dtype=dtype, requires_grad=False))
    is_on_host = key.endswith((".step", "#int", "#float", "#bool")) and not (
        group.get("fused") or group.get("capturable")
    )
    device = torch.device("cpu") if is_on_host else parameter.device
    if getattr(parameter, "is_in_file", False) and size.numel() * dtype.itemsize >= disk.SMALL_BYTES:
        return disk.empty(tuple(size), dtype)
    return torch.empty(size, dtype=dtype, device=device)


def _as_state(key: str, value: torch.Tensor, parameter: torch.Tensor) -> tuple[str, Any]:
    """Return a state's name and value as its optimizer keeps them."""
    key, _, of_rank = key.partition(OF_RANK)
    name, _, kind = key.partition("#")
    if of_rank and _INSIDE not in name:
        return name, as_part_of(parameter, value) if isinstance(parameter, DTensor) else value
    if kind:
        return name, _NUMBERS[kind](value.item())
    if isinstance(value, Range):
        return name, value.as_subclass(torch.Tensor).view(parameter.shape)
    is_part = getattr(parameter, "part_of", None) is not None and isinstance(value, DTensor)
    return name, value.to_local() if is_part else value
