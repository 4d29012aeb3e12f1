"""Models of transformers for images, audio and video."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import compiled, integers

if TYPE_CHECKING:
    from .policy import Policy

_HEARD = ("input_values", "input_features")
"""Names of audio inputs, whose lengths and transcripts are integers."""


def patch(policy: Policy, module: ModuleType) -> None:
    """Make known what is computed from sizes of images, audio and video, which are integers on the card.

    This begins with the first call of such a model, in its thread and in the backward passes that this starts.
    """
    torch = policy.torch
    met: set[type] = set()

    def begin(model: Any) -> None:
        known_model = isinstance(model, module.PreTrainedModel)
        # before transformers 4.48 no configuration said which parts it has
        parts = getattr(model.config, "sub_configs", ()) if known_model else ()
        multimodal = known_model and (len(parts) > 0 or model.main_input_name in _HEARD)
        if multimodal and torch._C._len_torch_function_stack() == 0:
            handle.remove()
            compiled.follow(policy)
            integers.follow(policy)

    def first_call(called: Any, _args: Any) -> None:
        if torch.compiler.is_compiling():  # asked first: what Dynamo looks at it guards, and `met` grows
            return
        if type(called) in met:
            return
        model = getattr(called, "_orig_mod", called)  # of what `torch.compile` has made
        if type(model) not in met:
            met.add(type(model))
            begin(model)

    @functools.wraps(torch.nn.Module.compile)
    def compile_in_place(model: Any, *args: Any, **kwargs: Any) -> None:
        """Begin before the first call, which will be compiled as a whole."""
        begin(model)
        torch.nn.Module.compile(model, *args, **kwargs)

    module.PreTrainedModel.compile = compile_in_place  # type: ignore[attr-defined]
    handle = torch.nn.modules.module.register_module_forward_pre_hook(first_call)


def patch_pooling(policy: Policy, module: ModuleType) -> None:
    """Make known which pooled patches Gemma 4 keeps: those whose weights, from known places, are no padding's."""
    torch, kind = policy.torch, module.Gemma4VisionPooler  # type: ignore[attr-defined]
    original = kind._avg_pool_by_positions

    @functools.wraps(original)
    def pooled(pooler: Any, hidden: Any, places: Any, length: int) -> Any:
        output, mask = original(pooler, hidden, places, length)
        known = policy.known(places) if hidden.is_cuda else None
        if known is not None:
            policy.write(mask, original(pooler, torch.zeros(*hidden.shape[:2], 1), known, length)[1])
        return output, mask

    kind._avg_pool_by_positions = pooled
