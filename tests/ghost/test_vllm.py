"""vLLM itself in a dry-run, where TONNAGE_VLLM_PYTHON names a Python that has it; else skipped.

It pins a torch of its own: install `--no-deps vllm torch triton` and its pure dependencies in another environment.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tonnage
from commands import TONNAGE

PYTHON = os.environ.get("TONNAGE_VLLM_PYTHON", "")
GIB = 1 << 30

pytestmark = pytest.mark.skipif(
    not Path(PYTHON).is_file(), reason="vLLM pins a torch of its own; TONNAGE_VLLM_PYTHON names a Python that has it"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of Llama 3.1 8B, without weights and tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    command = [*TONNAGE, "models", "llama-3.1-8b", "--config"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    (folder / "config.json").write_text(shown.stdout)
    return folder


def dry_run(gpu: str, *arguments: str, code: int, own: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the document about `vllm serve` with these arguments, after the exit code was as expected."""
    program = str(Path(PYTHON).with_name("vllm"))
    command = [*TONNAGE, "dry-run", "--gpu", gpu, "--json", *own, "--", program, "serve", *arguments]
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PATH": os.pathsep.join([str(Path(PYTHON).parent), os.environ["PATH"]]),
    }
    ended = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert ended.returncode == code, ended.stderr[-2000:]
    document = json.loads(ended.stdout)
    assert isinstance(document, dict)
    return document


def test_a_server_starts_and_fills_its_share_of_the_card(llama: Path) -> None:
    document = dry_run("a100-80gb", str(llama), "--enforce-eager", "--max-model-len", "8192", code=0)
    serving = document["serving"]
    assert serving["engine"].startswith("vllm ")
    assert serving["weights_bytes"] / GIB == pytest.approx(15.0, abs=0.02)
    assert serving["kv_cache_bytes"] == serving["blocks"] * serving["block_tokens"] * 131072
    assert serving["concurrency"] == pytest.approx(serving["kv_cache_tokens"] / 8192, abs=0.01)
    assert document["peak"]["by_category"]["kv_cache"] == serving["kv_cache_bytes"]


def test_a_server_compiles_and_captures_a_model_named_as_on_the_hub() -> None:
    limits = ("--max-model-len", "2048", "--max-num-seqs", "1")
    document = dry_run("h100-80gb", "HuggingFaceTB/SmolLM2-135M", *limits, code=0)
    assert document["serving"]["graphs_bytes"] > 0
    assert document["serving"]["compile_cache"] in ("cold", "warm")
    assert document["serving"]["compile_peak_bytes"] > 0
    assert document["serving"]["compiled_here"] is False
    assert any("the Hub did not give HuggingFaceTB/SmolLM2-135M" in text for text in document["coverage"]["assumed"])


