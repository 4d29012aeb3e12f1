"""Made-up inputs for Hugging Face networks, as a data loader hands them over: on the host, full, no padding.

What a family wants beside its token ids is read off its own code: the parameters of `get_image_features` name the
tensors that describe an image, and how many tokens an image takes is asked of that function itself, on tensors
without memory.  Sizes of images are those that the network gets, after the processor's own resizing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tonnage.errors import CannotEstimate, UsageError
from tonnage.job import USUAL_IMAGE

if TYPE_CHECKING:
    from tonnage.job import Job

Batch = dict[str, torch.Tensor]

USUAL_CLASSIFIED: Final = 224
"""Width and height of an image that is classified, where the configuration does not say."""

SECONDS_OF_AUDIO: Final = 30
SAMPLES_PER_SECOND: Final = 16_000


@dataclass(frozen=True, kw_only=True)
class Images:
    """All images of one micro-batch."""

    tensors: Batch
    """What the forward takes beside token ids; integers have their true values."""
    width: int
    """Pixels of each."""
    height: int
    """Pixels of each."""
    tokens: int | None = None
    """Of the sequence, for each image; None: the network's own code is to be asked."""


def make(job: Job, network: Any, task: str, dtype: torch.dtype) -> Batch:
    """One micro-batch for a network that is trained for `task`; `dtype` is that of images and sounds.

    Raises CannotEstimate for families whose inputs are not known here, UsageError for sizes they do not take.
    """
    return _MAKERS[task](job, network, dtype)


def assumed() -> tuple[str, ...]:
    """What this process's batches held beside text, one sentence for each network."""
    return tuple(
        f"every sequence holds {found.count} of {found.width} x {found.height} pixels, {found.tokens:,} tokens each"
        for found in _FOUND.values()
    )


