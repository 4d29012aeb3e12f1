"""What trials measured corrects later estimates of the same network on the same card, and says so."""

from dataclasses import replace
from pathlib import Path

import pytest

from estimates import fitting
from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates import history
from tonnage.plans import Plan

TORCH = "2.13.0"


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "file", lambda: tmp_path / "cache" / "history.sqlite")


def case(gpu: str = "a100-40gb", model: str = "llama", micro_batch: int = 1, **plan: object) -> Case:
    return Case(replace(tiny_job(model), micro_batch=micro_batch), Plan(**plan), parse_cluster(gpu))


def measure(asked: Case, ratio: float, torch_version: str = f"{TORCH}+cu130") -> None:
    history.record(asked, torch_version, predicted_seconds=2.0, measured_seconds=2.0 * ratio)


def ratio_of(asked: Case) -> float | None:
    found = history.find_correction(asked, TORCH)
    return None if found is None else found.ratio


def test_without_a_history_nothing_changes() -> None:
    assert history.correct(fitting(), case()) is not None
    assert ratio_of(case()) is None
    assert history.forget(case()) == 0


def test_the_same_plan_is_corrected_by_its_own_trials() -> None:
    measure(case(), 1.2)
    measure(case(micro_batch=2), 1.5)
    measure(case(micro_batch=4), 1.6)
    assert ratio_of(case(micro_batch=2)) == pytest.approx(1.5)
    assert ratio_of(case(checkpointing="full")) == pytest.approx(1.5)  # the median of all


@pytest.mark.parametrize("other", [case("h100-80gb"), case(model="gpt2"), case("2xa100-40gb", shard="ddp")])
def test_other_cards_networks_and_numbers_of_cards_are_not(other: Case) -> None:
    measure(case(), 1.2)
    assert ratio_of(other) is None


def test_another_torch_is_not() -> None:
    measure(case(), 1.2, "2.11.0")
    assert ratio_of(case()) is None


def test_a_disturbed_measurement_is_left_out() -> None:
    measure(case(), 30.0)
    assert ratio_of(case()) is None


def test_the_estimate_says_what_was_done() -> None:
    measure(case(), 1.25)
    times = {"step_seconds": 2.0, "low_seconds": 1.8, "high_seconds": 2.4, "tokens_per_second_per_gpu": 100.0}
    before = replace(fitting(), versions={"torch": TORCH}, time={**times, "mfu": 0.4, "bound_by": "compute"})
    after = history.correct(before, case())
    assert after.time["step_seconds"] == pytest.approx(before.time["step_seconds"] * 1.25)
    assert after.time["uncorrected_step_seconds"] == before.time["step_seconds"]
    assert after.time["tokens_per_second_per_gpu"] == pytest.approx(before.time["tokens_per_second_per_gpu"] / 1.25)
    assert "1.25 times the time model's: 1 trial of this very plan on a100-40gb" in after.coverage.assumed[-1]


def test_what_is_forgotten_corrects_nothing() -> None:
    measure(case(), 1.25)
    measure(case(model="gpt2"), 1.5)
    assert history.forget(case()) == 1
    assert ratio_of(case()) is None
    assert ratio_of(case(model="gpt2")) == pytest.approx(1.5)


def test_a_damaged_file_corrects_nothing() -> None:
    history.file().parent.mkdir()
    history.file().write_bytes(b"nothing of SQLite" * 100)
    assert ratio_of(case()) is None
