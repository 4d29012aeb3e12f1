"""A budget that fills the card is found in few runs, never above the card, only where it is faster and allowed."""

from dataclasses import replace

import pytest

import estimates
from solutions import question
from tonnage.planner.budget_fit import MOST_PLANS, MOST_RUNS, NEAR, add_budgets
from tonnage.planner.pricing import price_candidate
from tonnage.planner.probe import need_of
from tonnage.planner.search import Search
from tonnage.shallow.depths import roomy
from tonnage.units import GIB, parse_bytes

LEAST, MOST, ELSE = 9 * GIB, 94 * GIB, 17 * GIB
"""Activations with full and without checkpointing, and everything else."""


class BudgetRunner:
    """Stands in for a TrialRunner: plans need their activations and `ELSE`; with a budget, `reserve` too."""

    worker_count = 2
    is_late = False

    def __init__(self, slope=1.0, reserve=0):
        self.slope, self.reserve, self.tried = slope, reserve, []

    def warm_up(self):
        """Do nothing."""

    def probe(self, candidates, cluster):
        return [need_of(self._answer(one, roomy(cluster))) for one in candidates]

    def run_whole(self, candidates, cluster, budget_bytes=None):
        self.tried += [one.plan.checkpointing for one in candidates]
        return [self._answer(one, cluster) for one in candidates]

    def _answer(self, candidate, cluster):
        way = candidate.plan.checkpointing
        held = None if way.startswith("budget") else LEAST if way == "full" else MOST
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


def search_with(runner, **options):
    defaults = {"gpu": "h100-80gb", "method": "lora", "seq_len": 16384, "allow": ("budget",)}
    search = Search(question(**{**defaults, **options}), runner, lambda text: None)
    search.run(4)
    return search


@pytest.mark.parametrize("slope", [0.9, 1.0, 1.1])
def test_budget_fills_the_card(slope):
    search = search_with(BudgetRunner(slope))
    before = search.found[0].priced
    assert before.candidate.plan.checkpointing == "full"
    add_budgets(search, 4)
    best, estimate = search.found[0]
    assert best.candidate.plan.checkpointing.startswith("budget=")
    assert best.seconds_per_token < 0.95 * before.seconds_per_token
    capacity = search.question.budget_bytes
    assert 0.9 * capacity < estimate.peak.process_bytes <= capacity
    assert sum(way.startswith("budget") for way in search.runner.tried) <= MOST_PLANS * MOST_RUNS
    times = [one.seconds_per_token for one, _ in search.found]
    assert times == sorted(times)


@pytest.mark.parametrize(("reserve", "runs"), [(0, 1), (GIB // 2, 1), (GIB, 2), (3 * GIB, 2), (14 * GIB, 3)])
def test_budget_leaves_room_for_the_allocators_reserve(reserve, runs):
    """The first budget leaves 1 % of 79 GiB free, which mostly is enough; else that run says how much more to leave.

    A run that runs out of memory only says that the peak was above the card; the run after it says more.
    """
    search = search_with(BudgetRunner(reserve=reserve), only=("checkpointing",))
    add_budgets(search, 4)
    best, estimate = search.found[0]
    assert best.candidate.plan.checkpointing.startswith("budget=")
    capacity = search.question.budget_bytes
    assert (1 - NEAR) * capacity <= estimate.peak.process_bytes <= capacity
    assert sum(way.startswith("budget") for way in search.runner.tried) == runs


def test_full_card_gets_no_budget():
    capacity = question(gpu="h100-80gb").cluster.device.capacity_bytes
    search = search_with(BudgetRunner(), headroom=1 - 1.01 * (ELSE + LEAST) / capacity)
    before = list(search.found)
    assert before[0].priced.candidate.plan.checkpointing == "full"
    add_budgets(search, 4)
    assert search.found == before
    assert not any(way.startswith("budget") for way in search.runner.tried)


def test_no_budget_if_all_fits_or_budgets_are_not_allowed():
    for options in (
        {"seq_len": 1024, "gpu": "b200"},
        {"allow": ()},
        {"without": ("checkpointing=budget",)},
        {"checkpointing": "full"},
    ):
        search = search_with(BudgetRunner(), **options)
        found = list(search.found)
        add_budgets(search, 4)
        assert search.found == found, options


def test_seconds_are_between_those_of_both_ends():
    search = search_with(BudgetRunner())
    full = search.found[0].priced
    none = price_candidate(
        replace(full.candidate, plan=replace(full.candidate.plan, checkpointing="none")), search.question.cluster
    )
    add_budgets(search, 4)
    assert none.seconds_per_token < search.found[0].priced.seconds_per_token < full.seconds_per_token


def test_stated_budget_gets_the_seconds_of_its_run():
    search = search_with(BudgetRunner(), checkpointing="budget=20GiB", allow=())
    before = search.found[0].priced
    add_budgets(search, 4)
    [(one, estimate)] = search.found
    assert one.candidate == before.candidate
    assert one.seconds_per_token < before.seconds_per_token
    assert "run_again" in estimate.model
