"""Dimensions of networks: every known configuration gives exactly the published number of weights."""

import pytest

from tonnage.catalog.models import find_model, model_names
from tonnage.errors import CannotEstimate
from tonnage.timing.kinds import read_shape

UNKNOWN_KINDS = {"gemma3", "t5", "vit", "qwen2_5_vl", "qwen3_vl", "llava", "whisper"}
"""Networks with images, sounds, or an encoder beside the decoder."""


@pytest.mark.parametrize("name", model_names())
def test_weights_are_the_published_number_or_the_kind_is_refused(name):
    model = find_model(name)
    config = model.config()
    if config["model_type"] in UNKNOWN_KINDS:
        with pytest.raises(CannotEstimate, match="is not known; its memory is"):
            read_shape(config)
    else:
        assert read_shape(config).parameters == model.parameters


def test_active_weights_of_mixtral():
    shape = read_shape(find_model("mixtral-8x7b").config())
    idle = 32 * 6 * 3 * 4096 * 14336  # layers x experts not chosen x matrices
    assert shape.active_parameters == shape.parameters - idle
    assert shape.active_parameters == pytest.approx(12.9e9, rel=0.01)  # the model card says 12.9 B


def test_a_field_that_is_missing_is_named():
    config = find_model("llama-3.1-8b").config()
    del config["intermediate_size"]
    with pytest.raises(CannotEstimate, match="does not say 'intermediate_size'"):
        read_shape(config)


def test_windows_are_read_by_layer():
    assert read_shape(find_model("gemma-3-1b").config()).window_fraction == pytest.approx(5 / 6)
    assert read_shape(find_model("gpt-oss-20b").config()).window_fraction == 0.5
    assert read_shape(find_model("mistral-7b-v0.3").config()).window is None


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("pythia-160m", {"intermediate_size": None}, "intermediate is not stated"),
        ("pythia-160m", {"num_hidden_layers": None}, "layers is not stated"),
        ("deepseek-v2-lite", {"sliding_window": [1]}, r"window is \[1\]"),
        ("llama-3.1-8b", {"sliding_window": 4096, "layer_types": True}, "cannot be read"),
        ("llama-3.1-8b", {"num_attention_heads": 0, "head_dim": None}, "cannot be read"),
    ],
)
def test_dimensions_that_are_no_numbers_are_unknown(name, changed, message):
    config = {**find_model(name).config(), **changed}
    with pytest.raises(CannotEstimate, match=message):
        read_shape(config)
