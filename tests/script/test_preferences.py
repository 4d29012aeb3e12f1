"""The example of preference training: what each kind of reference, of loading and of saving needs."""

from pathlib import Path

import pytest

import tonnage
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.estimate import Estimate
from tonnage.ghost.wheel import Torch
from tonnage.script import dry_run

EXAMPLE = Path(tonnage.__file__).parents[2] / "examples" / "preferences.py"
WIDTH, LAYERS, VOCABULARY = 256, 4, 32_000
SIZES = ("--width", str(WIDTH), "--layers", str(LAYERS), "--pairs", "2", "--length", "256")

PARAMETERS = LAYERS * (4 * WIDTH**2 + 3 * 4 * WIDTH**2 + 2 * WIDTH) + 2 * VOCABULARY * WIDTH + WIDTH
"""Of the layers (attention, a gated MLP, two norms), of embedding and head, and of the last norm."""


def run(*words: str) -> Estimate:
    command = ["python", str(EXAMPLE), *SIZES, *words]
    return dry_run.run(command, parse_cluster("t4"), steps=3).estimate


@pytest.mark.parametrize(("reference", "copies"), [("copy", 2), ("adapters", 1), ("precomputed", 1)])
def test_a_reference_needs_its_weights_once_more_or_not_at_all(
    reference: str, copies: int, torch_build: Torch
) -> None:
    estimate = run("--reference", reference)
    adapters = 0 if reference != "adapters" else LAYERS * 2 * 2 * 16 * WIDTH * 4
    held = estimate.peak.by_category["parameter"] - adapters
    assert held == pytest.approx(2 * PARAMETERS * copies, rel=0.02)
    names = [phase.name for phase in estimate.phases]
    assert bool({"evaluate", "reference"} & set(names)) == (reference != "precomputed")
    states = estimate.peak.by_category["optimizer_state"]
    assert states < PARAMETERS if reference == "adapters" else states >= 4 * PARAMETERS
