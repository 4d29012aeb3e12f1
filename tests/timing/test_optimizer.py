"""Seconds of the optimizer's step on the card."""

from dataclasses import replace

import pytest

from timed_steps import EAGER, EIGHT, LLAMA, ONE, PLAIN, llama_job
from tonnage.mesh import Mesh
from tonnage.plans import Plan
from tonnage.techniques import choices
from tonnage.timing import rates
from tonnage.timing.memory import STATE_BYTES
from tonnage.timing.optimizer import OPTIMIZER_BYTES, UNMEASURED
from tonnage.timing.timing import time_step
from tonnage.timing.work import Work

ALIKE = ("adamw-8bit-ao", "adamw-fp8-ao", "adamw-4bit", "paged-adamw", "adamw-fused", "adamw-foreach")


def test_only_adapters_are_updated():
    full = Work.of(llama_job(), Plan(precision="bf16-true"), ONE)
    lora = Work.of(llama_job(method="lora"), Plan(precision="bf16-true"), ONE)
    assert (
        time_step(LLAMA, lora, ONE, EAGER).optimizer_seconds
        < 0.1 * time_step(LLAMA, full, ONE, EAGER).optimizer_seconds
    )


def test_an_8bit_optimizer_is_bound_by_looking_states_up():
    """27.7 ps a weight of Adam in 8 bits on an H200, whatever the weights' dtype; moving 16 bytes takes 3.8."""
    for precision in ("bf16-true", "fp32"):
        work = Work.of(llama_job(), Plan(precision=precision, optimizer="adamw-8bit"), ONE)
        assert time_step(LLAMA, work, ONE, EAGER).optimizer_seconds == pytest.approx(8.03e9 * 27.6e-12, rel=0.01)


def test_ddp_copies_gradients_into_buckets_and_back():
    """16 bytes for each fp32 gradient; Megatron's buffers are the gradients themselves."""
    replicated, alone = (Work.of(llama_job(), Plan(shard=shard), EIGHT) for shard in ("ddp", "none"))
    more = (
        time_step(LLAMA, replicated, EIGHT, EAGER).optimizer_seconds
        - time_step(LLAMA, alone, EIGHT, EAGER).optimizer_seconds
    )
    assert more == pytest.approx(8.03e9 * 16 / (3350e9 * rates.card(EIGHT.device).memory), rel=0.01)
    assert not Work.of(llama_job(), Plan(shard="zero1", precision="megatron-bf16"), EIGHT).bucketed


@pytest.mark.parametrize(("shard", "cluster"), [("none", ONE), ("zero3", EIGHT)])
def test_clipping_before_updates_in_backward_makes_gradients_twice(shard, cluster):
    """As long as two micro-batches that exchange their gradients, and as many tokens as one."""
    once, clipped, twice = (
        time_step(LLAMA, Work.of(llama_job(), Plan(shard=shard, **plan), cluster), cluster, EAGER)
        for plan in (
            {"optimizer_in_backward": True},
            {"clip_grad_norm": 1.0},
            {"optimizer_in_backward": True, "clip_grad_norm": 1.0},
        )
    )
    assert twice.compute_seconds == pytest.approx(once.compute_seconds)
    assert twice.recompute_seconds == pytest.approx(once.compute_seconds)
    assert twice.optimizer_seconds == pytest.approx(clipped.optimizer_seconds)
    assert twice.tokens_per_second_per_gpu * twice.step_seconds == pytest.approx(
        once.tokens_per_second_per_gpu * once.step_seconds
    )
    if shard == "zero3":
        assert twice.communication_seconds == pytest.approx(2 * once.communication_seconds, rel=0.01)


@pytest.mark.parametrize("optimizer", choices("optimizer"))
def test_every_optimizer_has_its_bytes_and_says_where_they_are_borrowed(optimizer):
    work = replace(PLAIN, optimizer=optimizer)
    assert OPTIMIZER_BYTES[optimizer] > 0
    assert STATE_BYTES[optimizer] >= 0
    sentences = [
        text for text in time_step(LLAMA, work, ONE, EAGER).assumed if f"{optimizer} was measured only" in text
    ]
    assert len(sentences) == (optimizer in UNMEASURED)


def test_momentum_is_a_state_and_is_read_and_written():
    assert STATE_BYTES["sgd"] == 1.0 > STATE_BYTES["sgd-plain"] == 0.0
    seconds = {
        name: time_step(LLAMA, replace(PLAIN, optimizer=name), ONE, EAGER).optimizer_seconds
        for name in ("sgd", "sgd-plain")
    }
    assert seconds["sgd"] > 2 * seconds["sgd-plain"]


def test_torchaos_optimizers_take_the_host_long_and_the_card_as_long_as_assumed():
    seconds = {name: time_step(LLAMA, replace(PLAIN, optimizer=name), ONE, EAGER).optimizer_seconds for name in ALIKE}
    assert seconds["adamw-8bit-ao"] == seconds["adamw-fp8-ao"] == seconds["adamw-4bit"] < seconds["adamw-foreach"]
    assert seconds["adamw-fused"] < seconds["adamw-4bit"]
    assert seconds["adamw-fused"] < seconds["paged-adamw"] < seconds["adamw-foreach"]
    few = replace(PLAIN, seq_len=16)
    alone, torchs = (
        time_step(LLAMA, replace(few, optimizer=name), ONE, EAGER) for name in ("adamw-8bit-ao", "adamw-fused")
    )
    assert alone.optimizer_seconds == pytest.approx(32 * 9 * 60 * 10e-6, rel=0.05), "60 for each of nine tensors"
    assert torchs.optimizer_seconds < 0.25 * alone.optimizer_seconds


def test_states_of_16_bits_take_six_tenths_of_those_of_32():
    narrow = time_step(LLAMA, PLAIN, ONE, EAGER).optimizer_seconds
    wide = time_step(LLAMA, replace(PLAIN, weight_bytes=4, gradient_bytes=4), ONE, EAGER).optimizer_seconds
    assert narrow == pytest.approx(0.6 * wide)
    main = time_step(LLAMA, replace(PLAIN, main_weights=True), ONE, EAGER).optimizer_seconds
    assert main == pytest.approx(wide), "fp32 weights and states of its own"


def test_the_host_hides_the_optimizers_launches_behind_the_card():
    """DTensors take it 200 us each: 0.058 s of 288, for which the card is busy anyway with 8,192 tokens."""
    sharded = replace(PLAIN, axes=Mesh(dp_shard=8), shard="zero3", unpacked=True)
    short, long = (time_step(LLAMA, replace(sharded, seq_len=s), EIGHT, EAGER).optimizer_seconds for s in (16, 8192))
    assert short == pytest.approx(32 * 9 * 200e-6, rel=0.05)
    assert long < 0.5 * short
    fused = time_step(LLAMA, replace(sharded, seq_len=16, optimizer="adamw-fused"), EIGHT, EAGER)
    assert fused.optimizer_seconds < 0.25 * short
