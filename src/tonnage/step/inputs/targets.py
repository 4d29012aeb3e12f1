"""Inputs with their targets, for networks that classify, detect, measure or forecast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from tonnage.catalog.families import types_with
from tonnage.errors import CannotEstimate
from tonnage.step.inputs import image_shapes, images, sounds
from tonnage.step.inputs.text import Batch, ids, parameters, tokens
from tonnage.step.remarks import remark

if TYPE_CHECKING:
    from tonnage.job import Job

USUAL_CLASSIFIED: Final = 224
"""Width and height of an image for classification if the configuration does not state them."""

USUAL_DETECTED: Final = (800, 1066)
"""Height and width that DETR's processor makes of an image of 3:4 (shortest edge 800)."""

USUAL_SEGMENTED: Final = 512
"""Width and height of ADE20K's images as segmentation is usually trained on them."""

OBJECTS: Final = 8
"""Objects in an image for detection or segmentation; COCO's images have 7.3 on average (Lin et al. 2014)."""


def classified_images(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return images of the size that the network was made for, with classes; convolutional networks get the usual
    size.
    """
    labels = torch.randint(0, network.config.num_labels, (job.micro_batch,))
    if "pixel_values" not in parameters(network):  # ImageGPT takes colours as tokens
        size = network.config.n_positions
        return {"input_ids": torch.randint(0, network.config.vocab_size, (job.micro_batch, size)), "labels": labels}
    if "spatial_shapes" in parameters(network):
        return {**images.alone(job, network, dtype), "labels": labels}
    height, width = _size(job, network.config, USUAL_CLASSIFIED)
    return {"pixel_values": _random_pixels(job, network, height, width, dtype), "labels": labels}


def classified_videos(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return clips with a class."""
    labels = torch.randint(0, network.config.num_labels, (job.micro_batch,))
    return {**images.clips(job, network, dtype), "labels": labels}


def detected_objects(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return images with OBJECTS boxes in each; `tonnage.step.training` converts them to the form that forwards
    take.
    """
    if "labels" not in parameters(network):
        raise CannotEstimate(
            f"{type(network).__name__} takes no labels and returns without a loss; give package.module:factory "
            "whose forward returns one."
        )
    usual = types_with("detection_size").get(network.config.model_type, USUAL_DETECTED)
    height, width = _size(job, network.config, usual)
    remark(network, f"images have {width} x {height} pixels and {OBJECTS} objects each")
    shape = (job.micro_batch, OBJECTS)
    boxes = torch.rand(*shape, 4) / 4 + torch.tensor([0.25, 0.25, 0.1, 0.1])
    return {
        "pixel_values": _random_pixels(job, network, height, width, dtype),
        "class_labels": torch.randint(0, network.config.num_labels, shape),
        "boxes": boxes,
    }


def segmented_objects(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return images with the masks of OBJECTS objects in each."""
    if {"task_inputs", "pixel_values_videos"} & {*parameters(network)}:
        raise CannotEstimate(
            f"Batches are not made for {network.config.model_type}; give package.module:factory with batch(job)."
        )
    height, width = _size(job, network.config, USUAL_SEGMENTED)
    remark(network, f"images have {width} x {height} pixels and {OBJECTS} objects each")
    return {
        "pixel_values": _random_pixels(job, network, height, width, dtype),
        "mask_labels": torch.zeros(job.micro_batch, OBJECTS, height, width),
        "class_labels": torch.randint(0, network.config.num_labels, (job.micro_batch, OBJECTS)),
    }


def segmented_images(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return images with a class for each pixel."""
    height, width = _size(job, network.config, USUAL_SEGMENTED)
    remark(network, f"images have {width} x {height} pixels")
    classes = torch.randint(0, network.config.num_labels, (job.micro_batch, height, width))
    return {"pixel_values": _random_pixels(job, network, height, width, dtype), "labels": classes}


def measured_depths(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return images with a depth for each pixel."""
    height, width = _size(job, network.config, USUAL_SEGMENTED)
    depths = torch.rand(job.micro_batch, height, width)
    return {"pixel_values": _random_pixels(job, network, height, width, dtype), "labels": depths}


def classified_sequences(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return text with a class; with a number if the network has a single output, as reward models have."""
    batch = {name: tensor for name, tensor in tokens(job, network).items() if name != "labels"}
    if network.config.num_labels == 1:
        return {**batch, "labels": torch.rand(job.micro_batch)}
    return {**batch, "labels": torch.randint(0, network.config.num_labels, (job.micro_batch,))}


def classified_tokens(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return text with a class for each token."""
    batch = tokens(job, network)
    return {**batch, "labels": torch.randint(0, network.config.num_labels, (job.micro_batch, job.seq_len))}


def answered_questions(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return text with the positions where the answer begins and ends."""
    if "visual_feats" in parameters(network):
        raise CannotEstimate(
            f"{network.config.model_type} sees regions that a detector found, for which batches are not made; "
            "give package.module:factory with batch(job)."
        )
    batch = {name: tensor for name, tensor in tokens(job, network).items() if name != "labels"}
    positions = torch.randint(0, job.seq_len, (2, job.micro_batch))
    return {**batch, "start_positions": positions[0].clone(), "end_positions": positions[1].clone()}


def classified_sounds(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return sounds with a class."""
    labels = torch.randint(0, network.config.num_labels, (job.micro_batch,))
    return {**sounds.alone(job, network, dtype), "labels": labels}


def forecasts(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return series of as many points as the network's context has, and the points that follow."""
    config, names = network.config, parameters(network)
    channels: Any = getattr(config, "num_input_channels", None) or getattr(config, "input_size", 1)
    lags: Any = getattr(config, "lags_sequence", None)
    past = config.context_length + (max(lags) if lags else 0)
    future = getattr(config, "prediction_length", None) or getattr(config, "horizon_length", 1)
    batch = job.micro_batch
    wide = (channels,) if channels > 1 or "past_time_features" not in names else ()
    if "freq" in names or "past_values" not in names:
        raise CannotEstimate(
            f"Batches of series are not made for {config.model_type}; give package.module:factory with batch(job)."
        )
    series = {
        "past_values": torch.rand(batch, past, *wide).to(dtype),
        "past_observed_mask": torch.ones(batch, past, *wide),
        "future_values": torch.rand(batch, future, *wide).to(dtype),
    }
    if "past_time_features" in names:
        features = getattr(config, "num_time_features", 0)
        series["past_time_features"] = torch.rand(batch, past, features).to(dtype)
        series["future_time_features"] = torch.rand(batch, future, features).to(dtype)
    remark(network, f"series have {past:,} points in the past and {future:,} to come")
    return {name: tensor for name, tensor in series.items() if name in names}


def pretraining(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return inputs for a class with several losses.  Raises CannotEstimate for those that need more than inputs
    and labels.
    """
    names = parameters(network)
    if "next_sentence_label" in names or "sentence_order_label" in names:
        second = "next_sentence_label" if "next_sentence_label" in names else "sentence_order_label"
        return {**tokens(job, network), second: torch.zeros(job.micro_batch, dtype=torch.long)}
    if network.config.model_type in types_with("images_without_labels"):
        return images.alone(job, network, dtype)
    if network.main_input_name == "input_ids" and not {"pixel_values", "visual_embeds"} & {*names}:
        return tokens(job, network)
    raise CannotEstimate(
        f"Batches for {type(network).__name__} are not made; name a class with a head under architectures, "
        "or give package.module:factory with batch(job)."
    )


def features(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Return inputs of a network without a head."""
    names = parameters(network)
    if "input_ids" in names or "inputs" in names:
        batch = {name: tensor for name, tensor in tokens(job, network).items() if name != "labels"}
        if getattr(network.config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
            batch["decoder_input_ids"] = ids(job, network)
        return batch
    if "spatial_shapes" in names:
        return images.alone(job, network, dtype)
    if "pixel_values" in names:
        height, width = _size(job, network.config, USUAL_CLASSIFIED)
        return {"pixel_values": _random_pixels(job, network, height, width, dtype)}
    return sounds.alone(job, network, dtype)


def _size(job: Job, config: Any, usual: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width: the job's, else the configuration's, else those of the type's processor."""
    if job.image_size:
        width, height = (int(part) for part in job.image_size.split("x"))
        return height, width
    vision = image_shapes.vision_of(config)
    return image_shapes.pair(getattr(vision, "image_size", None) or usual)


def _random_pixels(job: Job, network: Any, height: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    channels = image_shapes.channels_of(image_shapes.vision_of(network.config))
    return torch.rand(job.micro_batch, channels, height, width).to(dtype)
