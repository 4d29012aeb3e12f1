"""Reports of an inference engine that a dry-run started."""

import os
from dataclasses import replace

import pytest

import estimates
from tonnage.report.engine_words import describe_compiling
from tonnage.report.html import page
from tonnage.report.terminal import render
from tonnage.report.wording import headline, need
from tonnage.script.engine_results import summarise
from tonnage.script.process_results import ProcessResults
from tonnage.serving.answer import Serving

GIB = 1 << 30
LOAD = {
    **{"requests": 1000, "finished": 405, "steps": 872, "running_most": 52, "running_mean": 30.13, "preemptions": 5},
    "kv_cache_usage": 0.996,
}


def served(**facts):
    told = Serving(engine="vllm 0.33.0", **facts).to_json()
    load = {"load": LOAD} if facts["starts"] else {}
    return replace(estimates.scripted(), serving={**told, **load}, fits=facts["starts"])


def test_a_start_has_its_cache_in_the_first_line_and_all_parts_below():
    started = served(
        starts=True, kv_cache_bytes=6 * GIB, kv_cache_tokens=48_496, concurrency=2.96, max_len=16_384,
        weights_bytes=15 * GIB, blocks=3031, block_tokens=16,
    )  # fmt: skip
    report = render(started)
    assert headline(started) == "STARTS"
    assert need(started) == "KV cache 6.00 GiB, 48,496 tokens, 2.96 requests of 16,384 tokens at once."
    for told in (report, page(started)):
        assert "3,031 of 16 tokens" in told
        assert "vllm 0.33.0" in told
        assert "6.74 B parameters" in told
        assert " trainable" not in told
    assert "405 of 1,000 requests finished in 872 steps, at most 52 together (mean 30.1); 5 preemptions" in " ".join(
        report.split()
    )


def test_a_refusal_is_in_the_engines_words():
    refused = served(starts=False, error="No available memory for the cache blocks.")
    assert (headline(refused), need(refused)) == ("DOES NOT START", "No available memory for the cache blocks.")
    assert refused.summary().endswith("does not start: No available memory for the cache blocks.")


COLD = {"compile_cache": "cold", "compile_seconds": 94.4, "activation_bytes": 2 * GIB}
WARM = {"compile_cache": "warm", "activation_bytes": 2 * GIB}


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({**COLD, "compile_peak_bytes": GIB}, "holds the same."),
        ({**COLD, "compile_peak_bytes": 2 * GIB}, "holds more, or the same: known once it is run again."),
        (
            {**WARM, "compile_peak_bytes": 3 * GIB, "compile_seconds": 94.4},
            "A first one compiles (94 s here) and holds 1.00 GiB less KV cache.",
        ),
        ({**WARM, "compile_peak_bytes": GIB}, "A first one compiles and holds the same."),
        (WARM, "A first one compiles and holds less, or the same: not known."),
        ({**WARM, "compiled_here": False}, "vLLM's own cache on this machine lacks it."),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_other_kind_of_start_holds_is_said(facts, told):
    words = describe_compiling(facts)
    assert words.startswith(f"{facts['compile_cache']}: this start ")
    assert words.endswith(told)
    assert words in " ".join(render(served(starts=True, **facts), width=400).split())


@pytest.mark.parametrize("is_there", [True, False])
def test_the_engines_own_cache_is_looked_into(tmp_path, monkeypatch, is_there):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    inside = "torch_compile_cache/torch_aot_compile/6a/rank_0_0"
    if is_there:
        os.makedirs(tmp_path / inside)
    rank = {"engine": "vllm 0.33.0", "compiled_into": f"/ghosts/vllm/{inside}", "compile_peak_bytes": GIB}
    facts = ({**rank, "compile_cache": "warm"}, {**rank, "compile_cache": "cold", "compile_peak_bytes": 2 * GIB})
    told = summarise(ProcessResults(traces=(), others=(), cut_off=(), names={}, engines=facts))
    assert (told.compile_cache, told.compile_peak_bytes, told.compiled_here) == ("cold", 2 * GIB, is_there)
