"""The loss on a divided vocabulary, against torch's on the whole."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from tonnage.job import IGNORED_LABEL
from tonnage.techniques import vocabulary

TOKENS, WORDS = 7, 11


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """Provide a mesh of this process; several ranks are in test_parallel."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def labels() -> torch.Tensor:
    return torch.tensor([3, IGNORED_LABEL, 0, WORDS - 1, 3, IGNORED_LABEL, 5])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_sum_and_gradient_are_those_of_torch(alone: Any, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(2)
    scores = (30 * torch.randn(TOKENS, WORDS, generator=generator)).to(dtype).requires_grad_()
    other = scores.detach().clone().requires_grad_()
    wanted = functional.cross_entropy(other.float(), labels(), reduction="sum", ignore_index=IGNORED_LABEL)
    (3 * wanted).backward()
    found = vocabulary.cross_entropy(scores, labels(), WORDS, alone)
    (3 * found).backward()
    torch.testing.assert_close(found, wanted)
    assert scores.grad is not None
    assert scores.grad.dtype == dtype
    torch.testing.assert_close(scores.grad, other.grad, atol=tolerance, rtol=tolerance)


def test_logits_are_left_as_they_are(alone: Any) -> None:
    scores = torch.randn(TOKENS, WORDS, requires_grad=True)
    before = scores.detach().clone()
    vocabulary.cross_entropy(scores, labels(), WORDS, alone).backward()
    torch.testing.assert_close(scores.detach(), before, atol=0, rtol=0)


def test_tokens_that_are_all_ignored_cost_nothing(alone: Any) -> None:
    scores = torch.randn(TOKENS, WORDS, requires_grad=True)
    none = torch.full((TOKENS,), IGNORED_LABEL)
    loss = vocabulary.cross_entropy(scores, none, WORDS, alone)
    loss.backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert not scores.grad.any()


def test_a_rank_takes_the_words_that_torch_would_give_it(alone: Any) -> None:
    head = torch.nn.Linear(5, WORDS)
    whole = torch.nn.Linear(5, WORDS)
    whole.load_state_dict(head.state_dict())
    vocabulary.divide(head, alone)
    hidden = torch.randn(TOKENS, 5)
    torch.testing.assert_close(head(hidden), whole(hidden))
    assert head.out_features == WORDS
