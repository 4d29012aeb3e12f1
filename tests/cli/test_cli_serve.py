"""`tonnage estimate --task serve`: the verdict, its document, its exit code, and bad input."""

import json
import shlex
from pathlib import Path

import pytest
from lines import is_one_line


def serve(tonnage, *words):
    return tonnage("estimate", *words, "--task", "serve")


def test_an_engine_that_starts(tonnage):
    result = serve(tonnage, "llama-3.1-8b", "--gpu", "h100-80gb", "--max-len", "8k", "--engine", "vllm@0.19.0")
    assert result.code == 0
    assert result.out.startswith("STARTS  KV cache of 54.15 GiB")
    assert "requests of at most 8,192 tokens" in " ".join(result.out.split())
    assert "Growth of the KV cache" in result.out


def test_the_document_has_the_keys_of_the_contract(tonnage):
    result = serve(tonnage, "llama-3.1-8b", "--gpu", "rtx-4090", "--json")
    document = json.loads(result.out)
    assert result.code == 1
    assert document["schema_version"] == 1
    assert document["fits"] is False
    assert document["serving"]["starts"] is False
    assert "one request of 131,072 tokens" in document["serving"]["error"]
    assert document["needed_bytes"] > document["cluster"]["capacity_bytes"]
    assert sum(document["peak"]["by_category"].values()) == document["peak"]["process_bytes"]
    assert set(document["coverage"]) == {"run", "modelled", "assumed"}


def test_advice_is_a_command_that_gives_its_answer(tonnage):
    advice = json.loads(serve(tonnage, "llama-3.1-8b", "--gpu", "rtx-4090", "--json").out)["advice"]
    helping = {frozenset(item["change"]) for item in advice if item["fits"]}
    assert helping >= {frozenset({"max_len"}), frozenset({"tp", "gpu"})}
    tried = {name for item in advice for name in item["change"]}
    assert tried >= {"gpu_memory_utilization", "max_seqs", "max_batched_tokens", "kv_dtype", "quantization"}
    assert [item["fits"] for item in advice] == sorted((item["fits"] for item in advice), reverse=True)
    for item in advice:
        again = tonnage(*shlex.split(item["command"])[1:], "--json")
        serving = json.loads(again.out)["serving"]
        assert again.code == (0 if item["fits"] else 1)
        assert (serving["kv_cache_tokens"], serving["concurrency"]) == (item["kv_cache_tokens"], item["concurrency"])


def test_a_large_network_gets_changes_that_work_together(tonnage):
    result = serve(tonnage, "deepseek-v3", "--gpu", "8xh100-80gb", "--tp", "8", "--json")
    changes = [item["change"] for item in json.loads(result.out)["advice"]]
    assert {"gpu": "8xh200"} in changes
    assert any("pp" in change for change in changes)


def test_what_neither_fits_nor_can_be_changed_says_so(tonnage):
    result = serve(tonnage, "llama-3.1-405b", "--gpu", "t4", "--no-advice")
    assert result.code == 1
    assert "No change that was tried" in result.out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["llama-3.1-8b", "--gpu", "t4", "--seq-len", "512"], 2, "--seq-len is for training"),
        (["llama-3.1-8b", "--gpu", "t4", "--max-len", "200k"], 2, "is longer than llama-3.1-8b allows"),
        (["llama-3.1-8b", "--gpu", "8xh100-80gb", "--tp", "5"], 2, "cannot be divided among 5 ranks"),
        (["llama-3.1-8b", "--gpu", "t4", "--quantization", "q4_0"], 2, "Unknown quantization 'q4_0'"),
        (["llama-3.1-8b", "--gpu", "t4", "--kv-dtype", "int2"], 2, "Unknown kv-dtype 'int2'"),
        (["llama-3.1-8b", "--gpu", "t4", "--engine", "hf-trainer"], 2, "Unknown engine 'hf-trainer' to serve with"),
        (["llama-3.1-8b", "--gpu", "cpu"], 3, "Serving is estimated for GPUs"),
        (["t5-base", "--gpu", "t4"], 3, "an encoder with a decoder"),
        (["no-such-model", "--gpu", "t4"], 3, "Unknown model"),
        (["--gpu", "t4"], 2, "No MODEL was given"),
    ],
)
def test_bad_input_is_one_line_with_its_exit_code(tonnage, words, code, message):
    result = serve(tonnage, *words)
    assert result.code == code
    assert message in result.err
    assert is_one_line(result.err)


def test_options_of_the_other_task_are_refused(tonnage):
    result = tonnage("estimate", "llama-3.1-8b", "--gpu", "t4", "--max-seqs", "4")
    assert (result.code, result.out) == (2, "")
    assert "add --task serve" in result.err
    assert "possible: train, serve" in tonnage("estimate", "llama-3.1-8b", "--gpu", "t4", "--task", "infer").err


def test_the_narrowest_report_is_whole(tonnage, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    result = serve(tonnage, "gemma-3-27b", "--gpu", "h100-80gb")
    assert max(map(len, result.out.splitlines()[:-1])) <= 40
    assert "image encoder" in " ".join(result.out.split())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--max-len", "4096"], "for training give --seq-len"),
        (["--dp", "2"], "for training give --shard ddp"),
        (["--eager"], "or leave it out"),
    ],
)
def test_options_of_an_engine_name_those_of_training(tonnage, words, meant):
    result = tonnage("estimate", "llama-3.1-8b", "--gpu", "t4", *words)
    assert result.code == 2
    assert "add --task serve" in result.err
    assert meant in result.err


def plan(tonnage, *words):
    return tonnage("plan", *words, "--task", "serve")


