"""The only place that knows that 1 GiB is 2**30 bytes, and how quantities are read and written."""

import re
from fractions import Fraction
from typing import Final

from tonnage.errors import UsageError

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30

_BYTES = {
    **{"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_NUMBER = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Whole bytes in `24GiB`, `80GB`, `23.69GiB` (as PyTorch tells a capacity), or a number.  Raises UsageError."""
    return _parse(text, _BYTES, "a size such as 24GiB, 80GB or 512MiB", whole=False)


def parse_count(text: str) -> int:
    """A whole number from `4096`, `4k`, `4M` (decimal multiples).  Raises UsageError."""
    return _parse(text, _COUNT, "a whole number such as 4096 or 4M")


def _parse(text: str, multiples: dict[str, int], expected: str, whole: bool = True) -> int:
    """The number in its base unit; what is left of a unit is refused if `whole`, and cut off otherwise."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in multiples:
        raise UsageError(f"{text!r} is not {expected}.")
    multiple = multiples[match[2].lower()]
    value = Fraction(match[1]) * multiple
    if value < 1 or (value.denominator > 1 and (whole or multiple == 1)):
        raise UsageError(f"{text!r} is not {expected} above zero.")
    return int(value)


def typed(count_bytes: int) -> str:
    """What `parse_bytes` makes the same bytes of: `24GiB`, `6.5GiB`, `80GB`, or their number."""
    said = (f"{count_bytes / _BYTES[unit.lower()]:g}{unit}" for unit in ("GiB", "GB"))
    return next((text for text in said if parse_bytes(text) == count_bytes), f"{count_bytes}")


def gib(count_bytes: int) -> str:
    """`74.85 GiB`; two decimals, because the third is noise to a reader."""
    return f"{count_bytes / GIB:.2f} GiB"


def size(count_bytes: int) -> str:
    """The largest binary unit in which the value is at least 1: `512 B`, `32.0 MiB`, `74.85 GiB`."""
    magnitude = abs(count_bytes)
    if magnitude >= GIB:
        return gib(count_bytes)
    if magnitude >= MIB:
        return f"{count_bytes / MIB:.1f} MiB"
    if magnitude >= KIB:
        return f"{count_bytes / KIB:.1f} KiB"
    return f"{count_bytes} B"


def counted(value: int, noun: str) -> str:
    """`1 step`, `2,000 steps`, `0 batches`: so many of what is named in the singular."""
    plural = "" if value == 1 else "es" if noun.endswith("ch") else "s"
    return f"{value:,} {noun}{plural}"


def count(value: int) -> str:
    """`8.03 B`, `135 M`, `12,800`: a number of parameters or tokens, for reading."""
    if value >= 10**9:
        return f"{value / 10**9:.2f} B"
    if value >= 10**6:
        return f"{value / 10**6:.0f} M"
    return f"{value:,}"
