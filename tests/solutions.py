"""A TrialRunner that answers by a formula, and questions, for tests of the search and of what shows its results."""

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
from tonnage.estimates.predict import check
from tonnage.job import Job
from tonnage.planner.pricing import price_candidate
from tonnage.planner.probe import Need, need_of
from tonnage.planner.question import Question
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.units import GIB


def question(model: str = "llama-3.1-8b", gpu: str = "8xa100-80gb", **options: Any) -> Question:
    """Return a question about a catalog model; options of Job, Plan and Question by their names."""
    of_plan = {name: options.pop(name) for name in list(options) if name in Plan.__dataclass_fields__}
    of_question = {name: options.pop(name) for name in list(options) if name in Question.__dataclass_fields__}
    cluster = parse_cluster(gpu, host_memory_bytes=options.pop("host_memory_bytes", None))
    job = Job(model=resolve(model, offline=True), **{"seq_len": 4096, **options})
    return Question(job=job, plan=Plan(**of_plan), cluster=cluster, **of_question)


def without_host_limit(asked: Question) -> Question:
    """Return the question for machines whose host memory is not known, so that every offload is considered."""
    return replace(asked, cluster=replace(asked.cluster, device=replace(asked.cluster.device, host_bytes=None)))


def possible(asked: Question, candidate: Candidate) -> bool:
    """Return whether a candidate's techniques accept the job."""
    try:
        check(Case(candidate.job, candidate.plan, asked.cluster))
    except UsageError:
        return False
    return True


def need_bytes(candidate: Candidate, cluster: Cluster) -> int:
    """Return an invented peak: the bound, 1 GiB, and from half to twice the usual extra.

    The factor differs between techniques, and a little between layouts; plans that recompute more need less.
    """
    priced = price_candidate(candidate, cluster)
    plan = candidate.plan
    part = {"none": 2.0, "every-4": 1.2, "every-2": 1.1, "selective": 1.3, "full": 1.0}.get(plan.checkpointing, 1.0)
    part *= 0.6 if plan.shard == "hsdp" else 1.0
    axes = sum(degree > 1 for degree in (plan.tp, plan.pp, plan.cp, plan.ep))
    return priced.bound_bytes + GIB + int(priced.extra_bytes * part * (1 + 0.1 * axes))


class FormulaRunner:
    """Stands in for a TrialRunner."""

    worker_count = 2
    is_late = False

    def __init__(self) -> None:
        self.whole_runs: list[Candidate] = []
        self.probes: list[Candidate] = []

    @property
    def run_count(self) -> int:
        return len(self.whole_runs) + len(self.probes)

    def warm_up(self) -> None:
        """Do nothing."""

    def run_whole(
        self, candidates: Sequence[Candidate], cluster: Cluster, budget_bytes: int | None = None
    ) -> list[Estimate | UsageError]:
        self.whole_runs += candidates
        return [self._answer(candidate, cluster) for candidate in candidates]

    def find_estimate(self, candidate: Candidate, cluster: Cluster) -> Estimate | None:
        return self._answer(candidate, cluster) if candidate in self.whole_runs else None

    def find_failure(self, candidate: Candidate, cluster: Cluster) -> None:
        """Return nothing: no whole run fails."""

    def probe(self, candidates: Sequence[Candidate], cluster: Cluster) -> list[Need]:
        self.probes += candidates
        return [need_of(self._answer(candidate, cluster)) for candidate in candidates]

    def run_shown(self, candidates: Sequence[Candidate], cluster: Cluster) -> list[None]:
        """Run nothing: whole runs are shown."""
        return [None] * len(candidates)

    @staticmethod
    def _answer(candidate: Candidate, cluster: Cluster) -> Estimate:
        need = need_bytes(candidate, cluster)
        made = estimates.fitting()
        held = dict.fromkeys(made.peak.by_category, 0) | {"activation": need}
        peak = replace(made.peak, process_bytes=need, by_category=held)
        return replace(made, fits=need <= cluster.device.capacity_bytes, peak=peak)
