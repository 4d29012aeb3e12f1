"""Tests of the flags that are tried where an inference engine does not start."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import estimates
from tonnage.catalog.devices import parse_cluster
from tonnage.script import engine_advice
from tonnage.script.engine_advice import list_changes, spell_command
from tonnage.script.planning import Asked
from tonnage.serving.answer import Serving

WORDS = "To serve at least one request, 16.0 GiB is needed; the estimated maximum model length is 49,552. Try ..."


def refused(
    words: str,
    *,
    engine: str = "vllm 0.33.0",
    weights_bytes: int = 16 << 30,
    activation_bytes: int = 1 << 30,
    **arguments: object,
):
    told = Serving(
        engine=engine,
        starts=False,
        error=words,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
    )
    estimate = estimates.scripted()
    return replace(estimate, fits=False, serving=told.to_json(), job={**estimate.job, "engine": arguments})


def test_the_engines_own_estimate_of_the_length_comes_first():
    changes = list_changes(refused(WORDS, gpu_memory_utilization=0.92), parse_cluster("2xh100-80gb"))
    assert changes == [
        {"max_model_len": 49552},
        {"tensor_parallel_size": 2},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"gpu_memory_utilization": 0.95},
    ]


def test_sglang_is_asked_in_its_own_words():
    told = {"mem_fraction_static": 0.7, "tp_size": 1}
    estimate = refused("Not enough memory.", engine="sglang 0.5.23", **told)
    assert list_changes(estimate, parse_cluster("2xh100-80gb")) == [
        {"tp_size": 2},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
        {"mem_fraction_static": 0.95},
    ]


def test_what_the_card_or_the_command_excludes_is_not_tried():
    told = {"gpu_memory_utilization": 0.96, "tensor_parallel_size": 2, "quantization": "awq"}
    assert list_changes(refused("out of memory", **told), parse_cluster("2xt4")) == []


def test_a_large_profile_run_is_made_smaller():
    few = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    assert few in list_changes(refused(WORDS, activation_bytes=8 << 30), parse_cluster("t4"))


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("/opt/bin/vllm serve m", "/opt/bin/vllm serve m --max-model-len 8"),
        (
            "python -m vllm.entrypoints.openai.api_server",
            "python -m vllm.entrypoints.openai.api_server --max-model-len 8",
        ),
        ("vllm serve m --max-model-len 9 --port 1", "vllm serve m --max-model-len 8 --port 1"),
        ("vllm serve m --max-model-len=9", "vllm serve m --max-model-len 8"),
        ("sglang serve --model-path m", "sglang serve --model-path m --max-model-len 8"),
        ("python -m sglang.launch_server", "python -m sglang.launch_server --max-model-len 8"),
        ("python own.py", "python own.py  # with max_model_len=8 in the code"),
    ],
)
def test_the_command_has_the_flag(command, line):
    assert spell_command(command.split(), {"max_model_len": 8}) == line


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/opt/bin/vllm serve m", ["starts with a KV cache of 1,234 tokens without compiled code and graphs"]),
        ("python -m vllm.entrypoints.openai.api_server --model m", ["starts with a KV cache of 1,234 tokens"]),
        ("vllm serve m --enforce-eager", []),
        ("python own.py", []),
    ],
)
def test_a_servers_answer_without_compiled_code_is_told_first(
    command: str, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    told = Serving(engine="vllm 0.33.0", starts=True, kv_cache_tokens=1234)
    started = replace(estimates.scripted(), serving=told.to_json())
    asked: list[str] = []

    def run(*_: object, variables: dict[str, str], **options: object) -> SimpleNamespace:
        asked.append(variables["TONNAGE_ENGINE"])
        return SimpleNamespace(estimate=started)

    monkeypatch.setattr(engine_advice.dry_run, "run", run)
    lines: list[str] = []
    card = parse_cluster("h100-80gb")
    engine_advice.say_eager_answer(Asked(command=command.split(), cluster=card, stated={}), lines.append)
    assert [line.startswith(start) for line, start in zip(lines, said, strict=True)] == [True] * len(said)
    assert asked == ['{"enforce_eager": true}'] * len(said)
