"""Facts about engines by version, from catalog/serving.toml."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

from tonnage.cluster import Device
from tonnage.errors import UsageError
from tonnage.units import GIB, MIB

_HOPPER: Final = (9, 0)

ENGINES: Final = ("vllm", "sglang", "transformers")
"""Engines whose memory is known in closed form."""

USUAL_VERSIONS: Final[Mapping[str, str]] = {"vllm": "0.33.0", "sglang": "0.5.23", "transformers": "5.23.0"}
"""Version that is assumed where none is named."""

_VERSION = re.compile(r"v?([0-9]{1,4}(?:\.[0-9]{1,4}){1,3})(?:[.+-]?[a-z0-9.]*)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine with its version."""

    name: str
    """One of ENGINES."""
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


def parse_engine(text: str) -> Engine:
    """Return the engine that `vllm`, `vllm@0.19.0` or `vllm==0.19.0` names.  Raises UsageError."""
    name, _, version = text.strip().lower().replace("==", "@").partition("@")
    if name not in ENGINES:
        raise UsageError(f"Unknown engine {text!r} to serve with; possible: {', '.join(ENGINES)} (also @VERSION).")
    version = version or USUAL_VERSIONS[name]
    matched = _VERSION.fullmatch(version)
    if matched is None:
        raise UsageError(f"{version!r} is no version of {name}; write {name}@{USUAL_VERSIONS[name]}.")
    return Engine(name=name, version=tuple(map(int, matched[1].split("."))))


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A size with its interval."""

    low_bytes: int
    bytes: int
    high_bytes: int

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(
            low_bytes=self.low_bytes + other.low_bytes,
            bytes=self.bytes + other.bytes,
            high_bytes=self.high_bytes + other.high_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class VllmFacts:
    """Behaviour of a version of vLLM."""

    since: str
    utilization: float
    """Part of the card that it takes by default."""
    sampler_bytes: int
    """Bytes of the sampler for each sequence and word, beside the logits."""
    sampler_rows: bool
    """True if it keeps an fp32 row of words for each multiprocessor."""
    kept_bytes: float = 0.0
    """Bytes of the state of the sampler for each sequence and word, kept for good."""
    keeps_stream: bool = False
    """True if a buffer of the residual stream of a step is kept for good."""
    counts_workspace: bool = True
    """True if cuBLAS's workspace is created after the first look at the card."""
    graphs_in_budget: bool
    """True if graphs are estimated and taken from the pool."""
    tokens_by_concurrency: bool
    """True if the tokens of the pool are printed as concurrency times length."""
    steps_in_flight: int
    """Steps that may hold blocks at once."""
    state_blocks: int = 1
    """Blocks for each state of fixed size of a request."""
    copied_states: Mapping[str, str] = field(default_factory=dict)
    """Kinds of layers whose state is also copied inside a prompt, for cached prefixes; from which capability on."""
    frees_chunks: bool = False
    """True if layers that attend within chunks keep the last one alone."""
    source: tuple[str, ...]

    def copies_on(self, capability: tuple[int, int]) -> tuple[str, ...]:
        """Return the kinds of layers whose state is copied inside a prompt on a card of this capability."""
        return tuple(kind for kind, least in self.copied_states.items() if capability >= _numbers(least))


def vllm_facts(version: tuple[int, ...]) -> VllmFacts:
    """Return the facts of the newest entry that is not newer than this version (the oldest, for one before)."""
    entry = _newest(_tables()["vllm"], version)
    frees_chunks = is_from(version, _tables()["chunks"]["since"])
    return VllmFacts(**entry | {"source": tuple(entry["source"]), "frees_chunks": frees_chunks})


def unsplit_bytes(engine: Engine) -> int | None:
    """Return the size from which on an engine has torch's allocator split no block while it loads; None: no size."""
    facts = _tables()["unsplit"]
    applies = engine.name == "vllm" and is_from(engine.version, facts["since"])
    return facts["mib"] * MIB if applies else None


def runs_second(version: tuple[int, ...], kind: str, *, has_experts: bool, has_states: bool, quantized: bool) -> bool:
    """Return True if this version of vLLM runs a network of a kind with its second model runner."""
    entries = _tables()["second_runner"]
    if not is_from(version, entries[0]["since"]):
        return False
    entry = _newest(entries, version)
    if entry.get("all"):
        return True
    if quantized and not entry.get("quantized", True):
        return False
    return kind in entry["kinds"] or (entry.get("dense", False) and not has_experts and not has_states)


def with_second_runner(facts: VllmFacts, version: tuple[int, ...], capability: tuple[int, int]) -> VllmFacts:
    """Return the facts of a version as its second model runner changes them on a card."""
    changes, native = dict(_tables()["second_runner_memory"]), dict(_tables()["second_runner_native"])
    estimates = is_from(version, changes.pop("graphs_in_budget_since"))
    source = (*facts.source, changes.pop("source"))
    is_native = is_from(version, native.pop("since")) and capability < _numbers(native.pop("below"))
    if is_native:
        source = (*source, native.pop("source"))
        changes |= native
    return replace(facts, source=source, graphs_in_budget=facts.graphs_in_budget and estimates, **changes)


def least_capability(version: tuple[int, ...], name: str) -> tuple[tuple[int, ...], str | None]:
    """Return the compute capability from which on a version of vLLM serves weights of a format, or `any`.

    The second is the version since which it is another than before; None where it never was.  No limit is (0,).
    """
    entries = _tables()["capabilities"].get(name)
    if entries is None:
        return (0,), None
    entry = _newest(entries, version)
    return _numbers(entry["least"]), None if entry is entries[0] else entry["since"]


