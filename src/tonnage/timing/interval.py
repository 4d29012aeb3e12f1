"""Interval of a predicted step, and the sentences about what was assumed for it."""

from typing import Final

from tonnage.cluster import Cluster
from tonnage.timing import host
from tonnage.timing.optimizer import OPTIMIZER_BYTES, UNMEASURED
from tonnage.timing.rates import Card
from tonnage.timing.shape import Shape
from tonnage.timing.software import Software
from tonnage.timing.work import Work

_ELSEWHERE: Final = ((0.87, 1.2), (0.87, 1.3), (0.87, 1.25))
"""Measured / predicted that hold 8 of 10 steps on clusters unlike those that calibrated their code, on one GPU, in
one machine, on several: the blind test's (docs/reference/time.md)."""

_EXPERTS: Final = 2.5
_ADAPTERS: Final = 1.2
"""Powers of a code's interval that hold 8 of 10 steps of networks with experts and with adapters."""

_UNMEASURED_KIND: Final = 1.5
"""The same power for a kind of network of which no step was measured: assumed, as for a card."""

_WIDE: Final = 2.7
"""Highest measured / predicted of QLoRA without autocast: 43.0 s of Llama 2 13B on an H100, for 15.8 (1.8 to 2.7 of
four steps; github.com/ljm565/universal-llm-trainer, docs/gpu_test.md, rows padded to 8,192 tokens)."""

HOSTS: Final = (0.82, 1.22)
"""Measured / predicted of steps that wait for the host, 9 of 10 of 71 in four recordings of H200s and an H100
(measurements): machines' processors differ."""

WAITING: Final = 0.03
"""Part of a step from which on it counts as waiting for the host: the criterion by which those 71 were chosen."""


def estimate_interval(
    shape: Shape, work: Work, cluster: Cluster, card: Card, software: Software, *, waits: bool
) -> tuple[float, float, tuple[str, ...]]:
    """Return the factors of the interval's ends, and what is assumed; `waits`: the card waits for the host."""
    low, high = software.low_factor, software.high_factor
    assumed: list[str] = []
    if waits:
        low, high = min(low, HOSTS[0]), max(high, HOSTS[1])
    if work.lora_rank:
        low, high = low**_ADAPTERS, high**_ADAPTERS
    low, high, sentences = widen_elsewhere(low, high, cluster, card, software)
    assumed += sentences
    if cluster.nodes > 1 and cluster.network_bytes_per_second is None:
        assumed.append("time: the network between machines is assumed to be the usual one for this card")
    if cluster.gpus_per_node > 1 and cluster.device.nvlink_bridged:
        assumed.append("time: no NVLink bridges are assumed; they connect two of these cards and are sold separately")
    if shape.unmeasured:
        low, high = low**_UNMEASURED_KIND, high**_UNMEASURED_KIND
        assumed.append(
            f"time: no step of a {shape.unmeasured!r} network was measured; its operations are counted from its code"
        )
    if shape.experts:
        low, high = low**_EXPERTS, high**_EXPERTS
        assumed.append("time: networks with experts that calibration left out were 3 to 16 % off, sometimes 40 %")
    if work.wide_between:
        high = max(high, _WIDE)
        assumed.append(
            "time: no step of quantized weights beside fp32 ones without autocast was recorded; four that were "
            f"published took up to {_WIDE:.1f} times as long as predicted"
        )
    if work.compiled != "none":
        assumed.append(
            "time: the bytes that compiled layers move were counted on an H200, where 9 of 12 other steps were "
            "within 8 %; capped scores and Mixtral's experts were 14 and 32 % off"
        )
    if work.int8 or (work.quantized and work.unpacked):
        assumed.append(
            "time: the host's seconds for LLM.int8, and for quantized weights under FSDP2, are from one step each"
        )
    if work.optimizer in UNMEASURED:
        times = OPTIMIZER_BYTES[work.optimizer] / OPTIMIZER_BYTES["adamw-fused"]
        assumed.append(
            f"time: {work.optimizer} was measured only where launching its kernels takes longer than running them; "
            f"they are assumed to take {times:.1f} times as long as adamw-fused"
        )
    if work.optimizer_offload or work.param_offload:
        low, high = low**1.5, high**1.5
        assumed.append(host.assumption(cluster))
    return low, high, tuple(assumed)


def widen_elsewhere(
    low: float, high: float, cluster: Cluster, card: Card, software: Software
) -> tuple[float, float, list[str]]:
    """Return an interval's ends, widened on clusters and cards on which this code was not measured, and why."""
    sentences = []
    if card.capability not in software.capabilities or cluster.gpus > software.most_gpus:
        least, most = _ELSEWHERE[0 if cluster.gpus == 1 else 1 if cluster.nodes == 1 else 2]
        low, high = min(low, least), max(high, most)
        sentences.append(
            "time: no steps of this code on such a cluster were used; elsewhere 8 of 10 were "
            f"{100 * (1 - least):.0f} % shorter to {100 * (most - 1):.0f} % longer than predicted"
        )
    if not card.known:
        low, high = low**1.5, high**1.5
        major, minor = cluster.device.capability
        sentences.append(
            f"time: no card of capability {major}.{minor} was measured; assumed to reach the parts of its peaks that "
            f"one of {card.capability} does"
        )
    return low, high, sentences


def host_assumption(waiting: float) -> str:
    """Return the sentence about a step in which the card waits for the host for the part `waiting`."""
    return (
        f"time: for {100 * waiting:.0f} % of the step the card waits for the host to launch kernels, and hosts "
        f"differ: 9 of 10 such steps took {HOSTS[0]} to {HOSTS[1]} times as long as predicted"
    )
