"""A safe reader of pickles that hold only plain values.

A pickle is a program.  This interpreter has only the instructions that build None, booleans, numbers, text, lists,
tuples and dicts.  It has none that import or call something, so a hostile file cannot run code, and its cost is
bounded by the size of the file.
"""

import struct
from collections.abc import Callable
from typing import Any, Final

from tonnage.errors import UnreadableFile

_MARK: Final = object()


def load(data: bytes) -> Any:
    """Return the value that the pickle in `data` builds.

    Raises UnreadableFile for a damaged pickle, and for one that builds more than plain values.
    """
    machine = _Machine(data)
    try:
        return machine.run()
    except UnreadableFile:
        raise
    except (IndexError, KeyError, ValueError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise UnreadableFile(
            f"The pickle is damaged at byte {machine.position} of {len(data)} ({type(error).__name__}); "
            "write the file again."
        ) from None


class _Machine:
    """An interpreter's state: its stack, its memo and its position in the program."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, instructions = self.data, _INSTRUCTIONS
        while True:
            code = data[self.position]
            self.position += 1
            if code == _STOP:
                return self.stack.pop()
            instruction = instructions.get(code)
            if instruction is None:
                raise UnreadableFile(
                    f"The pickle has instruction {bytes([code])!r} at byte {self.position - 1}, which can build more "
                    "than plain values; it was not executed."
                )
            instruction(self)

    def take(self, count: int) -> bytes:
        start = self.position
        end = start + count
        if not start <= end <= len(self.data):
            raise ValueError("beyond the end")
        self.position = end
        return self.data[start:end]

    def take_number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def pop_to_mark(self) -> list[Any]:
        """Remove the last mark and the values above it from the stack, and return the values."""
        stack = self.stack
        position = len(stack) - 1
        while stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise ValueError("no mark")
        values = stack[position + 1 :]
        del stack[position:]
        return values

    def top(self, kind: type) -> Any:
        value = self.stack[-1]
        if type(value) is not kind:
            raise TypeError("not a container")
        return value


def _push(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def instruction(machine: _Machine) -> None:
        machine.stack.append(make(machine))

    return instruction


def _read_integer(size_layout: str) -> Callable[[_Machine], Any]:
    return lambda machine: int.from_bytes(machine.take(machine.take_number(size_layout)), "little", signed=True)


def _read_text(size_layout: str) -> Callable[[_Machine], Any]:
    return lambda machine: machine.take(machine.take_number(size_layout)).decode("utf-8", "surrogatepass")


def _read_number(layout: str) -> Callable[[_Machine], Any]:
    return lambda machine: machine.take_number(layout)


def _build_tuple(count: int) -> Callable[[_Machine], None]:
    def instruction(machine: _Machine) -> None:
        values = tuple(machine.stack[-count:])
        if len(values) < count or _MARK in values:
            raise ValueError("too few values")
        machine.stack[-count:] = [values]

    return instruction


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    machine.top(list).append(value)


def _appends(machine: _Machine) -> None:
    values = machine.pop_to_mark()
    machine.top(list).extend(values)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.top(dict)[_check_key(key)] = value


def _set_items(machine: _Machine) -> None:
    values = machine.pop_to_mark()
    machine.top(dict).update(zip(map(_check_key, values[::2]), values[1::2], strict=True))


def _check_key(value: Any) -> Any:
    """Return a key of a dict; only text and numbers, because hashing a deep tuple would overflow Python's stack."""
    if not isinstance(value, str | int | float):
        raise TypeError("not a key")
    return value


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _memoize_at(layout: str) -> Callable[[_Machine], None]:
    def instruction(machine: _Machine) -> None:
        machine.memo[machine.take_number(layout)] = machine.stack[-1]

    return instruction


def _skip(count: int) -> Callable[[_Machine], None]:
    def instruction(machine: _Machine) -> None:
        machine.take(count)

    return instruction


_STOP: Final = ord(".")

_INSTRUCTIONS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: _skip(1),  # PROTO
    0x95: _skip(8),  # FRAME
    ord("("): _push(lambda machine: _MARK),
    ord("N"): _push(lambda machine: None),
    0x88: _push(lambda machine: True),
    0x89: _push(lambda machine: False),
    ord("J"): _push(_read_number("<i")),
    ord("K"): _push(_read_number("<B")),
    ord("M"): _push(_read_number("<H")),
    0x8A: _push(_read_integer("<B")),  # LONG1
    0x8B: _push(_read_integer("<I")),  # LONG4
    ord("G"): _push(_read_number(">d")),
    0x8C: _push(_read_text("<B")),
    ord("X"): _push(_read_text("<I")),
    0x8D: _push(_read_text("<Q")),
    ord("]"): _push(lambda machine: []),
    ord("}"): _push(lambda machine: {}),
    ord(")"): _push(lambda machine: ()),
    0x85: _build_tuple(1),
    0x86: _build_tuple(2),
    0x87: _build_tuple(3),
    ord("t"): _push(lambda machine: tuple(machine.pop_to_mark())),
    ord("l"): _push(lambda machine: machine.pop_to_mark()),
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _set_item,
    ord("u"): _set_items,
    0x94: _memoize,
    ord("q"): _memoize_at("<B"),
    ord("r"): _memoize_at("<I"),
    ord("h"): _push(lambda machine: machine.memo[machine.take_number("<B")]),
    ord("j"): _push(lambda machine: machine.memo[machine.take_number("<I")]),
}
