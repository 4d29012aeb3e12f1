"""Random inputs for Hugging Face networks, as a data loader yields them: on the host, full, without padding.

The family's own code tells which tensors it takes beside token ids: the parameters of its forward and of
`get_image_features` or `get_audio_features` name them, and that function itself, run without memory, tells how many
tokens an image or a sound takes.  Sizes of images are those that the network gets after the processor's resizing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from tonnage.catalog.families import types_with
from tonnage.errors import CannotEstimate
from tonnage.step.inputs import images, sounds, targets
from tonnage.step.inputs.text import Batch, tokens
from tonnage.step.remarks import list_remarks

if TYPE_CHECKING:
    from tonnage.job import Job

__all__ = ["Batch", "list_assumptions", "make"]


def make(job: Job, network: Any, task: str, dtype: torch.dtype) -> Batch:
    """Return one micro-batch for a network that is trained for `task`; `dtype` is that of images and sounds.

    Raises CannotEstimate for families whose inputs are not known here, UsageError for sizes that they do not take.
    """
    reason = types_with("inputs_not_made").get(network.config.model_type)
    if reason is not None and (job.images > 0 or task != "image-text-to-text"):
        raise CannotEstimate(
            f"Batches are not made for {network.config.model_type}: {reason}; "
            "give package.module:factory with batch(job)."
        )
    return _MAKERS[task](job, network, dtype)


def list_assumptions() -> tuple[str, ...]:
    """Return a sentence on each assumption about this process's batches and networks."""
    return (*images.held(), *sounds.held(), *list_remarks())


def _text_or_sound(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return text; with a sound in it if the network hears."""
    return sounds.and_text(job, network, dtype) if sounds.is_heard_by(network) else tokens(job, network)


_MAKERS: Final[dict[str, Callable[[Any, Any, torch.dtype], Batch]]] = {
    "image-text-to-text": images.and_text,
    "seq2seq": _text_or_sound,
    "masked-lm": _text_or_sound,
    "speech-seq2seq": sounds.make_transcribed,
    "causal-lm": _text_or_sound,
    "image-text-contrast": images.with_captions,
    "image-classification": targets.classified_images,
    "ctc": sounds.make_transcribed,
    "video-classification": targets.classified_videos,
    "object-detection": targets.detected_objects,
    "universal-segmentation": targets.segmented_objects,
    "semantic-segmentation": targets.segmented_images,
    "depth-estimation": targets.measured_depths,
    "sequence-classification": targets.classified_sequences,
    "token-classification": targets.classified_tokens,
    "question-answering": targets.answered_questions,
    "audio-classification": targets.classified_sounds,
    "time-series": targets.forecasts,
    "pretraining": targets.pretraining,
    "features": targets.features,
}
