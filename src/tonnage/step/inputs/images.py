"""Images beside token ids, in each of the ways in which families take them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tonnage.errors import CannotEstimate, UsageError
from tonnage.job import IGNORED_LABEL, USUAL_IMAGE
from tonnage.step.inputs.asking import rows_of
from tonnage.step.inputs.text import Batch, ids, parameters, tokens, vocabulary
from tonnage.step.remarks import remark
from tonnage.units import counted

if TYPE_CHECKING:
    from tonnage.job import Job

PROCESSED: Final = {
    **{"florence2": 768, "florence_vision": 768, "unlimited_ocr": 1024, "deepseek_ocr2": 1024, "fuyu": 300},
    **{"pp_lcnet": 224, "lw_detr": 640},
}
"""Width and height that a type's processor makes where its configuration does not say."""

USUAL_FRAME: Final = 224
"""Width and height of a video's frame where the configuration does not say."""

HIGH_RESOLUTION: Final = 1024
"""Width and height of the larger of DeepSeek-VL hybrid's two images, what its SAM tower was made for."""

MOST_TILES: Final = 16
"""Tiles that Llama 4's processor cuts an image into at most (max_patches)."""

SOFT_TOKENS: Final = 280
"""Tokens that Gemma 4's processor makes of an image at most (max_soft_tokens)."""

NAFLEX_PATCHES: Final = 1024
"""Patches that LFM2-VL's processor makes of an image at most (256 tokens of 2 x 2)."""

FLAT_PATCHES: Final = {"pix2struct": 2048, "kosmos-2.5": 4096}
"""Patches that a processor makes of an image of any size (max_patches)."""


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
    fixed: bool = False
    """Whether the network gets every image in this size."""


def held() -> tuple[str, ...]:
    """What this process's batches held beside text, one sentence for each network."""
    return tuple(
        f"every sequence holds {found.count} of {found.width} x {found.height} pixels, {found.tokens:,} tokens each"
        for found in _FOUND.values()
    )


