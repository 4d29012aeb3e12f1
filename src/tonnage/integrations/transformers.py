"""A plan inside Hugging Face's Trainer, and inside trainers that are built on it, such as TRL's.

    trainer = PlannedTrainer(plan="plan.toml", model=model, args=args, train_dataset=rows)
    trainer.train()
    trainer.plan_report      # memory and seconds, beside the prediction

    PlannedSFT = planned(trl.SFTTrainer)

TrainingArguments get what the plan says of precision, batches, optimizer, clipping and sharding; the plan wins over
them.  What it does not say stays the Trainer's: batches beside a bare Plan, clipping at norm 1.  What they have no
words for (selective checkpointing, budgets, streamed activations, sliced losses) is applied to the network while
`train` runs, by the code that was estimated.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tonnage.errors import UsageError
from tonnage.integrations.network import PlannedNetwork, planned_batches
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.train import applying, checks
from tonnage.trainers.hf_trainer.run import EXPRESSES, arguments

if TYPE_CHECKING:
    from tonnage.train.effects import Effect

_TRAINERS_OWN: Final = ("optimizer", "precision", "shard", "compile", "param_offload", "clip_grad_norm")
"""Options that TrainingArguments must have words for."""

_WITHOUT_WORDS: Final = ("optimizer_in_backward", "optimizer_offload", "tp", "pp", "cp", "ep")
"""Options that need another loop than the Trainer's."""

_WARM_STEPS: Final = 2


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What a planned training needed."""

    steps: int
    """Optimizer steps."""
    step_seconds: float | None
    """Median seconds of a step after the first ones; None for fewer steps."""
    allocated_bytes: int | None
    """Peak of torch's allocator on this rank; None on the CPU."""
    reserved_bytes: int | None
    """The same of reserved memory."""
    effects: tuple[Effect, ...]
    """What was found of the options that were applied to the network."""

    def __str__(self) -> str:
        """Return one line."""
        seconds = "" if self.step_seconds is None else f", {self.step_seconds:.3g} s a step"
        memory = "" if self.allocated_bytes is None else f", {self.allocated_bytes / 2**30:.2f} GiB allocated"
        off = [effect.option for effect in self.effects if not effect.took_effect]
        missing = f"; without effect: {', '.join(off)}" if off else ""
        return f"plan: {self.steps} steps{seconds}{memory}{missing}"


