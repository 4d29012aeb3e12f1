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


class Trainer:
    """Parts of Lightning's."""

    def __init__(self, callbacks: list[Any], optimizers: list[Any]) -> None:
        self.callbacks, self.optimizers = callbacks, optimizers
        self.fit_loop, self.lightning_module = SimpleNamespace(min_epochs=9), None
        self.current_epoch, self.max_epochs, self.should_stop = 0, 9, False


class EpochLoop:
    """Parts of Lightning's loop over an epoch."""

    def __init__(self, *, callbacks: list[Any], optimizers: list[Any]) -> None:
        self.min_steps = 9
        self.trainer = Trainer(callbacks, optimizers)

    def advance(self) -> None:
        pass

    def on_advance_end(self) -> None:
        pass


def hooked(loops: Loops) -> type[EpochLoop]:
    """Return a loop that these loops follow."""
    kind = type("Hooked", (EpochLoop,), {})
    loops._hook_lightning(cast(ModuleType, SimpleNamespace(_TrainingEpochLoop=kind)))
    return kind


def test_lightning_begins_no_step_behind_the_validation_of_the_last_one() -> None:
    loops = made(3)
    answers = iter((False, True))
    loops.end_step = lambda: next(answers)
    loop = hooked(loops)(callbacks=[], optimizers=[])
    loop.advance()
    assert not loop.trainer.should_stop
    loop.on_advance_end()
    assert loop.trainer.should_stop
    assert loop.min_steps is None


def test_lightning_trains_each_stage_of_a_callback_for_fine_tuning() -> None:
    """Epochs 2 and 5 of 9 train more weights, the first of them in a group of its own."""
    backbone, head = (torch.nn.Linear(2, 2) for _ in range(2))
    backbone.requires_grad_(False)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    loops = made(3)
    loops._optimizers.add(optimizer)

    def finetune_function(_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            optimizer.add_param_group({"params": [backbone.weight.requires_grad_()]})
        if epoch == 5:
            optimizer.add_param_group({"params": [backbone.bias.requires_grad_()]})

    loop = hooked(loops)(callbacks=[SimpleNamespace(finetune_function=finetune_function)], optimizers=[optimizer])
    counts = []
    while not loop.trainer.should_stop:
        counts.append(sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad))
        loop.advance()
    assert counts == [6, 10, 12]
    assert [row["first_step"] for row in loops.rows] == [4, 4]
