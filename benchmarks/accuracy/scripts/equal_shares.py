"""Equal shares for Megatron-LM's experts.

Which tokens a router chooses is computed, and a ghost computes nothing, so dispatchers are told: every expert gets as
many tokens as every other.  Sinkhorn's routing does so about; routing with an auxiliary loss wants to.  Until the
middle of 2025 one function of a dispatcher did what several do since, under the name that comes second here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOOKS_AT_GATHERED = ("dispatch_postprocess", "token_permutation")
_SELECTS_ITS_OWN = ("dispatch_preprocess", "token_permutation")


def install() -> None:
    """Change the dispatchers, once in a process."""
    _tell_gathering()
    _tell_exchanging()


@contextmanager
def _selected(share: int) -> Iterator[None]:
    """Of each row (an expert) of a mask so many elements (tokens) are chosen."""
    original = torch.Tensor.masked_select

    def masked_select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1)[: share * values.shape[0]].clone()

    torch.Tensor.masked_select = masked_select  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.masked_select = original  # type: ignore[method-assign]


@contextmanager
def _counted(share: int) -> Iterator[None]:
    """Each sum of a mask is that."""
    original = torch.Tensor.sum

    def added(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = original(values, *args, **kwargs)
        return result.copy_(torch.full(result.shape, share)) if values.dtype == torch.bool else result

    torch.Tensor.sum = added  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.sum = original  # type: ignore[method-assign]


def _tell_gathering() -> None:
    """While the dispatcher looks at its map (tokens, local experts) of what was chosen, each of the map's sums is

    tokens / all experts, and as many probabilities are selected by it.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    name = next(name for name in _LOOKS_AT_GATHERED if hasattr(MoEAllGatherTokenDispatcher, name))
    original = getattr(MoEAllGatherTokenDispatcher, name)

    def dispatch(dispatcher: Any, hidden_states: torch.Tensor, *chosen: torch.Tensor) -> Any:
        ranks = dispatcher.tp_size * dispatcher.ep_size if name == _LOOKS_AT_GATHERED[1] else 1
        tokens = hidden_states.shape[:-1].numel() * ranks
        share = tokens * dispatcher.router_topk // dispatcher.config.num_moe_experts
        with _selected(share), _counted(share):
            return original(dispatcher, hidden_states, *chosen)

    setattr(MoEAllGatherTokenDispatcher, name, dispatch)


def _tell_exchanging() -> None:
    """The dispatcher counts what goes to whom; the counts' tensors stay and get the values of equal shares."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    name = next(name for name in _SELECTS_ITS_OWN if hasattr(MoEAlltoAllTokenDispatcher, name))
    counting, original = MoEAlltoAllTokenDispatcher.preprocess, getattr(MoEAlltoAllTokenDispatcher, name)

    def preprocess(dispatcher: Any, routing_map: torch.Tensor) -> torch.Tensor:
        share = _share_of_exchange(dispatcher, routing_map.shape[0])
        local, ranks = dispatcher.num_local_experts, dispatcher.tp_size * dispatcher.ep_size
        counted: torch.Tensor = counting(dispatcher, routing_map)
        if dispatcher.drop_and_pad:
            return counted  # as many as there is room for, which is known
        counts = {
            "input_splits": share * local,
            "output_splits": share * local,
            "output_splits_tp": share * local * dispatcher.ep_size,
            "num_global_tokens_per_local_expert": share,
        }
        for name, count in counts.items():
            if isinstance(tensor := getattr(dispatcher, name, None), torch.Tensor):
                tensor.copy_(torch.full(tensor.shape, count))
        return counted.copy_(torch.full(counted.shape, share * ranks))

    def dispatch(dispatcher: Any, hidden_states: torch.Tensor, *chosen: torch.Tensor) -> Any:
        with _selected(_share_of_exchange(dispatcher, hidden_states.shape[:-1].numel())):
            return original(dispatcher, hidden_states, *chosen)

    MoEAlltoAllTokenDispatcher.preprocess = preprocess
    setattr(MoEAlltoAllTokenDispatcher, name, dispatch)


def _share_of_exchange(dispatcher: Any, tokens: int) -> int:
    """How many of a rank's own tokens an expert gets."""
    return tokens * int(dispatcher.config.moe_router_topk) // int(dispatcher.num_experts)
