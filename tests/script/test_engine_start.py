"""The engine itself as the answer of `estimate --task serve`, or why it is not."""

import json
import sys
from dataclasses import replace

import pytest

import tonnage
from estimates import fitting
from tonnage.catalog.models import find_model
from tonnage.errors import CannotEstimate, TonnageError, UsageError
from tonnage.estimates.from_traces import Run
from tonnage.ghost.environment import PATH
from tonnage.script import engine_start
from tonnage.serving.answer import Serving

sys.path.extend(PATH.split(":"))

from tonnage_inside import made_up_processors

STARTED = Serving(engine="vllm 0.33.0", starts=True, kv_cache_tokens=1000, low_tokens=990, high_tokens=1010)


def ask(model="llama-3.1-8b", **options):
    return tonnage.estimate(model, **{"task": "serve", "gpu": "h100-80gb", **options})


@pytest.fixture
def engine(monkeypatch):
    """Return the commands that an engine in this Python would get; it answers as STARTED says."""
    commands, answer = [], replace(fitting(), serving=STARTED.to_json())

    def run(command, cluster, **options):
        commands.append((command, options["requests"]))
        return Run(estimate=answer, traces=())

    monkeypatch.setattr(engine_start.dry_run, "run", run)
    monkeypatch.setattr(engine_start, "_installed", lambda python, name: {"vllm": "0.33.0", "sglang": "0.5.23"}[name])
    return commands


def test_an_engine_that_is_there_answers(engine):
    answer = ask(max_len=8192, tp=1, quantization="fp8", eager=True, lengths="p50=200", concurrency=2)
    [(command, lengths)] = engine
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    flags = " ".join(command[command.index("--port") + 2 :])
    assert flags == "--max-model-len 8192 --quantization fp8 --enforce-eager"
    assert lengths.p50 == 200
    assert (answer.serving, answer.lacks) == (STARTED, None)
    document = answer.to_json()
    assert document["serving"]["engine"] == "vllm 0.33.0"
    assert document["job"]["command"] == ["vllm", "serve", "llama-3.1-8b", *command[-5:]]
    assert document["load"]["concurrency"] == 2
    assert str(answer).startswith("STARTS")


def test_sglang_gets_its_own_flags(engine):
    answer = ask(
        engine="sglang@0.5", max_len=8192, max_seqs=64, kv_dtype="fp8", gpu_memory_utilization=0.8, eager=True
    )
    [(command, _)] = engine
    assert command[:4] == [sys.executable, "-m", "sglang.launch_server", "--model-path"]
    flags = "--context-length 8192 --max-running-requests 64 --mem-fraction-static 0.8 --kv-cache-dtype fp8_e4m3"
    assert " ".join(command[command.index("--port") + 2 :]) == f"{flags} --disable-cuda-graph"
    assert answer.to_json()["job"]["command"][:4] == ["python", *command[1:4]]


@pytest.mark.parametrize("model", ["qwen2.5-vl-7b", "qwen3-vl-8b"])
def test_a_network_with_images_is_named_so_that_its_processor_is_made_up(engine, model):
    assert ask(model).ran is not None
    [(command, _)] = engine
    known = find_model(model)
    assert command[command.index("--model") + 1] == known.hub
    assert "preprocessor_config.json" in made_up_processors.files(known.config())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"engine": "vllm@0.19.0"}, "vllm 0.33.0 is installed, and 0.19.0 was asked about"),
        ({"engine": "sglang@0.4"}, "sglang 0.5.23 is installed, and 0.4 was asked about"),
        ({"engine": "sglang", "quantization": "int8"}, "the engine needs a checkpoint in int8"),
        ({"engine": "transformers"}, "transformers has no server that is run here"),
        ({"model": "llava-1.5-7b"}, "with images the engine needs a folder with the tokenizer's files"),
        ({"quantization": "awq-int4"}, "the engine needs a checkpoint in awq-int4"),
    ],
    ids=str,
)
def test_where_it_cannot_be_run_the_closed_form_says_why(engine, options, why):
    answer = ask(**options)
    assert engine == []
    assert answer.lacks.startswith(f"closed form: {why}")
    assert answer.to_json()["coverage"]["assumed"][-1] == answer.lacks
    with pytest.raises(CannotEstimate, match=f"The engine cannot be run: {why}"):
        ask(**options, engine_python=sys.executable)


def test_nothing_is_run_on_meta(engine):
    answer = ask(engine="vllm@0.33", source="meta")
    assert (engine, answer.ran, answer.lacks) == ([], None, None)
    assert ask(engine="vllm@0.33").ran is not None


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"engine_python": "/none/python"}, UsageError, "'/none/python' is no program"),
        ({"engine_python": "true"}, CannotEstimate, "true has no vllm"),
        ({"engine_python": "false"}, CannotEstimate, "false has no vllm"),
        ({"engine_python": "python", "source": "meta"}, UsageError, "--source meta runs no engine"),
        ({"source": "real"}, UsageError, "Unknown source 'real'"),
        ({"engine_python": "python", "task": "train"}, UsageError, "--engine-python is for an inference engine"),
    ],
    ids=str,
)
def test_a_python_without_the_engine_is_one_line(options, kind, reason):
    with pytest.raises(TonnageError, match=reason) as refused:
        ask(**options)
    assert isinstance(refused.value, kind)


@pytest.mark.parametrize("method", [{"quant_method": "awq", "bits": 4}, {"quant_method": "fp8"}], ids=str)
def test_a_folder_in_a_format_of_its_own_is_given_to_the_engine(engine, tmp_path, method):
    config = {**find_model("llama-3.2-1b").config(), "quantization_config": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ask(str(tmp_path)).ran is not None
    [(command, _)] = engine
    assert command[command.index("--model") + 1] == str(tmp_path)
    assert "--quantization" not in command
