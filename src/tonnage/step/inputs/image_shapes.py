"""Shapes of the image tensors of a micro-batch, in each of the layouts that families of networks take."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from tonnage.catalog.families import types_with
from tonnage.errors import CannotEstimate, UsageError
from tonnage.job import USUAL_IMAGE
from tonnage.step.inputs.text import Batch

if TYPE_CHECKING:
    from tonnage.job import Job


HIGH_RESOLUTION: Final = 1024
"""Width and height of the larger of DeepSeek-VL hybrid's two images, for which its SAM tower was made."""


MOST_TILES: Final = 16
"""Most tiles that Llama 4's processor cuts an image into (max_patches)."""


SOFT_TOKENS: Final = 280
"""Most tokens that Gemma 4's processor makes of an image (max_soft_tokens)."""


NAFLEX_PATCHES: Final = 1024
"""Most patches that LFM2-VL's processor makes of an image (256 tokens of 2 x 2)."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """All images of one micro-batch."""

    tensors: Batch
    """Inputs of the forward beside token ids: floats are on meta, integers have their true values."""
    width: int
    """Pixels of each image."""
    height: int
    """Pixels of each image."""
    tokens: int | None = None
    """Tokens of the sequence for each image; None: the network's own code must be asked."""
    fixed: bool = False
    """True if the network gets every image in this size."""


def make_images(job: Job, network: Any) -> Images:
    """Return the images of a micro-batch, chosen by the arguments that the family's own code takes.

    Floats are on meta, integers are real.
    """
    arguments = feature_arguments(network)
    config = network.config
    layout = types_with("image_layout").get(config.model_type)
    if layout is not None:
        return _LAYOUTS[layout](job, network)
    if "image_position_ids" in arguments:
        return _padded_patches(job, network)
    if is_naflex(config):
        return _naflex_patches(job, network)
    if "image_grid_thw" in arguments:
        return _patch_rows_with_grid(job, network, arguments)
    if hasattr(config, "image_grid_pinpoints") and "image_sizes" in arguments:
        return _tiles_of_best_grid(job, network)
    tower_type = getattr(vision_of(config), "model_type", "")
    if "image_sizes" in arguments and tower_type in types_with("whole_image_towers"):
        return _whole_images(job, network)
    if "pixel_values" in arguments:
        return square(job, network)
    raise CannotEstimate(
        f"Batches of images and text are not made for {config.model_type}; train its text model alone "
        "(its text_config as a config.json, or images=0) or give package.module:factory with batch(job)."
    )


def feature_arguments(network: Any) -> tuple[str, ...]:
    """Return the argument names of the network's `get_image_features`, or of its forward if it has none."""
    inner = getattr(network, "model", network)
    method = getattr(inner, "get_image_features", None) or getattr(network, "get_image_features", None)
    source = network.forward if method is None else method
    return tuple(inspect.signature(source).parameters)


def vision_of(config: Any) -> Any:
    """Return the configuration of the vision tower, nested or the whole."""
    for name in ("vision_config", "vq_config", "encoder"):
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            return vision_of(inner) if name == "encoder" and inner is not config else inner
    return config


def _size(job: Job, unit: int) -> tuple[int, int]:
    """Return width and height of the job's images, each rounded to whole units as processors do."""
    width, height = (int(part) for part in job.image_size.split("x")) if job.image_size else USUAL_IMAGE
    return max(1, round(width / unit)) * unit, max(1, round(height / unit)) * unit


def _fixed_size(job: Job, size: Any) -> tuple[int, int]:
    """Return width and height that the family requires.  Raises UsageError if the job asks for others."""
    height, width = pair(size)
    if job.image_size and job.image_size != f"{width}x{height}":
        raise UsageError(
            f"{job.model.name} gets its images in {width}x{height} pixels whatever their size; leave image_size out."
        )
    return width, height


