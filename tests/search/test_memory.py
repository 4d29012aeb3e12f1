"""Which candidates need one step made, the others being its requests again."""

from dataclasses import replace

import pytest

from solutions import question
from tonnage.plans import Plan
from tonnage.search.memory import COMPILED, STEPS, STEPS_EXPANDABLE, steps_run
from tonnage.solution import Candidate
from tonnage.techniques import choices


@pytest.mark.parametrize(
    ("plan", "job", "expected"),
    [
        ({}, {}, (1, STEPS - 1)),
        ({"shard": "zero3", "tp": 2, "allocator": "expandable"}, {}, (1, STEPS_EXPANDABLE - 1)),
        ({"shard": "ddp"}, {}, (STEPS, 0)),
        ({"shard": "zero1", "allocator": "expandable"}, {}, (STEPS_EXPANDABLE, 0)),
        ({"checkpointing": "budget=2GiB"}, {}, (STEPS, 0)),
        ({"optimizer": "adamw-4bit"}, {}, (STEPS, 0)),
        ({"attention": "flex"}, {}, (STEPS, 0)),
        ({"outputs": "loop"}, {}, (STEPS, 0)),
        ({"engine": "trl"}, {}, (STEPS, 0)),
        ({}, {"eval_batch": 2}, (STEPS, 0)),
        ({}, {"lengths": ("128", "256")}, (STEPS, 0)),
        ({}, {"save_checkpoint": "full"}, (STEPS, 0)),
    ],
)
def test_steps_are_made_where_they_follow_from_those_before(plan, job, expected):
    asked = question()
    assert steps_run(Candidate(job=replace(asked.job, **job), plan=Plan(**plan))) == expected


def test_compiled_optimizers_are_optimizers():
    assert set(COMPILED) <= set(choices("optimizer"))
