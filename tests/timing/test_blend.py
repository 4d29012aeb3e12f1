"""Steps between no recomputation and full recomputation, and batches of different lengths."""

from dataclasses import replace

import pytest

from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import find_model
from tonnage.estimates.step_time import price
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.timing.blend import blend_recomputation, padded_lengths
from tonnage.trainers.cases import request


@pytest.fixture(scope="module")
def ends():
    job, plan = request("llama-3.1-8b", offline=True, seq_len=4096)
    cluster = parse_cluster("8xh100-80gb")
    plan = replace(plan, shard="zero3")
    return [price(Case(job, replace(plan, checkpointing=way), cluster)) for way in ("none", "full", "selective")]


def run_again(part, again, looked_at):
    """Return the summary of what a budget recomputes."""
    return {"seconds_fraction": part, "layers": 32, "layers_again": again, "layers_in_part": looked_at}


@pytest.mark.parametrize(("part", "again", "same_as"), [(0.0, 0, 0), (1.0, 32, 1)])
def test_ends_are_those_of_the_time_model(ends, part, again, same_as):
    step = blend_recomputation(*ends, run_again(part, again, 0))
    assert step.step_seconds == pytest.approx(ends[same_as].step_seconds)
    assert step.recompute_seconds == pytest.approx(ends[same_as].recompute_seconds)
    assert step.mfu == pytest.approx(ends[same_as].mfu)


def test_seconds_grow_with_the_part_that_runs_again(ends):
    parts = [blend_recomputation(*ends, run_again(part / 4, 32, 32)).step_seconds for part in range(5)]
    assert parts == sorted(parts)
    assert parts[0] >= ends[0].step_seconds
    assert parts[2] < ends[1].step_seconds


def test_a_micro_batch_is_as_long_as_the_longest_of_its_sequences():
    assert padded_lengths([200, 100], 4096, 1) == {100: 0.5, 200: 0.5}
    assert padded_lengths([200, 100], 4096, 2) == {100: 0.25, 200: 0.75}
    assert padded_lengths([200, 100], 150, 1) == {100: 0.5, 150: 0.5}
    many = padded_lengths(list(range(1000)), 4096, 4)
    assert len(many) <= 16
    assert sum(many.values()) == pytest.approx(1)
    assert sum(length * often for length, often in many.items()) == pytest.approx(4 / 5 * 1000, rel=0.05)


def test_drawn_lengths_are_priced_one_by_one_and_padding_is_not_counted():
    cluster, model = (
        parse_cluster("h200"),
        ModelRef(name="", kind="config", config=find_model("llama-3.2-1b").config()),
    )
    job = Job(model=model, seq_len=4096, micro_batch=2)
    short, long = (price(Case(replace(job, seq_len=length), Plan(), cluster)) for length in (1024, 4096))
    drawn = price(Case(replace(job, lengths=("1024", "4096")), Plan(), cluster))
    assert drawn.step_seconds == pytest.approx(0.25 * short.step_seconds + 0.75 * long.step_seconds)
    assert drawn.tokens_per_second_per_gpu == pytest.approx(2 * 2560 / drawn.step_seconds)
    assert drawn.mfu < long.mfu
