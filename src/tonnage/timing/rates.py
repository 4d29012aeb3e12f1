"""Seconds of a card for an operation: the part of its peaks that kernels of each family reach, by size."""

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
"""Part of the rate of products that remains where rows do not begin at multiples of 16 bytes: the head of GPT-2, with
its 50,257 words, in the steps of gpt2-medium on an H200."""

_UNALIGNED_HEADS: Final = 0.5
"""Part of the fp32 peak that products of each head reach whose matrices do not begin at multiples of 16 bytes: 0.37
and 0.69 of an A100's with heads 450 and 150 wide (BigScience's rows of 14,400)."""

_FP32_ATTENTION: Final = 0.4
"""Part of the fp32 peak that attention reaches outside tensor cores, forward and backward."""

_KIN: Final = {12: (8, 9)}
"""Major capabilities that do not succeed the one before, and the capability that they are like: the Blackwell of
GeForce and RTX has neither Hopper's nor the data center's instructions for products (wgmma, tcgen05), and GDDR as Ada
has.  GPT-2's steps on an RTX 5090 and an RTX PRO 6000 were predicted 65 to 69 and 27 % too long with a B300's parts,
and are 35 to 38 and 12 % with Ada's (docs/reference/accuracy.md, the eleventh blind test)."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Parts of its peaks that the kernels of a card reach."""

    capability: str
    """Compute capability of the cards it was calibrated on."""
    matmul: float
    """Part of the tensor cores' peak in large products."""
    fp32: float
    """Part of the peak outside tensor cores."""
    flops_per_joule: float | None = None
    """Operations of 16 bits on tensor cores for each joule of the board's power; None: power does not bound them."""
    fp8: float = 0.6
    """Part of the fp8 peak; of cards without, not used."""
    fp4: float = 0.4
    """Part of the fp4 peak; of cards without, not used."""
    fill_seconds: float
    """Seconds of each product beside its operations, in which the card fills and drains."""
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
    """Part of a collective within a machine that computation beside it hides; the rest slows the computation down."""
    known: bool = True
    """True if a card of this capability was measured."""
    rows: str
    """Rows that calibrated it."""

    def __hash__(self) -> int:
        """Return the hash of the capability alone, as a Device's of its name."""
        return hash(self.capability)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a card for several operations, by what bounds them, and the kernels that the host launches."""

    compute: float = 0.0
    """Seconds of matrix products that arithmetic bounds."""
    attention: float = 0.0
    """Seconds of attention that keeps no scores."""
    memory: float = 0.0
    """Seconds of passes over memory."""
    plain: float = 0.0
    """Seconds of passes that nothing but the memory's bandwidth bounds."""
    experts: float = 0.0
    """Seconds of the products of experts."""
    kernels: float = 0.0
    """Kernels launched (a count)."""
    looped: float = 0.0
    """Kernels among them that a loop over experts launches."""

    @property
    def total(self) -> float:
        """All seconds of the card."""
        return self.compute + self.attention + self.memory + self.plain + self.experts

    @property
    def passing(self) -> float:
        """Seconds of all passes over memory."""
        return self.memory + self.plain

    @property
    def computing(self) -> float:
        """Seconds of products and attention."""
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
        """Return the seconds of each kind times the factor of a code."""
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
    """Return what the device's kernels reach; for one never measured, as its nearest older relative."""
    return _card(device.capability)


@cache
def _card(capability: tuple[int, int]) -> Card:
    cards = _cards()
    older = [entry for entry in cards if _capability(entry) <= _KIN.get(capability[0], capability)] or [cards[0]]
    nearest = max(older, key=_capability)
    return nearest if _capability(nearest) == capability else replace(nearest, known=False)


def _capability(card: Card) -> tuple[int, int]:
    major, minor = card.capability.split(".")
    return int(major), int(minor)


def peak_flops(device: Device, dtype: str) -> float:
    """Return the dense operations per second of this dtype.  Raise CannotEstimate where none is published."""
    value = getattr(device.peak_flops, dtype)
    if value is None:
        raise CannotEstimate(f"How fast {device.name} is with {dtype} is not known, so neither is the step's time.")
    return float(value)


