"""The inputs of generation."""

from typing import Any

import pytest
import torch

from networks import tiny_job
from tonnage.errors import CannotEstimate, UsageError
from tonnage.step import generation, model

CPU = torch.device("cpu")


def asked(kind: str, **job: Any) -> dict[str, Any]:
    wanted = tiny_job(kind, **job)
    module = model.build(wanted.model, dtype=torch.float32, attention=None, device=torch.device("meta"))
    sounds = {generation.SOUNDS: torch.zeros(2, 8, 30)}
    return generation.make_arguments(wanted, generation.network_in(module, wanted), CPU, lambda: sounds)


def test_a_prompt_and_what_follows_are_a_sequence() -> None:
    found = asked("llama", generate=5, micro_batch=3)
    assert found["input_ids"].shape == found["attention_mask"].shape == (3, 24 - 5)
    assert (found["max_new_tokens"], found["min_new_tokens"], found["use_cache"]) == (5, 5, True)
    assert asked("t5", generate=5)["input_ids"].shape[1] == 24, "an encoder reads all of it"
    assert asked("whisper", generate=5)[generation.SOUNDS].shape == (2, 8, 30)


def test_what_cannot_be_generated_is_refused() -> None:
    with pytest.raises(UsageError, match="a sequence has 24 tokens"):
        asked("llama", generate=24)
    with pytest.raises(CannotEstimate, match="leave generate out"):
        asked("bert", generate=2)
