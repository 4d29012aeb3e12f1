"""Layers of the stages of a pipeline, and hand-overs that stall."""

from dataclasses import replace

import pytest

from timed_steps import EAGER, LLAMA, MANY, PLAIN
from tonnage.mesh import Mesh
from tonnage.timing.pipeline import split_network
from tonnage.timing.software import software
from tonnage.timing.timing import time_step


def test_stalls_are_counted_by_hand_overs_and_only_where_there_are_enough_ranks():
    calm = replace(software("megatron"), crowded_ranks=64, handing_seconds=0.0)
    stalling = replace(calm, handing_seconds=0.1)
    work = replace(PLAIN, axes=Mesh(pp=4, dp_replicate=2, tp=8), grad_accum=8, shard="zero1")

    def more(work, cluster):
        return (
            time_step(LLAMA, work, cluster, stalling).step_seconds
            - time_step(LLAMA, work, cluster, calm).step_seconds
        )

    assert more(work, MANY) == pytest.approx(0.1 * (4 * 8 + 3))  # a middle stage's, and three to get there
    assert more(replace(work, axes=Mesh(pp=2, dp_replicate=4, tp=8)), MANY) == pytest.approx(0.1 * (2 * 8 + 1))
    assert more(replace(work, axes=Mesh(dp_replicate=8, tp=8)), MANY) == 0.0
    assert more(replace(work, axes=Mesh(pp=4, tp=8)), replace(MANY, nodes=4)) == 0.0


def test_the_layers_of_stages_may_be_given():
    work = replace(PLAIN, axes=Mesh(pp=4), grad_accum=8)
    given = replace(work, stage_layers=(9, 9, 9, 5))
    assert split_network(LLAMA, given, EAGER).layers == (9, 9, 9, 5)
    assert split_network(LLAMA, work, EAGER).layers == (8, 8, 8, 8)