def _empty_pixels(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _patch_rows_with_grid(job: Job, network: Any, arguments: tuple[str, ...]) -> Images:
    """Return all patches of all images in one list of rows, and the grid of each image, as Qwen-VL takes them."""
    vision = vision_of(network.config)
    patch = pair(vision.patch_size)[0]
    merge = _merged_patches_per_side(network.config, vision)
    frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
    width, height = _size(job, patch * merge)
    grid = torch.tensor([[1, height // patch, width // patch]] * (job.micro_batch * job.images))
    rows, channels = int(grid.prod(-1).sum()), channels_of(vision)
    square = network.config.model_type in types_with("square_patches")
    shape = (rows, channels, patch, patch) if square else (rows, channels * frames * patch * patch)
    tensors = {"pixel_values": _empty_pixels(*shape), "image_grid_thw": grid}
    if "image_merge_sizes" in arguments:
        tensors["image_merge_sizes"] = torch.full((len(grid),), merge)
    tokens = (
        None if network.config.model_type in types_with("tokens_told_by_network") else int(grid[0].prod()) // merge**2
    )  # it adds tokens to each row
    return Images(tensors=tensors, width=width, height=height, tokens=tokens)


def _merged_patches_per_side(config: Any, vision: Any) -> int:
    """Return how many patches of a row become one token."""
    for name in ("spatial_merge_size", "merge_size", "merge_kernel_size"):
        for where in (vision, config):
            if getattr(where, name, None) is not None:
                return pair(getattr(where, name))[0]
    return 1


def channels_of(vision: Any) -> int:
    """Return the colour channels of an image, three if the configuration does not state them."""
    for name in ("in_channels", "num_channels", "in_chans"):
        if isinstance(getattr(vision, name, None), int):
            return int(getattr(vision, name))
    return 3


def square(job: Job, network: Any) -> Images:
    """Return one image of the size that the vision tower was made for: LLaVA, PaliGemma, Gemma 3, InternVL, ..."""
    vision = vision_of(network.config)
    size = getattr(vision, "image_size", None) or getattr(vision, "resolution", None)
    size = size or getattr(network.config, "image_size", None)
    size = size or types_with("image_side").get(network.config.model_type)
    if size is None:
        raise CannotEstimate(
            f"{job.model.name}'s configuration states no image_size; give package.module:factory with batch(job)."
        )
    width, height = _fixed_size(job, size)
    pixels = _empty_pixels(job.micro_batch * job.images, channels_of(vision), height, width)
    return Images(tensors={"pixel_values": pixels}, width=width, height=height, fixed=True)


def _whole_images(job: Job, network: Any) -> Images:
    """Return images of any size together with their sizes, as Pixtral takes them."""
    vision = vision_of(network.config)
    unit = pair(getattr(vision, "patch_size", 8))[0] * _merged_patches_per_side(network.config, vision)
    width, height = _size(job, unit)
    count = job.micro_batch * job.images
    tensors = {
        "pixel_values": _empty_pixels(count, channels_of(vision), height, width),
        "image_sizes": torch.tensor([[height, width]] * count),
    }
    return Images(tensors=tensors, width=width, height=height, tokens=width * height // unit**2)


def _tiles(job: Job, network: Any) -> Images:
    """Return as many squares as cover the image, and one of the whole, as Idefics 3 and SmolVLM take them."""
    config = network.config
    side = pair(config.vision_config.image_size)[0]
    width, height = _size(job, 1)
    tiles = math.ceil(width / side) * math.ceil(height / side)
    tiles += tiles > 1
    pixels = _empty_pixels(job.micro_batch, job.images * tiles, channels_of(config.vision_config), side, side)
    tokens_per_tile = (side // config.vision_config.patch_size // config.scale_factor) ** 2
    return Images(tensors={"pixel_values": pixels}, width=width, height=height, tokens=tiles * tokens_per_tile)


def _tiles_of_best_grid(job: Job, network: Any) -> Images:
    """Return the grid of squares that wastes least of the image, and one square of the whole, as LLaVA-NeXT takes
    them.
    """
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    side = pair(network.config.vision_config.image_size)[0]
    width, height = _size(job, 1)
    tiles = image_size_to_num_patches([height, width], network.config.image_grid_pinpoints, side)
    count = job.micro_batch * job.images
    tensors = {
        "pixel_values": _empty_pixels(count, tiles, channels_of(network.config.vision_config), side, side),
        "image_sizes": torch.tensor([[height, width]] * count),
    }
    return Images(tensors=tensors, width=width, height=height)


def _tiles_with_aspect(job: Job, network: Any) -> Images:
    """Return the largest number of tiles with a mask of those in use, as Llama 3.2 Vision takes them.

    The last aspect ratio uses them all.  Text sees images by cross-attention; they take no tokens.
    """
    vision = network.config.vision_config
    side, tiles = pair(vision.image_size)[0], vision.max_num_tiles
    across, down = (side * part for part in vision.supported_aspect_ratios[-1])
    width, height = _fixed_size(job, (down, across))
    lead = (job.micro_batch, job.images)
    tensors = {
        "pixel_values": _empty_pixels(*lead, tiles, channels_of(vision), side, side),
        "aspect_ratio_ids": torch.full(lead, vision.max_aspect_ratio_id),
        "aspect_ratio_mask": torch.ones(*lead, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(job.micro_batch, job.seq_len, job.images, tiles, dtype=torch.long),
    }
    return Images(tensors=tensors, width=width, height=height, tokens=0, fixed=True)


def _tiles_of_smallest_canvas(job: Job, network: Any) -> Images:
    """Return the smallest canvas of at most MOST_TILES squares that holds the image, and one square of the whole
    (Llama 4).
    """
    side = pair(network.config.vision_config.image_size)[0]
    width, height = _size(job, 1)
    across, down = math.ceil(width / side), math.ceil(height / side)
    shrunk = max(1.0, math.sqrt(across * down / MOST_TILES))
    tiles = max(1, int(across / shrunk)) * max(1, int(down / shrunk))
    tiles += tiles > 1
    pixels = _empty_pixels(
        job.micro_batch * job.images * tiles, channels_of(network.config.vision_config), side, side
    )
    return Images(tensors={"pixel_values": pixels}, width=width, height=height)


def _images_per_row(job: Job, network: Any) -> Images:
    """Return whole images in a list for each row, as Idefics 2 takes them without splitting."""
    vision = network.config.vision_config
    width, height = _size(job, pair(vision.patch_size)[0])
    most = pair(vision.image_size)[0]
    scale = min(1.0, most / max(width, height))
    unit = pair(vision.patch_size)[0]
    width, height = (max(1, int(part * scale) // unit) * unit for part in (width, height))
    pixels = _empty_pixels(job.micro_batch, job.images, channels_of(vision), height, width)
    tokens = network.config.perceiver_config.resampler_n_latents
    return Images(tensors={"pixel_values": pixels}, width=width, height=height, tokens=tokens)


def _tiles_per_row(job: Job, network: Any) -> Images:
    """Return squares that cover the image and one of the whole, with a mask of the real ones, as Granite-Docling
    takes them.
    """
    vision = network.config.vision_config
    side = pair(vision.image_size)[0]
    width, height = _size(job, 1)
    tiles = math.ceil(width / side) * math.ceil(height / side)
    tiles += tiles > 1
    pixels = _empty_pixels(job.micro_batch, job.images * tiles, channels_of(vision), side, side)
    real = torch.ones(job.micro_batch, job.images * tiles, dtype=torch.bool)
    return Images(tensors={"pixel_values": pixels, "pixel_attention_mask": real}, width=width, height=height)


def _cross_attended(job: Job, network: Any) -> Images:
    """Return squares that text sees by masked cross-attention, as in Idefics; they take no tokens."""
    vision = network.config.vision_config
    width, height = _fixed_size(job, vision.image_size)
    pixels = _empty_pixels(job.micro_batch, job.images, channels_of(vision), height, width)
    mask = torch.ones(job.micro_batch, job.seq_len, job.images, dtype=torch.long)
    tensors = {"pixel_values": pixels, "image_attention_mask": mask}
    return Images(tensors=tensors, width=width, height=height, tokens=0, fixed=True)


def _square_with_queries(job: Job, network: Any) -> Images:
    """Return one square whose tokens stand where a mask says, as in Kosmos-2."""
    return replace(square(job, network), tokens=network.config.latent_query_num)


def _flat_patches(job: Job, network: Any) -> Images:
    """Return a fixed number of patches, each with its row and column before its pixels, as Pix2Struct takes them."""
    config = network.config
    vision = vision_of(config)
    patches, side = types_with("flat_patches")[config.model_type], pair(getattr(vision, "patch_size", 16))[0]
    width, height = _size(job, side)
    shape = (job.micro_batch, patches, 2 + channels_of(vision) * side**2)
    tensors = {"flattened_patches": _empty_pixels(*shape)}
    if config.model_type == "pix2struct":
        return Images(tensors=tensors, width=width, height=height, tokens=0)
    size = {"width": torch.full((job.micro_batch,), width), "height": torch.full((job.micro_batch,), height)}
    return Images(tensors=tensors | size, width=width, height=height, tokens=config.latent_query_num)


def _two_resolutions(job: Job, network: Any) -> Images:
    """Return each image twice, for the two towers of DeepSeek-VL hybrid."""
    smaller = square(job, network)
    vision = network.config.high_res_vision_config
    side = pair(getattr(vision, "image_size", None) or HIGH_RESOLUTION)[0]
    count = smaller.tensors["pixel_values"].shape[0]
    larger = {"high_res_pixel_values": _empty_pixels(count, channels_of(vision), side, side)}
    return replace(smaller, tensors=smaller.tensors | larger)


def _patch_rows_with_sizes(job: Job, network: Any) -> Images:
    """Return all patches of all images in one list of rows, with the rows and columns of each image (Nemotron
    Omni).
    """
    vision = network.config.vision_config
    patch = pair(vision.patch_size)[0]
    width, height = _size(job, patch * 2)
    grid = torch.tensor([[height // patch, width // patch]] * (job.micro_batch * job.images))
    pixels = _empty_pixels(int(grid.prod(-1).sum()), channels_of(vision) * patch**2)
    return Images(tensors={"pixel_values": pixels, "image_grid_hw": grid}, width=width, height=height)


def _merged_patches(job: Job, network: Any) -> Images:
    """Return a square of pixels for each token, and the grid of tokens of each image (Inkling 2)."""
    vision = vision_of(network.config)
    side = pair(vision.patch_size)[0] * _merged_patches_per_side(network.config, vision)
    width, height = _size(job, side)
    grid = torch.tensor([[1, height // side, width // side]] * (job.micro_batch * job.images))
    tokens = int(grid[0].prod())
    pixels = _empty_pixels(len(grid) * tokens, side, side, channels_of(vision))
    return Images(tensors={"pixel_values": pixels, "image_grid_thw": grid}, width=width, height=height, tokens=tokens)


def _padded_patches(job: Job, network: Any) -> Images:
    """Return as many patches as fit into SOFT_TOKENS tokens, padded to them, with the position of each (Gemma 4)."""
    vision = vision_of(network.config)
    merged = getattr(vision, "model_patch_size", None)
    pool = 1 if merged else vision.pooling_kernel_size
    patch = merged or vision.patch_size
    unit, most = patch * pool, SOFT_TOKENS * pool**2
    width, height = _size(job, unit)
    scale = min(1.0, math.sqrt(most * patch**2 / (width * height)))
    width, height = (max(1, int(part * scale) // unit) * unit for part in (width, height))
    across, down = width // patch, height // patch
    positions = torch.full((most, 2), -1)
    positions[: across * down] = torch.cartesian_prod(torch.arange(down), torch.arange(across)).flip(-1)
    count = job.micro_batch * job.images
    tensors = {
        "pixel_values": _empty_pixels(count, most, channels_of(vision) * patch**2),
        "image_position_ids": positions.expand(count, -1, -1).contiguous(),
    }
    return Images(tensors=tensors, width=width, height=height, tokens=across * down // pool**2)


def is_naflex(config: Any) -> bool:
    """Return True if the vision tower is SigLIP 2's, which takes images of any aspect ratio."""
    return getattr(vision_of(config), "model_type", "") in types_with("naflex_towers")


def _naflex_patches(job: Job, network: Any) -> Images:
    """Return patches of an image of any shape, padded to a fixed number, with rows and columns of each (SigLIP 2)."""
    config, vision = network.config, vision_of(network.config)
    downsampling = getattr(config, "downsample_factor", None) or 1
    most = NAFLEX_PATCHES if downsampling > 1 else vision.num_patches
    patch = pair(vision.patch_size)[0]
    width, height = _size(job, patch * downsampling)
    scale = min(1.0, math.sqrt(most * patch**2 / (width * height)))
    across, down = (max(1, int(part * scale) // (patch * downsampling)) * downsampling for part in (width, height))
    count = job.micro_batch * job.images
    tensors = {
        "pixel_values": _empty_pixels(count, most, channels_of(vision) * patch**2),
        "pixel_attention_mask": (torch.arange(most) < across * down).long().expand(count, -1).contiguous(),
        "spatial_shapes": torch.tensor([[down, across]] * count),
    }
    tokens = across * down // downsampling**2
    return Images(tensors=tensors, width=across * patch, height=down * patch, tokens=tokens)


def _raw_patches(job: Job, network: Any) -> Images:
    """Return patches that enter the text model as they are (Fuyu)."""
    config = network.config
    patch = config.patch_size
    width, height = _size(job, patch)
    tokens = (width // patch) * (height // patch)
    pixels = _empty_pixels(job.micro_batch, job.images * tokens, channels_of(config) * patch**2)
    return Images(tensors={"pixel_values": pixels}, width=width, height=height, tokens=tokens)


def pair(size: Any) -> tuple[int, int]:
    """Return height and width from a number for both, a list or a dict."""
    if isinstance(size, dict):
        return size["height"], size["width"]
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


_LAYOUTS: Final[dict[str, Callable[[Any, Any], Images]]] = {
    "cross_attended": _cross_attended,
    "flat_patches": _flat_patches,
    "images_per_row": _images_per_row,
    "merged_patches": _merged_patches,
    "patch_rows_with_sizes": _patch_rows_with_sizes,
    "raw_patches": _raw_patches,
    "square_with_queries": _square_with_queries,
    "tiles": _tiles,
    "tiles_of_smallest_canvas": _tiles_of_smallest_canvas,
    "tiles_per_row": _tiles_per_row,
    "tiles_with_aspect": _tiles_with_aspect,
    "two_resolutions": _two_resolutions,
}
"""The layouts of the trait `image_layout`, for types whose layout cannot be told from the arguments of their code."""
