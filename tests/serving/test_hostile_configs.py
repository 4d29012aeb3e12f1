"""Configurations from anywhere: whatever their fields hold, the answer is an estimate or one clear line."""

import json
import random

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import find_model
from tonnage.errors import TonnageError
from tonnage.serving.closed_form import estimate_serving
from tonnage.serving.lengths import Lengths
from tonnage.serving.load import serve_load
from tonnage.serving.network import read_network
from tonnage.serving.settings import ServeSettings

MODELS = ("llama-3.1-8b", "gemma-2-2b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3-30b-a3b", "gemma-3-4b", "gpt2")
JUNK = (None, 0, -1, 1, 3, 7, 2**31, 2**70, 1.5, float("inf"), "x", "", [], ["x"], [1], {}, {"a": 1}, True, False)
FIELDS = (
    *("sliding_window", "layer_types", "rope_scaling", "kv_lora_rank", "qk_rope_head_dim", "head_dim"),
    *("linear_num_value_heads", "full_attention_interval", "sliding_window_pattern", "mamba_ssm_dtype"),
    *("quantization_config", "text_config", "global_head_dim", "v_head_dim", "attn_layer_period", "multi_query"),
)
QUANTIZED = (
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
    {"quant_method": "fp8", "weight_block_size": [0, 0]},
    {"quant_method": "awq", "bits": 0, "group_size": 0},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 2**30}}}},
)


@pytest.mark.parametrize("seed", range(24))
def test_any_fields_give_an_answer_or_one_line(tmp_path, seed):
    chance = random.Random(seed)
    cluster = parse_cluster("2xh100-80gb")
    for number in range(12):
        config = dict(find_model(chance.choice(MODELS)).config())
        for _ in range(chance.randint(1, 3)):
            name = chance.choice([*config, *FIELDS])
            config[name] = chance.choice(QUANTIZED) if name == "quantization_config" else chance.choice(JUNK)
        folder = tmp_path / f"{number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        settings = ServeSettings(tp=chance.choice([1, 2]), kv_dtype=chance.choice(["auto", "fp8"]))
        try:
            estimate = estimate_serving(read_network(str(folder), offline=True), settings, cluster)
            if estimate.starts:
                serve_load(estimate, Lengths(p50=20, p95=40, output=4), 2)
        except TonnageError as error:
            lines = str(error).splitlines()
        else:
            lines = [""]
        assert len(lines) == 1
