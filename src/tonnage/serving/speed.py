"""Seconds of an engine's steps, and what requests see of them: time to first token, time of a token, tokens a second.

A step computes one token of each running request and some tokens of prompts.  Each product takes its operations at
the part of the peak that the card's kernels reach, or its weights at the part of the bandwidth, whichever is longer:
prompts are bound by arithmetic, single tokens by reading weights.  Keys and values are read once for each running
request.  Rates are those of the time model (catalog/times.toml).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Final

from tonnage.cluster import Cluster, Device
from tonnage.errors import CannotEstimate
from tonnage.serving.cache_layers import read_layers
from tonnage.serving.closed_form import ServingEstimate
from tonnage.serving.extras import accepted_tokens, predicting_weights
from tonnage.serving.kv_cache import lay_out
from tonnage.serving.lengths import Lengths
from tonnage.serving.quantization import Quantization
from tonnage.serving.settings import ServeSettings
from tonnage.serving.weights import Weight, list_weights
from tonnage.timing.fabrics import place_group, tensor_fabric
from tonnage.timing.rates import Card, auto_backend, bandwidth, card, peak_flops
from tonnage.timing.shape import Shape
from tonnage.timing.software import software

INTERVAL: Final = (0.75, 1.35)
"""Seconds of a step / the predicted ones: assumed.  Three published figures are within 0.93 and 1.16
(docs/reference/serving.md), too few for an interval of their own."""

_KERNELS: Final = 6
"""Kernels of a compiled layer beside its products: norms, rotation, writing the cache, attention, activation."""

_EAGER_KERNEL_SECONDS: Final = 8e-6
"""Seconds of the host for each kernel without CUDA graphs: assumed, a third of the training code's."""

_STREAM_PASSES: Final = 10
"""Reads and writes of the residual stream in a compiled layer beside its products."""

_CALL_SECONDS: Final = 1e-5
"""Seconds of an engine's own all-reduce before its first byte: assumed, half of NCCL's."""

_NOT_MULTIPLIED: Final = ("embedding", "norms and biases", "rotation table", "latent up, absorbed")
"""Weights that are looked up, or too small to count."""

_ALL_REDUCES: Final = 2
"""All-reduces of a layer among tensor-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class ServingSpeed:
    """Speed of all replicas under a load of as many requests as run together."""

    running: float
    """Requests that run together, over all replicas."""
    step_seconds: float
    """Seconds of a step under the load, in which a request gets `tokens_per_step`."""
    prefill_tokens_per_second: float
    """Tokens of prompts a second where nothing else is computed."""
    decode_tokens_per_second: float
    """Tokens of answers a second where no prompt is computed."""
    output_tokens_per_second: float
    """Tokens of answers a second with the prompts that they need."""
    requests_per_second: float
    """Requests that end each second."""
    first_token_seconds: float
    """Time to the first token of the median prompt under the load."""
    first_token_low_seconds: float
    """The same of the median prompt on an idle engine, in a fast case."""
    first_token_high_seconds: float
    """The same of a prompt at the 95th percentile behind another one, in a slow case."""
    tokens_per_step: float
    """Tokens that a decoding request gets in a step: more than one where drafts are accepted."""
    bound_by: str
    """Largest part of a step under the load: `memory`, `compute` or `communication`."""

    @property
    def token_seconds(self) -> float:
        """Return the seconds between two tokens of a request under the load."""
        return self.step_seconds / self.tokens_per_step


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Cost of one step on one rank, in seconds."""

    compute: float
    memory: float
    communication: float
    launches: float

    @property
    def seconds(self) -> float:
        """Return all seconds."""
        return self.compute + self.memory + self.communication + self.launches

    @property
    def bound_by(self) -> str:
        """Return the largest part by name; launches count as memory, as gaps in which nothing is read."""
        parts = {
            "compute": self.compute,
            "memory": self.memory + self.launches,
            "communication": self.communication,
        }
        return max(parts, key=lambda name: parts[name])


