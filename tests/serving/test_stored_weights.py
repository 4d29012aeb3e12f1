"""Weights of a folder on one rank: as those of its configuration, and scales in their dtype."""

import json
import math
import struct

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import find_model
from tonnage.serving.closed_form import estimate_serving
from tonnage.serving.exports import vllm_words
from tonnage.serving.network import read_network
from tonnage.serving.quantization import NONE, find_quantization
from tonnage.serving.safetensors import StoredTensor
from tonnage.serving.settings import ServeSettings
from tonnage.serving.stored_weights import Share, stored_bytes
from tonnage.serving.towers import elements_on_rank, tower_ranks

LAYERS = 4


def moe_layer(config):
    """Return the tensors of a layer of Qwen3 with experts."""
    hidden, inner, width = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    layer = {
        **{"self_attn.q_proj": (queries, hidden), "self_attn.o_proj": (hidden, queries)},
        **{"self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden)},
        **{"self_attn.q_norm": (width,), "self_attn.k_norm": (width,)},
        "mlp.gate": (config["num_experts"], hidden),
    }
    for index in range(config["num_experts"]):
        layer |= {f"mlp.experts.{index}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        layer[f"mlp.experts.{index}.down_proj"] = (hidden, inner)
    return layer


def latent_layer(config):
    """Return the tensors of a dense layer of DeepSeek-V2."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        **{"self_attn.q_proj": (heads * (plain + rotated), hidden), "self_attn.o_proj": (hidden, heads * value)},
        "self_attn.kv_a_proj_with_mqa": (rank + rotated, hidden),
        "self_attn.kv_a_layernorm": (rank,),
        "self_attn.kv_b_proj": (heads * (plain + value), rank),
        **{"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)},
    }


def write(folder, config, layer, *, tied_head=False):
    """Write a configuration and a safetensors file of holes."""
    hidden = config["hidden_size"]
    tensors = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if tied_head or not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (config["vocab_size"], hidden)
    layer = {**layer, "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(content)) + content)
        stream.truncate(8 + len(content) + end)
    (folder / "config.json").write_text(json.dumps(config))


def weights_bytes(path, gpu, **settings):
    network = read_network(str(path), offline=True)
    return estimate_serving(network, ServeSettings(max_len=4096, **settings), parse_cluster(gpu)).worst.weights_bytes


@pytest.mark.parametrize(
    ("model", "layer", "settings"),
    [
        ("qwen3-30b-a3b", moe_layer, {}),
        ("qwen3-30b-a3b", moe_layer, {"tp": 8}),  # two ranks have the same key and value head
        ("qwen3-30b-a3b", moe_layer, {"dp": 4}),
        ("qwen3-30b-a3b", moe_layer, {"dp": 4, "ep": 4}),
        ("qwen3-30b-a3b", moe_layer, {"tp": 2, "dp": 2, "ep": 4}),
        ("qwen3-30b-a3b", moe_layer, {"pp": 2}),
        ("deepseek-v2-lite", latent_layer, {}),
        ("deepseek-v2-lite", latent_layer, {"tp": 4}),
        ("deepseek-v2-lite", latent_layer, {"pp": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_folder_weighs_on_a_rank_what_its_configuration_says(model, layer, settings, tmp_path):
    config = {**find_model(model).config(), "num_hidden_layers": LAYERS}
    if layer is latent_layer:
        config["first_k_dense_replace"] = LAYERS
    write(tmp_path, config, layer(config))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    gpu = f"{math.prod(settings.get(name, 1) for name in ('tp', 'pp', 'dp'))}xh100-80gb"
    computed = weights_bytes(tmp_path / "plain", gpu, **settings)
    assert weights_bytes(tmp_path, gpu, **settings) == pytest.approx(
        computed, rel=0.01
    )  # what the allocator rounds up


def test_a_head_that_is_the_embedding_is_counted_once(tmp_path):
    config = {**find_model("qwen3-30b-a3b").config(), "num_hidden_layers": 1, "tie_word_embeddings": True}
    sizes = []
    for both in (False, True):
        write(tmp_path, config, moe_layer(config), tied_head=both)
        sizes.append(weights_bytes(tmp_path, "h100-80gb"))
    assert sizes[0] == sizes[1]


def test_transformers_leaves_experts_that_are_one_tensor_as_they_are(tmp_path):
    config = {**find_model("qwen3-30b-a3b").config(), "num_hidden_layers": LAYERS}
    write(tmp_path, config, moe_layer(config))
    network = read_network(str(tmp_path), offline=True)
    experts = 2 * 3 * LAYERS * 128 * 768 * 2048
    for version, expected in (("5.23.0", experts), ("4.57.0", experts * 9 / 32)):
        settings = ServeSettings(max_len=4096, engine=f"transformers@{version}", quantization="nf4")
        found = estimate_serving(network, settings, parse_cluster("h100-80gb")).weights_by_part["experts"]
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_convolution_keeps_its_bits_and_the_matrices_around_it_do_not():
    """LFM2: `conv.in_proj` is a matrix like any other."""
    names = ("model.layers.0.conv.in_proj.weight", "model.layers.0.conv.conv.weight")
    shapes = ((3072, 1024), (1024, 1, 3))
    stored = [StoredTensor(n, "BF16", s, 2 * math.prod(s)) for n, s in zip(names, shapes, strict=True)]
    found = stored_bytes(stored, find_quantization("fp8"), NONE, Share())
    assert found == {"layers": 3072 * 1024 + 4, "others": 2 * 1024 * 3}


def test_scales_keep_their_dtype():
    """A matrix of 4,096 x 4,096 as bitsandbytes stores it: 4 bits, and 4 bytes for each block of 64."""
    elements, name = 4096 * 4096, "model.layers.0.self_attn.q_proj.weight"
    stored = [
        StoredTensor(name, "U8", (elements // 2, 1), elements // 2),
        StoredTensor(f"{name}.absmax", "F32", (elements // 64,), elements // 16),
    ]
    nf4 = find_quantization("nf4")
    assert stored_bytes(stored, nf4, nf4, Share())["layers"] == elements // 2 + elements // 16
    assert stored_bytes(stored, nf4, nf4, Share(tp=2))["layers"] == elements // 4 + elements // 32
    plain = [StoredTensor(name, "F32", (4096, 4096), 4 * elements)]
    assert stored_bytes(plain, NONE, NONE, Share())["layers"] == 2 * elements


def tower_tensors(config):
    """Return the tensors of Gemma 3's tower and of what joins it with the text."""
    vision, text = config["vision_config"], config["text_config"]
    hidden, inner, beginning = vision["hidden_size"], vision["intermediate_size"], "vision_tower.vision_model"
    tensors = {
        f"{beginning}.embeddings.patch_embedding.weight": (hidden, 3, 14, 14),
        f"{beginning}.embeddings.position_embedding.weight": (4096, hidden),
        "multi_modal_projector.mm_input_projection_weight": (hidden, text["hidden_size"]),
    }
    for index in range(vision["num_hidden_layers"]):
        layer = f"{beginning}.encoder.layers.{index}"
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in ("q", "k", "v", "out")}
        tensors |= {f"{layer}.mlp.fc1.weight": (inner, hidden), f"{layer}.mlp.fc2.weight": (hidden, inner)}
    return [StoredTensor(name, "BF16", shape, 2 * math.prod(shape)) for name, shape in tensors.items()]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_divide_the_matrices_of_a_tower_alike_with_a_folder_and_without(tp):
    config = find_model("gemma-3-27b").config()
    stored = tower_tensors(config)
    elements = sum(math.prod(tensor.shape) for tensor in stored)
    share = Share(layers=range(31), tp=tp, kv_heads=2, tower=tower_ranks(config, tp))
    assert sum(stored_bytes(stored, NONE, NONE, share).values()) == 2 * elements_on_rank(config, elements, tp)
    assert stored_bytes(stored, NONE, NONE, Share(layers=range(31, 62), tp=tp)) == {}  # a later stage


def test_a_tower_whose_heads_do_not_divide_is_whole_on_each_rank():
    config = find_model("gemma-3-27b").config()
    assert tower_ranks(config, 3) == 1
    assert elements_on_rank(config, 1000, 3) == 1000


def test_encoders_may_be_whole_on_each_rank():
    network = read_network("gemma-3-27b", offline=True)
    found = [
        estimate_serving(
            network, ServeSettings(max_len=4096, tp=tp, mm_encoder_tp_mode=mode), parse_cluster("2xh100-80gb")
        )
        for tp, mode in ((1, None), (2, "data"), (2, "weights"))
    ]
    whole, data, divided = (estimate.weights_by_part["towers"] for estimate in found)
    assert whole == data > divided
    assert "--mm-encoder-tp-mode data" in " ".join(vllm_words(found[1]))


@pytest.mark.parametrize(("model", "tp", "saved"), [("gemma-3-27b", 2, 0.383), ("qwen2.5-vl-7b", 2, 0.629)])
def test_a_configuration_alone_divides_its_tower(model, tp, saved):
    parts = [
        estimate_serving(
            read_network(model, offline=True), ServeSettings(max_len=4096, tp=degree), parse_cluster("2xh100-80gb")
        ).weights_by_part["towers"]
        for degree in (1, tp)
    ]
    assert (parts[0] - parts[1]) / 2**30 == pytest.approx(saved, abs=0.002)
