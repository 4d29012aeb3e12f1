"""Seconds of the optimizer's step on the card: bytes that it moves, tables that it looks up, kernels it launches."""

from dataclasses import dataclass
from typing import Final

from tonnage.cluster import Cluster, Device
from tonnage.timing import rates
from tonnage.timing.rates import Card
from tonnage.timing.shape import Shape
from tonnage.timing.weights import count_trained_tensors
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
guessed, and its recorded step says 33; paged AdamW's is the excess of its recorded step over its passes, 22.5 ms for
1.24 billion weights, less the excess of three other optimizers of bitsandbytes over their predictions
(measurements/h200-2026-11-26.jsonl, compared in tests/benchmarks/test_time_benchmark.py)."""

UNMEASURED: Final = ("adamw-4bit", "adamw-8bit-ao", "adamw-fp8-ao")
"""Optimizers whose bytes are a guess, with no source: torchao's, compiled for each parameter."""

_NARROW: Final = 0.6
"""Seconds of an optimizer with states of 16 bits / with states of 32, which are twice the bytes: 0.60 of the kernels
of AdamW (foreach) in steps of 1.7 and 1.2 billion weights on an H200, 0.56 to 0.68 of `op optimizer` for Adam and SGD
on it and on an H100 (measurements)."""

_BY_BYTES: Final = ("adafactor", "muon")
"""Optimizers for which that was not seen: with half the bytes they take half as long (Adafactor: two steps of 8
billion weights within 4 %)."""

OPTIMIZER_CYCLES: Final = {"adamw-8bit": 7.2, "paged-adamw-8bit": 7.2, "lion-8bit": 4.1}
"""Cycles of a multiprocessor for each weight, for bitsandbytes' optimizers that look each new state up in a table of
256: that takes longer than moving it.  27.7 ps a weight of Adam's kernel on an H200 and 15.7 of Lion's, at its 132
multiprocessors' highest clock (measurements/h200-2026-11-26.jsonl); as long with weights of 16 bits."""

_USUAL_CLOCK: Final = 1.7e9
"""Clock of a card for which the catalog has none."""

LAUNCHES: Final = {"adamw-loop": 14, "muon": 60, "adafactor": 30, **dict.fromkeys(UNMEASURED, 60)}
"""Kernels that an optimizer launches for each tensor, where it takes them one by one.  torchao's are from one step in
which the host decided: 8-bit AdamW of 290 tensors took 0.18 s more than torch's, on an H200 as all these."""

_LAUNCH_SECONDS: Final = 10e-6
"""Seconds of the host for a kernel of an optimizer, which launches them in a loop without modules or autograd."""

UPDATED_TENSOR_SECONDS: Final = 200e-6
"""Seconds of the host for each tensor of weights that an optimizer takes as a DTensor without a fused kernel: Llama
3.2 1B on an H200 under FSDP2, the steps of `data_parallel.GATHERED_TENSOR_SECONDS`."""


@dataclass(frozen=True, slots=True)
class Update:
    """Seconds of the optimizer's step on the card."""

    part: float
    """Part of the weights that is not updated on the host."""
    passing: float
    """Seconds of the card for all of them."""
    launching: float
    """Seconds of the host to launch that."""
    bucketing: float
    """Seconds of copying gradients into buckets and back."""

    def seconds(self, ahead: float) -> float:
        """Return the seconds in all; when the host begins to launch the step, the card is busy for `ahead` more."""
        return self.part * max(self.passing, self.launching - ahead) + self.bucketing


def plan_update(shape: Shape, work: Work, cluster: Cluster, card: Card, rank_trained: float) -> Update:
    """Return the update of the `rank_trained` weights that a rank trains, of which it updates its share."""
    bucketing = _bucketing_seconds(work, cluster, card, rank_trained)
    if work.param_offload:
        return Update(0.0, 0.0, 0.0, bucketing)
    trained = rank_trained / work.state_shards
    narrow = work.weight_bytes / 4 if work.optimizer in _BY_BYTES else _NARROW
    scale = narrow if work.states_narrow else 1.0
    moved = trained * OPTIMIZER_BYTES[work.optimizer] * scale
    clip = trained * 3 * work.gradient_bytes if work.clipped else 0.0
    seconds = 1 / (rates.bandwidth(cluster.device) * card.memory)
    passing = max(moved * seconds, trained * _lookup_seconds(work.optimizer, cluster.device)) + clip * seconds
    if work.optimizer == "muon":
        passing += _newton_schulz_seconds(shape, trained, cluster, card)
    each = LAUNCHES.get(work.optimizer, 1) * _LAUNCH_SECONDS
    if work.unpacked and work.optimizer != "adamw-fused":
        each = max(each, UPDATED_TENSOR_SECONDS)
    tensors = count_trained_tensors(shape, work) * shape.layers / work.axes.pp
    return Update(1 - work.optimizer_offload, passing, tensors * each, bucketing)


def _bucketing_seconds(work: Work, cluster: Cluster, card: Card, trained: float) -> float:
    """Return the seconds of copying gradients into buckets and back, once a step."""
    if not work.bucketed:
        return 0.0
    return trained * 4 * work.gradient_bytes / (rates.bandwidth(cluster.device) * card.memory)


def _lookup_seconds(optimizer: str, device: Device) -> float:
    """Return the seconds of looking a weight's states up in a table; 0 where the optimizer does not."""
    clock = 1e3 * device.clock_khz if device.clock_khz else _USUAL_CLOCK
    return OPTIMIZER_CYCLES.get(optimizer, 0.0) / ((device.sms or 1) * clock)


def _newton_schulz_seconds(shape: Shape, trained: float, cluster: Cluster, card: Card) -> float:
    """Return the seconds of Muon's five iterations.

    Each is (4 n + 2 m) m^2 operations on a matrix of m <= n: 4 m + 2 m^2/n for each weight.
    """
    m, n = sorted((shape.hidden, shape.intermediate))
    each = 5 * (4 * m + 2 * m * m / n)
    return trained * each / (rates.peak_flops(cluster.device, "bf16") * card.matmul)
