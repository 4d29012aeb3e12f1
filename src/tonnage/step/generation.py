"""Generation beside training: as many texts as a micro-batch has sequences, greedily, with a KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from tonnage.errors import CannotEstimate
from tonnage.job import check_prompt
from tonnage.step import model

if TYPE_CHECKING:
    from tonnage.job import Job

SOUNDS: Final = "input_features"
"""The input of a network that transcribes."""


def network_in(module: torch.nn.Module, job: Job) -> Any:
    """Return transformers' network inside a module.  Raises CannotEstimate if there is none that generates."""
    network = model.hugging_face(module)
    if network is None or not network.can_generate():
        raise CannotEstimate(f"{job.model.name} is not a transformers network that generates; leave generate out.")
    return network


def make_arguments(
    job: Job, network: Any, device: torch.device, sounds: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """Return the arguments of `generate`: prompts, or as many sounds of a batch, and how many tokens.

    A prompt and what is generated from it are together as long as a training sequence; an encoder reads all of it.
    """
    return {**_inputs(job, network, device, sounds), **greedy(job)}


def greedy(job: Job) -> dict[str, Any]:
    """Return the options: exactly that many tokens, with a cache, which networks built for training disable."""
    length = {"max_new_tokens": job.generate, "min_new_tokens": job.generate}
    return {**length, "do_sample": False, "use_cache": True, "pad_token_id": 0}


def _inputs(
    job: Job, network: Any, device: torch.device, sounds: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    if network.main_input_name == SOUNDS:
        return {SOUNDS: sounds()[SOUNDS].to(device)}
    prompt = _prompts(job, network, device)
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


def _prompts(job: Job, network: Any, device: torch.device) -> torch.Tensor:
    tokens = job.seq_len
    if not network.config.is_encoder_decoder:
        check_prompt(job)
        tokens -= job.generate or 0
    vocabulary = network.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (job.micro_batch, tokens)).to(device)
