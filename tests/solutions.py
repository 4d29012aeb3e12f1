"""Ghosts that answer by a formula, and Solutions made with them, for tests of the search and of what shows it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import estimates
from tonnage.case import Case
from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import parse_cluster
from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.job import Job
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.search.depth import Need, of_run
from tonnage.search.memory import Ask
from tonnage.search.pricing import priced
from tonnage.search.space import Question
from tonnage.trainers.cases import check
from tonnage.units import GIB


def question(model: str = "llama-3.1-8b", gpu: str = "8xa100-80gb", **options: Any) -> Question:
    """A question about a catalog model; options of Job, Plan and Question by their names."""
    of_plan = {name: options.pop(name) for name in list(options) if name in Plan.__dataclass_fields__}
    of_question = {name: options.pop(name) for name in list(options) if name in Question.__dataclass_fields__}
    job = Job(model=resolve(model, offline=True), **{"seq_len": 4096, **options})
    return Question(job=job, plan=Plan(**of_plan), cluster=parse_cluster(gpu), **of_question)


def possible(asked: Question, one: Candidate) -> bool:
    """Whether its techniques take the job."""
    try:
        check(Case(one.job, one.plan, asked.cluster))
    except UsageError:
        return False
    return True


def need_bytes(candidate: Candidate, cluster: Cluster) -> int:
    """A made-up peak: what nobody can avoid, 1 GiB, and from half to twice of what is usual beyond.

    How much of it differs from technique to technique, and a little with the layout; who recomputes more needs less.
    """
    one = priced(candidate, cluster)
    plan = candidate.plan
    part = {"none": 2.0, "selective": 1.3, "full": 1.0}.get(plan.checkpointing, 1.0)
    part *= 0.6 if plan.shard == "hsdp" else 1.0
    axes = sum(degree > 1 for degree in (plan.tp, plan.pp, plan.cp, plan.ep))
    return one.least_bytes + GIB + int(one.beyond_bytes * part * (1 + 0.1 * axes))


class Formula:
    """Stands where Ghosts stand."""

    count = 2

    def __init__(self) -> None:
        self.asked: list[Candidate] = []
        self.looked: list[Candidate] = []
        self.foreseen: list[Candidate] = []

    @property
    def runs(self) -> int:
        return len(self.asked) + len(self.looked)

    def start(self) -> None:
        """There is nothing to start."""

    def fit(
        self, candidates: Sequence[Candidate], cluster: Cluster, budget_bytes: int | None = None
    ) -> list[Estimate | UsageError]:
        self.asked += candidates
        return [self._answer(one, cluster) for one in candidates]

    def made(self, candidate: Candidate, cluster: Cluster) -> Estimate | None:
        return self._answer(candidate, cluster) if candidate in self.asked else None

    def made_ahead(self, candidate: Candidate, cluster: Cluster) -> Estimate | None:
        """Idle workers are fast here."""
        return self._answer(candidate, cluster) if candidate in self.foreseen else None

    def need(self, candidates: Sequence[Candidate], cluster: Cluster) -> list[Need]:
        self.looked += candidates
        return [of_run(self._answer(one, cluster)) for one in candidates]

    def worked(self, candidate: Candidate, cluster: Cluster) -> None:
        """Nothing is launched here."""

    def ahead(self, asks: Sequence[Ask], cluster: Cluster) -> None:
        self.foreseen += [one for one, _ in asks]

    @staticmethod
    def _answer(candidate: Candidate, cluster: Cluster) -> Estimate:
        need = need_bytes(candidate, cluster)
        made = estimates.fitting()
        held = dict.fromkeys(made.peak.by_category, 0) | {"activation": need}
        peak = replace(made.peak, process_bytes=need, by_category=held)
        return replace(made, fits=need <= cluster.device.capacity_bytes, peak=peak)
