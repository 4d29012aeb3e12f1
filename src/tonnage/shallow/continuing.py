"""The trace of a deep network from those of three shallow ones, with blocks from a real allocator."""

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
    """Return the requests of a network of so many layers, from one step each of networks of three depths.

    Raises CannotEstimate if what the three have in common does not determine what more layers request.
    """
    sizes, steps = Sizes.of(runs), _count_steps(depths, layers)
    try:
        return Requests.of(_find_pattern(runs, sizes), steps, sizes)
    except (CannotEstimate, IndexError):
        pass  # two kinds of blocks may look alike
    try:
        return Requests.of(_find_pattern(runs, sizes, by_neighbour=True), steps, sizes)
    except IndexError as error:
        raise CannotEstimate("The steps of networks of different depth name blocks that are not there.") from error


def _find_pattern(runs: Sequence[Trace], sizes: Sizes, *, by_neighbour: bool = False) -> Pattern:
    strings = (tokens(run, names, by_neighbour=by_neighbour) for run, names in zip(runs, sizes.names, strict=True))
    return Pattern.of(*strings)


def extend(trace: Trace, runs: Sequence[Trace], depths: Sequence[int], layers: int) -> Trace:
    """Return the trace of those requests, with the runs' other results scaled to so many layers."""
    small, middle, large = runs
    steps = _count_steps(depths, layers)
    return replace(
        trace,
        versions=large.versions,
        assumed=large.assumed,
        layers=(*depths, layers),
        alike=large.alike,
        model=_extrapolate(small.model, middle.model, steps),
        host=_extrapolate_host(small.host, large.host, steps),
        unknown_calls=_extrapolate(small.unknown_calls, large.unknown_calls, steps, 2),
        unknown_workspaces=_extrapolate(small.unknown_workspaces, large.unknown_workspaces, steps, 2),
    )


def _extrapolate_host(small: Mapping[str, int], large: Mapping[str, int], steps: int) -> dict[str, int]:
    """Return the host's bytes: resident memory is the process with its libraries at any depth, untouched memory
    grows.
    """
    numbers = _extrapolate(small, large, steps, 2)
    more = sum(numbers.get(name, 0) - large.get(name, 0) for name in ("pinned_bytes", "zero_bytes"))
    return {**numbers, "peak_bytes": large["peak_bytes"] + more}


def _count_steps(depths: Sequence[int], layers: int) -> int:
    """Return how many steps in depth so many layers are beyond the least."""
    return (layers - depths[0]) // (depths[1] - depths[0])


def _extrapolate(small: Mapping[str, Any], large: Mapping[str, Any], steps: int, apart: int = 1) -> dict[str, Any]:
    """Return numbers extended linearly by `steps` in depth, from two that are `apart` steps apart."""
    return {
        name: small.get(name, 0) + (more - small.get(name, 0)) * steps // apart if type(more) is int else more
        for name, more in large.items()
    }
