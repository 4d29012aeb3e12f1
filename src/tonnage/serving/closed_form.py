"""The start of an engine in closed form: whether it gets ready, and how much KV cache it holds.

answer = estimate_serving(read_network("llama-3.1-8b"), ServeSettings(max_len=8192), cluster)
answer.serving.kv_cache_tokens, answer.serving.starts
"""

import re
from dataclasses import dataclass, replace
from typing import Final

from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.serving import sglang
from tonnage.serving.answer import Serving
from tonnage.serving.cache_layers import read_layers
from tonnage.serving.extras import check_extras, describe_extras, draft_layers
from tonnage.serving.facts import (
    Interval,
    VllmFacts,
    estimated_graphs,
    first_without,
    graphs,
    is_from,
    least_capability,
    outside_torch,
    parse_engine,
    quantizes_from,
    reads_fp8_cache,
    runs_second,
    vllm_facts,
    with_second_runner,
)
from tonnage.serving.kv_cache import LayerCache, Layout, Pool, Request, lay_out, split_stages
from tonnage.serving.network import ServedNetwork, generates_no_text
from tonnage.serving.profile import ProfilePeak, context_tokens, cublas_workspace_bytes, profile_peak
from tonnage.serving.rank_weights import known_shape, weights_by_part
from tonnage.serving.settings import BF16_CAPABILITY, FullSettings, ServeSettings, complete
from tonnage.serving.transformers_cache import PAGE_TOKENS, plan_sectors
from tonnage.units import GIB, format_gib

SOURCE: Final = "closed form"
"""Value of `Serving.engine` for an answer of this module."""

_OTHER_HEADS: Final = re.compile(
    r"For(?:\w+Classification|MaskedLM|PreTraining|QuestionAnswering|MultipleChoice|CTC|\w+Detection|"
    r"\w+Segmentation|DepthEstimation|SequenceEmbedding|Retrieval)$"
)
"""Ends of the names of transformers' classes whose head gives no words of an answer."""

_RUN_IN_FP32: Final = ("compressed-tensors",)
"""Methods of quantized weights that vLLM computes in fp32 too (`get_supported_act_dtypes`, 0.33.0)."""

_CAPTURED_MOST: Final = 512
"""Largest batch of which vLLM captures a graph."""

_AMPERE: Final = (8, 0)
"""Capability from which on flash attention is assumed to be installed for transformers."""

_FIRST_RUNNER: Final = (0, 21)
"""Version of vLLM whose profile stands for the step of another engine."""

_LOADING_BYTES: Final = GIB
"""Memory that loading weights may leave reserved in transformers: assumed."""

_PROFILE_INTERVAL: Final = (0.98, 1.05)
"""Peak of a log / that of the formula, for networks of text."""
_COMPILE_MOST: Final = 1.4
"""The upper end where torch's compiling makes the peak: logs of 0.22.0, 0.22.1 and 0.31.0 have 1.01, 1.3 and 1.37.
The lower end is the peak of a start that does not compile."""
_TOWER_INTERVAL: Final = (1.0, 1.4)
"""The same for networks with images, whose encoder is profiled too and has no formula here."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of one rank, the worst of its pipeline stage."""

    stage: int
    weights_bytes: int
    profile: ProfilePeak
    outside: Interval
    graphs: Interval
    layout: Layout
    pool_bytes: int
    """Bytes for the pool; negative where there is no room."""
    low_pool_bytes: int
    high_pool_bytes: int


@dataclass(frozen=True, kw_only=True)
class ServingEstimate:
    """An answer with what it rests on."""

    serving: Serving
    network: ServedNetwork
    settings: FullSettings
    cluster: Cluster
    worst: StageMemory
    """The stage with the fewest blocks."""
    request_bytes: int
    """Pool that one request of the maximal length needs."""
    longest: int
    """Longest request that the pool holds."""
    weights_by_part: dict[str, int]
    """Bytes of the weights of the worst stage by role."""
    modelled: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def starts(self) -> bool:
        """Return True if the engine gets ready."""
        return self.serving.starts

    @property
    def request(self) -> Request:
        """Return a request of the maximal length."""
        return _request(self.settings)

    @property
    def pool(self) -> Pool:
        """Return the pool."""
        return self.worst.layout.fill(self.worst.pool_bytes)


