"""Checkpointing of the core attention alone: scores, softmax, dropout and their product with the values run again.

Megatron's "selective recompute" (Korthikanti et al., https://arxiv.org/abs/2205.05198, section 5): queries, keys and
values are kept, the matrix of scores is not.  It pays where that matrix exists (`eager` and `math` attention); flash,
efficient and cuDNN attention never keep it, so with them next to nothing is saved and the kernel runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.step.step import Step


def accepts(case: Case) -> Refusal | None:
    """Refuse a factory's network: only transformers' networks tell where their core attention is."""
    if case.job.model.kind == "factory":
        return Refusal(
            technique="checkpointing=attention",
            reason="where a factory's network computes its core attention is not known",
            instead="choose checkpointing attention-module or selective",
        )
    return None


def apply(step: Step) -> Step:
    """Checkpoint the function that transformers returns as the attention while a micro-batch runs."""
    return replace(step, contexts=(*step.contexts, _checkpoint_attention))


@contextmanager
def _checkpoint_attention() -> Iterator[None]:
    from transformers import __version__, modeling_utils

    from tonnage.errors import CannotEstimate

    AttentionInterface: Any = getattr(modeling_utils, "AttentionInterface", None)
    if not hasattr(AttentionInterface, "get_interface"):
        raise CannotEstimate(
            f"The networks of transformers {__version__} do not get their attention function from one place, so "
            "it cannot be checkpointed alone; choose checkpointing selective, or upgrade transformers."
        )
    original = AttentionInterface.get_interface
    calls = 0

    def get_interface(interface: Any, implementation: str, default: Any) -> Any:
        nonlocal calls
        calls += 1
        return partial(_run_checkpointed, original(interface, implementation, default))

    AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        AttentionInterface.get_interface = original
    if not calls:
        raise CannotEstimate(
            "This network does not get its attention function from transformers, so the core attention cannot be "
            "checkpointed alone; choose checkpointing attention-module or selective."
        )


def _run_checkpointed(attention: Any, *tensors: Any, **options: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(partial(attention, **options), *tensors, use_reentrant=False)


CORE_ATTENTION: Final = Technique(option="checkpointing", values=("attention",), accepts=accepts, apply=apply)
