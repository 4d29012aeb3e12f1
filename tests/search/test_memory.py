"""Which candidates need one step made, the others being its requests again; and workers that work ahead."""

import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from solutions import Formula, question
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, GhostUnavailable, UnreadableModel
from tonnage.mesh import axes
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.search import memory
from tonnage.search.depth import Look, Moment, extrapolated
from tonnage.search.memory import STEPS, STEPS_EXPANDABLE, steps_run
from tonnage.search.solve import search
from tonnage.shallow.few import COMPILED, roomy, with_layers
from tonnage.techniques import choices
from tonnage.trainers.cases import request


@pytest.mark.parametrize(
    ("plan", "job", "expected"),
    [
        ({}, {}, (1, STEPS - 1)),
        ({"shard": "zero3", "tp": 2, "allocator": "expandable"}, {}, (1, STEPS_EXPANDABLE - 1)),
        ({"shard": "ddp"}, {}, (STEPS, 0)),
        ({"shard": "zero1", "allocator": "expandable"}, {}, (STEPS_EXPANDABLE, 0)),
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
def test_steps_are_made_where_they_follow_from_those_before(plan, job, expected):
    asked = question()
    assert steps_run(Candidate(job=replace(asked.job, **job), plan=Plan(**plan))) == expected


def test_compiled_optimizers_are_optimizers():
    assert set(COMPILED) <= set(choices("optimizer"))


class Worker:
    """Stands where a warm ghost process stands."""

    def __init__(self):
        self.closed = self.answered = False
        self.begun, self.killed = threading.Event(), threading.Event()

    def kill(self):
        self.killed.set()

    def close(self):
        self.closed = True


@pytest.fixture
def workers(monkeypatch):
    """All that were started; each run is answered by the formula of `solutions`."""
    made = []

    def start(ghosts):
        made.append(Worker())
        ghosts._workers.append(made[-1])
        return made[-1]

    def on(run, worker):
        answer = Formula._answer(run.candidate, run.cluster)
        if run.looks:
            return Look(
                allocated_bytes={Moment("forward", ""): answer.peak.process_bytes},
                by_category=answer.peak.by_category,
            )
        return answer

    monkeypatch.setattr(memory.Ghosts, "_start", start)
    monkeypatch.setattr(memory._Run, "on", on)
    return made


def solved(asked, **options):
    with memory.Ghosts(lambda text: None, **options) as ghosts:
        return search(asked, ghosts, top=4)


@pytest.mark.parametrize("asked", [{"gpu": "8xh100-80gb"}, {"gpu": "2x8xa100-80gb", "model": "qwen2.5-32b"}], ids=str)
def test_work_ahead_changes_no_answer(asked, workers, monkeypatch):
    asked = question(**asked)
    ahead = [solved(asked, count=count) for count in (2, 3, 2)]
    monkeypatch.setattr(memory.Ghosts, "ahead", lambda self, asks, cluster: None)
    plain = solved(asked, count=2)
    assert plain.status == "found"
    assert ahead == [plain] * 3


def test_a_network_that_cannot_be_built_ends_the_search(workers, monkeypatch):
    run = []

    def on(one, worker):
        run.append(one)
        raise UnreadableModel("no trainable class")

    monkeypatch.setattr(memory._Run, "on", on)
    with pytest.raises(UnreadableModel, match="no trainable class"):
        solved(question(gpu="8xh100-80gb"), count=1)
    assert len(run) <= 4, "a look at few layers, perhaps one ahead, and one at all"


def test_a_network_of_which_no_few_layers_can_be_built_is_looked_at_whole(workers, monkeypatch):
    asked, answered = question(gpu="8xh100-80gb"), memory._Run.on
    layers = asked.job.model.config["num_hidden_layers"]

    def on(one, worker):
        if one.candidate.job.model.config["num_hidden_layers"] < layers:
            raise UnreadableModel("the list of its layers has another length")
        return answered(one, worker)

    uncut = solved(asked)
    monkeypatch.setattr(memory._Run, "on", on)
    found = solved(asked)
    assert found.status == "found"
    assert found.plans[0].candidate == uncut.plans[0].candidate


def test_a_torch_without_kernels_for_the_card_ends_the_search(workers, monkeypatch):
    def on(one, worker):
        raise GhostUnavailable("torch has no kernels for this card.")

    monkeypatch.setattr(memory._Run, "on", on)
    with pytest.raises(GhostUnavailable):
        solved(question(gpu="8xh100-80gb"))


def test_workers_that_die_before_they_answer_end_the_search(workers, monkeypatch):
    def on(one, worker):
        worker.closed = True
        raise CannotEstimate("The ghost process ended early: it said nothing")

    monkeypatch.setattr(memory._Run, "on", on)
    with pytest.raises(GhostUnavailable, match="ended early"):
        solved(question(gpu="8xh100-80gb"), count=1)
    assert len(workers) <= 5, "some begin ahead of who asks"


def test_a_worker_that_dies_later_is_replaced(workers, monkeypatch):
    answered = memory._Run.on

    def on(one, worker):
        worker.answered, worker.closed = True, not worker.closed and len(workers) == 1
        if worker.closed:
            raise CannotEstimate("The ghost process ended early: it said nothing")
        return answered(one, worker)

    monkeypatch.setattr(memory._Run, "on", on)
    assert solved(question(gpu="8xh100-80gb"), count=1).status == "found"
    assert len(workers) == 2


QUESTIONS = (
    *({"gpu": gpu} for gpu in ("8xh100-80gb", "4xh100-80gb", "8xa100-80gb", "2x8xa100-80gb", "8xh200", "8xl40s")),
    {"gpu": "2x8xa100-80gb", "model": "qwen2.5-32b"},
)


def test_work_ahead_is_what_is_asked_next():
    """Of all that is looked at and run, most was foreseen, and of that little is not asked.

    Of one question it may be more: where the best plan does not fit with all logits and the next one does, the
    explanations of the first were in vain.
    """
    counts = Counter()
    for asked in QUESTIONS:
        ghosts = Formula()
        search(question(**asked), ghosts, top=4)
        asks = {repr(one) for one in (*ghosts.looked, *ghosts.asked)}
        foreseen = {repr(one) for one in ghosts.foreseen}
        assert len(foreseen - asks) <= 0.45 * len(asks)
        counts.update(asked=len(asks), met=len(foreseen & asks), in_vain=len(foreseen - asks))
    assert counts["met"] >= 0.9 * counts["asked"]
    assert counts["in_vain"] <= 0.25 * counts["asked"]


def test_a_plan_that_will_be_shown_with_all_logits_is_explained_with_them():
    """On cards with room for all logits nothing is run for a loss in slices that nobody will be shown."""
    ghosts = Formula()
    search(question(gpu="8xh200"), ghosts, top=4)
    asks = {repr(one) for one in (*ghosts.looked, *ghosts.asked)}
    assert {repr(one) for one in ghosts.foreseen} <= asks


def test_an_interruption_ends_what_is_at_work(workers, monkeypatch):
    def on(run, worker):
        worker.begun.set()
        assert worker.killed.wait(120)
        raise CannotEstimate("The ghost process ended early.")

    monkeypatch.setattr(memory._Run, "on", on)
    asked = question()
    some = [Candidate(job=asked.job, plan=Plan(shard=shard)) for shard in ("ddp", "zero2", "zero3")]
    before = set(threading.enumerate())

    def interrupted():
        with memory.Ghosts(lambda text: None, count=2) as ghosts:
            ghosts.ahead([(one, asked.cluster) for one in some], asked.cluster)
            while len(workers) < 2 or not all(worker.begun.wait(120) for worker in workers):
                time.sleep(0.001)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(worker.killed.is_set() and worker.closed for worker in workers)
    assert len(workers) == 2, "nothing begins after the end"
    assert set(threading.enumerate()) <= before  # of which some may have ended meanwhile, such as timers


def test_workers_start_while_candidates_are_priced(workers):
    with memory.Ghosts(lambda text: None, count=3) as ghosts:
        ghosts.start()
        until = time.monotonic() + 60
        while len(workers) < 3 and time.monotonic() < until:
            time.sleep(0.001)
        assert len(workers) == 3
        asked = question()
        ghosts.fit([Candidate(job=asked.job, plan=Plan(shard="zero3", tp=tp)) for tp in (1, 2, 4)], asked.cluster)
        assert len(workers) == 3


def test_a_worker_that_cannot_start_is_told_by_the_first_run(monkeypatch):
    def start(ghosts):
        raise GhostUnavailable("There is no ghost here.")

    monkeypatch.setattr(memory.Ghosts, "_start", start)
    asked = question()
    with memory.Ghosts(lambda text: None) as ghosts:
        ghosts.start()
        with pytest.raises(GhostUnavailable, match="no ghost here"):
            ghosts.fit([Candidate(job=asked.job, plan=Plan())], asked.cluster)


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("options", "fullest"),
    [
        ({"pp": 4, "tp": 4, "cp": 2, "shard": "zero2", "checkpointing": "selective"}, 0),
        ({"pp": 4, "tp": 4, "shard": "zero2", "checkpointing": "full"}, 0),  # the embedding outweighs what waits
        ({"pp": 8, "tp": 4, "shard": "zero1", "checkpointing": "full"}, 8),  # 256 micro-batches wait there twice
    ],
)
def test_the_rank_of_a_pipeline_that_is_asked_first_needs_most(worker, options, fullest):
    cluster = parse_cluster("8x8xh100-80gb")
    asked = {"seq_len": 8192, "global_batch_tokens": 2**22, "loss": "chunked", "optimizer": "adamw-fused"}
    job, plan = request("llama-3.1-70b", offline=True, **asked, **options)
    one = Candidate(job=job.on_ranks(axes(plan, cluster.gpus, cluster.gpus_per_node).data_parallel), plan=plan)
    ranks = memory._ranks(one, cluster)
    assert memory._likely_fullest(one, cluster) == fullest
    few = replace(one, job=with_layers(one.job, plan.pp))
    grown = replace(one, job=with_layers(one.job, 2 * plan.pp))
    needs = {}
    for rank in ranks:
        looks = [memory._Run(each, roomy(cluster), 1, 0, rank, looks=True).on(worker) for each in (few, grown)]
        needs[rank] = extrapolated(*looks, (plan.pp, 2 * plan.pp), 80).process_bytes
    assert max(needs, key=needs.get) == fullest
