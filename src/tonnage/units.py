"""Sizes and counts: their units, how they are parsed and how they are printed.

`parse_bytes("24GiB")` is 25769803776, and `gib(25769803776)` is `24.00 GiB`.  No other module defines 1 GiB.
"""

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
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_LENGTH = {"": 1, "k": KIB, "m": MIB}
_NUMBER = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE]\+?(?:1[0-8]|[0-9]))?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Return the whole bytes of `24GiB`, `80GB`, `23.69GiB` (as PyTorch prints a capacity) or of a plain number.

    Raises UsageError.
    """
    return _parse(text, _BYTES, "a size such as 24GiB, 80GB or 512MiB", whole=False)


def parse_count(text: str, least: int = 1) -> int:
    """Return the whole number that `4096`, `4k`, `4M` or `4e6` stands for (decimal multiples), at least `least`.

    Raises UsageError.
    """
    return _parse(text, _COUNT, "a whole number such as 4096 or 4M", least=least)


def parse_length(text: str, least: int = 1) -> int:
    """Return the tokens that `8192`, `8k` or `1M` stands for: lengths of sequences are counted in powers of two.

    Raises UsageError.
    """
    return _parse(text, _LENGTH, "a whole number of tokens such as 8192 or 8k", least=least)


def _parse(text: str, multiples: dict[str, int], expected: str, whole: bool = True, least: int = 1) -> int:
    """Return the number in its base unit; a fraction of that unit is refused if `whole`, and cut off otherwise."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in multiples:
        raise UsageError(f"{text!r} is not {expected}.")
    multiple = multiples[match[2].lower()]
    value = Fraction(match[1]) * multiple
    if value < least or (value.denominator > 1 and (whole or multiple == 1)):
        limit = "above zero" if least == 1 else f"of at least {least}"
        raise UsageError(f"{text!r} is not {expected} {limit}.")
    return int(value)


def spell_bytes(count_bytes: int) -> str:
    """Return the shortest text that `parse_bytes` reads as exactly these bytes: `24GiB`, `6.5GiB`, `80GB`, `1234`."""
    candidates = (f"{count_bytes / _BYTES[unit.lower()]:g}{unit}" for unit in ("GiB", "GB"))
    return next((text for text in candidates if parse_bytes(text) == count_bytes), f"{count_bytes}")


def format_gib(count_bytes: int) -> str:
    """Return the size as `74.85 GiB`; two decimals, because the third is noise to a reader."""
    return f"{count_bytes / GIB:.2f} GiB"


def format_size(count_bytes: int) -> str:
    """Return the size in the largest binary unit in which it is at least 1: `512 B`, `32.0 MiB`, `74.85 GiB`."""
    magnitude = abs(count_bytes)
    if magnitude >= GIB:
        return format_gib(count_bytes)
    if magnitude >= MIB:
        return f"{count_bytes / MIB:.1f} MiB"
    if magnitude >= KIB:
        return f"{count_bytes / KIB:.1f} KiB"
    return f"{count_bytes} B"


def pluralise(value: int, noun: str) -> str:
    """Return a number with its noun, which is given in the singular: `1 step`, `2,000 steps`, `0 batches`."""
    plural = "" if value == 1 else "es" if noun.endswith("ch") else "s"
    return f"{value:,} {noun}{plural}"


def count(value: int) -> str:
    """Return a number of parameters or tokens for reading: `8.03 B`, `135 M`, `12,800`."""
    if value >= 10**9:
        return f"{value / 10**9:.2f} B"
    if value >= 10**6:
        return f"{value / 10**6:.0f} M"
    return f"{value:,}"
