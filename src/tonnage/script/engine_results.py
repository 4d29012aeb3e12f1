"""The answer about an inference engine that a dry-run started, from the facts that its processes left.

The command ended by itself, or was ended when its server took requests; or the engine gave up, in its own words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tonnage.errors import TrialFailed
from tonnage.estimates.estimate import Coverage, Estimate, Peak
from tonnage.script.process_results import ProcessResults
from tonnage.serving.answer import Serving
from tonnage.units import format_size

_REFUSALS: Final = ("ValueError", "ValidationError", "MemoryError", "OutOfMemoryError")
"""Errors by which an engine refuses a configuration, or runs out of memory; any other is a failure of the command."""

_SHORT_OF_MEMORY: Final = ("not enough memory", "not enough GPU memory", "out of memory", "no available memory")
"""Words of an error of another class that is about memory."""

_BY_WORST: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
    **dict.fromkeys(("weights_bytes", "activation_bytes", "graphs_bytes"), max),
    **dict.fromkeys(("kv_cache_bytes", "kv_cache_tokens", "blocks", "concurrency"), min),
    **dict.fromkeys(("block_tokens", "max_len", "compile_seconds", "compile_peak_bytes"), max),
    "compile_cache": min,  # cold, if one rank compiles
}
"""Facts, and which of several processes' values is the worst rank's."""


def is_serving(results: ProcessResults) -> bool:
    """Return True if the command runs an inference engine and trains nothing."""
    trains = any(trace.steps for trace in results.traces)
    return not trains and any("engine" in facts for facts in results.engines)


def refusal(results: ProcessResults) -> str | None:
    """Return the words in which the engine refused to start; None if it did not."""
    errors = sorted((facts for facts in results.engines if "error" in facts), key=lambda facts: float(facts["at"]))
    refused = next((facts for facts in errors if _is_refusal(facts)), None)
    return None if refused is None else str(refused["error"])


def _is_refusal(facts: Mapping[str, Any]) -> bool:
    about_memory = any(words.lower() in str(facts["error"]).lower() for words in _SHORT_OF_MEMORY)
    return facts["kind"] in _REFUSALS or about_memory


def is_ready(results: ProcessResults) -> bool:
    """Return True if an engine of the command got ready."""
    return any(facts.get("ready") for facts in results.engines)


def summarise(results: ProcessResults) -> Serving:
    """Return what the engine's processes said, for the worst rank."""
    engine = next(str(facts["engine"]) for facts in results.engines if "engine" in facts)
    error = refusal(results)
    told = {name: [f[name] for f in results.engines if f.get(name) is not None] for name in _BY_WORST}
    worst = {name: pick(told[name]) for name, pick in _BY_WORST.items() if told[name]}
    folders = [Path(facts["compiled_into"]) for facts in results.engines if "compiled_into" in facts]
    here = all(map(_is_compiled_here, folders)) if "compile_cache" in worst and folders else None
    return Serving(engine=engine, starts=error is None, error=error, compiled_here=here, **worst)


def _is_compiled_here(folder: Path) -> bool:
    """Return True if vLLM's own cache has the folder of a ghost's cache, which vLLM names by all that counts."""
    root = os.environ.get("VLLM_CACHE_ROOT") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vllm")
    inside = folder.parts[folder.parts.index("torch_compile_cache") :]
    return Path(root, *inside).expanduser().is_dir()


def judge(results: ProcessResults, ended: int | None, timeout_seconds: float) -> list[str] | None:
    """Return the notes about how the engine ended; None if that is to be judged as of any command.

    Raises TrialFailed if it was not ready in time.
    """
    words = refusal(results)
    engine = next(str(facts["engine"]) for facts in results.engines if "engine" in facts)
    if words is not None:
        return [] if results.traces else ["The engine refused before it used a GPU."]
    if results.served and results.traces:
        return ["The engine was ready for requests, and was ended."]
    if ended is None and is_ready(results) and results.traces:
        return [f"The command was stopped after {timeout_seconds:.0f} s; the engine had started."]
    if ended is None and not is_ready(results):
        last = max(
            (facts for facts in results.engines if "last_words" in facts), key=lambda f: float(f["at"]), default={}
        )
        said = f"; its last words: {str(last['last_words']).rstrip('. ')}" if last else ""
        raise TrialFailed(
            f"{engine} was not ready after {timeout_seconds:.0f} s{said}. Give it more time with --timeout."
        )
    return [] if ended == 0 and results.traces else None


