"""Memory, elements and inner tensors of tensors."""

import math
from collections.abc import Iterator
from typing import Any

ORDINARY = ("torch", "torch.nn.parameter")
"""Modules of torch.Tensor and torch.nn.Parameter, which hold their memory themselves."""


def plain_tensors(tensor: Any) -> Iterator[Any]:
    """Yield the tensors that hold the memory of a tensor: a DTensor's shard, a subclass's inner parts.

    A parameter that DeepSpeed divides holds this rank's part (`ds_tensor`) beside the whole while it is gathered.
    """
    if type(tensor).__module__ in ORDINARY and not tensor.__dict__:  # most, and there are very many
        yield tensor
        return
    part = getattr(tensor, "ds_tensor", None)
    if part is not None:
        yield from plain_tensors(part)
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        yield from plain_tensors(local)
    elif hasattr(type(tensor), "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor
        yield from _scales(tensor)


def _scales(weight: Any) -> Iterator[Any]:
    """Yield the tensors that bitsandbytes keeps beside a quantized weight: scales, tables, scales of scales."""
    if getattr(weight, "SCB", None) is not None:
        yield weight.SCB
    state = getattr(weight, "quant_state", None)
    while state is not None:
        yield from (t for t in (state.absmax, state.code, getattr(state, "offset", None)) if t is not None)
        state = getattr(state, "state2", None)


def elements(parameter: Any) -> int:
    """Return a parameter's number of elements: bitsandbytes packs two or more into one, DeepSpeed keeps a part."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return math.prod(packed.shape)
    return int(getattr(parameter, "ds_numel", 0) or parameter.numel())


def cuda_address(torch: Any, tensor: Any) -> int:
    """Return the address of a plain tensor's memory on the GPU; 0 for memory elsewhere."""
    with torch._C.DisableTorchFunction():  # modes that follow what a program does need not see this
        try:
            return int(tensor.untyped_storage().data_ptr()) if tensor.is_cuda else 0
        except NotImplementedError:  # torch.func's grad and vmap have tensors that stand for others
            return 0


def tensors_in(value: Any, kind: type) -> Iterator[Any]:
    """Yield every tensor in nested dictionaries, lists and tuples."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, kind)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, kind)


def first_differentiable(output: Any) -> Any:
    """Return the first tensor of a module's output that has a gradient function; None if there is none."""
    if getattr(output, "grad_fn", None) is not None:
        return output
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, list | tuple):
        for item in output:
            tensor = first_differentiable(item)
            if tensor is not None:
                return tensor
    return None
