"""Treatments of layers under a budget: sums that can be done by hand, and every choice tried on small networks."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tonnage.techniques.budgeting.layerwise import CLOSE, Network, Way, choose, hull

FULL = Way(1, 11, 10.0, "full")
SOME = Way(6, 12, 2.0, "some")
NONE = Way(10, None, 0.0, "none")
NETWORK = Network(((FULL, SOME, NONE),) * 4, before=2, after=5)


def words(chosen):
    return None if chosen is None else " ".join(way.treatment for way in chosen)


@pytest.mark.parametrize(
    ("ways", "peak"),
    [
        ((NONE,) * 4, 2 + 4 * 10 + 5),  # the end of the forward
        ((FULL,) * 4, 2 + 3 * 1 + 11),  # the last layer runs again behind the inputs of three
        ((FULL, FULL, FULL, NONE), 2 + 3 * 1 + 10 + 5),
        ((NONE, FULL, FULL, FULL), 2 + 10 + 2 * 1 + 11),  # the first kept: still there when the last runs again
    ],
)
def test_the_highest_moment(ways, peak):
    assert NETWORK.peak(ways) == peak


@pytest.mark.parametrize(
    ("budget_bytes", "chosen"),
    [
        (15, None),
        (16, "full full full full"),
        (17, "full full full some"),  # 2 + 3 + 12 while the last runs again
        (32, "some some some some"),  # 2 + 3 * 6 + 12
        (35, "some some some none"),
        (43, "some none none none"),  # 2 + 6 + 3 * 10 + 5
        (47, "none none none none"),
    ],
)
def test_as_much_as_fits_is_kept_at_the_end(budget_bytes, chosen):
    assert words(choose(NETWORK, budget_bytes)) == chosen


@some.composite
def networks(draw):
    """Up to five layers of up to two kinds with up to four ways each."""
    kinds = []
    for _ in range(draw(some.integers(1, 2))):
        size, length = draw(some.integers(1, 12)), draw(some.integers(1, 9))
        ways = [Way(1, size, float(length)), Way(size, None, 0.0)]
        for _ in range(draw(some.integers(0, 2))):
            kept = draw(some.integers(1, size))
            ways.append(Way(kept, size + draw(some.integers(0, 3)), float(draw(some.integers(0, length)))))
        kinds.append(tuple(ways))
    layers = tuple(draw(some.sampled_from(kinds)) for _ in range(draw(some.integers(1, 5))))
    return Network(layers, before=draw(some.integers(0, 4)), after=draw(some.integers(0, 20)))


@given(networks(), some.integers(0, 70))
@settings(max_examples=200)
def test_equal_to_trying_everything(network, budget_bytes):
    possible = [ways for ways in itertools.product(*network.layers) if network.peak(ways) <= budget_bytes]
    chosen = choose(network, budget_bytes)
    assert (chosen is None) == (not possible) == (network.least > budget_bytes)
    if chosen is not None:
        assert chosen in possible
        assert sum(way.seconds for way in chosen) == min(sum(way.seconds for way in ways) for ways in possible)


def test_equal_layers_mix_two_neighbours_on_the_hull():
    """126 layers, 40 options: all but one of the layers have one of two options."""
    ways = tuple(Way(1 + place, 60, 100.0 / (1 + place)) for place in range(40))
    network = Network((ways,) * 126, before=0, after=0)
    chosen = choose(network, 1000)
    assert network.peak(chosen) <= 1000
    counts = sorted((chosen.count(way) for way in set(chosen)), reverse=True)
    assert sum(counts[:2]) >= 125
    assert list(chosen) == sorted(chosen, key=lambda way: way.kept)


def test_a_way_above_the_hull_is_no_part_of_it():
    assert hull((FULL, Way(5, 11, 9.0), SOME, NONE)) == [FULL, SOME, NONE]


def fewest_seconds(ways, layers, budget_bytes):
    """Return the fewest seconds of so many equal layers that may keep so much together, by all sums of bytes."""
    found = [0.0] * (budget_bytes + 1)
    for _ in range(layers):
        found = [
            min((found[room - way.kept] + way.seconds for way in ways if way.kept <= room), default=float("inf"))
            for room in range(budget_bytes + 1)
        ]
    return found[budget_bytes]


@pytest.mark.parametrize("budget_bytes", [200, 357, 480, 555, 741, 1000])
def test_many_layers_come_close_to_the_fewest_seconds(budget_bytes):
    """28 layers whose hull has few points (1, 4, 15, 17, 25 and 34 bytes): the rest goes to options beside it."""
    points = {1: 97.0, 2: 90.7, 3: 82.7, 4: 72.6, 5: 71.9, 7: 65.6, 9: 48.3, 12: 37.5, 15: 24.0, 16: 21.1}
    points |= {17: 19.3, 20: 15.1, 25: 5.0, 28: 3.3}
    ways = (*(Way(kept, 40, seconds) for kept, seconds in points.items()), Way(34, None, 0.0))
    chosen = choose(Network((ways,) * 28, before=0, after=0), budget_bytes + 34)
    assert chosen is not None
    found = sum(way.seconds for way in chosen)
    assert found <= fewest_seconds(ways, 27, budget_bytes) + CLOSE * 28 * 97.0