def tokens(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Token ids that are their own labels."""
    ids = torch.randint(0, network.config.get_text_config().vocab_size, (job.micro_batch, job.seq_len))
    return {"input_ids": ids, "labels": ids.clone()}


def _classified_images(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Images of the size that the network was made for; convolutional networks take any, and get the usual one."""
    config = network.config
    vision = _vision(config)
    height, width = _pair(getattr(vision, "image_size", None) or USUAL_CLASSIFIED)
    images = torch.rand(job.micro_batch, _channels(vision), height, width).to(dtype)
    return {"pixel_values": images, "labels": torch.randint(0, config.num_labels, (job.micro_batch,))}


# -- sounds


def _speech(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Sounds of 30 seconds, or of as many frames as the encoder has positions for, and the text that was said."""
    config = network.config
    labels = torch.randint(0, config.get_text_config().vocab_size, (job.micro_batch, job.seq_len))
    name = network.main_input_name
    if name == "input_values":
        shape: tuple[int, ...] = (SECONDS_OF_AUDIO * SAMPLES_PER_SECOND,)
    elif hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        shape = (config.num_mel_bins, 2 * config.max_source_positions)  # whose first convolutions halve the frames
    elif hasattr(config, "input_feat_per_channel"):
        shape = (config.max_source_positions // 4, config.input_feat_per_channel)
    else:
        raise CannotEstimate(
            f"Batches of sounds are not made for {config.model_type}; give package.module:factory with batch(job)."
        )
    return {name: torch.rand(job.micro_batch, *shape).to(dtype), "labels": labels}


# -- images and text


def _images_and_text(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Token ids in which each image has a text token before it and its own tokens, whose labels are ignored."""
    made = tokens(job, network, dtype)
    if job.images == 0:
        return made
    images = _images(job, network)
    if network not in _FOUND:
        count = f"{job.images} image{'s' if job.images > 1 else ''}"
        length = _tokens_per_image(job, network, images)
        _FOUND[network] = _Found(count=count, width=images.width, height=images.height, tokens=length)
    _place(job, network, made, _FOUND[network].tokens)
    for name, tensor in images.tensors.items():
        made[name] = torch.rand(tensor.shape).to(dtype) if tensor.is_meta else tensor
    return made


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What is known of a network's images after its first batch."""

    count: str
    width: int
    height: int
    tokens: int


_FOUND: Final[WeakKeyDictionary[nn.Module, _Found]] = WeakKeyDictionary()


def _place(job: Job, network: Any, made: Batch, length: int) -> None:
    """Write the tokens of images into the sequences, and what else tells the network where they are."""
    wanted = inspect.signature(network.forward).parameters
    ids, labels = made["input_ids"], made["labels"]
    needed = job.images * (length + 1)
    if job.seq_len <= needed:
        raise UsageError(
            f"{job.images} x an image of {job.model.name} takes {needed:,} tokens; choose a seq_len above that, "
            "fewer images or a smaller image_size."
        )
    token = _image_token(network.config)
    where = torch.zeros_like(ids, dtype=torch.bool)
    if length and token is not None:
        ids[ids == token] = 0
        for start in range(1, needed, length + 1):
            where[:, start : start + length] = True
        ids[where] = token
        labels[where] = -100
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in wanted:
            made[name] = where.long()


def _image_token(config: Any) -> int | None:
    for name in ("image_token_id", "image_token_index"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    return None


def _images(job: Job, network: Any) -> Images:
    """The images of a micro-batch, on meta but for their integers, by what the family's own code asks for."""
    asked = _asked(network)
    if "image_grid_thw" in asked:
        return _patches(job, network, asked)
    if network.config.model_type == "mllama":
        return _tiles_with_aspect(job, network)
    if hasattr(network.config, "image_grid_pinpoints") and "image_sizes" in asked:
        return _tiles_of_best_grid(job, network)
    vision = _vision(network.config)
    if "image_sizes" in asked and getattr(vision, "model_type", "") in ("pixtral", "emu3_vqgan"):
        return _whole(job, network)
    if network.config.model_type in ("idefics3", "smolvlm"):
        return _tiles(job, network)
    if "pixel_values" in asked:
        return _squares(job, network)
    raise CannotEstimate(
        f"Batches of images and text are not made for {network.config.model_type}; train its text model alone "
        "(its text_config as a config.json, or images=0) or give package.module:factory with batch(job)."
    )


def _asked(network: Any) -> tuple[str, ...]:
    inner = getattr(network, "model", network)
    method = getattr(inner, "get_image_features", None) or getattr(network, "get_image_features", None)
    source = network.forward if method is None else method
    return tuple(inspect.signature(source).parameters)


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", None) or getattr(config, "vq_config", None) or config


def _size(job: Job, unit: int) -> tuple[int, int]:
    """Width and height of the job's images, each rounded to whole units as processors do."""
    width, height = (int(part) for part in job.image_size.split("x")) if job.image_size else USUAL_IMAGE
    return max(1, round(width / unit)) * unit, max(1, round(height / unit)) * unit


def _fixed_size(job: Job, size: Any) -> tuple[int, int]:
    """Width and height that the family insists on; UsageError if the job asks for others."""
    height, width = _pair(size)
    if job.image_size and job.image_size != f"{width}x{height}":
        raise UsageError(
            f"{job.model.name} gets its images in {width}x{height} pixels whatever their size; leave image_size out."
        )
    return width, height


def _pixels(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _patches(job: Job, network: Any, asked: tuple[str, ...]) -> Images:
    """Qwen-VL's way: all patches of all images in one list of rows, and the grid of each image."""
    vision = _vision(network.config)
    patch = _pair(vision.patch_size)[0]
    merge = _merge(network.config, vision)
    frames = getattr(vision, "temporal_patch_size", 1) or 1
    width, height = _size(job, patch * merge)
    grid = torch.tensor([[1, height // patch, width // patch]] * (job.micro_batch * job.images))
    rows, channels = int(grid.prod(-1).sum()), _channels(vision)
    square = network.config.model_type in ("kimi_k25", "paddleocr_vl")
    shape = (rows, channels, patch, patch) if square else (rows, channels * frames * patch * patch)
    made = {"pixel_values": _pixels(*shape), "image_grid_thw": grid}
    if "image_merge_sizes" in asked:
        made["image_merge_sizes"] = torch.full((len(grid),), merge)
    return Images(tensors=made, width=width, height=height, tokens=int(grid[0].prod()) // merge**2)


def _merge(config: Any, vision: Any) -> int:
    """How many patches of a row become one token."""
    for name in ("spatial_merge_size", "merge_size", "merge_kernel_size"):
        for where in (vision, config):
            if getattr(where, name, None) is not None:
                return _pair(getattr(where, name))[0]
    return 1


def _channels(vision: Any) -> int:
    for name in ("in_channels", "num_channels", "in_chans"):
        if getattr(vision, name, None) is not None:
            return int(getattr(vision, name))
    return 3


def _squares(job: Job, network: Any) -> Images:
    """One image of the size that the vision tower was made for: LLaVA, PaliGemma, Gemma 3, InternVL, ..."""
    vision = _vision(network.config)
    size = getattr(vision, "image_size", None) or getattr(vision, "resolution", None)
    if size is None:
        raise CannotEstimate(
            f"{job.model.name}'s configuration states no image_size; give package.module:factory with batch(job)."
        )
    width, height = _fixed_size(job, size)
    pixels = _pixels(job.micro_batch * job.images, _channels(vision), height, width)
    return Images(tensors={"pixel_values": pixels}, width=width, height=height)


def _whole(job: Job, network: Any) -> Images:
    """Images of any size and their sizes: Pixtral's way."""
    vision = _vision(network.config)
    unit = _pair(getattr(vision, "patch_size", 8))[0] * _merge(network.config, vision)
    width, height = _size(job, unit)
    count = job.micro_batch * job.images
    made = {
        "pixel_values": _pixels(count, _channels(vision), height, width),
        "image_sizes": torch.tensor([[height, width]] * count),
    }
    return Images(tensors=made, width=width, height=height, tokens=width * height // unit**2)


def _tiles(job: Job, network: Any) -> Images:
    """As many squares as cover the image, and one of the whole: Idefics 3's and SmolVLM's way."""
    config = network.config
    side = _pair(config.vision_config.image_size)[0]
    width, height = _size(job, 1)
    tiles = math.ceil(width / side) * math.ceil(height / side)
    tiles += tiles > 1
    pixels = _pixels(job.micro_batch, job.images * tiles, _channels(config.vision_config), side, side)
    each = (side // config.vision_config.patch_size // config.scale_factor) ** 2
    return Images(tensors={"pixel_values": pixels}, width=width, height=height, tokens=tiles * each)


def _tiles_of_best_grid(job: Job, network: Any) -> Images:
    """The grid of squares that the image wastes least of, and one square of the whole: LLaVA-NeXT's way."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    side = _pair(network.config.vision_config.image_size)[0]
    width, height = _size(job, 1)
    tiles = image_size_to_num_patches([height, width], network.config.image_grid_pinpoints, side)
    count = job.micro_batch * job.images
    made = {
        "pixel_values": _pixels(count, tiles, _channels(network.config.vision_config), side, side),
        "image_sizes": torch.tensor([[height, width]] * count),
    }
    return Images(tensors=made, width=width, height=height)


def _tiles_with_aspect(job: Job, network: Any) -> Images:
    """Always the most tiles there can be, of which a mask says which are used: Llama 3.2 Vision's way.

    The last aspect ratio uses them all.  Text sees images by cross-attention; they take no tokens.
    """
    vision = network.config.vision_config
    side, tiles = _pair(vision.image_size)[0], vision.max_num_tiles
    across, down = (side * part for part in vision.supported_aspect_ratios[-1])
    width, height = _fixed_size(job, (down, across))
    lead = (job.micro_batch, job.images)
    made = {
        "pixel_values": _pixels(*lead, tiles, _channels(vision), side, side),
        "aspect_ratio_ids": torch.full(lead, vision.max_aspect_ratio_id),
        "aspect_ratio_mask": torch.ones(*lead, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(job.micro_batch, job.seq_len, job.images, tiles, dtype=torch.long),
    }
    return Images(tensors=made, width=width, height=height, tokens=0)


def _tokens_per_image(job: Job, network: Any, images: Images) -> int:
    """How many tokens of the sequence one image takes."""
    if _image_token(network.config) is None:
        return 0
    if images.tokens is not None:
        return images.tokens
    return _rows(_features(job, network, images)) // (job.micro_batch * job.images)


def _features(job: Job, network: Any, images: Images) -> Any:
    """What the network's own code makes of the images, found by running it on tensors without memory."""
    from tonnage.model import without_memory

    shapes = without_memory(network)
    try:
        with torch.no_grad():
            found = getattr(shapes, "model", shapes).get_image_features(**images.tensors, **_selection(network))
    except Exception as error:  # whatever a family's code stumbles over
        raise CannotEstimate(
            f"How many tokens an image of {job.model.name} takes was not found ({type(error).__name__}: "
            f"{str(error).strip()[:160]}); give package.module:factory with batch(job), or images=0 for text alone."
        ) from error
    return getattr(found, "pooler_output", found)


def _selection(network: Any) -> dict[str, Any]:
    """Which features are taken of the vision tower: the configuration's choice, which a forward would fill in."""
    names = ("vision_feature_layer", "vision_feature_select_strategy")
    asked = _asked(network)
    return {name: getattr(network.config, name) for name in names if name in asked and hasattr(network.config, name)}


def _rows(features: Any) -> int:
    if isinstance(features, torch.Tensor):
        return math.prod(features.shape[:-1])
    return sum(_rows(part) for part in features)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        return size["height"], size["width"]
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


_MAKERS: Final[dict[str, Callable[[Any, Any, torch.dtype], Batch]]] = {
    "image-text-to-text": _images_and_text,
    "speech-seq2seq": _speech,
    "seq2seq": tokens,
    "masked-lm": tokens,
    "causal-lm": tokens,
    "image-classification": _classified_images,
}
