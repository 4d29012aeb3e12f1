"""Trainers are told to stop in their own way once a loop has made its steps."""

from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch

from tonnage.recorder.tonnage_recorder.loops import Loops
from tonnage.recorder.tonnage_recorder.step_counter import StepCounter


def made(steps: int) -> Loops:
    """Return the loops of a program that has made so many of 3 steps."""
    marks = cast(Any, SimpleNamespace(torch=torch))
    return Loops(marks, StepCounter(lambda parameter: True), 3, lambda: steps, lambda count: count >= 3)


def has_stopped(loops: Loops, *, is_wanted: tuple[bool, ...]) -> bool:
    """Return whether a Trainer stops by its evaluation behind a step; `is_wanted` says if one more step is wanted."""

    class CallbackHandler:
        def on_step_end(self, control: Any) -> Any:
            return control

        def on_evaluate(self, control: Any) -> Any:
            return control

    answers = iter(is_wanted)
    loops.end_step = lambda: not next(answers)
    loops._hook_trainer(cast(ModuleType, SimpleNamespace(CallbackHandler=CallbackHandler)))
    control = SimpleNamespace(should_training_stop=False)
    for hook in ("on_step_end", "on_evaluate"):
        assert getattr(CallbackHandler(), hook)(control) is control
    return control.should_training_stop


def test_no_step_is_begun_behind_the_evaluation_of_the_last_one() -> None:
    """In the evaluation it turns out that no step is counted."""
    loops = made(3)
    assert has_stopped(loops, is_wanted=(True, False))
    assert loops.is_cut


def test_the_evaluation_of_an_earlier_step_stops_nothing() -> None:
    loops = made(2)
    assert not has_stopped(loops, is_wanted=())
    assert not loops.is_cut


def test_lightning_begins_no_step_behind_the_validation_of_the_last_one() -> None:
    class TrainingEpochLoop:
        def __init__(self) -> None:
            self.min_steps = 9
            self.trainer = SimpleNamespace(fit_loop=SimpleNamespace(min_epochs=9), should_stop=False)

        def advance(self) -> None:
            pass

        def on_advance_end(self) -> None:
            pass

    loops = made(3)
    answers = iter((False, True))
    loops.end_step = lambda: next(answers)
    loops._hook_lightning(cast(ModuleType, SimpleNamespace(_TrainingEpochLoop=TrainingEpochLoop)))
    loop = TrainingEpochLoop()
    loop.advance()
    assert not loop.trainer.should_stop
    loop.on_advance_end()
    assert loop.trainer.should_stop
    assert loop.min_steps is None
