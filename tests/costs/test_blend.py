"""Between nothing and everything running again."""

from dataclasses import replace

import pytest

from tonnage.api import request
from tonnage.costs.answer import price
from tonnage.costs.blend import blended
from tonnage.device import parse_cluster


@pytest.fixture(scope="module")
def ends():
    job, plan = request("llama-3.1-8b", offline=True, seq_len=4096)
    cluster = parse_cluster("8xh100-80gb")
    plan = replace(plan, shard="zero3")
    return [price(job, replace(plan, checkpointing=way), cluster) for way in ("none", "full", "selective")]


def run_again(part, again, looked_at):
    return {"seconds_fraction": part, "layers": 32, "layers_again": again, "layers_in_part": looked_at}


@pytest.mark.parametrize(("part", "again", "same_as"), [(0.0, 0, 0), (1.0, 32, 1)])
def test_ends_are_those_of_the_time_model(ends, part, again, same_as):
    found = blended(*ends, run_again(part, again, 0))
    assert found.step_seconds == pytest.approx(ends[same_as].step_seconds)
    assert found.recompute_seconds == pytest.approx(ends[same_as].recompute_seconds)
    assert found.mfu == pytest.approx(ends[same_as].mfu)


def test_in_between_it_grows_with_what_runs_again(ends):
    parts = [blended(*ends, run_again(part / 4, 32, 32)).step_seconds for part in range(5)]
    assert parts == sorted(parts)
    assert parts[0] >= ends[0].step_seconds
    assert parts[2] < ends[1].step_seconds
