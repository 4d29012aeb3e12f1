"""A stranger's configuration names no code: whatever could load some is left out, at every depth, with a note."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.catalog import untrusted
from tonnage.catalog.configurations import resolve
from tonnage.catalog.models import find_model, known_model_names
from tonnage.catalog.untrusted import keep_inert
from tonnage.estimates.assumptions import describe_dropped_fields
from tonnage.job import Job
from tonnage.recorder.tonnage_recorder import script

TINY = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100},
}

LOADING: list[dict[str, Any]] = [
    {"attn_implementation": "org/kernel"},
    {"attn_implementation": "paged|org/kernel"},
    {"attn_implementation": "org/kernel@main:forward"},
    {"attn_implementation": ["sdpa"]},
    {"_attn_implementation": "org/kernel"},
    {"_attn_implementation_internal": "org/kernel"},
    {"experts_implementation": "org/experts"},
    {"experts_implementation": "sonicmoe"},
    {"_experts_implementation": "deepgemm"},
    {"auto_map": {"AutoModelForCausalLM": "org/name--code.Model"}},
    {"trust_remote_code": True},
    {"code_revision": "main"},
    {"custom_generate": "org/generates"},
    {"custom_generate": "."},
    {"custom_pipelines": {"a": {"impl": "code.Pipeline"}}},
    {"use_kernels": True},
    {"kernel_config": {"RMSNorm": "org/kernel:Norm"}},
    {"quantization_config": {"quant_method": "org/method"}},
    {"compile_config": {"backend": "module.of.mine"}},
    {"attribute_map": {"harmless": "_attn_implementation"}},
    {"sub_configs": {"text_config": "x"}},
    {"backbone": "org/backbone"},
    {"backbone": "hf-hub:org/backbone"},
    {"backbone": "local-dir:backbone"},
    {"backbone": "C:\\backbone"},
    {"architecture": "https://host/model.bin"},
    {"checkpoint_path": "weights.pth"},
    {"pretrained_cfg": {"file": "weights.pth"}},
    {"weights_file": "weights.pth"},
    {"vocabulary_repo": "mine"},
    {"names": ["silu", "org/name"]},
    {"org/name": 1},
]


@pytest.mark.parametrize("field", LOADING, ids=json.dumps)
@pytest.mark.parametrize("path", [(), ("text_config",), ("per_layer_config", "0"), ("a_list",), ("model_args",)])
def test_what_could_load_code_is_left_out(field: dict[str, Any], path: tuple[str, ...]) -> None:
    config: dict[str, Any] = {**field, "hidden_act": "silu"}
    for name in reversed(path):
        config = {name: [config] if name == "a_list" else config}
    kept, dropped = keep_inert(config)
    for name in path:
        kept = kept[name][0] if name == "a_list" else kept[name]
    assert kept == {"hidden_act": "silu"}
    assert len(dropped) == 1
    assert dropped[0].startswith(".".join([*(["a_list", "0"] if path == ("a_list",) else path), next(iter(field))]))


@pytest.mark.parametrize(
    "field",
    [
        {"attn_implementation": "eager"},
        {"attn_implementation": None},
        {"_attn_implementation": "sdpa"},
        {"attn_implementation": {"": "sdpa", "text_config": "flex_attention"}},
        {"experts_implementation": "grouped_mm"},
        {"hybrid_override_pattern": "M-M*-"},
        {"hidden_act": "gelu_pytorch_tanh", "dtype": "bfloat16", "layer_types": ["full_attention"]},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"id2label": {"0": "and/or", "1": "C:"}, "label2id": {"and/or": 0}},
        {"drop_path_rate": 0.1, "pretrained_window_sizes": [0, 0], "_sliding_window_pattern": 6},
        {"text_config": {"_sliding_window_pattern": 6}, "image_file_size": 3},
    ],
    ids=json.dumps,
)
def test_words_that_choose_among_what_is_known_stay(field: dict[str, Any]) -> None:
    assert keep_inert(field) == (field, ())


def test_an_implementation_stays_where_its_module_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers fetches a kernel in place of flash-attn where that is not installed."""
    field = {"attn_implementation": "flash_attention_2"}
    monkeypatch.setattr(untrusted, "find_spec", lambda name: None)
    assert keep_inert(field) == ({}, ("attn_implementation 'flash_attention_2'",))
    monkeypatch.setattr(untrusted, "find_spec", lambda name: name == "flash_attn" or None)
    assert keep_inert(field) == (field, ())


def test_one_part_of_a_table_is_left_out() -> None:
    table = {"text_config": "sdpa", "vision_config": "org/kernel"}
    kept, dropped = keep_inert({"attn_implementation": table})
    assert kept == {"attn_implementation": {"text_config": "sdpa"}}
    assert dropped == ("attn_implementation.vision_config 'org/kernel'",)


def test_weights_are_not_fetched_for_a_backbone() -> None:
    config = {"use_pretrained_backbone": True, "backbone_kwargs": {"pretrained": True}}
    assert keep_inert(config) == ({"use_pretrained_backbone": False, "backbone_kwargs": {"pretrained": False}}, ())


def test_the_catalog_has_nothing_to_leave_out() -> None:
    for name in known_model_names():
        known = find_model(name)
        assert known is not None
        assert keep_inert(known.config()) == (known.config(), ()), name


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
NESTED = st.recursive(PLAIN, lambda part: st.lists(part) | st.dictionaries(st.text(max_size=9), part), max_leaves=9)


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=9), NESTED))
def test_any_json_is_read_and_what_is_kept_is_kept_again(config: dict[str, Any]) -> None:
    kept, _ = keep_inert(config)
    assert keep_inert(kept) == (kept, ())


def test_a_file_and_its_note(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    fields = {f"repo_{index}": "org/x" for index in range(7)}
    file.write_text(
        json.dumps({**TINY, "attn_implementation": "org/kernel\x1b[2J", **fields, "_name_or_path": "a/b"})
    )
    model = resolve(file)
    assert model.config == TINY
    (note,) = describe_dropped_fields(Job(model=model))
    assert note.startswith("left out of the configuration, as it could load code or files: attn_implementation 'org/")
    assert "repo_3 'org/x' and 3 more;" in note
    assert r"attn_implementation 'org/kernel\x1b[2J'" in model.dropped
    file.write_text(json.dumps(TINY))
    assert describe_dropped_fields(Job(model=resolve(file))) == ()
    assert describe_dropped_fields(Job(model=resolve("gpt2"))) == ()


def test_an_infinity_is_a_number_at_every_depth():
    """As transformers 5 writes the limits of Mamba's time steps, and a recorded script its network."""
    high, low = ({"__float__": text} for text in ("Infinity", "-Infinity"))
    config = {**TINY, "time_step_limit": [0.0, high], "part": {"low": low}}
    kept, dropped = keep_inert(config)
    assert (kept["time_step_limit"], kept["part"], dropped) == ([0.0, math.inf], {"low": -math.inf}, ())
    written = json.dumps(script.plain(kept), allow_nan=False)  # as a trace holds it
    assert keep_inert(json.loads(written)) == (kept, ())
