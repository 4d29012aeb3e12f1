"""Plans inside the headroom, and plans that nearly fill the card."""

from dataclasses import replace

import pytest

from solutions import FormulaRunner, question
from tonnage.errors import CannotEstimate
from tonnage.planner import tight
from tonnage.planner.fit import LEAST_FREE
from tonnage.planner.search import Search
from tonnage.planner.solve import search
from tonnage.units import GIB

ASKED = question("llama-3.2-1b", "rtx-4090", without=("micro-batch", "loss"))


class Sized(FormulaRunner):
    """Plans need what `sizes` says for their checkpointing, in GiB; those on the host 10."""

    def __init__(self, **sizes):
        super().__init__()
        self.sizes = sizes

    def _answer(self, candidate, cluster):
        made = super()._answer(candidate, cluster)
        need = int(self.sizes.get(candidate.plan.checkpointing, 40.0) * GIB)
        if candidate.plan.param_offload != "none":
            need = 10 * GIB
        held = dict.fromkeys(made.peak.by_category, 0) | {"activation": need}
        document = {**made.cluster, "capacity_bytes": cluster.device.capacity_bytes}
        peak = replace(made.peak, process_bytes=need, by_category=held)
        return replace(made, fits=need <= cluster.device.capacity_bytes, peak=peak, cluster=document)


def test_plan_inside_the_headroom_is_shown_with_what_the_headroom_costs():
    solution = search(ASKED, Sized(full=23.0), top=2)
    best = solution.plans[0]
    assert best.candidate.plan.param_offload == "cpu"
    assert solution.barely.candidate.plan.checkpointing == "full"
    assert solution.barely.candidate.plan.param_offload == "none"
    costs = best.estimate.time["step_seconds"] - solution.barely.estimate.time["step_seconds"]
    assert f"the headroom costs {costs:.3g} s a step" in solution.barely.note
    assert solution.to_json()["barely"]["note"] == solution.barely.note


def test_plan_inside_the_headroom_is_the_answer_if_nothing_else_fits():
    asked = replace(ASKED, without=(*ASKED.without, "param-offload", "optimizer-offload", "activation-offload"))
    solution = search(asked, Sized(full=23.0), top=2)
    assert solution.status == "found"
    assert "fits barely" in solution.plans[0].note
    assert search(asked, Sized(full=23.6), top=2).status == "too_large"


def test_plan_with_room_comes_before_one_that_is_hardly_faster(monkeypatch):
    monkeypatch.setattr(tight, "FASTER", 10.0)
    asked = replace(ASKED, headroom=0.01)
    found = Search(asked, Sized(selective=23.0, full=20.0), lambda text: None)
    found.run(1)
    assert found.found[0].priced.candidate.plan.checkpointing == "selective"
    assert tight.prefer_room(found)
    capacity = asked.cluster.device.capacity_bytes
    assert capacity - found.found[0].estimate.peak.process_bytes >= LEAST_FREE
    assert found.found[1].priced.candidate.plan.checkpointing == "selective"


@pytest.mark.parametrize("lacks_memory", [True, False])
def test_failures_of_a_trainer_are_not_avoided_by_offload(lacks_memory):
    """Another place for weights gives memory, which none of the failed candidates lacked."""

    class Failing(Sized):
        def probe(self, candidates, cluster):
            return self._fail(candidates, super().probe(candidates, cluster))

        def run_whole(self, candidates, cluster, budget_bytes=None):
            return self._fail(candidates, super().run_whole(candidates, cluster, budget_bytes))

        def _fail(self, candidates, answers):
            fails = [one.plan.param_offload == "none" and not lacks_memory for one in candidates]
            return [CannotEstimate("no") if fail else one for fail, one in zip(fails, answers, strict=True)]

    asked = question("llama-3.2-1b", "h100-80gb", without=("micro-batch", "loss"))
    kinds = ("none", "every-4", "every-2", "selective", "full")
    runner = Failing(**dict.fromkeys(kinds, 90.0 if lacks_memory else 40.0))
    solution = search(asked, runner, top=1, explain=False)
    assert bool(solution.plans) == lacks_memory
