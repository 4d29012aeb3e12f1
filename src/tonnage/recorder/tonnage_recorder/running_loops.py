"""Ends a `for` loop of the program from inside its body, as if its iterator had no more items.

The loop that trains is found by comparing the stacks of two steps: the innermost frame of both has it.  CPython keeps
the iterators of a frame's loops on the frame's stack.  They are read there, never written; then the iterator itself
is told to be at its end.  `while` loops and iterators that cannot be told so are left alone, as on other Pythons.
"""

import contextlib
import ctypes
import dis
import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, GeneratorType
from typing import Any, NamedTuple

from .outcome import is_ours

_IS_KNOWN = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info < (3, 14)
"""True for interpreters whose frames have the two offsets below (pycore_frame.h)."""

_FRAME_DATA = 24
"""Offset in a frame object of the pointer to what the interpreter keeps of it (f_frame)."""

_LOCALS = 72
"""Offset there of the local variables, which the stack follows (localsplus)."""

_TRIES = 8
"""Times that a loop is ended before the one around it is: each epoch begins a loop anew."""


class _Loop(NamedTuple):
    """A loop in a function's code; `depth` counts what the stack holds below its iterator."""

    is_for: bool
    depth: int
    start: int
    end: int


class RunningLoops:
    """The loops in whose body the program makes its steps."""

    def __init__(self) -> None:
        self._tag: Callable[..., Any] = lambda *_: None
        self._tagged_steps = self._around = self._step_place = -1

    def find_frame(self, made_steps: int) -> FrameType | None:
        """Return the frame with the loop that trains, in the first pass of a step; else None.

        Frames are told from later ones of the same functions by a trace function of their own, which nothing calls.
        """
        if made_steps == self._tagged_steps or not _IS_KNOWN or sys.gettrace() is not None:
            return None
        around = next((frame for frame in _frames() if frame.f_trace is self._tag), None)
        self._tagged_steps, self._tag, self._around = made_steps, lambda *_: None, id(around)
        for frame in _frames():
            frame.f_trace = self._tag
        return around

    def note_step(self) -> None:
        """Note the instruction from which the optimizer steps, in the frame with the loop."""
        frame = next((frame for frame in _frames() if id(frame) == self._around), None)
        self._step_place = -1 if frame is None else frame.f_lasti

    def end(self, frame: FrameType, tries: int) -> bool:
        """End the loop of a frame, or after many `tries` the one around it; return False if that is not possible."""
        places = [place for place in (frame.f_lasti, self._step_place) if place >= 0]
        loops = [loop for loop in _find_loops(frame.f_code) if all(loop.start <= p < loop.end for p in places)]
        more, has_ended = tries // _TRIES, False
        for loop in loops:
            try:
                iterator = _read_iterator(frame, loop.depth) if loop.is_for else None
            except ValueError:  # an empty place
                break
            if hasattr(iterator, "tonnage_batches"):  # a data loader, which has no more batches
                continue
            if not _exhaust(iterator):
                break
            more, has_ended = more - 1, True
            if more < 0:
                break
        return has_ended


def _frames() -> Iterator[FrameType]:
    """Yield the frames of this thread, the innermost first, without those of torch and of the recorder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and not is_ours(name):
            yield frame
        frame = frame.f_back


@functools.lru_cache
def _find_loops(code: CodeType) -> tuple[_Loop, ...]:
    """Return the loops of a function, the innermost first.

    What the stack holds where an exception may be handled is in the code's own table: what `with` left there counts.
    Inside such a part only the iterators of loops are added.
    """
    instructions = list(dis.get_instructions(code))
    fors = {each.offset: int(each.argval) for each in instructions if each.opname == "FOR_ITER"}
    loops = []
    for start, end in fors.items():
        parts = [part for part in dis._parse_exception_table(code) if part.start <= start < part.end]  # type: ignore[attr-defined]
        part_start, depth = max(((part.start, part.depth) for part in parts), default=(0, 0))
        depth += sum(part_start <= outer < start < fors[outer] for outer in fors)
        loops.append(_Loop(True, depth, start, end))
    loops += [
        _Loop(False, 0, int(each.argval), each.offset + 1)
        for each in instructions
        if "JUMP_BACKWARD" in each.opname and "INTERRUPT" not in each.opname and each.argval not in fors
    ]
    return tuple(sorted(loops, key=lambda loop: loop.start - loop.end, reverse=True))


def _read_iterator(frame: FrameType, depth: int) -> Any:
    """Return the object at a depth of a frame's stack, which is not deeper than the stack is now."""
    code = frame.f_code
    variables = len({*code.co_varnames, *code.co_cellvars}) + len(code.co_freevars)
    data = ctypes.c_void_p.from_address(id(frame) + _FRAME_DATA).value or 0
    address = ctypes.c_void_p.from_address(data + _LOCALS + ctypes.sizeof(ctypes.c_void_p) * (variables + depth))
    return ctypes.cast(address, ctypes.py_object).value


def _exhaust(iterator: Any) -> bool:
    """Make an iterator have no more items; return False if there is no way to."""
    if isinstance(iterator, GeneratorType):
        with contextlib.suppress(Exception):  # its own clean-up may fail
            iterator.close()
        return iterator.gi_frame is None
    if type(iterator) in (enumerate, zip, map, filter):
        parts = [_exhaust(part) for part in iterator.__reduce__()[1] if hasattr(part, "__next__")]
        return any(parts)
    if type(iterator) in _COUNTED:
        iterator.__setstate__(sys.maxsize)
        return True
    return False


_COUNTED = tuple(type(each) for each in (iter(range(0)), iter(range(2**70)), iter([]), iter(()), iter(""), iter("é")))
"""Iterators that can be set to a position; each takes one behind its end for its end."""
