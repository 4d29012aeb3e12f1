"""Gathering weights and averaging gradients among data-parallel ranks."""

from dataclasses import replace

import pytest

from timed_steps import EAGER, EIGHT, LLAMA, MANY, MIXTRAL, ONE, PLAIN, llama_job
from tonnage.mesh import Mesh
from tonnage.plans import Plan
from tonnage.timing import rates
from tonnage.timing.software import software
from tonnage.timing.timing import time_step
from tonnage.timing.work import Work


def test_averaging_of_sharded_gradients_hides_layer_by_layer():
    # 8 GPUs hold all weights, 2 machines the same ones: gradients of 2 GB cross an adapter of each rank
    within = replace(PLAIN, axes=Mesh(dp_replicate=1, dp_shard=8), shard="zero3", micro_batch=2)
    across = replace(within, axes=Mesh(dp_replicate=2, dp_shard=8), shard="hsdp")
    two = replace(EIGHT, nodes=2)
    one, both = (time_step(LLAMA, work, place, EAGER) for work, place in ((within, EIGHT), (across, two)))
    moved = LLAMA.parameters / 8 * 2  # bytes of each rank's gradients, once there and once back through its adapter
    lasting = moved / (50e9 * EAGER.far_part)
    assert 0 < both.communication_seconds - one.communication_seconds < 0.35 * lasting
    slow = replace(two, network_bytes_per_second=1e9)
    late = time_step(LLAMA, across, slow, EAGER).communication_seconds
    assert late > both.communication_seconds + 0.5 * moved / (1e9 * EAGER.far_part)


def test_fsdp2_copies_gathered_weights_out_of_their_buffer():
    """4 bytes for each weight in 16 bits, and again for backward in stage 3; DeepSpeed's buffers are the weights."""
    whole = 8.03e9 * 4 / (3350e9 * rates.card(EIGHT.device).memory)

    def exchanged(shard, **plan):
        work = Work.of(llama_job(seq_len=8192), Plan(shard=shard, **plan), EIGHT)
        step, without = (time_step(LLAMA, each, EIGHT, EAGER) for each in (work, replace(work, unpacked=False)))
        return step.step_seconds - without.step_seconds

    assert exchanged("zero2") == pytest.approx(whole, rel=0.01)
    assert exchanged("zero3") == pytest.approx(2 * whole, rel=0.01)
    assert exchanged("zero3", engine="deepspeed") == exchanged("ddp") == 0


def test_gathering_weights_hides_behind_computation_but_slows_it_down():
    alone = time_step(LLAMA, replace(PLAIN, micro_batch=4), ONE, EAGER).communication_seconds
    sharded = replace(PLAIN, micro_batch=4, axes=Mesh(dp_shard=8), shard="zero3")
    near = time_step(LLAMA, sharded, EIGHT, EAGER)
    assert alone == 0
    gathered = 3 * LLAMA.layers * LLAMA.dense_layer_parameters * 2 * 7 / 8
    link = 450e9 * 0.8 * EAGER.near_part
    assert near.communication_seconds < 0.8 * gathered / link  # half of it, and the ends
    # what nothing is computed beside takes all its time
    few = time_step(LLAMA, replace(sharded, micro_batch=1, seq_len=128), EIGHT, EAGER)
    assert few.communication_seconds + few.host_seconds > near.communication_seconds


def test_whole_gradients_are_handed_over_once_a_step():
    """Eight small micro-batches, behind which nothing hides: 16 gathers and 1 or 8 sums of 16 GB."""

    def exchanged(**changes):
        work = replace(PLAIN, axes=Mesh(dp_shard=8), shard="zero3", seq_len=64, grad_accum=8, **changes)
        return time_step(LLAMA, work, EIGHT, EAGER).communication_seconds

    each, once = exchanged(averages_each=True), exchanged()
    assert 0.66 < once / each < 0.76  # 17 of 24, less what the layers hide, more the ends of the network
    assert exchanged(whole_gradient_bytes=4) > once
    in_pipeline = replace(PLAIN, axes=Mesh(dp_shard=8, pp=8), shard="zero2", seq_len=64, grad_accum=8)
    again = replace(in_pipeline, grad_accum=80)
    first, tenfold = (time_step(LLAMA, work, MANY, EAGER).communication_seconds for work in (in_pipeline, again))
    assert tenfold < 5 * first  # what stages send grows, what they gathered stays


def test_zero2_averages_gradients_after_each_micro_batch_and_gathers_weights_after_a_step():
    work = Work.of(llama_job(grad_accum=4), Plan(shard="zero2", engine="deepspeed"), EIGHT)
    assert (work.sharded, work.averages_each, work.weight_bytes, work.main_weights) == (False, True, 2, True)
    one, four = (time_step(LLAMA, replace(work, grad_accum=n), EIGHT, EAGER) for n in (1, 4))
    assert four.optimizer_seconds == one.optimizer_seconds
    assert 1.2 < four.communication_seconds / one.communication_seconds < 4


def test_experts_are_averaged_among_those_that_have_the_same():
    # of 64 ranks each 8th has the same experts: none shares a machine with another, so each has an adapter
    code = replace(software("megatron"), far_part=1.0, data_overlap=0.0, matmul_factor=1e-9, memory_factor=1e-9)
    code = replace(code, expert_factor=1e-9, attention_factor=1e-9, kernel_seconds=1e-12, looped_kernel_seconds=1e-12)

    def averaging(ep):
        work = replace(PLAIN, axes=Mesh(dp_replicate=64, ep=ep), experts_overlapped=True)
        kept = time_step(MIXTRAL, replace(work, shard="none"), MANY, code).communication_seconds
        return time_step(MIXTRAL, replace(work, shard="ddp"), MANY, code).communication_seconds - kept

    routed = MIXTRAL.layers * MIXTRAL.experts * MIXTRAL.expert_parameters
    plain = 2 * (MIXTRAL.parameters - routed) * 2 * 63 / 64 / (8 * 50e9)
    assert averaging(8) == pytest.approx(plain + 2 * routed / 8 * 2 * 7 / 8 / 50e9, rel=0.01)
    assert averaging(64) == pytest.approx(plain, rel=0.01)


def test_fsdp2_takes_the_host_75_us_for_each_tensor_and_gather():
    """Nine tensors of 32 layers, gathered twice; with adapters 23; quantized ones 0.5 ms more for each matrix."""
    alone = replace(PLAIN, seq_len=16, shard="zero3", axes=Mesh(dp_shard=1), optimizer="adamw-fused")

    def more(**changes):
        work = replace(alone, **changes)
        with_it, without = (time_step(LLAMA, replace(work, unpacked=on), ONE, EAGER) for on in (True, False))
        return with_it.host_seconds - without.host_seconds + with_it.compute_seconds - without.compute_seconds

    copied = 2 * 2 * 2 * LLAMA.parameters / (4800e9 * rates.card(ONE.device).memory)
    assert more() == pytest.approx(32 * 9 * 2 * 75e-6 + copied, rel=0.03)
    assert more(shard="zero2") == pytest.approx(32 * 9 * 75e-6 + copied / 2, rel=0.03)
    assert more(lora_rank=16) == pytest.approx(32 * 23 * 2 * 75e-6 + copied, rel=0.03)
    assert more(quantized=True) > more() + 32 * 7 * 2 * 500e-6 - copied
