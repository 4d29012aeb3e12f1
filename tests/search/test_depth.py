"""A few layers, and a few micro-batches, say what many need: beside whole runs on the ghost."""

from dataclasses import replace

import pytest

from networks import tiny_job
from tonnage.device import parse_cluster
from tonnage.layers.few import depths, roomy, with_layers
from tonnage.plans import Plan
from tonnage.predict import estimate, trace
from tonnage.search.depth import extrapolated, seen
from tonnage.search.memory import MICRO_BATCHES

LAYERS = 24


def job(**options):
    return with_layers(tiny_job("llama", **{"seq_len": 256, "micro_batch": 2, **options}), LAYERS)


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("gpu", "plan"),
    [
        ("a100-40gb", Plan(allocator="expandable")),
        ("a100-40gb", Plan(checkpointing="full", optimizer="adamw-fused")),
        ("4xa100-40gb", Plan(shard="zero3", loss="chunked")),
    ],
    ids=["plain", "checkpointed", "zero3"],
)
def test_few_layers_say_what_many_need(worker, gpu, plan):
    cluster = roomy(parse_cluster(gpu))
    looks = [
        seen(trace(with_layers(job(), layers), plan, cluster, worker=worker, rank=0, steps=1), cluster)
        for layers in depths(job(), plan)
    ]
    need = extrapolated(*looks, depths(job(), plan), LAYERS)
    whole = estimate(job(), plan, cluster, worker=worker, rank=0).estimate.peak
    assert sum(need.by_category.values()) == need.process_bytes
    runtime = whole.by_category["runtime"]
    assert need.least_bytes - runtime == pytest.approx(whole.allocated_bytes, rel=0.03)
    assert need.least_bytes <= whole.process_bytes


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("gpu", "plan", "grad_accum"),
    [
        ("a100-40gb", Plan(), 2),
        ("a100-40gb", Plan(optimizer_in_backward=True, optimizer="adamw-fused"), 1),
        ("4xa100-40gb", Plan(shard="ddp", optimizer="adamw-fused", allocator="expandable"), 1),
        ("4xa100-40gb", Plan(shard="zero1"), 2),
        ("4xa100-40gb", Plan(shard="zero3", tp=2, checkpointing="full", loss="chunked"), 2),
        ("4xa100-40gb", Plan(shard="zero2", pp=2), 3),
    ],
    ids=["plain", "in backward", "ddp", "zero1", "zero3 tp", "zero2 pp"],
)
def test_the_first_step_says_what_all_need(worker, gpu, plan, grad_accum):
    cluster = roomy(parse_cluster(gpu))
    asked = with_layers(tiny_job("llama", grad_accum=grad_accum), 4)
    first = seen(trace(asked, plan, cluster, worker=worker, rank=0, steps=1), cluster)
    three = estimate(asked, plan, cluster, worker=worker, rank=0, steps=3).estimate
    assert max(first.allocated_bytes.values()) == three.peak.allocated_bytes
    held = {name: bytes for name, bytes in three.peak.by_category.items() if bytes and name != "cached"}
    assert {name: bytes for name, bytes in first.by_category.items() if bytes and name != "cached"} == held


@pytest.mark.ghost
@pytest.mark.parametrize(("gpu", "plan"), [("a100-40gb", Plan()), ("4xa100-40gb", Plan(shard="zero3"))])
def test_further_micro_batches_are_like_the_second(worker, gpu, plan):
    few, many = (
        estimate(
            with_layers(tiny_job("llama", grad_accum=count), 4), plan, parse_cluster(gpu), worker=worker, rank=0
        ).estimate.peak
        for count in (MICRO_BATCHES, 3 * MICRO_BATCHES)
    )
    assert (few.allocated_bytes, few.reserved_bytes) == (many.allocated_bytes, many.reserved_bytes)


@pytest.mark.ghost
def test_a_part_of_more_sequences_needs_no_less_than_as_many_tokens_of_whole_ones(worker):
    """What `best.needs_no_less` takes for granted."""
    cluster = parse_cluster("4xa100-40gb")
    plan = Plan(shard="zero3", checkpointing="full", loss="chunked", allocator="expandable")
    whole, *parts = (
        estimate(
            job(seq_len=2048, micro_batch=cp), replace(plan, cp=cp), cluster, worker=worker, rank=0, steps=1
        ).estimate.peak
        for cp in (1, 2, 4)
    )
    assert all(part.allocated_bytes >= whole.allocated_bytes for part in parts)
