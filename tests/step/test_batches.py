"""Packed documents and drawn lengths: the network's inputs, and its results for them."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from networks import one_thread, tiny_job  # noqa: F401
from tonnage.errors import CannotEstimate, UsageError
from tonnage.plans import Plan
from tonnage.step import batches, model
from tonnage.techniques import build


def tokens(rows: int, length: int) -> model.Batch:
    ids = torch.arange(rows * length).reshape(rows, length)
    return {"input_ids": ids, "labels": ids.clone()}


def test_positions_begin_again_at_each_document() -> None:
    made = batches.pack(tokens(2, 7), 3)  # documents of 2, 2 and 3 tokens
    assert made["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1, 2]] * 2
    assert made["labels"][0].tolist() == [-100, 1, -100, 3, -100, 5, 6]


def test_packed_documents_do_not_see_each_other() -> None:
    made = build(tiny_job(packing=2), Plan(precision="fp32"), device="cpu", initialise=True)
    batch = made.next_batch()
    with torch.no_grad():
        together = made.model(**batch).logits
        alone = made.model(input_ids=batch["input_ids"][:, 12:]).logits
    torch.testing.assert_close(together[:, 12:], alone)


def test_padding_is_masked_and_predicted_from_nothing() -> None:
    made = batches.pad(tokens(2, 4), (4, 2))
    assert made["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert made["labels"].tolist() == [[0, 1, 2, 3], [4, 5, -100, -100]]
    assert "attention_mask" not in batches.pad(tokens(2, 4), (4, 4))


def test_the_longest_come_first_and_the_draws_are_the_same_again() -> None:
    job = tiny_job(lengths=("5", "9", "400"), grad_accum=2)
    first = list(islice(batches.draw_lengths(job), 40))
    assert first[:4] == [(24, 24)] * 4, "400 is cut to seq_len"
    assert {length for lengths in first[4:] for length in lengths} == {5, 9, 24}
    assert first == list(islice(batches.draw_lengths(job), 40))


def test_steps_of_drawn_lengths() -> None:
    made = build(tiny_job(lengths=("5", "9", "24")), Plan(precision="fp32"), device="cpu", initialise=True)
    seen: list[int] = []
    made.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    made.run(6)
    assert seen[:2] == [24, 24]
    assert seen == [max(lengths) for lengths in islice(batches.draw_lengths(made.step.job), 6)]


def test_lengths_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("12\n7\n")
    assert tiny_job(lengths=(str(tmp_path / "lengths"),)).lengths == ("12", "7")


@pytest.mark.parametrize("words", [("no such file",), ("0",), ("5", "x"), ("",)])
def test_what_is_no_length_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="lengths"):
        tiny_job(lengths=words)


def test_only_tokens_are_packed() -> None:
    with pytest.raises(CannotEstimate, match="Only sequences of tokens"):
        batches.pack({"pixel_values": torch.zeros(1)}, 2)
    with pytest.raises(CannotEstimate, match="Only sequences of tokens"):
        batches.pad({"pixel_values": torch.zeros(1)}, [2])
    with pytest.raises(UsageError, match="encoder-decoder"):
        tiny_job("t5", packing=2)
    with pytest.raises(UsageError, match="a sequence has 4 tokens"):
        batches.pack(tokens(1, 4), 5)
    with pytest.raises(UsageError, match="leave packing out"):
        tiny_job(packing=2, lengths=("5",))
