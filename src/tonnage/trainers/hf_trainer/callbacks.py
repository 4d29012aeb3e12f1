"""The work of Hugging Face's Trainers besides their steps: evaluate, generate, save, resume, each in its own phase.

A Trainer generates in its evaluations for encoder-decoders alone (`Seq2SeqTrainer`, `predict_with_generate`).  For
other networks a callback of the user generates at the end of a step, as TRL's `LogCompletionsCallback` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import UsageError
from tonnage.step import generation
from tonnage.step.events import phase
from tonnage.trainers import common

if TYPE_CHECKING:
    from torch import nn

    from tonnage.job import Job
    from tonnage.step.step import Step

PHASES: Final[Mapping[str, str]] = {
    "evaluate": "evaluate",
    "_save_checkpoint": "save",
    "_load_from_checkpoint": "resume",
    "_load_optimizer_and_scheduler": "resume",
}
"""The phase of each method of a Trainer that has one of its own."""


def last_step(job: Job, steps: int) -> int:
    """Return the number of the last of so many steps: a Trainer counts on from the step of a checkpoint."""
    return steps if job.resume == "none" else steps + 1


def evaluates_by_generating(job: Job, module: nn.Module) -> bool:
    """Return whether evaluations generate.  Raises UsageError where they should gather logits as well."""
    if job.generate is None or not generation.network_in(module, job).config.is_encoder_decoder:
        return False
    if job.eval_logits is not None:
        raise UsageError("What is generated is gathered in the place of logits; leave generate out, or eval-logits.")
    return True


def with_evaluation(job: Job, module: nn.Module) -> Job:
    """Return the job with an evaluation, if it generates and the Trainer does that in evaluations."""
    if job.eval_batch is None and evaluates_by_generating(job, module):
        return replace(job, eval_batch=job.micro_batch)
    return job


def trainer_options(step: Step, module: nn.Module, rows: common.Rows, steps: int) -> dict[str, Any]:
    """Return arguments of a Trainer that does all that once, before its last step, or after a lone one.

    It gathers logits, or what is generated, where it is to compute metrics of them.
    """
    from transformers import TrainerCallback

    job, generates = step.job, evaluates_by_generating(step.job, module)

    class BeforeLastStep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            now = state.global_step == max(steps - 1, 1)
            control.should_evaluate = now and job.eval_batch is not None
            control.should_save = now and job.save_checkpoint != "none"
            if now and job.generate is not None and not generates:
                common.generate(step, model, rows)

    metrics: dict[str, Any] = (
        {"compute_metrics": lambda prediction: {}} if generates or job.eval_logits is not None else {}
    )
    return {"callbacks": [BeforeLastStep()], **metrics}


def train(trainer: Any, job: Job, folder: str) -> None:
    """Run the steps, from the checkpoint of an earlier run's only step if the job resumes."""
    for method, name in PHASES.items():
        setattr(trainer, method, _in_phase(name, getattr(trainer, method)))
    if evaluates_by_generating(job, trainer.model):
        generation.network_in(trainer.model, job).generation_config.update(**generation.greedy(job))
        trainer.model.generate = _in_phase("generate", trainer.model.generate)
    trainer.train(resume_from_checkpoint=None if job.resume == "none" else os.path.join(folder, "checkpoint-1"))


def _in_phase(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with phase(name):
            return method(*arguments, **options)

    return call
