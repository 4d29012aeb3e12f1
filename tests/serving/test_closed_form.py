"""Whether engines start, and what they hold, by formulas."""

import json
import math
import struct

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import find_model
from tonnage.catalog.overheads import overheads
from tonnage.errors import CannotEstimate, UnreadableModel, UsageError
from tonnage.serving.advice import advise
from tonnage.serving.closed_form import estimate_serving
from tonnage.serving.exports import vllm_words
from tonnage.serving.facts import (
    estimated_graphs,
    graphs,
    outside_torch,
    parse_engine,
    runs_second,
    vllm_facts,
    with_second_runner,
)
from tonnage.serving.network import read_network
from tonnage.serving.settings import ServeSettings
from tonnage.units import GIB, MIB


def ask(model, gpu, **settings):
    return estimate_serving(read_network(str(model), offline=True), ServeSettings(**settings), parse_cluster(gpu))


def test_a_log_of_vllm_0_19_is_met_to_the_token():
    answer = ask("llama-3.1-8b", "h100-80gb", max_len=8192, gpu_memory_utilization=0.95, engine="vllm@0.19.0").serving
    assert answer.starts
    assert answer.error is None
    assert (answer.kv_cache_tokens, answer.blocks, answer.block_tokens) == (476_000, 29_750, 16)
    assert answer.concurrency == pytest.approx(58.11, abs=0.01)
    assert answer.low_tokens <= answer.kv_cache_tokens <= answer.high_tokens


def test_the_sampler_is_profiled_for_all_sequences():
    """vLLM 0.11, Llama 8B: 1.26 GiB with 256 sequences, 4.76 with 1,024."""
    few, many = (
        ask("llama-3.1-8b", "h100-80gb", max_seqs=seqs, engine="vllm@0.11.0").serving.activation_bytes / GIB
        for seqs in (256, 1024)
    )
    assert few == pytest.approx(1.26, abs=0.006)
    assert many == pytest.approx(4.76, abs=0.006)


def test_fp8_keys_and_values_hold_twice_the_tokens_in_the_same_pool():
    plain, half = (
        ask("llama-3.1-8b", "h100-80gb", max_len=8192, kv_dtype=dtype, engine="vllm@0.19.0").serving
        for dtype in ("auto", "fp8")
    )
    assert half.kv_cache_bytes == plain.kv_cache_bytes
    assert half.kv_cache_tokens == pytest.approx(2 * plain.kv_cache_tokens, abs=32)


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
    ],
    ids=lambda stated: stated["quant_method"],
)
def test_a_checkpoint_may_say_that_keys_and_values_are_fp8(stated, tmp_path):
    """0.33.0 on the ghost: 1,010,816 tokens, of a compressed-tensors checkpoint of Llama 8B with such a scheme."""
    config = find_model("llama-3.1-8b").config()
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    sizes = {"max_len": 8192, "max_batched_tokens": 16_384, "eager": True}
    answer = ask(tmp_path, "h100-80gb", **sizes)
    assert answer.serving.kv_cache_tokens == pytest.approx(1_010_816, rel=0.005)
    assert any("as the checkpoint says" in text for text in answer.assumed)
    plain = ask(tmp_path, "h100-80gb", kv_dtype="bf16", **sizes)
    assert plain.serving.kv_cache_tokens == pytest.approx(answer.serving.kv_cache_tokens / 2, abs=16)
    assert "--kv-cache-dtype bfloat16" in " ".join(vllm_words(plain))
    assert "--kv-cache-dtype" not in vllm_words(answer)


@pytest.mark.parametrize(
    ("model", "loaded"), [("gemma-3-27b", 51.45), ("gemma-3-4b", 8.58)], ids=["gemma-3-27b", "gemma-3-4b"]
)
def test_rotations_that_are_scaled_linearly_have_a_row_for_each_stretched_position(model, loaded):
    """Logs of 0.19.0; layers with a window have a table of their own, which is not stretched."""
    answer = ask(model, "h100-80gb", max_len=8192, engine="vllm@0.19.0")
    assert answer.serving.weights_bytes / GIB == pytest.approx(loaded, abs=0.015)
    assert read_network(model, offline=True).rotary_rows == 9 * 131_072


