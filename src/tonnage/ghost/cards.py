"""The shared account of the memory that each process of a dry-run took on each card (`native/cards.c`)."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROCESSES: Final = 256
_DEVICES: Final = 64

_HEAD: Final = struct.Struct("<ii")
_ACCOUNT: Final = struct.Struct(f"<iiQ{_DEVICES}Q{_DEVICES}Q")
_PEAKS: Final = 3 + _DEVICES
"""Index of the first peak in an account, after process, ended, began and the bytes in use on each card."""
_CARD: Final = struct.Struct("<Q" + "qQ" * _PROCESSES)
_CARDS_AT: Final = _HEAD.size + _PROCESSES * _ACCOUNT.size
_SIZE: Final = _CARDS_AT + _DEVICES * _CARD.size


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that used a card."""

    process: int
    """Process id."""
    held_bytes: int
    """Bytes that it held when all processes together held most."""
    peak_bytes: int
    """Peak of its own bytes, including its context."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Memory that the processes of a run held on one card."""

    index: int
    """Number among all cards of the machine."""
    peak_bytes: int
    """Peak of the bytes that all processes held together."""
    holders: tuple[Holder, ...]
    """Processes that used it, in the order in which they began."""


def create(path: Path) -> None:
    """Create an empty account; GHOST_CARDS tells each process its path."""
    path.write_bytes(bytes(_SIZE))


def read(path: Path) -> tuple[Card, ...]:
    """Return the cards that were used."""
    raw = path.read_bytes()
    _, count = _HEAD.unpack_from(raw)
    accounts = [_ACCOUNT.unpack_from(raw, _HEAD.size + index * _ACCOUNT.size) for index in range(count)]
    rows = [_CARD.unpack_from(raw, _CARDS_AT + index * _CARD.size) for index in range(_DEVICES)]
    cards = (_card(index, numbers, accounts) for index, numbers in enumerate(rows))
    return tuple(card for card in cards if card.holders)


def _card(index: int, numbers: tuple[int, ...], accounts: list[tuple[int, ...]]) -> Card:
    peak_bytes, *held = numbers
    held_by = dict(zip(held[0::2], held[1::2], strict=True))
    peaks = {account[0]: account[_PEAKS + index] for account in accounts}
    return Card(
        index=index,
        peak_bytes=peak_bytes,
        holders=tuple(
            Holder(process=process, held_bytes=held_by.get(process, 0), peak_bytes=most)
            for process, most in peaks.items()
            if most
        ),
    )
