"""Which candidates repeat their first step, and how workers are started, replaced and ended."""

import threading
import time
from dataclasses import replace

import pytest

from solutions import FormulaRunner, question
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, GhostUnavailable, UnreadableModel
from tonnage.mesh import make_mesh
from tonnage.planner import trial_run, trial_runner
from tonnage.planner.probe import Moment, Probe, extrapolate
from tonnage.planner.solution import Candidate
from tonnage.planner.solve import search
from tonnage.planner.trial_run import STEPS, ShownRun, TrialRun, count_steps
from tonnage.plans import Plan
from tonnage.shallow.depths import COMPILED, roomy, with_layers
from tonnage.techniques import choices
from tonnage.trainers.cases import request


@pytest.mark.parametrize(
    ("plan", "job", "expected"),
    [
        ({}, {}, (1, STEPS - 1)),
        ({"shard": "zero3", "tp": 2, "allocator": "expandable"}, {}, (1, STEPS - 1)),
        ({"shard": "ddp"}, {}, (STEPS, 0)),
        ({"shard": "zero1", "allocator": "expandable"}, {}, (STEPS, 0)),
        ({"checkpointing": "budget=2GiB"}, {}, (STEPS, 0)),
        ({"optimizer": "adamw-4bit"}, {}, (STEPS, 0)),
        ({"attention": "flex"}, {}, (STEPS, 0)),
        ({"outputs": "loop"}, {}, (STEPS, 0)),
        ({"engine": "trl"}, {}, (STEPS, 0)),
        ({"engine": "hf-trainer", "shard": "zero3", "allocator": "expandable"}, {}, (STEPS, 0)),
        ({"outputs": "loop", "allocator": "expandable"}, {}, (STEPS, 0)),
        ({"allocator": "expandable"}, {"lengths": ("128", "256")}, (STEPS, 0)),
        ({}, {"eval_batch": 2}, (STEPS, 0)),
        ({}, {"lengths": ("128", "256")}, (STEPS, 0)),
        ({}, {"save_checkpoint": "full"}, (STEPS, 0)),
    ],
)
def test_steps_that_depend_on_earlier_ones_are_made(plan, job, expected):
    asked = question()
    assert count_steps(Candidate(job=replace(asked.job, **job), plan=Plan(**plan))) == expected


def test_compiled_optimizers_are_optimizers():
    assert set(COMPILED) <= set(choices("optimizer"))


class Worker:
    """Stands in for a warm ghost process."""

    def __init__(self):
        self.closed = self.answered = False
        self.begun, self.killed = threading.Event(), threading.Event()

    def kill(self):
        self.killed.set()

    def close(self):
        self.closed = True


@pytest.fixture
def workers(monkeypatch):
    """Return all workers that were started; each run is answered by the formula of `solutions`."""
    made = []

    def start(runner):
        made.append(Worker())
        runner._workers.append(made[-1])
        return made[-1]

    def execute(run, worker):
        answer = FormulaRunner._answer(run.candidate, run.cluster)
        if getattr(run, "is_probe", False):
            return Probe(
                allocated_bytes={Moment("forward", ""): answer.peak.process_bytes},
                by_category=answer.peak.by_category,
            )
        return answer

    monkeypatch.setattr(trial_runner.TrialRunner, "_start_worker", start)
    for kind in (TrialRun, ShownRun):
        monkeypatch.setattr(kind, "execute", execute)
    return made


def solved(asked, **options):
    with trial_runner.TrialRunner(lambda text: None, **options) as runner:
        return search(asked, runner, top=4)


@pytest.mark.parametrize("asked", [{"gpu": "8xh100-80gb"}, {"gpu": "2x8xa100-80gb", "model": "qwen2.5-32b"}], ids=str)
def test_answers_do_not_depend_on_timing_or_the_number_of_workers(asked, workers):
    asked = question(**asked)
    first, *others = [solved(asked, count=count) for count in (2, 3, 2)]
    assert first.status == "found"
    assert others == [first] * 2


def test_unreadable_network_ends_the_search(workers, monkeypatch):
    run = []

    def execute(one, worker):
        run.append(one)
        raise UnreadableModel("no trainable class")

    monkeypatch.setattr(TrialRun, "execute", execute)
    with pytest.raises(UnreadableModel, match="no trainable class"):
        solved(question(gpu="8xh100-80gb"), count=1)
    assert len(run) <= 3, "probes at two depths, and one of all layers"


def test_network_that_cannot_be_made_shallower_is_probed_whole(workers, monkeypatch):
    asked, answered = question(gpu="8xh100-80gb"), TrialRun.execute
    layers = asked.job.model.config["num_hidden_layers"]

    def execute(one, worker):
        if one.candidate.job.model.config["num_hidden_layers"] < layers:
            raise UnreadableModel("the list of its layers has another length")
        return answered(one, worker)

    uncut = solved(asked)
    monkeypatch.setattr(TrialRun, "execute", execute)
    found = solved(asked)
    assert found.status == "found"
    assert found.plans[0].candidate == uncut.plans[0].candidate


