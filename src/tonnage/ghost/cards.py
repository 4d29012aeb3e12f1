"""The account of a machine's cards that the processes of one dry-run share: who took how much (`native/cards.c`)."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROCESSES: Final = 256
_DEVICES: Final = 64

_HEAD: Final = struct.Struct("<ii")
_ACCOUNT: Final = struct.Struct(f"<iiQ{_DEVICES}Q{_DEVICES}Q")
_PEAKS: Final = 3 + _DEVICES
"""Where the peaks begin in an account: behind process, ended, began and what is used of each card."""
_CARD: Final = struct.Struct("<Q" + "qQ" * _PROCESSES)
_CARDS_AT: Final = _HEAD.size + _PROCESSES * _ACCOUNT.size
_SIZE: Final = _CARDS_AT + _DEVICES * _CARD.size


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that used a card."""

    process: int
    """Its number."""
    held_bytes: int
    """What it held when all processes together held most."""
    peak_bytes: int
    """The most that it held itself; its context included."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the processes of a run held of one card."""

    index: int
    """Its number among all cards of the machine."""
    peak_bytes: int
    """The most that they held together."""
    holders: tuple[Holder, ...]
    """Those that used it, in the order in which they began."""


def create(path: Path) -> None:
    """An account in which nothing is taken yet; GHOST_CARDS tells each process where it is."""
    path.write_bytes(bytes(_SIZE))


def read(path: Path) -> tuple[Card, ...]:
    """The cards that were used."""
    raw = path.read_bytes()
    _, count = _HEAD.unpack_from(raw)
    accounts = [_ACCOUNT.unpack_from(raw, _HEAD.size + place * _ACCOUNT.size) for place in range(count)]
    cards = [_CARD.unpack_from(raw, _CARDS_AT + index * _CARD.size) for index in range(_DEVICES)]
    found = (_card(index, numbers, accounts) for index, numbers in enumerate(cards))
    return tuple(card for card in found if card.holders)


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
