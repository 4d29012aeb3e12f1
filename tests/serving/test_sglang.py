"""SGLang's pool in closed form beside its start-ups on the ghost (0.5.23, `tests/ghost/test_sglang_start.py`)."""

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.serving.closed_form import ServingEstimate, estimate_serving
from tonnage.serving.network import read_network
from tonnage.serving.settings import ServeSettings


def ask(model: str, gpu: str, **settings: object) -> ServingEstimate:
    stated = ServeSettings(**{"engine": "sglang@0.5.23", "max_len": 8192, **settings})  # type: ignore[arg-type]
    return estimate_serving(read_network(model, offline=True), stated, parse_cluster(gpu))


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
    ],
    ids=str,
)
def test_as_its_start_on_the_ghost(model: str, gpu: str, settings: dict[str, object], tokens: int) -> None:
    answer = ask(model, gpu, **settings).serving
    assert answer.engine == "closed form of sglang 0.5.23"
    assert answer.kv_cache_tokens == pytest.approx(tokens, rel=0.003)
    assert answer.low_tokens <= tokens <= answer.high_tokens


@pytest.mark.parametrize(("gpu", "chunk"), [("t4", 2048), ("l4", 4096), ("h100-80gb", 8192)])
def test_it_takes_what_a_card_of_its_size_can(gpu: str, chunk: int) -> None:
    assert ask("llama-3.2-1b", gpu).settings.max_batched_tokens == chunk


def test_a_smaller_chunk_and_fewer_sequences_leave_more_to_the_pool() -> None:
    usual = ask("llama-3.1-8b", "l40s")
    small = ask("llama-3.1-8b", "l40s", max_batched_tokens=1024, max_seqs=8)
    assert small.settings.utilization > usual.settings.utilization
    assert small.serving.kv_cache_tokens > usual.serving.kv_cache_tokens
