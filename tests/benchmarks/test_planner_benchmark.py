"""Tests for `benchmarks/planner.py`: what its grid has, and which runs decide it."""

from typing import Any

import pytest
from benchmarks.planner import Result, _find_best, _list_grid, _list_offloads, _list_values, table

from tonnage.catalog.devices import parse_cluster
from tonnage.planner.ask import ask
from tonnage.planner.candidates import list_candidates, with_free_choices
from tonnage.planner.pricing import price_all
from tonnage.planner.probe import Need
from tonnage.planner.question import Question


@pytest.fixture(scope="module")
def question() -> Question:
    options = {"seq_len": 1024, "global_batch_tokens": 2048, "engine": "hf-trainer"}
    return ask("smollm2-135m", parse_cluster("t4"), options, offline=True)


def test_the_grid_has_what_the_search_has(question: Question):
    first = with_free_choices(question)
    grid = list(_list_grid(question, first))
    searched = list(list_candidates(question))
    assert searched
    assert [one for one in searched if one not in grid] == []
    assert len(grid) > len(searched)


def test_offloads_are_added_to_a_candidate(question: Question):
    candidate = next(iter(list_candidates(question)))
    offloads = list(_list_offloads(question, candidate))
    assert offloads
    assert candidate not in offloads


@pytest.mark.parametrize(("name", "left_out"), [("attention", "eager"), ("checkpointing", "every-N")])
def test_values_are_those_of_the_engine(question: Question, name: str, left_out: str):
    values = list(_list_values(question, name))
    assert left_out not in values
    assert len(values) > 1


class Runner:
    """Nothing fits."""

    def __init__(self) -> None:
        self.probed: list[Any] = []

    def probe(self, candidates, cluster):
        self.probed += candidates
        return [Need(process_bytes=2**50, by_category={}, uncached_bytes=2**50, whole=True)]


def test_what_needs_at_least_as_much_as_a_failure_is_not_run(question: Question):
    order = price_all(list_candidates(question), question.cluster)
    runner: Any = Runner()
    best, runs, whole = _find_best(question, iter(order), runner, len(order))
    assert best is None
    assert whole
    assert 0 < runs == len(runner.probed) < len(order)


def test_runs_end_with_a_bound(question: Question):
    order = price_all(list_candidates(question), question.cluster)
    runner: Any = Runner()
    best, runs, whole = _find_best(question, iter(order), runner, 1)
    assert best in order
    assert (runs, whole) == (1, False)


def test_the_table_names_the_worst_job():
    values = {"status": "found", "seconds": 1.0, "offload_seconds": 0.5}
    results = [
        Result("trl", 0, plan="first", best="better", best_seconds=0.8, **values),
        Result("trl", 1, plan="same", best="same", best_seconds=1.0, **values),
        Result("trl", 2, "refused: no reason"),
    ]
    *_, row = table(results)
    assert row == "| trl | 2 | 0.900 | 0.800 | smollm2-135m, t4, full: first; better | 0.500 | 0.500 |"
