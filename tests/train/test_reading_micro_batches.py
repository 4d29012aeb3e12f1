"""Micro-batches that a network cannot read are refused in one line, on every way into a step."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tonnage
from real_ranks import run_ranks
from real_text import IGNORED, ROW, batches, network
from tonnage import Job, Plan
from tonnage.errors import UsageError
from tonnage.train.micro_batches import Reader


def whole(**fields: Any) -> dict[str, torch.Tensor]:
    [[batch]] = batches(1)
    return {name: tensor for name, tensor in {**batch, **fields}.items() if tensor is not None}


IDS = whole()["input_ids"]
ROWS = len(IDS)
FAULTS: dict[str, tuple[Any, str]] = {
    "no step": ([], "at least one"),
    "no list": ({"input_ids": torch.zeros(1, 2)}, "a list of micro-batches"),
    "a list": ([[1]], "not a list"),
    "an empty dict": ([{}], "not an empty one"),
    "no tensor": ([{"input_ids": [1, 2]}], "input_ids is a list"),
    "no values": ([whole(input_ids=IDS.to("meta"))], "input_ids is on the meta device"),
    "no labels": ([whole(labels=None)], r"1 of 1: it has input_ids and no labels, .* a copy of input_ids"),
    "a count of labels": ([whole(num_items_in_batch=torch.tensor(9))], "it has num_items_in_batch, .* leave it out"),
    "an unknown id": (
        [whole(), whole(input_ids=IDS + 256 * (IDS == IDS.max()))],
        r"Micro-batch 2 of 2: input_ids has \d+, and the network's vocabulary is 0 to 255; use its own tokenizer",
    ),
    "a negative id": ([whole(input_ids=-IDS)], r"input_ids has -\d+, and the network's vocabulary is 0 to 255"),
    "an unknown label": ([whole(labels=IDS + 300)], r"labels has \d+, .* 0 to 255, or -100 for what is left out"),
    "labels of padding": ([whole(labels=IDS * 0 - 1)], "labels has -1, "),
    "an unknown shifted label": ([whole(labels=None, shift_labels=IDS + 300)], r"shift_labels has \d+, "),
    "numbers": ([whole(input_ids=IDS.float())], "input_ids are float32, and token ids are whole numbers"),
    "labels of numbers": ([whole(labels=IDS.half())], "labels are float16, and token ids are whole numbers"),
    "no rows": ([whole(input_ids=IDS[:0], labels=IDS[:0])], rf"input_ids is empty \(the shape 0 x {ROW}\)"),
    "no tokens": ([whole(input_ids=IDS[:, :0], labels=IDS[:, :0])], rf"input_ids is empty \(the shape {ROWS} x 0\)"),
    "one row": ([whole(input_ids=IDS[0], labels=IDS[0])], rf"input_ids has the shape {ROW}; it is rows x tokens"),
    "a shorter mask": (
        [whole(attention_mask=torch.ones(ROWS, ROW - 1))],
        rf"attention_mask has the shape {ROWS} x {ROW - 1} and input_ids {ROWS} x {ROW}; they must be equal",
    ),
    "fewer labels": ([whole(labels=IDS[:, 1:])], rf"labels has the shape {ROWS} x {ROW - 1} and input_ids"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_read_is_said(name: str) -> None:
    given, message = FAULTS[name]
    trainable = tonnage.apply(Plan(precision="fp32"), network(), {"lr": 0.1})
    for call in (trainable.step, trainable.evaluate):
        with pytest.raises(UsageError, match=message):
            call(given)
    if len(given) == 1 and isinstance(given, list):
        with pytest.raises(UsageError, match=message):
            trainable.forward_backward(given[0])
    assert trainable.step([whole()]).tokens > 0


def test_adapters_and_learned_positions_are_checked_too() -> None:
    pytest.importorskip("peft")
    trainable = tonnage.apply(Plan(precision="fp32"), network(), {"lr": 0.1}, job=Job(method="lora", lora_rank=4))
    with pytest.raises(UsageError, match="vocabulary is 0 to 255"):
        trainable.step([whole(input_ids=IDS + 256)])
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 256, "n_positions": 8}
    gpt = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    with pytest.raises(UsageError, match=rf"rows have {ROW} tokens, and the network has learned positions for 8"):
        Reader.of(gpt).check([whole()])


def test_what_a_network_of_ones_own_reads_is_its_own_affair() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=tokens, labels=tokens).loss

    trainable = tonnage.apply(Plan(precision="fp32"), Own(), {"lr": 0.1})
    assert trainable.step([{"tokens": IDS}]).loss > 0


def test_masks_of_four_dimensions_and_left_out_labels_are_read() -> None:
    mask = torch.ones(ROWS, 1, ROW, ROW, dtype=torch.bool).tril()
    labels = IDS.clone()
    labels[:, :5] = IGNORED
    Reader.of(network()).check([whole(attention_mask=mask), whole(labels=labels), whole(input_ids=IDS.int())])


UNEQUAL = r"unequal numbers of micro-batches \(2 on rank 0, 1 on rank 1\), and they exchange parts of the network"
OF_RANK_1: dict[str, tuple[Any, str]] = {
    "an unknown id": ([whole(), whole(input_ids=IDS + 256)], r"Micro-batch 2 of 2: input_ids has \d+, "),
    "none": ([], "at least one"),
    "no token": ([whole(), whole(input_ids=IDS[:, :1], labels=IDS[:, :1])], "no token that the loss could predict"),
    "fewer": ([whole()], UNEQUAL),
}


def a_rank_has_others(rank: int, world: int) -> None:
    shared = tonnage.apply(Plan(precision="fp32", shard="zero3"), network(), {"lr": 0.1})
    copies = tonnage.apply(Plan(precision="fp32", shard="ddp"), network(), {"lr": 0.1})
    for name, (given, message) in OF_RANK_1.items():
        mine = given if rank == 1 else [whole(), whole()]
        for call in (shared.step, shared.evaluate):
            with pytest.raises(UsageError, match=message) as raised:
                call(mine)
            assert "rank 1" in str(raised.value).lower() or rank == 1, name
    assert shared.step([whole()]).tokens == world * ROWS * (ROW - 1)
    fewer = [whole()] * (2 - rank)  # copies of the network exchange gradients once a step
    assert copies.step(fewer).tokens == copies.evaluate(fewer).tokens == 3 * ROWS * (ROW - 1)


def test_no_rank_waits_for_one_with_other_micro_batches() -> None:
    run_ranks(a_rank_has_others, 2)
