"""A plan inside Hugging Face's Trainer, and inside trainers that are built on it, such as TRL's.

    trainer = PlannedTrainer(plan="plan.toml", model=model, args=args, train_dataset=rows)
    trainer.train()
    trainer.plan_report      # memory and seconds, beside the prediction

    PlannedSFT = planned(trl.SFTTrainer)

TrainingArguments get what the plan says of precision, batches, optimizer, clipping and sharding; the plan wins over
them.  What it does not say stays the Trainer's: batches beside a bare Plan, clipping at norm 1.  What they have no
words for (selective checkpointing, budgets, streamed activations, sliced losses) is applied to the network while
`train` runs, by the code that was estimated.  After the first step everything that the plan says is looked for in the
network, its wrappers and the optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tonnage.errors import UsageError
from tonnage.integrations.measuring import Meter, PlanReport, begin_estimate
from tonnage.integrations.network import LIGER, PlannedNetwork, check_weights, planned_batches, read
from tonnage.job import Job
from tonnage.mesh import SHARDING
from tonnage.plans import Plan
from tonnage.step import configuration
from tonnage.step import model as models
from tonnage.train import applying, checks
from tonnage.train.prediction import Estimation, Predicted
from tonnage.trainers.engine import has_setting
from tonnage.trainers.hf_trainer.run import EXPRESSES, arguments

if TYPE_CHECKING:
    from tonnage.train.effects import Effect

_TRAINERS_OWN: Final = ("optimizer", "precision", "shard", "compile", "param_offload", "clip_grad_norm")
"""Options that TrainingArguments must have words for."""

_WITHOUT_WORDS: Final = ("optimizer_in_backward", "optimizer_offload", "tp", "pp", "cp", "ep")
"""Options that need another loop than the Trainer's."""

_NOT_SEEN: Final = (("loss", LIGER), ("compile", "model"))
"""Values that are not looked for: Liger's changes to classes, and accelerate's compiled wrapper."""