def step_cost(
    estimate: ServingEstimate, *, decoding: float, context: float, prompt: float = 0.0, drafted: int = 0
) -> StepCost:
    """Return the cost of a step of one replica: so many decoding requests with `context` tokens each, and so many
    tokens of prompts.  Of each decoding request `drafted` tokens are verified, too.

    Raises CannotEstimate for a card or a network whose rates are not known.
    """
    full, shape = estimate.settings, estimate.network.shape
    if shape is None:
        raise CannotEstimate("The layers of this network are not known, so neither is the speed of a step.")
    if full.element_bytes > 2:
        raise CannotEstimate("The speed of an engine that computes in fp32 is not known.")
    stated, device = full.stated, full.device
    known = card(device)
    rate = bandwidth(device) * known.memory
    weights = list_weights(shape, tp=stated.tp, ep=full.expert_ranks if stated.ep > 1 else 1, padded_experts=False)
    computed = decoding * (1 + drafted)
    products = _products(weights, shape, full.quantization, computed, prompt, device, known, rate, stated.ep)
    kv_bytes = sum(layer_bytes * tokens for layer_bytes, tokens in _read_tokens(estimate, context))
    memory = products[1] + decoding * kv_bytes / rate
    rows = computed + prompt
    memory += shape.layers * _STREAM_PASSES * rows * shape.hidden * 2 / rate
    compute = products[0] + _attention_seconds(shape, prompt, context, device, known, stated.tp)
    launches = shape.layers * _KERNELS * known.pass_seconds
    if stated.eager:
        launches += shape.layers * (_KERNELS + 4) * _EAGER_KERNEL_SECONDS
    return StepCost(
        compute=compute,
        memory=memory,
        communication=_all_reduce_seconds(shape, rows, estimate.cluster, known, stated.tp),
        launches=launches,
    )


def _read_tokens(estimate: ServingEstimate, context: float) -> Iterable[tuple[int, float]]:
    """Yield the bytes of a token of each layer group with the tokens of a request that are read, over all stages."""
    layout = estimate.worst.layout
    stages = estimate.settings.stated.pp
    for group in layout.groups:
        if group.kind == "state":
            yield layout.page_bytes * group.layers * stages, 2.0  # read and written
            continue
        token_bytes = (layout.block_bytes if len(layout.groups) == 1 else layout.page_bytes * group.layers) / (
            group.block_tokens
        )
        read = min(context, group.window) if group.window else context
        yield int(token_bytes) * stages, read


def _products(
    weights: Iterable[Weight],
    shape: Shape,
    quantization: Quantization,
    decoding: float,
    prompt: float,
    device: Device,
    known: Card,
    rate: float,
    ep: int,
) -> tuple[float, float]:
    """Return the seconds of products that arithmetic bounds, and of those that reading weights bounds."""
    compute = memory = 0.0
    for weight in weights:
        is_head = weight.name == "head" or (weight.name == "embedding" and shape.tied)
        if weight.name in _NOT_MULTIPLIED and not is_head:
            continue
        rows = decoding + prompt
        if is_head:
            rows = decoding + min(prompt, 1.0)  # only the last token of a prompt gets its words
        elements, read = float(weight.elements), float(weight.bytes(quantization))
        if weight.kind == "expert":
            chosen = shape.experts_per_token / shape.experts
            touched = 1 - (1 - chosen) ** rows
            elements, read = elements * chosen, read * touched
        dtype = quantization.computes_as if weight.is_quantized(quantization) else "bf16"
        flops = 2 * elements * rows
        working = flops / _product_rate(device, known, dtype)
        passing = read / rate
        filling = weight.count * known.fill_seconds
        if working >= passing:
            compute += working + filling
        else:
            memory += passing + filling
    return compute, memory


