"""Changes of an engine's settings that make it start, each computed, with what it gives."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from tonnage.catalog.devices import find_device, parse_cluster, spell_options
from tonnage.cluster import GPUS_PER_NODE, Cluster
from tonnage.errors import CannotEstimate, UsageError
from tonnage.serving.closed_form import (
    ServingEstimate,
    estimate_serving,
    find_unsupported,
    last_that_supports,
)
from tonnage.serving.settings import ServeSettings, spell_flags

_STEP: Final = 0.01
"""Steps in which the utilization is raised."""

_USUAL_CONTEXT_SHARE: Final = 0.985
"""Most of the card that is advised: the rest is for what libraries load later."""

LARGER_CARDS: Final = ("l4", "rtx-5090", "l40s", "a100-80gb", "h100-80gb", "h200", "b200", "b300")
"""Cards that are advised where the one asked about is too small: those that are rented most, smallest first."""

_MOST_COMBINED: Final = 3
"""Combined changes that are shown."""

_FORMATS: Final = ("none", "fp8", "awq-int4")
"""Formats that are tried in place of one that the engine does not run on a card."""

_LEAST_SEQS: Final = 8
_LEAST_TOKENS: Final = 512


@dataclass(frozen=True, kw_only=True)
class ServingAdvice:
    """One change and the answer with it."""

    change: Mapping[str, Any]
    """Settings that change, by name, with their new values; `gpu` for more cards."""
    command: str
    """A command that gives this answer."""
    fits: bool
    """True if the engine starts with it."""
    peak_bytes: int
    """Bytes of a card that the engine needs with it, for one request of the maximal length."""
    gain_bytes: int
    """Bytes less than without it."""
    changes_mathematics: bool
    """True if the network computes something else: other weights, keys or values."""
    kv_cache_tokens: int
    """Tokens that the pool holds then."""
    concurrency: float | None
    """Requests of the maximal length that it holds then."""

    def to_json(self) -> dict[str, Any]:
        """Return the change as the contract spells advice, with the pool that it gives."""
        return {
            "change": dict(self.change),
            "command": self.command,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "gain_bytes": self.gain_bytes,
            "step_seconds": None,
            "changes_mathematics": self.changes_mathematics,
            "kv_cache_tokens": self.kv_cache_tokens,
            "concurrency": self.concurrency,
        }


def needed_bytes(estimate: ServingEstimate) -> int:
    """Return the bytes of a card that the engine needs to serve one request of the maximal length."""
    worst = estimate.worst
    return (
        worst.weights_bytes
        + worst.profile.bytes
        + worst.outside.bytes
        + estimate.settings.first_bytes
        + worst.graphs.bytes
        + estimate.request_bytes
    )


def advise(estimate: ServingEstimate) -> tuple[ServingAdvice, ...]:
    """Return what each change of an engine that does not start leads to: those that make it start first.

    Among these, those that keep the mathematics come first.  Where no single change is enough, changes of format and
    degree are combined.
    """
    tried = [_apply(estimate, change) for change in _single_changes(estimate)]
    singles = [advice for advice in tried if advice is not None]
    pairs: list[ServingAdvice] = []
    if not any(advice.fits for advice in singles):
        combined = (_apply(estimate, change) for change in _combined_changes(estimate))
        pairs = list(islice((advice for advice in combined if advice is not None and advice.fits), _MOST_COMBINED))
    return tuple(sorted([*pairs, *singles], key=lambda advice: (not advice.fits, advice.changes_mathematics)))


def _single_changes(estimate: ServingEstimate) -> Iterator[dict[str, Any]]:
    full = estimate.settings
    if find_unsupported(full, estimate.network) is not None:
        older = last_that_supports(full, estimate.network)
        others: list[dict[str, Any]] = [{} if older is None else {"engine": older}]
        others += [{"kv_dtype": "fp16" if estimate.network.has_fp8_cache else "auto"}]
        others += [{"quantization": name} for name in _FORMATS]
        for change in filter(None, others):
            yield from _with_longest(estimate, change)
        cards = (change for change in _cards(estimate) if _is_supported(estimate, change))
        yield from _first_that_starts(estimate, cards)
        return
    if estimate.longest:
        yield {"max_len": estimate.longest}
    yield from _first_that_starts(estimate, _utilizations(full.utilization))
    yield from _first_that_starts(estimate, _halves("max_seqs", full.max_seqs, _LEAST_SEQS))
    yield from _first_that_starts(estimate, _halves("max_batched_tokens", full.max_batched_tokens, _LEAST_TOKENS))
    if not full.stated.eager and full.engine.name == "vllm":
        yield {"eager": True}
    if not full.has_fp8_cache and _is_supported(estimate, {"kv_dtype": "fp8"}):
        yield {"kv_dtype": "fp8"}
    for name in _quantizations(estimate):
        yield {"quantization": name}
    yield from _first_that_starts(estimate, _degrees(estimate))
    yield from _first_that_starts(estimate, _cards(estimate))


def _with_longest(estimate: ServingEstimate, change: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a change with which the engine starts, if need be with shorter requests."""
    trial = _try(estimate, change)
    if trial is not None and _is_supported(estimate, change) and (trial.starts or trial.longest):
        yield change if trial.starts else {**change, "max_len": trial.longest}


