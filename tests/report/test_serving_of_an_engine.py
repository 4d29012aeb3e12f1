"""Reports of an inference engine that a dry-run started."""

from dataclasses import replace

import estimates
from tonnage.report.html import page
from tonnage.report.terminal import render
from tonnage.report.wording import headline, need
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
    assert "405 of 1,000 requests finished in 872 steps, at most 52 together (mean 30.1); 5 preemptions" in " ".join(
        report.split()
    )


def test_a_refusal_is_in_the_engines_words():
    refused = served(starts=False, error="No available memory for the cache blocks.")
    assert (headline(refused), need(refused)) == ("DOES NOT START", "No available memory for the cache blocks.")
    assert refused.summary().endswith("does not start: No available memory for the cache blocks.")
