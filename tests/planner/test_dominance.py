"""Which candidates need at least as much as others, and which to probe first if nothing else is known."""

from dataclasses import replace

import pytest

from solutions import FormulaRunner, possible, question
from tonnage.planner.candidates import list_candidates
from tonnage.planner.dominance import choose_most_informative, keep_open, needs_at_least
from tonnage.planner.pricing import Bounded, bound_candidate, price_candidate
from tonnage.planner.search import Search
from tonnage.units import GIB

WAYS = ("none", "every-4", "every-2", "selective", "full")


def list_plain(gpu="2xl4"):
    """Return the candidates of two cards with one sequence each, without parallel dimensions."""
    asked = question(model="llama-3.2-1b", gpu=gpu, without=("tp", "pp", "cp", "loss"))
    return [one for one in list_candidates(asked) if possible(asked, one)]


def find_one(found, **options):
    (one,) = (one for one in found if all(getattr(one.plan, name) == value for name, value in options.items()))
    return one


def test_needs_at_least():
    found = list_plain()
    least = find_one(found, shard="zero3", checkpointing="full", optimizer_in_backward=True)
    most = find_one(found, shard="ddp", checkpointing="none", optimizer_in_backward=False)
    assert all(needs_at_least(one, least) for one in found)
    assert [one for one in found if needs_at_least(one, most)] == [most]
    one, other = (
        find_one(found, shard=shard, checkpointing=way, optimizer_in_backward=False)
        for shard, way in (("ddp", "full"), ("zero3", "none"))
    )
    assert not needs_at_least(one, other)
    assert not needs_at_least(other, one)


def test_some_layers_whole_and_a_part_of_all_are_not_comparable():
    ways = {way: find_one(list_plain(), shard="ddp", checkpointing=way, optimizer_in_backward=False) for way in WAYS}
    for interval in ("every-4", "every-2"):
        assert not needs_at_least(ways[interval], ways["selective"])
        assert not needs_at_least(ways["selective"], ways[interval])
        assert needs_at_least(ways[interval], ways["full"])
        assert needs_at_least(ways["none"], ways[interval])
    assert needs_at_least(ways["every-4"], ways["every-2"])


def test_checkpointing_is_not_comparable_with_offloaded_activations():
    """A recomputed layer has all its activations on the card at once; an offloaded one never has."""
    on_card = find_one(list_plain(), shard="ddp", checkpointing="full", optimizer_in_backward=False)
    on_host = {
        way: replace(on_card, plan=replace(on_card.plan, checkpointing=way, activation_offload="cpu"))
        for way in ("none", "selective", "full")
    }
    assert not any(
        needs_at_least(one, other) for one in on_host.values() for other in on_host.values() if one is not other
    )
    assert needs_at_least(on_card, on_host["full"])
    streamed = replace(on_card, plan=replace(on_card.plan, activation_offload="cpu-streamed"))
    assert needs_at_least(on_card, streamed)
    assert not needs_at_least(streamed, on_host["full"])
    assert not needs_at_least(on_host["full"], streamed)
    in_files = replace(on_card, plan=replace(on_card.plan, activation_offload="nvme"))
    assert not needs_at_least(in_files, streamed)
    assert not needs_at_least(streamed, in_files)
    plain = replace(on_card, plan=replace(on_card.plan, checkpointing="none"))
    assert needs_at_least(plain, on_host["full"])  # at least as much as with full checkpointing on the card


def test_one_probe_decides_others():
    ddp, zero1, zero2, zero3 = (
        find_one(list_plain(), shard=shard, checkpointing="full", optimizer_in_backward=False)
        for shard in ("ddp", "zero1", "zero2", "zero3")
    )
    order = [zero1, ddp, zero2, zero3]
    assert keep_open(order, zero2, fits=False) == [zero3]
    assert keep_open(order, zero2, fits=True) == [zero1, ddp]
    assert keep_open(order, ddp, fits=True) == []  # zero1 needs at most as much
    assert choose_most_informative(order) is zero1  # it and zero2 leave 2 at most, the others up to 3


LAYER_GIB = {"none": 90, "every-4": 72, "every-2": 55, "selective": 40, "full": 20}
SHARD_FACTORS = {"ddp": 1.0, "zero1": 0.95, "zero2": 0.9, "zero3": 0.8}


class UnknownNetwork(FormulaRunner):
    """The need depends on checkpointing, and is smaller the more is sharded."""

    def need_bytes(self, candidate):
        return int(LAYER_GIB[candidate.plan.checkpointing] * SHARD_FACTORS[candidate.plan.shard] * GIB)

    def _answer(self, candidate, cluster):
        need = self.need_bytes(candidate)
        made = super()._answer(candidate, cluster)
        held = dict.fromkeys(made.peak.by_category, 0) | {"activation": need}
        peak = replace(made.peak, process_bytes=need, by_category=held)
        return replace(made, fits=need <= cluster.device.capacity_bytes, peak=peak)


@pytest.mark.parametrize("gpu", ["2xl4", "2xa100-40gb", "2xa100-80gb"])
def test_few_probes_find_the_fastest_plan_without_bounds(gpu, monkeypatch):
    """Of 26 candidates; it is the plan that probing one after the other finds."""

    def without_bounds(candidate, cluster):
        found = bound_candidate(candidate, cluster)
        return Bounded(candidate=candidate, work=found.work, shape=None, bound_bytes=0, is_rough=True)

    monkeypatch.setattr("tonnage.planner.candidate_pool.bound_candidate", without_bounds)
    asked = question(model="llama-3.2-1b", gpu=gpu, without=("tp", "pp", "cp", "loss"))
    runner = UnknownNetwork()
    found = Search(asked, runner, lambda text: None)
    found.run(1)
    fitting = [one for one in list_plain(gpu) if runner.need_bytes(one) <= asked.budget_bytes]
    assert found.found[0].priced.seconds_per_token == min(
        price_candidate(one, asked.cluster).seconds_per_token for one in fitting
    )
    assert len({repr(one) for one in runner.probes}) <= 6
