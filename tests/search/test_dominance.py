"""Who needs no less than whom, and whom to look at first where nothing else is known."""

from dataclasses import replace

import pytest

from solutions import Formula, possible, question
from tonnage.search.search import Search
from tonnage.search.dominance import after, choose_most_informative, needs_at_least
from tonnage.search.pricing import Bounded, bounded, priced
from tonnage.search.space import candidates
from tonnage.units import GIB


def lattice(gpu="2xl4"):
    """What two cards can do for one sequence each, without parallel dimensions."""
    asked = question(model="llama-3.2-1b", gpu=gpu, without=("tp", "pp", "cp"))
    return [one for one in candidates(asked) if possible(asked, one)]


def named(found, **options):
    (one,) = (one for one in found if all(getattr(one.plan, name) == value for name, value in options.items()))
    return one


def test_who_needs_no_less():
    found = lattice()
    least = named(found, shard="zero3", checkpointing="full", optimizer_in_backward=True)
    most = named(found, shard="ddp", checkpointing="none", optimizer_in_backward=False)
    assert all(needs_at_least(one, least) for one in found)
    assert [one for one in found if needs_at_least(one, most)] == [most]
    one, other = (
        named(found, shard=shard, checkpointing=way, optimizer_in_backward=False)
        for shard, way in (("ddp", "full"), ("zero3", "none"))
    )
    assert not needs_at_least(one, other)
    assert not needs_at_least(other, one)


def test_of_offloaded_activations_no_way_of_checkpointing_needs_least():
    """A layer that runs again has all that it keeps on the card at once; one whose results wait on the host never."""
    on_card = named(lattice(), shard="ddp", checkpointing="full", optimizer_in_backward=False)
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
    assert needs_at_least(plain, on_host["full"])  # no less than with all layers checkpointed on the card


def test_what_one_look_leaves_open():
    ddp, zero1, zero2, zero3 = (
        named(lattice(), shard=shard, checkpointing="full", optimizer_in_backward=False)
        for shard in ("ddp", "zero1", "zero2", "zero3")
    )
    order = [zero1, ddp, zero2, zero3]
    assert after(order, zero2, fits=False) == [zero3]
    assert after(order, zero2, fits=True) == [zero1, ddp]
    assert after(order, ddp, fits=True) == []  # zero1 needs no more
    assert choose_most_informative(order) is zero1  # the others have 1 or none in one case, and 3 in the other


OF_LAYERS = {"none": 90, "selective": 40, "full": 20}
OF_SHARDS = {"ddp": 1.0, "zero1": 0.95, "zero2": 0.9, "zero3": 0.8}


class Unknown(Formula):
    """So many GiB for each way of checkpointing, and less the more is divided."""

    def need_bytes(self, candidate):
        return int(OF_LAYERS[candidate.plan.checkpointing] * OF_SHARDS[candidate.plan.shard] * GIB)

    def _answer(self, candidate, cluster):
        need = self.need_bytes(candidate)
        made = super()._answer(candidate, cluster)
        held = dict.fromkeys(made.peak.by_category, 0) | {"activation": need}
        peak = replace(made.peak, process_bytes=need, by_category=held)
        return replace(made, fits=need <= cluster.device.capacity_bytes, peak=peak)


@pytest.mark.parametrize("gpu", ["2xl4", "2xa100-40gb", "2xa100-80gb"])
def test_few_looks_find_the_first_that_fits_where_nothing_is_known(gpu, monkeypatch):
    """Of 16 candidates; it is the same that looking at one after the other finds."""

    def nothing_known(candidate, cluster):
        found = bounded(candidate, cluster)
        return Bounded(candidate=candidate, work=found.work, shape=None, least_bytes=0, rough=True)

    monkeypatch.setattr("tonnage.search.search.bounded", nothing_known)
    asked = question(model="llama-3.2-1b", gpu=gpu, without=("tp", "pp", "cp"))
    ghosts = Unknown()
    found = Search(asked, ghosts, lambda text: None)
    found.run(1)
    fitting = [one for one in lattice(gpu) if ghosts.need_bytes(one) <= asked.budget_bytes]
    assert found.found[0][0].seconds_per_token == min(priced(one, asked.cluster).seconds_per_token for one in fitting)
    assert len({repr(one) for one in ghosts.looked}) <= 6
