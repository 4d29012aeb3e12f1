"""The page of tuning, with trials that are made up."""

from dataclasses import replace

from networks import tiny_job
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.report.tuning import render
from tonnage.tuning.decisions import Trial, Tuned
from tonnage.tuning.outcome import Outcome
from tonnage.units import GIB

CANDIDATE = Candidate(job=replace(tiny_job("llama"), micro_batch=2, grad_accum=4), plan=Plan())
HELD = Outcome(
    ended="finished",
    moment="save",
    step_seconds=0.5,
    spread=0.03,
    tokens_per_second=1000.0,
    reserved_bytes=30 * GIB,
    capacity_bytes=40 * GIB,
)
FULL = Outcome(ended="out_of_memory", moment="step 1", message="OutOfMemoryError: more")


def test_each_trial_has_its_verdict_and_the_best_is_marked() -> None:
    slow = replace(HELD, tokens_per_second=500.0)
    trials = (
        Trial(candidate=CANDIDATE, why="predicted 1", outcome=slow, predicted_seconds=0.45),
        Trial(candidate=CANDIDATE, why="memory is left", outcome=HELD, unpredicted="no ghost"),
        Trial(candidate=CANDIDATE, why="memory is left", outcome=FULL),
    )
    page = render(Tuned(trials=trials), unicode=False)
    assert page.startswith("FASTEST  1,000 tokens/s, 0.5 s a step, 30.00 GiB reserved\n")
    assert "\n  1  predicted 1: " in page
    assert "############............ 500 tokens/s, 0.5 s a step (+-3 %), predicted 0.45 s" in page
    assert "30.00 GiB reserved, 75 % of the card" in page
    assert "\n* 2  memory is left: " in page
    assert "no prediction: no ghost" in page
    assert "out of memory at step 1: OutOfMemoryError: more" in page


def test_nothing_held() -> None:
    page = render(Tuned(trials=(Trial(candidate=CANDIDATE, why="predicted 1", outcome=FULL),)))
    assert page.startswith("NOTHING HELD  no trial finished.")
