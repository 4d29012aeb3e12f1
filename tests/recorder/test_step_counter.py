"""Several optimizers make a step together."""

import torch
from torch import nn

from tonnage.recorder.tonnage_recorder.step_counter import PATIENCE, StepCounter


def test_a_network_that_is_frozen_while_another_steps_is_waited_for() -> None:
    counter = StepCounter(lambda parameter: True)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 2)
    makes, judges = (torch.optim.Adam(each.parameters()) for each in (generator, critic))
    counter.add(makes)
    counter.add(judges)
    generator.requires_grad_(False)
    counter.count(judges)
    assert counter.is_unfinished()
    assert counter.sizes_never_stepped() == [6]
    generator.requires_grad_(True)
    counter.count(makes)
    assert not counter.is_unfinished()


def test_what_was_frozen_before_its_optimizer_was_made_is_not_waited_for() -> None:
    counter = StepCounter(lambda parameter: True)
    frozen, head = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    counter.add(torch.optim.Adam(frozen.parameters()))
    stepping = torch.optim.Adam(head.parameters())
    counter.add(stepping)
    counter.count(stepping)
    assert not counter.is_unfinished()


def test_what_is_frozen_for_good_is_waited_for_a_while() -> None:
    counter = StepCounter(lambda parameter: True)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    counter.add(torch.optim.Adam(first.parameters()))
    stepping = torch.optim.Adam(second.parameters())
    counter.add(stepping)
    first.requires_grad_(False)
    for _ in range(PATIENCE):
        counter.count(stepping)
    assert not counter.is_unfinished()
    counter.begin_step()
    counter.count(stepping)
    assert not counter.is_unfinished()
