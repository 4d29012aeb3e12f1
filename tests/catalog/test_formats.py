"""Formats computed from their bits equal torch's figures and bitsandbytes' table."""

import importlib.util
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from tonnage.catalog.formats import FORMATS, find_format
from tonnage.cli import formats as command
from tonnage.errors import UsageError

ROOT = Path(__file__).parents[2]

TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8-e4m3": torch.float8_e4m3fn,
    "fp8-e5m2": torch.float8_e5m2,
    "mxfp8": torch.float8_e4m3fn,
}


@pytest.mark.parametrize("name", TORCH)
def test_floats_equal_torchs(name: str) -> None:
    ours, theirs = find_format(name), torch.finfo(TORCH[name])
    assert ours.storage_bits == theirs.bits
    assert ours.largest == theirs.max
    assert ours.smallest_normal == theirs.smallest_normal
    assert ours.epsilon == theirs.eps


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8-e4m3", "fp8-e5m2"])
def test_nothing_lies_between_zero_and_the_smallest_step(name: str) -> None:
    step = find_format(name).smallest_step
    written = torch.tensor([step, step * 0.49]).to(TORCH[name]).to(torch.float32)
    assert written.tolist() == [step, 0.0]


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16() -> None:
    tf32, fp32, fp16 = map(find_format, ("tf32", "fp32", "fp16"))
    assert (tf32.smallest_normal, tf32.epsilon) == (fp32.smallest_normal, fp16.epsilon)
    assert tf32.storage_bits == 32


def test_nvfp4_values() -> None:
    """E2M1 by hand: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    nvfp4 = find_format("nvfp4")
    assert (nvfp4.smallest_step, nvfp4.smallest_normal, nvfp4.largest) == (0.5, 1.0, 6.0)
    assert nvfp4.bits_per_value == Fraction(9, 2)  # 4 + 8 / 16


def test_scales_count_towards_the_bits_of_a_value() -> None:
    assert find_format("mxfp8").bits_per_value == Fraction(33, 4)  # 8 + 8 / 32
    assert find_format("nf4").bits_per_value == Fraction(9, 2)  # 4 + 32 / 64
    assert find_format("nf4-double-quant").bits_per_value == 4 + Fraction(8, 64) + Fraction(32, 64 * 256)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_nf4_equals_bitsandbytes_table() -> None:
    from bitsandbytes.functional import get_4bit_type

    theirs = get_4bit_type("nf4", device="cpu").tolist()
    assert find_format("nf4").codes == pytest.approx(theirs, abs=1e-6)  # bitsandbytes computes in fp32


def test_nf4_equals_the_table_of_the_paper() -> None:
    """QLoRA, arXiv 2305.14314, appendix E, to the digits that fp32 keeps."""
    codes = find_format("nf4").codes
    assert codes[0] == -1.0
    assert codes[7] == 0.0
    assert codes[15] == 1.0
    assert codes[1] == pytest.approx(-0.6961928009986877, abs=2e-7)
    assert codes[8] == pytest.approx(0.07958029955625534, abs=2e-7)


def test_devices_of_a_format_are_those_with_a_known_speed() -> None:
    devices = {each.name: {device.id for device in each.devices()} for each in FORMATS}
    assert "t4" in devices["fp16"] - devices["bf16"]
    assert "h100-80gb" in devices["fp8-e4m3"] - devices["mxfp8"]
    assert not devices["nf4"]
    assert devices["mxfp8"] < devices["fp8-e4m3"]


def test_only_fp16_needs_its_loss_scaled() -> None:
    assert [each.name for each in FORMATS if each.loss_scaling.startswith("yes")] == ["fp16"]


def test_unknown_format_lists_the_possible_ones() -> None:
    with pytest.raises(UsageError, match="possible: fp32, tf32"):
        find_format("fp64")
    assert find_format("FP8_E4M3").name == "fp8-e4m3"


def test_documentation_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    command.formats(markdown=True)
    assert capsys.readouterr().out == (ROOT / "docs" / "reference" / "formats.md").read_text()
