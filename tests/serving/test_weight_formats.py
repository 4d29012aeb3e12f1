"""Bytes of quantized matrices, and what checkpoints state about theirs."""

import pytest

from tonnage.catalog.formats import FORMATS
from tonnage.errors import CannotEstimate, UsageError
from tonnage.serving.quantization import NAMES, NONE, find_quantization, read_quantization

ROWS, COLUMNS = 1024, 4096


def per_weight(name):
    return 8 * find_quantization(name).bytes(ROWS, COLUMNS) / (ROWS * COLUMNS)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("none", 16),
        ("fp8-channel", 8 + 32 / COLUMNS),
        ("fp8-block", 8 + 32 / 128**2),
        ("int8", 8 + 32 / COLUMNS),
        ("gptq-int4", 4 + (16 + 4) / 128),
        ("awq-int4", 4 + (16 + 4) / 128),
    ],
)
def test_bits_of_a_weight(name, bits):
    assert per_weight(name) == bits


@pytest.mark.parametrize(("ours", "theirs"), [("nf4", "nf4"), ("nf4-double", "nf4-double-quant"), ("nvfp4", "nvfp4")])
def test_bits_agree_with_the_catalog_of_formats(ours, theirs):
    known = {item.name: item for item in FORMATS}
    assert per_weight(ours) == pytest.approx(float(known[theirs].bits_per_value))


def test_4_bits_with_scales():
    """Scales come on top of half a byte a weight."""
    assert per_weight("nf4") == 4.5
    assert per_weight("nf4-double") == pytest.approx(4.127, abs=1e-3)


def test_other_names_and_unknown_ones():
    assert find_quantization("AWQ").name == "awq-int4"
    assert find_quantization("bf16") is NONE
    with pytest.raises(UsageError, match=r"Unknown quantization 'fp7'.*Possible: none, fp8"):
        find_quantization("fp7")
    assert all(find_quantization(name).name == name for name in NAMES)


@pytest.mark.parametrize(
    ("stated", "name", "group"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block", 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, "gptq-int4", 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "gptq-int4", 0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq-int4", 128),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "nf4-double", 64),
        ({"quant_method": "mxfp4"}, "mxfp4", 32),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
                },
            },
            "fp8-channel",
            0,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                        "input_activations": {"num_bits": 8},
                    },
                },
            },
            "int8",
            0,
        ),
    ],
)
def test_what_checkpoints_state(stated, name, group):
    read = read_quantization(stated)
    assert (read.name, read.group) == (name, group)


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"quant_method": "aqlm"},
        {"quant_method": ["gptq"]},
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "gptq", "bits": 4, "group_size": 2**40},
        {"quant_method": "fp8", "weight_block_size": [None]},
        *("fp8", ["fp8"], 4),
        {"quant_method": "compressed-tensors", "config_groups": []},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}},
    ],
)
def test_what_cannot_be_read_is_one_line(stated):
    with pytest.raises(CannotEstimate, match="quantization") as refused:
        read_quantization(stated)
    assert "\n" not in str(refused.value)
