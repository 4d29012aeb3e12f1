"""SGLang's pool in closed form beside its start-ups on the ghost (0.5.23, `tests/ghost/test_sglang_start.py`)."""

import json
import re
from pathlib import Path

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import find_model
from tonnage.errors import CannotEstimate
from tonnage.serving.asking import read_served
from tonnage.serving.closed_form import ServingEstimate, estimate_serving
from tonnage.serving.document import to_json
from tonnage.serving.lengths import Lengths
from tonnage.serving.planning import Question, evaluate
from tonnage.serving.settings import ServeSettings


def ask(model: str, gpu: str, **settings: object) -> ServingEstimate:
    stated = ServeSettings(**{"engine": "sglang@0.5.23", "max_len": 8192, **settings})  # type: ignore[arg-type]
    return estimate_serving(read_served(model, stated, offline=True), stated, parse_cluster(gpu))


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "tokens"),
    [
        ("llama-3.2-1b", "h100-80gb", {"max_len": 4096, "eager": True}, 2_087_045),
        ("llama-3.2-1b", "h100-80gb", {"max_len": 4096}, 2_056_202),
        ("llama-3.2-1b", "l4", {"max_len": 4096, "eager": True}, 430_929),
        ("llama-3.2-1b", "l4", {"max_len": 4096}, 415_944),
        ("llama-3.1-8b", "h100-80gb", {}, 410_290),
        ("llama-3.1-8b", "2xh100-80gb", {"tp": 2}, 935_660),
        ("qwen3-30b-a3b", "h100-80gb", {}, 89_496),
        ("deepseek-v2-lite", "h100-80gb", {}, 1_195_093),
        ("gemma-2-2b", "h100-80gb", {}, 606_211),
        ("llama-3.1-8b", "b200", {}, 1_119_808),
        ("qwen2.5-vl-7b", "h100-80gb", {}, 805_131),
        ("llama-3.1-8b", "h100-80gb", {"kv_dtype": "fp8"}, 820_581),
    ],
    ids=str,
)
def test_as_its_start_on_the_ghost(model: str, gpu: str, settings: dict[str, object], tokens: int) -> None:
    answer = ask(model, gpu, **settings).serving
    assert answer.engine == "closed form of sglang 0.5.23"
    assert answer.kv_cache_tokens == pytest.approx(tokens, rel=0.003)
    assert answer.low_tokens <= tokens <= answer.high_tokens


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "tokens"),
    [
        ("qwen3-0.6b", "t4", {"max_len": 4096}, 88_166),
        ("llama-3.1-8b", "h100-80gb", {"quantization": "fp8"}, 461_394),
    ],
    ids=str,
)
def test_near_its_start_on_the_ghost(model: str, gpu: str, settings: dict[str, object], tokens: int) -> None:
    answer = ask(model, gpu, **settings).serving
    assert answer.kv_cache_tokens == pytest.approx(tokens, rel=0.006)
    assert answer.low_tokens <= tokens <= answer.high_tokens


@pytest.mark.parametrize(("gpu", "chunk"), [("t4", 2048), ("l4", 4096), ("h100-80gb", 8192)])
def test_it_takes_what_a_card_of_its_size_can(gpu: str, chunk: int) -> None:
    assert ask("llama-3.2-1b", gpu).settings.max_batched_tokens == chunk


def test_layers_with_a_window_have_a_pool_of_their_own(tmp_path: Path) -> None:
    """gpt-oss-20b in 16 bits, half of whose layers see 128 tokens."""
    model = find_model("gpt-oss-20b")
    assert model is not None
    (tmp_path / "config.json").write_text(json.dumps(model.config()))
    assert ask(str(tmp_path), "h100-80gb").serving.kv_cache_tokens == pytest.approx(629_767, rel=0.01)


def test_states_of_fixed_size_have_a_part_of_the_pool(tmp_path: Path) -> None:
    """Eight layers of Qwen3-Next's usual widths: 5,563,501 tokens, and 318 requests together by their states."""
    network = {
        **{"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 8},
        **{"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 151936, "full_attention_interval": 4},
        **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768},
        **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "decoder_sparse_step": 1},
        **{"shared_expert_intermediate_size": 512, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128},
        **{"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"}},
    }
    (tmp_path / "config.json").write_text(json.dumps(network))
    estimate = ask(str(tmp_path), "h100-80gb", eager=True)
    assert estimate.serving.kv_cache_tokens == pytest.approx(5_563_501, rel=0.003)
    assert estimate.settings.max_seqs == pytest.approx(318, rel=0.01)


