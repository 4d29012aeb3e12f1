"""The whole training, from the pace of a step."""

from dataclasses import replace

import pytest

import estimates
from tonnage.errors import UsageError
from tonnage.estimates.training import TrainingGoal, describe_training, with_training


def timed(**job):
    made = estimates.fitting()
    time = {**made.time, "step_seconds": 1.0, "tokens_per_second_per_gpu": 1000.0}
    return replace(made, time=time, job={**made.job, **job}, cluster={**made.cluster, "gpus": 8})


def test_days_hours_of_gpus_and_money():
    training = with_training(timed(), TrainingGoal(tokens=8 * 1000 * 86400 * 3, price=2.5)).time["training"]
    assert training == {"tokens": 2_073_600_000, "seconds": 3 * 86400.0, "gpu_hours": 576.0, "cost": 1440.0}
    words = describe_training({"training": training})
    assert words == "2,073,600,000 tokens take 3.0 days, 576.0 GPU-hours, which cost 1,440.00"


@pytest.mark.parametrize(("lengths", "tokens"), [((), 100 * 512), (("128", "1000"), 100 * 320)])
def test_samples_are_sequences_cut_at_their_longest(lengths, tokens):
    goal = TrainingGoal(samples=100)
    assert with_training(timed(seq_len=512, lengths=lengths), goal).time["training"]["tokens"] == tokens


def test_nothing_is_said_without_a_goal_or_a_pace():
    made = timed()
    assert with_training(made, TrainingGoal()) is made
    unpriced = replace(made, time={**made.time, "tokens_per_second_per_gpu": None})
    assert with_training(unpriced, TrainingGoal(tokens=5)) is unpriced
    assert describe_training(made.time) is None


BAD = ({"tokens": 1, "samples": 1}, {"price": 2.0}, {"tokens": 1, "price": 0.0}, {"tokens": 1, "price": "cheap"})


@pytest.mark.parametrize("goal", BAD)
def test_contradictory_goals_raise(goal):
    with pytest.raises(UsageError):
        TrainingGoal(**goal)
