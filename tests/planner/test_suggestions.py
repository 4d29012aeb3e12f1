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
    asked = {"gpu": "8xa100-80gb", "without": ("tp", "pp", "cp")}
    solution = solved(**asked)
    offer = next(offer for offer in solution.offers if offer.what.startswith("--compile"))
    best = solution.plans[0]
    assert offer.what == "--compile layers"
    assert offer.low_seconds < offer.step_seconds < offer.high_seconds
    assert offer.step_seconds < 0.97 * best.estimate.time["step_seconds"]
    with_it = replace(best.candidate.plan, compile="layers")
    assert offer.step_seconds == price(Case(best.candidate.job, with_it, question(**asked).cluster)).step_seconds
    assert "--compile layers" in [offer["what"] for offer in solution.to_json()["offers"]]
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
    ],
)
def test_no_compiler_where_it_is_stated_or_impossible(options):
    solution = solved(gpu="8xa100-80gb", **options)
    assert solution.plans or solution.status == "unsupported"
    assert not any(offer.what.startswith("--compile") for offer in solution.offers)


def test_nothing_is_suggested_beside_what_alone_may_be_chosen():
    solution = solved(gpu="8xa100-80gb", only=("checkpointing", "shard"))
    assert not solution.offers
    assert "Faster if you say so" not in plans.render(solution)


def test_suggestions_are_run_and_fit_the_biggest_gain_first():
    """8B in full on one card needs more than it has without the host; with adapters it is many times as fast."""
    asked = question(gpu="h100-80gb")
    solution = search(asked, FormulaRunner(), top=1)
    seconds = [offer.step_seconds for offer in solution.offers]
    assert seconds == sorted(seconds)
    assert seconds[-1] < 0.97 * solution.plans[0].estimate.time["step_seconds"]
    lora = next(offer for offer in solution.offers if offer.what == "--method lora")
    assert lora.process_bytes <= asked.budget_bytes
    assert lora.changes_mathematics


def test_suggestion_for_a_trainer_is_one_it_supports():
    solution = solved(gpu="a100-80gb", model="llama-3.2-1b", engine="hf-trainer")
    assert {offer.what for offer in solution.offers} <= {
        "--compile model",
        "--method lora",
        "--method qlora",
        "--precision bf16-true",
    }


def test_the_hosts_memory_is_suggested_where_it_saves_more_time_than_it_costs():
    """The states of 1B leave room for short micro-batches alone, each of which casts all weights."""
    asked = question(gpu="l4", model="llama-3.2-1b", seq_len=2048, global_batch_tokens=32768)
    solution = search(asked, FormulaRunner(), top=1)
    assert solution.plans[0].candidate.plan.param_offload == "none"
    offer = next(offer for offer in solution.offers if offer.what == "--param-offload cpu")
    assert not offer.changes_mathematics
    assert offer.process_bytes <= asked.budget_bytes
    stated = question(
        gpu="l4", model="llama-3.2-1b", seq_len=2048, global_batch_tokens=32768, stated=("param_offload",)
    )
    assert not any("param-offload" in offer.what for offer in search(stated, FormulaRunner(), top=1).offers)
