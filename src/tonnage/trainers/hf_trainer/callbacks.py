"""What Hugging Face's Trainers do besides their steps: evaluate, generate, save, resume, each a phase of its own.

A Trainer generates in its evaluations for encoder-decoders alone (`Seq2SeqTrainer`, `predict_with_generate`).  Of
other networks a callback of the user's does it at the end of a step, as TRL's `LogCompletionsCallback`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import UsageError
from tonnage.step import generation
from tonnage.step.events import phase
from tonnage.trainers import common as given

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
"""Methods of a Trainer that are phases of their own."""


def last_step(job: Job, steps: int) -> int:
    """The number of the last of so many steps: a Trainer counts on from those before a checkpoint."""
    return steps if job.resume == "none" else steps + 1


def writes_what_it_evaluates(job: Job, module: nn.Module) -> bool:
    """Whether evaluations generate.  Raises UsageError where they should gather logits as well."""
    if job.generate is None or not generation.network_in(module, job).config.is_encoder_decoder:
        return False
    if job.eval_logits is not None:
        raise UsageError("What is generated is gathered in the place of logits; leave generate out, or eval-logits.")
    return True


def evaluated(job: Job, module: nn.Module) -> Job:
    """The job with an evaluation that generates, if that is where it does."""
    if job.eval_batch is None and writes_what_it_evaluates(job, module):
        return replace(job, eval_batch=job.micro_batch)
    return job


def besides(step: Step, module: nn.Module, rows: given.Rows, steps: int) -> dict[str, Any]:
    """What a Trainer is given to do all that once, before its last step, or after a lone one.

    It gathers logits, or what is generated, where it is to compute metrics of them.
    """
    from transformers import TrainerCallback

    job, writes = step.job, writes_what_it_evaluates(step.job, module)

    class BeforeTheLast(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            now = state.global_step == max(steps - 1, 1)
            control.should_evaluate = now and job.eval_batch is not None
            control.should_save = now and job.save_checkpoint != "none"
            if now and job.generate is not None and not writes:
                given.generate(step, model, rows)

    metrics: dict[str, Any] = (
        {"compute_metrics": lambda prediction: {}} if writes or job.eval_logits is not None else {}
    )
    return {"callbacks": [BeforeTheLast()], **metrics}


def train(trainer: Any, job: Job, folder: str) -> None:
    """Its steps, from the checkpoint of an earlier run's only step if the job resumes."""
    for method, name in PHASES.items():
        setattr(trainer, method, _within(name, getattr(trainer, method)))
    if writes_what_it_evaluates(job, trainer.model):
        generation.network_in(trainer.model, job).generation_config.update(**generation.greedy(job))
        trainer.model.generate = _within("generate", trainer.model.generate)
    trainer.train(resume_from_checkpoint=None if job.resume == "none" else os.path.join(folder, "checkpoint-1"))


def _within(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **options: Any) -> Any:
        with phase(name):
            return method(*arguments, **options)

    return called
