"""Networks that have no files and no formula: their weights are those of the network that transformers builds."""

import json

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate
from tonnage.serving.asking import ask_plans, ask_serving
from tonnage.serving.built_weights import complete_weights
from tonnage.serving.network import read_network
from tonnage.serving.quantization import NONE
from tonnage.serving.stored_weights import Share, stored_bytes
from tonnage.units import GIB

MAMBA2 = {
    **{"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 64},
    **{"state_size": 128, "num_heads": 80, "head_dim": 64, "expand": 2, "n_groups": 1, "conv_kernel": 4},
    **{"vocab_size": 50288, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "chunk_size": 256},
}
"""Mamba2-2.7B."""

FALCON_MAMBA = {
    **{"model_type": "falcon_mamba", "architectures": ["FalconMambaForCausalLM"], "hidden_size": 4096},
    **{"intermediate_size": 8192, "num_hidden_layers": 64, "state_size": 16, "conv_kernel": 4, "expand": 16},
    **{"time_step_rank": 256, "vocab_size": 65024, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
}
"""Falcon-Mamba-7B."""

JAMBA = {
    **{"model_type": "jamba", "architectures": ["JambaForCausalLM"], "hidden_size": 256, "intermediate_size": 512},
    **{"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024},
    **{"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 4, "attn_layer_offset": 2},
    **{"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_dt_rank": 16, "tie_word_embeddings": False, "max_position_embeddings": 4096},
}


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "weights", "peak", "pool", "requests"),
    [(MAMBA2, 5.119, 0.580, 66.760, 834), (FALCON_MAMBA, 13.562, 0.625, 58.243, 3139)],
    ids=["mamba2-2.7b", "falcon-mamba-7b"],
)
def test_networks_of_mamba_alone_hold_what_the_engine_says(config, weights, peak, pool, requests, tmp_path):
    """vLLM 0.33.0 on a ghost H100, without compiling."""
    settings = {"max_len": 8192, "max_seqs": 256, "eager": True}
    answer = ask_serving(write(tmp_path, config), settings, parse_cluster("h100-80gb"))
    serving = answer.serving
    assert serving.weights_bytes / GIB == pytest.approx(weights, abs=0.02)
    assert serving.activation_bytes / GIB == pytest.approx(peak, abs=0.02)
    assert serving.kv_cache_bytes / GIB == pytest.approx(pool, rel=0.005)
    assert serving.concurrency == pytest.approx(requests, rel=0.005)
    assert any("feed-forward layers" in line for line in answer.to_json()["coverage"]["assumed"])


def test_the_parameters_are_those_of_the_network(tmp_path):
    import transformers

    config = transformers.JambaConfig(**{name: value for name, value in JAMBA.items() if name != "model_type"})
    built = transformers.AutoModelForCausalLM.from_config(config)
    document = ask_serving(write(tmp_path, JAMBA), {"max_len": 512}, parse_cluster("l4")).to_json()
    parameters = sum(weight.numel() for weight in built.parameters())
    assert document["model"]["parameters"] == parameters
    assert document["serving"]["weights_bytes"] == pytest.approx(2 * parameters, rel=0.01)


def test_ranks_divide_built_weights(tmp_path):
    model = write(tmp_path, JAMBA)
    whole, half = (
        ask_serving(model, {"max_len": 512, "tp": tp}, parse_cluster(f"{tp}xl4")).serving.weights_bytes
        for tp in (1, 2)
    )
    assert whole / 2 < half < 0.55 * whole


def test_weights_that_a_configuration_says_are_quantized_are_counted_so(tmp_path):
    plain = ask_serving(write(tmp_path, MAMBA2), {"max_len": 512}, parse_cluster("h100-80gb")).serving.weights_bytes
    stated = {**MAMBA2, "quantization_config": {"quant_method": "fp8"}}
    found = ask_serving(write(tmp_path, stated), {"max_len": 512}, parse_cluster("h100-80gb")).serving.weights_bytes
    embedding = 2 * 50288 * 2560
    assert found - embedding == pytest.approx((plain - embedding) / 2, rel=0.02)  # of what the allocator rounds up


def test_a_network_that_keeps_no_tokens_is_not_offered_another_dtype_for_them(tmp_path):
    solution = ask_plans(write(tmp_path, MAMBA2), {}, parse_cluster("l4"), concurrency=8)
    assert solution.plans
    assert {plan.settings.kv_dtype for plan in solution.plans} == {"auto"}


def test_a_network_that_nobody_knows_is_said_to_be_unknown(tmp_path):
    model = write(tmp_path, {"model_type": "novelty", "hidden_size": 64})
    with pytest.raises(CannotEstimate, match=r"weights of a 'novelty' network are not known .* safetensors files"):
        ask_serving(model, {}, parse_cluster("l4"))


@pytest.mark.parametrize("kind", ["big_bird", "roformer", "rembert"])
def test_an_encoder_of_text_is_not_served(kind, tmp_path):
    config = {"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(CannotEstimate, match=f"generates no text .{kind}."):
        ask_serving(write(tmp_path, config), {}, parse_cluster("l4"))


def test_layers_of_a_tower_are_none_of_the_text(tmp_path):
    """Qwen2.5-VL-7B: 28 layers for text, 32 for images."""
    text = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    text |= {"num_key_value_heads": 2, "vocab_size": 1000, "model_type": "qwen2_5_vl_text"}
    vision = {"depth": 8, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 512}
    config = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision, "vocab_size": 1000}
    network = complete_weights(read_network(write(tmp_path, {**config, "audio_config": {}}), offline=True))
    whole = sum(stored_bytes(network.stored, NONE, NONE, Share(layers=range(4))).values())
    assert whole == 2 * network.parameters
    second = sum(stored_bytes(network.stored, NONE, NONE, Share(layers=range(2, 4))).values())
    towers = sum(tensor.bytes for tensor in network.stored if "visual" in tensor.name)
    assert towers > 0
    assert second < (whole - towers) * 0.8
