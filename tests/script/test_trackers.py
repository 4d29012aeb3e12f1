"""Tests of the variables that keep experiment trackers offline in a dry-run."""

from pathlib import Path

import pytest

from tonnage.script.trackers import offline


@pytest.mark.parametrize(("inherited", "mode"), [("online", "offline"), ("", "offline"), ("disabled", "disabled")])
def test_a_disabled_tracker_stays_disabled(inherited: str, mode: str) -> None:
    assert offline(Path("/runs/a"), {"WANDB_MODE": inherited} if inherited else {})["WANDB_MODE"] == mode


def test_trackers_write_into_the_folder() -> None:
    variables = offline(Path("/runs/a"), {"MLFLOW_TRACKING_URI": "https://tracking.example"})
    paths = [value for name, value in variables.items() if name.endswith(("_DIR", "_DIRECTORY", "_URI"))]
    assert len(paths) == 5
    assert {value.removeprefix("file://").removesuffix("/mlflow") for value in paths} == {"/runs/a"}
