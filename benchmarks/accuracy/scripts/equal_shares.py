"""Equal shares for Megatron-LM's experts.

Which tokens a router chooses is computed, and a ghost computes nothing, so dispatchers are told: every expert gets as
many tokens as every other.  Sinkhorn's routing does so about; routing with an auxiliary loss wants to.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Change the dispatchers, once in a process."""
    _tell_gathering()
    _tell_exchanging()


def _tell_gathering() -> None:
    """While the dispatcher looks at its map (tokens, local experts) of what was chosen, each of the map's sums is

    tokens / all experts, and as many probabilities are selected by it.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    original = MoEAllGatherTokenDispatcher.dispatch_postprocess

    def dispatch_postprocess(dispatcher: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        share = hidden_states.shape[0] * dispatcher.router_topk // dispatcher.config.num_moe_experts
        add, select = torch.Tensor.sum, torch.Tensor.masked_select

        def added(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = add(values, *args, **kwargs)
            return result.copy_(torch.full(result.shape, share)) if values.dtype == torch.bool else result

        def selected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return values.reshape(-1)[: share * values.shape[0]].clone()

        torch.Tensor.sum, torch.Tensor.masked_select = added, selected  # type: ignore[method-assign, assignment]
        try:
            return original(dispatcher, hidden_states, probs)
        finally:
            torch.Tensor.sum, torch.Tensor.masked_select = add, select  # type: ignore[method-assign]

    MoEAllGatherTokenDispatcher.dispatch_postprocess = dispatch_postprocess


def _tell_exchanging() -> None:
    """The dispatcher counts what goes to whom; the counts' tensors stay and get the values of equal shares."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    original = MoEAlltoAllTokenDispatcher.preprocess

    def preprocess(dispatcher: Any, routing_map: torch.Tensor) -> torch.Tensor:
        share = routing_map.shape[0] * dispatcher.config.moe_router_topk // dispatcher.num_experts
        local, ranks = dispatcher.num_local_experts, dispatcher.tp_size * dispatcher.ep_size
        counted: torch.Tensor = original(dispatcher, routing_map)
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

    MoEAlltoAllTokenDispatcher.preprocess = preprocess
