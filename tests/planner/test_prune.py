"""Free techniques that cost the best plan memory are removed."""

from dataclasses import replace

import pytest

from solutions import FormulaRunner, question
from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.planner.solution import Candidate
from tonnage.planner.solve import search, solve

MORE = 2**20


class Holes(FormulaRunner):
    """Plans with one value of an option need 1 MiB more."""

    def __init__(self, name: str, value: str) -> None:
        super().__init__()
        self.name, self.value = name, value

    def _answer(self, candidate: Candidate, cluster: Cluster) -> Estimate:  # type: ignore[override]
        found = FormulaRunner._answer(candidate, cluster)
        if getattr(candidate.plan, self.name) != self.value:
            return found
        return replace(found, peak=replace(found.peak, process_bytes=found.peak.process_bytes + MORE))


def test_expandable_segments_that_cost_memory_are_removed() -> None:
    asked = question(gpu="8xh100-80gb")
    plain = search(asked, FormulaRunner(), top=2).plans[0]
    best, second = search(asked, Holes("allocator", "expandable"), top=2).plans
    assert best.candidate.plan == plain.candidate.plan
    assert best.candidate.plan.allocator == "default"
    assert best.estimate.peak.process_bytes == plain.estimate.peak.process_bytes
    assert best.estimate.time == plain.estimate.time
    assert "allocator=expandable" not in [reason.technique for reason in best.reasons]
    assert second.candidate.plan.allocator == "default"


def test_stated_options_are_kept() -> None:
    asked = question(gpu="8xh100-80gb", allocator="expandable")
    best = search(asked, Holes("allocator", "expandable"), top=1).plans[0]
    assert best.candidate.plan.allocator == "expandable"
    without = question(gpu="8xh100-80gb", without=("allocator=default",))
    assert search(without, Holes("allocator", "expandable"), top=1).plans[0].candidate.plan.allocator == "expandable"


def test_techniques_that_save_time_are_kept() -> None:
    best = search(question(gpu="8xh100-80gb"), Holes("optimizer", "adamw-fused"), top=1).plans[0]
    assert best.candidate.plan.optimizer == "adamw-fused"


def test_cpu_raises() -> None:
    with pytest.raises(UsageError, match="cpu is none"):
        solve(question(gpu="cpu"))
