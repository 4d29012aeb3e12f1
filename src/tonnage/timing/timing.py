"""How long a step takes: operations, exchanges, copies and pauses put one after the other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import log2
from typing import Final

from tonnage.cluster import Cluster, Device
from tonnage.timing import compiled, operations, rates, schedule
from tonnage.timing import host as on_host
from tonnage.timing.adapted import has_adapter
from tonnage.timing.collectives import Fabric, Group, far_bytes_per_second, has_links, near_bytes_per_second
from tonnage.timing.operations import ELEMENT_BYTES, Passes, Slice, kept_dtype
from tonnage.timing.rates import Card, Seconds
from tonnage.timing.shape import Shape
from tonnage.timing.software import CHOOSING, Software
from tonnage.timing.work import Work

OPTIMIZER_BYTES: Final = {
    "adamw": 80,
    "adamw-foreach": 80,
    "adamw-loop": 69,
    "adamw-fused": 28,
    "adamw-8bit": 16,
    "paged-adamw": 76,
    "paged-adamw-8bit": 16,
    **dict.fromkeys(("adamw-4bit", "adamw-8bit-ao", "adamw-fp8-ao"), 40),
    "adafactor": 140,
    "lion": 36,
    "lion-8bit": 14,
    "sgd": 32,
    "sgd-plain": 12,
    "muon": 60,
}
"""Bytes that an optimizer moves for each fp32 weight: 28 are weight, gradient and two states read and three of them
written; of the others the measured seconds of 61 M fp32 weights on an H200 relative to the fused kernel's
(measurements/h200-2026-11-20.jsonl, facts `op optimizer ...`); 8-bit ones by what they read and write.  Lion's was
guessed, and its recorded step says 33; paged AdamW's is what its recorded step has beyond its passes, 22.5 ms for
1.24 billion weights, less what steps of three other optimizers of bitsandbytes are longer than predicted
(measurements/h200-2026-11-26.jsonl, compared in tests/benchmarks/test_time_benchmark.py)."""

UNMEASURED: Final = ("adamw-4bit", "adamw-8bit-ao", "adamw-fp8-ao")
"""Optimizers whose bytes are a guess, with no source: torchao's, compiled for each parameter."""

_NARROW: Final = 0.6
"""Seconds of an optimizer with states of 16 bits / with states of 32, which are twice the bytes: 0.60 of the kernels
of AdamW (foreach) in steps of 1.7 and 1.2 billion weights on an H200, 0.56 to 0.68 of `op optimizer` for Adam and SGD
on it and on an H100 (measurements)."""

_BY_BYTES: Final = ("adafactor", "muon")
"""Optimizers of which that was not seen: with half the bytes they take half as long (Adafactor: two steps of 8
billion weights within 4 %)."""

OPTIMIZER_CYCLES: Final = {"adamw-8bit": 7.2, "paged-adamw-8bit": 7.2, "lion-8bit": 4.1}
"""Cycles of a multiprocessor for each weight, of bitsandbytes' optimizers that look each new state up in a table of
256: that takes longer than moving it.  27.7 ps a weight of Adam's kernel on an H200 and 15.7 of Lion's, at its 132
multiprocessors' highest clock (measurements/h200-2026-11-26.jsonl); as long with weights of 16 bits."""

_USUAL_CLOCK: Final = 1.7e9
"""Of a card whose clock the catalog does not have."""

LAUNCHES: Final = {"adamw-loop": 14, "muon": 60, "adafactor": 30, **dict.fromkeys(UNMEASURED, 60)}
"""Kernels that an optimizer launches for each tensor, where it takes them one by one.  Of torchao's what one step
says in which the host decided: 8-bit AdamW of 290 tensors took 0.18 s more than torch's, on an H200 as all these."""

_LAUNCH_SECONDS: Final = 10e-6
"""Of the host for a kernel of an optimizer, which launches them in a loop without modules or autograd between."""

GATHERED_TENSOR_SECONDS: Final = 75e-6
_UPDATED_TENSOR_SECONDS: Final = 200e-6
"""Of the host under FSDP2, for each tensor of weights each time it is gathered, and for each that an optimizer takes
as a DTensor without a fused kernel: Llama 3.2 1B on an H200 with adapters (368 tensors in layers, 224 of them
trained) took 0.177 s a step for 0.094 without FSDP2, and whole 0.125 for 0.123
(measurements/h200-2026-11-26b.jsonl)."""

_GATHERED_4BIT_SECONDS: Final = 500e-6
_INT8_PRODUCT_SECONDS: Final = 600e-6
"""The same of a tensor that bitsandbytes quantized, and of a pass through a product by LLM.int8: what one step each
has beyond all else (QLoRA of Llama 3.2 1B on an H200, as above)."""

_HOOKS_SECONDS: Final = 3.1e-3
"""Of the host for each pass through a layer whose weights DeepSpeed's stage 3 gathers, by hooks around each module:
two steps of a network of 32 layers on an H200 (measurements/h200-2026-11-26.jsonl) took 3.0 and 3.3 ms more than by
stages 0 to 2, which have none."""

