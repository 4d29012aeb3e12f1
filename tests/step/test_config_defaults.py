"""Sizes that a configuration leaves out are reported; those that follow from others, or are elsewhere in it, are
not.
"""

import gc
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tonnage.catalog.models import find_model, model_names
from tonnage.model import ModelRef
from tonnage.step import heads, model
from tonnage.step.config_defaults import describe_unstated_sizes
from tonnage.step.remarks import list_remarks

LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}


def told(model_type: str, **fields: Any) -> list[str]:
    return list(describe_unstated_sizes(AutoConfig.for_model(model_type, **fields), fields))


def test_nothing_is_told_of_what_is_said() -> None:
    assert told("llama", **LLAMA) == []
    assert told("gpt2", n_embd=64, n_head=4, n_layer=2, vocab_size=128) == []
    assert told("gpt2", hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=128) == []


def test_what_is_left_out_is_told_with_its_size() -> None:
    sizes = "hidden_size 4,096, vocab_size 32,000"
    assert told("llama", num_hidden_layers=2, num_attention_heads=32) == [
        f"the configuration leaves out hidden_size, vocab_size: {sizes}, as in transformers"
    ]
    assert told("gpt2", n_embd=64, n_head=4, vocab_size=128) == [
        "the configuration leaves out n_layer: n_layer 12, as in transformers"
    ]


def test_of_parts_too() -> None:
    """Gemma 3's published configuration leaves these to transformers."""
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "vocab_size": 262_208}
    vision = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16}
    assert told("gemma3", text_config=text, vision_config=vision) == [
        "text_config of the configuration leaves out num_attention_heads: num_attention_heads 8, as in transformers"
    ]


def test_a_size_that_follows_from_others_was_said() -> None:
    """Swin's last stage follows from its first; its heads and layers are lists."""
    assert told("swin", embed_dim=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24]) == []


@pytest.mark.parametrize("name", model_names())
def test_the_catalog_leaves_nothing_out(name: str) -> None:
    known = find_model(name)
    assert known is not None
    fields = dict(heads.trained_part(known.config())[0])
    assert told(**fields) == []


def test_a_network_says_so_for_as_long_as_it_lives() -> None:
    config = {"model_type": "llama", **LLAMA}
    del config["vocab_size"]
    ref = ModelRef(name="strange", kind="config", config=config)
    sentence = "the configuration leaves out vocab_size: vocab_size 32,000, as in transformers"
    network = model.build(ref, dtype=torch.float32, attention=None, device=torch.device("meta"))
    assert sentence in list_remarks()
    del network
    gc.collect()
    assert sentence not in list_remarks()
