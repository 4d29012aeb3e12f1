"""The time of an Estimate: filled if it is known, null with a sentence if it is not."""

from dataclasses import replace
from typing import Any

import pytest

import estimates
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import find_model
from tonnage.estimates import predict
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.step_time import _replay, add_time
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.planner import ask
from tonnage.planner.solve import search
from tonnage.planner.trial_runner import TrialRunner
from tonnage.plans import Plan
from tonnage.report import wording
from tonnage.shallow.depths import counted_micro_batches
from tonnage.trace.operations import with_another_micro_batch
from tonnage.trainers.cases import request
from tonnage.workers.worker import Worker

EMPTY = {"step_seconds": None, "tokens_per_second_per_gpu": None, "mfu": None, "bound_by": None}


def job(name):
    model = find_model(name)
    return Job(model=ModelRef(name=name, kind="config", config=model.config()), seq_len=4096)


def test_an_estimate_says_how_long_a_step_takes():
    found = add_time(
        estimates.fitting(), Case(job("llama-3.1-8b"), Plan(precision="bf16-true"), parse_cluster("h200"))
    )
    assert set(found.time) >= set(EMPTY)
    assert found.time["low_seconds"] < found.time["step_seconds"] < found.time["high_seconds"]
    assert found.time["step_seconds"] == pytest.approx(0.488, rel=0.2)  # what our H200 took
    assert found.time["bound_by"] == "compute"
    assert "calibrated on" in found.coverage.modelled[-1]
    assert "tokens/s a GPU" in wording.pace(found)
    assert Estimate.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("name", "cluster", "plan", "why"),
    [
        ("t5-base", "8xh200", Plan(tp=2), "'t5' network under tp, pp, cp or ep"),
        ("llama-3.1-8b", "t4", Plan(), "Tesla T4 is with bf16"),
        ("llama-3.1-8b", "2x8xrtx-4090", Plan(shard="ddp"), "network between the machines"),
        ("llama-3.1-8b", "cpu", Plan(), "is not known"),
        ("llama-3.1-8b", "h200", Plan(optimizer_offload="nvme=0.5"), "files are is not known"),
        ("llama-3.1-8b", "h200", Plan(activation_offload="nvme"), "files are is not known"),
    ],
)
def test_what_is_not_known_stays_null_with_a_sentence(name, cluster, plan, why):
    before = estimates.fitting()
    found = add_time(before, Case(job(name), plan, parse_cluster(cluster)))
    assert found.time == before.time == EMPTY
    assert why in found.coverage.modelled[-1]


def test_a_factory_has_no_time():
    made = Job(model=ModelRef(name="own", kind="factory", factory="package.module:make"))
    found = add_time(estimates.fitting(), Case(made, Plan(), parse_cluster("h200")))
    assert found.time == EMPTY
    assert "factory" in found.coverage.modelled[-1]


@pytest.mark.parametrize("changed", [{}, {"checkpointing": "full"}, {"optimizer": "sgd"}], ids=str)
def test_two_counted_micro_batches_price_a_step_of_many(worker: Worker, changed: dict[str, Any]) -> None:
    cluster = parse_cluster("t4")
    sizes = {"precision": "fp16-mixed", "seq_len": 64, "micro_batch": 2, **changed}
    job, plan = request("t5-small", grad_accum=5, **sizes)
    all_of_them = worker.count_operations(job, plan, cluster)
    two = worker.count_operations(replace(job, grad_accum=counted_micro_batches(job, plan)), plan, cluster)
    assert len(two.log) < len(all_of_them.log) / 2
    known, derived = _replay(all_of_them, cluster, 0), _replay(two, cluster, 3)
    assert derived.step_seconds == pytest.approx(known.step_seconds, rel=1e-6)
    assert derived.mfu == pytest.approx(known.mfu, rel=1e-6)
    assert derived.operations == known.operations


def test_one_micro_batch_has_none_to_repeat(worker: Worker) -> None:
    job, plan = request("t5-small", precision="fp16-mixed", seq_len=64)
    with pytest.raises(ValueError, match="only one micro-batch"):
        with_another_micro_batch(worker.count_operations(job, plan, parse_cluster("t4")))


def test_a_plan_of_counted_operations_has_the_seconds_of_its_file(worker: Worker) -> None:
    """Encoder-decoders are priced by counted operations: the plan with many micro-batches as its own estimate."""
    with TrialRunner(lambda text: None, count=1) as runner:
        runner.adopt(worker, closing=False)
        question = ask.ask(
            "t5-small", parse_cluster("t4"), {"precision": "fp16-mixed", "seq_len": 64, "grad_accum": 60}
        )
        (best, *_) = search(question, runner, top=1).plans
    case = Case(best.candidate.job, best.candidate.plan, question.cluster)
    assert best.estimate.time == predict.answer(case, worker=worker).estimate.time
