"""Steps that are the first one's requests again, beside steps that the program makes."""

import zipfile
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
from tonnage.trace import trace

pytestmark = pytest.mark.ghost


def handed_out(found, step):
    """Sizes of what one of three steps asked for and gave back, in order: all since the last step's last work."""
    work = [place for place, mark in enumerate(found.marks) if mark.step == step - 1 and mark.phase != "other"]
    until = [place for place, mark in enumerate(found.marks) if mark.step == step and mark.phase != "other"]
    blocks = (life for life in timeline(found).lives if work[-1] < life.mark <= until[-1])
    return [life.size_bytes for life in blocks if life.died < found.event_count]


@pytest.mark.parametrize(
    ("gpu", "plan", "fields"),
    [
        ("a100-40gb", Plan(), {}),
        ("a100-40gb", Plan(precision="fp16-mixed", checkpointing="full", allocator="expandable"), {"grad_accum": 2}),
        ("a100-40gb", Plan(optimizer_in_backward=True, optimizer="adamw-fused"), {"method": "lora"}),
        ("2x2xa100-40gb", Plan(shard="hsdp", clip_grad_norm=1), {}),
        ("4xa100-40gb", Plan(shard="zero3", tp=2, checkpointing="full", loss="chunked"), {"grad_accum": 2}),
        ("4xa100-40gb", Plan(shard="zero2", allocator="expandable"), {"grad_accum": 2}),
    ],
    ids=["plain", "checkpointed", "in backward", "hsdp", "zero3 tp", "zero2"],
)
def test_a_repetition_is_the_step_that_follows(worker, gpu, plan, fields):
    job, cluster = tiny_job("llama", seq_len=256, **fields), parse_cluster(gpu)
    made = estimate(Case(job, plan, cluster), worker=worker, rank=0, steps=3)
    repeated = estimate(Case(job, plan, cluster), worker=worker, rank=0, steps=1, repeated=2)
    (real,), (again,) = made.traces, repeated.traces
    assert again.steps == real.steps == 3
    assert handed_out(again, 2) == handed_out(again, 1) == handed_out(real, 1) == handed_out(real, 2)
    for name in ("allocated_bytes", "reserved_bytes"):
        assert again.peaks[name] == real.peaks[name]
    assert repeated.estimate.peak == made.estimate.peak
    assert repeated.estimate.phases == made.estimate.phases
    assert [step.allocated_bytes for step in repeated.estimate.steps] == [
        step.allocated_bytes for step in made.estimate.steps
    ]
    assert repeated.estimate.coverage.run[0].startswith("1 optimizer step, and 2 more by its requests alone")


@pytest.mark.parametrize("allocator", ["default", "expandable"])
def test_a_repetition_runs_out_of_memory_where_the_step_would(worker, allocator):
    """The states of the first step leave no room for the second one's activations."""
    job = Job(model=resolve("gpt2", offline=True), seq_len=512)
    plan = Plan(optimizer="adamw-fused", allocator=allocator)
    cluster = parse_cluster("a100-40gb")
    need = estimate(Case(job, plan, cluster), worker=worker, steps=3).estimate.peak
    less = estimate(Case(job, plan, cluster), worker=worker, steps=1).estimate.peak
    between = (need.reserved_bytes + less.reserved_bytes) // 2 + need.by_category["runtime"]
    assert need.reserved_bytes > less.reserved_bytes
    small = replace(cluster, device=cluster.device.with_capacity(between))
    made = estimate(Case(job, plan, small), worker=worker, steps=3).estimate
    repeated = estimate(Case(job, plan, small), worker=worker, steps=1, repeated=1).estimate
    assert (repeated.fits, repeated.oom.phase, repeated.oom.step) == (made.fits, made.oom.phase, made.oom.step)
    assert not repeated.fits
    assert repeated.oom.message == made.oom.message


@pytest.mark.parametrize("allocator", ["default", "expandable"])
def test_what_is_asked_of_the_card_is_noted_where_the_program_had_it(worker, allocator):
    """Segments and pages between the blocks of a step, as the allocator wrote them down while the program made it."""
    job, cluster = tiny_job("llama", seq_len=2048, micro_batch=4), parse_cluster("a100-40gb")
    plan = Plan(optimizer="sgd", allocator=allocator)
    made = worker.run(job, plan, cluster, steps=3)
    repeated = worker.run(job, plan, cluster, steps=1, repeated=2)

    def around(trace):
        events = [(event.action, event.size_bytes) for event in trace.events()]
        return [events[at : at + 2] for at, (action, _) in enumerate(events) if action.startswith("segment")]

    assert around(repeated) == around(made)
    assert len(around(repeated)) > 2


def test_what_is_repeated_is_kept_in_a_file(worker, tmp_path):
    found = worker.run(tiny_job(), Plan(), parse_cluster("t4"), steps=1, repeated=1)
    with zipfile.ZipFile(tmp_path / "trace", "w") as archive:
        trace.write(found, archive)
    assert trace.load(tmp_path / "trace").repeated == found.repeated
    assert len(found.repeated) == 2
