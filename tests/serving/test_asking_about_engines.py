"""Questions about serving from Python: the answers and the errors of the command line."""

import json
from typing import Any

import pytest

import tonnage
from tonnage.catalog.devices import parse_cluster
from tonnage.cli import main
from tonnage.errors import TonnageError, UsageError
from tonnage.options import spell_option


def on_the_command_line(capsys: pytest.CaptureFixture[str], command: str, options: dict[str, Any]) -> tuple[int, str]:
    """Return the exit code, and the document or the line of the error."""
    words = [command, "llama-3.1-8b", "--json"]
    for name, value in options.items():
        words += [f"--{spell_option(name)}"] if value is True else [f"--{spell_option(name)}", f"{value}"]
    code = main.run(words)
    out, err = capsys.readouterr()
    return code, out or err.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"gpu": "h100-80gb", "max_len": 8192, "engine": "vllm@0.19.0"}, 0),
        ({"gpu": "2xl4", "tp": 2, "kv_dtype": "fp8", "eager": True, "lengths": "p50=500,p95=900"}, 0),
        ({"gpu": "t4", "quantization": "none", "concurrency": 8, "lengths": "p50=500"}, 1),
    ],
    ids=str,
)
def test_an_estimate_is_that_of_the_command_line(capsys, options, code):
    answer = tonnage.estimate("llama-3.1-8b", task="serve", **options)
    shown = on_the_command_line(capsys, "estimate", {"task": "serve", **options})
    assert shown == (code, json.dumps(answer.to_json(), indent=2) + "\n")
    assert answer.starts is answer.serving.starts is (code == 0)


def test_a_plan_is_that_of_the_command_line(capsys):
    options = {"gpu": "2xl4", "concurrency": 2, "lengths": "p50=200,p95=300,output=20", "quantization": "awq-int4"}
    solution = tonnage.plan("llama-3.1-8b", task="serve", **options)
    shown = on_the_command_line(capsys, "plan", {"task": "serve", **options})
    assert shown == (0, json.dumps(solution.to_json(), indent=2) + "\n")
    assert {plan.settings.quantization for plan in solution.plans} == {"awq-int4"}


@pytest.mark.parametrize(
    ("find", "options", "words"),
    [
        ("max-len", {"gpu": "t4", "max_len": 512}, "looks for what --max-len says; leave --max-len out"),
        ("max-len", {"gpu": "t4", "concurrency": 4}, "looks for the length of one request; leave --concurrency out"),
        ("max-concurrency", {"gpu": "t4", "concurrency": 4}, "looks for what --concurrency says"),
        ("quantization", {"gpu": "t4", "quantization": "fp8"}, "looks for what --quantization says"),
        ("min-gpu", {"gpu": "t4"}, "looks for the card, and --gpu says it"),
        ("min-gpus", {"gpu": "2xt4"}, "looks for the number of GPUs, and --gpu says 2"),
    ],
    ids=str,
)
def test_what_is_looked_for_cannot_be_stated(capsys, find, options, words):
    options = {"task": "serve", "find": find, **options}
    with pytest.raises(UsageError, match=words) as refused:
        tonnage.plan("llama-3.1-8b", **options)
    assert on_the_command_line(capsys, "plan", options) == (2, str(refused.value))


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize(
    "options",
    [
        {"gpu": "t4", "seq_len": 512, "task": "serve"},
        {"gpu": "t4", "max_len": 512},
        {"gpu": "t4", "kv_dtype": "fp8"},
        {"gpu": "t4", "task": "infer"},
        {"gpu": "t4", "task": "serve", "quantization": "q4_0"},
        {"gpu": "t4", "task": "serve", "kv_dtype": "int2"},
        {"gpu": "t4", "task": "serve", "engine": "axolotl"},
        {"gpu": "t4", "task": "serve", "max_len": 200_000},
        {"gpu": "t4", "task": "serve", "lengths": "p95=5"},
        {"gpu": "t4", "task": "serve", "tokens": 5},
        {"gpu": "t4", "task": "serve", "host_memory": "64GiB"},
        {"gpu": "3xt4", "task": "serve", "tp": 3},
        {"task": "serve"},
    ],
    ids=str,
)
def test_errors_are_those_of_the_command_line(capsys, command, options):
    with pytest.raises(TonnageError) as refused:
        getattr(tonnage, command)("llama-3.1-8b", **options)
    assert on_the_command_line(capsys, command, options) == (refused.value.exit_code, str(refused.value))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_lens": 512}, "Unknown option 'max_lens' of --task serve; close: max_len; possible: acceptance, "),
        ({"max_seqs": 0}, "max-seqs is 0; it must be a whole number of at least 1"),
        ({"max_len": "8k"}, "max-len is '8k'; it must be a whole number"),
        ({"eager": "yes"}, "eager is 'yes'; it must be True or False"),
        ({"engine": 5}, "engine is 5; it must be a word"),
        ({"kv_dtype": ["fp8"]}, "kv-dtype is .*; it must be a word"),
        ({"gpu_memory_utilization": "0.9"}, "gpu-memory-utilization is '0.9'; it must be above 0"),
        ({"lengths": 5}, "lengths are 5; give a text"),
        ({"concurrency": 2.5, "lengths": "p50=5"}, "concurrency is 2.5; it must be a whole number"),
    ],
    ids=str,
)
@pytest.mark.parametrize("ask", [tonnage.estimate, tonnage.plan], ids=lambda ask: ask.__name__)
def test_a_value_of_another_type_is_one_line(ask, options, reason):
    with pytest.raises(TonnageError, match=reason):
        ask("llama-3.1-8b", **{"gpu": "t4", "task": "serve", **options})


def test_answers_print_as_the_report_and_as_one_line():
    answer = tonnage.estimate("llama-3.1-8b", task="serve", gpu=parse_cluster("t4"), advice=False)
    assert str(answer).startswith("DOES NOT START")
    assert repr(answer) == "<ServingAnswer: llama-3.1-8b on t4: does not start>"
    solution = tonnage.plan("qwen3-0.6b", task="serve", gpu="t4", concurrency=2, top=1)
    assert str(solution).startswith("SERVES")
    assert repr(solution).startswith("<ServeSolution: qwen3-0.6b on t4: found; the best: ")
