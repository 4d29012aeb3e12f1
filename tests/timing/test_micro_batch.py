"""Seconds of one micro-batch: the host's launches, attention, products of experts."""

from dataclasses import replace

import pytest

from timed_steps import EAGER, EIGHT, LLAMA, MIXTRAL, ONE, PLAIN, llama_job
from tonnage.mesh import Mesh
from tonnage.plans import Plan
from tonnage.timing import rates
from tonnage.timing.software import software
from tonnage.timing.timing import time_step
from tonnage.timing.work import Work


def test_a_quantized_network_in_fp32_takes_longer_for_attention_and_head():
    narrow, wide = (
        Work.of(llama_job(method="qlora"), Plan(precision="bf16-true", unquantized_dtype=dtype), ONE)
        for dtype in ("compute", "fp32")
    )
    known = [time_step(LLAMA, work, ONE, EAGER) for work in (narrow, wide)]
    assert known[1].step_seconds > 1.5 * known[0].step_seconds
    assert known[1].high_seconds == pytest.approx(2.7 * known[1].step_seconds)
    assert [any("beside fp32 ones without autocast" in line for line in one.assumed) for one in known] == [
        False,
        True,
    ]


def test_hooks_of_deepspeeds_third_stage_take_the_host_3_ms_a_layer_and_pass():
    """Two passes, three where layers run again; nothing beside 8,192 tokens, which keep the card busy for longer."""

    def step(seq_len, **plan):
        work = Work.of(llama_job(seq_len=seq_len), Plan(engine="deepspeed", **plan), ONE)
        return time_step(LLAMA, work, ONE, EAGER)

    assert step(64, shard="zero3").step_seconds > 32 * 2 * 3.1e-3
    assert step(64, shard="zero3", checkpointing="full").step_seconds > 32 * 3 * 3.1e-3
    assert step(64, shard="zero1").step_seconds < 32 * 2 * 3.1e-3
    assert step(8192, shard="zero3").host_seconds < 1e-3


def test_the_host_does_not_launch_what_a_graph_replays():
    """Each launch takes 1 ms more: of each layer all, those of the one expert on a rank (up and down, forward and
    twice backward, a cast in each pass), or none; and those of the embedding and the head."""
    each = replace(software("megatron"), looped_kernel_seconds=0.0)
    slow, slower = (replace(each, kernel_seconds=seconds) for seconds in (1e-2, 1.1e-2))

    def launches(captured):
        work = replace(PLAIN, axes=Mesh(dp_replicate=8, ep=8), dtype="fp8", shard="none", captured=captured)
        times = [time_step(MIXTRAL, work, EIGHT, code).step_seconds for code in (slower, slow)]
        return (times[0] - times[1]) / 1e-3

    assert launches("part") - launches("all") == pytest.approx(MIXTRAL.layers * 2 * (1 + 2 + 2))
    assert launches("none") > 2 * launches("part")
    assert launches("all") < 50


def test_kernels_that_a_loop_over_experts_launches_have_seconds_of_their_own():
    slow = replace(software("megatron"), kernel_seconds=1e-3, looped_kernel_seconds=0.0)
    work = replace(PLAIN, axes=Mesh(dp_replicate=8, ep=8))
    steps = [time_step(MIXTRAL, work, EIGHT, replace(slow, looped_kernel_seconds=looped)) for looped in (0.0, 1e-4)]
    launched = 32 * 2 * (2 + 1) * 1  # layers, products, forward and two backward, one expert on a rank
    assert steps[0].step_seconds - steps[1].step_seconds == pytest.approx(launched * 9e-4)


def test_experts_with_equally_many_rows_are_plain_products():
    slow = replace(software("megatron"), expert_factor=3.0)
    work = replace(PLAIN, micro_batch=8, axes=Mesh(dp_replicate=8, ep=8))
    uneven, even = (time_step(MIXTRAL, replace(work, experts_even=even), EIGHT, slow) for even in (False, True))
    assert uneven.compute_seconds > 2 * even.compute_seconds


@pytest.mark.parametrize("ep", [1, 8])
def test_gradients_that_are_added_are_those_of_all_experts_of_a_rank(ep):
    """8 experts of 3 x 4,096 x 14,336 weights a layer, beside attention, norms and the router."""
    steps = [
        time_step(MIXTRAL, replace(PLAIN, axes=Mesh(dp_replicate=8, ep=ep), accumulated_bytes=each), EIGHT, EAGER)
        for each in (0, 10)
    ]
    rate = 3350e9 * rates.card(EIGHT.device).memory
    weights = 32 * (8 / ep * 3 * 4096 * 14336 + 2 * 4096 * (4096 + 1024) + 2 * 4096 + 8 * 4096)
    more = steps[1].compute_seconds - steps[0].compute_seconds
    assert more == pytest.approx(weights * 10 / rate * EAGER.memory_factor, rel=0.001)


def test_a_second_predicted_token_takes_the_head_once_more():
    twice = replace(LLAMA, predicted=2)
    once, again = (time_step(shape, replace(PLAIN, micro_batch=8), ONE, EAGER) for shape in (LLAMA, twice))
    head = time_step(replace(LLAMA, layers=1), replace(PLAIN, micro_batch=8), ONE, EAGER).compute_seconds
    assert 0 < again.compute_seconds - once.compute_seconds < head


def test_experts_in_one_kernel_have_a_factor_of_their_own():
    code = replace(software("megatron"), kernel_seconds=0.0, expert_factor=2.0, fused_expert_factor=1.0)
    work = replace(PLAIN, axes=Mesh(dp_replicate=8, ep=8), shard="none")
    apart, together = (
        time_step(MIXTRAL, replace(work, experts_fused=fused), EIGHT, code).compute_seconds for fused in (False, True)
    )
    widest = time_step(MIXTRAL, work, EIGHT, replace(code, expert_factor=3.0)).compute_seconds
    assert widest - apart == pytest.approx(apart - together)


def test_the_efficient_attention_takes_no_shared_keys():
    own = replace(LLAMA, kv_heads=LLAMA.heads)
    work = replace(PLAIN, dtype="fp32", weight_bytes=4, gradient_bytes=4)
    explicit = {
        way: time_step(LLAMA, replace(work, attention=way), ONE, EAGER).step_seconds for way in ("math", "efficient")
    }
    assert time_step(LLAMA, work, ONE, EAGER).step_seconds == explicit["math"] > explicit["efficient"]
    assert (
        time_step(own, work, ONE, EAGER).step_seconds
        < time_step(own, replace(work, attention="math"), ONE, EAGER).step_seconds
    )


def test_llm_int8_takes_the_host_six_tenths_of_a_millisecond_a_product_and_pass():
    four = replace(PLAIN, seq_len=16, quantized=True, lora_rank=16)
    eight = replace(four, int8=True)
    more = [time_step(LLAMA, each, ONE, EAGER).step_seconds for each in (four, eight)]
    assert more[1] - more[0] == pytest.approx(32 * 7 * 2 * 600e-6)
    assert Work.of(llama_job(method="qlora"), Plan(quant="int8"), ONE).int8
    assert not Work.of(llama_job(method="qlora"), Plan(), ONE).int8
    assert not Work.of(llama_job(method="lora"), Plan(), ONE).int8