def and_text(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Token ids in which each image has a text token before it and its own tokens, whose labels are ignored."""
    names = parameters(network)
    if "actions" in names:
        return _robot(job, network, dtype)
    made = tokens(job, network) if "input_ids" in names else {"labels": ids(job, network)}
    blind = hasattr(network.config, "vision_config") and network.config.vision_config is None
    if job.images == 0 or blind or not any(name.startswith(("pixel_values", "flattened_patches")) for name in names):
        return made
    images = _images(job, network)
    if network not in _FOUND:
        count = counted(job.images, "image")
        length = _tokens_per_image(job, network, images)
        _FOUND[network] = _Found(count=count, width=images.width, height=images.height, tokens=length)
    if "input_ids" in made:
        _place(job, network, made, _FOUND[network].tokens)
    if "qformer_input_ids" in names:  # what the adapter is told, at most as long as it can be
        made["qformer_input_ids"] = made["input_ids"][:, : network.config.qformer_config.max_position_embeddings]
    return made | filled(images.tensors, dtype)


def chosen_size(job: Job, network: Any) -> tuple[int, int] | None:
    """Width and height of the job's images; None where it has none, or the network gets every image in one size."""
    if job.images == 0:
        return None
    found = _images(job, network)
    return None if found.fixed else (found.width, found.height)


def with_captions(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """Pairs of an image and a caption, which is at most as long as the text tower has positions for."""
    from tonnage.step.configuration import text_config
    from tonnage.step.model import longest_text

    config = network.config
    stated = getattr(text_config(config), "max_position_embeddings", None)  # also of a table made as it is needed
    length = min(job.seq_len, longest_text(network) or stated or job.seq_len)
    words = torch.randint(0, vocabulary(config), (job.micro_batch, length))
    if "pixel_values_videos" in parameters(network):
        return {"input_ids": words, **clips(job, network, dtype)}
    images = _images(job, network) if _is_naflex(config) else _squares(job, network)
    remark(network, f"captions have {length} tokens, images {images.width} x {images.height} pixels")
    return {"input_ids": words, **filled(images.tensors, dtype)}


def clips(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """A clip in each row, of as many frames as the network was made for."""
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
    """Images without text, as the network's own configuration has them."""
    return filled(_images(job, network).tensors, dtype)


def filled(tensors: Batch, dtype: torch.dtype) -> Batch:
    """The same with numbers in place of tensors without memory."""
    return {name: torch.rand(each.shape).to(dtype) if each.is_meta else each for name, each in tensors.items()}


def _robot(job: Job, network: Any, dtype: torch.dtype) -> Batch:
    """What pi0 learns from: images, an instruction, the robot's state and the actions that followed."""
    config = network.config
    batch = job.micro_batch
    side = pair(config.vlm_config.vision_config.image_size)[0]
    words = torch.randint(0, config.vlm_config.text_config.vocab_size, (batch, job.seq_len))
    per_image = (side // config.vlm_config.vision_config.patch_size) ** 2
    if job.seq_len <= job.images * per_image:
        raise UsageError(
            f"{job.images} x an image of {job.model.name} takes {per_image:,} tokens; choose a longer seq_len."
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
class _Found:
    """What is known of a network's images after its first batch."""

    count: str
    width: int
    height: int
    tokens: int


_FOUND: Final[WeakKeyDictionary[nn.Module, _Found]] = WeakKeyDictionary()


def _place(job: Job, network: Any, made: Batch, length: int) -> None:
    """Write the tokens of images into the sequences, and what else tells the network where they are."""
    wanted = parameters(network)
    words, labels = made["input_ids"], made["labels"]
    needed = job.images * (length + 1)
    if job.seq_len <= needed:
        raise UsageError(
            f"{job.images} x an image of {job.model.name} takes {needed:,} tokens; choose a seq_len above that, "
            "fewer images or a smaller image_size."
        )
    token = token_of(network.config)
    where = torch.zeros_like(words, dtype=torch.bool)
    for start in range(1, needed, length + 1) if length else ():
        where[:, start : start + length] = True
    if token is not None and length:
        words[words == token] = 0
        words[where] = token
    labels[where] = IGNORED_LABEL
    for name in ("token_type_ids", "mm_token_type_ids", "image_embeds_position_mask"):
        if name in wanted and (token is not None or name == "image_embeds_position_mask"):
            made[name] = where.long()


def token_of(config: Any) -> int | None:
    """The token that stands for a part of an image."""
    for name in ("image_token_id", "image_token_index"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    return None


def _images(job: Job, network: Any) -> Images:
    """The images of a micro-batch, on meta but for their integers, by what the family's own code asks for."""
    asked = _asked(network)
    config = network.config
    way = _WAYS.get(config.model_type)
    if way is not None:
        return way(job, network)
    if "image_position_ids" in asked:
        return _padded_patches(job, network)
    if _is_naflex(config):
        return _flexible(job, network)
    if "image_grid_thw" in asked:
        return _patches(job, network, asked)
    if hasattr(config, "image_grid_pinpoints") and "image_sizes" in asked:
        return _tiles_of_best_grid(job, network)
    if "image_sizes" in asked and getattr(vision_of(config), "model_type", "") in ("pixtral", "emu3_vqgan"):
        return _whole(job, network)
    if "pixel_values" in asked:
        return _squares(job, network)
    raise CannotEstimate(
        f"Batches of images and text are not made for {config.model_type}; train its text model alone "
        "(its text_config as a config.json, or images=0) or give package.module:factory with batch(job)."
    )


def _asked(network: Any) -> tuple[str, ...]:
    inner = getattr(network, "model", network)
    method = getattr(inner, "get_image_features", None) or getattr(network, "get_image_features", None)
    source = network.forward if method is None else method
    return tuple(inspect.signature(source).parameters)


def vision_of(config: Any) -> Any:
    """The configuration of what sees, inside or the whole."""
    for name in ("vision_config", "vq_config", "encoder"):
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            return vision_of(inner) if name == "encoder" and inner is not config else inner
    return config


def _size(job: Job, unit: int) -> tuple[int, int]:
    """Width and height of the job's images, each rounded to whole units as processors do."""
    width, height = (int(part) for part in job.image_size.split("x")) if job.image_size else USUAL_IMAGE
    return max(1, round(width / unit)) * unit, max(1, round(height / unit)) * unit


def _fixed_size(job: Job, size: Any) -> tuple[int, int]:
    """Width and height that the family insists on; UsageError if the job asks for others."""
    height, width = pair(size)
    if job.image_size and job.image_size != f"{width}x{height}":
        raise UsageError(
            f"{job.model.name} gets its images in {width}x{height} pixels whatever their size; leave image_size out."
        )
    return width, height


def _pixels(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _patches(job: Job, network: Any, asked: tuple[str, ...]) -> Images:
    """Qwen-VL's way: all patches of all images in one list of rows, and the grid of each image."""
    vision = vision_of(network.config)
    patch = pair(vision.patch_size)[0]
    merge = _merge(network.config, vision)
    frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
    width, height = _size(job, patch * merge)
    grid = torch.tensor([[1, height // patch, width // patch]] * (job.micro_batch * job.images))
    rows, channels = int(grid.prod(-1).sum()), channels_of(vision)
    square = network.config.model_type in ("kimi_k25", "paddleocr_vl")
    shape = (rows, channels, patch, patch) if square else (rows, channels * frames * patch * patch)
    made = {"pixel_values": _pixels(*shape), "image_grid_thw": grid}
    if "image_merge_sizes" in asked:
        made["image_merge_sizes"] = torch.full((len(grid),), merge)
    each = None if network.config.model_type == "hunyuan_vl" else int(grid[0].prod()) // merge**2  # it adds to rows
    return Images(tensors=made, width=width, height=height, tokens=each)


def _merge(config: Any, vision: Any) -> int:
    """How many patches of a row become one token."""
    for name in ("spatial_merge_size", "merge_size", "merge_kernel_size"):
        for where in (vision, config):
            if getattr(where, name, None) is not None:
                return pair(getattr(where, name))[0]
    return 1


def channels_of(vision: Any) -> int:
    """Colours of an image, three where the configuration does not say."""
    for name in ("in_channels", "num_channels", "in_chans"):
        if isinstance(getattr(vision, name, None), int):
            return int(getattr(vision, name))
    return 3


def _squares(job: Job, network: Any) -> Images:
    """One image of the size that the vision tower was made for: LLaVA, PaliGemma, Gemma 3, InternVL, ..."""
    vision = vision_of(network.config)
    size = getattr(vision, "image_size", None) or getattr(vision, "resolution", None)
    size = size or getattr(network.config, "image_size", None) or PROCESSED.get(network.config.model_type)
    if size is None:
        raise CannotEstimate(
            f"{job.model.name}'s configuration states no image_size; give package.module:factory with batch(job)."
        )
    width, height = _fixed_size(job, size)
    pixels = _pixels(job.micro_batch * job.images, channels_of(vision), height, width)
    return Images(tensors={"pixel_values": pixels}, width=width, height=height, fixed=True)


def _whole(job: Job, network: Any) -> Images:
    """Images of any size and their sizes: Pixtral's way."""
    vision = vision_of(network.config)
    unit = pair(getattr(vision, "patch_size", 8))[0] * _merge(network.config, vision)
    width, height = _size(job, unit)
    count = job.micro_batch * job.images
    made = {
        "pixel_values": _pixels(count, channels_of(vision), height, width),
        "image_sizes": torch.tensor([[height, width]] * count),
    }
    return Images(tensors=made, width=width, height=height, tokens=width * height // unit**2)


def _tiles(job: Job, network: Any) -> Images:
    """As many squares as cover the image, and one of the whole: Idefics 3's and SmolVLM's way."""
    config = network.config
    side = pair(config.vision_config.image_size)[0]
    width, height = _size(job, 1)
    tiles = math.ceil(width / side) * math.ceil(height / side)
    tiles += tiles > 1
    pixels = _pixels(job.micro_batch, job.images * tiles, channels_of(config.vision_config), side, side)
    each = (side // config.vision_config.patch_size // config.scale_factor) ** 2
    return Images(tensors={"pixel_values": pixels}, width=width, height=height, tokens=tiles * each)


def _tiles_of_best_grid(job: Job, network: Any) -> Images:
    """The grid of squares that the image wastes least of, and one square of the whole: LLaVA-NeXT's way."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    side = pair(network.config.vision_config.image_size)[0]
    width, height = _size(job, 1)
    tiles = image_size_to_num_patches([height, width], network.config.image_grid_pinpoints, side)
    count = job.micro_batch * job.images
    made = {
        "pixel_values": _pixels(count, tiles, channels_of(network.config.vision_config), side, side),
        "image_sizes": torch.tensor([[height, width]] * count),
    }
    return Images(tensors=made, width=width, height=height)


def _tiles_with_aspect(job: Job, network: Any) -> Images:
    """Always the most tiles there can be, of which a mask says which are used: Llama 3.2 Vision's way.

    The last aspect ratio uses them all.  Text sees images by cross-attention; they take no tokens.
    """
    vision = network.config.vision_config
    side, tiles = pair(vision.image_size)[0], vision.max_num_tiles
    across, down = (side * part for part in vision.supported_aspect_ratios[-1])
    width, height = _fixed_size(job, (down, across))
    lead = (job.micro_batch, job.images)
    made = {
        "pixel_values": _pixels(*lead, tiles, channels_of(vision), side, side),
        "aspect_ratio_ids": torch.full(lead, vision.max_aspect_ratio_id),
        "aspect_ratio_mask": torch.ones(*lead, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(job.micro_batch, job.seq_len, job.images, tiles, dtype=torch.long),
    }
    return Images(tensors=made, width=width, height=height, tokens=0, fixed=True)


def _llama4(job: Job, network: Any) -> Images:
    """The smallest canvas of at most MOST_TILES squares that holds the image, and one square of the whole."""
    side = pair(network.config.vision_config.image_size)[0]
    width, height = _size(job, 1)
    across, down = math.ceil(width / side), math.ceil(height / side)
    shrunk = max(1.0, math.sqrt(across * down / MOST_TILES))
    tiles = max(1, int(across / shrunk)) * max(1, int(down / shrunk))
    tiles += tiles > 1
    pixels = _pixels(job.micro_batch * job.images * tiles, channels_of(network.config.vision_config), side, side)
    return Images(tensors={"pixel_values": pixels}, width=width, height=height)


def _in_a_list(job: Job, network: Any) -> Images:
    """Whole images, in a list of each row: Idefics 2's way without splitting."""
    vision = network.config.vision_config
    width, height = _size(job, pair(vision.patch_size)[0])
    most = pair(vision.image_size)[0]
    scale = min(1.0, most / max(width, height))
    unit = pair(vision.patch_size)[0]
    width, height = (max(1, int(part * scale) // unit) * unit for part in (width, height))
    pixels = _pixels(job.micro_batch, job.images, channels_of(vision), height, width)
    each = network.config.perceiver_config.resampler_n_latents
    return Images(tensors={"pixel_values": pixels}, width=width, height=height, tokens=each)


def _squares_in_a_list(job: Job, network: Any) -> Images:
    """Squares that cover the image and one of the whole, with a mask of the real ones: Granite-Docling's way."""
    vision = network.config.vision_config
    side = pair(vision.image_size)[0]
    width, height = _size(job, 1)
    tiles = math.ceil(width / side) * math.ceil(height / side)
    tiles += tiles > 1
    pixels = _pixels(job.micro_batch, job.images * tiles, channels_of(vision), side, side)
    real = torch.ones(job.micro_batch, job.images * tiles, dtype=torch.bool)
    return Images(tensors={"pixel_values": pixels, "pixel_attention_mask": real}, width=width, height=height)


def _crossed(job: Job, network: Any) -> Images:
    """Squares that text sees by cross-attention, under a mask: Idefics' way; they take no tokens."""
    vision = network.config.vision_config
    width, height = _fixed_size(job, vision.image_size)
    pixels = _pixels(job.micro_batch, job.images, channels_of(vision), height, width)
    seen = torch.ones(job.micro_batch, job.seq_len, job.images, dtype=torch.long)
    tensors = {"pixel_values": pixels, "image_attention_mask": seen}
    return Images(tensors=tensors, width=width, height=height, tokens=0, fixed=True)


def _at_fixed_places(job: Job, network: Any) -> Images:
    """One square, whose tokens stand where a mask says: Kosmos-2's way."""
    found = _squares(job, network)
    return replace(found, tokens=network.config.latent_query_num)


def _flat(job: Job, network: Any) -> Images:
    """A fixed number of patches, each with its row and column before its pixels: Pix2Struct's way."""
    config = network.config
    vision = vision_of(config)
    patches, side = FLAT_PATCHES[config.model_type], pair(getattr(vision, "patch_size", 16))[0]
    width, height = _size(job, side)
    shape = (job.micro_batch, patches, 2 + channels_of(vision) * side**2)
    tensors = {"flattened_patches": _pixels(*shape)}
    if config.model_type == "pix2struct":
        return Images(tensors=tensors, width=width, height=height, tokens=0)
    size = {"width": torch.full((job.micro_batch,), width), "height": torch.full((job.micro_batch,), height)}
    return Images(tensors=tensors | size, width=width, height=height, tokens=config.latent_query_num)


def _two_resolutions(job: Job, network: Any) -> Images:
    """Each image twice, for two towers: DeepSeek-VL hybrid's way."""
    found = _squares(job, network)
    vision = network.config.high_res_vision_config
    side = pair(getattr(vision, "image_size", None) or HIGH_RESOLUTION)[0]
    count = found.tensors["pixel_values"].shape[0]
    larger = {"high_res_pixel_values": _pixels(count, channels_of(vision), side, side)}
    return replace(found, tensors=found.tensors | larger)


def _rows_of_patches(job: Job, network: Any) -> Images:
    """All patches of all images in one list of rows, and rows and columns of each: Nemotron Omni's way."""
    vision = network.config.vision_config
    patch = pair(vision.patch_size)[0]
    width, height = _size(job, patch * 2)
    grid = torch.tensor([[height // patch, width // patch]] * (job.micro_batch * job.images))
    pixels = _pixels(int(grid.prod(-1).sum()), channels_of(vision) * patch**2)
    return Images(tensors={"pixel_values": pixels, "image_grid_hw": grid}, width=width, height=height)


def _merged_patches(job: Job, network: Any) -> Images:
    """A square of pixels for each token, and the grid of tokens of each image: Inkling 2's way."""
    vision = vision_of(network.config)
    side = pair(vision.patch_size)[0] * _merge(network.config, vision)
    width, height = _size(job, side)
    grid = torch.tensor([[1, height // side, width // side]] * (job.micro_batch * job.images))
    each = int(grid[0].prod())
    pixels = _pixels(len(grid) * each, side, side, channels_of(vision))
    return Images(tensors={"pixel_values": pixels, "image_grid_thw": grid}, width=width, height=height, tokens=each)


def _padded_patches(job: Job, network: Any) -> Images:
    """As many patches as fit into SOFT_TOKENS tokens, padded to them, with the place of each: Gemma 4's way."""
    vision = vision_of(network.config)
    merged = getattr(vision, "model_patch_size", None)
    pool = 1 if merged else vision.pooling_kernel_size
    patch = merged or vision.patch_size
    unit, most = patch * pool, SOFT_TOKENS * pool**2
    width, height = _size(job, unit)
    scale = min(1.0, math.sqrt(most * patch**2 / (width * height)))
    width, height = (max(1, int(part * scale) // unit) * unit for part in (width, height))
    across, down = width // patch, height // patch
    places = torch.full((most, 2), -1)
    places[: across * down] = torch.cartesian_prod(torch.arange(down), torch.arange(across)).flip(-1)
    count = job.micro_batch * job.images
    tensors = {
        "pixel_values": _pixels(count, most, channels_of(vision) * patch**2),
        "image_position_ids": places.expand(count, -1, -1).contiguous(),
    }
    return Images(tensors=tensors, width=width, height=height, tokens=across * down // pool**2)


def _is_naflex(config: Any) -> bool:
    return getattr(vision_of(config), "model_type", "") == "siglip2_vision_model"


def _flexible(job: Job, network: Any) -> Images:
    """Patches of an image of any shape, padded to a fixed number, with rows and columns of each: SigLIP 2's way."""
    config, vision = network.config, vision_of(network.config)
    shrinks = getattr(config, "downsample_factor", None) or 1
    most = NAFLEX_PATCHES if shrinks > 1 else vision.num_patches
    patch = pair(vision.patch_size)[0]
    width, height = _size(job, patch * shrinks)
    scale = min(1.0, math.sqrt(most * patch**2 / (width * height)))
    across, down = (max(1, int(part * scale) // (patch * shrinks)) * shrinks for part in (width, height))
    count = job.micro_batch * job.images
    tensors = {
        "pixel_values": _pixels(count, most, channels_of(vision) * patch**2),
        "pixel_attention_mask": (torch.arange(most) < across * down).long().expand(count, -1).contiguous(),
        "spatial_shapes": torch.tensor([[down, across]] * count),
    }
    each = across * down // shrinks**2
    return Images(tensors=tensors, width=across * patch, height=down * patch, tokens=each)


def _fuyu(job: Job, network: Any) -> Images:
    """Patches that enter the text model as they are."""
    config = network.config
    patch = config.patch_size
    width, height = _size(job, patch)
    each = (width // patch) * (height // patch)
    pixels = _pixels(job.micro_batch, job.images * each, channels_of(config) * patch**2)
    return Images(tensors={"pixel_values": pixels}, width=width, height=height, tokens=each)


def _tokens_per_image(job: Job, network: Any, images: Images) -> int:
    """How many tokens of the sequence one image takes."""
    if images.tokens is not None:
        return images.tokens
    if token_of(network.config) is None:
        return 0
    queries = getattr(network.config, "num_query_tokens", None)
    if queries is not None:  # BLIP-2's adapter, of which the text gets each query
        return int(queries)
    method = "get_image_features"
    if not hasattr(getattr(network, "model", network), method) and not hasattr(network, method):
        return 0
    rows = rows_of(job, network, method, lambda: _images(job, network).tensors, _selection(network))
    return rows // (job.micro_batch * job.images)


def _selection(network: Any) -> dict[str, Any]:
    """Which features are taken of the vision tower: the configuration's choice, which a forward would fill in."""
    names = ("vision_feature_layer", "vision_feature_layers", "vision_feature_select_strategy")
    asked = _asked(network)
    return {name: getattr(network.config, name) for name in names if name in asked and hasattr(network.config, name)}


def pair(size: Any) -> tuple[int, int]:
    """Height and width, of a number for both, a list or a dict."""
    if isinstance(size, dict):
        return size["height"], size["width"]
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


_WAYS: Final[dict[str, Callable[[Any, Any], Images]]] = {
    "deepseek_vl_hybrid": _two_resolutions,
    "fuyu": _fuyu,
    "granite_docling": _squares_in_a_list,
    "idefics": _crossed,
    "idefics2": _in_a_list,
    "idefics3": _tiles,
    "inkling2": _merged_patches,
    "kosmos-2": _at_fixed_places,
    "kosmos-2.5": _flat,
    "llama4": _llama4,
    "mllama": _tiles_with_aspect,
    "nemotron_h_omni": _rows_of_patches,
    "pix2struct": _flat,
    "smolvlm": _tiles,
}
"""Families whose images are not described by the names that their code asks for."""
