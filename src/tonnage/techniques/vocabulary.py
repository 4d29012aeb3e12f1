"""The loss where each rank has the logits of its own words alone, on plain tensors.

What torch has for this (`loss_parallel`) works on DTensors, whose every operation costs the host a tenth of a
millisecond, and makes five tensors of a slice's size.  Here ranks tell each other two numbers a token (Shoeybi et al.
2019, arXiv:1909.08053, section 3), the exponentials are made in place, and backward turns them into the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from tonnage.job import IGNORED_LABEL

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def divide(head: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of `mesh` some of the head's rows, of which it makes its own words' logits.

    Hidden states (tokens, width), whole and plain, go in; logits (tokens, words of this rank) come out.
    """

    def rows(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, Parameter(own, requires_grad=parameter.requires_grad))

    distribute_module(head, mesh, rows)
    head.forward = lambda hidden: linear(hidden, _own(head.weight), _own(head.bias))


def _own(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gathered(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """The hidden states (batch, sequence, width) of the whole sequence, plain, on each rank.

    In backward what ranks have of their gradient is added up, and divided as the hidden states were.
    """
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def cross_entropy(logits: Tensor, targets: Tensor, words: int, mesh: DeviceMesh) -> Tensor:
    """The sum over tokens that are not ignored, the same on each rank.

    Logits are (tokens, words of this rank), targets (tokens,); `words` is how many all ranks have.  Backward makes
    the gradient of what forward kept, and so can be run once.
    """
    each = -(-words // mesh.size())  # as torch divides rows
    loss: Tensor = _CrossEntropy.apply(logits, targets - each * mesh.get_local_rank(), targets, mesh.get_group())
    return loss


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """`targets` are the places among this rank's words, which may lie beside them; `labels` the same among all."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, labels: Tensor, group: Any) -> Tensor:
        highest = logits.amax(1).float()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        exponentials = logits.float() if logits.dtype != torch.float32 else logits.clone()
        exponentials.sub_(highest.unsqueeze(1))
        is_own = (targets >= 0) & (targets < logits.shape[1])
        places = targets.where(is_own, 0).unsqueeze(1)
        wanted = exponentials.gather(1, places).squeeze(1).where(is_own, 0)
        sums = torch.stack((exponentials.exp_().sum(1), wanted))
        dist.all_reduce(sums, group=group)
        total, wanted = sums
        counts = labels != IGNORED_LABEL
        ctx.save_for_backward(exponentials, places, is_own, total, counts)
        ctx.dtype = logits.dtype
        return (total.log() - wanted).where(counts, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, places, is_own, total, counts = ctx.saved_tensors
        of_token = gradient.where(counts, 0)
        exponentials.mul_((of_token / total).unsqueeze(1))
        exponentials.scatter_add_(1, places, of_token.where(is_own, 0).neg().unsqueeze(1))
        return exponentials.to(ctx.dtype), None, None, None
