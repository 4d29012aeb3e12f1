"""Sets of plans to try, by hand."""

import pytest
from benchmarks.time.alternatives import Prospect, best_set


def test_the_first_has_the_highest_speed_to_be_expected():
    fast, safe = Prospect(speed=10.0, runs=0.5), Prospect(speed=6.0)
    assert fast.expected == 5.0
    assert best_set([fast, safe], 1) == (1,)
    stalling = Prospect(speed=10.0, stalls=0.25, stalled_speed=2.0)
    assert stalling.expected == pytest.approx(0.75 * 10 + 0.25 * 2)


def test_a_twin_adds_less_than_another_kind():
    """Errors that are the same make the second of two equal plans worthless; what is 2 % slower but has errors of its
    own is the better one of the two in nearly half of all cases."""
    best = Prospect(speed=100.0, shared=(("kind", 1.0),))
    twin = Prospect(speed=99.9, shared=(("kind", 1.0),))
    other = Prospect(speed=98.0)
    assert best_set([best, twin, other], 2) == (0, 2)
    assert best_set([best, twin, other], 3) == (0, 2, 1)


def test_without_errors_only_chances_count():
    """A chance of 1 in 20 to be five times as fast adds (500 - 100) / 20 = 20, being nearly as fast nothing."""
    best, near = Prospect(speed=100.0), Prospect(speed=99.0)
    lucky = Prospect(speed=500.0, stalls=0.95, stalled_speed=10.0)
    assert lucky.expected == pytest.approx(34.5)
    assert best_set([best, near, lucky], 2, error=0.0) == (0, 2)


def test_beyond_the_first_come_those_that_surely_run():
    best, doubtful, slow = Prospect(speed=100.0), Prospect(speed=99.0, runs=0.8), Prospect(speed=70.0)
    assert best_set([best, doubtful, slow], 3) == (0, 2, 1)
    assert best_set([best], 3) == (0,)
    assert best_set([], 3) == ()
