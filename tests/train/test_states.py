"""Hyperparameters of an optimizer's groups."""

import torch

from tonnage.train import states


def test_a_hyperparameter_in_a_tensor_stays_in_it() -> None:
    rate = torch.tensor(0.1)
    group = {"lr": rate, "betas": (0.9, 0.99)}
    states.set_hyperparameter(group, "lr", 0.5)
    states.set_hyperparameter(group, "betas", (0.8, 0.9))
    assert group["lr"] is rate
    assert group == {"lr": 0.5, "betas": (0.8, 0.9)}
