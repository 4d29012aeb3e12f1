"""Parameters and gradients that FSDP holds and no parameter shows.  No public function of torch returns them."""

import math
from collections.abc import Iterator
from typing import Any


def elsewhere(root: Any) -> tuple[int, int]:
    """Return the elements inside `root` that its parameters do not show: of all, and of the trainable parameters.

    A network that tensor or pipeline parallelism has divided has their number in `elements_elsewhere`.  For a weight
    that bitsandbytes has packed and FSDP2 has divided, only the layer knows the number of its elements.

    In FSDP's first version the parameters of a wrapped module are one flat tensor, of which each rank holds a part.
    """
    total = trainable = 0
    for module in root.modules():
        own = vars(module)  # asked for what it does not have, a module looks among its parameters and modules
        absent, trainable_absent = own.get("elements_elsewhere", (0, 0))
        total, trainable = total + absent, trainable + trainable_absent
        total += _packed_away(module)
        flat = getattr(own.get("_handle"), "flat_param", None)
        if flat is None:
            continue
        whole = sum(flat._numels)
        held = flat._params or (flat,)  # the program's own parameters are parts of it, or it stands for them
        total += whole - sum(parameter.numel() for parameter in held)
        if flat._params is None:
            trainable += (whole - flat.numel()) * flat.requires_grad
        else:
            sizes = zip(flat._params, flat._numels, strict=True)
            trainable += sum(size - parameter.numel() for parameter, size in sizes if parameter.requires_grad)
    return total, trainable


def _packed_away(module: Any) -> int:
    packed = vars(module).get("quant_state")
    weight = None if packed is None else module._parameters.get("weight")
    if weight is None or getattr(weight, "quant_state", None) is not None:
        return 0
    return int(math.prod(packed.shape)) - int(weight.numel())


def find_unreduced(root: Any) -> Iterator[Any]:
    """Yield the unsharded gradients that FSDP2 keeps after a backward pass without communication (accumulation)."""
    if not hasattr(root, "_get_fsdp_state"):
        return
    for module in root.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter in (held for group in groups if group is not None for held in group.fsdp_params):
            whole = getattr(parameter, "_unsharded_param", None)
            for gradient in (parameter.unsharded_accumulated_grad, getattr(whole, "grad", None)):
                if gradient is not None:
                    yield gradient
