"""Sounds of 30 seconds, with their transcript or among token ids."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tonnage.catalog.families import types_with
from tonnage.errors import CannotEstimate, UsageError
from tonnage.job import IGNORED_LABEL
from tonnage.step.inputs.asking import rows_of
from tonnage.step.inputs.text import Batch, parameters, tokens, vocabulary
from tonnage.step.remarks import remark

if TYPE_CHECKING:
    from tonnage.job import Job

SECONDS: Final = 30
SAMPLES_PER_SECOND: Final = 16_000
FRAMES: Final = 100 * SECONDS
"""Spectra of 30 seconds, one every 10 milliseconds, as all feature extractors here make them."""

SPOKEN_TOKENS: Final = 448
"""Most tokens of a transcript of 30 seconds (Whisper's max_target_positions)."""

_NAMES: Final = ("input_features", "input_values")
_MASKS: Final = ("input_features_mask", "feature_attention_mask", "padding_mask")
_PARTS: Final = ("audio_config", "encoder_config", "audio_encoder", "speech_encoder", "encoder")


def shape(config: Any, name: str) -> tuple[int, ...] | None:
    """Return the shape of a sound of 30 seconds under the forward's `name` for it; None if it is not known.

    Each extractor has its own layout: raw samples, spectra before time (Whisper's), time before spectra (NeMo's), or
    several spectra in one frame.
    """
    audio = _audio_config(config)
    bins = getattr(audio, "num_mel_bins", None)
    if getattr(audio, "max_length", None) and bins and name == "input_values":  # AST: spectra under this name
        return audio.max_length, bins
    if name == "input_values":
        return (SECONDS * SAMPLES_PER_SECOND,)
    if getattr(audio, "num_stacked_frames", None):  # Fun-ASR keeps every sixth of its stacks
        return FRAMES // 6, bins * audio.num_stacked_frames
    stacked = types_with("spectra_per_frame").get(audio.model_type)
    if stacked is not None and bins:
        return FRAMES // stacked, bins * stacked
    if getattr(audio, "subsampling_conv_channels", None):
        return (FRAMES, bins) if bins else None
    if bins and getattr(audio, "max_source_positions", None):
        return bins, 2 * audio.max_source_positions  # whose first convolutions halve the frames
    if getattr(audio, "input_feat_per_channel", None):
        return audio.max_source_positions // 4, audio.input_feat_per_channel
    for field in ("input_dim", "feature_projection_input_dim"):
        if getattr(audio, field, None):
            return FRAMES // 2, getattr(audio, field)  # two spectra of 80 in a frame
    if audio.model_type in types_with("embedded_spectra"):
        return FRAMES // 4, audio.d_model
    return (bins, FRAMES) if bins else None


def is_heard_by(network: Any) -> bool:
    """Return True if the network takes sounds among its token ids."""
    names = parameters(network)
    return "input_ids" in names and any(name in names for name in _NAMES)


def make_transcribed(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return sounds of 30 seconds, or of as many frames as the encoder has positions for, with their transcripts."""
    if is_heard_by(network) and hasattr(network.config, "audio_config"):
        return and_text(job, network, dtype)
    length = job.seq_len
    if not getattr(network.config, "is_encoder_decoder", False) and length > SPOKEN_TOKENS:
        length = SPOKEN_TOKENS
        remark(network, f"a sound of {SECONDS} seconds has a transcript of {SPOKEN_TOKENS} tokens")
    labels = torch.randint(1, vocabulary(network.config), (job.micro_batch, length))
    sound = alone(job, network, dtype)
    if network.config.model_type in types_with("sound_mask"):
        sound["attention_mask"] = torch.ones(*next(iter(sound.values())).shape[:2], dtype=torch.bool)
    return {**sound, "labels": labels}


def alone(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return sounds alone, under the forward's name for them."""
    names = parameters(network)
    for name in _NAMES:
        sound_shape = shape(network.config, name) if name in names else None
        if sound_shape is not None:
            return {name: torch.rand(job.micro_batch, *sound_shape).to(dtype)}
    raise CannotEstimate(
        f"Batches of sounds are not made for {network.config.model_type}; "
        "give package.module:factory with batch(job)."
    )


def and_text(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return token ids with a sound in each row: a text token, then the sound's own tokens, whose labels are
    ignored.
    """
    batch = tokens(job, network)
    token = _audio_token(network.config)
    sound = _with_masks(alone(job, network, dtype), network)
    if network not in _DESCRIPTIONS:
        _DESCRIPTIONS[network] = _Description(tokens=_tokens_per_sound(job, network, sound))
    length = _DESCRIPTIONS[network].tokens
    if job.seq_len <= length + 1:
        raise UsageError(
            f"A sound of {SECONDS} seconds takes {length + 1:,} tokens of {job.model.name}; "
            "choose a seq_len above that."
        )
    words, labels = batch["input_ids"], batch["labels"]
    words[words == token] = 0
    words[:, 1 : 1 + length] = token
    labels[:, 1 : 1 + length] = IGNORED_LABEL
    return batch | sound


def held() -> tuple[str, ...]:
    """Return a sentence on the sounds in this process's batches for each network."""
    return tuple(
        f"every sequence holds a sound of {SECONDS} seconds, {sound.tokens:,} tokens"
        for sound in _DESCRIPTIONS.values()
    )


@dataclass(frozen=True, kw_only=True)
class _Description:
    """The sounds of a network, as described in the report after its first batch."""

    tokens: int


_DESCRIPTIONS: Final[WeakKeyDictionary[nn.Module, _Description]] = WeakKeyDictionary()


def _audio_config(config: Any) -> Any:
    for name in _PARTS:
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            return inner
    return config


def _audio_token(config: Any) -> int:
    for name in ("audio_token_id", "audio_token_index"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    raise CannotEstimate(
        f"{config.model_type}'s configuration names no audio_token_id; give package.module:factory with batch(job)."
    )


def _with_masks(sound: Batch, network: Any) -> Batch:
    """Return the sound with masks which tell that all of its frames are real."""
    tensor = next(iter(sound.values()))
    channels_first = tensor.dim() == 3 and tensor.shape[1] == getattr(
        _audio_config(network.config), "num_mel_bins", None
    )
    frames = tensor.shape[2] if channels_first else tensor.shape[1]
    arguments = _feature_arguments(network)
    mask_of_ones = torch.ones(tensor.shape[0], frames, dtype=torch.long)
    return sound | {mask: mask_of_ones for mask in _MASKS if mask in arguments}


def _feature_arguments(network: Any) -> tuple[str, ...]:
    method = getattr(getattr(network, "model", network), "get_audio_features", None)
    return parameters(network) if method is None else tuple(inspect.signature(method).parameters)


def _tokens_per_sound(job: Job, network: Any, sound: Batch) -> int:
    inner = getattr(network, "model", network)
    if not hasattr(inner, "get_audio_features") or "input_ids" in _feature_arguments(network):
        frames = next(iter(sound.values())).shape[-1]  # the function needs the text as well, or does not exist
        _, length = inner.audio_tower._get_feat_extract_output_lengths(torch.tensor(frames))
        return int(length)
    return rows_of(job, network, "get_audio_features", lambda: sound, {}) // job.micro_batch
