"""What experiment trackers are told in a dry-run."""

from pathlib import Path

import pytest

from tonnage.script.trackers import offline


@pytest.mark.parametrize(("said", "mode"), [("online", "offline"), ("", "offline"), ("disabled", "disabled")])
def test_a_tracker_that_sends_nothing_stays_as_it_is(said: str, mode: str) -> None:
    assert offline(Path("/runs/a"), {"WANDB_MODE": said} if said else {})["WANDB_MODE"] == mode


def test_what_trackers_write_goes_into_the_folder() -> None:
    told = offline(Path("/runs/a"), {"MLFLOW_TRACKING_URI": "https://tracking.example"})
    places = [value for name, value in told.items() if name.endswith(("_DIR", "_DIRECTORY", "_URI"))]
    assert len(places) == 5
    assert {value.removeprefix("file://").removesuffix("/mlflow") for value in places} == {"/runs/a"}