def estimate_serving(network: ServedNetwork, settings: ServeSettings, cluster: Cluster) -> ServingEstimate:
    """Return whether the engine starts, and what it holds.

    Raises UsageError for settings that cannot be, CannotEstimate for a network that is not known.
    """
    full = complete(settings, network, cluster)
    check_extras(full, network)
    _check_generates(network)
    frees_chunks = full.engine.name == "vllm" and vllm_facts(full.engine.version).frees_chunks
    text_layers = read_layers(
        sglang.with_state_dtype(network.config) if full.engine.name == "sglang" else network.config,
        element_bytes=full.kv_element_bytes,
        tp=settings.tp,
        frees_chunks=frees_chunks,
        drafted=settings.draft_tokens or 0,
    )
    stages = _stages(network, len(text_layers), settings)
    memories = [_stage_memory(index, stages, network, full, text_layers) for index in range(len(stages))]
    request = _request(full)
    worst = min(memories, key=lambda memory: memory.layout.fill(memory.pool_bytes).blocks)
    needed = max(memory.layout.request_bytes(request) for memory in memories)
    longest = min(memory.layout.longest(memory.pool_bytes, request) for memory in memories)
    error = _why_not(full, network, worst, needed, longest)
    if full.engine.name == "sglang" and error is None:
        pool = worst.layout.fill(worst.pool_bytes)
        most = sglang.running_requests(pool, text_layers, max_len=full.max_len, stated=settings.max_seqs)
        full = replace(full, max_seqs=most)
    return ServingEstimate(
        serving=_answer(full, worst, request, error),
        network=network,
        settings=full,
        cluster=cluster,
        worst=worst,
        request_bytes=needed,
        longest=longest,
        weights_by_part=weights_by_part(network, full, stages[worst.stage]),
        modelled=_modelled(full),
        assumed=(
            *_assumed(network, full, cluster),
            *([sglang.describe_longest(longest)] if error is None and longest < full.max_len else []),
            *describe_extras(network, full, worst.weights_bytes),
        ),
    )


def _check_generates(network: ServedNetwork) -> None:
    """Raise CannotEstimate for an encoder, and for a network with another head than one of words."""
    stated = network.config.get("architectures")
    heads = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
    has_other_head = bool(heads) and all(map(_OTHER_HEADS.search, heads))
    if not has_other_head and (network.shape is None or network.shape.causal):
        return
    raise generates_no_text(network.name, heads[0] if heads else network.config.get("model_type"))


def _request(full: FullSettings) -> Request:
    if full.engine.name != "vllm":
        return Request(length=full.max_len, batched_tokens=full.max_batched_tokens)
    facts = vllm_facts(full.engine.version)
    batched = facts.steps_in_flight * full.max_batched_tokens
    states, copied = facts.state_blocks, facts.copies_on(full.device.capability)
    if full.stated.no_prefix_caching:
        states, copied = 1, ()
    drafted = full.stated.draft_tokens or 0  # a state for each, as some of them may be rejected
    return Request(length=full.max_len, batched_tokens=batched, state_blocks=states + drafted, copied_states=copied)


def _stages(network: ServedNetwork, cached_layers: int, settings: ServeSettings) -> tuple[range, ...]:
    layers = network.shape.layers if network.shape is not None else cached_layers
    try:
        return split_stages(layers, settings.pp)
    except ValueError as error:
        raise UsageError(f"--pp {settings.pp}: {error}.") from None