_ATTENTION_NAMES: Final = ("attention", "scores", "softmax", "rotation")
_BEFORE_ATTENTION: Final = ("qkv", "query", "key", "value", "query down", "query up", "latent down", "latent up")
_NAMED: Final = {"latent": ("query up", "latent up", "rotation"), "norms": ("norms", "activation", "clamp")}
_BY_OPERATION: Final = ("selective", "alternate")
_AROUND_EXPERTS: Final = ("router", "shared up", "shared down", "routing", "norms", "activation", "clamp")
_LAST: Final = {"full": "down", "attention-module": "output"}
"""Of what runs again whole: its last product."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The seconds of one optimizer step, in parts that sum to `step_seconds`."""

    step_seconds: float
    """From the begin of a step to the begin of the next."""
    low_seconds: float
    """Lower end of the interval: 8 of 10 rows that calibration did not see were within it."""
    high_seconds: float
    """Upper end."""
    compute_seconds: float
    """Forward and backward passes of the slowest stage, less what runs again."""
    recompute_seconds: float
    """Forward passes that run again in backward."""
    communication_seconds: float
    """Exchanges that computation does not hide."""
    bubble_seconds: float
    """Waiting for other stages of the pipeline."""
    optimizer_seconds: float
    """The optimizer's step, with the norm of gradients."""
    copy_seconds: float
    """Copies to and from the host that computation does not hide."""
    host_seconds: float
    """Waiting for the host, which launches kernels more slowly than the card runs them."""
    tokens_per_second_per_gpu: float
    """Tokens of the step / seconds / GPUs."""
    mfu: float
    """(6 P + 12 L H s) x tokens / seconds / GPUs / dense peak of the dtype of matrix products; P active weights
    (4 instead of 6 for frozen ones), H width of the queries, s tokens of a sequence, no allowance for the mask."""
    bound_by: str
    """`compute`, `memory`, `communication` or `host`: which of them takes most of the step."""
    assumed: tuple[str, ...] = ()
    """What could not be known, in sentences."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """Seconds of a part of the network for one micro-batch on one rank."""

    card: Seconds
    """Forward and backward."""
    again: Seconds
    """What runs again."""
    repeats: float
    """Layers of it that run again."""
    exchange: float
    """Traffic of tensor, context and expert parallelism that nothing hides."""
    waits: float
    """Latencies of its collectives."""
    calls: float = 0.0
    """Passes through compiled code, that launches all of its kernels; 0: none is compiled."""

    def seconds(self, software: Software) -> float:
        """As long as the card works or as long as the host launches and waits, whichever is longer."""
        return max(self.card.total + self.again.total + self.exchange, self.host(software))

    def waiting(self, seconds: float) -> "_Pass":
        """The same, in which the host waits for so many more."""
        return _Pass(self.card, self.again, self.repeats, self.exchange, self.waits + seconds, self.calls)

    def host(self, software: Software) -> float:
        """Of the host: launching each kernel, waiting for each collective, what it takes to run a layer again."""
        kernels, looped = (self.card.kernels + self.again.kernels), (self.card.looped + self.again.looped)
        if self.calls:
            launching = kernels * software.compiled_kernel_seconds + self.calls * software.compiled_call_seconds
        else:
            in_loops = software.looped_kernel_seconds or software.kernel_seconds
            launching = (kernels - looped) * software.kernel_seconds + looped * in_loops
        return launching + self.repeats * software.again_seconds + self.waits


@dataclass(frozen=True, slots=True)
class _Stages:
    """Passes of the stages of a pipeline for one micro-batch."""

    seconds: tuple[float, ...]
    """Of each stage."""
    slowest: float
    """Of the slowest one, of which all that follows is."""
    card: float
    """Of the card, without what runs again."""
    again: float
    """What runs again."""
    computing: float
    """Of products and attention, also again."""
    passing: float
    """Of passes over memory, also again."""
    exchange: float
    """Of traffic that nothing hides."""
    host: float
    """Of the host."""
    layer: float
    """Of an average layer."""


@dataclass(frozen=True, slots=True)
class _Laid:
    """What is the same in all steps that divide, exchange and update weights alike."""

    fabric: Fabric
    """Links among data-parallel ranks."""
    gathering: "_Gathering | None"
    """Exchanges of sharded weights and their gradients; None: there are none."""
    averaging: "_Averaging | None"
    """Exchanges of gradients among ranks with the same weights; None: there are none."""
    weights: float
    """Of one rank before data parallelism divides them."""
    trained: float
    """Of these, those that are trained."""
    unpacking: float
    """Seconds of copying gathered weights out of the buffer that they came in, for an average micro-batch."""
    update: "_Update"
    """The optimizer's step."""
    host_update: float
    """Seconds of its part on the host."""
    token_flops: float
    """Operations for each token of a step, by the usual count."""
    interval: tuple[float, float, tuple[str, ...]]
    """Factors of the interval's ends, and what is assumed."""
    waiting_interval: tuple[float, float, tuple[str, ...]]
    """The same of steps in which the card waits for the host."""


def timing(shape: Shape, work: Work, cluster: Cluster, software: Software) -> Timing:
    """The seconds of a step.  Raises CannotEstimate where a rate that matters is not known."""
    reached = rates.card(cluster.device)
    split = split_of(shape, work, software)
    stages = _stages(shape, work.of_layers, cluster, reached, software, split, _gathering_host(shape, work))
    laid = _laid(shape, work.of_weights, cluster, reached, software)
    m, unpacking = work.grad_accum, laid.unpacking
    sends = _sends(shape, work, cluster, laid.fabric, software)
    gathers = 0.0 if laid.gathering is None else laid.gathering.seconds(work, stages.layer)
    per_micro_batch = sends + gathers + software.micro_batch_seconds
    busy = schedule.pipeline_seconds(
        tuple([seconds + per_micro_batch + unpacking for seconds in stages.seconds]), m, work.virtual_stages
    )
    stalls = _stalls(work, software)
    averaging = 0.0 if laid.averaging is None else laid.averaging.seconds(work, software, stages.card * 2 / 3)
    ahead = m * max(stages.slowest - stages.host, 0.0)
    card_update = laid.update.seconds(ahead)
    update = card_update + laid.host_update
    copies = on_host.copy_seconds(shape, work, cluster, laid.weights, laid.trained, stages.slowest)
    step = busy + stalls + averaging + update + copies
    exchanged = m * (stages.exchange + per_micro_batch) + stalls + averaging
    bubble = busy - m * (stages.slowest + per_micro_batch + unpacking)
    compute = m * (stages.card + unpacking)
    recompute = m * stages.again
    known = compute + recompute + exchanged + bubble + update + copies
    host = max(step - known, 0.0)
    bounds = {
        "compute": m * stages.computing,
        "memory": m * (stages.passing + unpacking) + card_update,
        "communication": exchanged + copies,
        "host": host + laid.host_update,
    }
    peak = rates.peak_flops(cluster.device, work.dtype)
    gpus, tokens = work.axes.ranks, work.step_tokens
    waiting = host / step
    low, high, assumed = laid.waiting_interval if waiting > WAITING else laid.interval
    if waiting > WAITING:
        assumed = (of_hosts(waiting), *assumed)
    return Timing(
        step_seconds=step,
        low_seconds=step * low,
        high_seconds=step * high,
        compute_seconds=compute,
        recompute_seconds=recompute,
        communication_seconds=exchanged,
        bubble_seconds=bubble,
        optimizer_seconds=update,
        copy_seconds=copies,
        host_seconds=host,
        tokens_per_second_per_gpu=tokens / step / gpus,
        mfu=laid.token_flops * tokens / step / gpus / peak,
        bound_by=max(bounds, key=lambda name: bounds[name]),
        assumed=assumed,
    )


