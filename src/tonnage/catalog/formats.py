"""Number formats of training and serving, computed from their numbers of bits.  Imports no torch.

A value of a floating-point format with E exponent bits, M mantissa bits and bias B = 2**(E-1) - 1 is
(-1)**sign * 2**(exponent - B) * (1 + mantissa / 2**M), or below the smallest normal number
2**(1 - B) * mantissa / 2**M.  Formats differ in the meaning of the highest exponent: see `Top`.

nf4 has no exponent: its 16 values are quantiles of a normal distribution (QLoRA, Dettmers et al. 2023, arXiv
2305.14314, section 3 and appendix E), computed here as bitsandbytes' `create_normal_map` derives them.
"""

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache
from math import ldexp, log2
from statistics import NormalDist
from typing import Final

from tonnage.catalog.devices import device_names, find_device
from tonnage.cluster import Device


class Top(Enum):
    """Meaning of the codes with the highest exponent."""

    IEEE = "infinities and NaNs"
    """IEEE 754: no finite value has it."""
    NAN = "one NaN"
    """E4M3: only the code with all ones is NaN, the other codes are values (OCP 8-bit floating point, 2023)."""
    VALUES = "values"
    """All codes are finite values (E2M1 of OCP's microscaling formats, 2023)."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A factor that a block of values shares."""

    block: int
    """Number of values that share it."""
    bits: int
    """Bits of the factor."""
    kind: str
    """Description of the factor."""

    @property
    def bits_per_value(self) -> Fraction:
        """Return the factor's bits divided by the values that share it."""
        return Fraction(self.bits, self.block)


@dataclass(frozen=True, kw_only=True)
class Format:
    """One number format."""

    name: str
    """Name in options and in the list of formats."""
    exponent_bits: int = 0
    """Bits of the exponent; 0: not floating point."""
    mantissa_bits: int = 0
    """Stored fraction bits."""
    top: Top = Top.IEEE
    """Meaning of the highest exponent."""
    storage_bits: int
    """Bits of one value in memory, without its scale; tf32 is stored as fp32."""
    codes: tuple[float, ...] = ()
    """All values, ascending, where the format is a list of values."""
    scales: tuple[Scale, ...] = ()
    """Factors that blocks of values share, smallest block first."""
    computes_as: str
    """Field of `Device.peak_flops` with the speed of matrices in it; empty: it is only stored."""
    standard: str
    """Document that defines its bits."""

    @property
    def bits_per_value(self) -> Fraction:
        """Return the bits of a value in memory, with its share of every scale."""
        return self.storage_bits + sum((scale.bits_per_value for scale in self.scales), Fraction(0))

    @property
    def is_float(self) -> bool:
        """Return True for floating point: the distance between values grows with the value."""
        return self.exponent_bits > 0

    @property
    def bias(self) -> int:
        """Return the number that is subtracted from the stored exponent."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """Return the largest finite value."""
        if self.codes:
            return self.codes[-1]
        exponent, mantissa = (1 << self.exponent_bits) - 1, (1 << self.mantissa_bits) - 1
        if self.top is Top.IEEE:
            exponent -= 1
        elif self.top is Top.NAN:
            mantissa -= 1
        return ldexp(1 + mantissa / (1 << self.mantissa_bits), exponent - self.bias)

    @property
    def smallest_normal(self) -> float:
        """Return the smallest positive value with full precision; for a list of values the smallest positive one."""
        return min(code for code in self.codes if code > 0) if self.codes else ldexp(1.0, 1 - self.bias)

    @property
    def smallest_step(self) -> float:
        """Return the smallest distance between two values: for floats the smallest subnormal number."""
        if self.codes:
            return min(after - before for before, after in zip(self.codes, self.codes[1:], strict=False))
        return self.smallest_normal / (1 << self.mantissa_bits)

    @property
    def epsilon(self) -> float | None:
        """Return the distance from 1 to the next value; None for a list of values."""
        return ldexp(1.0, -self.mantissa_bits) if self.is_float else None

    @property
    def binades(self) -> float | None:
        """Return the powers of two between the smallest normal and the largest value; None for a list of values."""
        return log2(self.largest / self.smallest_normal) if self.is_float else None

    @property
    def loss_scaling(self) -> str:
        """Return an answer to whether gradients in it need a scaled loss to stay above the smallest step."""
        if not self.is_float:
            return "not used for gradients"
        if self.scales:
            return "no: every block has its own scale"
        if self.exponent_bits >= FP32.exponent_bits:
            return "no: it has the range of fp32"
        if self.storage_bits == 16:
            return f"yes: gradients below {self.smallest_step / 2:.1e} round to zero"
        return "a scale for each tensor (or finer), chosen from its largest value"

    def devices(self) -> tuple[Device, ...]:
        """Return the catalog's GPUs with a published speed of matrices in this format."""
        known = (find_device(name) for name in device_names())
        return tuple(device for device in known if _has_speed(device, self))


