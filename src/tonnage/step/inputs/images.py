"""Images beside token ids, for every family that takes them; `image_shapes` has the layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tonnage.errors import CannotEstimate, UsageError
from tonnage.job import IGNORED_LABEL
from tonnage.step.inputs.asking import rows_of
from tonnage.step.inputs.image_shapes import (
    Images,
    channels_of,
    feature_arguments,
    is_naflex,
    make_images,
    pair,
    square,
    vision_of,
)
from tonnage.step.inputs.text import Batch, ids, parameters, tokens, vocabulary
from tonnage.step.remarks import remark
from tonnage.units import pluralise

if TYPE_CHECKING:
    from tonnage.job import Job


USUAL_FRAME: Final = 224
"""Width and height of a video's frame if the configuration does not state them."""


def held() -> tuple[str, ...]:
    """Return a sentence on the images in this process's batches for each network."""
    return tuple(
        f"every sequence holds {seen.count} of {seen.width} x {seen.height} pixels, {seen.tokens:,} tokens each"
        for seen in _DESCRIPTIONS.values()
    )


def and_text(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return token ids in which each image has a text token before it and its own tokens, whose labels are
    ignored.
    """
    names = parameters(network)
    if "actions" in names:
        return _robot_batch(job, network, dtype)
    batch = tokens(job, network) if "input_ids" in names else {"labels": ids(job, network)}
    has_no_tower = hasattr(network.config, "vision_config") and network.config.vision_config is None
    if (
        job.images == 0
        or has_no_tower
        or not any(name.startswith(("pixel_values", "flattened_patches")) for name in names)
    ):
        return batch
    images = make_images(job, network)
    if network not in _DESCRIPTIONS:
        count = pluralise(job.images, "image")
        length = _tokens_per_image(job, network, images)
        _DESCRIPTIONS[network] = _Description(count=count, width=images.width, height=images.height, tokens=length)
    if "input_ids" in batch:
        _insert_tokens(job, network, batch, _DESCRIPTIONS[network].tokens)
    if "qformer_input_ids" in names:  # the instruction for the adapter, at most as long as it allows
        batch["qformer_input_ids"] = batch["input_ids"][:, : network.config.qformer_config.max_position_embeddings]
    return batch | fill_random(images.tensors, dtype)


def chosen_size(job: Job, network: Any) -> tuple[int, int] | None:
    """Return width and height of the job's images; None if it has none, or if the network gets every image in one
    size.
    """
    if job.images == 0:
        return None
    images = make_images(job, network)
    return None if images.fixed else (images.width, images.height)


def with_captions(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return pairs of an image and a caption, which is at most as long as the text tower has positions for."""
    from tonnage.step.configuration import text_config
    from tonnage.step.model import longest_text

    config = network.config
    stated = getattr(text_config(config), "max_position_embeddings", None)  # also if the forward computes the table
    length = min(job.seq_len, longest_text(network) or stated or job.seq_len)
    words = torch.randint(0, vocabulary(config), (job.micro_batch, length))
    if "pixel_values_videos" in parameters(network):
        return {"input_ids": words, **clips(job, network, dtype)}
    images = make_images(job, network) if is_naflex(config) else square(job, network)
    remark(network, f"captions have {length} tokens, images {images.width} x {images.height} pixels")
    return {"input_ids": words, **fill_random(images.tensors, dtype)}


def clips(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return a clip in each row, of as many frames as the network was made for."""
    vision = vision_of(network.config)
    frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", None)
    if frames is None:
        raise CannotEstimate(
            f"{job.model.name}'s configuration states no num_frames; give package.module:factory with batch(job)."
        )
    height, width = pair(getattr(vision, "image_size", None) or getattr(vision, "crop_size", None) or USUAL_FRAME)
    remark(network, f"clips have {frames} frames of {width} x {height} pixels")
    name = "pixel_values_videos" if "pixel_values_videos" in parameters(network) else "pixel_values"
    return {name: torch.rand(job.micro_batch, frames, channels_of(vision), height, width).to(dtype)}


def alone(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return images without text, as the network's own configuration describes them."""
    return fill_random(make_images(job, network).tensors, dtype)


def fill_random(tensors: Batch, dtype: torch.dtype) -> Batch:
    """Return the tensors with random numbers instead of those on meta."""
    return {
        name: torch.rand(tensor.shape).to(dtype) if tensor.is_meta else tensor for name, tensor in tensors.items()
    }


def _robot_batch(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return what pi0 learns from: images, an instruction, the robot's state and the actions that followed."""
    config = network.config
    batch = job.micro_batch
    side = pair(config.vlm_config.vision_config.image_size)[0]
    words = torch.randint(0, config.vlm_config.text_config.vocab_size, (batch, job.seq_len))
    per_image = (side // config.vlm_config.vision_config.patch_size) ** 2
    if job.seq_len <= job.images * per_image:
        raise UsageError(
            f"{job.images} x an image of {job.model.name} takes {job.images * per_image:,} tokens; "
            "choose a longer seq_len."
        )
    words[:, : job.images * per_image] = config.vlm_config.image_token_id
    return {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "pixel_values": torch.rand(batch, job.images, 3, side, side).to(dtype),
        "pixel_attention_mask": torch.ones(batch, job.images, dtype=torch.bool),
        "state": torch.rand(batch, config.max_state_dim).to(dtype),
        "actions": torch.rand(batch, config.chunk_size, config.max_action_dim).to(dtype),
    }


@dataclass(frozen=True, kw_only=True)
class _Description:
    """The images of a network, as described in the report after its first batch."""

    count: str
    width: int
    height: int
    tokens: int


_DESCRIPTIONS: Final[WeakKeyDictionary[nn.Module, _Description]] = WeakKeyDictionary()


def _insert_tokens(job: Job, network: Any, batch: Batch, length: int) -> None:
    """Write the tokens of images into the sequences, and the masks that tell the network where they are."""
    wanted = parameters(network)
    words, labels = batch["input_ids"], batch["labels"]
    needed = job.images * (length + 1)
    if job.seq_len <= needed:
        raise UsageError(
            f"{job.images} x an image of {job.model.name} takes {needed:,} tokens; choose a seq_len above that, "
            "fewer images or a smaller image_size."
        )
    token = token_of(network.config)
    is_image = torch.zeros_like(words, dtype=torch.bool)
    for start in range(1, needed, length + 1) if length else ():
        is_image[:, start : start + length] = True
    if token is not None and length:
        words[words == token] = 0
        words[is_image] = token
    labels[is_image] = IGNORED_LABEL
    for name in ("token_type_ids", "mm_token_type_ids", "image_embeds_position_mask"):
        if name in wanted and (token is not None or name == "image_embeds_position_mask"):
            batch[name] = is_image.long()


def token_of(config: Any) -> int | None:
    """Return the token that stands for a part of an image; None without one."""
    for name in ("image_token_id", "image_token_index"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    return None


def _tokens_per_image(job: Job, network: Any, images: Images) -> int:
    """Return how many tokens of the sequence one image takes."""
    if images.tokens is not None:
        return images.tokens
    if token_of(network.config) is None:
        return 0
    queries = getattr(network.config, "num_query_tokens", None)
    if queries is not None:  # BLIP-2's adapter, whose queries the text model gets
        return int(queries)
    method = "get_image_features"
    if not hasattr(getattr(network, "model", network), method) and not hasattr(network, method):
        return 0
    rows = rows_of(job, network, method, lambda: make_images(job, network).tensors, _vision_options(network))
    return rows // (job.micro_batch * job.images)


def _vision_options(network: Any) -> dict[str, Any]:
    """Return the configuration's choice of vision features, which a forward would fill in."""
    names = ("vision_feature_layer", "vision_feature_layers", "vision_feature_select_strategy")
    arguments = feature_arguments(network)
    return {
        name: getattr(network.config, name) for name in names if name in arguments and hasattr(network.config, name)
    }
