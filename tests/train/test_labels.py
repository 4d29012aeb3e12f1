"""Micro-batches with unequal numbers of labels, and without any."""

import math
from typing import Any

import pytest
import torch

import tonnage
from networks import one_thread  # noqa: F401
from real_text import IGNORED, ROW, batches, network
from tonnage import Plan
from tonnage.errors import UsageError
from tonnage.techniques import chunked_loss, fused_loss
from tonnage.train import labels

LOSSES = ("plain", "chunked", "fused", "torch")
USUAL = {"lr": 0.1}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunked_loss, fused_loss):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 10)


def uneven(steps: int) -> list[list[dict[str, torch.Tensor]]]:
    """Return three micro-batches a step, of which the second has few labels."""
    made = batches(steps, 3)
    for step in made:
        step[1]["labels"][:, : ROW - 3] = IGNORED
        step[2]["labels"][0, :9] = IGNORED
    return made


def joined(step: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.cat([batch[name] for batch in step]) for name in step[0]}]


def weights_after(steps: list[Any], **choices: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    plan = Plan(**{"precision": "fp32", "optimizer": "sgd", **choices})
    trainable = tonnage.apply(plan, network(), USUAL)
    results = [trainable.step(step) for step in steps]
    return trainable.unapply().state_dict(), results


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_equal_one_large_batch(loss: str) -> None:
    one, expected = weights_after([joined(step) for step in uneven(5)], loss=loss)
    several, results = weights_after(uneven(5), loss=loss)
    assert [result.tokens for result in results] == [result.tokens for result in expected]
    assert [result.loss for result in results] == pytest.approx([result.loss for result in expected], rel=1e-6)
    for name, weights in one.items():
        torch.testing.assert_close(several[name], weights, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    ("optimizer", "new"),
    [
        ("adamw", lambda parameters: torch.optim.AdamW(parameters, lr=0.1)),
        ("sgd-plain", lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    ],
)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_uneven_micro_batches_equal_plain_pytorch_bit_for_bit(optimizer: str, new: Any, checkpointing: str) -> None:
    """A mean is divided by (all labels / its own); weighed by any other formula it rounds otherwise."""
    plain = network()
    updates = new(plain.parameters())
    for step in uneven(5):
        counts = [labels.count_labels(batch, shifts=True) for batch in step]
        for batch, count in zip(step, counts, strict=True):
            (plain(**batch).loss / (sum(counts) / count)).backward()
        updates.step()
        updates.zero_grad()
    ours, _ = weights_after(uneven(5), optimizer=optimizer, checkpointing=checkpointing)
    assert all(torch.equal(ours[name], weights) for name, weights in plain.state_dict().items())


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_micro_batch_without_labels_adds_nothing(loss: str, precision: str) -> None:
    [full], [[empty]] = batches(1), batches(1)
    empty["labels"].fill_(IGNORED)
    alone, [expected] = weights_after([full], loss=loss, precision=precision)
    both, [result] = weights_after([[full[0], empty]], loss=loss, precision=precision)
    assert result == expected
    for name, weights in alone.items():
        assert weights.isfinite().all()
        assert torch.equal(both[name], weights), name


def test_a_step_without_labels_is_skipped() -> None:
    [[batch]] = batches(1)
    batch["labels"].fill_(IGNORED)
    weights, [result] = weights_after([[batch]], optimizer="adamw")
    assert (result.skipped, result.tokens, result.loss) == (True, 0, 0.0)
    assert all(torch.equal(weights[name], start) for name, start in network().state_dict().items())
    trainable = tonnage.apply(Plan(precision="fp32"), network(), USUAL)
    assert math.isnan(trainable.evaluate([batch]).loss)


def test_an_evaluation_is_the_mean_over_all_labels() -> None:
    [step] = uneven(1)
    trainable = tonnage.apply(Plan(precision="fp32", checkpointing="full"), network(), USUAL)
    whole, parts = trainable.evaluate(joined(step)), trainable.evaluate(step)
    assert parts.tokens == whole.tokens
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert trainable.step(step).loss == pytest.approx(parts.loss, rel=1e-6)


def test_the_pieces_make_the_same_step() -> None:
    [step] = uneven(1)
    plan = Plan(precision="fp32", optimizer="sgd", clip_grad_norm=0.1)
    whole, pieces = (tonnage.apply(plan, network(), USUAL) for _ in range(2))
    result = whole.step(step)
    counts = [labels.count_labels(batch, shifts=True) for batch in step]
    parts = [
        float(pieces.forward_backward(batch, count / sum(counts), last=batch is step[-1])) * count / sum(counts)
        for batch, count in zip(step, counts, strict=True)
    ]
    norm = pieces.clip()
    assert pieces.optimizer_step()
    assert sum(parts) == pytest.approx(result.loss, rel=1e-6)
    assert norm == pytest.approx(result.gradient_norm, rel=1e-6)
    theirs = dict(whole.model.named_parameters())
    for name, parameter in pieces.model.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=1e-6, msg=name)


def test_shifted_labels_are_counted_as_they_are() -> None:
    [[batch]] = batches(1)
    assert labels.count_labels(batch, shifts=True) == 2 * (ROW - 1)
    assert labels.count_labels(batch, shifts=False) == 2 * ROW
    assert labels.count_labels({**batch, "shift_labels": batch["labels"]}, shifts=True) == 2 * ROW
    assert labels.count_labels({"pixels": torch.zeros(3, 4)}, shifts=False) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at least one"),
        ({"input_ids": torch.zeros(1, 2)}, "a list of micro-batches"),
        ([[1]], "not a list"),
        ([{"input_ids": [1, 2]}], "input_ids is a list"),
        ([{"input_ids": torch.zeros(1, 1).long(), "labels": torch.zeros(1, 1).long()}], "no token"),
    ],
)
def test_what_is_no_micro_batch_is_said(given: Any, message: str) -> None:
    trainable = tonnage.apply(Plan(precision="fp32"), network(), USUAL)
    [[good]] = batches(1)
    with pytest.raises(UsageError, match=message):
        trainable.step([*given, good] if message == "no token" else given)