class PlanCallback(TrainerCallback):  # type: ignore[misc]
    """Measures seconds and memory of a Trainer's steps, and looks once for what the plan says."""

    def __init__(self, look: Callable[[], tuple[Effect, ...]]) -> None:
        self.meter = Meter(look)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.meter.begin()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.meter.begin_step()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.meter.end_step()


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
        self._plan_path = None if isinstance(plan, Plan) else plan
        rows, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
        plan, job, cluster = read(plan, job, model, micro_batch=rows, accumulated=accumulated)
        _check_expressible(plan)
        _check_loss(plan, args, type(self), rest)
        ranks = _count_ranks(plan, args, None if cluster is None else cluster.gpus)
        checks.warn_of_device(cluster, args.device.type)
        checks.check_techniques(job, plan, cluster or applying.this_cluster(args.device.type, ranks))
        args = _planned_arguments(args, job, plan)
        inner = models.hugging_face(model)
        self._own_caches = [] if inner is None else configuration.read_caches(inner)
        self.plan, self.plan_job = plan, job
        self._callback = PlanCallback(self._look)
        self._predicted = Predicted()
        super().__init__(model, args, *more, **rest)  # type: ignore[call-arg] # the trainer's
        check_weights(self.model, job, plan)  # type: ignore[attr-defined] # TRL's trainers add adapters
        self.add_callback(self._callback)  # type: ignore[attr-defined]
        self._applied: PlannedNetwork | None = None

    @property
    def plan_report(self) -> PlanReport:
        """Return memory and seconds of the last `train`, beside the prediction."""
        return replace(self._callback.meter.report, predicted=self._predicted)

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train with the plan applied to the network, which is as before afterwards."""
        self._set_signature_columns_if_needed()  # type: ignore[attr-defined] # of the network's own forward
        network, device = self.model, self.args.device  # type: ignore[attr-defined]
        estimation = self._begin_estimate()
        self._applied = PlannedNetwork(network, self.plan_job, self.plan, device)
        configuration.restore_caches([(config, False) for config, _ in self._own_caches])
        try:
            result = super().train(*arguments, **options)  # type: ignore[misc]
            if estimation is not None:
                self._predicted, reason = estimation.wait()
                print(f"no prediction: {reason}" if reason else self.plan_report, file=sys.stderr)
            return result
        finally:
            if estimation is not None:
                estimation.end()
            self._applied.undo()
            self._applied = None
            configuration.restore_caches(self._own_caches)

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """Save the network, with `use_cache` in its configuration as it was."""
        held = [(config, config.use_cache) for config, _ in self._own_caches]
        configuration.restore_caches(self._own_caches)
        try:
            super().save_model(*arguments, **options)  # type: ignore[misc]
        finally:
            configuration.restore_caches(held)

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """Run forward and backward of a micro-batch inside the techniques' contexts."""
        assert self._applied is not None
        with self._applied.around():
            return super().training_step(*arguments, **options)  # type: ignore[misc]

    def autocast_smart_context_manager(self, *_: Any, **__: Any) -> AbstractContextManager[Any]:
        """Return accelerate's autocast, which also holds where the network's forward was given back."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()  # type: ignore[attr-defined]
        return context

    def _look(self) -> tuple[Effect, ...]:
        """Return what is found of the plan in the network, its wrappers, the optimizer and accelerate's precision."""
        assert self._applied is not None
        accelerator, optimizer = self.accelerator, self.optimizer  # type: ignore[attr-defined]
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        found = self._applied.took_effect(
            self.model_wrapped,  # type: ignore[attr-defined]
            [getattr(optimizer, "optimizer", optimizer)],
            autocast,
            scales_loss=accelerator.mixed_precision == "fp16",
        )
        return tuple(effect for effect in found if (effect.option, effect.planned) not in _NOT_SEEN)

    def _begin_estimate(self) -> Estimation | None:
        """Return the running estimate of the plan file, on the first rank where there is a GPU to compare with."""
        if self._plan_path is None or self.args.device.type != "cuda" or self.args.process_index > 0:  # type: ignore[attr-defined]
            return None
        return begin_estimate(self._plan_path)


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
        possible, value = EXPRESSES.get(name), getattr(plan, name)
        if not has_setting(possible, value, getattr(default, name)):
            raise UsageError(
                f"The Trainer has no setting for {name.replace('_', '-')} {value}; possible: "
                f"{', '.join(possible or ())}."
            )


def _check_loss(plan: Plan, args: Any, trainer: Any, options: Mapping[str, Any]) -> None:
    """Raise UsageError if the plan's loss gives no logits and the trainer makes its loss of them."""
    if plan.loss in ("plain", LIGER):
        return
    reasons = {
        f"{trainer.__name__} has a compute_loss of its own": trainer.compute_loss is not Trainer.compute_loss,
        "compute_loss_func is given": options.get("compute_loss_func") is not None,
        f"label_smoothing_factor is {args.label_smoothing_factor}": args.label_smoothing_factor != 0,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise UsageError(f"loss {plan.loss} returns no logits, and {reason}; choose loss plain.")


def _count_ranks(plan: Plan, args: Any, gpus: int | None) -> int:
    """Return the number of processes.  Raises UsageError if the Trainer would divide the work otherwise."""
    if plan.param_offload != "none" and plan.shard not in SHARDING:
        raise UsageError(
            f"The Trainer keeps parameters on the host under FSDP alone, and shard is {plan.shard}; choose shard "
            "zero3, or use tonnage.apply."
        )
    if args.n_gpu > 1:
        raise UsageError(
            f"The Trainer would divide each batch among {args.n_gpu} GPUs of this process; start it with torchrun, "
            "or set CUDA_VISIBLE_DEVICES=0."
        )
    return checks.count_ranks(replace(plan, param_offload="none"), gpus)


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
