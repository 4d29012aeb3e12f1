"""A budget that fills what is left: found in few runs, never above the card, only where it is faster."""

from dataclasses import replace
from functools import partial

import pytest

import estimates
from solutions import question
from tonnage.search.best import Search
from tonnage.search.depth import of_run
from tonnage.search.filling import NEAR, fill
from tonnage.search.pricing import priced
from tonnage.search.reasons import looks
from tonnage.shallow.few import roomy
from tonnage.units import GIB, parse_bytes

LEAST, MOST, ELSE = 9 * GIB, 94 * GIB, 17 * GIB
"""Activations with all layers checkpointed and with none, and everything else."""


class Ghosts:
    """Every candidate needs its activations and the same besides; a budget is kept to, and has more in reserve."""

    count = 2

    def __init__(self, slope=1.0, reserve=0):
        self.slope, self.reserve, self.tried, self.foreseen = slope, reserve, [], []

    def start(self):
        """There is nothing to start."""

    def ahead(self, asks, cluster):
        self.foreseen = [one for one, _ in asks]

    def made_ahead(self, candidate, cluster):
        """Nothing is run ahead here."""

    def need(self, candidates, cluster):
        return [of_run(self._answer(one, roomy(cluster))) for one in candidates]

    def fit(self, candidates, cluster, budget_bytes=None):
        self.tried += [one.plan.checkpointing for one in candidates]
        return [self._answer(one, cluster) for one in candidates]

    def _answer(self, candidate, cluster):
        way = candidate.plan.checkpointing
        held = {"none": MOST, "selective": MOST, "full": LEAST}.get(way)
        made = estimates.fitting()
        model = made.model
        if held is None:
            held = min(parse_bytes(way.partition("=")[2]), MOST)
            part = (MOST - held) / (MOST - LEAST)
            model = {
                **model,
                "run_again": {"seconds_fraction": part, "layers": 32, "layers_again": 31, "layers_in_part": 31},
            }
        capacity = cluster.device.capacity_bytes
        process = ELSE + int(LEAST + (held - LEAST) * self.slope) + self.reserve * way.startswith("budget")
        fits, process = process <= capacity, min(process, capacity)
        categories = dict.fromkeys(made.peak.by_category, 0) | {"activation": held, "workspace": process - held}
        peak = replace(made.peak, process_bytes=process, allocated_bytes=process, by_category=categories)
        phases = tuple(replace(phase, allocated_bytes=process) for phase in made.phases)
        return replace(made, fits=fits, peak=peak, model=model, phases=phases)


def searched(ghosts, **options):
    asked = question(**{"gpu": "h100-80gb", "method": "lora", "seq_len": 16384, **options})
    search = Search(asked, ghosts, lambda text: None)
    search.run(4)
    return search


@pytest.mark.parametrize("slope", [0.9, 1.0, 1.1])
def test_the_card_is_filled_up(slope):
    search = searched(Ghosts(slope))
    before = search.found[0][0]
    assert before.candidate.plan.checkpointing == "full"
    fill(search, 4)
    best, estimate = search.found[0]
    assert best.candidate.plan.checkpointing.startswith("budget=")
    assert best.seconds_per_token < 0.95 * before.seconds_per_token
    capacity = search.question.budget_bytes
    assert 0.9 * capacity < estimate.peak.process_bytes <= capacity
    assert sum(way.startswith("budget") for way in search.ghosts.tried) <= 3
    times = [one.seconds_per_token for one, _ in search.found]
    assert times == sorted(times)


@pytest.mark.parametrize(("reserve", "runs"), [(0, 1), (GIB // 2, 1), (GIB, 2), (3 * GIB, 2), (14 * GIB, 3)])
def test_what_the_allocator_keeps_more_is_made_room_for(reserve, runs):
    """Of 79 GiB the first budget leaves 1 % free, which is what most need; the others are told by that run.

    What runs out is told by how much the most in use was too much, here all of the card, and by the run after it.
    """
    search = searched(Ghosts(reserve=reserve), only=("checkpointing",))
    fill(search, 4)
    best, estimate = search.found[0]
    assert best.candidate.plan.checkpointing.startswith("budget=")
    capacity = search.question.budget_bytes
    assert (1 - NEAR) * capacity <= estimate.peak.process_bytes <= capacity
    assert sum(way.startswith("budget") for way in search.ghosts.tried) == runs


def test_workers_run_ahead_what_explains_a_budget_and_does_not_hang_on_it():
    search = searched(Ghosts())
    search.afterwards = partial(looks, question=search.question)
    fill(search, 4)
    explained = [one for one, _ in looks(search.found[0][0].candidate, search.question)]
    foreseen = search.ghosts.foreseen
    assert {one.plan.checkpointing for one in foreseen} == {"none"}
    assert foreseen == [one for one in explained if not one.plan.checkpointing.startswith("budget")]


def test_a_card_that_is_full_is_not_filled():
    capacity = question(gpu="h100-80gb").cluster.device.capacity_bytes
    search = searched(Ghosts(), headroom=1 - 1.01 * (ELSE + LEAST) / capacity)
    before = list(search.found)
    assert before[0][0].candidate.plan.checkpointing == "full"
    fill(search, 4)
    assert search.found == before
    assert not any(way.startswith("budget") for way in search.ghosts.tried)


def test_nothing_is_filled_where_all_fits_or_nothing_may_be_chosen():
    for options in (
        {"seq_len": 1024, "gpu": "b200"},
        {"without": ("checkpointing=budget",)},
        {"checkpointing": "full"},
    ):
        search = searched(Ghosts(), **options)
        found = list(search.found)
        fill(search, 4)
        assert search.found == found, options


def test_seconds_lie_between_those_of_both_ends():
    search = searched(Ghosts())
    full = search.found[0][0]
    none = priced(
        replace(full.candidate, plan=replace(full.candidate.plan, checkpointing="none")), search.question.cluster
    )
    fill(search, 4)
    assert none.seconds_per_token < search.found[0][0].seconds_per_token < full.seconds_per_token


def test_a_budget_that_is_asked_for_has_the_seconds_of_its_run():
    search = searched(Ghosts(), checkpointing="budget=20GiB")
    before = search.found[0][0]
    fill(search, 4)
    [(one, estimate)] = search.found
    assert one.candidate == before.candidate
    assert one.seconds_per_token < before.seconds_per_token
    assert "run_again" in estimate.model
