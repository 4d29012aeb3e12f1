"""What is proposed was run: asked by itself, it gives the same bytes.

The search for it is tested with a formula in place of the ghost.
"""

import dataclasses
import json
from typing import Any

import pytest

import estimates
import tonnage
from networks import TINY
from tonnage.advice.trials import Trials, Tried
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.estimate import CATEGORIES, Estimate, Peak
from tonnage.trainers import cases
from tonnage.units import GIB
from tonnage.workers.worker import Worker

FEW_LAYERS = {**TINY["llama"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
"""As wide as smollm2-135m; no single change but one brings it into 2 GiB."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A job that needs 4 GiB."""
    folder = tmp_path_factory.mktemp("network")
    (folder / "config.json").write_text(json.dumps(FEW_LAYERS))
    return {"model": str(folder), "gpu": "t4", "seq_len": 1024, "micro_batch": 4, "precision": "fp16-mixed"}


@pytest.fixture(scope="module")
def short(asked: dict[str, Any], worker: Worker) -> "tonnage.Estimate":
    """The job on a T4 with 2 GiB."""
    return tonnage.estimate(**asked, gpu_memory="2GiB", worker=worker)


def test_the_whole_step_is_measured_on_a_card_without_a_limit(asked, short, worker):
    boundless = tonnage.estimate(**asked, gpu_memory="100GiB", worker=worker)
    assert not short.fits
    assert short.needed_bytes == short.to_json()["needed_bytes"] == boundless.peak.process_bytes > 2 * 2**30
    assert short.needed_seconds == boundless.time["step_seconds"]
    assert short.time["step_seconds"] is None
    assert short.model["trainable_parameters"] == boundless.model["trainable_parameters"]


def test_each_change_gives_what_is_said_when_it_is_asked_for(asked, short, worker):
    assert short.advice
    for advice in short.advice:
        assert advice.fits
        assert advice.command.startswith(f"tonnage estimate {asked['model']} --gpu ")
        options = {**asked, **({} if "gpu" in advice.change else {"gpu_memory": "2GiB"}), **advice.change}
        again = tonnage.estimate(**options, worker=worker)
        assert (again.fits, again.peak.process_bytes) == (True, advice.peak_bytes)
        assert again.time["step_seconds"] == advice.step_seconds
        assert advice.gain_bytes == max(short.needed_bytes - advice.peak_bytes, 0)


def test_no_change_contains_a_smaller_one_that_fits(short):
    changes = [advice.change.items() for advice in short.advice if "gpu" not in advice.change]
    assert not any(one < other for one in changes for other in changes)


def test_the_mathematics_are_left_alone_first(short):
    own = [advice.changes_mathematics for advice in short.advice if "gpu" not in advice.change]
    assert own == sorted(own)
    assert not own[0]


def test_what_fits_needs_no_advice(asked, worker):
    fitting = tonnage.estimate(**asked, worker=worker)
    assert fitting.fits
    assert fitting.needed is None
    assert fitting.advice == ()


def test_advice_is_left_out_where_it_is_not_wanted(asked, worker):
    short = tonnage.estimate(**asked, gpu_memory="2GiB", worker=worker, advice=False)
    assert short.advice == ()
    assert short.needed is not None


def test_weights_being_loaded_are_parameters(worker):
    loading = tonnage.estimate("gpt2", gpu="t4", gpu_memory="560MiB", worker=worker, advice=False)
    assert loading.oom is not None
    assert loading.oom.phase == "load"
    held = loading.peak.by_category
    assert held["parameter"] > 50 * 2**20
    assert held["workspace"] == 0


def test_a_document_with_advice_can_be_read_back(short):
    assert tonnage.Estimate.from_json(short.to_json()) == short
    old = {
        name: value for name, value in short.to_json().items() if name not in ("needed", "needed_seconds", "advice")
    }
    assert tonnage.Estimate.from_json(old) == dataclasses.replace(short, needed=None, needed_seconds=None, advice=())


# ---- with a formula in place of the ghost ------------------------------------------------------------------------


class Formula:
    """Answers trials: 10 GiB of weights, 10 of gradients and states, 8 a sequence for activations."""

    worker_count = 2

    def __init__(self) -> None:
        self.asked = 0

    def run_all(self, trials):
        self.asked += len(trials)
        return [self.answer(trial.case) for trial in trials]

    def answer(self, case: Case) -> Estimate:
        recomputed = {"none": 1.0, "selective": 0.6, "full": 0.2}[case.plan.checkpointing]
        held = dict.fromkeys(CATEGORIES, 0) | {
            "parameter": 10 * GIB,
            "optimizer_state": 0 if case.plan.optimizer_offload == "cpu" else 10 * GIB,
            "activation": int(8 * GIB * case.job.micro_batch * recomputed),
        }
        total = sum(held.values())
        capacity = case.cluster.device.capacity_bytes
        boundless = estimates.fitting()
        peak = Peak(
            allocated_bytes=total,
            reserved_bytes=total,
            process_bytes=total,
            low_bytes=total,
            high_bytes=total,
            phase="backward",
            layer="",
            step=1,
            by_category=held,
        )
        return dataclasses.replace(boundless, fits=total <= capacity, peak=peak)


def best(memory: int, **options: object) -> tuple[list[Tried], Formula]:
    case = cases.make_case(
        "llama-3.2-1b", parse_cluster("b200", gpu_memory_bytes=memory * GIB), options, offline=True
    )
    runner = Formula()
    trials = Trials(case, runner.answer(dataclasses.replace(case, cluster=parse_cluster("b200"))).peak, runner)
    trials.run()
    return trials.best(), runner


def test_a_single_change_is_enough_where_one_is():
    tried, _ = best(30, micro_batch=4)
    assert {"checkpointing": "full"} in [one.change.options for one in tried]
    assert all(one.fits for one in tried)


def test_changes_are_combined_where_none_is_enough_alone():
    tried, _ = best(22, micro_batch=4)
    assert {"checkpointing": "full", "micro_batch": 1, "grad_accum": 4} in [one.change.options for one in tried]


def test_the_nearest_is_said_where_nothing_fits():
    tried, runner = best(8, micro_batch=2)
    assert [one.fits for one in tried if one.change.cluster is None] in ([], [False])
    assert runner.asked < 60


def test_a_job_with_too_little_host_memory_gets_changes_that_need_less_of_it(worker):
    asked = {
        "model": "smollm2-135m",
        "gpu": "t4",
        "seq_len": 512,
        "precision": "fp16-mixed",
        "shard": "zero3",
        "param_offload": "cpu",
        "host_memory": "2GiB",
    }
    short = tonnage.estimate(**asked, worker=worker)
    assert short.fits_card
    assert not short.fits
    assert short.advice
    best = short.advice[0]
    assert best.fits
    assert best.host_bytes is not None
    assert short.host.machine_bytes is not None
    assert best.host_bytes < 2 * GIB < short.host.machine_bytes
    again = tonnage.estimate(**{**asked, **best.change}, worker=worker)
    assert (again.fits, again.peak.process_bytes) == (True, best.peak_bytes)  # the host's figure differs between runs
    page = str(short)
    assert "host memory" in page[page.index("What would fit") :]
