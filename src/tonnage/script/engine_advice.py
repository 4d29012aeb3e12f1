"""Flags with which an inference engine would start, each tried on the ghost.

    To serve ... the estimated maximum model length is 49552    ->    --max-model-len 49552, --kv-cache-dtype fp8, ...

The engine is told by its arguments in the process (`TONNAGE_ENGINE`, see `tonnage_inside.values.serving`), so that a
script that makes an engine is tried as a server's command line is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tonnage.cluster import Cluster
from tonnage.errors import TonnageError
from tonnage.estimates.estimate import Advice, Estimate
from tonnage.script import dry_run
from tonnage.script.command import set_value
from tonnage.script.planning import Asked

_LONGEST: Final = re.compile(r"estimated maximum model length is ([\d,]+)")
"""vLLM's own estimate of the longest request."""

_UTILIZATION: Final = 0.95
"""Share of the card that is tried at most: the rest is for the context and for what grows later."""

_FP8_CAPABILITY: Final = (8, 9)
"""Compute capability from which tensor cores multiply fp8."""

_ARGUMENTS: Final = ("tensor_parallel_size", "kv_cache_dtype", "quantization", "gpu_memory_utilization")
"""Arguments that decide what is tried, by vLLM's names."""

_MATHEMATICS: Final = frozenset(("kv_cache_dtype", "quantization"))
"""Arguments whose change makes an engine compute something else."""

_FEW_SEQUENCES: Final = 64
_FEW_TOKENS: Final = 2048
"""Sequences and tokens of a step that are tried where the profile run takes much."""

_SERVERS: Final = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
"""Modules that serve, as `vllm serve` does."""

_WORDS: Final = {
    "sglang": {
        "max_model_len": "context_length",
        "tensor_parallel_size": "tp_size",
        "gpu_memory_utilization": "mem_fraction_static",
        "max_num_seqs": "max_running_requests",
        "max_num_batched_tokens": "chunked_prefill_size",
    }
}
"""Arguments of other engines by vLLM's names, where they differ."""

_FP8: Final = {"vllm": "fp8", "sglang": "fp8_e4m3"}
"""Word for a cache in 8-bit floats."""

_EAGER: Final = ("--enforce-eager", "-O0", "-cc.mode=none", "--disable-cuda-graph")
"""Flags with which a server compiles nothing and captures no graphs."""

_WITHOUT_GRAPHS: Final = {"vllm": "enforce_eager", "sglang": "disable_cuda_graph"}
"""Argument that says so."""


def say_eager_answer(asked: Asked, progress: Callable[[str], None]) -> None:
    """Tell what a server holds without compiled code and graphs, with which its start takes about twice as long."""
    engine = _server(asked.command)
    if engine is None or not set(_EAGER).isdisjoint(asked.command):
        return
    try:
        estimate = _run(replace(asked, requests=None), {_WITHOUT_GRAPHS[engine]: True}, progress)
    except TonnageError:
        return  # the start as it was typed tells why
    if estimate.serving is None or not used_card(estimate):
        return
    tokens = estimate.serving.get("kv_cache_tokens")
    held = f" with a KV cache of {tokens:,} tokens" if estimate.fits and tokens else ""
    progress(f"{estimate.verdict()}{held} without compiled code and graphs; starting it with them")


