"""Programs whose loops end after their steps, and that go on behind them."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tonnage.errors import TrialFailed

pytestmark = pytest.mark.ghost

ENDS = str(Path(__file__).parents[1] / "programs" / "habits" / "ends.py")


def answered(answer: Any) -> Any:
    assert answer.error is None, f"{answer.error}\n{answer.output[-2000:]}"
    return answer.run.estimate


def test_what_is_to_be_done_at_the_end_is_done(dry_run: Any) -> None:
    answer = dry_run("habits/ends.py", "cleans-up")
    assert answered(answer).fits
    assert answer.printed == ({"done": "finally"}, {"done": "atexit"})
    assert answer.run.traces[0].steps == 3


def test_the_worst_of_several_loops_decides(dry_run: Any) -> None:
    """The third of three networks has 2**31 weights: 8 GiB each of weights, gradients and two states."""
    answer = dry_run("habits/ends.py", "sweeps", gpu="t4")
    estimate = answered(answer)
    assert not estimate.fits
    assert answer.printed == ({"width": 256}, {"width": 1024})
    assert "habits/ends.py" in " ".join(estimate.oom.stack)
    assert not any("tonnage_" in frame for frame in estimate.oom.stack)
    loops = [note for note in estimate.notes if note.startswith("Loop ")]
    assert [note.split(" (")[0] for note in loops] == ["Loop 1 of 3", "Loop 2 of 3", "Loop 3 of 3"]
    assert not any("was ended" in note for note in estimate.notes), "five steps are over soon"


def test_a_second_loop_over_the_same_loader_has_steps_of_its_own(dry_run: Any) -> None:
    """A head of 64 x 64, then two matrices of 2**22 weights more: weights, gradients, states, foreach temporaries."""
    answer = dry_run("habits/ends.py", "unfreezes")
    estimate = answered(answer)
    assert answer.printed == ({"count": 3}, {"count": 3})
    weights = 4 * 2 * 2**22
    assert estimate.peak.allocated_bytes > 4 * weights
    assert any(note.startswith("Loop 2 of 2") and "3 optimizer steps" in note for note in estimate.notes)


def test_a_loop_behind_a_short_one_has_steps_of_its_own(dry_run: Any) -> None:
    answer = dry_run("habits/ends.py", "warms-up")
    estimate = answered(answer)
    assert answer.printed == ({"count": 2}, {"count": 3})
    peaks = [step.allocated_bytes for step in estimate.steps]
    assert len(peaks) == 5
    assert peaks[0] < peaks[2] <= max(peaks[3:])


def test_an_optimizer_for_each_step_makes_no_loop_of_each(dry_run: Any) -> None:
    answer = dry_run("habits/ends.py", "renews")
    assert answered(answer).fits
    assert answer.run.traces[0].steps <= 12
    assert not any("never stepped" in one for one in answer.run.estimate.coverage.assumed)


def test_a_loader_for_each_epoch_makes_no_loop_of_each(dry_run: Any) -> None:
    """Four loops have all of their steps, then each epoch has one."""
    answer = dry_run("habits/ends.py", "reloads")
    assert answered(answer).fits
    assert answer.printed == ({"count": 4 * 3 + 36},)


def test_epochs_evaluation_and_saving_come_to_their_end(dry_run: Any) -> None:
    """After its steps the loader gives one batch an epoch, and the evaluation sees as many batches as steps."""
    answer = dry_run("habits/ends.py", "epochs")
    estimate = answered(answer)
    assert [said.get("count") for said in answer.printed] == [3, 1, 1, None]
    assert answer.printed[0]["evaluated"] == 3
    assert answer.printed[-1] == {"saved": True}
    rows = 8 * 2**13 * 64 * 4
    (evaluation,) = [phase for phase in estimate.phases if phase.name == "evaluate"]
    assert evaluation.allocated_bytes >= 2 * rows
    assert "and 3 batches of each evaluation behind it were run" in estimate.notes[0]


@pytest.mark.parametrize(("way", "said"), [("endless", {"unwound": True}), ("catches-all", {"caught": "LoopEnded"})])
def test_a_loop_without_an_end_is_unwound(dry_run: Any, way: str, said: dict[str, object]) -> None:
    answer = dry_run("habits/ends.py", way)
    (note,) = answered(answer).notes
    assert said in answer.printed
    assert {"caught": True} not in answer.printed, "except Exception does not catch it"
    assert "it was unwound, and what the program does behind it was not run" in note


def test_a_command_that_fails_after_its_steps_has_an_answer(dry_run: Any) -> None:
    estimate = answered(dry_run("habits/ends.py", "fails-later"))
    unseen, note = estimate.notes
    assert unseen.startswith("Only the first 3 optimizer steps of the loop at ")
    assert note.startswith("After these steps: The command failed: ValueError: the results have no name")


def test_an_evaluation_that_runs_out_of_memory_decides(dry_run: Any) -> None:
    estimate = answered(dry_run("habits/ends.py", "evaluates", gpu="t4"))
    assert not estimate.fits
    assert "evaluat" in estimate.oom.phase
    assert "Tried to allocate 8.00 GiB" in estimate.oom.message


def test_the_peak_is_the_programs_own_where_only_more_is_allocated_behind_the_steps(dry_run: Any) -> None:
    """The evaluation before the training has reserved as much: weights, states and gradients are in other blocks."""
    answer = dry_run("habits/ends.py", "looks-first")
    estimate = answered(answer)
    (evaluation,) = [phase for phase in estimate.phases if phase.name == "evaluate"]
    assert answer.printed[-1] == {"allocated": evaluation.allocated_bytes}
    assert estimate.peak.allocated_bytes == evaluation.allocated_bytes
    assert estimate.peak.phase == "evaluate"


def test_an_evaluation_that_keeps_its_predictions_is_run_to_its_end_or_said_to_be_cut(dry_run: Any) -> None:
    """8 x 1,024 rows of 64 numbers in fp32 are 2 MiB."""
    answer = dry_run("habits/ends.py", "keeps")
    estimate = answered(answer)
    assert answer.printed == ({"count": 20}, {"count": 128})
    (evaluation,) = [phase for phase in estimate.phases if phase.name == "evaluate"]
    assert evaluation.allocated_bytes > 128 * 2**21
    (note,) = [note for note in estimate.notes if note.startswith("The evaluation at ")]
    assert note.endswith(
        "was ended after 128 batches, of which each left 2.0 MiB on the card; 72 more batches would leave 144.0 MiB."
    )


def test_what_each_step_leaves_on_the_card_is_said(dry_run: Any) -> None:
    """8 x 32,768 activations in fp32, as the first layer and the ReLU made them, are one MiB each."""
    (note,) = [n for n in answered(dry_run("habits/ends.py", "accumulates")).notes if n.startswith("Each step left ")]
    assert note.startswith("Each step left 1.0 MiB more on the card than the one before, in 1,000 steps ")


def test_steps_over_batches_of_several_sizes_are_told(dry_run: Any) -> None:
    notes = answered(dry_run("habits/ends.py", "lengthens")).notes
    assert any(note.startswith("These steps differ: ") for note in notes)
    assert not any(
        note.startswith(("These steps", "Each step")) for note in answered(dry_run("habits/ends.py", "epochs")).notes
    )


def test_a_parent_gets_the_results_of_its_children(dry_run: Any) -> None:
    answer = dry_run("habits/ends.py", "queue", gpu="2xt4")
    answered(answer)
    assert answer.printed == ({"counts": [3, 3]},)


def test_a_pool_gets_the_results_of_long_loops_and_the_shortage_of_one(dry_run: Any) -> None:
    """The worker returns, so its loop was not unwound; the second network has 8 GiB of weights, and gradients."""
    answer = dry_run("habits/ends.py", "pool", gpu="t4")
    estimate = answered(answer)
    assert answer.printed == ({"width": 64.0},)
    assert not estimate.fits
    assert estimate.oom.phase == "backward"


def test_the_second_stage_of_a_shells_script_runs(dry_run: Any) -> None:
    """It reads what the first one saved."""
    python = f"{sys.executable} {ENDS}"
    answer = dry_run(
        "habits/ends.py", launcher=("bash", "-ec", f"{python} first-stage; {python} second-stage; exit 0", "sh")
    )
    estimate = answered(answer)
    assert answer.printed == ({"count": 3},)
    assert any("GPU 0 was also used by ends.py: " in note for note in estimate.notes)


def test_all_steps_are_run_where_that_is_asked_for(dry_run: Any) -> None:
    answer = dry_run("habits/ends.py", "epochs", steps=None)
    answered(answer)
    assert [said.get("count") for said in answer.printed] == [100, 100, 100, None]
    assert answer.run.traces[0].steps == 300
    assert not answer.run.estimate.notes


def test_a_loop_is_named_by_its_own_line_and_only_if_it_was_cut_short(dry_run: Any) -> None:
    """Ten steps end by themselves; a loop of 100 batches does not, whose step is made elsewhere."""
    lines = Path(ENDS).read_text().splitlines()
    place = lines.index("        step(model, optimizer, rows.cuda())") + 1
    notes = answered(dry_run("habits/ends.py", "fails-later")).notes
    assert f"ends.py:{place} were run" in notes[0]
    assert not answered(dry_run("habits/ends.py", "cleans-up")).notes


def test_one_step_alone_is_told(dry_run: Any) -> None:
    estimate = answered(dry_run("habits/ends.py", "fails-later", steps=1))
    assert any(note.startswith("Only the first step was run") for note in estimate.notes)


def test_a_loop_that_fails_before_its_steps_has_no_answer(dry_run: Any) -> None:
    assert isinstance(dry_run("habits/ends.py", "second-stage").error, TrialFailed)
