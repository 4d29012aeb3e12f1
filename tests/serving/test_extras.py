"""Adapters, drafts, sleep and prefixes in closed form, and what is refused of them."""

import pytest

import tonnage
from tonnage.errors import CannotEstimate, TonnageError, UsageError
from tonnage.serving.exports import engine_command, export_serving
from tonnage.serving.extras import accepted_tokens
from tonnage.units import GIB, MIB

LOAD = {"lengths": "p50=500,output=100", "concurrency": 8}


def ask(model="llama-3.1-8b", gpu="a100-80gb", **options):
    return tonnage.estimate(model, task="serve", gpu=gpu, **{"max_len": 8192, "eager": True, **options})


def test_slots_of_adapters_are_two_thin_matrices_for_each_of_the_networks():
    without, slots = ask(), ask(max_loras=4, max_lora_rank=64)
    inputs = 3 * 4096 + 4096 + 2 * 4096 + 14336  # of q, k and v; of o; of gate and up; of down
    outputs = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    words = 2 * (4096 + 128256)
    added = slots.serving.weights_bytes - without.serving.weights_bytes
    rests = 2 * (64 * MIB - 2 * 64 * 4 * 128256)  # torch's allocator splits no block of 64 MiB for those of words
    assert added == pytest.approx(2 * 64 * 4 * (32 * (inputs + outputs) + words) + rests, rel=1e-3)
    assert without.serving.kv_cache_bytes - slots.serving.kv_cache_bytes == added


def test_adapters_are_whole_on_one_side_of_each_rank():
    def added(tp):
        gpu = f"{tp}xa100-80gb"
        return ask("qwen2.5-7b", gpu, tp=tp, max_loras=8).estimate.weights_by_part["adapters"]

    assert 0.5 * added(1) < added(2) < 0.8 * added(1)


def test_a_draft_model_takes_its_weights_and_a_part_of_each_block():
    alone, target, both = ask("llama-3.2-1b"), ask(), ask(draft="llama-3.2-1b", draft_tokens=3)
    added = both.serving.weights_bytes - target.serving.weights_bytes
    assert added == pytest.approx(alone.serving.weights_bytes, abs=GIB / 100)
    a_block = [answer.estimate.worst.layout.block_bytes for answer in (alone, target, both)]
    assert a_block[2] == a_block[0] + a_block[1]


def test_layers_that_predict_further_tokens_are_one_more_layer():
    options = {"gpu": "8xh200", "tp": 8, "lengths": "p50=500"}
    plain = ask("deepseek-v3", **options)
    drafting = ask("deepseek-v3", **options, draft="mtp", draft_tokens=1, acceptance=0.8)
    layers = [answer.estimate.worst.layout.groups[0].layers for answer in (plain, drafting)]
    assert layers == [61, 62]
    added = drafting.serving.weights_bytes - plain.serving.weights_bytes
    experts, joins = 256 * 3 * 7168 * 2048, 2 * 7168 * 2 * 7168
    assert added == pytest.approx(experts / 8 + joins, rel=0.05), "what joins is whole on each rank"


def test_accepted_drafts_make_tokens_faster():
    assert accepted_tokens(0.6, 3) == pytest.approx(1 + 0.6 + 0.36 + 0.216)
    assert accepted_tokens(1.0, 3) == 4
    plain = ask(**LOAD).load.speed
    for draft in ("ngram", "llama-3.2-1b"):
        slow, fast = (ask(draft=draft, draft_tokens=3, acceptance=part, **LOAD).load.speed for part in (0.1, 0.9))
        assert fast.token_seconds < plain.token_seconds
        assert slow.output_tokens_per_second < fast.output_tokens_per_second
    unknown = ask(draft="ngram", draft_tokens=3, **LOAD)
    assert unknown.load.speed is None
    assert any("--acceptance" in text for text in unknown.estimate.assumed)


