"""What happens in a training run beside its steps: resuming from a checkpoint, evaluating, generating, saving one.

Each is a phase of its own in the report.  Whoever watches the run hears of it through `listen`.
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
    """Everything inside is this phase; one within another has its part of it."""
    _phases.append(name)
    _tell()
    try:
        yield
    finally:
        _phases.pop()
        _tell()


def _tell() -> None:
    for heard in _listeners:
        heard(_phases[-1])


def before_steps(ready: ReadyStep) -> None:
    """What the job asks for before its first step."""
    if ready.step.job.resume != "none":
        with phase("resume"):
            checkpoints.resume(ready)


def besides_steps(ready: ReadyStep) -> None:
    """Whatever the job asks for besides its steps, each once."""
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
    """Forward passes over evaluation batches.

    With `eval_logits` batches their logits are gathered on the card, as Hugging Face's Trainer does when it computes
    metrics: what was gathered and the new ones are joined into new memory after each batch.
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
        raise CannotEstimate(
            "The forward returns no logits that could be kept; leave eval-logits out, or choose loss plain."
        )
    return logits.detach()


def generate(ready: ReadyStep) -> None:
    """By transformers (`generation`), through the techniques that stand around the network."""
    job = ready.step.job
    network = generation.network_in(ready.model, job)
    asked = generation.asked(job, network, ready.step.world.device, ready.next_batch)
    with _inference(ready), _own_forward(network):
        _generating(ready.model, network)(**asked)


def _generating(called: torch.nn.Module, network: Any) -> Any:
    """The network's `generate`; of adapters around it theirs, before which FSDP2 gathers what is in no layer."""
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    if called is network or not isinstance(called, FSDPModule):
        return network.generate
    register_fsdp_forward_method(called, "generate")
    return called.generate


@contextmanager
def _own_forward(network: Any) -> Iterator[None]:
    """Losses in slices put a forward without logits in the place of the network's own."""
    replaced = vars(network).pop("forward", None)
    try:
        yield
    finally:
        if replaced is not None:
            network.forward = replaced
