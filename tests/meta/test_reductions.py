"""Memory inside reductions, against sizes seen on a real H100 and on ghosts."""

import pytest

from tonnage.catalog.devices import find_device
from tonnage.meta.reductions import of, temporaries

H100 = find_device("h100-80gb")

SEEN = {
    (2560, 2048): (41_943_040, 64),  # snapshots of a real H100, kkaitlyn111/cs336-a2-systems
    (10_000, 2048): (138_412_032, 64),
    (4096, 4096): (134_217_728, 128),  # ghost
    (1024, 2048): (16_777_216, 64),
}


@pytest.mark.parametrize("shape", SEEN)
def test_column_sums(shape: tuple[int, int]) -> None:
    assert temporaries(of(shape, (shape[1], 1), [0]), 4, H100) == SEEN[shape]


def test_a_sum_over_everything() -> None:
    assert temporaries(of((32_000, 4096), (4096, 1), None), 4, H100) == (4000, 4)


def test_dimensions_of_one_element_and_neighbours_do_not_matter() -> None:
    flat = of((4096, 512), (512, 1), [0])
    assert of((1, 8, 512, 512), (8 * 512 * 512, 512 * 512, 512, 1), [0, 1, 2]) == flat
    assert of((8, 512, 512), (512 * 512, 512, 1), [0, -2]) == flat


@pytest.mark.parametrize(
    ("shape", "strides", "dims"),
    [((4096, 64), (64, 1), [1]), ((16, 4096), (4096, 1), [0]), ((0, 4), (4, 1), [0]), ((), (), None)],
)
def test_where_each_output_has_threads_of_its_own_nothing_is_taken(
    shape: tuple[int, ...], strides: tuple[int, ...], dims: list[int] | None
) -> None:
    assert temporaries(of(shape, strides, dims), 4, H100) == ()