SMOLLM_3 = {
    **{"model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128_256, "tie_word_embeddings": True},
    **{"max_position_embeddings": 65_536, "no_rope_layers": [1, 1, 1, 0] * 9},
}
SCOUT = {
    **{"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384},
    **{"num_hidden_layers": 4, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
    **{"num_local_experts": 16, "num_experts_per_tok": 1, "vocab_size": 202_048, "attention_chunk_size": 8192},
    **{"max_position_embeddings": 10_485_760, "no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": False},
}
GLM = {
    **{"model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10_944, "moe_intermediate_size": 1408},
    **{"num_hidden_layers": 3, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
    **{"n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"vocab_size": 151_552, "max_position_embeddings": 131_072, "attention_bias": True},
    **{"tie_word_embeddings": False, "num_nextn_predict_layers": 1},
}
MINIMAX = {
    **{"model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 4},
    **{"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256},
    **{"num_experts_per_tok": 8, "rotary_dim": 64, "vocab_size": 200_064, "max_position_embeddings": 196_608},
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "loaded"),
    [(SMOLLM_3, 5.764), (SCOUT, 22.762), (GLM, 11.519), (MINIMAX, 29.656)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_a_few_layers_weigh_what_0_33_loads_on_the_ghost(config, loaded, tmp_path):
    """Tables of layers that do not all rotate, or a part of each head; networks without one; routers in fp32."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = ask(tmp_path, "h100-80gb", max_len=8192, eager=True)
    assert answer.serving.weights_bytes / GIB == pytest.approx(loaded, abs=0.0099)


def test_parameters_of_rotations_may_be_stated_for_each_kind_of_layer(tmp_path):
    config = find_model("gemma-3-4b-text").config()
    parts = {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling")}
    local = {"rope_theta": config.pop("rope_local_base_freq"), "rope_type": "default"}
    config["rope_parameters"] = {"full_attention": parts, "sliding_attention": local}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_network(str(tmp_path), offline=True).rotary_rows == 9 * 131_072


def test_mxfp4_is_made_of_all_matrices_of_16_bits():
    """0.33.0 on the ghost: 5.44 GiB; gpt-oss, which is published so, has 4 bits in its experts alone."""
    answer = ask("llama-3.1-8b", "h100-80gb", max_len=8192, quantization="mxfp4")
    assert answer.serving.weights_bytes / GIB == pytest.approx(5.442, abs=0.002)
    assert "--quantization mxfp4" in " ".join(vllm_words(answer))
    for engine in ("vllm@0.19.0", "sglang"):
        refused = ask("llama-3.1-8b", "h100-80gb", max_len=8192, quantization="mxfp4", engine=engine).serving
        assert "is not known to turn 16-bit weights into mxfp4 ones" in refused.error
    published = ask("gpt-oss-20b", "h100-80gb", max_len=8192, quantization="mxfp4", engine="vllm@0.19.0")
    assert published.starts
    assert published.serving.weights_bytes / GIB == pytest.approx(13.47, abs=0.03)


def test_some_kinds_are_computed_in_fp32_where_a_card_has_no_bf16():
    """0.33.0 on the ghost: 9.77 GiB of weights and 10,251 tokens on a T4."""
    sizes = {"max_len": 4096, "max_batched_tokens": 8192, "eager": True}
    answer = ask("gemma-2-2b", "t4", **sizes)
    assert answer.serving.weights_bytes / GIB == pytest.approx(9.77, abs=0.01)
    assert answer.serving.kv_cache_tokens == pytest.approx(10_251, rel=0.015)
    assert "vllm 0.33.0 computes such a network in fp32 on a card without bf16" in answer.assumed
    for model, gpu in (("gemma-2-2b", "l4"), ("qwen3-1.7b", "t4")):
        assert not any("fp32" in text for text in ask(model, gpu, **sizes).assumed)


def test_the_worst_stage_of_a_pipeline_decides():
    estimate = ask(
        "llama-3.1-8b", "2xh100-80gb", pp=2, max_len=8192, gpu_memory_utilization=0.95, engine="vllm@0.19.0"
    )
    assert estimate.worst.stage == 1  # it samples
    assert estimate.serving.kv_cache_tokens == pytest.approx(1_075_312, rel=0.003)


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "words"),
    [
        ("llama-3.1-70b", "h100-80gb", {}, "the weights take 131.4"),
        ("llama-3.1-8b", "rtx-4090", {}, "one request of 131,072 tokens needs 16.00 GiB"),
        ("qwen3-32b", "h100-80gb", {"max_len": 32_000, "engine": "vllm@0.11.0"}, "the longest that fits has"),
        ("llama-3.3-70b", "h100-80gb", {"quantization": "fp8", "engine": "vllm@0.11.0"}, "no memory is left"),
        ("llama-3.1-8b", "h100-80gb", {"gpu_memory_utilization": 1.0}, "less than gpu-memory-utilization 1 asks for"),
        ("llama-3.2-1b", "v100-32gb", {}, "7.0 of v100-32gb is too low: vllm 0.33.0 runs from 7.5 on (since 0.20.0)"),
        (
            "llama-3.2-1b",
            "v100-32gb",
            {"engine": "vllm@0.19.0", "quantization": "awq"},
            "awq-int4 weights from 7.5 on",
        ),
        ("llama-3.2-1b", "t4", {"engine": "vllm@0.13.0", "quantization": "fp8"}, "runs fp8 weights from 8.0 on"),
        ("gpt-oss-20b", "t4", {}, "vllm 0.33.0 runs mxfp4 weights from 8.0 on"),
        (
            "llama-3.2-1b",
            "h100-80gb",
            {"quantization": "nf4"},
            "bitsandbytes, which nf4 weights need, is not in vllm",
        ),
        ("gemma-2-9b", "t4", {"quantization": "awq"}, "computes such a network in fp32, and awq-int4 weights in 16"),
        (
            "llama-3.2-1b",
            "t4",
            {"kv_dtype": "fp8"},
            "7.5 of t4 is too low for keys and values of this network in fp8",
        ),
        ("gpt-oss-20b", "a100-80gb", {"kv_dtype": "fp8"}, "8.0 of a100-80gb is too low for keys and values"),
        ("deepseek-v2-lite", "a100-80gb", {"kv_dtype": "fp8", "max_len": 4096}, "is too low for keys and values"),
        ("llama-3.2-1b", "t4", {"kv_dtype": "bf16"}, "too low for keys and values in bf16"),
    ],
)
def test_what_does_not_start_says_why(model, gpu, settings, words):
    estimate = ask(model, gpu, **settings)
    assert not estimate.starts
    assert words in estimate.serving.error


def test_a_cache_in_fp8_is_read_where_a_backend_can():
    for model, gpu in (("llama-3.2-1b", "a100-80gb"), ("gpt-oss-20b", "l40s"), ("deepseek-v2-lite", "l40s")):
        assert ask(model, gpu, kv_dtype="fp8", max_len=4096).starts


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "expected"),
    [
        ("llama-3.1-8b", "t4", {"quantization": "mxfp4"}, {"quantization": "awq-int4", "max_len": 51_216}),
        ("llama-3.1-8b", "v100-32gb", {"max_len": 8192}, {"engine": "vllm@0.19"}),
        ("llama-3.1-8b", "h100-80gb", {"quantization": "nf4"}, {"engine": "vllm@0.27"}),
        ("llama-3.2-1b", "t4", {"kv_dtype": "fp8", "max_len": 4096}, {"kv_dtype": "auto"}),
        ("gemma-2-9b", "t4", {"quantization": "awq"}, {"gpu": "l4"}),
    ],
)
def test_what_is_not_supported_is_answered_with_what_is(model, gpu, settings, expected):
    """Another format with shorter requests, an older engine, another card; nothing that is refused as well."""
    estimate = ask(model, gpu, **settings)
    changes = [advice.change for advice in advise(estimate)]
    assert expected in changes
    assert all(advice.fits for advice in advise(estimate))


def test_a_format_that_the_card_cannot_compute_with_is_not_advised():
    assert {"quantization": "awq-int4"} not in [advice.change for advice in advise(ask("gemma-2-9b", "t4"))]


def test_experts_compute_the_tokens_of_all_replicas(tmp_path):
    """Four layers of Qwen3-30B-A3B with 0.33.0 on the ghost: 535,205 blocks, with whole experts and without."""
    config = {**find_model("qwen3-30b-a3b").config(), "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for ep in (1, 2):
        answer = ask(tmp_path, "2xh100-80gb", dp=2, ep=ep, max_len=8192, eager=True)
        assert answer.serving.blocks == pytest.approx(535_205, rel=0.001)
        assert answer.serving.outside_torch_bytes == pytest.approx(2_001_731_584, rel=0.001)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"max_len": 200_000},
            "max-len 200,000 is longer than llama-3.1-8b allows: its configuration states 131,072",
        ),
        ({"tp": 2}, "tp 2 x pp 1 x dp 1 needs 2 GPUs, and there are 1"),
        ({"kv_dtype": "int3"}, "Unknown kv-dtype 'int3'"),
        ({"mm_encoder_tp_mode": "both"}, "Unknown mm-encoder-tp-mode 'both'; possible: weights, data"),
        ({"quantization": "q5"}, "Unknown quantization 'q5'"),
        ({"engine": "tgi"}, "Unknown engine 'tgi' to serve with; possible: vllm, sglang, transformers"),
        ({"engine": "vllm@new"}, "'new' is no version of vllm"),
        ({"gpu_memory_utilization": 1.5}, "it must be above 0 and at most 1"),
        ({"max_seqs": 0}, "max-seqs is 0"),
        ({"engine": "transformers", "kv_dtype": "fp8"}, "in the network's own dtype"),
        ({"max_seqs": 512, "max_batched_tokens": 100}, "less than max-seqs 512"),
        ({"ep": 3}, "ep is 3"),
    ],
)
def test_bad_settings_are_one_line(settings, words):
    with pytest.raises(UsageError) as refused:
        ask("llama-3.1-8b", "h100-80gb", **settings)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("model", "gpu", "settings"),
    [
        ("llama-3.2-1b", "v100-32gb", {"engine": "vllm@0.19.0"}),
        ("llama-3.2-1b", "t4", {"quantization": "fp8"}),
        ("llama-3.2-1b", "h100-80gb", {"quantization": "nf4", "engine": "vllm@0.27.0"}),
        ("gpt-oss-20b", "a100-80gb", {"quantization": "mxfp4"}),
    ],
)
def test_what_a_version_still_runs_starts(model, gpu, settings):
    assert ask(model, gpu, max_len=4096, **settings).starts


@pytest.mark.parametrize(
    ("model", "gpu"), [("vit-base", "h100-80gb"), ("bert-base", "t4"), ("t5-base", "t4"), ("whisper-small", "t4")]
)
def test_networks_that_are_no_decoders_get_no_answer(model, gpu):
    with pytest.raises(CannotEstimate, match=r"generates no text|an encoder with a decoder") as refused:
        ask(model, gpu)
    assert "tonnage dry-run --gpu NAME -- vllm serve MODEL" in str(refused.value)


@pytest.mark.parametrize(
    "head", ["LlamaForSequenceClassification", "Qwen3ForTokenClassification", "LlamaForMaskedLM"]
)
def test_a_decoder_with_another_head_gets_no_answer(head, tmp_path):
    config = json.loads(json.dumps(find_model("llama-3.2-1b").config()))
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [head]}))
    with pytest.raises(CannotEstimate, match=rf"generates no text \({head}\)"):
        ask(tmp_path, "h100-80gb")


@pytest.mark.parametrize(
    ("stated", "word", "format_name"),
    [
        ({"quant_method": "fp8"}, "fp8", "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", "fp8-block"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq_marlin", "awq-int4"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "gptq", "int8-weight"),
        ({"quant_method": "mxfp4"}, "mxfp4", "mxfp4"),
        ({"quant_method": "fp8"}, "awq", None),
        ({"quant_method": "awq", "bits": 4}, "fp8", None),
        ({"quant_method": "awq", "bits": 4}, "gptq", None),
        ({"quant_method": "gptq", "bits": 4}, "none", None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp8", None),
    ],
    ids=str,
)
def test_weights_that_are_quantized_already_are_not_turned_into_others(stated, word, format_name, tmp_path):
    """As `_verify_quantization` of vllm/config/model.py decides, 0.11 to 0.33."""
    config = {**find_model("qwen3-30b-a3b").config(), "quantization_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    network = read_network(str(tmp_path), offline=True)
    if format_name is not None:
        assert network.load_as(word) == network.published
        assert network.published.name == format_name
    else:
        with pytest.raises(UsageError, match="weights already, and engines refuse another --quantization"):
            network.load_as(word)


@pytest.mark.parametrize(
    ("model", "word", "words"),
    [
        ("gpt-oss-20b", "fp8", "has mxfp4 weights already"),
        ("deepseek-v3", "nf4", "has fp8-block weights already"),
    ],
)
def test_formats_that_a_published_network_cannot_have(model, word, words):
    with pytest.raises(UsageError, match=words):
        ask(model, "8xh200", quantization=word)


@pytest.mark.parametrize(("degree", "gpu"), [({"tp": 5}, "8xh100-80gb"), ({"pp": 40}, "8x8xh100-80gb")])
def test_degrees_that_cannot_be(degree, gpu):
    with pytest.raises(UsageError, match=r"cannot be divided among 5 ranks|40 pipeline stages for 32 layers"):
        ask("llama-3.1-8b", gpu, **degree)


def test_a_part_of_an_expert_is_refused_by_the_degrees_that_make_it():
    with pytest.raises(UsageError, match=r"^--dp 7: 768 experts' inner width cannot be divided among 7 ranks\.$"):
        ask("qwen3-30b-a3b", "7xh100-80gb", dp=7)


def test_a_folder_with_weights_is_read(tmp_path):
    config = find_model("smollm2-135m").config()
    tensors = {
        "model.embed_tokens.weight": ("BF16", [49_152, 576]),
        "model.layers.0.mlp.down_proj.weight": ("BF16", [576, 1536]),
        "model.layers.0.input_layernorm.weight": ("F32", [576]),
    }
    file = write_folder(tmp_path, config, tensors)
    whole = ask(tmp_path, "l4")
    others = 2 * 49_152 * 576 + 1536  # the norm takes 1,152 bytes, in blocks of 512
    table = 2 * 64 * config["max_position_embeddings"]  # rotations, which no file has
    assert whole.weights_by_part == {"layers": 2 * 576 * 1536, "others": others, "rotation table": table}
    quantized = ask(tmp_path, "l4", quantization="fp8")
    assert quantized.weights_by_part["layers"] == 576 * 1536 + 512  # and a scale
    file.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(UnreadableModel, match="is not a safetensors file"):
        ask(tmp_path, "l4")


def write_folder(folder, config, tensors):
    """Write a config.json and a safetensors file of zeros, with tensors by name: dtype and shape."""
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * (4 if dtype == "F32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    content = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(content)) + content + bytes(end))
    return file


def test_a_kind_that_is_not_known_is_served_from_its_files(tmp_path):
    """Qwen3-Next: a state in three of four layers; weights by the headers, widths by the configuration."""
    config = {
        **{"model_type": "qwen3_next", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "full_attention_interval": 4},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "vocab_size": 1000},
        **{"linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "max_position_embeddings": 4096},
    }
    write_folder(tmp_path, config, {"model.layers.0.linear_attn.in_proj_qkvz.weight": ("BF16", [384, 256])})
    estimate = ask(tmp_path, "l4")
    assert estimate.starts
    assert estimate.weights_by_part == {"layers": 2 * 384 * 256}
    assert "layers like Qwen3's" in " ".join(estimate.assumed)
    assert [group.kind for group in estimate.worst.layout.groups] == ["state", "state", "state", "full"]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CannotEstimate, match="'qwen3_next' network are not known"):
        ask(tmp_path, "l4")


def test_a_network_that_is_not_known_is_refused(tmp_path):
    config = {"model_type": "rwkv9", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CannotEstimate, match="'rwkv9' network are not known"):
        ask(tmp_path, "l4")


def test_facts_hold_from_a_version_on():
    assert vllm_facts((0, 16, 0)).sampler_bytes == 36
    assert vllm_facts((0, 17, 0)).sampler_bytes == 12
    assert vllm_facts((0, 5)).since == "0.11.0"
    h100, a100 = (parse_cluster(name).device for name in ("h100-80gb", "a100-40gb"))
    assert outside_torch((0, 17), h100, tp=1, pp=1).bytes < outside_torch((0, 18), h100, tp=1, pp=1).bytes
    assert outside_torch((0, 19), a100, tp=1, pp=1) == outside_torch((0, 11), a100, tp=1, pp=1)
    assert graphs(h100, 80, has_experts=False).bytes > graphs(h100, 32, has_experts=False).bytes
    assert graphs(a100, 80, has_experts=False).bytes < graphs(h100, 80, has_experts=False).bytes
    early, later = vllm_facts((0, 20)), vllm_facts((0, 21))
    assert [vllm_facts(v).graphs_in_budget for v in ((0, 19, 1), (0, 20))] == [False, True]
    assert [facts.tokens_by_concurrency for facts in (early, later)] == [False, True]
    assert [vllm_facts(v).steps_in_flight for v in ((0, 25), (0, 26))] == [1, 2]
    assert str(parse_engine("vLLM==0.19.0")) == "vllm 0.19.0"
    assert parse_engine("vllm@0.20.1rc2").version == (0, 20, 1)


@pytest.mark.parametrize(
    ("version", "kind", "experts", "states", "quantized", "second"),
    [
        ((0, 21), "qwen3", False, False, False, False),
        ((0, 22), "qwen3", False, False, False, True),
        ((0, 22), "qwen3", False, False, True, False),
        ((0, 22), "llama", False, False, False, False),
        ((0, 24), "qwen2", False, False, False, False),
        ((0, 24), "deepseek_v2", True, False, True, True),
        ((0, 25), "qwen2", False, False, True, True),
        ((0, 25), "qwen3_moe", True, False, False, False),
        ((0, 28), "qwen3_5", False, True, False, False),
        ((0, 33), "qwen3_moe", True, False, False, True),
    ],
)
def test_which_model_runner_has_a_network(version, kind, experts, states, quantized, second):
    """As vllm/config/vllm.py of these versions decides."""
    assert runs_second(version, kind, has_experts=experts, has_states=states, quantized=quantized) is second


def test_the_second_runner_keeps_counts_of_words_and_estimates_graphs_late():
    facts = vllm_facts((0, 31))
    second = with_second_runner(facts, (0, 31), (9, 0))
    assert second.kept_bytes > facts.kept_bytes == 0
    assert [facts.graphs_in_budget, second.graphs_in_budget] == [True, False]
    assert with_second_runner(facts, (0, 33), (9, 0)).graphs_in_budget


@pytest.mark.parametrize(
    ("version", "capability", "sampler"),
    [
        ((0, 23), (7, 5), (12, False)),
        ((0, 24), (7, 5), (4, True)),
        ((0, 33), (7, 5), (4, True)),
        ((0, 33), (8, 0), (12, False)),
    ],
)
def test_cards_without_flashinfers_sampler_need_less_for_it(version, capability, sampler):
    second = with_second_runner(vllm_facts(version), version, capability)
    assert (second.sampler_bytes, second.sampler_rows) == sampler


def test_a_first_start_compiles_beside_a_second_table_of_words():
    """Logs of Qwen2.5-7B: 26.32 GiB left on an L40S in a first start, 4.45 on an RTX 4090 in a later one."""
    first = {"engine": "vllm@0.22.0", "max_seqs": 128, "max_batched_tokens": 2048, "gpu_memory_utilization": 0.95}
    cold, warm = (ask("qwen2.5-7b", "l40s", max_len=4096, warm=warm, **first) for warm in (False, True))
    assert cold.worst.pool_bytes / GIB == pytest.approx(26.32, abs=0.15)
    table = 152_064 * 3584 * 2 + 2 * 2048 * 3584 * 2
    assert cold.worst.profile.compile_bytes - table < 64 * MIB  # and cuBLAS's workspace
    assert warm.worst.profile.compile_bytes == 0
    assert warm.worst.profile.bytes < cold.worst.profile.bytes == cold.worst.profile.compile_bytes
    assert (
        cold.serving.high_tokens >= warm.serving.kv_cache_tokens > cold.serving.kv_cache_tokens
    )  # nobody knows which
    assert ["--warm" in " ".join(answer.assumed) for answer in (cold, warm)] == [True, False]
    later = ask("qwen2.5-7b", "rtx-4090", engine="vllm@0.24.0", max_len=2048, gpu_memory_utilization=0.85, warm=True)
    assert later.worst.pool_bytes / GIB == pytest.approx(4.45, abs=0.15)
    eager = ask("qwen2.5-7b", "l40s", max_len=4096, eager=True, **first)
    assert eager.worst.profile.compile_bytes == 0


def test_latent_attention_is_profiled_with_a_context_and_a_draft_beside_the_networks_output():
    """The tensors of one layer of DeepSeek-V3's width, as vLLM 0.33.0 has them on the ghost."""
    options = {"max_len": 8192, "max_batched_tokens": 4096, "max_seqs": 64, "tp": 8, "ep": 8, "eager": True}
    plain, drafting = (
        ask("deepseek-v3", "8xh200", **options, **draft) for draft in ({}, {"draft": "mtp", "draft_tokens": 1})
    )
    stream, heads = 4096 * 7168 * 2, 128 // 8
    compressed, up = (2 * 1536 + 2 * 512 + 64) * 2, heads * (192 + 128) * 2
    attention = 2 * stream + 4096 * (compressed + up) + 65_536 * heads * 256 * 2
    sampled = plain.worst.profile.sampler_bytes - 4096 * 7168 * 2 - 64 * (2 * 7168 * 2 + 129_280 * 14)
    assert plain.worst.profile.forward_bytes == pytest.approx(sampled + attention, abs=MIB)
    added = drafting.worst.profile.forward_bytes - plain.worst.profile.forward_bytes
    assert added == 5 * stream, "a buffer of the draft, the output, embeddings and two norms"


def test_a_version_that_is_not_known_yet_is_said():
    told = [
        " ".join(ask("llama-3.1-8b", "h100-80gb", engine=f"vllm@{version}").assumed) for version in ("99.0", "0.33.1")
    ]
    assert ["vllm 99.0 is newer" in told[0], "newer" in told[1]] == [True, False]


@pytest.mark.parametrize(("tokens", "utilization", "pool_gib"), [(65_536, 0.92, 4.15), (32_768, 0.96, 12.15)])
def test_experts_on_four_cards(tokens, utilization, pool_gib):
    """Logs of Qwen3-235B-A22B-Instruct-2507-FP8 with vLLM 0.20.0 on 4 x H100, with experts divided."""
    answer = ask(
        *("qwen3-235b-a22b", "4xh100-80gb"),
        **{"engine": "vllm@0.20.0", "quantization": "fp8-block", "tp": 4, "ep": 4, "max_len": 32_768},
        **{"max_seqs": 128, "max_batched_tokens": tokens, "gpu_memory_utilization": utilization},
    )
    assert answer.worst.pool_bytes / GIB == pytest.approx(pool_gib, abs=0.2)


@pytest.mark.parametrize(
    ("model", "gpu", "seqs", "tokens", "utilization", "pool_gib"),
    [
        ("llama-3.1-8b", "h100-80gb", 1024, 8192, 0.95, 57.89),
        ("llama-3.1-8b", "h100-80gb", 256, 2048, 0.95, 59.63),
        ("qwen2.5-7b", "a100-80gb", 1024, 2048, 0.9, 54.32),
        ("qwen3-0.6b", "t4", 256, 2048, 0.92, 11.81),
        ("llama-3.2-1b", "t4", 256, 2048, 0.92, 10.73),
    ],
)
def test_vllm_0_33_on_the_ghost(model, gpu, seqs, tokens, utilization, pool_gib):
    """Where nothing but torch's memory grows: eager start-ups, without kernels that libraries load."""
    estimate = ask(
        model,
        gpu,
        max_len=8192,
        max_seqs=seqs,
        max_batched_tokens=tokens,
        gpu_memory_utilization=utilization,
        engine="vllm@0.33.0",
        eager=True,
    )
    without_libraries = estimate.worst.pool_bytes + estimate.worst.outside.bytes
    assert without_libraries / GIB == pytest.approx(pool_gib, abs=0.08)


def test_transformers_pages_what_its_batch_leaves():
    estimate = ask("llama-3.1-8b", "h100-80gb", engine="transformers", max_len=8192)
    assert estimate.starts
    assert estimate.serving.block_tokens == 256
    assert estimate.serving.kv_cache_bytes < 0.9 * (79.19 - 14.99) * GIB
    with pytest.raises(CannotEstimate, match="plain attention only"):
        ask("deepseek-v2-lite", "h100-80gb", engine="transformers")
    half = ask("llama-3.1-8b", "h100-80gb", engine="transformers", max_len=8192, gpu_memory_utilization=0.45)
    assert half.serving.kv_cache_tokens < 0.5 * estimate.serving.kv_cache_tokens


@pytest.mark.parametrize("name", ["gemma-3-27b", "llava-1.5-7b"])
def test_towers_of_unknown_kinds_are_roughly_those_of_known_ones(name, tmp_path):
    """The same network under a name that is not known: its text is read, its tower estimated from the widths."""
    known = read_network(name, offline=True)
    config = find_model(name).config()
    text = config.get("text_config") or {key: value for key, value in config.items() if key != "vision_config"}
    text = {"model_type": "llama" if name.startswith("llava") else text["model_type"], **text}
    unknown = {**config, "model_type": "strange_vl", "text_config": {**text, "model_type": text["model_type"]}}
    (tmp_path / "config.json").write_text(json.dumps(unknown))
    rough = read_network(str(tmp_path), offline=True)
    assert rough.shape.parameters == pytest.approx(known.shape.parameters, rel=0.02)
    assert rough.tower_elements == pytest.approx(known.tower_elements, rel=0.2)
    assert any("image encoder" in sentence for sentence in ask(tmp_path, "8xh200", tp=1).assumed)


def test_buffers_of_nccl_are_older_than_the_first_look():
    one, two = (ask("llama-3.1-8b", f"{tp}xh100-80gb", tp=tp, max_len=8192) for tp in (1, 2))
    added = two.serving.outside_torch_bytes - one.serving.outside_torch_bytes
    growth = two.worst.outside.bytes - one.worst.outside.bytes
    assert added - growth == overheads(two.settings.device, [2]).nccl_bytes > 0
    budget = int(two.settings.device.capacity_bytes * two.settings.utilization)
    used = two.worst.weights_bytes + two.worst.profile.bytes + two.worst.outside.bytes
    graphs = estimated_graphs(two.worst.graphs).bytes
    assert two.worst.pool_bytes == budget - used - graphs, "so they are not taken from the pool"