def test_without_cached_prefixes_nothing_is_shared():
    options = {"lengths": "p50=3000,p95=6000,prefix=2000"}
    shared, alone = (ask(**options, no_prefix_caching=off).load.paged for off in (False, True))
    assert alone.mean_running < 0.7 * shared.mean_running


def test_sleep_costs_nothing_at_the_start_and_says_what_it_moves():
    plain, sleeping = ask(), ask(sleep_mode=True)
    assert sleeping.serving.kv_cache_bytes == plain.serving.kv_cache_bytes
    assumed = sleeping.to_json()["coverage"]["assumed"]
    assert any(text.startswith("asleep (level 1) the weights of each GPU, 14.99 GiB") for text in assumed)


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"max_loras": 2, "max_lora_rank": 7}, UsageError, "max-lora-rank is 7; vLLM's ranks are 1, 8, 16"),
        ({"model": "deepseek-v2-lite", "max_loras": 2}, CannotEstimate, "latent attention"),
        ({"engine": "sglang", "max_loras": 2}, CannotEstimate, "known of vllm, and not of sglang"),
        ({"engine": "transformers", "sleep_mode": True}, CannotEstimate, "sleep mode is known of vllm"),
        ({"engine": "sglang", "no_prefix_caching": True}, CannotEstimate, "without prefixes"),
        ({"engine": "transformers", "gpu": "2xt4", "pp": 2}, UsageError, "neither pipeline stages"),
        ({"draft": "ngram"}, UsageError, "--draft ngram needs --draft-tokens"),
        ({"draft": "mtp", "draft_tokens": 1}, UsageError, "has no layers that predict further tokens"),
        ({"draft": "qwen3-0.6b", "draft_tokens": 1}, UsageError, "151,936 words and llama-3.1-8b 128,256"),
        ({"draft": "no-such-model", "draft_tokens": 1}, CannotEstimate, "Unknown model"),
        ({"draft": "ngram", "draft_tokens": 1, "gpu": "2xt4", "pp": 2}, CannotEstimate, "drafts on pipeline stages"),
        ({"gpu": "2xt4", "tp": 2, "ep": 2}, UsageError, "llama-3.1-8b has no experts to divide"),
        ({"ep": 2}, UsageError, "among all tp x dp = 1 ranks or among none: give ep 1, or more ranks"),
        ({"block_tokens": 17}, UsageError, "vLLM's attention takes multiples of 16"),
        ({"lengths": "p50=200000", "gpu": "h200"}, UsageError, "200,000 tokens, and a request at most 8,192"),
        ({"acceptance": 0.5}, UsageError, "--acceptance needs --draft"),
        ({"draft": "ngram", "draft_tokens": 1, "acceptance": 1.5}, UsageError, "acceptance is 1.5"),
    ],
    ids=str,
)
def test_what_cannot_be_or_is_not_known_is_one_line(options, kind, reason):
    with pytest.raises(TonnageError, match=reason) as refused:
        ask(**{"gpu": "t4", **options})
    assert isinstance(refused.value, kind)


def test_the_flags_of_a_plan_are_the_engines():
    [plan] = tonnage.plan(
        "llama-3.1-8b",
        task="serve",
        gpu="h100-80gb",
        top=1,
        max_loras=2,
        draft="llama-3.2-1b",
        draft_tokens=3,
        acceptance=0.7,
        no_prefix_caching=True,
        sleep_mode=True,
        block_tokens=32,
    ).plans
    assert plan.name.endswith("adapters, 3 tokens drafted by llama-3.2-1b")
    with pytest.raises(UsageError, match="LoRA adapters and a cache without prefixes and drafts and sleep mode"):
        export_serving("sglang", plan.estimate)
    command = engine_command("vllm", plan.estimate)
    assert "--enable-lora --max-loras 2 --speculative-config" in command
    assert '{"model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 3}' in command
    assert command.endswith("--no-enable-prefix-caching --enable-sleep-mode --block-size 32")