def with_serving(estimate: Estimate, results: ProcessResults) -> Estimate:
    """Return the estimate with the engine's answer, completed by what was measured on the ghost."""
    serving, coverage = summarise(results), estimate.coverage
    if not results.traces:
        unused = dict.fromkeys(estimate.peak.by_category, 0)
        peak = replace(estimate.peak, process_bytes=0, low_bytes=0, high_bytes=0, by_category=unused)
        nothing = Coverage(assumed=tuple(assumptions(results)))
        return replace(estimate, peak=peak, ranks=(), serving=serving.to_json(), fits=False, coverage=nothing)
    growth = _growth(results)
    peak, modelled = _with_engine(estimate.peak, results)
    low_tokens, high_tokens = _token_interval(serving, growth)
    measured = replace(
        serving,
        weights_bytes=serving.weights_bytes or peak.by_category.get("parameter") or None,
        outside_torch_bytes=peak.by_category.get("runtime"),
        low_tokens=low_tokens,
        high_tokens=high_tokens,
    )
    load = next((facts["load"] for facts in results.engines if "load" in facts), None)
    arguments = next((facts["arguments"] for facts in results.engines if "arguments" in facts), None)
    return replace(
        estimate,
        peak=peak,
        job=estimate.job if arguments is None else {**estimate.job, "engine": arguments},
        serving=measured.to_json() | ({} if load is None else {"load": load}),
        fits=serving.starts and estimate.fits,
        coverage=replace(
            coverage,
            modelled=(*coverage.modelled, *modelled),
            assumed=(*coverage.assumed, *assumptions(results)),
        ),
    )


def with_engine_in_training(estimate: Estimate, results: ProcessResults) -> Estimate:
    """Return the estimate of a training command with what an engine in its processes takes (GRPO with vLLM in it)."""
    if not is_ready(results):
        return estimate
    serving, coverage = summarise(results), estimate.coverage
    held, blocks = serving.kv_cache_bytes, serving.blocks
    if not held or not blocks:  # a cache that generation makes and releases
        return estimate
    pool = f"{format_size(held)} of KV cache in {blocks:,} blocks of {serving.block_tokens} tokens"
    note = f"{serving.engine} runs in the processes that train, with {pool}."
    peak, modelled = _with_engine(estimate.peak, results)
    return replace(
        estimate,
        peak=peak,
        notes=(*estimate.notes, note),
        coverage=replace(
            coverage,
            modelled=(*coverage.modelled, *modelled),
            assumed=(*coverage.assumed, *assumptions(results)),
        ),
    )


def _growth(results: ProcessResults) -> Mapping[str, Any] | None:
    return next((facts["growth"] for facts in results.engines if "growth" in facts), None)


def _with_engine(peak: Peak, results: ProcessResults) -> tuple[Peak, list[str]]:
    """Return a peak with what an engine takes outside torch's allocator, and what was modelled for it."""
    growth = _growth(results)
    captured = max((facts.get("graphs_outside_bytes", 0) for facts in results.engines), default=0)
    peak = peak if growth is None else _grown(peak, growth)
    return (_with_graphs(peak, captured) if captured else peak), [] if growth is None else [_describe_growth(growth)]


def _grown(peak: Peak, growth: Mapping[str, Any]) -> Peak:
    """Return a peak with the memory outside torch by which the ghost's card was made to grow."""
    added, low, high = growth["added_bytes"], growth["low_bytes"], growth["high_bytes"]
    return replace(
        peak,
        process_bytes=peak.process_bytes + added,
        low_bytes=peak.low_bytes + added + low - growth["bytes"],
        high_bytes=peak.high_bytes + added + high - growth["bytes"],
        by_category={**peak.by_category, "runtime": peak.by_category["runtime"] + added},
    )


def _with_graphs(peak: Peak, captured_bytes: int) -> Peak:
    """Return a peak with the memory outside torch that captured graphs take on the ghost."""
    return replace(
        peak,
        process_bytes=peak.process_bytes + captured_bytes,
        low_bytes=peak.low_bytes + captured_bytes,
        high_bytes=peak.high_bytes + captured_bytes,
        by_category={**peak.by_category, "graphs": captured_bytes},
    )


def _describe_growth(growth: Mapping[str, Any]) -> str:
    low, typical, high = (format_size(growth[name]) for name in ("low_bytes", "bytes", "high_bytes"))
    return (
        f"growth outside torch until the engine has profiled itself, {typical} ({low} to {high}): {growth['source']}"
    )


def _token_interval(serving: Serving, growth: Mapping[str, Any] | None) -> tuple[int | None, int | None]:
    """Return the interval of the KV cache's tokens that the growth outside torch leaves; Nones if it is unknown."""
    held, tokens = serving.kv_cache_bytes, serving.kv_cache_tokens
    if growth is None or not held or not tokens:
        return None, None
    low, high = (int(growth[name] - growth["bytes"]) for name in ("low_bytes", "high_bytes"))
    return tokens - tokens * high // held, tokens - tokens * low // held


def assumptions(results: ProcessResults) -> list[str]:
    """Return what processes without a trace, such as an engine's server, assumed beyond those with one."""
    known = {text for trace in results.traces for text in trace.assumed}
    told = (str(text) for facts in results.engines for text in facts.get("assumed", ()))
    return [text for text in dict.fromkeys(told) if text not in known]
