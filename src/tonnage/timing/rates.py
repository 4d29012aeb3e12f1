"""How long a card takes for an operation: the part of its peaks that kernels of each family reach, by size."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

from tonnage.cluster import CUDNN_FIRST, Device
from tonnage.errors import CannotEstimate
from tonnage.timing.operations import Operation

_UNALIGNED: Final = 0.15
"""What products reach of that whose rows do not begin at multiples of 16 bytes: the head of GPT-2, with its 50,257
words, in the steps of gpt2-medium on an H200."""

_UNALIGNED_HEADS: Final = 0.5
"""Part of the fp32 peak that products of each head reach whose matrices do not begin at multiples of 16 bytes: 0.37
and 0.69 of an A100's with heads 450 and 150 wide (BigScience's rows of 14,400)."""

_FP32_ATTENTION: Final = 0.4
"""Part of the fp32 peak that attention reaches outside tensor cores, forward and backward."""

_KIN: Final = {12: (8, 9)}
"""Majors that are no successors of the one before, and the capability that theirs are like: the Blackwell of GeForce
and RTX has neither Hopper's nor the data center's instructions for products (wgmma, tcgen05), and GDDR as Ada has.
GPT-2's steps on an RTX 5090 and an RTX PRO 6000 were predicted 65 to 69 and 27 % too long with a B300's parts, and
are 35 to 38 and 12 % with Ada's (docs/reference/accuracy.md, the eleventh blind test)."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What kernels reach of a card's peaks."""

    capability: str
    """Compute capability of the cards it was calibrated on."""
    matmul: float
    """Part of the tensor cores' peak in large products."""
    fp32: float
    """Part of the peak outside tensor cores."""
    flops_per_joule: float | None = None
    """Operations of 16 bits on tensor cores that the board's power lets pass; None: not what bounds them."""
    fp8: float = 0.6
    """Part of the fp8 peak; of cards without, not used."""
    fp4: float = 0.4
    """Part of the fp4 peak; of cards without, not used."""
    fill_seconds: float
    """What each product takes more than its operations: the card fills and drains."""
    memory: float
    """Part of the memory's bandwidth in large passes."""
    pass_seconds: float
    """Least seconds of a kernel."""
    attention: tuple[tuple[str, float, float], ...]
    """Backend, and the parts of the peak that its forward and backward reach over long sequences."""
    attention_half_tokens: float
    """Tokens of a sequence at which attention reaches half of that."""
    link: float
    """Part of NVLink's bandwidth in large collectives."""
    link_half_bytes: float
    """Size of a collective that reaches half of that."""
    link_hidden: float
    """Part of a collective within a machine that computation beside it hides: the rest it is slowed down by."""
    known: bool = True
    """Whether a card of this capability was measured."""
    rows: str
    """What calibrated it."""

    def __hash__(self) -> int:
        """Of its capability alone, as a Device's of its name."""
        return hash(self.capability)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a card for several operations, by what bounds them; and the kernels that the host launches."""

    compute: float = 0.0
    """Of matrix products that arithmetic bounds."""
    attention: float = 0.0
    """Of attention that keeps no scores."""
    memory: float = 0.0
    """Of passes over memory."""
    plain: float = 0.0
    """Of such passes that nothing but the memory's bandwidth bounds."""
    experts: float = 0.0
    """Of the products of experts."""
    kernels: float = 0.0
    """Kernels launched (a number)."""
    looped: float = 0.0
    """Of these, the ones that a loop over experts launches."""

    @property
    def total(self) -> float:
        """All seconds of the card."""
        return self.compute + self.attention + self.memory + self.plain + self.experts

    @property
    def passing(self) -> float:
        """Of passes over memory."""
        return self.memory + self.plain

    @property
    def computing(self) -> float:
        """Of products and attention."""
        return self.compute + self.attention + self.experts

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.compute + other.compute,
            self.attention + other.attention,
            self.memory + other.memory,
            self.plain + other.plain,
            self.experts + other.experts,
            self.kernels + other.kernels,
            self.looped + other.looped,
        )

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(
            self.compute * times,
            self.attention * times,
            self.memory * times,
            self.plain * times,
            self.experts * times,
            self.kernels * times,
            self.looped * times,
        )

    def scaled(self, compute: float, attention: float, memory: float, experts: float) -> "Seconds":
        """With what is of each kind times what a code takes of it."""
        return Seconds(
            self.compute * compute,
            self.attention * attention,
            self.memory * memory,
            self.plain,
            self.experts * experts,
            self.kernels,
            self.looped,
        )


