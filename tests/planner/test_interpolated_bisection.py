"""The largest number that fits is found in few tries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.planner.interpolated_bisection import find_largest


def record_tries(room, most):
    """Return the result of `find_largest`, and the numbers that it tried."""
    numbers = []

    def record(number):
        numbers.append(number)
        return room(number)

    return find_largest(most, record), numbers


@pytest.mark.parametrize(("last", "most"), [(1, 1), (1, 100), (7, 100), (8, 100), (63, 64), (64, 64), (100, 64)])
def test_largest_number_that_fits(last, most):
    assert find_largest(most, lambda number: float(last - number)) == min(last, most)
    assert find_largest(most, lambda number: 1.0 if number <= last else None) == min(last, most)


def test_nothing_fits():
    assert find_largest(10, lambda number: -5.0) is None
    assert find_largest(10, lambda number: None) is None
    assert find_largest(0, lambda number: 5.0) is None


@pytest.mark.parametrize("last", [3, 73, 700, 4000])
def test_linear_room_takes_few_tries(last):
    found, numbers = record_tries(lambda number: 80e9 - 16e9 - 64e9 / (last + 0.4) * number, 4096)
    assert found == last
    assert numbers[-2:] == [last, last + 1]
    assert len(numbers) <= 7


def test_step_is_found_by_bisection():
    found, numbers = record_tries(lambda number: 1.0 if number <= 700 else -1e12, 4096)
    assert found == 700
    assert len(numbers) <= 4 + 2 * 12


@given(
    most=st.integers(1, 4096),
    last=st.integers(0, 4096),
    power=st.floats(0.1, 8),
    offset=st.floats(0, 0.999),
    cliff=st.sampled_from([0.0, 1e3, 1e12, None]),
)
def test_any_decreasing_room(most, last, power, offset, cliff):
    """Convex or concave, with a step at its end or no value behind it."""

    def room(number):
        if number <= last:
            return (last + offset) ** power - number**power
        return None if cliff is None else (last + offset) ** power - number**power - cliff

    found, numbers = record_tries(room, most)
    assert found == (min(last, most) or None)
    assert len(numbers) == len(set(numbers)) <= 4 + 2 * 12