ASLEEP = """
import torch
from vllm import LLM

engine = LLM(
    "HuggingFaceTB/SmolLM2-135M",
    **{"enforce_eager": True, "enable_sleep_mode": True, "gpu_memory_utilization": 0.5, "max_model_len": 2048},
)
engine.sleep(level=1)
network = torch.nn.Linear(16384, 16384, bias=False, device="cuda")
optimizer = torch.optim.AdamW(network.parameters())
for _ in range(2):
    network(torch.ones(350_000, 16384, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_sleeps_is_not_counted_while_others_use_the_card(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASLEEP)
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [*TONNAGE, "dry-run", "--gpu", "h100-80gb", "--json", "--", PYTHON, str(tmp_path / "train.py")]
    ended = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert ended.returncode == 0, ended.stderr[-2000:]
    document = json.loads(ended.stdout)
    assert document["peak"]["by_category"]["kv_cache"] == 0
    assert document["peak"]["process_bytes"] == pytest.approx(document["cards"][0]["peak_bytes"], rel=0.01)
    assert not any("torch's counter" in text for text in document["coverage"]["modelled"])


def test_a_server_without_room_says_so_and_what_would_start_was_run(llama: Path) -> None:
    document = dry_run("rtx-4090", str(llama), "--enforce-eager", code=1)
    assert "GiB KV cache is needed" in document["serving"]["error"]
    first = document["advice"][0]
    assert first["fits"]
    assert first["change"]["max_model_len"] <= first["kv_cache_tokens"]
    assert first["command"].endswith(f"--max-model-len {first['change']['max_model_len']}")


def test_requests_are_served_by_its_scheduler(llama: Path) -> None:
    own = ("--requests", "p50=400,p95=2000,output=4", "--timeout", "400")
    document = dry_run("rtx-4090", str(llama), "--enforce-eager", "--max-model-len", "4096", code=0, own=own)
    load = document["serving"]["load"]
    assert 0 < load["finished"] <= load["requests"]
    assert 0 < load["running_most"] <= 256


@pytest.mark.parametrize(
    "settings",
    [
        {"max_loras": 4, "max_lora_rank": 64},
        {"draft": "ngram", "draft_tokens": 3},
        {"draft": "llama-3.2-1b", "draft_tokens": 3},
        {"gpu": "2xh100-80gb", "dp": 2},
        {"gpu": "2xh100-80gb", "pp": 2},
        {"gpu": "h100-80gb", "model": "deepseek-v2-lite"},
        {"gpu": "2xh100-80gb", "model": "qwen3-30b-a3b", "tp": 2, "ep": 2},
        {"gpu": "b200"},  # its attention is FlashInfer's, which is compiled at run time and planned on the host
    ],
    ids=str,
)
def test_the_closed_form_is_near_the_engine(settings: dict[str, Any]) -> None:
    """With 0.33.0, in the order above: 0.10, 0.04, 0.05, 0.02, 0.18, 0.06, 0.42 and 0.13 % of the tokens."""
    asked = {"model": "llama-3.1-8b", "task": "serve", "gpu": "a100-80gb", "eager": True, "max_len": 8192, **settings}
    answer = tonnage.estimate(**asked, engine_python=PYTHON)
    assert answer.ran is not None
    assert answer.serving.kv_cache_tokens == pytest.approx(answer.estimate.serving.kv_cache_tokens, rel=0.005)


@pytest.mark.parametrize("draft", [{}, {"draft": "mtp", "draft_tokens": 1}], ids=["plain", "mtp"])
def test_latent_attention_of_128_heads_is_near_the_engine(tmp_path: Path, draft: dict[str, Any]) -> None:
    """Three 16-bit layers of DeepSeek-V3's width, a sixteenth of its experts; with 0.33.0: 0.25 and 0.28 %."""
    shown = subprocess.run(
        [*TONNAGE, "models", "deepseek-v3", "--config"], capture_output=True, text=True, check=True
    )
    config = json.loads(shown.stdout)
    del config["quantization_config"]
    fewer = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "n_group": 1,
        "topk_group": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | fewer))
    asked = {"model": str(tmp_path), "task": "serve", "gpu": "h100-80gb", "eager": True, "max_len": 8192, **draft}
    answer = tonnage.estimate(**asked, engine_python=PYTHON)
    assert answer.ran is not None
    assert answer.serving.kv_cache_tokens == pytest.approx(answer.estimate.serving.kv_cache_tokens, rel=0.005)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "qwen2.5-vl-7b", "max_len": 16384},
        {"model": "qwen3-vl-8b", "max_len": 16384},
        {"model": "qwen3-30b-a3b", "max_len": 8192, "max_loras": 2, "max_lora_rank": 16},
        {"model": "qwen3-0.6b", "gpu": "t4", "max_len": 4096},
    ],
    ids=str,
)
def test_the_engine_is_within_the_closed_form_s_interval(settings: dict[str, Any]) -> None:
    """Encoders of images, adapters on experts, a card that samples otherwise; with 0.33.0, in this order: 0.62, 1.02,
    1.14 and 0.57 %."""
    asked = {"task": "serve", "gpu": "h100-80gb", "eager": True, **settings}
    answer = tonnage.estimate(**asked, engine_python=PYTHON)
    assert answer.ran is not None
    closed = answer.estimate.serving
    assert answer.serving.weights_bytes == pytest.approx(closed.weights_bytes, rel=0.01)
    assert closed.low_tokens <= answer.serving.kv_cache_tokens <= closed.high_tokens
