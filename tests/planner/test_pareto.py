"""The Pareto frontier of memory and speed, with trial runs that follow a formula."""

from dataclasses import replace

import pytest

from solutions import FormulaRunner, possible, question
from tonnage.planner.candidates import list_candidates
from tonnage.planner.pareto import MOST_POINTS
from tonnage.planner.pricing import price_all
from tonnage.planner.solve import search
from tonnage.report import plans
from tonnage.units import format_gib


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "gpt2", "gpu": "t4", "seq_len": 1024, "micro_batch": 7},  # its scaled loss refuses some plans
        {"model": "llama-3.2-1b", "gpu": "8xl4", "micro_batch": 4},
    ],
)
def test_no_plan_dominates_a_point_of_the_frontier(asked):
    asked = question(**asked)
    found = search(asked, FormulaRunner(), top=3, pareto=True)
    points = [(point.step_seconds, point.process_bytes) for point in found.frontier]
    assert points == sorted(points)
    assert [need for _, need in points] == sorted((need for _, need in points), reverse=True)
    shown = [(one.estimate.time["step_seconds"], one.estimate.peak.process_bytes) for one in found.plans]
    assert all(any(step <= seconds and need <= size for step, need in points) for seconds, size in shown)
    assert len(points) <= MOST_POINTS + len(shown)


def test_frontier_ends_with_the_smallest_possible_candidate():
    """Or with one that needs hardly more: what a candidate is likely to need orders them nearly as their peaks do."""
    asked = question(model="gpt2", gpu="t4", seq_len=1024, micro_batch=7)
    runner = FormulaRunner()
    order = price_all(list_candidates(asked), asked.cluster)
    able = [one.candidate for one in order if possible(asked, one.candidate)]
    least = min(need.process_bytes for need in runner.probe(able, asked.cluster))
    assert least <= search(asked, runner, pareto=True).frontier[-1].process_bytes <= 1.02 * least


def test_points_say_whether_they_fit_and_were_run():
    asked = question(gpu="rtx-4090", model="llama-3.2-3b")
    found = search(asked, FormulaRunner(), top=2, pareto=True)
    assert {point.fits for point in found.frontier} == {True, False}
    for point in found.frontier:
        assert point.fits == (point.process_bytes <= asked.budget_bytes)
    text = " ".join(plans.render(found).split())
    assert text.count("more than the card has") == len([point for point in found.frontier if not point.fits])
    probed = next(point for point in found.frontier if not point.fits)
    assert plans.describe_need(probed) == format_gib(probed.process_bytes)
    assert plans.describe_need(replace(probed, whole=False)) == f"~{format_gib(probed.process_bytes)}"
