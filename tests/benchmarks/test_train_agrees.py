"""What `estimate` says of a plan is what `tonnage train` allocates under it, by a dry-run of the command."""

import pytest
from benchmarks.train_agrees import PLANS, answers, differences

pytestmark = [pytest.mark.ghost, pytest.mark.slow]

ATTRIBUTED = {"zero3 on two": ("activation", "communication")}
"""Buffers that lie one after the other at an address count as either, as real ranks or a single one send them."""


@pytest.mark.parametrize("name", ["plain", "zero3 on two"])
def test_the_command_needs_what_was_estimated(name: str, torch_build: object) -> None:
    estimated, trained = answers(*PLANS[name])
    differing = [line for line in differences(estimated, trained) if not line.startswith(ATTRIBUTED.get(name, "-"))]
    assert differing == []
    held = [sum(document["peak"]["by_category"].values()) for document in (estimated, trained)]
    assert held[0] == held[1]