def _product_rate(device: Device, known: Card, dtype: str) -> float:
    """Return the operations per second of large products in a dtype; in 16 bits where the card has none of it."""
    if dtype == "fp4" and device.peak_flops.fp4 is not None:
        return peak_flops(device, "fp4") * known.fp4
    if dtype in ("fp8", "int8") and getattr(device.peak_flops, dtype) is not None:
        return peak_flops(device, dtype) * known.fp8
    half = "bf16" if device.peak_flops.bf16 is not None else "fp16"
    reached = known.matmul
    if known.flops_per_joule is not None and device.watts is not None:
        reached = min(reached, known.flops_per_joule * device.watts / peak_flops(device, half))
    return peak_flops(device, half) * reached


def _attention_seconds(shape: Shape, prompt: float, context: float, device: Device, known: Card, tp: int) -> float:
    """Return the seconds of attention among the tokens of prompts, each of which sees half of its own on average."""
    if not prompt:
        return 0.0
    half = "bf16" if device.peak_flops.bf16 is not None else "fp16"
    parts = {name: forward for name, forward, _ in known.attention}
    backend = "flash" if "flash" in parts else auto_backend(device, half)
    seen = min(context, prompt) / 2
    if shape.window is not None:
        seen = shape.window_fraction * min(seen, shape.window) + (1 - shape.window_fraction) * seen
    flops = 2 * prompt * seen * shape.heads / tp * (shape.head_dim + shape.value_dim) * shape.layers
    filled = prompt / (prompt + known.attention_half_tokens)
    return flops / (peak_flops(device, half) * parts[backend] * filled)


def _all_reduce_seconds(shape: Shape, rows: float, cluster: Cluster, known: Card, tp: int) -> float:
    if tp < 2:
        return 0.0
    group = place_group(tp, 1, cluster)
    fabric = tensor_fabric(cluster, known, software("eager"), piped=False, far=group.far)
    if not group.far:
        fabric = replace(fabric, half_bytes=0.0)  # an engine's own all-reduce of a few megabytes needs no ring
    each = _CALL_SECONDS + fabric.hops(group) + 2 * fabric.moving(group, rows * shape.hidden * 2)
    return _ALL_REDUCES * shape.layers * each


def serving_speed(estimate: ServingEstimate, lengths: Lengths, concurrency: int) -> ServingSpeed:
    """Return the speed of all replicas where `concurrency` requests of these lengths are always there.

    Prompts are computed in the steps in which others decode; where prompts need more steps than answers, they decide
    how long a request takes.  Raises CannotEstimate for a card or a network whose rates are not known.
    """
    full = estimate.settings
    replicas = full.stated.dp
    gained = _tokens_per_step(full.stated)
    if full.stated.no_prefix_caching:
        lengths = replace(lengths, prefix=0)
    mean, output = lengths.means_within(estimate.settings.max_len)
    prompt = mean - lengths.prefix
    running = running_together(estimate, lengths, concurrency) / replicas
    context = mean + output / 2
    room = max(1.0, full.max_batched_tokens - running)
    cycle = max(output / gained, running * prompt / room)
    share = min(room, running * prompt / cycle)
    loaded = _drafted_step(estimate, decoding=running, context=context, prompt=share)
    alone = _drafted_step(estimate, decoding=running, context=context)
    chunk = min(full.max_batched_tokens, max(prompt, 1.0))
    many = float(full.max_batched_tokens)
    filling = step_cost(estimate, decoding=0, context=max(prompt, 1.0), prompt=many)
    first = _first_token(estimate, lengths.p50 - lengths.prefix, running, context)
    lone = step_cost(estimate, decoding=0, context=float(lengths.p50), prompt=min(chunk, float(lengths.p50))).seconds
    slow = _first_token(estimate, lengths.p95 - lengths.prefix, running, context) + loaded.seconds
    per_second = replicas * running / (cycle * loaded.seconds)
    return ServingSpeed(
        running=running * replicas,
        step_seconds=loaded.seconds,
        prefill_tokens_per_second=replicas * many / filling.seconds,
        decode_tokens_per_second=replicas * running * gained / alone.seconds,
        output_tokens_per_second=per_second * output,
        requests_per_second=per_second,
        first_token_seconds=first,
        first_token_low_seconds=min(first, lone) * INTERVAL[0],
        first_token_high_seconds=max(first, slow) * INTERVAL[1],
        tokens_per_step=gained,
        bound_by=loaded.bound_by,
    )


