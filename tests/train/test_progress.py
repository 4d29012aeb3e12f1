"""The progress of a run: the time that is left, and the curve of losses that it ends with."""

import pytest

from tonnage.train.progress import Pace, draw_curve


@pytest.mark.parametrize(
    ("losses", "curve"),
    [
        ([float(loss) for loss in range(80, 0, -10)], None),
        ([2.0] * 10, "▁" * 10),
        ([*range(15, 7, -1), 8.0, 8.0], "█▇▆▅▄▃▂▁▁▁"),
    ],
)
def test_a_bar_for_each_of_few_steps(losses: list[float], curve: str | None) -> None:
    assert draw_curve(losses) == curve


def test_many_steps_are_averaged() -> None:
    curve = draw_curve([9.0] * 300 + [1.0] * 300)
    assert curve == "█" * 30 + "▁" * 30


def test_the_time_left_is_that_of_steps_with_what_is_between_them() -> None:
    """A slow first step, four of a second with a save of four seconds between them, and one of a hiccup."""
    times = iter([30.0, 31.0, 32.0, 33.0, 38.0, 48.0])
    pace = Pace(lambda: next(times))
    taken = (30.0, 1.0, 1.0, 1.0, 1.0, 10.0)
    left = [pace.seconds_left(step, 11, seconds) for step, seconds in enumerate(taken, 1)]
    assert left == pytest.approx([300.0, 9.0, 8.0, 7.0, 12.0, 18.0])