def together(found: Sequence[Timing], tokens: float, assumed: str) -> Timing:
    """The Timing of stacks of layers that a step runs one after the other, of which none hides another's exchanges.

    `tokens`: of the step on each rank, in which its speed is told.
    """
    seconds = {name: sum(getattr(one, name) for one in found) for name in _SUMMED}
    step = seconds["step_seconds"]
    low, high = STACKED
    ends = {"low_seconds": min(seconds["low_seconds"], step * low)}
    ends["high_seconds"] = max(seconds["high_seconds"], step * high)
    longest = max(found, key=lambda one: one.step_seconds)
    return replace(
        longest,
        **(seconds | ends),
        tokens_per_second_per_gpu=tokens / step,
        mfu=sum(one.mfu * one.step_seconds for one in found) / step,
        assumed=(*longest.assumed, assumed),
    )


_SUMMED: Final = tuple(item.name for item in fields(Timing) if item.name.endswith("_seconds"))

STACKED: Final = (0.7, 1.7)
"""Measured / predicted of the six steps of ViT-large and T5-base on our H200: the least and the most."""


def model_flops(shape: Shape, work: Work) -> float:
    """Operations of a step that the network needs by the usual count: (6 P + 12 L H s) a token; see Timing.mfu."""
    return _token_flops(shape, work) * work.step_tokens


def _token_flops(shape: Shape, work: Work) -> float:
    weights = (4 if work.lora_rank else 6) * shape.active_parameters
    attention = (8 if work.lora_rank else 12) * shape.layers * shape.query_width * work.seq_len / work.packing
    return weights + attention


@lru_cache(maxsize=8192)
def _laid(shape: Shape, work: Work, cluster: Cluster, reached: Card, software: Software) -> _Laid:
    """`work` is `Work.of_weights`."""
    fabric = data_fabric(cluster, reached, software)
    weights = _rank_weights(shape, work)
    trained = trained_weights(shape, work, weights)
    return _Laid(
        fabric=fabric,
        gathering=_gathering(shape, work, cluster, fabric),
        averaging=_averaging(shape, work, cluster, fabric, software, weights),
        weights=weights,
        trained=trained,
        unpacking=_unpacking(work, cluster, reached, weights),
        update=_update(shape, work, cluster, reached, trained),
        host_update=on_host.update_seconds(trained / work.state_shards, work, cluster),
        token_flops=_token_flops(shape, work),
        interval=_interval(shape, work, cluster, reached, software, waits=False),
        waiting_interval=_interval(shape, work, cluster, reached, software, waits=True),
    )


@lru_cache(maxsize=8192)
def _stages(
    shape: Shape,
    work: Work,
    cluster: Cluster,
    reached: Card,
    software: Software,
    split: schedule.Split,
    gathering: float,
) -> _Stages:
    """What the stages compute; `work` is `Work.of_layers`, `gathering` what the host waits besides in each layer."""
    layers, embedding, head = _network(shape, work, cluster, reached, software)
    layers = layers.waiting(gathering)
    ends = _ends(split, embedding, head)
    layer_seconds = layers.seconds(software)
    stages = [count * layer_seconds for count in split.layers]
    for place, end in ends:
        stages[place] += end.seconds(software)
    slowest = stages.index(max(stages))
    own = _own(split.layers[slowest], layers, [end for place, end in ends if place == slowest])
    return _Stages(
        seconds=tuple(stages),
        slowest=max(stages),
        card=own.card.total,
        again=own.again.total,
        computing=own.card.computing + own.again.computing,
        passing=own.card.passing + own.again.passing,
        exchange=own.exchange,
        host=own.host(software),
        layer=layer_seconds,
    )


def _own(layers: int, each: _Pass, ends: Iterable[_Pass]) -> _Pass:
    """All that one stage computes."""
    card, again = each.card * layers, each.again * layers
    exchange, waits = each.exchange * layers, each.waits * layers
    for end in ends:
        card, again = card + end.card, again + end.again
        exchange, waits = exchange + end.exchange, waits + end.waits
    return _Pass(card, again, each.repeats * layers, exchange, waits, each.calls * layers)


def _gathering_host(shape: Shape, work: Work) -> float:
    """Seconds of the host for a layer of a micro-batch, whose tensors FSDP2 gathers one by one."""
    if not work.unpacked:
        return 0.0
    each = _tensors(shape, work) * GATHERED_TENSOR_SECONDS
    each += _modules(shape) * _GATHERED_4BIT_SECONDS * work.quantized
    return each * (2 if work.gathers_again else 1)


def _modules(shape: Shape) -> int:
    return 7 if shape.gated else 6


def _tensors(shape: Shape, work: Work, *, trained: bool = False) -> int:
    """Tensors of a layer, or those of them that are trained: matrices and norms, or two of each adapter."""
    frozen = _modules(shape) + shape.norms
    if not work.lora_rank:
        return frozen
    part = Slice(tokens=1, seq_len=1)
    adapters = 2 * sum(has_adapter(one.name, work.adapted) for one in operations.products(shape, part))
    return adapters if trained else frozen + adapters


# ---- one micro-batch -------------------------------------------------------------------------------------------


def _layer(shape: Shape, part: Slice) -> Passes:
    return compiled.layer(shape, part) if part.compiled else operations.layer(shape, part)


def _seconds(passes: tuple[operations.Operation, ...], part: Slice, device: Device, reached: Card) -> Seconds:
    return rates.seconds(passes, device, reached, backend=part.backend, seq_len=part.seq_len)


@dataclass(frozen=True, slots=True)
class _Again:
    """What runs again in backward."""

    recomputed: str
    """Of a layer, of `work.RECOMPUTED`."""
    fraction: float
    """Part of the layers."""
    stops_early: bool
    """Whether without the last product."""


