"""The buffers of micro-batches that were not run, compared with runs of all of them on the ghost."""

from dataclasses import replace

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.predict import estimate, trace
from tonnage.mesh import make_mesh
from tonnage.planner.pipeline_buffers import add_to_estimate, add_to_probe, buffer_bytes
from tonnage.planner.probe import summarize_trace
from tonnage.planner.solution import Candidate
from tonnage.planner.trial_run import count_micro_batches
from tonnage.planner.trial_runner import TrialRunner
from tonnage.plans import Plan
from tonnage.shallow.depths import with_layers

STEP = 24
"""Micro-batches of a step."""

PLANS = {
    "1f1b": Plan(pp=4),
    "interleaved": Plan(pp=4, pp_schedule="interleaved"),
    "divided sequences": Plan(pp=2, tp=2),
    "zero2": Plan(pp=2, shard="zero2"),
    "pure bf16": Plan(pp=4, precision="bf16-true"),
}


@pytest.mark.ghost
@pytest.mark.parametrize("name", PLANS)
def test_few_micro_batches_predict_a_step_of_many(worker, name):
    plan, cluster = replace(PLANS[name], allocator="expandable"), parse_cluster("4xa100-40gb")
    job = with_layers(tiny_job("llama", seq_len=256, grad_accum=STEP), 8)
    one = Candidate(job=job, plan=plan)
    at_once = job.seq_len * job.micro_batch * job.model.config["hidden_size"] * 4  # one transfer
    few = replace(one.job, grad_accum=count_micro_batches(one))
    assert few.grad_accum < STEP
    for rank in make_mesh(plan, cluster.gpus, cluster.gpus_per_node).different:
        more = (STEP - few.grad_accum) * buffer_bytes(one, cluster, rank)
        run = estimate(Case(few, plan, cluster), worker=worker, rank=rank, steps=2)
        whole = estimate(Case(one.job, plan, cluster), worker=worker, rank=rank, steps=2).estimate.peak
        predicted = add_to_estimate(run.estimate, more, one.job, cluster)
        assert predicted.peak.allocated_bytes == pytest.approx(whole.allocated_bytes, abs=at_once)
        assert max(one.allocated_bytes for one in predicted.phases) == predicted.peak.allocated_bytes
        assert max(one.allocated_bytes for one in predicted.steps) == predicted.peak.allocated_bytes
        assert more > 8 * at_once // 4
        assert sum(predicted.peak.by_category.values()) == predicted.peak.process_bytes
        assert f"{STEP - few.grad_accum} more micro-batches" in predicted.coverage.modelled[-1]
    first = trace(Case(few, plan, cluster), worker=worker, rank=0, steps=1)
    probe = add_to_probe(summarize_trace(first, cluster), (STEP - few.grad_accum) * buffer_bytes(one, cluster))
    whole = estimate(Case(one.job, plan, cluster), worker=worker, rank=0, steps=2).estimate.peak
    assert max(probe.allocated_bytes.values()) == pytest.approx(whole.allocated_bytes, abs=at_once)


def test_no_buffers_without_a_pipeline():
    one = Candidate(job=tiny_job("llama", grad_accum=STEP), plan=Plan())
    assert buffer_bytes(one, parse_cluster("a100-40gb")) == 0


@pytest.mark.ghost
def test_fullest_rank_is_reported_with_the_others():
    one = Candidate(job=with_layers(tiny_job("llama", grad_accum=STEP), 8), plan=PLANS["1f1b"])
    cluster = parse_cluster("4xa100-40gb")
    with TrialRunner(lambda text: None, count=1) as runner:
        [found] = runner.run_whole([one], cluster)
        [need] = runner.probe([one], cluster)
    assert [each["rank"] for each in found.ranks] == [0, 1, 3]
    assert found.peak.process_bytes == max(each["process_bytes"] for each in found.ranks)
    assert found.job["grad_accum"] == STEP
    assert need.process_bytes == pytest.approx(found.peak.process_bytes, rel=1e-3)  # the second rank
