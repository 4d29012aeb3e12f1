"""The trace of a deep network from three of shallow ones, its blocks handed out by a real allocator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tonnage.errors import CannotEstimate
from tonnage.shallow.periods import Pattern
from tonnage.shallow.requests import Requests
from tonnage.shallow.sizes import Sizes
from tonnage.shallow.tokens import tokens
from tonnage.trace.trace import Trace


def requests_of(runs: Sequence[Trace], depths: Sequence[int], layers: int) -> Requests:
    """What so many layers ask for, from one step each of networks of three depths.

    Raises CannotEstimate where what is common to the three does not say what more layers do.
    """
    sizes, steps = Sizes.of(runs), _steps(depths, layers)
    try:
        return Requests.of(_pattern(runs, sizes), steps, sizes)
    except (CannotEstimate, IndexError):
        pass  # there may be blocks of two kinds that look alike
    try:
        return Requests.of(_pattern(runs, sizes, by_neighbour=True), steps, sizes)
    except IndexError as error:
        raise CannotEstimate("The steps of networks of different depth name blocks that are not there.") from error


def _pattern(runs: Sequence[Trace], sizes: Sizes, *, by_neighbour: bool = False) -> Pattern:
    strings = (tokens(run, names, by_neighbour=by_neighbour) for run, names in zip(runs, sizes.names, strict=True))
    return Pattern.of(*strings)


def continued(found: Trace, runs: Sequence[Trace], depths: Sequence[int], layers: int) -> Trace:
    """The trace of those requests, with what else the runs say of so many layers."""
    small, middle, large = runs
    steps = _steps(depths, layers)
    return replace(
        found,
        versions=large.versions,
        assumed=large.assumed,
        layers=(*depths, layers),
        alike=large.alike,
        model=_further(small.model, middle.model, steps),
        host=_host(small.host, large.host, steps),
        unknown_calls=_further(small.unknown_calls, large.unknown_calls, steps, 2),
        unknown_workspaces=_further(small.unknown_workspaces, large.unknown_workspaces, steps, 2),
    )


def _host(small: Mapping[str, int], large: Mapping[str, int], steps: int) -> dict[str, int]:
    """What is resident is the process with its libraries, whatever the depth; what is not touched grows with it."""
    found = _further(small, large, steps, 2)
    more = sum(found.get(name, 0) - large.get(name, 0) for name in ("pinned_bytes", "zero_bytes"))
    return {**found, "peak_bytes": large["peak_bytes"] + more}


def _steps(depths: Sequence[int], layers: int) -> int:
    """How many steps in depth so many layers are beyond the least."""
    return (layers - depths[0]) // (depths[1] - depths[0])


def _further(small: Mapping[str, Any], large: Mapping[str, Any], steps: int, apart: int = 1) -> dict[str, Any]:
    """Numbers that grow by as much with each step in depth, of which the two are so many apart."""
    return {
        name: small.get(name, 0) + (more - small.get(name, 0)) * steps // apart if type(more) is int else more
        for name, more in large.items()
    }
