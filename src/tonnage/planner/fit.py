"""Decide if a run fits the card less its headroom and the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tonnage.estimates.estimate import Estimate
from tonnage.planner.pricing import Priced
from tonnage.planner.question import Question
from tonnage.units import GIB, format_gib

LEAST_FREE: Final = GIB
"""Bytes of the card below which a plan that is hardly faster, or hardly simpler, loses to one with more room."""


class Fitting(NamedTuple):
    """A candidate that fits, with the estimate of its whole run."""

    priced: Priced
    estimate: Estimate


def sort_by_time(plans: Sequence[Fitting]) -> list[Fitting]:
    """Return the plans, fastest first."""
    return sorted(plans, key=lambda fitting: fitting.priced.seconds_per_token)


def fits(estimate: Estimate, question: Question) -> bool:
    """Return whether a run is within the card and its headroom, and within the host's memory."""
    return fits_card(estimate, question) and fits_host(host_bytes(estimate), question)


def fits_card(estimate: Estimate, question: Question) -> bool:
    """Return whether a run is within the card and its headroom."""
    return estimate.fits_card and estimate.peak.process_bytes <= question.budget_bytes


def host_bytes(estimate: Estimate) -> int:
    """Return the host memory that the processes of a machine need at their peak; 0 if it is not known."""
    return estimate.host.machine_bytes or 0


def fits_host(needed_bytes: int, question: Question) -> bool:
    """Return whether a machine's host has this much memory, or may have because its memory is not known."""
    limit = question.cluster.host_limit_bytes
    return limit is None or needed_bytes <= limit


def explain_host_limit(needed_bytes: int, question: Question, *, at_least: bool = False) -> str:
    """Return why the host's memory is not enough; `at_least`: the need is a lower bound."""
    cluster = question.cluster
    limit = format_gib(cluster.host_limit_bytes or 0)
    is_stated = cluster.host_memory_bytes is not None
    host = (
        f"which has {limit}"
        if is_stated
        else f"machines with {cluster.gpus_per_node} x {cluster.device.id} usually have {limit} (--host-memory says "
        "what yours has)"
    )
    needed = f"at least {format_gib(needed_bytes)}" if at_least else format_gib(needed_bytes)
    return f"needs {needed} of host memory on each machine, {host}"