@lru_cache(maxsize=8192)
def _computing(
    shape: Shape,
    part: Slice,
    what: _Again,
    device: Device,
    software: Software,
    loss: str,
    accumulated_bytes: int,
    experts_even: bool,
) -> tuple[Seconds, Seconds, Seconds, Seconds]:
    """Seconds of the card for an average layer (both passes; what runs again), the embedding and the head.

    Many layouts give a rank as much to compute, whatever they exchange.
    """
    reached = rates.card(device)
    both, embedding, head = _parts(shape, part, device, reached, loss)
    again = _again(shape, part, device, reached, what)
    weights = operations.layer_weights(shape, part)
    if shape.experts and shape.dense_layers:
        with_experts = replace(part, experts=True)
        routed, _, _ = _parts(shape, with_experts, device, reached, loss)
        routed_again = _again(shape, with_experts, device, reached, what)
        share = shape.expert_layers / shape.layers
        both = both * (1 - share) + routed * share
        again = again * (1 - share) + routed_again * share
        weights = weights * (1 - share) + operations.layer_weights(shape, with_experts) * share
    if accumulated_bytes and part.trained:
        adding = weights * accumulated_bytes
        both = both + Seconds(memory=adding / (rates.bandwidth(device) * reached.memory), kernels=4)
    if what.recomputed in _BY_OPERATION:
        both, again = (one + Seconds(kernels=CHOOSING * one.kernels) for one in (both, again))
    of_experts = software.fused_expert_factor if part.experts_fused else software.expert_factor
    if experts_even:
        of_experts = software.matmul_factor
    factors = (software.matmul_factor, software.attention_factor, software.memory_factor, of_experts)
    return (
        both.scaled(*factors),
        again.scaled(*factors) * what.fraction,
        embedding.scaled(*factors),
        head.scaled(*factors) * shape.predicted,
    )


@lru_cache(maxsize=8192)
def _parts(shape: Shape, part: Slice, device: Device, reached: Card, loss: str) -> tuple[Seconds, Seconds, Seconds]:
    """Seconds of a layer, of the embedding and of the head, both passes."""

    def both(passes: Passes) -> Seconds:
        return _seconds(passes.forward, part, device, reached) + _seconds(passes.backward, part, device, reached)

    one = _layer(shape, part)
    return both(one), both(operations.embedding(shape, part)), both(operations.head(shape, part, loss))


def _again(shape: Shape, part: Slice, device: Device, reached: Card, what: _Again) -> Seconds:
    """Seconds of what of a layer runs again, where it does."""
    forward = _layer(shape, part).forward
    running = tuple(op for op in forward if _runs_again(op, what.recomputed, what.stops_early))
    again = _seconds(running, part, device, reached)
    if what.recomputed == "alternate":
        again += _seconds(tuple(op for op in forward if op.family == "matmul"), part, device, reached) * 0.5
    return again


def _runs_again(op: operations.Operation, recomputed: str, stops_early: bool) -> bool:
    if stops_early and op.name == _LAST.get(recomputed):
        return False
    if recomputed == "attention":
        return op.name in _ATTENTION_NAMES
    if recomputed == "attention-module":
        return op.name in (*_BEFORE_ATTENTION, *_ATTENTION_NAMES, "output")
    if recomputed in _BY_OPERATION:
        return op.family not in ("matmul", "attention", "copy")
    if recomputed == "experts":
        return op.grouped or op.name in _AROUND_EXPERTS
    if recomputed in _NAMED:
        return op.name in _NAMED[recomputed]
    return recomputed == "full"


def _stops_early(shape: Shape, work: Work, software: Software) -> bool:
    """Whether what runs again leaves out its last product, whose result nobody keeps.

    Torch need not compute that again, unless it goes through a norm or dropout, or adapters follow the product.
    """
    followed = shape.ends_in_norm or shape.dropout or work.lora_rank > 0
    return software.stops_early and not work.repeats_to_end and not followed


@lru_cache(maxsize=8192)
def _network(
    shape: Shape, work: Work, cluster: Cluster, reached: Card, software: Software
) -> tuple[_Pass, _Pass, _Pass]:
    """An average layer, the embedding and the head; `work` is `Work.of_layers`."""
    backend = work.attention
    between = "fp32" if work.wide_between else kept_dtype(work.dtype)
    if backend == "auto":
        backend = "efficient" if shape.biased_scores else rates.auto_backend(cluster.device, between)
        if work.masked and backend == "flash":
            backend = "efficient"  # flash attention takes no mask
        if backend == "efficient" and shape.kv_heads < shape.heads and not (software.fused or work.masked):
            backend = "math"  # the efficient one has no keys that queries share; beside a mask they are copied
        if shape.keeps_scores:
            backend = "eager"
    part = Slice(
        tokens=work.tokens,
        seq_len=work.seq_len // (1 if work.masked else work.packing),
        tp=work.axes.tp,
        ep=work.axes.ep,
        sequence_parallel=work.sequence_parallel and work.axes.tp > 1,
        dtype=work.dtype,
        residual_bytes=4 if work.autocast else int(ELEMENT_BYTES[between]),
        fused=software.fused,
        backend=backend,
        trained=not work.lora_rank,
        casts=work.autocast and work.weight_bytes > ELEMENT_BYTES[work.dtype],
        lora_rank=work.lora_rank,
        adapted=work.adapted,
        wide_adapters=work.wide_adapters,
        quantized=work.quantized,
        wide_between=work.wide_between,
        captured=work.captured,
        experts_fused=work.experts_fused,
        experts_whole=work.experts_whole,
        compiled=work.compiled != "none",
        masked=work.masked,
        experts=shape.experts > 0 and not shape.dense_layers,
    )
    recomputed = work.checkpointing
    what = _Again(recomputed, work.checkpointed_fraction, _stops_early(shape, work, software))
    loss = "inductor" if (work.compiled, work.loss) == ("model", "plain") else work.loss
    both, again, embedding, head = _computing(
        shape, part, what, cluster.device, software, loss, work.accumulated_bytes, work.experts_even
    )
    fabric = _matrix_fabric(cluster, reached, software, _piped(work, cluster), work.axes.tp > cluster.gpus_per_node)
    exchange, waits = _tensor_exchange(shape, work, cluster, fabric, software)
    if work.int8:
        waits += _INT8_PRODUCT_SECONDS * _modules(shape) * (2 + work.checkpointed_fraction * (recomputed == "full"))
    waits += _HOOKS_SECONDS * (2 + work.checkpointed_fraction * (recomputed == "full")) * work.hooked
    if work.axes.ep > 1 and shape.experts:
        experts_fabric = _experts_fabric(cluster, reached, fabric)
        exchange += _handing_to_experts(shape, work, cluster, experts_fabric, software, both.total)
    repeats = work.checkpointed_fraction if recomputed != "none" else 0.0
    calls = 0.0 if work.compiled == "none" else (2 + repeats) / (shape.layers if work.compiled == "model" else 1)
    return (
        _Pass(both, again, repeats, exchange, waits, calls),
        _Pass(embedding, Seconds(), 0.0, *_rings(shape, work, cluster, fabric, software, 2)),
        _Pass(
            head,
            Seconds(),
            0.0,
            *_rings(shape, work, cluster, fabric, software, 3 * shape.predicted, _of_loss(work) * shape.predicted),
        ),
    )