def _is_supported(estimate: ServingEstimate, change: Mapping[str, Any]) -> bool:
    """Return True if the engine serves such weights on such a card with a change."""
    trial = _try(estimate, change)
    return trial is not None and find_unsupported(trial.settings, trial.network) is None


def _combined_changes(estimate: ServingEstimate) -> Iterator[dict[str, Any]]:
    for degree in ({}, *_degrees(estimate)):
        for name in (None, *_quantizations(estimate)):
            change = {**degree, **({} if name is None else {"quantization": name})}
            if not change:
                continue
            trial = _try(estimate, change)
            if trial is None or trial.starts:
                continue
            if trial.longest:
                yield {**change, "max_len": trial.longest}
            yield {**change, "kv_dtype": "fp8"}
    for degree in _degrees(estimate):
        for name in _quantizations(estimate):
            yield {**degree, "quantization": name}


def _utilizations(utilization: float) -> Iterator[dict[str, Any]]:
    value = round(utilization + _STEP, 2)
    while value <= _USUAL_CONTEXT_SHARE:
        yield {"gpu_memory_utilization": value}
        value = round(value + _STEP, 2)


def _halves(name: str, value: int, least: int) -> Iterator[dict[str, Any]]:
    while value // 2 >= least:
        value //= 2
        yield {name: value}


def _quantizations(estimate: ServingEstimate) -> tuple[str, ...]:
    if estimate.settings.quantization.bits < 16:
        return ()
    has_fp8 = estimate.settings.device.capability >= (8, 9)
    names = (*(("fp8",) if has_fp8 else ()), "awq-int4")
    return tuple(name for name in names if _is_supported(estimate, {"quantization": name}))


def _degrees(estimate: ServingEstimate) -> Iterator[dict[str, Any]]:
    """Yield larger degrees of tensor parallelism, with the cards that they need."""
    stated, cluster = estimate.settings.stated, estimate.cluster
    tp = 2 * stated.tp
    while tp <= GPUS_PER_NODE:
        gpus = tp * stated.pp * stated.dp
        yield {"tp": tp} if gpus <= cluster.gpus else {"tp": tp, "gpu": f"{gpus}x{cluster.device.id}"}
        tp *= 2
    if stated.tp * stated.dp == GPUS_PER_NODE:
        for pp in (2 * stated.pp, 4 * stated.pp):
            yield {"pp": pp, "gpu": f"{pp}x{GPUS_PER_NODE}x{cluster.device.id}"}


def _cards(estimate: ServingEstimate) -> Iterator[dict[str, Any]]:
    """Yield larger cards, smallest first, as many as there are."""
    cluster = estimate.cluster
    for name in LARGER_CARDS:
        if find_device(name).capacity_bytes > cluster.device.capacity_bytes:
            yield {"gpu": f"{replace(cluster, device=find_device(name))}"}


def _first_that_starts(estimate: ServingEstimate, changes: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the first change with which the engine starts; the last that can be, if it starts with none."""
    last = None
    for change in changes:
        trial = _try(estimate, change)
        if trial is None:
            continue
        last = change
        if trial.starts:
            break
    if last is not None:
        yield last


def _try(estimate: ServingEstimate, change: Mapping[str, Any]) -> ServingEstimate | None:
    """Return the estimate with a change; None where the settings cannot be."""
    settings, cluster = _changed(estimate, change)
    try:
        return estimate_serving(estimate.network, settings, cluster)
    except (UsageError, CannotEstimate):
        return None


def _changed(estimate: ServingEstimate, change: Mapping[str, Any]) -> tuple[ServeSettings, Cluster]:
    values = {name: value for name, value in change.items() if name != "gpu"}
    if change.get("max_seqs") and "max_batched_tokens" not in values:
        values["max_batched_tokens"] = estimate.settings.max_batched_tokens
    if change.get("max_batched_tokens", 1 << 40) < estimate.settings.max_seqs:
        values["max_seqs"] = change["max_batched_tokens"]
    cluster = parse_cluster(change["gpu"]) if "gpu" in change else estimate.cluster
    return estimate.settings.stated.changed(**values), cluster


def _apply(estimate: ServingEstimate, change: Mapping[str, Any]) -> ServingAdvice | None:
    trial = _try(estimate, change)
    if trial is None:
        return None
    settings, cluster = _changed(estimate, change)
    return ServingAdvice(
        change=change,
        command=spell_command(estimate.network.model, cluster, settings),
        fits=trial.starts,
        peak_bytes=needed_bytes(trial),
        gain_bytes=needed_bytes(estimate) - needed_bytes(trial),
        changes_mathematics=bool({"quantization", "kv_dtype"} & change.keys()),
        kv_cache_tokens=trial.serving.kv_cache_tokens or 0,
        concurrency=trial.serving.concurrency,
    )


def spell_command(model: str, cluster: Cluster, settings: ServeSettings) -> str:
    """Return the `tonnage estimate --task serve` command of these settings."""
    words = ["tonnage", "estimate", model, "--task", "serve", *shlex.split(spell_options(cluster))]
    return shlex.join([*words, *spell_flags(settings)])
