"""The numbers in PyTorch's out-of-memory message, which PyTorch rounds to two decimals of a unit."""

import re
from dataclasses import dataclass
from typing import Final

from tonnage.units import GIB, KIB, MIB

_UNITS: Final = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_AMOUNT: Final = r"([0-9]{1,12}(?:\.[0-9]+)?) (bytes|KiB|MiB|GiB)"
_REQUESTED: Final = re.compile(rf"Tried to allocate {_AMOUNT}")
_FREE: Final = re.compile(rf"of which {_AMOUNT} is free")
_UNALLOCATED: Final = re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated")


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Numbers of an out-of-memory message; None for those that the message does not state."""

    asked_bytes: int | None
    """Size of the request that could not be served."""
    free_bytes: int | None
    """Free memory of the driver."""
    unallocated_bytes: int | None
    """Memory that the allocator had reserved but not allocated."""


def shortage(message: str) -> Shortage:
    """Return the numbers of a torch 2.x message; all are None for another text."""
    return Shortage(
        asked_bytes=_parse_amount(_REQUESTED, message),
        free_bytes=_parse_amount(_FREE, message),
        unallocated_bytes=_parse_amount(_UNALLOCATED, message),
    )


def _parse_amount(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None