def _stage_memory(
    index: int,
    stages: tuple[range, ...],
    network: ServedNetwork,
    full: FullSettings,
    layers: tuple[LayerCache, ...],
) -> StageMemory:
    stage, stated = stages[index], full.stated
    weights = sum(weights_by_part(network, full, stage).values())
    facts = _profile_facts(network, full, layers)
    shape = known_shape(network)
    samples = index == len(stages) - 1
    profile = profile_peak(
        shape,
        tokens=full.max_batched_tokens,
        sequences=full.max_seqs,
        device=full.device,
        facts=facts,
        quantization=full.quantization,
        tp=stated.tp,
        ep=stated.ep,
        dp=stated.dp,
        samples=samples,
        staged=len(stages) > 1,
        towers=network.has_towers,
        embeds=full.compiles and index == 0 and not network.has_towers,
        predicts=stated.draft == "mtp",
        element_bytes=full.element_bytes,
        eager=stated.eager,
        state_elements=max((layer.inner_elements for layer in layers), default=0),
        context=context_tokens(longest=full.max_len, sequences=full.max_seqs, block_tokens=stated.block_tokens),
    )
    outside = outside_torch(full.engine.version, full.device, tp=stated.tp, pp=stated.pp)
    none = Interval(low_bytes=0, bytes=0, high_bytes=0)
    captured = none
    if not stated.eager:
        captured = graphs(full.device, len(stage), has_experts=shape.experts > 0, sizes=_captured(full))
    block_layers = layers[stage.start : stage.stop] if len(layers) == shape.layers else layers
    pages = PAGE_TOKENS if full.engine.name == "transformers" else stated.block_tokens
    block_layers = (*block_layers, *draft_layers(network, full, block_layers))
    paged = sglang.kept_layers(block_layers, network.text_kind) if full.engine.name == "sglang" else block_layers
    layout = lay_out(paged, pages, _request(full).copied_states)
    estimated = estimated_graphs(captured) if facts.graphs_in_budget else none
    low, pool, high = _pool_bytes(full, weights, profile, outside, estimated, network, block_layers)
    return StageMemory(
        stage=index,
        weights_bytes=weights,
        profile=profile,
        outside=outside,
        graphs=captured,
        layout=layout,
        pool_bytes=pool,
        low_pool_bytes=low,
        high_pool_bytes=high,
    )


def _profile_facts(network: ServedNetwork, full: FullSettings, layers: tuple[LayerCache, ...]) -> VllmFacts:
    """Return the facts of the version and of the model runner that profiles the network."""
    if full.engine.name != "vllm":
        return vllm_facts(_FIRST_RUNNER)
    facts = vllm_facts(full.engine.version)
    second = runs_second(
        full.engine.version,
        network.text_kind,
        has_experts=network.shape is not None and network.shape.experts > 0,
        has_states=any(layer.kind == "state" for layer in layers),
        quantized=full.quantization.bits < 16,
    )
    return with_second_runner(facts, full.engine.version, full.device.capability) if second else facts


def _captured(full: FullSettings) -> float:
    """Return the part of the graphs' sizes that is captured: up to twice the sequences, at most 512."""
    most = min(2 * full.max_seqs, _CAPTURED_MOST)
    sizes: list[int] = [1, 2, 4, *range(8, 256, 8), *range(256, _CAPTURED_MOST + 1, 16)]
    return len([size for size in sizes if size <= most]) / len(sizes)


def _pool_bytes(
    full: FullSettings,
    weights: int,
    profile: ProfilePeak,
    outside: Interval,
    estimated: Interval,
    network: ServedNetwork,
    layers: tuple[LayerCache, ...],
) -> tuple[int, int, int]:
    """Return the bytes of the pool with its interval: low, typical, high."""
    device = full.device
    least, most = _TOWER_INTERVAL if network.has_towers else _PROFILE_INTERVAL
    lowest = max(profile.forward_bytes, profile.sampler_bytes)
    if profile.bytes > lowest:
        most = _COMPILE_MOST
    if full.engine.name == "vllm":
        budget = int(device.capacity_bytes * full.utilization)
        typical = budget - weights - profile.bytes - outside.bytes - estimated.bytes
        low = budget - weights - int(profile.bytes * most) - outside.high_bytes - estimated.high_bytes
        high = budget - weights - int(lowest * least) - outside.low_bytes - estimated.low_bytes
        return low, typical, high
    free = device.capacity_bytes - full.first_bytes
    if full.engine.name == "sglang":
        typical = int(free * full.utilization) - weights - sglang.towers_bytes(network)
        typical = int(typical * sglang.part_for_tokens(layers))
        margin = int(abs(typical) * sglang.interval(full.quantization))
        return typical - margin, typical, typical + margin
    assert network.shape is not None
    cache = plan_sectors(
        network.shape,
        layers,
        available_bytes=int((free - weights - outside.bytes - cublas_workspace_bytes(device)) * full.utilization),
        batch_tokens=full.max_batched_tokens,
        requests=full.max_seqs,
        flash=device.capability >= _AMPERE,
    )
    return cache.bytes - _LOADING_BYTES, cache.bytes, cache.bytes


