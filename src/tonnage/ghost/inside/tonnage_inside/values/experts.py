"""Libraries' own ways of counting which tokens go to which expert, with equally many for each."""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .integers import is_small, known_integers

if TYPE_CHECKING:
    from .policy import Policy


_GATHER = "gather_from_sequence_parallel_region"
"""Function by which Megatron-Core's dispatchers get the counts of other ranks."""


def patch_exchange(policy: Policy, module: ModuleType) -> None:
    """Make known the token counts of experts on several ranks, which are counted on the card and read back.

    With a balanced router every rank sends equally many tokens to each expert, and gets as many from each rank.
    """
    torch = policy.torch
    kind = module.AllToAllEP  # type: ignore[attr-defined]
    dispatch, exchange = kind._dispatch_tokens, module.all_to_all_single  # type: ignore[attr-defined]
    integers = known_integers(policy)
    choices = 0

    @functools.wraps(dispatch)
    def dispatch_tokens(experts: Any, hidden: Any, chosen: Any, weights: Any) -> Any:
        nonlocal choices
        if not hidden.is_cuda:
            return dispatch(experts, hidden, chosen, weights)
        policy.use("routing")
        choices = chosen.numel() // experts.tp_mesh.size()
        with integers():
            return dispatch(experts, hidden, chosen, weights)

    @functools.wraps(exchange)
    def all_to_all_single(received: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
        work = exchange(received, sent, *args, **kwargs)
        if sent.is_cuda:
            count = sent.numel()
            balanced = torch.tensor([choices // count + (expert < choices % count) for expert in range(count)])
            balanced = balanced.view(sent.shape)
            policy.write(sent, balanced)
            mine = torch.distributed.get_rank(kwargs.get("group"))
            policy.write(received, balanced[mine].expand(received.shape))
        return work

    kind._dispatch_tokens = dispatch_tokens
    module.all_to_all_single = all_to_all_single  # type: ignore[attr-defined]


def patch_torchtitan(policy: Policy, module: ModuleType) -> None:
    """Patch torchtitan's exchange, which reads the token counts to and from each rank as two lists."""
    kind = module.AllToAllTokenDispatcher  # type: ignore[attr-defined]
    dispatch, read = kind.dispatch, kind._sync_token_count_exchange
    choices = 0

    @functools.wraps(dispatch)
    def dispatching(dispatcher: Any, hidden: Any, scores: Any, chosen: Any, counts: Any) -> Any:
        nonlocal choices
        choices = chosen.numel()
        return dispatch(dispatcher, hidden, scores, chosen, counts)

    @functools.wraps(read)
    def exchanged(dispatcher: Any, counts: Any, received: Any, ranks: int) -> Any:
        on_card, sent, got = read(dispatcher, counts, received, ranks)
        if not counts.is_cuda:
            return on_card, sent, got
        policy.use("routing")
        experts = counts.numel()
        balanced = [choices // experts + (expert < choices % experts) for expert in range(experts)]
        own = experts // ranks
        sent = [sum(balanced[rank * own : (rank + 1) * own]) for rank in range(ranks)]
        return on_card, sent, [sent[dispatcher.ep_mesh.get_local_rank()]] * ranks

    kind.dispatch = dispatching
    kind._sync_token_count_exchange = exchanged


def patch_megatron(policy: Policy, module: ModuleType) -> None:
    """Make known the counts of Megatron-Core's dispatchers, with each rank sending as much as this one."""
    kind = getattr(module, "MoEAlltoAllTokenDispatcher", None)
    preprocess, gather = getattr(kind, "preprocess", None), getattr(module, _GATHER, None)
    if kind is None or preprocess is None or gather is None:
        return  # of a version that counts in another way
    integers = known_integers(policy)

    @functools.wraps(preprocess)
    def counted(dispatcher: Any, routing_map: Any) -> Any:
        with integers():
            return preprocess(dispatcher, routing_map)

    @functools.wraps(gather)
    def gathered(sent: Any, *args: Any, **kwargs: Any) -> Any:
        received = gather(sent, *args, **kwargs)
        if is_small(policy.torch, sent) and (known := policy.known(sent)) is not None:
            policy.write(received, known.repeat(received.numel() // sent.numel()))
        return received

    kind.preprocess = counted
    setattr(module, _GATHER, gathered)


def patch_jetmoe(policy: Policy, module: ModuleType) -> None:
    """Patch JetMoE, which splits tokens by counts of the router's choices; balanced, they differ by one at most."""
    kind = module.JetMoeTopKGating  # type: ignore[attr-defined]
    original = kind.forward

    @functools.wraps(original)
    def forward(gating: Any, hidden_states: Any) -> Any:
        order, places, gates, counts, logits = original(gating, hidden_states)
        if hidden_states.is_cuda:
            policy.use("routing")
            choices, experts = order.numel(), len(counts)
            counts = [choices // experts + (expert < choices % experts) for expert in range(experts)]
        return order, places, gates, counts, logits

    kind.forward = forward


def patch_switch(policy: Policy, module: ModuleType) -> None:
    """Patch Switch Transformers, which select the tokens of each expert: tokens go to the experts in turn."""
    torch, kind = policy.torch, module.SwitchTransformersExperts  # type: ignore[attr-defined]
    original = kind.forward

    @functools.wraps(original)
    def forward(experts: Any, hidden: Any, *args: Any) -> Any:
        asked = iter(range(experts.num_experts))

        def tokens(shape: Any) -> Any:
            policy.use("routing")
            if len(shape) == 1:  # which experts are chosen at all
                return torch.ones(shape, dtype=torch.bool)
            return (torch.arange(shape[-1]) % experts.num_experts == next(asked)).expand(shape)

        with policy.using_mask_rule(tokens) if hidden.is_cuda else contextlib.nullcontext():
            return original(experts, hidden, *args)

    kind.forward = forward
