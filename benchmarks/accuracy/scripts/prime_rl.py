"""prime-rl's two trainers of January 2026, their benchmark's four steps of two micro-batches a rank.

What src/prime_rl/trainer/{sft,rl}/train.py of PrimeIntellect-ai/prime-rl run with `--bench`, `--model.compile` and
`--model.ac`: transformers' network in fp32 that FSDP2 divides and computes in bf16, each layer checkpointed and
compiled alone, but for its attention, into which Dynamo does not look (FlashAttention's package); gradients averaged
after each micro-batch.  Supervised fine-tuning has the loss of fp32 logits, which the dictionary that the forward
returned keeps until the next one; reinforcement learning has probabilities and entropies by slices of the vocabulary,
never all logits, and gathers the weights on the host before each further step.  Its workflow has segments grow
(.github/workflows/benchmarks.yaml); what is published is the mean of the second to fourth step's peaks.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from benchmarks.accuracy.scripts import compilers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tonnage.catalog.models import find_model

IMPORTS = (
    *compilers.IMPORTS,
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)

ATTENTION = "apart"
"""Under this name transformers finds torch's flash attention, called from outside of what is compiled."""
WORDS = 2048
"""Of a slice of the vocabulary."""
STEPS = 4
MICRO_BATCHES = 2


