"""Seconds of a step: parts that sum up, and directions that must hold."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timed_steps import EAGER, EIGHT, LLAMA, MANY, ONE, PLAIN
from tonnage.catalog.devices import find_device, generic_device
from tonnage.catalog.models import find_model
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate
from tonnage.mesh import Mesh
from tonnage.timing.kinds import read_shape
from tonnage.timing.software import software, software_of, softwares
from tonnage.timing.timing import model_flops, time_step


def test_the_parts_sum_to_the_step():
    work = replace(PLAIN, axes=Mesh(pp=4, dp_shard=2, tp=8), grad_accum=16, shard="zero3", checkpointing="full")
    step = time_step(LLAMA, work, MANY, EAGER)
    parts = (
        *(step.compute_seconds, step.recompute_seconds, step.communication_seconds, step.bubble_seconds),
        *(step.optimizer_seconds, step.copy_seconds, step.host_seconds),
    )
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(step.step_seconds)
    assert step.low_seconds < step.step_seconds < step.high_seconds


def test_model_flops_and_utilisation_by_hand():
    # 6 x 8.03e9 + 12 x 32 layers x 4096 wide x 4096 tokens, each of 4096 tokens
    flops = (6 * 8_030_261_248 + 12 * 32 * 4096 * 4096) * 4096
    assert model_flops(LLAMA, PLAIN) == flops
    step = time_step(LLAMA, PLAIN, ONE, EAGER)
    assert step.mfu == pytest.approx(flops / step.step_seconds / 989.5e12)
    assert step.tokens_per_second_per_gpu == pytest.approx(4096 / step.step_seconds)


@settings(max_examples=30)
@given(st.sampled_from([512, 1024, 2048, 4096, 8192]), st.integers(1, 8), st.sampled_from(["none", "full"]))
def test_longer_sequences_and_larger_batches_take_longer(seq_len, micro_batch, checkpointing):
    work = replace(PLAIN, seq_len=seq_len, micro_batch=micro_batch, checkpointing=checkpointing)
    seconds = time_step(LLAMA, work, ONE, EAGER).step_seconds
    assert time_step(LLAMA, replace(work, seq_len=2 * seq_len), ONE, EAGER).step_seconds >= seconds
    assert time_step(LLAMA, replace(work, micro_batch=micro_batch + 1), ONE, EAGER).step_seconds >= seconds
    assert time_step(LLAMA, replace(work, grad_accum=2), ONE, EAGER).step_seconds > seconds


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["ddp", "zero1", "zero3"]))
def test_more_ranks_do_more_in_a_step_but_no_rank_is_faster_for_it(ranks, shard):
    def per_gpu(count):
        cluster = replace(EIGHT, gpus_per_node=count)
        layout = Mesh(dp_shard=count) if shard == "zero3" else Mesh(dp_replicate=count)
        return time_step(LLAMA, replace(PLAIN, axes=layout, shard=shard, optimizer="adamw-fused"), cluster, EAGER)

    assert per_gpu(2 * ranks if ranks < 8 else 8).step_seconds * 2 * ranks > per_gpu(ranks).step_seconds * ranks
    assert per_gpu(ranks).tokens_per_second_per_gpu * ranks <= per_gpu(8).tokens_per_second_per_gpu * 8


def test_small_steps_wait_for_the_host_and_large_ones_do_not():
    small = read_shape(find_model("smollm2-135m").config())
    assert time_step(small, replace(PLAIN, seq_len=128), ONE, EAGER).bound_by == "host"
    assert time_step(LLAMA, PLAIN, ONE, EAGER).bound_by == "compute"


def test_unknown_rates_are_refused_in_one_line():
    with pytest.raises(CannotEstimate, match="How fast Tesla T4 is with bf16 is not known"):
        time_step(LLAMA, PLAIN, Cluster(device=find_device("t4")), EAGER)
    with pytest.raises(CannotEstimate, match="not known"):
        time_step(LLAMA, PLAIN, Cluster(device=generic_device(24 * 2**30)), EAGER)
    with pytest.raises(CannotEstimate, match="calibrated: eager"):
        software("horovod")


def test_every_calibrated_software_names_its_rows():
    for code in softwares().values():
        assert code.rows
        assert code.low_factor < 1 < code.high_factor
    assert software_of("accelerate") is software_of("tonnage")
