"""Ordinary programs that decide by what they read, or count on the card."""

import re
from typing import Any

import pytest

from tonnage.errors import CannotEstimate

pytestmark = pytest.mark.ghost


def answered(answer: Any) -> Any:
    assert answer.error is None, f"{answer.error}\n{answer.output[-2000:]}"
    return answer.run.estimate


def test_a_step_behind_a_guard_is_made(dry_run: Any) -> None:
    """Weights, gradients, two states and the foreach temporaries of the first update: 15 GiB of 805 M weights."""
    estimate = answered(dry_run("habits/decides.py", "guards", gpu="t4"))
    assert not estimate.fits
    assert estimate.oom.phase == "optimizer"
    assert any(re.search(r"decides\.py:\d+: [\d.]+ > 0 is true", text) for text in estimate.coverage.assumed)
    assert not any("never stepped" in text for text in estimate.coverage.assumed)


def test_an_optimizer_that_makes_no_step_is_no_answer(dry_run: Any) -> None:
    error = dry_run("habits/decides.py", "never").error
    assert isinstance(error, CannotEstimate)
    assert "has an optimizer of 4,160 elements and ended before it made a step" in str(error)
    assert re.search(r"decides\.py:\d+: 1\.5 < 0 is false", str(error))


@pytest.mark.parametrize(
    ("ways", "steps"),
    [("logs asserts draws checkpoints scales", None), ("plateau", 3), ("until-converged", 3)],
    ids=["five", "plateau", "until-converged"],
)
def test_computed_numbers_are_plausible(dry_run: Any, ways: str, steps: int | None) -> None:
    answer = dry_run("habits/decides.py", *ways.split(), steps=steps)
    answered(answer)
    assert answer.run.traces[0].steps == (steps or 5 * 5)


def test_quotients_of_losses_and_shares_of_right_answers(dry_run: Any) -> None:
    answer = dry_run("habits/decides.py", "ratio", "accuracy", steps=None)
    answered(answer)
    ratios = [said["ratio"] for said in answer.printed if "ratio" in said]
    assert ratios[0] == 1
    assert ratios == sorted(ratios, reverse=True)
    assert answer.printed[len(ratios)] == {"share": 0.5, "count": 4, "precision": 0.125}


KNOWN: dict[str, dict[str, Any]] = {
    "samples": {"count": 16},
    "accumulates": {"passes": 4},
    "schedule": {"rate": 100},
    "tokens": {"shape": [2, 3], "lengths": [3, 2], "row": [4, 5, -100]},
    "masks": {"turns": 4, "left": 0},
    "adam": {"step": 3, "decay": 0.125},
    "backward": {"norm": True, "loose": True},
    "buffers": {"seen": 3, "mean": True},
    "graph": {"count": True, "total": True},
}
"""By program of counts.py what it says first; one run has them all."""


@pytest.mark.parametrize("said", KNOWN.values(), ids=KNOWN)
def test_what_is_known_is_computed_and_what_is_overwritten_is_not_stale(dry_run: Any, said: dict[str, Any]) -> None:
    answer = dry_run("habits/counts.py", *KNOWN, steps=None)
    answered(answer)
    first = next(line for line in answer.printed if said.keys() <= line.keys())
    assert said.items() <= first.items()


def test_one_step_of_four_passes_is_one_step(dry_run: Any) -> None:
    answer = dry_run("habits/counts.py", "accumulates", steps=20)
    assert answer.run.traces[0].steps == 3


@pytest.mark.parametrize("way", ["compiled", "kernel"])
def test_what_a_programs_own_kernel_writes_is_forgotten(dry_run: Any, way: str) -> None:
    answer = dry_run("habits/counts.py", way, steps=20)
    answered(answer)
    (said,) = answer.printed
    if way == "kernel":
        assert said["more"] == [1.0] * 4, "which it only reads"
        assert 0.0 not in said["total"]
    else:
        assert said["mean"] not in (0.0, 0.1)


@pytest.mark.parametrize(("way", "shown"), [("generates", {"generate"}), ("prefers", {"reference", "evaluate"})])
def test_what_is_done_beside_the_steps_has_a_phase(dry_run: Any, way: str, shown: set[str]) -> None:
    estimate = answered(dry_run("habits/phases.py", way))
    assert shown <= {phase.name for phase in estimate.phases}


def test_gathering_a_sharded_network_has_a_phase(dry_run: Any) -> None:
    matrix = 1024**2 * 4
    answer = dry_run("habits/phases.py", "gathers", gpu="4xa100-40gb", rank=0)
    phases = {phase.name: phase.allocated_bytes for phase in answered(answer).phases}
    assert 16 * matrix <= phases["load"] < 20 * matrix, "which goes on after a first file was saved"
    shards = 3 * 16 * matrix / 4  # weights and two states
    assert shards + 16 * matrix <= phases["save"] < shards + 28 * matrix  # with cuBLAS's workspaces


def test_running_out_while_gathering_is_reported_there(dry_run: Any) -> None:
    """Weights of 12.25 GiB: the shards and states are 9.2 GiB, a step needs two layers more, the file all 16."""
    answer = dry_run("habits/phases.py", "gathers", "14336", gpu="4xl4", rank=0)
    oom = answer.run.estimate.oom
    assert not answer.run.estimate.fits
    assert oom.phase == "save"


def test_merging_adapters_has_a_phase(dry_run: Any) -> None:
    phases = {phase.name: phase.allocated_bytes for phase in answered(dry_run("habits/phases.py", "merges")).phases}
    one_more = phases["merge"] - phases["optimizer"]
    assert 1024**2 * 4 <= one_more <= 2 * 1024**2 * 4, "the product of the adapters of one matrix, and it scaled"


def test_a_running_mean_is_no_part_of_the_model(dry_run: Any) -> None:
    estimate = answered(dry_run("habits/phases.py", "averages"))
    assert estimate.model["parameters"] == estimate.model["trainable_parameters"] == 2 * (256 * 256 + 256)


def test_weights_are_not_downloaded(dry_run: Any) -> None:
    estimate = answered(dry_run("habits/phases.py", "downloads"))
    assert any(text.startswith("pretrained weights were not read") for text in estimate.coverage.assumed)


def test_kernels_with_many_forms_take_the_first(dry_run: Any, tmp_path_factory: Any) -> None:
    """Compiling takes more than 10 s; with all forms it took minutes."""
    own = str(tmp_path_factory.mktemp("inductor"))
    variables = (("TORCHINDUCTOR_CACHE_DIR", own), ("TRITON_CACHE_DIR", own), ("TORCHINDUCTOR_COMPILE_THREADS", "1"))
    answer = dry_run("habits/phases.py", "autotunes", variables=variables)
    answered(answer)
    assert answer.run.traces[0].steps == 3
    assert any(activity.name.startswith("triton_") for activity in answer.run.traces[0].activities())