class PlanCallback(TrainerCallback):  # type: ignore[misc]
    """Measures seconds and memory of a Trainer's steps; `report` has them at the end."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._seconds: list[float] = []
        self.effects: tuple[Effect, ...] = ()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._seconds.clear()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._begun is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._seconds.append(time.perf_counter() - self._begun)

    @property
    def report(self) -> PlanReport:
        """Return what was measured so far."""
        on_card = torch.cuda.is_available()
        steady = self._seconds[_WARM_STEPS:]
        return PlanReport(
            steps=len(self._seconds),
            step_seconds=statistics.median(steady) if steady else None,
            allocated_bytes=torch.cuda.max_memory_allocated() if on_card else None,
            reserved_bytes=torch.cuda.max_memory_reserved() if on_card else None,
            effects=self.effects,
        )


class _Planned:
    """The part of a planned trainer that comes before the trainer's own class."""

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *more: Any,
        plan: Plan | str | Path,
        job: Job | None = None,
        **rest: Any,
    ) -> None:
        args = TrainingArguments(output_dir="trainer_output") if args is None else args
        if not isinstance(args, TrainingArguments):
            raise UsageError(f"args is a {type(args).__name__}; give TrainingArguments.")
        if isinstance(plan, Plan) and job is None:  # it says nothing of batches
            rows, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
            job = Job(micro_batch=rows, grad_accum=accumulated)
        plan, job, _ = applying.read_plan(plan, job)
        checks.check_network(model)
        job = replace(job, model=applying.reference(model))
        _check_expressible(plan)
        args = _planned_arguments(args, job, plan)
        self.plan, self.plan_job = plan, job
        self._callback = PlanCallback()
        super().__init__(model, args, *more, **rest)  # type: ignore[call-arg] # the trainer's
        self.add_callback(self._callback)  # type: ignore[attr-defined]
        self._applied: PlannedNetwork | None = None

    @property
    def plan_report(self) -> PlanReport:
        """Return memory and seconds of the last `train`."""
        return self._callback.report

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train with the plan applied to the network, which is as before afterwards."""
        self._set_signature_columns_if_needed()  # type: ignore[attr-defined] # of the network's own forward
        network, device = self.model, self.args.device  # type: ignore[attr-defined]
        self._applied = PlannedNetwork(network, self.plan_job, self.plan, device)
        self._callback.effects = self._applied.took_effect()
        try:
            return super().train(*arguments, **options)  # type: ignore[misc]
        finally:
            self._applied.undo()
            self._applied = None

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """Run forward and backward of a micro-batch inside the techniques' contexts."""
        assert self._applied is not None
        with self._applied.around():
            return super().training_step(*arguments, **options)  # type: ignore[misc]

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate by the network's own forward, whose outputs have logits."""
        applied = self._applied
        if applied is None:
            return super().evaluation_loop(*arguments, **options)  # type: ignore[misc]
        applied.undo()
        try:
            return super().evaluation_loop(*arguments, **options)  # type: ignore[misc]
        finally:
            self._applied = PlannedNetwork(applied.network, self.plan_job, self.plan, self.args.device)  # type: ignore[attr-defined]


def planned(trainer: type) -> type:
    """Return a class like this trainer that takes a `plan`: `planned(trl.SFTTrainer)`."""
    if not issubclass(trainer, Trainer):
        raise UsageError(f"{trainer.__name__} is not built on transformers' Trainer.")
    return type(f"Planned{trainer.__name__}", (_Planned, trainer), {"__doc__": f"{trainer.__name__} under a plan."})


PlannedTrainer = planned(Trainer)


def _check_expressible(plan: Plan) -> None:
    """Raise UsageError for what neither TrainingArguments nor a change of the network can carry out."""
    default = Plan()
    for name in _WITHOUT_WORDS:
        if getattr(plan, name) != getattr(default, name):
            raise UsageError(
                f"The Trainer's loop cannot carry out {name.replace('_', '-')} {getattr(plan, name)}; use "
                "tonnage.apply in a loop of your own, or tonnage train."
            )
    for name in _TRAINERS_OWN:
        possible: tuple[str, ...] = EXPRESSES.get(name, ())
        value = str(getattr(plan, name))
        if possible and "N" not in possible and value not in possible and not _is_any(possible):
            raise UsageError(
                f"The Trainer has no setting for {name.replace('_', '-')} {value}; possible: {', '.join(possible)}."
            )


def _is_any(possible: Any) -> bool:
    from tonnage.trainers.engine import ANY

    return possible is ANY


def _planned_arguments(args: Any, job: Job, plan: Plan) -> Any:
    """Return TrainingArguments with what the plan says; those that said something else are named on stderr."""
    newer = hasattr(TrainingArguments, "activation_checkpointing")
    word = "activation_checkpointing" if newer else "gradient_checkpointing"
    wanted = arguments(checkpointing=word, **planned_batches(job, plan))
    changed = _changed(args, wanted)
    if changed:
        print(f"the plan sets {', '.join(changed)}", file=sys.stderr)
    return replace(args, **wanted)


def _changed(args: Any, wanted: Mapping[str, Any]) -> list[str]:
    """Return what the user had set, by its difference from the default, and the plan sets otherwise."""
    defaults = {item.name: item.default for item in fields(args)}
    return [
        f"{name}={value!r} (it was {getattr(args, name)!r})"
        for name, value in wanted.items()
        if getattr(args, name) != value and getattr(args, name) != defaults.get(name)
    ]