def bandwidth(device: Device) -> float:
    """Return the bytes per second of the card's memory.  Raise CannotEstimate where none is published."""
    if device.bandwidth_bytes_per_second is None:
        raise CannotEstimate(f"The memory bandwidth of {device.name} is not known, so neither is the step's time.")
    return device.bandwidth_bytes_per_second


def seconds(operations: Iterable[Operation], device: Device, card: Card, *, backend: str, seq_len: int) -> Seconds:
    """Return the seconds of operations one after the other, on a card of which `card` is known.

    A product takes its operations at the reached part of the peak, or its bytes if those take longer, and the time in
    which the card fills and drains.  All else is bound by memory.
    """
    compute = attention = memory = plain = experts = kernels = looped = 0.0
    rate = bandwidth(device) * card.memory
    tensor_cores = _tensor_cores(device, card)
    for op in operations:
        passing = op.bytes / rate
        kernels += op.kernels
        looped += op.kernels if op.grouped else 0
        if op.family == "matmul":
            part = {"fp32": card.fp32, "fp8": card.fp8, "fp4": card.fp4}.get(op.dtype, tensor_cores)
            peak = peak_flops(device, op.dtype) * part
            if not op.aligned and op.dtype != "fp32":
                peak = peak_flops(device, "fp32") * _UNALIGNED_HEADS if op.batched else peak * _UNALIGNED
            working = op.flops / peak
            if op.grouped:
                experts += max(working, passing) + op.products * card.fill_seconds
            elif working >= passing:
                compute += working + op.products * card.fill_seconds
            else:
                memory += passing + op.products * card.fill_seconds
        elif op.family == "attention":
            attention += _attention_seconds(op, device, card, backend, seq_len) + op.kernels * card.pass_seconds
        else:
            if op.family == "softmax":
                passing = max(passing, op.flops / peak_flops(device, "fp32"))
            taken = passing + op.kernels * card.pass_seconds
            memory, plain = (memory, plain + taken) if op.plain else (memory + taken, plain)
    return Seconds(compute, attention, memory, plain, experts, kernels, looped)


def _tensor_cores(device: Device, card: Card) -> float:
    """Return the part of their peak that tensor cores reach and the board's power allows."""
    if card.flops_per_joule is None or device.watts is None:
        return card.matmul
    return min(card.matmul, card.flops_per_joule * device.watts / (device.peak_flops.fp16 or float("inf")))


def _attention_seconds(op: Operation, device: Device, card: Card, backend: str, seq_len: int) -> float:
    """Return the seconds of attention that keeps no scores, without those of its launches."""
    by_backend = {name: (forward, backward) for name, forward, backward in card.attention}
    part = by_backend.get(backend, by_backend["efficient"])[1 if op.name.endswith("backward") else 0]
    if op.dtype == "fp32":
        part = _FP32_ATTENTION
    filled = seq_len / (seq_len + card.attention_half_tokens)
    return op.flops / (peak_flops(device, op.dtype) * part * filled)


def auto_backend(device: Device, dtype: str) -> str:
    """Return the attention that torch chooses.

    For 16 bits cuDNN's on Hopper, else flash from Ampere on; else efficient.
    """
    if dtype in ("fp32", "tf32") or device.capability < (8, 0):
        return "efficient"
    return "cudnn" if device.capability in CUDNN_FIRST else "flash"


@cache
def tables() -> dict[str, Any]:
    """Return the tables of catalog/times.toml."""
    return tomllib.loads((files("tonnage") / "catalog" / "times.toml").read_text(encoding="utf-8"))


@cache
def _cards() -> tuple[Card, ...]:
    """Return the measured cards, oldest first."""
    entries = [
        Card(**entry | {"attention": tuple((name, *parts) for name, parts in entry["attention"].items())})
        for entry in tables()["card"]
    ]
    return tuple(sorted(entries, key=_capability))
