"""The loss on a vocabulary that ranks divide, on plain tensors: each rank has the logits of its own words alone.

torch's function for this (`loss_parallel`) works on DTensors, whose every operation costs the host a tenth of a
millisecond, and makes five tensors of a slice's size.  Here ranks exchange two numbers a token (Shoeybi et al. 2019,
arXiv:1909.08053, section 3), the exponentials are made in place, and backward turns them into the gradient.
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
    """Shard the head's rows over `mesh`, so that each rank computes its own words' logits.

    The head takes replicated plain hidden states (tokens, width), and returns logits (tokens, words of this rank).
    """

    def shard_rows(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, Parameter(shard, requires_grad=parameter.requires_grad))

    distribute_module(head, mesh, shard_rows)
    head.forward = lambda hidden: linear(hidden, _local_part(head.weight), _local_part(head.bias))


def _local_part(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gathered(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the hidden states (batch, sequence, width) of the whole sequence, plain, on each rank.

    In backward the ranks' gradients are summed, and sharded as the hidden states were.
    """
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def cross_entropy(logits: Tensor, targets: Tensor, words: int, mesh: DeviceMesh) -> Tensor:
    """Return the sum over tokens that are not ignored, the same on each rank.

    Logits are (tokens, words of this rank), targets (tokens,); `words` is the number of words of all ranks.  Backward
    overwrites what forward kept, so it can run once.
    """
    each = -(-words // mesh.size())  # rows of a rank, as torch shards them
    loss: Tensor = _CrossEntropy.apply(logits, targets - each * mesh.get_local_rank(), targets, mesh.get_group())
    return loss


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Cross-entropy by words; `targets` are positions among this rank's words, possibly outside them, `labels`
    among all.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, labels: Tensor, group: Any) -> Tensor:
        highest = logits.amax(1).float()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        exponentials = logits.float() if logits.dtype != torch.float32 else logits.clone()
        exponentials.sub_(highest.unsqueeze(1))
        is_own = (targets >= 0) & (targets < logits.shape[1])
        positions = targets.where(is_own, 0).unsqueeze(1)
        label_scores = exponentials.gather(1, positions).squeeze(1).where(is_own, 0)
        sums = torch.stack((exponentials.exp_().sum(1), label_scores))
        dist.all_reduce(sums, group=group)
        total, label_scores = sums
        counts = labels != IGNORED_LABEL
        ctx.save_for_backward(exponentials, positions, is_own, total, counts)
        ctx.dtype = logits.dtype
        return (total.log() - label_scores).where(counts, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, positions, is_own, total, counts = ctx.saved_tensors
        token_gradient = gradient.where(counts, 0)
        exponentials.mul_((token_gradient / total).unsqueeze(1))
        exponentials.scatter_add_(1, positions, token_gradient.where(is_own, 0).neg().unsqueeze(1))
        return exponentials.to(ctx.dtype), None, None, None