def card(device: Device) -> Card:
    """What is known of the device's kernels; of one never measured, what the nearest older one of its kin has."""
    return _card(device.capability)


@cache
def _card(capability: tuple[int, int]) -> Card:
    cards = _tables()
    older = [entry for entry in cards if _number(entry) <= _KIN.get(capability[0], capability)] or [cards[0]]
    nearest = max(older, key=_number)
    return nearest if _number(nearest) == capability else replace(nearest, known=False)


def _number(card: Card) -> tuple[int, int]:
    major, minor = card.capability.split(".")
    return int(major), int(minor)


def peak_flops(device: Device, dtype: str) -> float:
    """Dense operations per second of this dtype.  Raises CannotEstimate where none is published."""
    value = getattr(device.peak_flops, dtype)
    if value is None:
        raise CannotEstimate(f"How fast {device.name} is with {dtype} is not known, so neither is the step's time.")
    return float(value)


def bandwidth(device: Device) -> float:
    """Bytes per second of the card's memory.  Raises CannotEstimate where none is published."""
    if device.bandwidth_bytes_per_second is None:
        raise CannotEstimate(f"The memory bandwidth of {device.name} is not known, so neither is the step's time.")
    return device.bandwidth_bytes_per_second


def seconds(operations: Iterable[Operation], device: Device, reached: Card, *, backend: str, seq_len: int) -> Seconds:
    """Seconds of operations one after the other.

    A product takes its operations at the reached part of the peak, or its bytes if those take longer, and the time in
    which the card fills and drains.  All else is bound by memory.
    """
    compute = attention = memory = plain = experts = kernels = looped = 0.0
    rate = bandwidth(device) * reached.memory
    tensor_cores = _tensor_cores(device, reached)
    for op in operations:
        passing = op.bytes / rate
        kernels += op.kernels
        looped += op.kernels if op.grouped else 0
        if op.family == "matmul":
            part = {"fp32": reached.fp32, "fp8": reached.fp8, "fp4": reached.fp4}.get(op.dtype, tensor_cores)
            peak = peak_flops(device, op.dtype) * part
            if not op.aligned and op.dtype != "fp32":
                peak = peak_flops(device, "fp32") * _UNALIGNED_HEADS if op.batched else peak * _UNALIGNED
            working = op.flops / peak
            if op.grouped:
                experts += max(working, passing) + op.products * reached.fill_seconds
            elif working >= passing:
                compute += working + op.products * reached.fill_seconds
            else:
                memory += passing + op.products * reached.fill_seconds
        elif op.family == "attention":
            attention += _attention_seconds(op, device, reached, backend, seq_len) + op.kernels * reached.pass_seconds
        else:
            if op.family == "softmax":
                passing = max(passing, op.flops / peak_flops(device, "fp32"))
            taken = passing + op.kernels * reached.pass_seconds
            memory, plain = (memory, plain + taken) if op.plain else (memory + taken, plain)
    return Seconds(compute, attention, memory, plain, experts, kernels, looped)


def _tensor_cores(device: Device, reached: Card) -> float:
    """Part of their peak that tensor cores reach, and the board's power allows."""
    if reached.flops_per_joule is None or device.watts is None:
        return reached.matmul
    return min(reached.matmul, reached.flops_per_joule * device.watts / (device.peak_flops.fp16 or float("inf")))


def _attention_seconds(op: Operation, device: Device, reached: Card, backend: str, seq_len: int) -> float:
    by_backend = {name: (forward, backward) for name, forward, backward in reached.attention}
    part = by_backend.get(backend, by_backend["efficient"])[1 if op.name.endswith("backward") else 0]
    if op.dtype == "fp32":
        part = _FP32_ATTENTION
    filled = seq_len / (seq_len + reached.attention_half_tokens)
    return op.flops / (peak_flops(device, op.dtype) * part * filled)


def auto_backend(device: Device, dtype: str) -> str:
    """The attention that torch chooses: cuDNN's on Hopper, else flash from Ampere on, for 16 bits; else efficient."""
    if dtype in ("fp32", "tf32") or device.capability < (8, 0):
        return "efficient"
    return "cudnn" if device.capability in CUDNN_FIRST else "flash"


@cache
def tables() -> dict[str, Any]:
    """catalog/times.toml."""
    return tomllib.loads((files("tonnage") / "catalog" / "times.toml").read_text(encoding="utf-8"))


@cache
def _tables() -> tuple[Card, ...]:
    entries = [
        Card(**entry | {"attention": tuple((name, *parts) for name, parts in entry["attention"].items())})
        for entry in tables()["card"]
    ]
    return tuple(sorted(entries, key=_number))
