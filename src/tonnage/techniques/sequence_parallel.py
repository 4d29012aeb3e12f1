"""Sequence parallelism: hooks that gather the whole sequence before each block of a network under tensor parallelism.

Between the blocks each rank of `tp` has a part of the sequence, as DTensors that torch's styles make.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def gather_around(network: Any, styles: dict[str, Any], mesh: DeviceMesh, *, around_head: bool) -> None:
    """Gather the whole sequence before each block, and before the head unless a loss in slices does it.

    A block with modules that are not cut, such as a router, works on plain tensors, replicated on every rank.
    """
    from tonnage.step.model import has_parameters, layers

    names = {module: name for name, module in network.named_modules()}
    for layer in layers(network):
        for block in layer.children():
            if names[block] in styles or not has_parameters(block):
                continue
            if all(_is_covered(part, names, styles) for part in block.modules()):
                block.register_forward_pre_hook(_gather_inputs, with_kwargs=True)
            else:
                _run_on_plain_tensors(block, mesh, [part for part in block.modules() if names[part] in styles])
    if around_head:
        head = network.get_output_embeddings()
        head.register_forward_pre_hook(_gather_inputs, with_kwargs=True, prepend=True)


def _run_on_plain_tensors(block: Any, mesh: DeviceMesh, cut: list[Any]) -> None:
    """Make the block take and return replicated plain tensors; `cut` modules inside return theirs after an
    all-reduce.
    """
    for part in cut:
        part.register_forward_hook(lambda _module, _inputs, output: _as_plain(output))
    block.register_forward_pre_hook(_gather_inputs_plain, with_kwargs=True)
    block.register_forward_hook(partial(_shard_output, mesh=mesh))


def _gather_inputs_plain(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return tuple(map(_as_plain, positional)), {name: _as_plain(value) for name, value in named.items()}


def _as_plain(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return _replicate(value).to_local() if isinstance(value, DTensor) else value


def _shard_output(module: Any, _inputs: Any, output: Any, *, mesh: DeviceMesh) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if isinstance(output, tuple):
        return (_shard_output(module, None, output[0], mesh=mesh), *output[1:])
    return DTensor.from_local(output, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])


def _is_covered(part: Any, names: dict[Any, str], styles: dict[str, Any]) -> bool:
    return not part._parameters or all(p is None for p in part._parameters.values()) or names[part] in styles


def _gather_inputs(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return tuple(map(_replicate, positional)), {name: _replicate(value) for name, value in named.items()}


def _replicate(value: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(value, DTensor) and value.placements != (Replicate(),):
        return value.redistribute(placements=[Replicate()])
    return value
