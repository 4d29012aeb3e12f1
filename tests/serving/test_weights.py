"""Weights of a served network: the published number of elements, and the bytes that engines say they loaded."""

import pytest

from tonnage.catalog.models import find_model, model_names
from tonnage.errors import CannotEstimate
from tonnage.serving.quantization import NONE, find_quantization, read_quantization
from tonnage.serving.weights import allocated_bytes, list_weights
from tonnage.timing.kinds import read_shape
from tonnage.units import GIB, MIB


def gib(name, quantization=NONE, **options):
    config = find_model(name).config()
    weights = list_weights(read_shape(config), positions=config["max_position_embeddings"], **options)
    return sum(weight.bytes(quantization) for weight in weights) / GIB


@pytest.mark.parametrize("name", model_names())
def test_elements_are_the_published_number(name):
    model = find_model(name)
    try:
        shape = read_shape(model.config())
    except CannotEstimate:
        pytest.skip("images, sounds, or an encoder beside the decoder")
    kept = [w for w in list_weights(shape) if w.name != "latent up, absorbed"]
    padding = (-shape.vocab % 64) * shape.hidden * (1 if shape.tied else 2)
    elements = sum(w.elements for w in kept) - padding
    assert elements == pytest.approx(model.parameters, rel=2e-4)  # final norm, biases of heads


@pytest.mark.parametrize(
    ("name", "quantization", "options", "loaded"),
    [
        ("llama-3.1-8b", "none", {}, 14.99),
        ("llama-3.1-8b", "none", {"tp": 2}, 7.51),
        ("llama-3.1-8b", "none", {"tp": 4}, 3.77),
        ("llama-3.1-8b", "none", {"layers": range(8)}, 4.26),  # the first of four stages
        ("llama-3.1-8b", "fp8", {}, 8.49),
        ("llama-3.1-8b", "int8", {}, 8.49),
        ("llama-3.1-8b", "gptq-int4", {}, 5.38),
        ("qwen2.5-7b", "none", {}, 14.25),
        ("qwen2.5-7b", "none", {"tp": 2}, 7.12),
        ("qwen2.5-7b", "fp8-channel", {}, 8.14),
        ("qwen3-8b", "none", {}, 15.27),
        ("qwen3-32b", "none", {}, 61.03),
        ("qwen3-30b-a3b", "none", {}, 56.88),
        ("deepseek-v2-lite", "none", {}, 29.43),
        ("gemma-2-9b", "none", {}, 17.22),
        ("gemma-2-27b", "none", {}, 50.72),
        ("granite-3.3-8b", "none", {}, 15.25),
        ("phi-4", "none", {}, 27.39),
        ("phi-2", "none", {}, 5.19),
        ("mixtral-8x7b", "none", {"tp": 2}, 43.51),
        ("qwen2.5-72b", "none", {"tp": 2}, 67.80),
        ("llama-3.3-70b", "fp8-channel", {"tp": 2}, 33.88),
        ("llama-3.3-70b", "fp8-channel", {"tp": 4}, 16.96),
        ("gpt-oss-20b", "mxfp4", {"padded_experts": True}, 13.47),
    ],
)
def test_bytes_are_those_of_start_up_logs(name, quantization, options, loaded):
    """vLLM's `Model loading took` (benchmarks/serving.toml); what is left is under a thousandth or 0.03 GiB."""
    of_experts = read_quantization({"quant_method": "mxfp4"})  # as gpt-oss is published
    published = of_experts if quantization == "mxfp4" else find_quantization(quantization)
    assert gib(name, published, **options) == pytest.approx(loaded, rel=1e-3, abs=0.03)


def test_the_allocator_keeps_small_rests():
    assert allocated_bytes(10 * MIB + 1) == 10 * MIB + 512
    assert allocated_bytes(18_944 * 3584 * 2) == 65 * 2 * MIB
    assert allocated_bytes(1) == 512
    assert allocated_bytes(64 * MIB + 1, 20 * MIB) == 66 * MIB  # vLLM 0.33 splits no block of 20 MiB
    assert allocated_bytes(14 * MIB + 1, 20 * MIB) == 14 * MIB + 512


def test_degrees_that_divide_nothing():
    shape = read_shape(find_model("llama-3.1-8b").config())
    with pytest.raises(ValueError, match="32 heads cannot be divided among 5 ranks"):
        list_weights(shape, tp=5)


def test_expert_parallel_ranks_have_whole_experts():
    shape = read_shape(find_model("qwen3-30b-a3b").config())
    divided = {w.name: w for w in list_weights(shape, tp=4)}["experts up"]
    whole = {w.name: w for w in list_weights(shape, tp=4, ep=4)}["experts up"]
    assert (divided.stacked, divided.rows) == (128, 2 * 768 // 4)
    assert (whole.stacked, whole.rows) == (32, 2 * 768)
    assert divided.elements == whole.elements
    fullest = {w.name: w for w in list_weights(shape, ep=6)}["experts up"]  # vLLM gives two ranks one more
    assert fullest.stacked == 22