def _has_speed(device: Device, number_format: Format) -> bool:
    speed = getattr(device.peak_flops, number_format.computes_as) if number_format.computes_as else None
    return speed is not None and device.capability >= LEAST_CAPABILITY.get(number_format.name, (0, 0))


@cache
def normal_float_codes() -> tuple[float, ...]:
    """Return the 16 values of NormalFloat: zero, and 8 positive and 7 negative quantiles of N(0, 1) at even steps.

    The outermost quantile would be infinite; its probability is taken to be the mean of 1 - 1/(2*15) and
    1 - 1/(2*16), for the 15 and 16 intervals of the two sides.  All values are divided by the largest.
    """
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    positive = [_quantile(outermost, step, 9) for step in range(8)]
    negative = [-_quantile(outermost, step, 8) for step in range(7)]
    values = sorted([*negative, 0.0, *positive])
    return tuple(value / values[-1] for value in values)


def _quantile(start: float, step: int, points: int) -> float:
    """Return the normal quantile at the step-th of `points` even probabilities from `start` down to one half."""
    return NormalDist().inv_cdf(start + (0.5 - start) * step / (points - 1))


FP32: Final = Format(
    name="fp32", exponent_bits=8, mantissa_bits=23, storage_bits=32, computes_as="fp32", standard="IEEE 754 binary32"
)
OCP_FP8: Final = "OCP 8-bit Floating Point Specification 1.0 (2023)"
OCP_MX: Final = "OCP Microscaling Formats Specification 1.0 (2023)"

FORMATS: Final[tuple[Format, ...]] = (
    FP32,
    Format(
        name="tf32",
        exponent_bits=8,
        mantissa_bits=10,
        storage_bits=32,
        computes_as="tf32",
        standard="NVIDIA A100 Tensor Core GPU Architecture (2020): fp32 in memory, rounded in the multiplier",
    ),
    Format(
        name="fp16",
        exponent_bits=5,
        mantissa_bits=10,
        storage_bits=16,
        computes_as="fp16",
        standard="IEEE 754 binary16",
    ),
    Format(
        name="bf16",
        exponent_bits=8,
        mantissa_bits=7,
        storage_bits=16,
        computes_as="bf16",
        standard="the upper half of IEEE 754 binary32",
    ),
    Format(
        name="fp8-e4m3",
        exponent_bits=4,
        mantissa_bits=3,
        top=Top.NAN,
        storage_bits=8,
        computes_as="fp8",
        standard=OCP_FP8,
    ),
    Format(name="fp8-e5m2", exponent_bits=5, mantissa_bits=2, storage_bits=8, computes_as="fp8", standard=OCP_FP8),
    Format(
        name="mxfp8",
        exponent_bits=4,
        mantissa_bits=3,
        top=Top.NAN,
        storage_bits=8,
        scales=(Scale(block=32, bits=8, kind="E8M0, a power of two"),),
        computes_as="fp8",
        standard=f"{OCP_MX}, elements E4M3",
    ),
    Format(
        name="nvfp4",
        exponent_bits=2,
        mantissa_bits=1,
        top=Top.VALUES,
        storage_bits=4,
        scales=(Scale(block=16, bits=8, kind="E4M3, and one fp32 a tensor"),),
        computes_as="fp4",
        standard="NVIDIA Blackwell's NVFP4 (2025): E2M1 elements, E4M3 scales",
    ),
    Format(
        name="int8",
        storage_bits=8,
        codes=tuple(float(code) for code in range(-128, 128)),
        computes_as="int8",
        standard="two's complement; quantization adds a scale for each row or block",
    ),
    Format(
        name="nf4",
        storage_bits=4,
        codes=normal_float_codes(),
        scales=(Scale(block=64, bits=32, kind="fp32, the block's largest magnitude"),),
        computes_as="",
        standard="QLoRA (2023, arXiv 2305.14314); bitsandbytes' default block of 64",
    ),
    Format(
        name="nf4-double-quant",
        storage_bits=4,
        codes=normal_float_codes(),
        scales=(
            Scale(block=64, bits=8, kind="8-bit, itself quantized"),
            Scale(block=64 * 256, bits=32, kind="fp32, for 256 of the 8-bit scales"),
        ),
        computes_as="",
        standard="QLoRA (2023, arXiv 2305.14314), section 3: double quantization",
    ),
)

LEAST_CAPABILITY: Final = {"mxfp8": (10, 0)}
"""Lowest compute capability whose tensor cores apply a format's scales, where the dtype of the peak does not show it:
fp8 matrices with a scale for each block came with Blackwell (PTX ISA: `.kind::mxf8f6f4` with `.block_scale`)."""


def find_format(name: str) -> Format:
    """Return the format of this name.  Raises UsageError with the possible names."""
    from tonnage.errors import UsageError

    known = {each.name: each for each in FORMATS}
    match = known.get(name.strip().lower().replace("_", "-"))
    if match is None:
        raise UsageError(f"Unknown format {name.strip()!r}; possible: {', '.join(known)}.")
    return match