def list_changes(estimate: Estimate, cluster: Cluster) -> list[dict[str, Any]]:
    """Return arguments that may make the engine of an estimate start, the most likely first."""
    serving, stated = estimate.serving or {}, estimate.job.get("engine") or {}
    engine = str(serving.get("engine")).partition(" ")[0]
    words = _WORDS.get(engine, {})
    arguments = {name: stated.get(words.get(name, name)) for name in _ARGUMENTS}
    longest = _LONGEST.search(str(serving.get("error")))
    changes: list[dict[str, Any]] = []
    if longest is not None:
        changes.append({"max_model_len": int(longest[1].replace(",", ""))})
    degree = int(arguments["tensor_parallel_size"] or 1)
    if 2 * degree <= cluster.gpus_per_node:
        changes.append({"tensor_parallel_size": 2 * degree})
    has_fp8 = cluster.device.capability >= _FP8_CAPABILITY
    if has_fp8 and (arguments["kv_cache_dtype"] or "auto") == "auto" and estimate.oom is None:
        changes.append({"kv_cache_dtype": _FP8.get(engine, "fp8")})
    if has_fp8 and arguments["quantization"] is None:
        changes.append({"quantization": "fp8"})
    if float(arguments["gpu_memory_utilization"] or 1) < _UTILIZATION and estimate.oom is None:
        changes.append({"gpu_memory_utilization": _UTILIZATION})
    if (serving.get("activation_bytes") or 0) > (serving.get("weights_bytes") or 0) // 8:
        changes.append({"max_num_seqs": _FEW_SEQUENCES, "max_num_batched_tokens": _FEW_TOKENS})
    return [{words.get(name, name): value for name, value in change.items()} for change in changes]


def used_card(estimate: Estimate) -> bool:
    """Return False if the engine refused its configuration before it used a GPU."""
    return estimate.peak.process_bytes > 0


def try_changes(
    asked: Asked, estimate: Estimate, most: int, most_seconds: Callable[[], bool], progress: Callable[[str], None]
) -> Iterator[Advice]:
    """Yield the first `most` changes that were run, until `most_seconds` is True; one that fails or is refused
    is left out."""
    for change in list_changes(estimate, asked.cluster)[:most]:
        words = spell_flags(change)
        progress(f"trying {shlex.join(words)}")
        try:
            tried = _run(asked, change, progress)
        except TonnageError:
            continue
        if not used_card(tried):
            continue
        yield _as_advice(asked.command, change, tried, estimate)
        if most_seconds():
            return


def _run(asked: Asked, change: Mapping[str, Any], progress: Callable[[str], None]) -> Estimate:
    """Run the command with these arguments of its engine."""
    return dry_run.run(
        asked.command,
        asked.cluster,
        timeout_seconds=asked.timeout_seconds,
        torch_version=asked.torch_version,
        variables={**os.environ, "TONNAGE_ENGINE": json.dumps(change)},
        seconds=False,
        requests=asked.requests,
        progress=progress,
    ).estimate


def _as_advice(command: Sequence[str], change: Mapping[str, Any], tried: Estimate, before: Estimate) -> Advice:
    return Advice(
        change=dict(change),
        command=spell_command(command, change),
        fits=tried.fits,
        peak_bytes=tried.peak.process_bytes,
        gain_bytes=before.peak.process_bytes - tried.peak.process_bytes,
        step_seconds=None,
        changes_mathematics=not _MATHEMATICS.isdisjoint(change),
        kv_cache_tokens=(tried.serving or {}).get("kv_cache_tokens"),
    )


def spell_flags(change: Mapping[str, Any]) -> list[str]:
    """Return arguments as flags: `--max-model-len 49552`."""
    return [word for name, value in change.items() for word in (_flag(name), str(value))]


def spell_command(command: Sequence[str], change: Mapping[str, Any]) -> str:
    """Return the command with flags, in place of those that it has; a script of the user's has them in its code."""
    if _server(command) is None:
        said = ", ".join(f"{name}={value!r}" for name, value in change.items())
        return f"{shlex.join(command)}  # with {said} in the code"
    words = list(command)
    for name, value in change.items():
        words = set_value(words, _flag(name), value, {_flag(name): {"action": "store", "nargs": None}})
    return shlex.join(words)


def _server(command: Sequence[str]) -> str | None:
    """Return the engine whose arguments the flags of a command are; None for a script of the user's."""
    for engine, module in _SERVERS.items():
        serves = any(Path(program).name == engine and word == "serve" for program, word in pairwise(command))
        if serves or module in command:
            return engine
    return None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
