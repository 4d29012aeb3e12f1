"""The frontier of one layer: chains that can be followed by hand, and every choice tried on small graphs."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as some

from tonnage.techniques.budgeting.frontier import Piece, Point, frontier, held_again, run_again


def by_trying_everything(pieces):
    """Return the frontier as (bytes, seconds), from every set of pieces that may be kept."""
    free = [index for index, piece in enumerate(pieces) if not piece.fixed]
    ways = []
    for count in range(len(free) + 1):
        for chosen in itertools.combinations(free, count):
            kept = frozenset(chosen)
            seconds = sum(pieces[index].seconds for index in sorted(run_again(pieces, kept), reverse=True))
            ways.append((sum(pieces[index].bytes for index in kept), seconds))
    return sorted(
        {
            (held, seconds)
            for held, seconds in ways
            if not any(a <= held and b <= seconds and (a, b) != (held, seconds) for a, b in ways)
        }
    )


@some.composite
def layers(draw):
    """Up to eight pieces with whole seconds, so that sums are exact."""
    pieces = []
    for index in range(draw(some.integers(1, 8))):
        reads = tuple(sorted(draw(some.sets(some.integers(0, index - 1), max_size=3)))) if index else ()
        fixed = draw(some.integers(0, 5)) == 0
        saved, wanted = draw(some.booleans()), draw(some.integers(0, 5)) == 0
        size, seconds = draw(some.integers(0, 9)), draw(some.integers(0, 9))
        pieces.append(Piece(size, float(seconds), reads, saved=saved, wanted=wanted, fixed=fixed))
    return pieces


@given(layers())
@settings(max_examples=150)
def test_equal_to_trying_everything(pieces):
    found = frontier(pieces)
    assert [(point.bytes, point.seconds) for point in found] == by_trying_everything(pieces)
    for point in found:
        assert point.bytes == sum(pieces[index].bytes for index in point.kept)
        assert point.seconds == sum(pieces[index].seconds for index in run_again(pieces, point.kept))
        assert not any(pieces[index].fixed for index in point.kept)


def test_a_chain_is_cut_where_it_is_thin():
    """Input -> product (wide) -> turned (narrow, saved): keeping what is saved spares the product too."""
    product, turned = Piece(4, 10.0), Piece(2, 1.0, (0,), saved=True)
    assert frontier([product, turned]) == (Point(0, 11.0, frozenset()), Point(2, 0.0, frozenset({1})))


def test_two_that_are_saved_behind_each_other():
    """Keeping the second alone spares its own seconds; the first one must run for its own sake."""
    first, second = Piece(1, 5.0, saved=True), Piece(1, 3.0, (0,), saved=True)
    found = [(point.bytes, point.seconds) for point in frontier([first, second])]
    assert found == [(0, 8.0), (1, 3.0), (2, 0.0)]


def test_random_numbers_are_drawn_again_and_what_they_read_is_needed():
    before, drawn = Piece(1, 5.0), Piece(1, 2.0, (0,), saved=True, fixed=True)
    found = [(point.bytes, point.seconds) for point in frontier([before, drawn])]
    assert found == [(0, 7.0), (1, 2.0)]


def test_what_is_held_while_a_layer_runs_again():
    pieces = [Piece(8, 1.0), Piece(4, 1.0, (0,), saved=True), Piece(2, 1.0, (1,), saved=True)]
    assert held_again(pieces, frozenset()) == 6
    assert held_again(pieces, frozenset({0, 1})) == 14


def test_nothing_to_run():
    assert frontier([]) == (Point(0, 0.0, frozenset()),)
