"""Micro-batches that are asked for without their program, beside those that the program makes."""

from collections import Counter
from dataclasses import replace

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.predict import estimate
from tonnage.estimates.timeline import timeline
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS
from tonnage.shallow.depths import is_first_alike, micro_batches_alike
from tonnage.workers.worker import request

SYNC = {"accum_sync": True}


def both(worker, job, plan, gpu="8xa100-40gb", steps=2, rank=0):
    """The Trace of micro-batches that are all made, and of those of which some are asked for again."""
    asked = request(job, plan, parse_cluster(gpu), rank=rank, steps=steps)
    return worker._trace(asked | {"every_micro_batch": True}), worker._trace(asked)


def in_order(trace):
    """Events in order, but blocks that are given back one after the other in the order of their sizes."""
    rows = list(zip(*(trace.event_columns[name] for name in ("action", "size", "mark")), strict=True))
    found, given = [], []
    for action, size, mark in rows:
        if ACTIONS[action].startswith("free"):
            given.append((mark, size, action))
            continue
        found += [*sorted(given), (mark, size, action)]
        given = []
    return found + sorted(given)


def launched(trace, *but):
    kinds = (one for one in trace.activities() if one.kind not in ("malloc", "free", "vm_map", "vm_unmap", *but))
    return Counter((one.kind, one.name, one.mark, one.bytes) for one in kinds)


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("plan", "fields"),
    [
        ({"shard": "none"}, {}),
        ({"shard": "none", "precision": "fp16-mixed", "checkpointing": "full", "allocator": "expandable"}, {}),
        ({"shard": "ddp", "optimizer": "adamw"}, {}),
        ({"shard": "ddp", "precision": "bf16-true"}, {"method": "lora"}),
        ({"shard": "zero1", "checkpointing": "selective"}, {}),
        ({"shard": "zero2", "allocator": "expandable"}, {}),
        ({"shard": "zero3", "checkpointing": "full", "loss": "chunked", "clip_grad_norm": 1}, {}),
        ({"shard": "hsdp"}, {}),
        ({"shard": "zero3", "tp": 2, "loss": "chunked"}, {}),
    ],
    ids=str,
)
def test_from_the_third_on_all_are_alike(worker, plan, fields):
    job, gpu = tiny_job("llama", grad_accum=5, **fields), "2x4xa100-40gb"
    made, asked = both(worker, job, Plan(**plan), gpu)
    assert (made.alike, asked.alike) == (0, 2 * (3 if plan["shard"] == "none" else 2))
    assert asked.marks == made.marks
    assert in_order(asked) == in_order(made)
    assert asked.peaks == made.peaks
    assert launched(asked) == launched(made)
    assert timeline(asked).by_category() == timeline(made).by_category()


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("model", "plan", "count"),
    [
        ("llama", {"shard": "zero3"}, 2),
        ("llama", {"shard": "zero2", "checkpointing": "selective", "optimizer": "adamw-fused"}, 4),
        ("llama", {"shard": "zero3", "tp": 2, "checkpointing": "full", "allocator": "expandable"}, 2),
        ("llama", {"shard": "zero3", "tp": 2, "cp": 2, "loss": "chunked", "optimizer": "adamw-fused"}, 3),
        ("mixtral", {"shard": "zero2", "ep": 2, "loss": "chunked"}, 2),
        ("t5", {"shard": "zero3", "precision": "bf16-true"}, 2),
        ("gpt2", {"shard": "zero3", "precision": "fp16-mixed"}, 2),
    ],
    ids=str,
)
def test_where_gradients_are_averaged_each_time_the_first_is_like_the_others(worker, model, plan, count):
    job = tiny_job(model, grad_accum=count)
    made, asked = both(worker, job, Plan(**plan, **SYNC))
    assert (made.alike, asked.alike) == (0, 2 * (count - 1))
    assert asked.marks == made.marks
    assert in_order(asked) == in_order(made)
    assert asked.peaks == made.peaks
    assert timeline(asked).allocated_by_mark.tolist() == timeline(made).allocated_by_mark.tolist()
    missing, more = launched(made) - launched(asked), launched(asked) - launched(made)
    assert {kind for kind, *_ in missing} == {"kernel"}  # that add gradients to those there
    assert {made.marks[mark].phase for _, _, mark, _ in missing} == {"backward"}
    assert bool(more) == (plan.get("precision") == "fp16-mixed"), "the scale is made once"


@pytest.mark.ghost
def test_where_memory_runs_out_the_micro_batch_is_made_to_say_where(worker):
    job = Job(model=resolve("smollm2-135m", offline=True), seq_len=128, micro_batch=1, grad_accum=2)
    plan, roomy = Plan(shard="zero3", **SYNC), parse_cluster("2xa100-40gb")
    made, asked = both(worker, job, plan, "2xa100-40gb", steps=1)
    assert asked.alike == 1
    highest, phases = timeline(made).reserved_by_mark.tolist(), [mark.phase for mark in made.marks]
    second = phases.index("forward", phases.index("backward"))
    first, both_ = max(highest[:second]), max(highest[: phases.index("optimizer")])
    assert both_ > first + 2**26, "the second micro-batch takes more than the first"
    capacity = int(made.device["context_bytes"]) + (first + both_) // 2
    short = replace(roomy, device=roomy.device.with_capacity(capacity))
    found = estimate(Case(job, plan, short), rank=0, steps=1, worker=worker).estimate
    assert not found.fits
    assert any("micro_batch" in line for line in found.oom.stack)
    assert not any("micro_batches.py" in line for line in found.oom.stack)


@pytest.mark.ghost
def test_what_was_not_made_is_said(worker):
    job, plan = tiny_job("llama", grad_accum=4), Plan(shard="zero3", **SYNC)
    found = estimate(Case(job, plan, parse_cluster("8xa100-40gb")), rank=0, worker=worker).estimate
    said = [line for line in found.coverage.run if "micro-batches" in line]
    assert said == ["9 micro-batches by the requests of the one before, without the program"]


@pytest.mark.parametrize(
    ("plan", "fields", "expected"),
    [
        ({}, {}, True),
        ({"shard": "zero3", "tp": 2}, {}, True),
        ({"shard": "zero3", "pp": 2}, {}, False),
        ({"compile": "layers"}, {}, False),
        ({"checkpointing": "budget=1GiB"}, {}, False),
        ({"activation_offload": "cpu"}, {}, False),
        ({"engine": "accelerate"}, {}, False),
        ({}, {"lengths": ("128", "256")}, False),
    ],
    ids=str,
)
def test_micro_batches_that_do_what_hangs_on_others_are_made(plan, fields, expected):
    assert micro_batches_alike(tiny_job("llama", **fields), Plan(**plan)) == expected


@pytest.mark.parametrize(
    ("model", "plan", "expected"),
    [
        ("llama", {"shard": "zero3", **SYNC}, True),
        ("llama", {"shard": "zero3"}, False),
        ("llama", {"shard": "hsdp", **SYNC}, False),
        ("qwen2_5_vl", {"shard": "zero3", **SYNC}, False),
    ],
    ids=str,
)
def test_a_first_one_that_keeps_more_than_gradients_is_unlike_the_others(model, plan, expected):
    assert is_first_alike(tiny_job(model), Plan(**plan)) == expected