def _tokens_per_step(stated: ServeSettings) -> float:
    """Return the mean tokens of a decoding request in a step.  Raises CannotEstimate without a stated acceptance."""
    if stated.draft is None:
        return 1.0
    if stated.acceptance is None:
        raise CannotEstimate("How many drafts are accepted is not stated; give --acceptance.")
    return accepted_tokens(stated.acceptance, stated.draft_tokens or 1)


def _drafted_step(estimate: ServingEstimate, *, decoding: float, context: float, prompt: float = 0.0) -> StepCost:
    """Return the cost of a step with the drafts that it verifies, and of drafting them one after another."""
    full, network = estimate.settings, estimate.network
    stated, drafted = full.stated, full.stated.draft_tokens or 0
    step = step_cost(estimate, decoding=decoding, context=context, prompt=prompt, drafted=drafted)
    if stated.draft == "mtp" and network.shape is not None:
        known = card(full.device)
        rate = bandwidth(full.device) * known.memory
        shape = network.shape
        layer = predicting_weights(shape, full, ep=full.expert_ranks if stated.ep > 1 else 1)
        head = Weight(name="head", rows=shape.vocab // stated.tp, columns=shape.hidden, kind="other")
        compute, memory = _products(
            [*layer, head], shape, full.quantization, decoding, 0.0, full.device, known, rate, stated.ep
        )
        return replace(step, compute=step.compute + drafted * compute, memory=step.memory + drafted * memory)
    if network.draft is not None:
        layout = lay_out(read_layers(network.draft.config, element_bytes=full.kv_element_bytes, tp=stated.tp))
        alone = replace(
            estimate,
            network=network.draft,
            settings=replace(full, quantization=network.draft.published, stated=stated.changed(ep=1)),
            worst=replace(estimate.worst, layout=layout),
        )
        each = step_cost(alone, decoding=decoding, context=context)
        return StepCost(
            **{item.name: getattr(step, item.name) + drafted * getattr(each, item.name) for item in fields(StepCost)}
        )
    return step


def _first_token(estimate: ServingEstimate, prompt: float, running: float, context: float) -> float:
    """Return the seconds of a prompt's own steps among requests that decode, and half a step of waiting."""
    prompt = max(prompt, 1.0)
    room = max(1.0, estimate.settings.max_batched_tokens - running)
    chunks = ceil(prompt / room)
    each = _drafted_step(estimate, decoding=running, context=max(context, prompt), prompt=prompt / chunks).seconds
    waiting = _drafted_step(estimate, decoding=running, context=context).seconds / 2
    return waiting + chunks * each


def running_together(estimate: ServingEstimate, lengths: Lengths, concurrency: int) -> float:
    """Return how many of `concurrency` requests run together, by the pool and the engine's limit."""
    replicas = estimate.settings.stated.dp
    return min(concurrency, replicas * min(estimate.settings.max_seqs, held_requests(estimate, lengths)))


def held_requests(estimate: ServingEstimate, lengths: Lengths) -> float:
    """Return the requests of these lengths that the pool of one replica holds.

    A running request has its prompt and, on average over geometric answers, as many tokens as the mean answer.
    """
    from tonnage.serving.kv_cache import Request

    layout, pool = estimate.worst.layout, estimate.pool
    if not layout.groups:
        return float("inf")
    length = max(1, round(sum(lengths.means_within(estimate.settings.max_len)) - lengths.prefix))
    batched = estimate.request.batched_tokens
    shared = layout.request_blocks(Request(length=lengths.prefix, batched_tokens=batched)) if lengths.prefix else 0
    return max(0, pool.blocks - shared) / layout.request_blocks(Request(length=length, batched_tokens=batched))
