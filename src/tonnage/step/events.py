"""Phases of a training run beside its steps: loading a checkpoint, evaluation, generation, saving a checkpoint.

Each is a phase of its own in the report; `listen` registers the callback that learns when one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tonnage.errors import CannotEstimate
from tonnage.step import checkpoints, generation

if TYPE_CHECKING:
    from tonnage.step.step import ReadyStep

_listeners: list[Callable[[str], None]] = []
_phases: list[str] = [""]


def listen(heard: Callable[[str], None]) -> None:
    """Call `heard` from now on with the name of each phase as it begins, and with an empty name when it ends."""
    _listeners.append(heard)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark everything inside as this phase; a phase inside another is attributed to the inner one."""
    _phases.append(name)
    _notify()
    try:
        yield
    finally:
        _phases.pop()
        _notify()


def _notify() -> None:
    for callback in _listeners:
        callback(_phases[-1])


def before_steps(ready: ReadyStep) -> None:
    """Run what the job asks for before its first step."""
    if ready.step.job.resume != "none":
        with phase("resume"):
            checkpoints.resume(ready)


def besides_steps(ready: ReadyStep) -> None:
    """Run once each of what the job asks for besides its steps."""
    job = ready.step.job
    if job.eval_batch is not None:
        with phase("evaluate"):
            evaluate(ready)
    if job.generate is not None:
        with phase("generate"):
            generate(ready)
    if job.save_checkpoint != "none":
        with phase("save"):
            checkpoints.save(ready)


@contextmanager
def _inference(ready: ReadyStep) -> Iterator[None]:
    ready.model.eval()
    try:
        with torch.no_grad(), ready.around(), ready.autocast():
            yield
    finally:
        ready.model.train()


def evaluate(ready: ReadyStep) -> None:
    """Run forward passes over evaluation batches.

    With `eval_logits` the logits of that many batches are gathered on the GPU, as Hugging Face's Trainer does when it
    computes metrics: after each batch the gathered and the new ones are concatenated into new memory.
    """
    job = ready.step.job
    gathered: torch.Tensor | None = None
    with _inference(ready):
        for _ in range(job.eval_logits or 1):
            output = ready.model(**ready.next_batch(sequences=job.eval_batch))
            if job.eval_logits is not None:
                logits = _logits(output)
                gathered = logits if gathered is None else torch.cat((gathered, logits))
            del output


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise CannotEstimate("The forward returns no logits to gather; leave eval-logits out, or choose loss plain.")
    return logits.detach()


def generate(ready: ReadyStep) -> None:
    """Generate by transformers (`generation`), under the same contexts as the forward."""
    job = ready.step.job
    network = generation.network_in(ready.model, job)
    arguments = generation.make_arguments(job, network, ready.step.world.device, ready.next_batch)
    with _inference(ready), _without_replaced_forward(network):
        _generate_method(ready.model, network)(**arguments)


def _generate_method(model: torch.nn.Module, network: Any) -> Any:
    """Return the network's `generate`; with FSDP2 that of its adapters, so that parameters outside all layers are
    gathered.
    """
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    if model is network or not isinstance(model, FSDPModule):
        return network.generate
    register_fsdp_forward_method(model, "generate")
    return model.generate


@contextmanager
def _without_replaced_forward(network: Any) -> Iterator[None]:
    """Undo for a while that a loss in slices has replaced the forward by one without logits."""
    replaced = vars(network).pop("forward", None)
    try:
        yield
    finally:
        if replaced is not None:
            network.forward = replaced
