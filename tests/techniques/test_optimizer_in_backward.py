"""Updates in backward: the same training as updates at the end of a step, clipped or not."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import tonnage
from networks import one_thread, tiny_job  # noqa: F401
from real_text import batches, network
from tonnage import Plan
from tonnage.errors import UsageError
from tonnage.techniques import build
from tonnage.train.trainable import Trainable

CLIPPED: dict[str, Any] = {"precision": "fp32", "optimizer_in_backward": True, "clip_grad_norm": 0.1}


def trained(name: str, **choices: Any) -> dict[str, torch.Tensor]:
    """Return the weights after two steps."""
    torch.manual_seed(0)
    made = build(tiny_job(name), Plan(**{"precision": "fp32", **choices}), device="cpu", initialise=True)
    made.run(2)
    return {name: p.detach() for name, p in made.model.named_parameters()}


@pytest.mark.parametrize("clip_grad_norm", [None, 0.1])
@pytest.mark.parametrize(
    ("name", "choices"),
    [("llama", {}), ("llama", {"optimizer": "muon"}), ("gpt2", {}), ("gpt2", {"checkpointing": "full"})],
)
def test_training_is_the_same(name: str, choices: dict[str, Any], clip_grad_norm: float | None) -> None:
    """GPT-2 has dropout: the second pass of clipping must drop what the first has dropped."""
    ours = trained(name, clip_grad_norm=clip_grad_norm, optimizer_in_backward=True, **choices)
    theirs = trained(name, clip_grad_norm=clip_grad_norm, **choices)
    assert ours.keys() == theirs.keys()
    for key, weights in ours.items():
        torch.testing.assert_close(weights, theirs[key], rtol=1e-5, atol=1e-7, msg=key)


@pytest.mark.parametrize("clip_grad_norm", [None, 1.0])
def test_no_gradient_is_left(clip_grad_norm: float | None) -> None:
    plan = Plan(precision="fp32", optimizer_in_backward=True, clip_grad_norm=clip_grad_norm)
    made = build(tiny_job(), plan, device="cpu", initialise=True)
    made.micro_batch(made.next_batch())
    assert all(parameter.grad is None for parameter in made.model.parameters())


class Drawing(nn.Module):
    """A network whose forward changes buffers, and draws from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.layers = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3)) for _ in "ab")
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.embedding(input_ids.flatten()) * (random.random() + numpy.random.rand() + self.calls)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden), labels.flatten())


def test_both_passes_have_the_same_random_numbers_and_buffers() -> None:
    def trained_as(plan: Plan) -> tuple[list[Any], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        trainable = tonnage.apply(plan, Drawing().train(), {"lr": 1e-2})
        results = [trainable.step(step) for step in batches(3)]
        return results, trainable.unapply().state_dict()

    results, state = trained_as(Plan(**CLIPPED))
    expected, theirs = trained_as(Plan(**{**CLIPPED, "optimizer_in_backward": False}))
    assert results == expected
    assert all(torch.equal(state[name], tensor) for name, tensor in theirs.items())


def weights_of(trainable: Trainable) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainable.model.named_parameters()}


def test_a_step_that_is_not_accepted_changes_nothing() -> None:
    """Unlike updates in backward without clipping, which are done when the loss is known."""
    ours, theirs = (tonnage.apply(Plan(**CLIPPED), network(), {"lr": 1e-3}) for _ in range(2))
    [[first], [second]] = batches(2)
    before, seen = weights_of(ours), []
    assert ours.step([first], accepts=lambda loss, norm: bool(seen.append((loss, norm)))).skipped
    after = weights_of(ours)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    loss, norm = seen[0]
    expected = theirs.step([first])
    assert (loss, norm) == (expected.loss, expected.gradient_norm)
    assert ours.step([first]) == expected
    assert ours.step([second]) == theirs.step([second])


def test_the_pieces_make_the_same_step() -> None:
    whole, pieces = (tonnage.apply(Plan(**CLIPPED), network(), {"lr": 1e-3}) for _ in range(2))
    for [batch] in batches(2):
        result = whole.step([batch])
        assert float(pieces.forward_backward(batch)) == result.loss
        assert pieces.clip() == result.gradient_norm
        assert pieces.optimizer_step()
    theirs = weights_of(whole)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in weights_of(pieces).items())


@pytest.mark.parametrize("clip_grad_norm", [None, 1.0])
def test_a_step_has_one_micro_batch(clip_grad_norm: float | None) -> None:
    trainable = tonnage.apply(Plan(**{**CLIPPED, "clip_grad_norm": clip_grad_norm}), network(), {"lr": 1e-3})
    [[first, second]] = batches(1, 2)
    for run in (lambda: trainable.step([first, second]), lambda: trainable.forward_backward(first, 0.5, last=False)):
        with pytest.raises(UsageError, match="2 micro-batches, and optimizer-in-backward updates"):
            run()