def measure(model: str, seq_len: int, compiled: bool, learns: str = "sft") -> dict[str, int]:
    """Bytes at the peak of its steps, reserved the mean of all but the first; `learns`: sft or rl."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    network = _network(model, compiled, learns)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, betas=(0.9, 0.999), weight_decay=0.01)
    make = {"sft": _fine_tuned, "rl": _reinforced}[learns]
    allocated, reserved = [], []
    for step in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        if learns == "rl" and step:
            _gathered(network)
        make(network, seq_len)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        allocated.append(torch.cuda.max_memory_allocated())
        reserved.append(torch.cuda.max_memory_reserved())
    return {"allocated_bytes": max(allocated), "reserved_bytes": sum(reserved[1:]) // (STEPS - 1)}


def rehearse() -> None:
    """What each job would read for the first time otherwise, once for all of them."""
    compilers.read()


def _fine_tuned(network: nn.Module, seq_len: int) -> None:
    for _ in range(MICRO_BATCHES):
        ids, positions = _row(seq_len)
        out = {"logits": network(input_ids=ids, position_ids=positions).logits.float().contiguous()}
        loss = _loss(out["logits"], seq_len)
        (loss / MICRO_BATCHES).backward()


def _reinforced(network: nn.Module, seq_len: int) -> None:
    for _ in range(MICRO_BATCHES):
        ids, positions = _row(seq_len)
        advantages, earlier = (torch.zeros(1, seq_len).to("cuda") for _ in range(2))
        mask = torch.ones(1, seq_len, dtype=torch.bool).to("cuda")
        labels = torch.cat([ids[:, 1:], torch.zeros(1, 1, dtype=ids.dtype, device="cuda")], dim=1)
        logged, entropy = network(input_ids=ids, position_ids=positions, labels=labels)
        logged = torch.cat([torch.full((1, 1), -11.0, device="cuda"), logged[:, :-1]], dim=1).squeeze()
        # nothing reads the entropies here, but they are there until the next ones are
        entropy = torch.cat([torch.full((1, 1), 11.0, device="cuda"), entropy[:, :-1]], dim=1)
        ratio = torch.exp(logged - earlier.squeeze())
        coefficients = ratio * advantages.squeeze()
        loss = -(coefficients.detach() * logged)[mask.squeeze()].sum() / (MICRO_BATCHES * seq_len)
        loss.backward()


def _row(seq_len: int) -> tuple[Tensor, Tensor]:
    """Token ids and positions, (1, seq_len) each."""
    ids = torch.zeros(1, seq_len, dtype=torch.int64).to("cuda")
    return ids, torch.arange(seq_len).unsqueeze(0).to("cuda")


def _gathered(network: nn.Module) -> None:
    """All weights in bf16, one by one, as they go to a file."""
    for weight in network.state_dict().values():
        whole = weight.to(torch.bfloat16).full_tensor() if isinstance(weight, DTensor) else weight
        whole.to("cpu")


def _network(model: str, compiled: bool, learns: str) -> nn.Module:
    """Each layer is a group, and so are embedding and head where they are two."""
    known = find_model(model)
    assert known is not None
    config = transformers.AutoConfig.for_model(**known.config())
    config.use_cache = False
    transformers.AttentionInterface.register(ATTENTION, torch._dynamo.disable(sdpa_attention_forward))
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.config._attn_implementation = ATTENTION
    if learns == "rl":
        _with_sliced_head(network)
    inner = network.model
    for name, layer in list(inner.layers.named_children()):
        inner.layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in inner.layers:
        if compiled:
            layer.compile(fullgraph=False)
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    if not config.tie_word_embeddings:
        fully_shard(inner.embed_tokens, mp_policy=policy, reshard_after_forward=True)
        fully_shard([network.lm_head, inner.norm], mp_policy=policy, reshard_after_forward=False)
    fully_shard(network, mp_policy=policy, reshard_after_forward=True)
    network.to_empty(device="cuda")
    torch.cuda.empty_cache()
    return network


def _loss(logits: Tensor, seq_len: int) -> Tensor:
    """The mean over what a mask leaves, here all."""
    following = torch.zeros(seq_len, dtype=torch.int64).to("cuda")
    mask = torch.ones(1, seq_len, dtype=torch.bool).to("cuda")
    each = functional.cross_entropy(logits.view(-1, logits.shape[-1]), following, reduction="none")
    return each.view(1, seq_len)[mask].mean()


class _Sliced(torch.autograd.Function):
    """Logarithms of the probabilities of `labels` (N) and entropies, by slices of the vocabulary that run again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """`hidden` (N, width), `weight` (vocabulary, width); both results (N) in fp32."""
        rows = hidden.shape[0]
        most = torch.full((rows,), float("-inf"), device="cuda")
        total, weighted, chosen = (torch.zeros(rows, device="cuda") for _ in range(3))
        for begin in range(0, weight.shape[0], WORDS):
            logits = hidden @ weight[begin : begin + WORDS].t()
            wide = logits.to(torch.float32).mul_(1.0)
            most, total, weighted = _further(most, total, weighted, wide)
            mask = (labels >= begin) & (labels < begin + WORDS)
            if begin == 0:  # where all labels of its made-up rows are
                chosen[mask] = wide[mask, (labels[mask] - begin).to(torch.long)]
        normal = most + torch.log(total)
        ctx.save_for_backward(hidden, weight, labels, normal)
        return chosen - normal, normal - (weighted / total)

    @staticmethod
    def backward(ctx: Any, of_logged: Tensor, of_entropy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        hidden, weight, labels, normal = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        outer = of_logged.to(torch.float32)
        for begin in range(0, weight.shape[0], WORDS):
            part = weight[begin : begin + WORDS]
            logits = hidden @ part.t()
            wide = logits.to(torch.float32).mul_(1.0)
            likely = torch.exp(wide - normal.unsqueeze(-1))
            of_logits = (-outer).unsqueeze(-1) * likely
            mask = (labels >= begin) & (labels < begin + WORDS)
            if begin == 0:
                of_logits[mask, (labels[mask] - begin).to(torch.long)] += outer[mask]
            of_logits.mul_(1.0)
            of_hidden.add_(of_logits.to(hidden.dtype) @ part)
            of_part = of_logits.to(weight.dtype).t() @ hidden
            of_weight[begin : begin + WORDS].add_(of_part)
        return of_hidden, of_weight, None


def _further(most: Tensor, total: Tensor, weighted: Tensor, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit so far, the sum of exponentials below it and that of them times their logits."""
    here = torch.amax(wide, dim=-1)
    now = torch.maximum(most, here)
    less = torch.exp(most - now)
    each = torch.exp(wide - now.unsqueeze(-1))
    return now, total * less + each.sum(dim=-1), weighted * less + (each * wide).sum(dim=-1)


def _with_sliced_head(network: nn.Module) -> None:
    """The head is given labels, and what the network returns is two tensors in fp32."""

    class Head(nn.Linear):
        def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            rows, tokens, width = hidden.shape
            flat = hidden.reshape(rows * tokens, width).contiguous()
            found = _Sliced.apply(flat, self.weight, labels.reshape(rows * tokens).contiguous())
            return found[0].reshape(rows, tokens), found[1].reshape(rows, tokens)

    head = network.lm_head
    with torch.device("meta"):
        network.lm_head = Head(head.in_features, head.out_features, bias=False)
    network.lm_head.weight = head.weight

    def forward(self: nn.Module, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(input_ids=input_ids, position_ids=position_ids)
        return self.lm_head(found.last_hidden_state, labels)

    network.forward = MethodType(forward, network)