def test_a_network_of_states_alone_is_not_known(tmp_path: Path) -> None:
    network = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "num_hidden_layers": 4}
    network |= {"hidden_size": 512, "vocab_size": 1024, "num_heads": 16, "head_dim": 64, "state_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(network))
    with pytest.raises(CannotEstimate, match="states alone is not known; name vllm"):
        ask(str(tmp_path), "h100-80gb")


def test_it_starts_with_less_than_its_longest_request() -> None:
    """A start on the ghost: 19,654 tokens, of 131,072 of a request."""
    estimate = ask("llama-3.1-8b", "l4", max_len=131_072, gpu_memory_utilization=0.8, eager=True)
    assert estimate.starts
    assert estimate.serving.kv_cache_tokens == pytest.approx(19_654, rel=0.01)
    assert any(text.startswith("sglang refuses requests of more than 19,") for text in estimate.assumed)
    question = Question(
        network=estimate.network,
        cluster=estimate.cluster,
        lengths=Lengths(p50=1000, p95=4000, output=300),
        concurrency=1,
        stated=estimate.settings.stated,
    )
    assert evaluate(question, estimate.settings.stated).held == 0


@pytest.mark.parametrize("layers", [[1], None])
def test_an_encoder_whose_fields_are_no_numbers_counts_as_a_usual_one(layers: object, tmp_path: Path) -> None:
    model = find_model("qwen2.5-vl-7b")
    assert model is not None
    config = model.config()
    config["vision_config"]["num_hidden_layers"] = layers
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        ask(str(tmp_path), "h100-80gb").settings.utilization == ask("qwen2.5-vl-7b", "h100-80gb").settings.utilization
    )


def test_many_sequences_lengthen_no_step() -> None:
    assert ask("llama-3.1-8b", "h100-80gb", max_seqs=10_000).settings.max_batched_tokens == 8192


@pytest.mark.parametrize(("version", "is_said"), [("0.5.23", False), ("0.4.1", True), ("0.5.9", True)])
def test_another_version_is_said_to_be_computed_as_the_known_one(version: str, is_said: bool) -> None:
    assumed = ask("llama-3.1-8b", "h100-80gb", engine=f"sglang@{version}").assumed
    assert any("is computed as sglang 0.5.23" in text for text in assumed) == is_said


def test_a_smaller_chunk_and_fewer_sequences_leave_more_to_the_pool() -> None:
    usual = ask("llama-3.1-8b", "l40s")
    small = ask("llama-3.1-8b", "l40s", max_batched_tokens=1024, max_seqs=8)
    assert small.settings.utilization > usual.settings.utilization
    assert small.serving.kv_cache_tokens > usual.serving.kv_cache_tokens


def test_a_small_chunk_reserves_as_much_as_one_of_2048_tokens() -> None:
    """`_handle_gpu_memory_settings` of 0.5.23: the working set is one of at least 2,048 tokens."""
    small, least = (ask("llama-3.2-1b", "l4", max_batched_tokens=tokens, eager=True) for tokens in (512, 2048))
    assert small.settings.utilization == least.settings.utilization
    assert small.serving.kv_cache_tokens == least.serving.kv_cache_tokens


def test_without_room_it_names_the_part_that_the_weights_do_not_fit() -> None:
    """A part of 0.15 of an H100, which has no share for the peak of a step."""
    estimate = ask("llama-3.1-8b", "h100-80gb", gpu_memory_utilization=0.15)
    error = estimate.serving.error
    assert error is not None
    assert "step's peak" not in error
    short, weights, room = map(float, re.findall(r"([\d.]+) GiB", error))
    assert room + short == pytest.approx(weights, abs=0.02)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_peak_of_a_start_without_room_lies_in_its_interval(engine: str) -> None:
    peak = to_json(ask("llama-3.1-8b", "t4", engine=engine, max_len=4096))["peak"]
    assert peak["low_bytes"] <= peak["process_bytes"] <= peak["high_bytes"]
