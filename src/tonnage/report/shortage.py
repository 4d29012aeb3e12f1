"""The numbers in PyTorch's out-of-memory message, which it rounds to two decimals of a unit."""

import re
from dataclasses import dataclass
from typing import Final

from tonnage.units import GIB, KIB, MIB

_UNITS: Final = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_AMOUNT: Final = r"([0-9]{1,12}(?:\.[0-9]+)?) (bytes|KiB|MiB|GiB)"
_ASKED: Final = re.compile(rf"Tried to allocate {_AMOUNT}")
_FREE: Final = re.compile(rf"of which {_AMOUNT} is free")
_UNALLOCATED: Final = re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated")


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """What was asked for when the card was full; None where the message does not say."""

    asked_bytes: int | None
    """The request that could not be served."""
    free_bytes: int | None
    """What the driver had left."""
    unallocated_bytes: int | None
    """What the allocator held without having handed it out."""


def shortage(message: str) -> Shortage:
    """The numbers of a message of torch 2.x; of other texts, nothing."""
    return Shortage(
        asked_bytes=_amount(_ASKED, message),
        free_bytes=_amount(_FREE, message),
        unallocated_bytes=_amount(_UNALLOCATED, message),
    )


def _amount(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None