def test_torch_without_kernels_ends_the_search(workers, monkeypatch):
    def execute(one, worker):
        raise GhostUnavailable("torch has no kernels for this card.")

    monkeypatch.setattr(TrialRun, "execute", execute)
    with pytest.raises(GhostUnavailable):
        solved(question(gpu="8xh100-80gb"))


def test_workers_that_die_before_an_answer_end_the_search(workers, monkeypatch):
    def execute(one, worker):
        worker.closed = True
        raise CannotEstimate("The ghost process ended early: it printed nothing")

    monkeypatch.setattr(TrialRun, "execute", execute)
    with pytest.raises(GhostUnavailable, match="ended early"):
        solved(question(gpu="8xh100-80gb"), count=1)
    assert len(workers) <= 5, "two runs of two candidates, and the warm-up"


def test_worker_that_dies_later_is_replaced(workers, monkeypatch):
    answered = TrialRun.execute

    def execute(one, worker):
        worker.answered, worker.closed = True, not worker.closed and len(workers) == 1
        if worker.closed:
            raise CannotEstimate("The ghost process ended early: it printed nothing")
        return answered(one, worker)

    monkeypatch.setattr(TrialRun, "execute", execute)
    assert solved(question(gpu="8xh100-80gb"), count=1).status == "found"
    assert len(workers) == 2


def test_interruption_ends_running_workers(workers, monkeypatch):
    def execute(run, worker):
        worker.begun.set()
        assert worker.killed.wait(120)
        raise CannotEstimate("The ghost process ended early.")

    monkeypatch.setattr(TrialRun, "execute", execute)
    asked = question()
    some = [Candidate(job=asked.job, plan=Plan(shard=shard)) for shard in ("ddp", "zero2", "zero3")]
    before = set(threading.enumerate())

    def interrupted():
        with trial_runner.TrialRunner(lambda text: None, count=2) as runner:
            for candidate in some:
                runner._scheduler.submit(trial_run.run_of_fullest_rank(candidate, asked.cluster))
            while len(workers) < 2 or not all(worker.begun.wait(120) for worker in workers):
                time.sleep(0.001)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(worker.killed.is_set() and worker.closed for worker in workers)
    assert len(workers) == 2, "nothing starts after the end"
    assert set(threading.enumerate()) <= before  # some may have ended meanwhile, such as timers


def test_workers_start_while_candidates_are_priced(workers):
    with trial_runner.TrialRunner(lambda text: None, count=3) as runner:
        runner.warm_up()
        until = time.monotonic() + 60
        while len(workers) < 3 and time.monotonic() < until:
            time.sleep(0.001)
        assert len(workers) == 3
        asked = question()
        runner.run_whole(
            [Candidate(job=asked.job, plan=Plan(shard="zero3", tp=tp)) for tp in (1, 2, 4)], asked.cluster
        )
        assert len(workers) == 3


def test_first_run_raises_why_a_worker_cannot_start(monkeypatch):
    def start(runner):
        raise GhostUnavailable("There is no ghost here.")

    monkeypatch.setattr(trial_runner.TrialRunner, "_start_worker", start)
    asked = question()
    with trial_runner.TrialRunner(lambda text: None) as runner:
        runner.warm_up()
        with pytest.raises(GhostUnavailable, match="no ghost here"):
            runner.run_whole([Candidate(job=asked.job, plan=Plan())], asked.cluster)


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("options", "fullest"),
    [
        ({"pp": 4, "tp": 4, "cp": 2, "shard": "zero2", "checkpointing": "selective"}, 0),
        ({"pp": 4, "tp": 4, "shard": "zero2", "checkpointing": "full"}, 0),  # the embedding outweighs the buffers
        ({"pp": 8, "tp": 4, "shard": "zero1", "checkpointing": "full"}, 8),  # buffers of 256 micro-batches, twice
    ],
)
def test_pipeline_rank_that_is_run_first_needs_most(worker, options, fullest):
    cluster = parse_cluster("8x8xh100-80gb")
    asked = {"seq_len": 8192, "global_batch_tokens": 2**22, "loss": "chunked", "optimizer": "adamw-fused"}
    job, plan = request("llama-3.1-70b", offline=True, **asked, **options)
    one = Candidate(job=job.on_ranks(make_mesh(plan, cluster.gpus, cluster.gpus_per_node).data_parallel), plan=plan)
    ranks = trial_run.list_ranks(one, cluster)
    assert trial_run.guess_fullest_rank(one, cluster) == fullest
    few = replace(one, job=with_layers(one.job, plan.pp))
    grown = replace(one, job=with_layers(one.job, 2 * plan.pp))
    needs = {}
    for rank in ranks:
        probes = [TrialRun(one, roomy(cluster), 1, 0, rank, is_probe=True).execute(worker) for one in (few, grown)]
        needs[rank] = extrapolate(*probes, (plan.pp, 2 * plan.pp), 80).process_bytes
    assert max(needs, key=needs.get) == fullest
