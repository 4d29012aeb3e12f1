"""Reads pickles that hold nothing but plain values, by a machine that has no instruction to do anything else.

A pickle is a program.  This interpreter knows the instructions that build None, booleans, numbers, text, lists,
tuples and dicts; the ones that import or call something do not exist here, so a hostile file cannot run code, and
what it can cost is bounded by its own size.
"""

import struct
from collections.abc import Callable
from typing import Any, Final

from tonnage.errors import UnreadableFile

_MARK: Final = object()


def load(data: bytes) -> Any:
    """The value that the pickle in `data` builds.  Raises UnreadableFile, also when it is not a plain value."""
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
    """The stack, the memo and the position in the program."""

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
                    f"The pickle holds instruction {bytes([code])!r} at byte {self.position - 1}, which builds more "
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

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def since_mark(self) -> list[Any]:
        """What was pushed after the last mark; both leave the stack."""
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


def _integer(size_layout: str) -> Callable[[_Machine], Any]:
    return lambda machine: int.from_bytes(machine.take(machine.number(size_layout)), "little", signed=True)


def _text(size_layout: str) -> Callable[[_Machine], Any]:
    return lambda machine: machine.take(machine.number(size_layout)).decode("utf-8", "surrogatepass")


def _number(layout: str) -> Callable[[_Machine], Any]:
    return lambda machine: machine.number(layout)


def _tuple_of(count: int) -> Callable[[_Machine], None]:
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
    values = machine.since_mark()
    machine.top(list).extend(values)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.top(dict)[_key(key)] = value


def _set_items(machine: _Machine) -> None:
    values = machine.since_mark()
    machine.top(dict).update(zip(map(_key, values[::2]), values[1::2], strict=True))


def _key(value: Any) -> Any:
    """Text and numbers only: hashing a deep tuple would overflow the interpreter's own stack."""
    if not isinstance(value, str | int | float):
        raise TypeError("not a key")
    return value


def _remember(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _remember_as(layout: str) -> Callable[[_Machine], None]:
    def instruction(machine: _Machine) -> None:
        machine.memo[machine.number(layout)] = machine.stack[-1]

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
    ord("J"): _push(_number("<i")),
    ord("K"): _push(_number("<B")),
    ord("M"): _push(_number("<H")),
    0x8A: _push(_integer("<B")),  # LONG1
    0x8B: _push(_integer("<I")),  # LONG4
    ord("G"): _push(_number(">d")),
    0x8C: _push(_text("<B")),
    ord("X"): _push(_text("<I")),
    0x8D: _push(_text("<Q")),
    ord("]"): _push(lambda machine: []),
    ord("}"): _push(lambda machine: {}),
    ord(")"): _push(lambda machine: ()),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("t"): _push(lambda machine: tuple(machine.since_mark())),
    ord("l"): _push(lambda machine: machine.since_mark()),
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _set_item,
    ord("u"): _set_items,
    0x94: _remember,
    ord("q"): _remember_as("<B"),
    ord("r"): _remember_as("<I"),
    ord("h"): _push(lambda machine: machine.memo[machine.number("<B")]),
    ord("j"): _push(lambda machine: machine.memo[machine.number("<I")]),
}
