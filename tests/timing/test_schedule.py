"""Pipelines: the bubble by hand, and the layers of each stage."""

import pytest

from tonnage.timing.schedule import exposed_seconds, pipeline_seconds, split_by_cost, split_equally


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 256)])
def test_equal_stages_wait_for_p_minus_1_of_m(stages, micro_batches):
    whole = pipeline_seconds((3.0,) * stages, micro_batches)
    assert whole == pytest.approx(3.0 * micro_batches * (1 + (stages - 1) / micro_batches))


def test_interleaving_divides_the_wait():
    assert pipeline_seconds((1.0,) * 4, 8, virtual_stages=3) == 8 + 3 / 3


def test_the_slowest_stage_sets_the_pace():
    assert pipeline_seconds((1.0, 2.0, 1.0), 10) == 10 * 2.0 + 1.0 + 1.0


def test_only_the_exposed_part_of_an_exchange_counts():
    assert exposed_seconds(5.0, 10.0) == 0.0
    assert exposed_seconds(5.0, 2.0) == 3.0
    assert exposed_seconds(5.0, 10.0, overlap=0.8) == pytest.approx(1.0)


def test_earlier_stages_get_the_layers_left_over():
    assert split_equally(10, 4).layers == (3, 3, 2, 2)
    assert (split_equally(10, 4).head, split_equally(10, 4).loss) == (3, 3)


def test_the_stage_of_a_costly_head_gets_fewer_layers():
    # 16 layers and a head worth 4: thresholds 5, 10, 15 of 20
    assert split_by_cost(16, 4, 4.0).layers == (5, 5, 5, 1)
    assert split_by_cost(16, 4, 4.0).filled


def test_too_many_stages_leave_some_without_weights():
    split = split_by_cost(16, 16, 4.0)
    assert sum(split.layers) == 16
    assert not split.filled
