"""What the portable source can imitate, and what it refuses; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonnage.device import Cluster
    from tonnage.job import Job
    from tonnage.plan import Plan
    from tonnage.techniques.technique import Refusal


def refusals(job: Job, plan: Plan, cluster: Cluster) -> Iterator[Refusal]:
    return iter(())
