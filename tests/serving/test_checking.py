"""A folder that is loaded for real: predicted bytes beside measured ones, and folders that cannot be loaded."""

import json
import math
import struct

import pytest

from tonnage.errors import TrialFailed, UnreadableModel, UsageError
from tonnage.serving import checking, loading

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
LAYER = {
    **{"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256)},
    **{"self_attn.o_proj": (256, 256), "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256)},
    **{"mlp.down_proj": (256, 512), "input_layernorm": (256,), "post_attention_layernorm": (256,)},
}
TENSORS = {
    "model.embed_tokens.weight": (500, 256),
    "model.norm.weight": (256,),
    "lm_head.weight": (500, 256),
    **{f"model.layers.{index}.{name}.weight": shape for index in range(2) for name, shape in LAYER.items()},
}
SCALED = sum(math.prod(shape) for name, shape in TENSORS.items() if "_proj" in name)


def write(folder, tensors, **config):
    """Write a folder whose weights are all zero."""
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content + bytes(end))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write(tmp_path_factory.mktemp("llama"), TENSORS)


def test_predicted_bytes_are_the_measured_ones(llama):
    pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    checked = checking.check_folder(str(llama), quantization="nf4", device="cpu", tokens=3)
    weights, footprint, cache = checked.figures
    assert checked.generated == 3
    assert cache.predicted_bytes == cache.measured_bytes == 2 * 2 * 2 * 64 * 2 * (checking.PROMPT + 2)
    assert abs(weights.error) < 0.002
    assert abs(footprint.error) < 0.0005
    scales = weights.measured_bytes - footprint.measured_bytes
    assert scales == 4 * SCALED // 64 + 14 * 16 * 4  # and a table for each matrix


def test_experts_in_one_tensor_keep_16_bits(tmp_path):
    pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("bitsandbytes")
    experts = {f"mlp.experts.{e}.{name}_proj": (64, 256) for e in range(4) for name in ("gate", "up")}
    experts |= {f"mlp.experts.{e}.down_proj": (256, 64) for e in range(4)}
    attention = {name: shape for name, shape in LAYER.items() if not name.startswith("mlp.")}
    norms = {"self_attn.q_norm": (64,), "self_attn.k_norm": (64,)}
    layer = {**attention, **norms, **experts, "mlp.gate": (4, 256)}
    tensors = {name: shape for name, shape in TENSORS.items() if "layers." not in name}
    tensors |= {f"model.layers.{index}.{name}.weight": shape for index in range(2) for name, shape in layer.items()}
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 4}
    write(tmp_path, tensors, **kind, num_experts_per_tok=2, moe_intermediate_size=64)
    weights, *_ = checking.check_folder(str(tmp_path), quantization="nf4", device="cpu", tokens=1).figures
    assert abs(weights.error) < 0.002


def test_a_folder_that_lacks_tensors_is_incomplete(tmp_path):
    pytest.importorskip("transformers")
    lacking = {name: shape for name, shape in TENSORS.items() if "layers.1.mlp" not in name}
    with pytest.raises(UnreadableModel, match=r"is incomplete: .*3 tensors .* such as model.layers.1.mlp"):
        checking.check_folder(str(write(tmp_path, lacking)), device="cpu")


def test_nothing_is_left_behind_at_the_time_limit(llama):
    with pytest.raises(TrialFailed, match=r"was not loaded after 0 s\."):
        checking.check_folder(str(llama), timeout_seconds=0.01)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantization": "q4_0"}, "Unknown quantization 'q4_0'"),
        ({"quantization": "awq-int4"}, "the 16-bit weights .* awq-int4 ones; possible: none, int8, nf4, nf4-double"),
        ({"device": "tpu"}, "Unknown device 'tpu'; possible: auto, cpu, cuda"),
        ({"tokens": 0}, "tokens is 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_it_is_loaded(llama, monkeypatch, options, reason):
    monkeypatch.setattr(checking, "_load", None)
    with pytest.raises(UsageError, match=reason):
        checking.check_folder(str(llama), **options)


def test_a_card_that_is_not_there_is_one_line(llama):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UsageError, match=r"^--device cuda: torch .* finds no GPU of NVIDIA .* give cpu\.$"):
        checking.check_folder(str(llama), device="cuda")


def test_an_infinity_in_the_configuration_is_a_number(tmp_path):
    """As transformers 5 writes Mamba's limits of time steps."""
    pytest.importorskip("transformers")
    config = {"model_type": "mamba2", "hidden_size": 4096, "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert list(loading._read_config(str(tmp_path)).time_step_limit) == [0.0, math.inf]


def test_what_could_load_code_is_left_out_of_the_configuration(tmp_path):
    pytest.importorskip("transformers")
    write(tmp_path, TENSORS, attn_implementation="org/kernel", auto_map={"AutoConfig": "there.Config"})
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "custom": "org/code"}
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**document, "quantization_config": stored}))
    config = loading._read_config(str(tmp_path))
    assert config.hidden_size == CONFIG["hidden_size"]
    assert "org/" not in json.dumps(config.to_dict(), default=str)
    assert not hasattr(config, "auto_map")
    assert config.quantization_config["load_in_4bit"]
