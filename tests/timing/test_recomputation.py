"""Recomputation in backward: the operations that run again, and their cost."""

from dataclasses import replace

import pytest

from timed_steps import EAGER, EIGHT, LLAMA, MIXTRAL, ONE, PLAIN, llama_job
from tonnage.catalog.models import find_model
from tonnage.plans import Plan
from tonnage.timing import rates
from tonnage.timing.kinds import read_shape
from tonnage.timing.software import software
from tonnage.timing.timing import time_step
from tonnage.timing.work import Work


def test_recomputing_costs_about_a_forward_pass():
    plain = time_step(LLAMA, PLAIN, ONE, EAGER)
    again = time_step(LLAMA, replace(PLAIN, checkpointing="full"), ONE, EAGER)
    assert again.compute_seconds == plain.compute_seconds
    assert 0.25 < again.recompute_seconds / plain.compute_seconds < 0.4


def test_recomputation_stops_before_a_layers_last_product():
    def again(shape=LLAMA, code=EAGER, **changes):
        return time_step(shape, replace(PLAIN, checkpointing="full", **changes), ONE, code).recompute_seconds

    whole = again(repeats_to_end=True)
    down = LLAMA.hidden * LLAMA.intermediate / LLAMA.dense_layer_parameters
    assert 0.6 * down < 1 - again() / whole < down, "of arithmetic, and there is more than arithmetic"
    assert again(replace(LLAMA, ends_in_norm=True)) == again(replace(LLAMA, ends_in_norm=True), repeats_to_end=True)
    assert again(lora_rank=8) == again(lora_rank=8, repeats_to_end=True), "adapters follow it"
    assert again(code=software("nanotron")) == again(code=software("nanotron"), repeats_to_end=True)


def test_each_kind_of_checkpointing_recomputes_its_part_of_a_layer():
    ways = ("none", "attention", "attention-module", "full")
    parts = [time_step(LLAMA, replace(PLAIN, checkpointing=way), ONE, EAGER).recompute_seconds for way in ways]
    assert parts == sorted(set(parts))
    kinds = {
        "full-reentrant": ("full", True),
        "attention-module": ("attention-module", False),
        "sqrt": ("full", False),
    }
    for way, expected in kinds.items():
        work = Work.of(llama_job(), Plan(checkpointing=way), ONE)
        assert (work.checkpointing, work.repeats_to_end) == expected


def test_running_a_layer_again_costs_the_host_more_than_its_kernels():
    small = read_shape(find_model("smollm2-135m").config())
    work = replace(PLAIN, seq_len=256, checkpointing="full")
    with_it, without = (
        time_step(small, work, ONE, replace(EAGER, again_seconds=seconds)).step_seconds for seconds in (1e-3, 0.0)
    )
    assert with_it - without == pytest.approx(1e-3 * small.layers)


def test_experts_that_run_again_leave_attention_alone():
    work = replace(PLAIN, micro_batch=2)
    again = {
        way: time_step(MIXTRAL, replace(work, checkpointing=way), ONE, software("megatron")).recompute_seconds
        for way in ("norms", "experts", "full")
    }
    assert again["norms"] < again["experts"] < again["full"]


def test_torchtitans_own_checkpointing_runs_every_second_product_again():
    """Half of the products' forward seconds more than op-level checkpointing that keeps them all."""
    chosen = Plan(checkpointing="selective", shard="zero3")
    works = [
        Work.of(llama_job(seq_len=8192), replace(chosen, engine=name), EIGHT) for name in ("tonnage", "torchtitan")
    ]
    assert [work.checkpointing for work in works] == ["selective", "alternate"]
    ours, half, full = (
        time_step(LLAMA, replace(works[0], checkpointing=way), EIGHT, EAGER).recompute_seconds
        for way in ("selective", "alternate", "full")
    )
    products = 32 * 2.0 * 8192 * 6.98e9 / 32 / (989.5e12 * rates.card(EIGHT.device).matmul) * EAGER.matmul_factor
    assert half - ours == pytest.approx(products / 2, rel=0.05)
    assert ours < half < full
