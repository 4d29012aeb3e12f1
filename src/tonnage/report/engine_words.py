"""The sentences and table rows about an inference engine, for all views."""

from collections.abc import Mapping
from typing import Any

from tonnage.units import format_gib, pluralise


def describe_serving(serving: Mapping[str, Any]) -> str:
    """Return what an engine that starts has for requests, or why it does not start."""
    if not serving.get("starts"):
        return str(serving.get("error"))
    held, tokens, concurrency = (serving.get(name) for name in ("kv_cache_bytes", "kv_cache_tokens", "concurrency"))
    parts = [] if held is None else [f"KV cache {format_gib(held)}"]
    parts += [] if tokens is None else [f"{tokens:,} tokens"]
    if concurrency is not None and serving.get("max_len") is not None:
        parts.append(f"{concurrency:,.2f} requests of {serving['max_len']:,} tokens at once")
    return f"{', '.join(parts) or 'no KV cache was seen'}."


def serving_rows(serving: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of what an engine holds on each GPU; what is unknown is left out."""
    names = ("weights", "activation", "graphs", "outside_torch", "kv_cache")
    rows = [
        (name.replace("_", " "), format_gib(size))
        for name in names
        if (size := serving.get(f"{name}_bytes")) is not None
    ]
    if serving.get("blocks") is not None and serving.get("block_tokens") is not None:
        rows.append(("blocks", f"{serving['blocks']:,} of {serving['block_tokens']} tokens"))
    if serving.get("compile_cache") is not None:
        rows.append(("compile cache", describe_compiling(serving)))
    if serving.get("load") is not None:
        rows.append(("under load", describe_load(serving["load"])))
    return [("engine", str(serving.get("engine"))), *rows]


def describe_compiling(serving: Mapping[str, Any]) -> str:
    """Return whether the engine's start compiled the network, and what the other kind of start would hold."""
    seconds, while_compiling = serving.get("compile_seconds"), serving.get("compile_peak_bytes")
    profiled, here = serving.get("activation_bytes"), serving.get("compiled_here")
    took = "compiles" if seconds is None else f"compiles ({seconds:.0f} s here)"
    more = None if while_compiling is None or profiled is None else while_compiling - profiled
    if serving["compile_cache"] == "cold":
        start, other = f"cold: this start {took}.", "A later one finds the network compiled and holds"
        differs = "the same" if more is not None and more < 0 else "more, or the same: known once it is run again"
    else:
        start, other = "warm: this start finds the network compiled.", f"A first one {took} and holds"
        differs = "less, or the same: not known" if more is None else "the same"
        differs = f"{format_gib(more)} less KV cache" if more is not None and more > 0 else differs
    own = "" if here is None else f" vLLM's own cache on this machine {'has' if here else 'lacks'} it."
    return f"{start} {other} {differs}.{own}"


def describe_load(load: Mapping[str, Any]) -> str:
    """Return what an engine made of the requests that it was given."""
    together = f"at most {load['running_most']:,} together (mean {load['running_mean']:,.1f})"
    return (
        f"{load['finished']:,} of {load['requests']:,} requests finished in {load['steps']:,} steps, {together}; "
        f"{pluralise(load['preemptions'], 'preemption')}, at most {load['kv_cache_usage']:.0%} of the KV cache used"
    )
