"""What happens in a training run beside its steps: resuming from a checkpoint, evaluating, generating, saving one.

Each is a phase of its own in the report.  Whoever watches the run hears of it through `listen`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tonnage.errors import CannotEstimate, UsageError
from tonnage.step import checkpoints
from tonnage.step import model as models

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.step.step import ReadyStep

_listeners: list[Callable[[str], None]] = []


def listen(heard: Callable[[str], None]) -> None:
    """From now on call `heard` with the name of each phase as it begins, and with an empty one at its end."""
    _listeners.append(heard)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Everything inside is this phase."""
    for heard in _listeners:
        heard(name)
    try:
        yield
    finally:
        for heard in _listeners:
            heard("")


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
    """Greedy generation by transformers with its cache of keys and values, for as many prompts as a micro-batch has.

    Prompts and what is generated are together as long as a training sequence.
    """
    job = ready.step.job
    assert job.generate is not None
    network = models.hugging_face(ready.model)
    if network is None or not network.can_generate():
        raise CannotEstimate(f"{job.model.name} is not a network of transformers that generates; leave generate out.")
    read = _read(ready, network)
    with _inference(ready), _own_forward(network):
        _generating(ready.model, network)(
            **read,
            max_new_tokens=job.generate,
            min_new_tokens=job.generate,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )


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


_SOUNDS = "input_features"
"""What a network that writes what it hears is given."""


def _read(ready: ReadyStep, network: Any) -> dict[str, torch.Tensor]:
    """What words are generated from: prompts, or as many sounds."""
    if network.main_input_name == _SOUNDS:
        return {_SOUNDS: ready.next_batch()[_SOUNDS]}
    prompt = _prompts(ready.step.job, network, ready.step.world.device)
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


def _prompts(job: Job, network: Any, device: torch.device) -> torch.Tensor:
    length = job.seq_len - (job.generate or 0)
    if network.config.is_encoder_decoder:
        length = job.seq_len
    if length < 1:
        raise UsageError(f"generate is {job.generate}, and a sequence has {job.seq_len} tokens; choose fewer.")
    vocabulary = network.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (job.micro_batch, length)).to(device)