def _tensor_exchange(
    shape: Shape, work: Work, cluster: Cluster, fabric: Fabric, software: Software
) -> tuple[float, float]:
    """Seconds that nothing hides, and latencies, of a layer's exchanges for one micro-batch.

    Tensor parallelism: two gathers and two scatters in forward, as many in backward and two gathers of the inputs
    again; without sequence parallelism two all-reduces each.  A recomputed layer repeats its forward's.

    Experts: tokens there and back in both passes; an all-to-all gathers counts first, which the host waits for, and
    sends the router's weights apart.
    """
    layout = work.axes
    again = 4 * work.checkpointed_fraction if work.checkpointing == "full" else 0
    calls = (10 if work.sequence_parallel else 8) + again
    exchange, waits = _rings(shape, work, cluster, fabric, software, calls)
    activations = _activation_bytes(shape, work)
    if layout.cp > 1:
        group = _group(layout.cp, layout.tp, cluster)
        keys = activations / shape.hidden * 2 * shape.key_width / layout.tp
        passing = 3 * (group.ranks - 1) * fabric.send(keys, group.far)
        exchange += passing * software.tensor_exposed
    if layout.ep > 1 and shape.experts:
        group = _group(layout.ep, 1 if work.experts_whole else layout.tp, cluster)
        counted = 3 * fabric.call_seconds + fabric.hops(group)
        waits += 4 * fabric.call_seconds + (0.0 if work.experts_once else counted)
    return exchange, waits


def _handing_to_experts(
    shape: Shape, work: Work, cluster: Cluster, fabric: Fabric, software: Software, computing: float
) -> float:
    """Seconds of a layer's exchanges with experts, there and back in each pass, that nothing hides.

    Overlapped, they go on while another micro-batch computes, which takes as long.
    """
    inner = 1 if work.experts_whole else work.axes.tp
    group = _group(work.axes.ep, inner, cluster)
    again = 2 * work.checkpointed_fraction if work.checkpointing in ("full", "experts") else 0
    handing = (4 + again) * _dispatch(shape, work, fabric, group)
    if work.experts_overlapped:
        return schedule.exposed(handing, computing, software.expert_overlap)
    return handing


_EXCHANGED: Final = 0.9
"""Part of its adapter that handing tokens to experts on other machines reaches: 90 and 61 GB/s at 50 GB/s where a
half and a fourth of them stay in the machine (github.com/deepseek-ai/DeepEP, README at 0297fc80)."""


@lru_cache(maxsize=256)
def _experts_fabric(cluster: Cluster, reached: Card, fabric: Fabric) -> Fabric:
    """Links on which tokens are handed to experts, where matrices are exchanged on `fabric`."""
    network = far_bytes_per_second(cluster)
    return replace(
        fabric,
        near_bytes_per_second=near_bytes_per_second(cluster, reached),
        far_bytes_per_second=None if network is None else network * _EXCHANGED,
    )


def _dispatch(shape: Shape, work: Work, fabric: Fabric, group: Group) -> float:
    """Seconds of handing each token to its experts, averaged over all layers.

    A tensor-parallel rank hands on its part of the tokens.  An all-to-all sends a token for each of its k experts, of
    which a part of (n - 1)/n are on another of n ranks or machines; others send it to each of those once: to
    (n - 1)(1 - (1 - 1/n)^k).
    """
    tokens = _activation_bytes(shape, work) / work.axes.tp * shape.expert_layers / shape.layers

    def copies(places: float) -> float:
        if work.experts_once:
            return (places - 1) * (1 - (1 - 1 / places) ** shape.experts_per_token)
        return shape.experts_per_token * (places - 1) / places

    near = tokens * copies(group.ranks) / fabric.near_bytes_per_second
    if not group.far or fabric.far_bytes_per_second is None:
        return near
    return max(near, tokens * copies(group.nodes) / fabric.far_bytes_per_second)


def _activation_bytes(shape: Shape, work: Work) -> float:
    """Bytes of the residual stream of one micro-batch, whole."""
    return work.tokens * shape.hidden * ELEMENT_BYTES[kept_dtype(work.dtype)]


def _rings(
    shape: Shape, work: Work, cluster: Cluster, fabric: Fabric, software: Software, calls: float, small: float = 0
) -> tuple[float, float]:
    """Seconds on the card, and waits of the host, of gathers and scatters among tensor-parallel
    ranks: as many of the whole residual stream as `calls`, and of a few numbers a token as `small`.

    Embedding: a scatter, and its gradient's gather; head: a gather, in backward the same again and a scatter.
    """
    if work.axes.tp == 1:
        return 0.0, 0.0
    group = Group(work.axes.tp, min(work.axes.tp, cluster.gpus_per_node))
    exposed = software.tensor_exposed if work.tensor_beside else 1.0
    moving = calls * fabric.moving(group, _activation_bytes(shape, work)) * exposed
    if _piped(work, cluster):
        return moving, (calls + small) * fabric.latency(group)
    return moving + (calls + small) * fabric.hops(group), (calls + small) * fabric.call_seconds


def _of_loss(work: Work) -> int:
    """All-reduces of a loss that is divided by words: three (Shoeybi et al. 2019, arXiv:1909.08053, section 3) each
    way; in slices (techniques/vocabulary.py) two, and the same again in backward, for each slice."""
    if work.loss != "chunked":
        return 6
    return 4 * operations.slices_of(work.tokens, work.axes.tp)


