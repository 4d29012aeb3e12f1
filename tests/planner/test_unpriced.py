"""Candidates without seconds are ranked by their usual costs, and reported so."""

from dataclasses import replace

from solutions import FormulaRunner, question
from tonnage.catalog.devices import parse_cluster
from tonnage.planner.candidates import list_candidates
from tonnage.planner.pricing import price_all
from tonnage.planner.solve import search
from tonnage.planner.unpriced import rank_cost
from tonnage.report import plans, plans_html


def unpriced_question(**options):
    """Return a question about cards of which only the memory is known."""
    asked = question(gpu="a100-80gb", model="llama-3.2-1b", **options)
    return replace(asked, cluster=parse_cluster(None, gpu_memory_bytes=48 * 2**30, gpus=2))


def rank_candidates(**options):
    asked = unpriced_question(**options)
    return [one.candidate for one in price_all(list_candidates(asked), asked.cluster)]


def test_recomputation_ranks_after_overlapped_exchanges():
    order = rank_candidates(micro_batch=4)
    places = {
        (one.plan.shard, one.plan.checkpointing, one.plan.tp, one.job.micro_batch): number
        for number, one in reversed(list(enumerate(order)))
    }
    assert order[0].plan.shard == "ddp"
    assert (order[0].plan.checkpointing, order[0].job.grad_accum) == ("none", 1)
    assert places["zero3", "none", 1, 4] < places["ddp", "selective", 1, 4] < places["ddp", "full", 1, 4]
    assert places["zero3", "full", 1, 1] < places["none", "none", 2, 8]
    assert places["ddp", "none", 1, 4] < places["ddp", "none", 1, 2]


def test_ranks_are_below_twice_the_first():
    asked = unpriced_question()
    places = [one.seconds_per_token for one in price_all(list_candidates(asked), asked.cluster)]
    assert places == sorted(places)
    assert 1 <= places[0] <= places[-1] < 2


def test_offload_costs_most():
    asked = unpriced_question()
    assert max(map(rank_cost, list_candidates(asked))) < min(map(rank_cost, list_candidates(asked, offload=True)))


def test_card_with_unknown_speed_gets_a_plan():
    solution = search(unpriced_question(), FormulaRunner(), top=2)
    assert solution.status == "found"
    assert "is not known" in solution.unpriced
    text = plans.render(solution)
    assert "ranked without seconds" in " ".join(text.split())
    assert "tokens/s a GPU, MFU" not in text
    assert {reason.costs_seconds for reason in solution.plans[0].reasons} == {None}
    assert "ranked without seconds" in plans_html.page(solution)
    assert solution.to_json()["plans"][0]["estimate"]["time"]["step_seconds"] is None


def test_priced_solution_has_no_explanation():
    asked = question(gpu="a100-80gb", model="llama-3.2-1b")
    assert search(asked, FormulaRunner(), top=1).unpriced is None