def find_unsupported(full: FullSettings, network: ServedNetwork) -> str | None:
    """Return why this version of vLLM does not serve such weights, or on such a card; None if it does."""
    version, device, weights = full.engine.version, full.device, full.quantization
    since = quantizes_from(weights.name) if weights.online else None
    if since is not None and (full.engine.name != "vllm" or not is_from(version, since)):
        return f"{full.engine} is not known to turn 16-bit weights into {weights.name} ones, as vllm {since} does"
    if full.engine.name != "vllm":
        return None
    has = ".".join(map(str, device.capability))
    for name, what in (("any", ""), (weights.name, f" {weights.name} weights")):
        least, since = least_capability(version, name)
        if device.capability < least:
            from_on = f"{'.'.join(map(str, least))} on" + (f" (since {since})" if since else "")
            return f"compute capability {has} of {device.id} is too low: {full.engine} runs{what} from {from_on}"
    if full.element_bytes > 2 and weights.bits < 16 and weights.method not in _RUN_IN_FP32:
        return (
            f"on {device.id}, which has no bf16, {full.engine} computes such a network in fp32, and {weights.name} "
            "weights in 16 bits alone"
        )
    if full.has_fp8_cache and not _reads_fp8_cache(full, network):
        return f"compute capability {has} of {device.id} is too low for keys and values of this network in fp8"
    if full.stated.kv_dtype == "bf16" and device.capability < BF16_CAPABILITY:
        return f"compute capability {has} of {device.id} is too low for keys and values in bf16"
    without = first_without(weights.method)
    if without is not None and is_from(version, without):
        return f"{weights.method}, which {weights.name} weights need, is not in {full.engine}: it went with {without}"
    return None


def _reads_fp8_cache(full: FullSettings, network: ServedNetwork) -> bool:
    shape = known_shape(network)
    return reads_fp8_cache(
        full.engine.version,
        full.device.capability,
        kind=network.text_kind,
        head_dim=shape.head_dim,
        latent=shape.latent_rank > 0,
    )


def last_that_supports(full: FullSettings, network: ServedNetwork) -> str | None:
    """Return the newest older engine, as `vllm@0.27`, that serves such weights on such a card; None without one."""
    weights, version = full.quantization, full.engine.version
    if full.engine.name != "vllm" or (full.has_fp8_cache and not _reads_fp8_cache(full, network)):
        return None
    known = (*(least_capability(version, name)[1] for name in ("any", weights.name)), first_without(weights.method))
    for end in sorted((tuple(map(int, end.split("."))) for end in known if end is not None), reverse=True):
        older = parse_engine(f"vllm@{end[0]}.{end[1] - 1}")
        if find_unsupported(replace(full, engine=older), network) is None:
            return str(older).replace(" ", "@")
    return None


def _why_not(full: FullSettings, network: ServedNetwork, worst: StageMemory, needed: int, longest: int) -> str | None:
    """Return why the engine does not start; None if it does."""
    device = full.device
    free = device.capacity_bytes - full.first_bytes
    if (why := find_unsupported(full, network)) is not None:
        return why
    if full.engine.name == "vllm" and device.capacity_bytes * full.utilization > free:
        return (
            f"at the start {format_gib(free)} of {format_gib(device.capacity_bytes)} are free, less than "
            f"gpu-memory-utilization {full.utilization:g} asks for"
        )
    if worst.weights_bytes > free:
        return f"the weights take {format_gib(worst.weights_bytes)} of {format_gib(free)}"
    if worst.pool_bytes <= 0:
        after = f"weights of {format_gib(worst.weights_bytes)}"
        if full.engine.name == "vllm":
            after += f" and a step's peak of {format_gib(worst.profile.bytes)}"
        elif full.engine.name == "sglang":
            after += f"; by its rule {format_gib(int(free * full.utilization))} are for weights and cache"
        return f"no memory is left for the KV cache: {format_gib(-worst.pool_bytes)} too little after {after}"
    if needed > worst.pool_bytes and full.engine.name != "sglang":
        return (
            f"one request of {full.max_len:,} tokens needs {format_gib(needed)} of KV cache, and "
            f"{format_gib(worst.pool_bytes)} are available; the longest that fits has {longest:,} tokens"
        )
    return None