def test_a_plan_is_shown_saved_and_exported(tonnage, tmp_path):
    file = tmp_path / "serve.toml"
    words = ["--gpu", "4xh100-80gb", "--concurrency", "64", "--lengths", "p50=1000,p95=4000,output=300"]
    result = plan(tonnage, "llama-3.1-70b", *words, "--price", "2.5", "--save", str(file))
    assert result.code == 0
    assert result.out.startswith("SERVES  tp 4")
    assert "a million tokens of answers" in result.out
    command = result.out.splitlines()[-1].strip()
    assert command.startswith("vllm serve meta-llama/Llama-3.1-70B --tensor-parallel-size 4")
    exported = tonnage("export", str(file), "--to", "vllm", "--out", str(tmp_path / "out"))
    assert exported.code == 0
    assert f"exec {command}" in (tmp_path / "out" / "serve.sh").read_text()
    unwritable = tonnage("export", str(file), "--to", "vllm", "--out", str(file / "out"))
    assert (unwritable.code, "cannot be created" in unwritable.err) == (3, True)
    again = tonnage("export", str(file), "--to", "vllm", "--out", str(tmp_path / "out"))
    assert (again.code, is_one_line(again.err)) == (2, True)


def test_the_document_of_a_plan(tonnage):
    document = json.loads(plan(tonnage, "qwen3-8b", "--gpu", "2xl4", "--concurrency", "4", "--json").out)
    assert document["status"] == "found"
    best = document["plans"][0]
    assert set(best) >= {"name", "plan", "estimate", "reasons", "speed", "command", "concurrency"}
    assert best["estimate"]["serving"]["starts"] is True
    speed = best["speed"]
    assert speed["first_token_low_seconds"] <= speed["first_token_seconds"] <= speed["first_token_high_seconds"]


def test_nothing_serves(tonnage):
    result = plan(tonnage, "llama-3.1-405b", "--gpu", "t4")
    assert result.code == 1
    assert result.out.startswith("DOES NOT SERVE  Nothing starts")


def test_asking_backwards(tonnage):
    result = plan(tonnage, "qwen3-14b", "--find", "min-gpu", "--concurrency", "2", "--quantization", "none")
    assert "min-gpu a100-40gb" in result.out or "min-gpu l40s" in result.out or "min-gpu a40" in result.out
    assert "possible: max-len" in plan(tonnage, "qwen3-14b", "--gpu", "l4", "--find", "max-seq-len").err


def test_a_load_shows_pages_beside_slots(tonnage):
    words = ["llama-3.1-8b", "--gpu", "h100-80gb", "--max-len", "8k", "--lengths", "p50=800,p95=6000,rate=5"]
    result = serve(tonnage, *words)
    text = " ".join(result.out.split())
    assert "in slots of the maximal length: 54 requests together" in text
    assert "in pages:" in text
    load = json.loads(serve(tonnage, *words, "--json").out)["load"]
    assert load["paged"]["preemptions"] == 0
    assert load["contiguous"]["slots"] == 54


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "p95=5"], "at least p50"),
        (["--lengths", "p50=1,p96=5"], "Unknown 'p96'"),
        (["--concurrency", "0"], "--concurrency"),
        (["--only", "tp"], "--only is for training"),
        (["--engine", "axolotl"], "Unknown engine 'axolotl'"),
        (["--tp", "3"], "cannot be divided among 3 ranks"),
    ],
)
def test_bad_input_of_plans_is_one_line(tonnage, words, message):
    result = plan(tonnage, "llama-3.1-8b", "--gpu", "3xh100-80gb", *words)
    assert result.code == 2
    assert message in result.err
    assert is_one_line(result.err)


def test_the_how_to_shows_what_is_printed(tonnage, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "serve-a-model.md").read_text(encoding="utf-8")
    shown = page.split("$ tonnage ")[1].split("```")[0].splitlines()
    printed = tonnage(*shown[0].split()).out.splitlines()
    assert [line for line in shown[1:] if line != "..." and line not in printed] == []


def test_a_serving_plan_is_estimated_again_and_is_none_of_training(tonnage, tmp_path):
    file = tmp_path / "serve.toml"
    asked = ("--task", "serve", "--gpu", "h100-80gb", "--max-len", "2k", "--concurrency", "8")
    assert tonnage("plan", "llama-3.2-1b", *asked, "--save", str(file)).code == 0
    again = json.loads(tonnage("estimate", "--plan", str(file), "--json").out)
    assert (again["job"]["max_len"], again["job"]["max_seqs"]) == (2048, 8)
    other = json.loads(tonnage("estimate", "--plan", str(file), "--gpu", "t4", "--max-len", "1k", "--json").out)
    assert (other["job"]["max_len"], other["cluster"]["gpu"]) == (1024, "t4")
    refused = tonnage("train", str(file), "--model", "m", "--data", "d", "--out", str(tmp_path / "out"))
    assert refused.code == 2
    assert is_one_line(refused.err)
    assert "is a serving plan" in refused.err
    assert f"tonnage estimate --plan {file}" in refused.err


def test_prompts_that_the_engine_refuses_are_counted(tonnage):
    asked = ("llama-3.2-1b", "--task", "serve", "--gpu", "t4", "--max-len", "1024", "--lengths", "p50=1000,p95=4000")
    shown = tonnage("plan", *asked, "--concurrency", "4")
    assert shown.code == 0
    assert "the engine refuses 48.9 % of the prompts, of 1,024 tokens (--max-len) or more" in " ".join(
        shown.out.split()
    )
    assert json.loads(tonnage("estimate", *asked, "--json").out)["load"]["refused"] == pytest.approx(0.489, abs=1e-3)
