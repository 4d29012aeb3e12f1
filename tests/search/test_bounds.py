"""What no run can do with less than: below what the ghost holds, and close enough to be of use."""

from dataclasses import replace

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.predict import estimate
from tonnage.job import Job
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.search.bounds import least_bytes
from tonnage.search.pricing import bounded
from tonnage.timing.kinds import read_shape
from tonnage.timing.work import Work

PLANS = {
    "plain": ("a100-40gb", Plan()),
    "true": ("a100-40gb", Plan(precision="bf16-true")),
    "checkpointed": ("a100-40gb", Plan(checkpointing="full", precision="bf16-true")),
    "selective": ("a100-40gb", Plan(checkpointing="selective", precision="bf16-true")),
    "in backward": ("a100-40gb", Plan(optimizer_in_backward=True, optimizer="adamw-fused")),
    "zero1": ("4xa100-40gb", Plan(shard="zero1")),
    "zero3": ("4xa100-40gb", Plan(shard="zero3")),
    "offloaded": ("a100-40gb", Plan(activation_offload="cpu", optimizer_offload="cpu")),
}


@pytest.mark.ghost
def test_frozen_weights_rest_in_the_dtype_of_computation(worker):
    job = tiny_job("llama", seq_len=512, method="lora")
    cluster = parse_cluster("a100-40gb")
    run = estimate(Case(job, Plan(), cluster), worker=worker).estimate
    least = least_bytes(read_shape(job.model.config), Work.of(job, Plan(), cluster))
    assert 0 < least <= run.peak.allocated_bytes


@pytest.mark.ghost
@pytest.mark.parametrize("name", PLANS)
def test_below_every_run(worker, name):
    gpu, plan = PLANS[name]
    job = tiny_job("llama", seq_len=512, micro_batch=2)
    cluster = parse_cluster(gpu)
    run = estimate(Case(job, plan, cluster), worker=worker, rank=0).estimate
    least = least_bytes(
        read_shape(job.model.config), Work.of(job, plan, cluster), gradients_go=plan.optimizer_in_backward
    )
    assert 0 < least <= run.peak.allocated_bytes


WHOLE = {
    "FSDP2": ("4xa100-80gb", "smollm2-360m", Plan(shard="zero3")),
    "accelerate": ("4xa100-80gb", "smollm2-360m", Plan(shard="zero3", engine="accelerate")),
    "on the host": ("a100-80gb", "smollm2-360m", Plan(shard="zero3", param_offload="cpu")),
    "accelerate on the host": (
        *("a100-80gb", "smollm2-360m"),
        Plan(shard="zero2", param_offload="cpu", engine="accelerate"),
    ),
    "ZeRO-1": ("4xa100-80gb", "llama-3.2-1b", Plan(shard="zero1", engine="deepspeed")),
    "ZeRO-2": ("4xa100-80gb", "llama-3.2-1b", Plan(shard="zero2", engine="deepspeed")),
    "ZeRO-3": ("4xa100-80gb", "llama-3.2-3b", Plan(shard="zero3", engine="deepspeed")),
}


@pytest.mark.ghost
@pytest.mark.parametrize("name", WHOLE)
def test_below_what_engines_hold_between_micro_batches(worker, name):
    """Of networks whose weights are most of the memory, so that a byte a weight too many would show."""
    gpu, model, plan = WHOLE[name]
    pytest.importorskip(plan.engine if plan.engine != "tonnage" else "torch")
    job = Job(model=resolve(model, offline=True), seq_len=64, grad_accum=2)
    cluster = parse_cluster(gpu)
    plan = replace(plan, checkpointing="full")
    run = estimate(Case(job, plan, cluster), worker=worker, rank=0).estimate
    least = bounded(Candidate(job=job, plan=plan), cluster).least_bytes
    assert 0.6 * run.peak.allocated_bytes < least <= run.peak.allocated_bytes


@pytest.mark.parametrize(
    ("plan", "bytes_a_weight"),
    [
        (Plan(shard="zero3"), 4 / 4 + 8 / 4 + 4),
        (Plan(shard="zero3", accum_sync=True), 4 / 4 + 4 / 4 + 8 / 4),
        (Plan(shard="zero3", engine="accelerate"), 4 / 4 + 8 / 4 + 2),
        (Plan(shard="zero3", param_offload="cpu"), 4),
        (Plan(shard="zero3", param_offload="cpu", accum_sync=True), 0),
        (Plan(shard="zero1", engine="deepspeed"), 2 + 2 + 12 / 4),
        (Plan(shard="zero2", engine="deepspeed"), 2 + 2 / 4 + 12 / 4),
        (Plan(shard="zero3", engine="deepspeed"), (2 + 2 + 12) / 4),
        (Plan(precision="megatron-bf16", shard="ddp"), 2 + 4 + 12),
    ],
)
def test_what_divides_a_network_decides_what_a_rank_has(plan, bytes_a_weight):
    """Llama-3.1-8B on four cards, with micro-batches to be summed."""
    shape = read_shape(resolve("llama-3.1-8b", offline=True).config)
    plan = replace(plan, checkpointing="full", activation_offload="cpu")
    work = Work.of(replace(tiny_job("llama", seq_len=8), grad_accum=2), plan, parse_cluster("4xa100-80gb"))
    assert least_bytes(shape, work) == pytest.approx(bytes_a_weight * 8_030_261_248, rel=1e-3, abs=1)


def test_by_hand():
    """Llama-3.1-8B: pure bf16 with AdamW 2 + 2 + 4 bytes a parameter before the step; frozen under adapters 2."""
    job = tiny_job("llama", seq_len=128)
    shape = read_shape(resolve("llama-3.1-8b", offline=True).config)
    work = Work.of(job, Plan(precision="bf16-true"), parse_cluster("a100-80gb"))
    assert least_bytes(shape, work) == pytest.approx(8 * 8_030_261_248, rel=1e-3)
    adapters = Work.of(tiny_job("llama", seq_len=8, method="lora"), Plan(), parse_cluster("a100-80gb"))
    assert least_bytes(shape, adapters) == pytest.approx(2 * 8_030_261_248, rel=1e-2)


@pytest.mark.ghost
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen2_5_vl"])
def test_the_text_of_a_network_that_sees_needs_no_more_than_all_of_it(worker, name, method):
    cluster = parse_cluster("a100-40gb")
    for checkpointing in ("none", "full"):
        plan = Plan(checkpointing=checkpointing, loss="chunked")
        job = tiny_job(name, seq_len=512, method=method)
        known = bounded(Candidate(job=job, plan=plan), cluster)
        run = estimate(Case(job, plan, cluster), worker=worker).estimate
        assert known.rough
        assert 0 < known.least_bytes <= run.peak.allocated_bytes


def test_quantized_weights_are_gathered_as_they_rest():
    """Of Llama-3.1-8B in 4 bits on two cards: half a byte for a weight, and as much again where they stay whole."""
    shape = read_shape(resolve("llama-3.1-8b", offline=True).config)
    for shard, copies in (("zero3", 0.5), ("zero2", 1.5)):
        plan = Plan(shard=shard, checkpointing="full", activation_offload="cpu")
        work = Work.of(tiny_job("llama", seq_len=8, method="qlora"), plan, parse_cluster("2xrtx-3090"))
        assert least_bytes(shape, work) == pytest.approx(copies * 0.5 * 8_030_261_248, rel=1e-2)