def reads_fp8_cache(
    version: tuple[int, ...], capability: tuple[int, int], *, kind: str, head_dim: int, latent: bool
) -> bool:
    """Return True if attention of a kind of network reads keys and values in 8-bit floats on a card."""
    facts = _tables()["fp8_cache"]
    if capability >= _numbers(facts["triton"]):
        return True
    least = _numbers(_newest(facts["flashinfer"], version)["least"])
    has_flashinfer = capability >= least and head_dim in facts["head_dims"]
    return has_flashinfer and not latent and kind not in facts["with_sinks"]


def first_without(method: str) -> str | None:
    """Return the first version of vLLM that has no such method of quantization; None: the newest has it."""
    first: str | None = _tables()["removed_methods"].get(method)
    return first


def quantizes_from(name: str) -> str | None:
    """Return the version of vLLM from which on it is known to make such weights of 16 bits; None: all versions."""
    first: str | None = _tables()["quantizes_from"].get(name)
    return first


def is_from(version: tuple[int, ...], since: str) -> bool:
    """Return True if a version is not older than another."""
    return (*version, 0, 0) >= _numbers(since)


def outside_torch(version: tuple[int, ...], device: Device, *, tp: int, pp: int) -> Interval:
    """Return the growth of memory outside torch's allocator until an engine has profiled its network."""
    return _interval(_newest(_outside(device, tp=tp, pp=pp), version))


def _outside(device: Device, *, tp: int, pp: int) -> list[dict[str, Any]]:
    """Return the entries about growth outside torch that hold for a card and these degrees, the oldest first."""
    entries: list[dict[str, Any]]
    if tp > 1:
        is_linked = device.nvlink_bytes_per_second is not None and not device.nvlink_bridged
        entries = [entry for entry in _tables()["outside_ranks"] if entry["nvlink"] == is_linked]
    elif pp > 1:
        entries = _tables()["outside_stages"]
    else:
        entries = [entry for entry in _tables()["outside"] if _numbers(entry["capability"]) <= device.capability]
    return entries


def list_growth(device: Device) -> dict[str, list[dict[str, Any]]]:
    """Return the growth outside torch's allocator by version: of one GPU, of tensor-parallel ranks, of stages.

    Plain values with `since`, `low_bytes`, `bytes`, `high_bytes` and `source`, the oldest version first.
    """
    return {
        name: [
            {"since": _numbers(entry["since"]), "source": entry["source"], **asdict(_interval(entry))}
            for entry in _outside(device, tp=tp, pp=pp)
        ]
        for name, tp, pp in (("one", 1, 1), ("ranks", 2, 1), ("stages", 1, 2))
    }


def graphs(device: Device, layers: int, *, has_experts: bool, sizes: float = 1.0) -> Interval:
    """Return the memory of captured CUDA graphs; `sizes` is the part of all batch sizes that are captured."""
    facts = _tables()["graphs"]
    by_size = facts["layer_gib"] * layers + facts["experts_gib"] * has_experts
    typical = facts["fixed_gib"] + by_size * sizes
    if device.capability != _HOPPER:
        typical *= facts["other_cards"]
    return Interval(
        low_bytes=int(typical * facts["low"] * GIB),
        bytes=int(typical * GIB),
        high_bytes=int(typical * facts["high"] * GIB),
    )


def estimated_graphs(captured: Interval) -> Interval:
    """Return what vLLM takes from its budget for graphs, which it estimates before it captures them."""
    facts = _tables()["graphs"]
    return Interval(
        low_bytes=int(captured.bytes * facts["estimated_low"]),
        bytes=int(captured.bytes * facts["estimated"]),
        high_bytes=int(captured.high_bytes * facts["estimated_high"]),
    )


def engine_facts(name: str) -> Mapping[str, Any]:
    """Return the numbers of an engine whose versions do not differ."""
    entry: Mapping[str, Any] = _tables()[name]
    return entry


def needs_bf16(kind: str) -> bool:
    """Return True if vLLM computes a kind of network in fp32 on cards without bf16, and not in fp16 as others."""
    return kind in _tables()["without_fp16"]["kinds"]


def router_bytes(kind: str) -> int | None:
    """Return the bytes of an element of the routers of a kind of network in vLLM; None: those of other weights."""
    return 4 if kind in _tables()["fp32_routers"]["kinds"] else None


def is_by_transformers(version: tuple[int, ...], kind: str) -> bool:
    """Return True if a version of vLLM computes a kind of network with transformers' own layers."""
    entry = _tables()["by_transformers"]
    return kind in entry["kinds"] and is_from(version, entry["since"])


def has_adapter_words(kind: str) -> bool:
    """Return True if vLLM has adapters of the embedding and the head of a kind of network."""
    return kind in _tables()["adapters"]["words"]


def _newest(entries: list[dict[str, Any]], version: tuple[int, ...]) -> dict[str, Any]:
    """Return the newest entry that is not newer than a version; the oldest, for one before."""
    return ([entry for entry in entries if is_from(version, entry["since"])] or entries[:1])[-1]


def _interval(entry: Mapping[str, Any]) -> Interval:
    low, typical, high = (int(entry[f"{name}_gib"] * GIB) for name in ("low", "typical", "high"))
    return Interval(low_bytes=low, bytes=typical, high_bytes=high)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@cache
def _tables() -> Mapping[str, Any]:
    return tomllib.loads((files("tonnage") / "catalog" / "serving.toml").read_text(encoding="utf-8"))
