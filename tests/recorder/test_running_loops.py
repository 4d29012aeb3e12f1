"""Loops that are ended from inside their body."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator

import pytest

from tonnage.recorder.tonnage_recorder import running_loops

pytestmark = pytest.mark.skipif(not running_loops._IS_KNOWN, reason="another Python than CPython 3.11 to 3.13")


def end(tries: int = 0) -> bool:
    return running_loops.RunningLoops().end(sys._getframe(1), tries)


def over_numbers() -> list[int]:
    seen = []
    for number in range(100):
        seen.append(number)
        if number == 1:
            assert end()
    return seen


def over_a_list_and_others() -> list[object]:
    seen: list[object] = []
    pairs = zip([0, 1, 2], [0, 1, 2], strict=True)
    for items in ([0, 1, 2], (0, 1, 2), enumerate([0, 1, 2]), pairs, map(abs, [0, 1, 2])):
        for item in items:  # type: ignore[attr-defined]
            if item in (1, (1, 1)):
                assert end()
        seen.append(item)
    return seen


def over_a_generator_that_cleans_up() -> list[str]:
    seen = []

    def forever() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            seen.append("closed")

    for number in forever():
        if number == 3:
            assert end()
    return seen


def inside_with_and_try() -> list[int]:
    seen = []
    for number in range(3):
        with contextlib.suppress(ZeroDivisionError), contextlib.nullcontext():
            try:
                for inner in [0, 1, 2, 3]:
                    with contextlib.suppress(KeyError):
                        if inner == number:
                            assert end()
                        raise KeyError
                seen.append(inner)
            finally:
                seen.append(-1)
            _ = 1 / 0
    return seen


def while_an_exception_is_handled() -> int:
    try:
        raise KeyError
    except KeyError:
        for number in range(9):
            if number == 2:
                assert end()
    return number


def of_epochs() -> list[tuple[int, int]]:
    seen = []
    for epoch in range(9):
        for number in range(9):
            seen.append((epoch, number))
            if number == epoch == 1:
                assert end(8)
    return seen


@pytest.mark.parametrize(
    ("loop", "seen"),
    [
        (over_numbers, [0, 1]),
        (over_a_list_and_others, [1, 1, (1, 1), (1, 1), 1]),
        (over_a_generator_that_cleans_up, ["closed"]),
        (inside_with_and_try, [0, -1, 1, -1, 2, -1]),
        (while_an_exception_is_handled, 2),
        (of_epochs, [*((0, number) for number in range(9)), (1, 0), (1, 1)]),
    ],
)
def test_a_loop_ends_after_this_turn(loop: Callable[[], object], seen: object) -> None:
    assert loop() == seen


def test_what_has_no_end_goes_on() -> None:
    ended = []
    for number in itertools.count():
        ended.append(end())
        if number == 2:
            break
    assert ended == [False] * 3


def test_the_innermost_frame_of_two_steps_has_the_loop() -> None:
    loops, found = running_loops.RunningLoops(), []

    def step(number: int) -> None:
        for _ in range(2):
            frame = loops.find_frame(number)
            found.append(frame and frame.f_code.co_name)
        loops.note_step()

    for number in range(3):
        step(number)
    here = test_the_innermost_frame_of_two_steps_has_the_loop.__name__
    assert found == [None, None, here, None, here, None]
