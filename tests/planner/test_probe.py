"""Probes of a few layers and micro-batches predict what whole runs on the ghost need."""

from dataclasses import replace

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.predict import estimate, trace
from tonnage.planner.probe import Moment, Probe, extrapolate, summarize_trace
from tonnage.planner.trial_run import MICRO_BATCHES
from tonnage.plans import Plan
from tonnage.shallow.depths import choose_probe_depths, roomy, with_layers

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
def test_two_depths_predict_the_whole_network(worker, gpu, plan):
    cluster = roomy(parse_cluster(gpu))
    probes = [
        summarize_trace(
            trace(Case(with_layers(job(), layers), plan, cluster), worker=worker, rank=0, steps=1), cluster
        )
        for layers in choose_probe_depths(job(), plan)
    ]
    need = extrapolate(*probes, choose_probe_depths(job(), plan), LAYERS)
    whole = estimate(Case(job(), plan, cluster), worker=worker, rank=0).estimate.peak
    assert sum(need.by_category.values()) == need.process_bytes
    runtime = whole.by_category["runtime"]
    assert need.uncached_bytes - runtime == pytest.approx(whole.allocated_bytes, rel=0.03)
    assert need.uncached_bytes <= whole.process_bytes


def t5(**options):
    found = tiny_job("t5", seq_len=512, micro_batch=2, **options)
    config = {**found.model.config, "d_model": 256, "d_ff": 1024, "d_kv": 64}
    return with_layers(replace(found, model=replace(found.model, config=config)), LAYERS)


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("gpu", "plan", "method"),
    [
        ("a100-40gb", Plan(allocator="expandable"), "full"),
        (
            "a100-40gb",
            Plan(checkpointing="full", optimizer="adamw-fused"),
            "full",
        ),  # the peak moves from the decoder to the encoder
        ("a100-40gb", Plan(checkpointing="selective", optimizer_in_backward=True, optimizer="adamw-fused"), "full"),
        ("a100-40gb", Plan(checkpointing="full", allocator="expandable"), "lora"),
        ("4xa100-40gb", Plan(shard="zero3", checkpointing="full"), "full"),
        ("4xa100-40gb", Plan(shard="zero2"), "full"),
    ],
    ids=["plain", "checkpointed", "in backward", "lora", "zero3", "zero2"],
)
def test_two_depths_predict_an_encoder_and_decoder(worker, gpu, plan, method):
    cluster, job = roomy(parse_cluster(gpu)), t5(method=method)
    few = choose_probe_depths(job, plan)
    small, large, whole = (
        summarize_trace(trace(Case(with_layers(job, layers), plan, cluster), worker=worker, rank=0, steps=1), cluster)
        for layers in (*few, LAYERS)
    )
    need = extrapolate(small, large, few, LAYERS)
    allocated = max(whole.allocated_bytes.values())
    assert 2 * max(large.allocated_bytes.values()) < allocated
    assert need.uncached_bytes - whole.by_category["runtime"] == pytest.approx(allocated, rel=0.005)


def probe_of(**allocated):
    """Return a probe with these bytes by module in backward, and nothing else."""
    moments = {Moment("backward", name.replace("_", ".")): most for name, most in allocated.items()}
    return Probe(
        allocated_bytes=moments, by_category={"activation": max(allocated.values()), "cached": 0, "runtime": 0}
    )


def test_peak_moves_from_one_stack_to_another():
    small = probe_of(decoder_0=100, decoder_1=90, encoder_0_mlp=80, encoder_1=70)
    large = probe_of(decoder_0=110, decoder_1=105, decoder_2=100, encoder_0_mlp=100, encoder_1=90, encoder_2=80)
    # At 3 layers the decoder's first layer is highest, 100 + 10 each; at 12 the encoder's, 80 + 20 each.
    assert extrapolate(small, large, (2, 3), 12).uncached_bytes == 80 + 20 * 10
    assert extrapolate(small, large, (2, 3), 3).uncached_bytes == 110


def test_layers_between_the_first_and_the_last_are_ignored():
    small = probe_of(layers_0=50, layers_1=10)  # the last of two: 10, and of three 12
    large = probe_of(layers_0=51, layers_1=40, layers_2=12)
    assert extrapolate(small, large, (2, 3), 12).uncached_bytes == 50 + 10


def test_module_missing_in_the_smaller_network_is_extrapolated_with_its_phase():
    small, large = probe_of(head=10), probe_of(head=11, other=30)
    assert extrapolate(small, large, (2, 3), 12).uncached_bytes == 30 + (30 - 10) * 9  # the phase as a whole


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
def test_first_step_predicts_all_steps(worker, gpu, plan, grad_accum):
    cluster = roomy(parse_cluster(gpu))
    asked = with_layers(tiny_job("llama", grad_accum=grad_accum), 4)
    first = summarize_trace(trace(Case(asked, plan, cluster), worker=worker, rank=0, steps=1), cluster)
    three = estimate(Case(asked, plan, cluster), worker=worker, rank=0, steps=3).estimate
    assert max(first.allocated_bytes.values()) == three.peak.allocated_bytes
    held = {name: bytes for name, bytes in three.peak.by_category.items() if bytes and name != "cached"}
    assert {name: bytes for name, bytes in first.by_category.items() if bytes and name != "cached"} == held


@pytest.mark.ghost
@pytest.mark.parametrize(("gpu", "plan"), [("a100-40gb", Plan()), ("4xa100-40gb", Plan(shard="zero3"))])
def test_further_micro_batches_need_as_much_as_the_second(worker, gpu, plan):
    few, many = (
        estimate(
            Case(with_layers(tiny_job("llama", grad_accum=count), 4), plan, parse_cluster(gpu)), worker=worker, rank=0
        ).estimate.peak
        for count in (MICRO_BATCHES, 3 * MICRO_BATCHES)
    )
    assert (few.allocated_bytes, few.reserved_bytes) == (many.allocated_bytes, many.reserved_bytes)


@pytest.mark.ghost
def test_context_parallel_parts_need_at_least_as_much_as_whole_sequences(worker):
    """`dominance.needs_at_least` relies on it."""
    cluster = parse_cluster("4xa100-40gb")
    plan = Plan(shard="zero3", checkpointing="full", loss="chunked", allocator="expandable")
    whole, *parts = (
        estimate(
            Case(job(seq_len=2048, micro_batch=cp), replace(plan, cp=cp), cluster), worker=worker, rank=0, steps=1
        ).estimate.peak
        for cp in (1, 2, 4)
    )
    assert all(part.allocated_bytes >= whole.allocated_bytes for part in parts)


def test_stub_of_flex_attention_keeps_as_much_as_flex_attention(worker):
    heads = {"num_attention_heads": 16, "head_dim": 64, "max_position_embeddings": 2048}
    asked, cluster = with_layers(tiny_job("gpt_oss", seq_len=2048, micro_batch=1), 2), parse_cluster("h100-80gb")
    asked = replace(asked, model=replace(asked.model, config={**asked.model.config, **heads}))
    plan = Plan(precision="bf16-true", attention="flex")

    def kept_bytes(run):
        return summarize_trace(run, cluster).allocated_bytes[Moment("forward", "model.norm")]

    compiled = kept_bytes(worker.run(asked, plan, cluster, steps=1))
    assert kept_bytes(trace(Case(asked, plan, cluster), worker=worker, rank=0, steps=1)) == pytest.approx(
        compiled, rel=0.01
    )
    eager = replace(plan, attention="eager")
    assert kept_bytes(trace(Case(asked, eager, cluster), worker=worker, rank=0, steps=1)) > 2 * compiled
