"""torch.compile is suggested where nobody asked for it."""

from dataclasses import replace
from functools import cache

import pytest

from solutions import FormulaRunner, question
from tonnage.case import Case
from tonnage.estimates.step_time import price
from tonnage.planner.solve import search
from tonnage.report import plans, plans_html


@cache
def solved(**options):
    return search(question(**options), FormulaRunner(), top=1)


def test_compiled_layers_are_suggested_with_their_price():
    asked = {"gpu": "8xa100-80gb"}
    solution = solved(**asked)
    (offer,) = solution.offers
    best = solution.plans[0]
    assert offer.what == "--compile layers"
    assert offer.low_seconds < offer.step_seconds < offer.high_seconds
    assert offer.step_seconds < 0.97 * best.estimate.time["step_seconds"]
    with_it = replace(best.candidate.plan, compile="layers")
    assert offer.step_seconds == price(Case(best.candidate.job, with_it, question(**asked).cluster)).step_seconds
    assert solution.to_json()["offers"][0]["what"] == "--compile layers"
    for shown in (" ".join(plans.render(solution).split()), plans_html.page(solution)):
        assert "Faster if you say so" in shown
        assert "needs a compiler where you train" in shown


@pytest.mark.parametrize(
    "options",
    [
        {"compile": "layers"},
        {"compile": "none", "stated": ("compile",)},
        {"tp": 2},
        {"checkpointing": "selective"},
        {"engine": "torchtitan"},
        {"only": ("checkpointing", "shard")},
    ],
)
def test_no_suggestion_of_what_is_stated_or_impossible(options):
    solution = solved(gpu="8xa100-80gb", **options)
    assert solution.plans or solution.status == "unsupported"
    assert not solution.offers
    assert "Faster if you say so" not in plans.render(solution)


def test_suggestion_for_a_trainer_is_one_it_supports():
    solution = solved(gpu="a100-80gb", model="llama-3.2-1b", engine="hf-trainer")
    assert all(offer.what == "--compile model" for offer in solution.offers)
