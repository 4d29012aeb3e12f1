"""Speed of an engine: beside published servers, and in the directions that it must have."""

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate
from tonnage.serving.closed_form import estimate_serving
from tonnage.serving.lengths import Lengths
from tonnage.serving.network import read_network
from tonnage.serving.settings import ServeSettings
from tonnage.serving.speed import INTERVAL, held_requests, serving_speed, step_cost

CHAT = Lengths(p50=1000, p95=1000, output=1000)


def ask(model, gpu, **settings):
    known = parse_cluster(gpu)
    return estimate_serving(read_network(model, offline=True), ServeSettings(max_len=4096, **settings), known)


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "lengths", "concurrency", "seconds_of_a_token"),
    [
        # johnmusgrave.com/p/vllm-throughput-latency-sweep-on: vLLM 0.23, "about 75 tokens/sec"
        ("llama-3.1-8b", "a100-40gb", {}, Lengths(p50=1024, p95=1024, output=128), 1, 1 / 75),
        # azcluster's walkthrough v0.24.20: vLLM with InferenceX's benchmark, one H100, median TPOT
        ("llama-3.1-8b", "h100-80gb", {"quantization": "fp8"}, CHAT, 128, 12.38e-3),
    ],
)
def test_published_servers_are_in_the_interval(model, gpu, settings, lengths, concurrency, seconds_of_a_token):
    predicted = serving_speed(ask(model, gpu, **settings), lengths, concurrency).step_seconds
    assert INTERVAL[0] <= seconds_of_a_token / predicted <= INTERVAL[1]


def test_single_tokens_are_bound_by_reading_weights_and_prompts_by_arithmetic():
    estimate = ask("llama-3.1-8b", "h100-80gb")
    assert step_cost(estimate, decoding=1, context=1000).bound_by == "memory"
    assert step_cost(estimate, decoding=0, context=8192, prompt=8192).bound_by == "compute"


def test_a_token_takes_at_least_the_weights_and_the_cache():
    estimate = ask("llama-3.1-8b", "h100-80gb")
    weights, cache = 7.5e9 * 2, 64 * 2000 * 131_072
    least = (weights + cache) / estimate.settings.device.bandwidth_bytes_per_second
    cost = step_cost(estimate, decoding=64, context=2000).seconds
    assert least < cost < 1.6 * least


def test_more_requests_are_slower_each_and_faster_together():
    estimate = ask("llama-3.1-8b", "h100-80gb")
    few, many = (serving_speed(estimate, CHAT, count) for count in (4, 64))
    assert few.step_seconds < many.step_seconds
    assert few.output_tokens_per_second < many.output_tokens_per_second
    for speed in (few, many):
        assert speed.first_token_low_seconds <= speed.first_token_seconds <= speed.first_token_high_seconds


def test_ranks_that_share_matrices_answer_sooner():
    one, four = ask("llama-3.1-8b", "h100-80gb"), ask("llama-3.1-8b", "4xh100-80gb", tp=4)
    assert serving_speed(four, CHAT, 8).step_seconds < serving_speed(one, CHAT, 8).step_seconds
    slow = ask("llama-3.1-8b", "4xl40s", tp=4)
    assert (
        step_cost(slow, decoding=8, context=1000).communication
        > step_cost(four, decoding=8, context=1000).communication
    )


def test_experts_are_read_as_far_as_tokens_choose_them():
    estimate = ask("qwen3-30b-a3b", "h100-80gb")
    one, many = (step_cost(estimate, decoding=rows, context=10).seconds for rows in (1, 64))
    assert many > 3 * one


def test_without_graphs_launches_are_paid():
    fast, slow = ask("llama-3.2-1b", "h100-80gb"), ask("llama-3.2-1b", "h100-80gb", eager=True)
    assert serving_speed(slow, CHAT, 1).step_seconds > 1.3 * serving_speed(fast, CHAT, 1).step_seconds


def test_a_shared_prefix_leaves_room_for_more():
    estimate = ask("llama-3.1-8b", "l40s")
    alone, shared = Lengths(p50=3000, p95=3000, output=100), Lengths(p50=3000, p95=3000, output=100, prefix=2000)
    assert held_requests(estimate, shared) > 2.5 * held_requests(estimate, alone)


def test_a_card_whose_rates_are_not_known_has_no_speed():
    cluster = parse_cluster(None, gpu_memory_bytes=24 * 2**30)
    estimate = estimate_serving(read_network("llama-3.1-8b", offline=True), ServeSettings(max_len=4096), cluster)
    with pytest.raises(CannotEstimate):
        serving_speed(estimate, CHAT, 1)