def _group(ranks: int, inner: int, cluster: Cluster) -> Group:
    """So many ranks, each `inner` places from the next."""
    return Group(ranks, max(1, min(ranks, cluster.gpus_per_node // inner)))


def _piped(work: Work, cluster: Cluster) -> bool:
    """Whether a pipeline spans machines."""
    return work.axes.pp > 1 and cluster.nodes > 1


@lru_cache(maxsize=256)
def _matrix_fabric(cluster: Cluster, reached: Card, software: Software, piped: bool, far: bool) -> Fabric:
    """Rings of tensor-parallel ranks."""
    fabric = data_fabric(cluster, reached, software)
    if piped and software.piped_rank_seconds:
        each = software.piped_far_rank_seconds if far else software.piped_rank_seconds
        return replace(fabric, call_seconds=each, hop_seconds=each, far_hop_seconds=each)  # as often as ranks
    return replace(
        fabric,
        call_seconds=software.call_seconds,
        hop_seconds=software.hop_seconds,
        far_hop_seconds=software.far_hop_seconds,
    )


@lru_cache(maxsize=256)
def data_fabric(cluster: Cluster, reached: Card, software: Software) -> Fabric:
    """Rings of data-parallel ranks; of as many hops as a machine has GPUs one leaves it."""
    network, g = far_bytes_per_second(cluster), cluster.gpus_per_node
    return Fabric(
        near_bytes_per_second=near_bytes_per_second(cluster, reached) * software.near_part
        if cluster.gpus > 1
        else 1.0,
        far_bytes_per_second=None if network is None else network * software.far_part,
        half_bytes=reached.link_half_bytes if has_links(cluster.device) else 1e6,
        near_hidden=reached.link_hidden,
        call_seconds=20e-6,
        hop_seconds=software.data_hop_seconds,
        far_hop_seconds=(software.data_far_hop_seconds + (g - 1) * software.data_hop_seconds) / g,
    )


# ---- pipelines and data parallelism ----------------------------------------------------------------------------


def split_of(shape: Shape, work: Work, software: Software) -> schedule.Split:
    """Which layers and ends are on which stage."""
    if work.stage_layers:
        return schedule.Split(work.stage_layers, work.axes.pp - 1, work.axes.pp - 1)
    if not software.balanced:
        return schedule.equally(shape.layers, work.axes.pp)
    head_layers = shape.embedding_parameters / (shape.dense_layer_parameters - shape.norm_parameters)
    return schedule.by_cost(shape.layers, work.axes.pp, head_layers)


def _ends(split: schedule.Split, embedding: _Pass, head: _Pass) -> tuple[tuple[int, _Pass], ...]:
    """What stages have besides layers: the embedding, the head's product, the loss."""
    if split.head == split.loss:
        return (0, embedding), (split.head, head)
    card, kernels = head.card, head.card.kernels / 2
    product = Seconds(compute=card.compute, kernels=kernels)
    loss = Seconds(memory=card.memory, kernels=kernels)
    return (
        (0, embedding),
        (split.head, _Pass(product, Seconds(), 0.0, head.exchange, head.waits)),
        (split.loss, _Pass(loss, Seconds(), 0.0, 0.0, 0.0)),
    )


def _sends(shape: Shape, work: Work, cluster: Cluster, fabric: Fabric, software: Software) -> float:
    """Seconds of handing activations on and gradients back, for one micro-batch."""
    layout = work.axes
    if layout.pp == 1:
        return 0.0
    divided = layout.tp if work.sequence_parallel else 1
    handed = work.tokens * shape.hidden * ELEMENT_BYTES[kept_dtype(work.dtype)] / divided
    far = layout.ranks // layout.pp >= cluster.gpus_per_node and cluster.nodes > 1
    return 2 * work.virtual_stages * fabric.send(handed, far) * software.sends_exposed


def _stalls(work: Work, software: Software) -> float:
    """Seconds of a step that hand-overs in pipelines of many ranks were seen to stall.

    A stage receives and sends in both directions, four hand-overs for each micro-batch (at the ends two), and the
    first micro-batch passes the other stages before.
    """
    layout = work.axes
    many = software.crowded_ranks and layout.ranks >= software.crowded_ranks
    wide = software.crowded_tensor_ranks and layout.tp >= software.crowded_tensor_ranks
    if layout.pp == 1 or not (many or wide):
        return 0.0
    handed = 2 * min(layout.pp - 1, 2) * work.virtual_stages * work.grad_accum + layout.pp - 1
    return handed * software.handing_seconds


def _rank_weights(shape: Shape, work: Work) -> float:
    """Weights of one rank before data parallelism divides them: its stage's part, its part of each matrix."""
    all_experts = shape.expert_layers * shape.experts * shape.expert_parameters if shape.experts else 0
    plain = (shape.parameters - all_experts) / (work.axes.tp * work.axes.pp)
    return plain + _routed_weights(shape, work)


def _routed_weights(shape: Shape, work: Work) -> float:
    """Of these, the experts' that a rank has."""
    if not shape.experts:
        return 0.0
    layout = work.axes
    each = layout.ep * layout.pp * (1 if work.experts_whole else layout.tp)
    return shape.expert_layers * shape.experts * shape.expert_parameters / each


def trained_weights(shape: Shape, work: Work, weights: float) -> float:
    """Of a rank's weights, those that are trained: all, or adapters beside the linear modules of its layers."""
    if not work.lora_rank:
        return weights
    part = Slice(tokens=1, seq_len=1)
    beside = (one for one in operations.products(shape, part) if has_adapter(one.name, work.adapted))
    widths = sum(product.k + product.n for product in beside)
    return work.lora_rank * widths * shape.layers / (work.axes.tp * work.axes.pp)


def _shard_group(work: Work, cluster: Cluster) -> Group:
    return _group(work.axes.shards, work.axes.tp, cluster)


@dataclass(frozen=True, slots=True)
class _Beside:
    """Exchanges of a layer's weights beside computation."""

    lasting: float
    """Seconds that they last."""
    slowing: float
    """Seconds by which they slow the computation down."""

    def exposed(self, hiding: float) -> float:
        """Seconds that so many of computation do not hide."""
        return max(self.lasting - hiding, self.slowing)


@dataclass(frozen=True, slots=True)
class _Gathering:
    """Gathering sharded weights and scattering their gradients: what hangs on layout and network alone.

    Ranks that keep whole gradients scatter those of a step's last micro-batch alone; torch's pipeline also keeps the
    weights that it gathered for the first.
    """

    layers: float
    """Of one stage, on average."""
    ahead: _Beside
    """Of a layer's forward pass."""
    back: _Beside
    """Of its backward pass."""
    without: _Beside
    """The same where gradients are not scattered."""
    ends_gathered: float
    """Seconds of gathering embedding and head."""
    ends_scattered: float
    """Seconds of scattering their gradients."""

    def seconds(self, work: Work, layer_seconds: float) -> float:
        """What an average micro-batch does not hide; `layer_seconds`: of a layer's passes."""
        gathering = self.layers * self.ahead.exposed(layer_seconds / 3) + self.ends_gathered
        scattering = self.layers * self.back.exposed(layer_seconds * 2 / 3) + self.ends_scattered
        without = self.layers * self.without.exposed(layer_seconds * 2 / 3)
        once = 1 / work.grad_accum
        gathers = once if work.axes.pp > 1 else 1.0
        scatters = once if work.axes.pp > 1 or work.gradients_whole else 1.0
        return gathers * gathering + scatters * scattering + (1 - scatters) * without


def _gathering(shape: Shape, work: Work, cluster: Cluster, fabric: Fabric) -> _Gathering | None:
    """None where no weights are sharded among ranks."""
    if not work.sharded or work.axes.shards == 1:
        return None
    group = _shard_group(work, cluster)
    part = Slice(
        tokens=1,
        seq_len=1,
        tp=work.axes.tp,
        ep=work.axes.ep,
        experts=bool(shape.experts),
        experts_whole=work.experts_whole,
    )
    weights = operations.layer_weights(shape, part)
    gathered = ELEMENT_BYTES[kept_dtype(work.dtype)]
    ahead = [weights * gathered]
    again = [weights * gathered] if work.gathers_again else []
    scattered = [] if work.lora_rank else [weights * work.reduced_bytes]

    def beside(moved: list[float]) -> _Beside:
        lasting = sum(fabric.gather(group, one) for one in moved)
        return _Beside(lasting, sum(fabric.slowing(group, one) for one in moved))

    ends = shape.embedding_parameters * (1 if shape.tied else 2) / work.axes.tp
    return _Gathering(
        layers=shape.layers / work.axes.pp,
        ahead=beside(ahead),
        back=beside(scattered + again),
        without=beside(again),
        ends_gathered=fabric.gather(group, ends * gathered),
        ends_scattered=fabric.gather(group, ends * work.reduced_bytes) / 2,
    )


def _unpacking(work: Work, cluster: Cluster, reached: Card, weights: float) -> float:
    """Seconds of copying gathered weights out of the buffer that they came in, for an average micro-batch.

    Read and write, on the stream that computes.  What FSDP2 copies into buffers is on other streams, beside layers: 8
    billion weights on one H100 take 25 ms more for it all, of which this is 22.
    """
    if not work.unpacked:
        return 0.0
    element = 0.5 if work.quantized else ELEMENT_BYTES[kept_dtype(work.dtype)]
    gathers = 2 if work.gathers_again else 1
    return weights * gathers * 2 * element / (rates.bandwidth(cluster.device) * reached.memory)


@dataclass(frozen=True, slots=True)
class _Averaging:
    """Averaging gradients over data-parallel ranks: what hangs on layout and network alone."""

    layers: int
    """Of the network."""
    moving: float
    """Seconds of moving a step's gradients once."""
    slowing: float
    """Seconds by which that slows computation down."""

    def seconds(self, work: Work, software: Software, backward: float) -> float:
        """What so many seconds of the last backward pass do not hide."""
        moving = self.moving
        if work.sharded:  # layer by layer, behind the layers before it
            lasting = max(moving - backward, 2 * self.slowing) + moving / self.layers
        elif work.weights_stay:  # gradients go after each micro-batch, weights come after the update
            going = moving / 2
            return work.grad_accum * (going - software.data_overlap * min(going, backward)) + going
        else:
            lasting = moving - software.data_overlap * min(moving, backward)
        return lasting * (work.grad_accum if work.averages_each else 1)


def _averaging(
    shape: Shape, work: Work, cluster: Cluster, fabric: Fabric, software: Software, weights: float
) -> _Averaging | None:
    """None where no ranks have the same weights, or nobody averages."""
    layout = work.axes
    trained = trained_weights(shape, work, weights)
    ranks = layout.dp_replicate * (1 if work.sharded else layout.dp_shard)
    if ranks == 1 or work.shard == "none":
        return None
    inner = layout.tp * layout.cp * (layout.dp_shard if work.sharded else 1)
    group = _group(ranks, inner, cluster)
    kept = trained / (layout.shards if work.sharded else 1)
    averaged = kept * work.gradient_bytes
    apart = 0.0 if work.sharded or work.lora_rank else _routed_weights(shape, work) * work.gradient_bytes
    moving = 2 * fabric.moving(group, averaged - apart) + 2 * fabric.moving(_alike(work, ranks, cluster), apart)
    if group.far and software.bucket_seconds:
        doublings = max(group.nodes, 1.0)
        moving += averaged / software.bucket_bytes * software.bucket_seconds * log2(doublings)
    if group.far and work.shard == "zero1":
        moving += shape.layers / layout.pp * software.update_seconds * log2(cluster.nodes)
    if software.crowded_ranks and layout.ranks >= software.crowded_ranks and layout.pp == 1:
        moving += software.crowded_seconds * (1 if work.shard == "zero1" else 2)
    return _Averaging(shape.layers, moving, fabric.slowing(group, averaged))


def _alike(work: Work, ranks: int, cluster: Cluster) -> Group:
    """Of so many data-parallel ranks those with the same experts: each as many places from the next as experts are
    divided over, so few of them or one share a machine."""
    layout = work.axes
    inner = layout.ep * (1 if work.experts_whole else layout.tp)
    return _group(max(ranks * layout.cp * layout.tp // inner, 1), inner, cluster)


# ---- the optimizer ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Update:
    """Seconds of the optimizer's step on the card."""

    part: float
    """Of the weights, what is not updated on the host."""
    passing: float
    """Seconds of the card for all of them."""
    launching: float
    """Seconds of the host to launch that."""
    bucketing: float
    """Seconds of copying gradients into buckets and back."""

    def seconds(self, ahead: float) -> float:
        """In all; the card is still busy with the passes for so many when the host begins to launch the step."""
        return self.part * max(self.passing, self.launching - ahead) + self.bucketing


def _update(shape: Shape, work: Work, cluster: Cluster, reached: Card, rank_trained: float) -> _Update:
    """Of so many weights that a rank trains, of which it updates its share."""
    bucketing = _bucketing(work, cluster, reached, rank_trained)
    if work.param_offload:
        return _Update(0.0, 0.0, 0.0, bucketing)
    trained = rank_trained / work.state_shards
    pure = max(work.weight_bytes, work.gradient_bytes) < 4 and not work.main_weights  # then so are the states
    narrow = work.weight_bytes / 4 if work.optimizer in _BY_BYTES else _NARROW
    scale = narrow if pure else 1.0
    moved = trained * OPTIMIZER_BYTES[work.optimizer] * scale
    clip = trained * 3 * work.gradient_bytes if work.clipped else 0.0
    seconds = 1 / (rates.bandwidth(cluster.device) * reached.memory)
    passing = max(moved * seconds, trained * _seconds_to_look_up(work.optimizer, cluster.device)) + clip * seconds
    if work.optimizer == "muon":
        passing += _newton_schulz(shape, trained, cluster, reached)
    each = LAUNCHES.get(work.optimizer, 1) * _LAUNCH_SECONDS
    if work.unpacked and work.optimizer != "adamw-fused":
        each = max(each, _UPDATED_TENSOR_SECONDS)
    tensors = _tensors(shape, work, trained=True) * shape.layers / work.axes.pp
    return _Update(1 - work.optimizer_offload, passing, tensors * each, bucketing)


def _bucketing(work: Work, cluster: Cluster, reached: Card, trained: float) -> float:
    """Seconds of copying gradients into buckets and back, once a step."""
    if not work.bucketed:
        return 0.0
    return trained * 4 * work.gradient_bytes / (rates.bandwidth(cluster.device) * reached.memory)


def _seconds_to_look_up(optimizer: str, device: Device) -> float:
    """Of a weight's states in a table, where the optimizer does that."""
    clock = 1e3 * device.clock_khz if device.clock_khz else _USUAL_CLOCK
    return OPTIMIZER_CYCLES.get(optimizer, 0.0) / ((device.sms or 1) * clock)


def _newton_schulz(shape: Shape, trained: float, cluster: Cluster, reached: Card) -> float:
    """Five iterations, each (4 n + 2 m) m^2 operations on a matrix of m <= n: 4 m + 2 m^2/n for each weight."""
    m, n = sorted((shape.hidden, shape.intermediate))
    each = 5 * (4 * m + 2 * m * m / n)
    return trained * each / (rates.peak_flops(cluster.device, "bf16") * reached.matmul)


_ELSEWHERE: Final = ((0.87, 1.2), (0.87, 1.3), (0.87, 1.25))
"""Measured / predicted that hold 8 of 10 steps on clusters unlike those that calibrated their code, on one GPU, in
one machine, on several: the blind test's (docs/reference/time.md)."""

_EXPERTS: Final = 2.5
_ADAPTERS: Final = 1.2
"""Powers of a code's interval that hold 8 of 10 steps of networks with experts and with adapters."""

_UNMEASURED_KIND: Final = 1.5
"""The same for a kind of network of which no step was measured: assumed, as for a card."""

_WIDE: Final = 2.7
"""Measured / predicted of QLoRA without autocast at most: 43.0 s of Llama 2 13B on an H100, for 15.8 (1.8 to 2.7 of
four steps; github.com/ljm565/universal-llm-trainer, docs/gpu_test.md, rows padded to 8,192 tokens)."""


HOSTS: Final = (0.82, 1.22)
"""Measured / predicted of steps that wait for the host, 9 of 10 of 71 in four recordings of H200s and an H100
(measurements): machines' processors differ."""

WAITING: Final = 0.03
"""Part of a step from which on it counts as waiting for the host: what those 71 were chosen by."""


def _interval(
    shape: Shape, work: Work, cluster: Cluster, reached: Card, software: Software, *, waits: bool
) -> tuple[float, float, tuple[str, ...]]:
    """Factors of the interval's ends, and what is assumed; `waits`: whether the card waits for the host."""
    low, high = software.low_factor, software.high_factor
    assumed: list[str] = []
    if waits:
        low, high = min(low, HOSTS[0]), max(high, HOSTS[1])
    if work.lora_rank:
        low, high = low**_ADAPTERS, high**_ADAPTERS
    low, high, said = elsewhere(low, high, cluster, reached, software)
    assumed += said
    if cluster.nodes > 1 and cluster.network_bytes_per_second is None:
        assumed.append("time: the network between machines is what machines with this card usually have")
    if cluster.gpus_per_node > 1 and cluster.device.nvlink_bridged:
        assumed.append("time: no NVLink bridges, which connect two of these cards and are bought apart from them")
    if shape.unmeasured:
        low, high = low**_UNMEASURED_KIND, high**_UNMEASURED_KIND
        assumed.append(
            f"time: no step of a {shape.unmeasured!r} network was measured; counted from what its code computes"
        )
    if shape.experts:
        low, high = low**_EXPERTS, high**_EXPERTS
        assumed.append("time: with layers of experts it was 3 to 16 % off on networks left out, sometimes 40 %")
    if work.wide_between:
        high = max(high, _WIDE)
        assumed.append(
            "time: no step of quantized weights beside fp32 ones without autocast was recorded; four that were "
            f"published took up to {_WIDE:.1f} times as long as predicted"
        )
    if work.compiled != "none":
        assumed.append(
            "time: what compiled layers move was counted on an H200, where 9 of 12 other steps were within 8 %; "
            "capped scores and Mixtral's experts were 14 and 32 % off"
        )
    if work.int8 or (work.quantized and work.unpacked):
        assumed.append("time: LLM.int8, and quantized weights under FSDP2, take the host what one step each says")
    if work.optimizer in UNMEASURED:
        times = OPTIMIZER_BYTES[work.optimizer] / OPTIMIZER_BYTES["adamw-fused"]
        assumed.append(
            f"time: {work.optimizer} was measured only where launching its kernels takes longer than running them; "
            f"these are taken for {times:.1f} times as long as adamw-fused"
        )
    if work.optimizer_offload or work.param_offload:
        low, high = low**1.5, high**1.5
        assumed.append(on_host.assumption(cluster))
    return low, high, tuple(assumed)


def of_hosts(waiting: float) -> str:
    """What is said of a step in which the card waits for the host for such a part."""
    return (
        f"time: for {100 * waiting:.0f} % of the step the card waits for the host to launch kernels, and hosts "
        f"differ: 9 of 10 such steps took {HOSTS[0]} to {HOSTS[1]} times as long as predicted"
    )


def elsewhere(
    low: float, high: float, cluster: Cluster, reached: Card, software: Software
) -> tuple[float, float, list[str]]:
    """An interval's ends on clusters and cards on which this code was not measured, and what is said of them."""
    said = []
    if reached.capability not in software.capabilities or cluster.gpus > software.most_gpus:
        least, most = _ELSEWHERE[0 if cluster.gpus == 1 else 1 if cluster.nodes == 1 else 2]
        low, high = min(low, least), max(high, most)
        said.append(
            "time: no steps of this code on such a cluster were used; elsewhere 8 of 10 were "
            f"{100 * (1 - least):.0f} % shorter to {100 * (most - 1):.0f} % longer than predicted"
        )
    if not reached.known:
        low, high = low**1.5, high**1.5
        major, minor = cluster.device.capability
        said.append(
            f"time: no card of capability {major}.{minor} was measured; taken to reach the parts of its peaks that "
            f"one of {reached.capability} does"
        )
    return low, high, said
