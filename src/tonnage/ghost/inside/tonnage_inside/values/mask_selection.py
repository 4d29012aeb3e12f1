"""Selection of elements by masks: a computed mask selects all."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from .integers import KNOWN_BYTES

if TYPE_CHECKING:
    from .policy import Policy


def patch(policy: Policy) -> None:
    """Patch torch once a card is used."""
    policy.torch.cuda._lazy_call(functools.partial(_patch, policy))


def _patch(policy: Policy) -> None:
    """Patch torch at the dispatcher, because boolean indexing calls nonzero from C++."""
    torch = policy.torch

    def nonzero(mask: Any) -> Any:
        values = policy.read(mask)
        if values is None and policy.mask_rule is not None:
            values = policy.mask_rule(mask.shape)
        if values is None:
            policy.use("nonzero")
            values = torch.ones(mask.shape, dtype=torch.bool)
        count = int(values.count_nonzero())
        if count * mask.dim() * torch.int64.itemsize > KNOWN_BYTES:  # too large for known values
            return torch.empty((mask.dim(), count), dtype=torch.int64, device=mask.device).t()
        return torch.nonzero(values).to(mask.device)

    def masked_select(tensor: Any, mask: Any) -> Any:
        """Select as torch's own kernel does, by an index made of the mask."""
        tensor, mask = torch.broadcast_tensors(tensor, mask)
        return torch.ops.aten.index.Tensor(tensor, [mask])

    def masked_scatter_backward(gradient: Any, mask: Any, sizes: Any) -> Any:
        """Select as torch's own; the size of what was scattered is the count of a mask that is computed, too."""
        count = math.prod(sizes)
        with policy.using_mask_rule(lambda shape: (torch.arange(math.prod(shape)) < count).view(shape)):
            chosen = torch.ops.aten.masked_select(gradient, mask)
        if chosen.numel() < count:
            chosen = torch.cat([chosen, chosen.new_zeros(count - chosen.numel())])
        return chosen.view(sizes)

    policy.implement("masked_scatter_backward", masked_scatter_backward, "CUDA")
    policy.implement("nonzero", nonzero, "CUDA")
    policy.implement("masked_select", masked_select, "CUDA")