def _answer(full: FullSettings, worst: StageMemory, request: Request, error: str | None) -> Serving:
    facts = vllm_facts(full.engine.version)
    by_concurrency = full.engine.name == "vllm" and facts.tokens_by_concurrency

    def tokens(pool_bytes: int) -> int:
        return worst.layout.fill(pool_bytes).tokens(request, by_concurrency=by_concurrency)

    pool = worst.layout.fill(worst.pool_bytes)
    concurrency = pool.concurrency(request)
    if full.engine.name == "sglang":
        concurrency = min(concurrency, full.max_seqs)
    return Serving(
        engine=f"{SOURCE} of {full.engine}",
        starts=error is None,
        error=error,
        weights_bytes=worst.weights_bytes,
        activation_bytes=worst.profile.bytes,
        graphs_bytes=worst.graphs.bytes,
        outside_torch_bytes=worst.outside.bytes + full.first_bytes,
        kv_cache_bytes=max(0, worst.pool_bytes),
        kv_cache_tokens=tokens(worst.pool_bytes),
        block_tokens=worst.layout.block_tokens or None,
        blocks=pool.blocks,
        concurrency=None if concurrency == float("inf") else concurrency,
        max_len=full.max_len,
        low_tokens=tokens(worst.low_pool_bytes),
        high_tokens=tokens(worst.high_pool_bytes),
        compile_cache=None
        if full.engine.name != "vllm" or full.stated.eager
        else "warm"
        if full.stated.warm
        else "cold",
        compile_peak_bytes=worst.profile.compile_bytes or None,
    )


def _modelled(full: FullSettings) -> tuple[str, ...]:
    facts = vllm_facts(full.engine.version)
    return (
        "weights: the network's matrices, merged and divided as the engine does, in blocks of torch's allocator",
        f"peak of a step: the tensors of vLLM's profile run, as of {facts.since}",
        "memory outside torch's allocator, graphs: start-up logs (catalog/serving.toml)",
    )


def _assumed(network: ServedNetwork, full: FullSettings, cluster: Cluster) -> tuple[str, ...]:
    found = list(cluster.device.assumed)
    usual = parse_engine(full.engine.name)
    if full.engine.version[:2] > usual.version[:2]:
        found.append(f"{full.engine} is newer than what is known of it, and computed as {usual}")
    elif full.engine.name == "sglang" and full.engine.version != usual.version:
        found.append(f"{full.engine} is computed as {usual}, whose rule is known")
    if full.element_bytes > 2:
        found.append(f"{full.engine} computes such a network in fp32 on a card without bf16")
    if network.has_fp8_cache and full.has_fp8_cache and full.stated.kv_dtype == "auto":
        found.append("keys and values in fp8, as the checkpoint says; --kv-dtype bf16 keeps 16 bits")
    if network.is_rough:
        kind = network.config.get("model_type")
        source = "the network that transformers builds" if network.is_built else "its files"
        alike = "layers like Qwen3's" if network.shape is not None and network.shape.heads else "feed-forward layers"
        found.append(f"a {kind!r} network computes in {alike}; its weights are those of {source}")
    if network.has_rough_tower and not network.stored:
        found.append("the weights of the image encoder are estimated from its widths")
    if network.has_towers:
        found.append("the peak of the image encoder is not modelled; the interval allows 40 % of a step's peak")
    if full.engine.name == "sglang":
        found.append("sglang reserves memory by a rule; the peak of a step is not checked against it")
    if full.engine.name == "transformers":
        with_flash = full.device.capability >= _AMPERE
        found.append(f"transformers {'with' if with_flash else 'without'} flash attention, no logits processors")
    if full.compiles:
        found.append("a first start, which compiles the network; --warm: the cache has it from an earlier one")
    return tuple(found)
