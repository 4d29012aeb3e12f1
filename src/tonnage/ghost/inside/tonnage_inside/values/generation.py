"""Results of `generate`: as many tokens as allowed, none of which ends a sequence."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import integers
from .integers import KNOWN_BYTES

if TYPE_CHECKING:
    from .policy import Policy


def patch(policy: Policy, module: ModuleType) -> None:
    """End a generation at its length limit, which is known; finished sequences are computed on the card."""
    limit = importlib.import_module("transformers.generation.stopping_criteria").MaxLengthCriteria
    count, more = limit.__call__, module.GenerationMixin._has_unfinished_sequences
    long_enough = False

    @functools.wraps(count)
    def counted(criteria: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal long_enough
        long_enough = bool(input_ids.shape[-1] >= criteria.max_length)
        return count(criteria, input_ids, *args, **kwargs)

    @functools.wraps(more)
    def has_unfinished_sequences(mixin: Any, finished: bool, *args: Any, **kwargs: Any) -> Any:
        nonlocal long_enough
        unfinished = more(mixin, finished, *args, **kwargs)
        if unfinished and long_enough:
            policy.use("generation")
            unfinished = False
        long_enough = False
        return unfinished

    generate = module.GenerationMixin.generate  # type: ignore[attr-defined]

    @functools.wraps(generate)
    def generated(mixin: Any, *args: Any, **kwargs: Any) -> Any:
        answer = generate(mixin, *args, **kwargs)
        tokens = getattr(answer, "sequences", answer)
        if isinstance(tokens, policy.torch.Tensor) and tokens.is_cuda and tokens.nbytes <= KNOWN_BYTES:
            policy.use("generation")
            prompt = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
            policy.write(tokens, _continued(policy, _ends(mixin, kwargs), prompt, tokens))
            integers.follow(policy)
        return answer

    limit.__call__ = counted
    module.GenerationMixin._has_unfinished_sequences = has_unfinished_sequences  # type: ignore[attr-defined]
    module.GenerationMixin.generate = generated  # type: ignore[attr-defined]


def _continued(policy: Policy, ends: set[Any], prompt: Any, tokens: Any) -> Any:
    """Return the generated tokens on the host: the prompt, if it is known, and then a token that ends nothing."""
    values = policy.torch.full(tokens.shape, next(word for word in range(len(ends) + 1) if word not in ends))
    rows = isinstance(prompt, policy.torch.Tensor) and prompt.ndim == tokens.ndim == 2
    begun = policy.known(prompt) if rows else None
    if begun is not None and begun.shape[1] <= tokens.shape[1] and tokens.shape[0] % begun.shape[0] == 0:
        values[:, : begun.shape[1]] = begun.repeat_interleave(tokens.shape[0] // begun.shape[0], 0)
    return values.to(tokens.dtype)


def _ends(mixin: Any, options: dict[str, Any]) -> set[Any]:
    """Return the tokens that begin, end or pad the sequences of `generate` with these options."""
    settings = options.get("generation_config") or mixin.generation_config
    tokens: set[Any] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = options.get(name, getattr(settings, name))
        tokens |= set(value) if isinstance(value, list) else {value}
    return tokens
