"""Programs with several optimizers, and those whose networks are not called as modules are."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tonnage.estimates.estimate import Estimate
from tonnage.trace.trace import Trace

pytestmark = pytest.mark.ghost

GENERATOR = 256 * 1024 + 1024
CRITIC = 1024 + 1


def estimate(answer: Any) -> Estimate:
    assert answer.error is None, f"{answer.error}\n{answer.output[-2000:]}"
    found = answer.run.estimate
    assert isinstance(found, Estimate)
    return found


def updates(trace: Trace) -> int:
    """How often an optimizer began a step in the measured steps."""
    phases = ["", *(mark.phase for mark in trace.marks)]
    return sum(phase == "optimizer" != before for before, phase in pairwise(phases))


def test_a_step_is_complete_when_each_optimizer_has_stepped(dry_run: Any) -> None:
    answer = dry_run("several.py", "critics")
    found = estimate(answer)
    assert updates(answer.run.traces[0]) == 18, "a generator's step after five of the critic's, three times"
    assert answer.run.traces[0].steps == 3
    assert found.model["parameters"] == found.model["trainable_parameters"] == GENERATOR + CRITIC
    assert found.peak.by_category["optimizer_state"] == 2 * 4 * GENERATOR
    assert not any("never stepped" in text for text in found.coverage.assumed)


def test_an_optimizer_that_steps_rarely_is_not_waited_for(dry_run: Any) -> None:
    """The loop has made its steps without it; since the loop ends soon, its one step is seen too."""
    answer = dry_run("several.py", "rarely")
    found = estimate(answer)
    trace = answer.run.traces[0]
    assert trace.steps > 3
    assert updates(trace) == 61
    assert found.peak.by_category["optimizer_state"] >= 2 * 4 * GENERATOR


def test_tensors_that_no_module_owns_are_parameters(dry_run: Any) -> None:
    found = estimate(dry_run("several.py", "raw"))
    count = 1000 * 256 + 256 * 1024
    assert (found.model["class"], found.model["parameters"], found.model["trainable_parameters"]) == (
        "Tensor",
        count,
        count,
    )
    by_category = found.peak.by_category
    assert by_category["parameter"] == 4 * count
    assert by_category["optimizer_state"] == 2 * 4 * count
    assert by_category["activation"] >= 4 * 512 * 256, "what backward wants of the rows looked up"


@pytest.mark.parametrize("how", ["forward", "compiled"])
def test_a_network_that_is_called_past_its_hooks_is_known(dry_run: Any, how: str) -> None:
    found = estimate(dry_run("several.py", how))
    assert (found.model["class"], found.model["parameters"]) == ("Network", 256 * 1024)
    by_category = found.peak.by_category
    assert by_category["parameter"] == 4 * (256 * 1024 + 1024)
    assert by_category["optimizer_state"] == 2 * 4 * 256 * 1024
    assert by_category["activation"] >= 4 * 512 * 1024, "what tanh gave"
    assert ("forward" in {phase.name for phase in found.phases}) == (how == "compiled")


@pytest.mark.parametrize("how", ["descends", "searches"])
def test_lbfgs_fills_its_history(dry_run: Any, how: str) -> None:
    answer = dry_run("several.py", how, steps=20)
    found = estimate(answer)
    assert found.peak.by_category["optimizer_state"] >= 2 * 10 * 4 * 256 * 1024
    assert answer.printed == ({"tolerance": 1e-7},), "what the program gave is there again"
    said = "L-BFGS does not converge: each step makes all its iterations, and each of them is remembered"
    assert said in found.coverage.assumed


def test_what_a_backward_pass_makes_for_another_is_kept_for_it(dry_run: Any) -> None:
    found = estimate(dry_run("several.py", "penalty"))
    hidden = 4096 * 4 * 256 * 4
    assert found.peak.by_category["activation"] >= 2 * hidden, "of tanh, its gradient, and what that was made from"


def test_steps_of_keras_are_steps(dry_run: Any) -> None:
    answer = dry_run("several.py", "keras")
    found = estimate(answer)
    assert answer.run.traces[0].steps == 3
    assert found.model["parameters"] == 256 * 1024
    assert found.peak.by_category["optimizer_state"] == 4 * 256 * 1024


def test_a_mean_of_the_weights_is_of_the_parameters(dry_run: Any) -> None:
    found = estimate(dry_run("several.py", "copies"))
    count = 2 * 256 * 1024 + 1024 + 256
    assert found.model["parameters"] == count, "those that are trained"
    assert found.peak.by_category["parameter"] == 3 * 4 * count


def test_copies_that_step_before_any_network_is_called_are_states(dry_run: Any) -> None:
    """2 bytes of a weight, 4 of its copy and 4 of its momentum."""
    found = estimate(dry_run("several.py", "masters"))
    assert found.model["parameters"] == 256 * 1024
    held = found.peak.by_category
    assert (held["parameter"], held["optimizer_state"]) == (2 * 256 * 1024, 8 * 256 * 1024)


def test_a_scaler_says_its_scale_and_kernels_are_kept_apart_from_a_folder_that_the_program_names(
    dry_run: Any, tmp_path: Path
) -> None:
    named, *scales = dry_run("several.py", "scaled", str(tmp_path)).printed
    assert scales == [{"scale": 65536.0}, {"scale": 65536.0}]
    inductor, triton = named["places"]
    assert inductor.endswith("/compiled/inductor")
    assert triton.endswith("/compiled/triton")
