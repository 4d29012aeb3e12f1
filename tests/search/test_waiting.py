"""What a pipeline holds for micro-batches that were not run: beside runs of all of them on the ghost."""

from dataclasses import replace

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.predict import estimate, trace
from tonnage.mesh import axes
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.search.depth import seen
from tonnage.search.memory import Ghosts, micro_batches_run
from tonnage.search.waiting import estimated, looked, waiting_bytes
from tonnage.shallow.few import with_layers

STEP = 24
"""Micro-batches of it."""

PLANS = {
    "1f1b": Plan(pp=4),
    "interleaved": Plan(pp=4, pp_schedule="interleaved"),
    "divided sequences": Plan(pp=2, tp=2),
    "zero2": Plan(pp=2, shard="zero2"),
    "pure bf16": Plan(pp=4, precision="bf16-true"),
}


@pytest.mark.ghost
@pytest.mark.parametrize("name", PLANS)
def test_few_micro_batches_say_what_a_step_of_many_needs(worker, name):
    plan, cluster = replace(PLANS[name], allocator="expandable"), parse_cluster("4xa100-40gb")
    job = with_layers(tiny_job("llama", seq_len=256, grad_accum=STEP), 8)
    one = Candidate(job=job, plan=plan)
    at_once = job.seq_len * job.micro_batch * job.model.config["hidden_size"] * 4  # of one hand-over, more or less
    few = replace(one.job, grad_accum=micro_batches_run(one))
    assert few.grad_accum < STEP
    for rank in axes(plan, cluster.gpus, cluster.gpus_per_node).different:
        more = (STEP - few.grad_accum) * waiting_bytes(one, cluster, rank)
        run = estimate(Case(few, plan, cluster), worker=worker, rank=rank, steps=2)
        whole = estimate(Case(one.job, plan, cluster), worker=worker, rank=rank, steps=2).estimate.peak
        said = estimated(run.estimate, more, one.job, cluster)
        assert said.peak.allocated_bytes == pytest.approx(whole.allocated_bytes, abs=at_once)
        assert max(one.allocated_bytes for one in said.phases) == said.peak.allocated_bytes
        assert max(one.allocated_bytes for one in said.steps) == said.peak.allocated_bytes
        assert more > 8 * at_once // 4
        assert sum(said.peak.by_category.values()) == said.peak.process_bytes
        assert f"{STEP - few.grad_accum} more micro-batches" in said.coverage.modelled[-1]
    first = trace(Case(few, plan, cluster), worker=worker, rank=0, steps=1)
    look = looked(seen(first, cluster), (STEP - few.grad_accum) * waiting_bytes(one, cluster))
    whole = estimate(Case(one.job, plan, cluster), worker=worker, rank=0, steps=2).estimate.peak
    assert max(look.allocated_bytes.values()) == pytest.approx(whole.allocated_bytes, abs=at_once)


def test_no_pipeline_holds_nothing():
    one = Candidate(job=tiny_job("llama", grad_accum=STEP), plan=Plan())
    assert waiting_bytes(one, parse_cluster("a100-40gb")) == 0


@pytest.mark.ghost
def test_the_fullest_rank_is_shown_with_the_others():
    one = Candidate(job=with_layers(tiny_job("llama", grad_accum=STEP), 8), plan=PLANS["1f1b"])
    cluster = parse_cluster("4xa100-40gb")
    with Ghosts(lambda text: None, count=1) as ghosts:
        [found] = ghosts.fit([one], cluster)
        [need] = ghosts.need([one], cluster)
    assert [each["rank"] for each in found.ranks] == [0, 1, 3]
    assert found.peak.process_bytes == max(each["process_bytes"] for each in found.ranks)
    assert found.job["grad_accum"] == STEP
    assert need.process_bytes == pytest.approx(found.peak.process_bytes, rel=1e-3)  # of the second rank
