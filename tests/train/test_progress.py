"""The curve of losses that a run ends with."""

import pytest

from tonnage.train.progress import draw_curve


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
