"""Context parallelism: the ranks of `cp` share each sequence, by torch's ring attention (`context_parallel`).

Token ids, labels and positions are cut along the sequence; each rank gets a piece from the front and one from the
back, so that a causal mask gives all ranks the same work.  Everything but attention works on a rank's own tokens;
attention also needs the keys and values of the others, which torch gathers after its first part.  Labels are shifted
before they are cut, and each rank's loss is a sum over its tokens divided by an equal share of all.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.cluster import AMPERE
from tonnage.mesh import divisors
from tonnage.techniques.technique import Refusal, Technique
from tonnage.timing.scores import needs_plain_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from tonnage.case import Case
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.model import Batch
    from tonnage.step.step import Step

ATTENTION: Final = "tonnage_whole_context"
"""Name under which transformers finds an attention for which it makes no mask."""

ATTENTIONS: Final = ("auto", "flash", "efficient", "cudnn")
"""Values of `attention` that torch's ring supports."""


EFFICIENT_TOKENS: Final = 32
"""Efficient attention pads its sums of exponentials to a multiple of this many tokens (kAlignLSE, torch's
ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h); torch's ring adds padded and unpadded sums.
"""


def accepts(case: Case) -> Refusal | None:
    """Refuse all but full sequences of a causal language model whose gradients are averaged over the ranks that
    share them.
    """
    job, plan, cluster = case.job, case.plan, case.cluster
    from tonnage.cluster import CPU

    pieces = 2 * plan.cp
    besides = [name for name in ("packing", "eval_batch", "generate") if getattr(job, name) is not None]
    if plan.shard == "none":
        return _refuse(plan, "ranks that share a sequence average gradients, and shard is none", "choose a shard")
    if plan.attention not in ATTENTIONS:
        return _refuse(plan, f"torch has no ring for attention {plan.attention}", "choose attention auto")
    if plan.loss not in ("plain", "chunked"):
        return _refuse(plan, f"loss {plan.loss} shifts labels itself", "choose loss plain or chunked")
    if job.model.kind == "factory":
        return _refuse(plan, "how a factory's network uses positions is not known", "choose cp 1")
    if job.lengths or besides:
        what = "lengths" if job.lengths else besides[0].replace("_", "-")
        return _refuse(plan, f"it is not built for {what}", f"leave {what} out, or choose cp 1")
    if job.seq_len % pieces:
        fitting = ", ".join(str(size) for size in divisors(job.seq_len // 2) if cluster.gpus % size == 0)
        reason = f"sequences of {job.seq_len:,} tokens cannot be cut into {pieces} pieces, two for each rank"
        return _refuse(plan, reason, f"choose cp {fitting}" if job.seq_len % 2 == 0 else "choose another seq-len")
    if window := _window(job):
        reason = f"torch's ring attention knows no sliding window, and {job.model.name} has one of {window:,} tokens"
        return _refuse(plan, reason, "choose cp 1")
    if plan.attention == "auto" and needs_plain_kernel(case):
        reason = "heads that share keys in fp32 or before compute capability 8.0 get torch's plain attention: no ring"
        return _refuse(plan, reason, "choose attention efficient, or cp 1")
    piece = job.seq_len // pieces
    if piece % EFFICIENT_TOKENS and _uses_efficient_attention(plan, cluster):
        tokens = f"{piece} tokens, no multiple of {EFFICIENT_TOKENS}"
        reason = f"the ring of efficient attention fails on pieces of {tokens}"
        return _refuse(plan, reason, f"choose a seq-len that {pieces * EFFICIENT_TOKENS} divides")
    if cluster.device.id == CPU:
        return _refuse(plan, "torch has no ring attention for the CPU", "choose a GPU")
    return None


def _uses_efficient_attention(plan: Plan, cluster: Cluster) -> bool:
    """Return True if torch's efficient attention is chosen, or the only one left to choose."""
    is_only_choice = plan.compute_dtype == "fp32" or cluster.device.capability < AMPERE
    return plan.attention == "efficient" or (plan.attention == "auto" and is_only_choice)


def _window(job: Job) -> int:
    """Return the tokens of a layer's sliding window if sequences are longer; 0 without one."""
    text = job.model.text
    window = text.get("sliding_window")
    used = text.get("use_sliding_window", True) is not False
    return window if used and isinstance(window, int) and window < job.seq_len else 0


def _refuse(plan: Plan, reason: str, instead: str) -> Refusal:
    return Refusal(technique=f"cp={plan.cp}", reason=reason, instead=instead)


def apply(step: Step) -> Step:
    """Cut every batch, and let attention run around the ring while the batch is processed."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
    cut = partial(_cut_batch, mesh=step.world.along("cp"))
    return replace(step, attention=ATTENTION, on_batch=cut, changes=(*step.changes, _check_causal))


def _check_causal(module: nn.Module) -> nn.Module:
    """Return the network unchanged.  Raises CannotEstimate unless it is causal and has no inputs besides tokens,
    such as images.
    """
    from tonnage.step.model import causal_network

    causal_network(module, "Context parallelism", "cp 1")
    return module


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: None, **options: Any) -> Any:
    """Call torch's attention as transformers does, but causal whatever the length of this rank's part."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, None, **{**options, "is_causal": True})


def placed(batch: Batch) -> dict[str, Tensor]:
    """Return what a part of a batch needs beside its tokens, (sequences, tokens) each: their positions and their
    next tokens.
    """
    import torch

    from tonnage.techniques.chunked_loss import following

    rows, length = batch["input_ids"].shape
    positions = torch.arange(length, device=batch["input_ids"].device).expand(rows, -1).contiguous()
    return {"shift_labels": following(batch["labels"]).contiguous(), "position_ids": positions}


@contextmanager
def _cut_batch(batch: Batch, *, mesh: DeviceMesh) -> Iterator[dict[str, Any]]:
    """Yield this rank's part of a batch whose tensors are (sequences, tokens)."""
    from torch.distributed.tensor.experimental import context_parallel

    from tonnage.job import IGNORED_LABEL

    rows, length = batch["input_ids"].shape
    cut = {**batch, "labels": batch["labels"].clone(), **placed(batch)}
    ignored = int((batch["labels"][:, 1:] == IGNORED_LABEL).sum())
    tensors = list(cut.values())
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[1] * len(tensors), no_restore_buffers=set(tensors)):
        yield {**cut, "num_items_in_batch": (rows * (length - 1) - ignored) / mesh.size()}


CONTEXT_PARALLEL: Final = Technique(
    option="cp",
    values=("N",),
    accepts=accepts,
    apply=apply,
    libraries=(
        "torch.distributed.tensor.experimental",
        "torch.distributed.tensor.experimental._context_parallel._sharding_rules",
        "torch.distributed.tensor.debug",  # torch imports it when the first sequence is shared
    ),
)
