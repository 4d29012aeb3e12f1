"""Images, and the captions beside them."""

from dataclasses import replace

import pytest
import torch

from networks import tiny_job
from tonnage.model import ModelRef
from tonnage.step import model
from tonnage.step.inputs import images

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize(("seq_len", "expected"), [(128, 64), (32, 32)])
def test_captions_are_as_long_as_computed_positions(seq_len: int, expected: int) -> None:
    """Tipsv2 makes a table of positions in its forward, for 64 tokens."""
    config = {"model_type": "tipsv2", "text_config": SMALL | {"vocab_size": 99}, "vision_config": SMALL}
    reference = ModelRef(name="mine", kind="config", config=config)
    network = model.build(reference, dtype=torch.float32, attention=None, device=torch.device("meta"))
    job = replace(tiny_job("llama"), model=reference, seq_len=seq_len)
    assert images.with_captions(job, network, torch.float32)["input_ids"].shape[1] == expected
