"""Networks and cards whose seconds are not known: ranked by what is known for certain, and said so."""

from dataclasses import replace

from solutions import Formula, question
from tonnage.catalog.devices import parse_cluster
from tonnage.report import plans, plans_html
from tonnage.search.pricing import fastest_first
from tonnage.search.solve import search
from tonnage.search.space import candidates
from tonnage.search.unpriced import burden


def unknown(**options):
    """A question about cards of which only the memory is known."""
    asked = question(gpu="a100-80gb", model="llama-3.2-1b", **options)
    return replace(asked, cluster=parse_cluster(None, gpu_memory_bytes=48 * 2**30, gpus=2))


def ranked(**options):
    asked = unknown(**options)
    return [one.candidate for one in fastest_first(candidates(asked), asked.cluster)]


def test_what_costs_nothing_comes_first_and_recomputation_after_exchanges_beside_it():
    order = ranked(micro_batch=4)
    places = {
        (one.plan.shard, one.plan.checkpointing, one.plan.tp, one.job.micro_batch): number
        for number, one in reversed(list(enumerate(order)))
    }
    assert order[0].plan.shard == "ddp"
    assert (order[0].plan.checkpointing, order[0].job.grad_accum) == ("none", 1)
    assert places["zero3", "none", 1, 4] < places["ddp", "selective", 1, 4] < places["ddp", "full", 1, 4]
    assert places["zero3", "full", 1, 1] < places["none", "none", 2, 8]
    assert places["ddp", "none", 1, 4] < places["ddp", "none", 1, 2]


def test_places_are_near_each_other():
    asked = unknown()
    places = [one.seconds_per_token for one in fastest_first(candidates(asked), asked.cluster)]
    assert places == sorted(places)
    assert 1 <= places[0] <= places[-1] < 2


def test_the_host_is_dearest():
    asked = unknown()
    assert max(map(burden, candidates(asked))) < min(map(burden, candidates(asked, offload=True)))


def test_a_card_without_known_speeds_is_planned_for():
    solution = search(unknown(), Formula(), top=2)
    assert solution.status == "found"
    assert "is not known" in solution.unpriced
    text = plans.render(solution)
    assert "ranked without seconds" in " ".join(text.split())
    assert "tokens/s a GPU, MFU" not in text
    assert {reason.costs_seconds for reason in solution.plans[0].reasons} == {None}
    assert "ranked without seconds" in plans_html.page(solution)
    assert solution.to_json()["plans"][0]["estimate"]["time"]["step_seconds"] is None


def test_nothing_changes_where_seconds_are_known():
    asked = question(gpu="a100-80gb", model="llama-3.2-1b")
    assert search(asked, Formula(), top=1).unpriced is None
